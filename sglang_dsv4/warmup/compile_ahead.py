"""The kernels of a model's forward, compiled before the server is ready.

Recording CUDA graphs compiles what a decode, verify or draft step runs. What only prefills run, or a server without
graphs, would be compiled while the first requests wait. Kernels that are on disk already take milliseconds; those that
are not are compiled by several processes (`dsv4_kernels.host.compile_pool`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch
from sglang.srt.runtime_context import get_parallel

from dsv4_kernels import registry
from dsv4_kernels.host import compile_cache
from sglang_dsv4.attention import implementation
from sglang_dsv4.attention.implementation import chosen_implementation
from sglang_dsv4.attention.metadata import step_layout
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.layers import fp8_linear, grouped_projection, packed_experts, sequence_parallel
from sglang_dsv4.layers.linear import quantises_once_on
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO
from sglang_dsv4.warmup import startup_times as startup

logger = logging.getLogger(__name__)

SECONDS_A_LINE = 5.0
"""Between lines of progress."""

Compile = Callable[[], object]


def compile_ahead(config: Config, geometry: PoolGeometry, heads: int, device: torch.device) -> None:
    """Compile all kernels of ours that serve this model on this device; nothing where references do.

    Args:
        config: the model's.
        geometry: of the pools.
        heads: of this rank.
        device: of the model.

    Raises:
        ValueError: a dimension that a kernel is not made for; the message names it and the implementation to choose.
    """
    with startup.phase("kernels"):
        _compile_ahead(config, geometry, heads, device)


def _compile_ahead(config: Config, geometry: PoolGeometry, heads: int, device: torch.device) -> None:
    begin = time.perf_counter()
    known, todo = len(compile_cache.origins()), kernels(config, geometry, device)
    by_workers = _fill_cache(todo, geometry, heads, device)
    implementation.compile_ahead(geometry, heads, device)
    said = time.perf_counter()
    for done, (op, compile) in enumerate(todo, 1):
        compile()
        if time.perf_counter() - said > SECONDS_A_LINE:
            said = time.perf_counter()
            _say(done, len(todo), op, said - begin)
    made = compile_cache.origins()[known:]
    count = max(len(made), len(todo))  # of a second worker of this process everything was in memory
    if count:
        compiled = by_workers + sum(origin.source == "compiled" for origin in made)
        seconds = time.perf_counter() - begin
        if made:
            startup.note("kernels", f"{compiled} compiled, {count - compiled} from disk")
        logger.info("all %d kernels are ready after %.1f s, %d of them compiled", count, seconds, compiled)


def _fill_cache(todo: list[tuple[str, Compile]], geometry: PoolGeometry, heads: int, device: torch.device) -> int:
    """How many kernels workers have compiled; the attention's, which take longest, come first."""
    name = chosen_implementation(device, geometry.dtype, geometry.row_dim).name
    if name not in ("sm90", "sm100"):
        return 0
    from dsv4_kernels.host import compile_pool
    from dsv4_kernels.host.arch import architecture

    of_attention = [("sparse_attention", one) for one in implementation.missing_kernels(geometry, heads, device)]
    return compile_pool.fill([*of_attention, *todo], architecture(name, device), _say)


def _say(done: int, count: int, op: str, seconds: float) -> None:
    logger.info("kernels: %d of %d ready (%s), %.1f s", done, count, op, seconds)


def kernels(config: Config, geometry: PoolGeometry, device: torch.device) -> list[tuple[str, Compile]]:
    """Each kernel beside the attention's, by the op that it belongs to, and what compiles it."""
    found: list[tuple[str, Compile]] = []
    for op, of_arch in _KERNELS.items():
        name = registry.chosen(op, device, geometry.dtype).name
        if name in ("sm90", "sm100"):
            from dsv4_kernels.host.arch import architecture

            arch = architecture(name, device)
            found += [(op, compile) for compile in of_arch(config, geometry, arch)]
    if device.type == "cuda" and packed_experts.is_chosen():
        found += [("experts", compile) for compile in packed_experts.kernels(config, get_parallel().tp_size)]
    if device.type == "cuda" and torch.cuda.is_available():
        generation = torch.cuda.get_device_capability(device)[0]
        kept = grouped_projection.kept(config, generation, geometry.dtype)
        found += [("grouped_linear_fp8_weight", compile) for compile in grouped_projection.kernels(kept)]
        if fp8_linear.is_on(quantises_once_on(generation, config)):
            found += [("linear_fp8", compile) for compile in fp8_linear.kernels()]
    return found


def _products(fp32: bool, config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    from dsv4_kernels.linear import gpu

    return [partial(gpu.compile, gpu.configuration(tile, fp32), arch) for tile in gpu.tiles(arch)]


def _quantises(config: Config, arch: str) -> bool:
    return quantises_once_on(9 if arch == "sm_90a" else 10, config)


def _compress_store(config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    from dsv4_kernels.compressor import gpu

    of_csa = (geometry.row_dim, geometry.index_dim)
    dims = {ratio: of_csa if ratio == CSA_RATIO else of_csa[:1] for ratio in geometry.compressed}
    return [partial(gpu.compile, kernel, dims[r], r, arch) for r in dims for kernel in ("entries", "keep")]


def _hyper_connection(config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    from dsv4_kernels.hyper_connection import gpu

    plans = gpu.plans(config.hidden_size, _quantises(config, arch))
    if sequence_parallel.may_be():  # a rank's own rows are quantised once they are gathered
        plans += gpu.plans(config.hidden_size, False, fewest=sequence_parallel.FEWEST_TOKENS // get_parallel().tp_size)
    return [partial(gpu.compile, plan, arch) for plan in dict.fromkeys(plans)]


def _index_query(config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    from dsv4_kernels.indexer import query

    return [partial(query.compile, arch, config.qat.indexer_fp4)] if CSA_RATIO in geometry.compressed else []


def _index_topk(config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    if CSA_RATIO not in geometry.compressed:
        return []
    from dsv4_kernels.indexer import gpu, topk

    scores = [partial(kernel.compile, arch, config.index_n_heads) for kernel in gpu.score_kernels(arch)]
    return [*scores, partial(topk.compile, arch)]


def _norm_rope_store(config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    from dsv4_kernels.norm_rope_store import gpu

    return [partial(gpu.compile, heads_a_warp, arch) for heads_a_warp in (1, gpu.HEADS_A_WARP)]


def _is_draft(geometry: PoolGeometry) -> bool:
    """Only drafts have no layer with entries."""
    return not geometry.compressed


def _rms_norm(is_fp8: bool, config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    from dsv4_kernels.norm import gpu

    if is_fp8 != _quantises(config, arch):
        return []
    # A draft also norms what it gets of the target.
    dims = (config.q_lora_rank, config.hidden_size) if _is_draft(geometry) else (config.q_lora_rank,)
    return [partial(gpu.compile, gpu.Configuration(dim, "fp32", is_fp8), arch) for dim in dims]


def _rope(config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    from dsv4_kernels.rope import gpu

    return [partial(gpu.compile, gpu.HEADS_A_THREAD, arch)]


def _quant(config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    from dsv4_kernels.quant import gpu

    return [partial(gpu.compile, arch)]


def _swiglu(is_fp8: bool, config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    from dsv4_kernels.moe import gpu

    return [partial(gpu.compile, is_fp8, arch)]


def _route_topk(config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    from dsv4_kernels.router import gpu

    configuration = gpu.Configuration(config.num_experts_per_tok, config.n_routed_experts)
    return [partial(gpu.compile, configuration, arch)]


def _route_hash(config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    from dsv4_kernels.router import gpu

    configuration = gpu.Configuration(config.num_experts_per_tok, 0, wide_ids=True)
    return [partial(gpu.compile, configuration, arch)] if config.num_hash_layers else []


def _step_mapping(config: Config, geometry: PoolGeometry, arch: str) -> list[Compile]:
    from dsv4_kernels.step_mapping import gpu

    widths = {1, max(1, geometry.draft_tokens)}
    found = [partial(gpu.compile, arch, step_layout(geometry), width) for width in sorted(widths)]
    if _is_draft(geometry) and config.dspark is not None:
        found.append(partial(gpu.compile, arch, step_layout(geometry, blocks=True), config.dspark.block_size))
    return found


_KERNELS: dict[str, Callable[[Config, PoolGeometry, str], list[Compile]]] = {
    "apply_rope_in_place": _rope,
    "compress_store": _compress_store,
    "fp8_quantise": _quant,
    "fused_swiglu": partial(_swiglu, False),
    "grouped_linear": partial(_products, False),
    "hc_boundary": _hyper_connection,
    "index_query": _index_query,
    "index_topk": _index_topk,
    "linear_fp32": partial(_products, True),
    "norm_rope_store": _norm_rope_store,
    "rms_norm": partial(_rms_norm, False),
    "rms_norm_fp8": partial(_rms_norm, True),
    "route_hash_logits": _route_hash,
    "route_topk_logits": _route_topk,
    "step_mapping": _step_mapping,
    "swiglu_fp8": partial(_swiglu, True),
}
