"""Our parts that SGLang asks for while it starts a scheduler: attention backend, pool sizes, a draft's graphs.

Each function is named by a row of :mod:`sglang_dsv4.seam.hooks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dsv4.seam import compat, live

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigResult, KVCacheConfigurator
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfigurator
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

logger = logging.getLogger(__name__)


def create_attention_backend(runner: ModelRunner) -> AttentionBackend:
    """The attention backend of a worker, with every kernel compiled that the model's forwards need."""
    from sglang.srt.runtime_context import get_parallel

    from sglang_dsv4.attention import comparison
    from sglang_dsv4.attention.backend import Dsv4AttentionBackend
    from sglang_dsv4.layers import finite
    from sglang_dsv4.layers.packed_experts import log_arrangement
    from sglang_dsv4.warmup.compile_ahead import compile_ahead

    log_arrangement(runner.model)
    backend, parallel = Dsv4AttentionBackend(runner), get_parallel()
    heads = runner.model_config.num_attention_heads // parallel.attn_tp_size
    compile_ahead(runner.model.dsv4_config, backend.token_to_kv_pool.geometry, heads, backend.device)
    file = comparison.file_of_rank(parallel.tp_rank)
    if file is not None and not runner.is_draft_worker:
        logger.warning("sglang_dsv4: every attention is computed twice and compared, see %s", file)
        comparison.install(backend, runner.model, file)
    if finite.is_on() and not runner.is_draft_worker:
        logger.warning("sglang_dsv4: every sublayer's output is checked (%s=on); this is slow", finite.VARIABLE)
        finite.install(runner.model, runner)
    return backend


def size_pools(
    original: Callable[[KVCacheConfigurator], MemoryPoolConfigurator], configurator: KVCacheConfigurator
) -> MemoryPoolConfigurator:
    """The object that computes pool sizes from memory: ours for DeepSeek-V4, else SGLang's."""
    if not compat.is_ours(configurator.model_config.hf_config.architectures):
        return original(configurator)
    from sglang_dsv4.cache.pool_configurator import Dsv4PoolConfigurator

    sizing = Dsv4PoolConfigurator(configurator)
    live.note_pool_sizing(sizing)
    return sizing


def reserve_admission_pages(
    result: KVCacheConfigResult, configurator: KVCacheConfigurator, **kwargs: Any
) -> KVCacheConfigResult:
    """SGLang's sizes; for DeepSeek-V4 they limit a request's length to what SGLang's scheduler admits."""
    if not compat.is_ours(configurator.model_config.hf_config.architectures):
        return result
    from sglang_dsv4.cache import pool_configurator

    return pool_configurator.reserve_admission_pages(result)


def record_prefills(result: None, runner: ModelRunner, **kwargs: Any) -> None:
    """Record CUDA graphs of prefills, if the model is ours and no draft."""
    if compat.is_ours(runner.model_config.hf_config.architectures) and not runner.is_draft_worker:
        from sglang_dsv4.warmup import prefill_graphs

        prefill_graphs.record_prefills(runner)


def capture_draft_extend(result: None, worker: EagleDraftWorker) -> None:
    """Capture a CUDA graph of an MTP draft's extend step, if its attention backend is ours."""
    from sglang_dsv4.attention.backend import Dsv4AttentionBackend
    from sglang_dsv4.warmup import cuda_graphs

    if isinstance(worker.draft_extend_attn_backend, Dsv4AttentionBackend):
        cuda_graphs.capture_draft_extend(worker)
