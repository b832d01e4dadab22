"""Predictions for kernels that have not been measured on an H200 in their present form, to test the model later.

Each name begins with the benchmark that measures it.
"""

from __future__ import annotations

from collections.abc import Iterator

from lib.experts_inputs import Model

from dsv4_kernels.hyper_connection.plan import PRE_ROWS, Plan
from dsv4_kernels.moe.sm90.plan import FEW
from step_model import attention, experts, index, products, rows
from step_model.hardware import H200
from step_model.launch import Launch, time_us

FLASH_ON_FOUR = Model(256, 4096, 512)


def _launches() -> Iterator[tuple[str, list[Launch], bool]]:
    """Yield (name, launches of a call, whether they begin early)."""
    slots = experts.slots_of_experts(256, 1, "uniform")
    calls = experts.calls(FLASH_ON_FOUR, slots, 1, H200, codes=True, shape=FEW)
    yield "bench_experts: flash-tp4-uniform-t1, ours_by_few_codes", calls, True
    yield "bench_hyper_connection: boundary of 256 tokens", [rows.boundary("", 256, 4096, H200)], True
    wide = Plan(4, 4096, PRE_ROWS, True, one_cta=True)
    for tokens in (32, 60):
        launches = [rows.boundary("", tokens, 4096, H200, wide)]
        yield (
            f"bench_hyper_connection: boundary of {tokens} tokens, groups of 4, one CTA a multiprocessor",
            launches,
            True,
        )
    for tokens in (1, 64, 8192):
        launches = [rows.row_kernel("compress_store", tokens, H200)]
        yield f"bench_compressor: CSA, {tokens} tokens", launches, True
    for tokens in (1, 4, 16):
        launches = [attention.few_heads("", "csa512", 4600, tokens, 16, H200)]
        yield f"bench_few_tokens: csa, {tokens} tokens, few", launches, True
    for tokens in (32, 64, 128):
        launches = [index.scores("", tokens, 1150, 32_768, H200), index.choice("", tokens, 1150, H200)]
        yield f"bench_few_tokens: index, {tokens} tokens, many", launches, True
    for layer, n, k in (("wqkv_a", 1536, 4096), ("wq_b", 32_768, 1024), ("wo_b", 4096, 8192)):
        yield f"DeepGEMM: {layer}, 8,192 tokens", [products.deepgemm_hopper("", 8192, n, k, H200)], False


def predictions() -> dict[str, float]:
    """Return microseconds of a call by name."""
    return {name: round(sum(time_us(x, H200, early) for x in launches), 1) for name, launches, early in _launches()}
