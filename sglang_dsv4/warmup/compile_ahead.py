"""Compilation of the kernels of a model's forwards, before the server is ready.

Recording CUDA graphs compiles the kernels of decode, verify and draft steps. Kernels that only prefills run, or all
kernels of a server without graphs, would otherwise be compiled while the first requests wait. The kernels are listed by
`dsv4_kernels.registry.compile_jobs`. One that is on disk takes milliseconds to load; missing ones are compiled by
several processes (`dsv4_kernels.host.compile_pool`).
"""

from __future__ import annotations

import logging
import time

import torch

from dsv4_kernels import registry
from dsv4_kernels.host import compile_cache, compile_pool
from dsv4_kernels.host.arch import ARCHITECTURES, architecture
from dsv4_kernels.model_shapes import ModelShapes
from sglang_dsv4.attention import implementation
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.warmup import startup_times
from sglang_dsv4.warmup.model_shapes import model_shapes

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0
"""Time between two log lines on progress."""


def compile_ahead(config: Config, geometry: PoolGeometry, heads: int, device: torch.device) -> None:
    """Compile all kernels that serve this model on this device; an op that its reference serves has none.

    Args:
        config: the model's.
        geometry: of the pools.
        heads: query heads of this rank.
        device: of the model.

    Raises:
        ValueError: a dimension that a kernel is not made for; the message names it and the implementation to choose.
    """
    with startup_times.phase("kernels"):
        _compile_ahead(config, geometry, heads, device)


def _compile_ahead(config: Config, geometry: PoolGeometry, heads: int, device: torch.device) -> None:
    begin = time.perf_counter()
    known, model = len(compile_cache.origins()), model_shapes(config, geometry, heads, device)
    jobs = registry.compile_jobs(model)
    by_workers = _fill_cache(jobs, model)
    implementation.make_first_calls(model.attention)
    logged = time.perf_counter()
    for done, (op, job) in enumerate(jobs, 1):
        job()
        if time.perf_counter() - logged > PROGRESS_SECONDS:
            logged = time.perf_counter()
            _log_progress(done, len(jobs), op, logged - begin)
    made = compile_cache.origins()[known:]
    count = max(len(made), len(jobs))  # a second worker of this process finds all kernels in memory
    if count:
        compiled = by_workers + sum(origin.source == "compiled" for origin in made)
        seconds = time.perf_counter() - begin
        if made:
            startup_times.note("kernels", f"{compiled} compiled, {count - compiled} from disk")
        logger.info("all %d kernels are ready after %.1f s, %d of them compiled", count, seconds, compiled)


def _fill_cache(jobs: list[tuple[str, compile_pool.Compile]], model: ModelShapes) -> int:
    """The number of kernels that worker processes have compiled; the attention's, which take longest, come first."""
    shapes = model.attention
    name = registry.chosen("sparse_attention", shapes.device, shapes.dtype, shapes.impl).name
    if name not in ARCHITECTURES:
        return 0
    attention_first = sorted(jobs, key=lambda job: job[0] != "sparse_attention")
    return compile_pool.fill(attention_first, architecture(name, shapes.device), _log_progress)


def _log_progress(done: int, count: int, op: str, seconds: float) -> None:
    logger.info("kernels: %d of %d ready (%s), %.1f s", done, count, op, seconds)
