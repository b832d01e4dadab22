"""Counts of the indexer's scores and of the choice of entries."""

from __future__ import annotations

import math

from dsv4_kernels.indexer.gpu import CTAS_OF_FEW, FEW_TOKENS, PAGES_A_CTA, RUNS, RUNS_OF_FEW
from dsv4_kernels.indexer.topk import ENTRIES_A_ROUND, HELD
from dsv4_kernels.kv_layout import PAGE_ROWS
from step_model.hardware import L2_CLOCKS, Gpu
from step_model.launch import Launch
from step_model.products import ALONE_CLOCKS, BARRIER_CLOCKS, BESIDE_CLOCKS

HEADS, DIM, KEY_BYTES = 64, 128, 68
PAGE_INSTRUCTIONS, SCORE_INSTRUCTIONS = 861, 190
"""PTX instructions of a warp of the scores in decode, for a page and besides (emulated)."""
CTAS_A_MULTIPROCESSOR = 2
PAIR_ALU = 3.51
"""Clocks of a multiprocessor's integer pipes for a pair of token and key of a chunk, by `wgmma` (emulated)."""
PAIR_ISSUE = 5.42
"""Issue clocks for a pair by `tcgen05` (emulated)."""
CHOICE_ISSUE, CHOICE_ENTRY_ISSUE = 2116, 0.514
"""Issue clocks of a multiprocessor for the choice of one token, and for each of its entries (emulated)."""
CHOICE_INSTRUCTIONS = 570
"""PTX instructions of a warp of the choice, one after the other."""
PASSES = 4


def few_tokens(gpu: Gpu) -> int:
    """Return the most tokens of a call that gets the kernels for few tokens."""
    return FEW_TOKENS["sm90" if gpu.is_hopper else "sm100"]


def scores(name: str, tokens: int, entries: int, room: int, gpu: Gpu, of_few: bool = True) -> Launch:
    """Return the counts of the scores in decode, by `mma.sync` (kernels/indexer/scores.py).

    Args:
        name: of the launch.
        tokens: T.
        entries: that a token sees.
        room: entries for which the page table has room.
        gpu: its multiprocessors.
        of_few: whether few tokens have a kernel of their own; they had none before 2026-11-27.
    """
    pages, most = -(-entries // PAGE_ROWS), -(-room // PAGE_ROWS)
    if of_few and tokens <= few_tokens(gpu):
        runs = min(most, max(RUNS_OF_FEW, CTAS_OF_FEW // tokens))
        of_cta, busy = -(-pages // runs), min(pages, runs)
    else:
        of_cta = max(PAGES_A_CTA, -(-most // RUNS))
        busy = -(-pages // of_cta)
        of_cta = min(of_cta, pages)
    ctas = tokens * busy
    rounds = -(-ctas // (gpu.multiprocessors * CTAS_A_MULTIPROCESSOR))
    of_multiprocessor = -(-ctas // gpu.multiprocessors)
    num_bytes = tokens * entries * KEY_BYTES
    one_after_the_other = rounds * of_cta
    return Launch(
        name,
        ctas=min(ctas, gpu.multiprocessors),
        memory=num_bytes,
        waves=ctas / gpu.multiprocessors,
        l2=num_bytes + ctas * HEADS * DIM * 2,
        clocks={"issue": of_multiprocessor * of_cta * PAGE_INSTRUCTIONS},
        chain=(one_after_the_other - 1) * L2_CLOCKS,
        instructions=SCORE_INSTRUCTIONS + PAGE_INSTRUCTIONS,
        from_memory=1,
        from_l2=3,
    )


def alu_beside_products(alu: float, tensor: float) -> float:
    """Return the clocks of integer instructions that take BESIDE_CLOCKS while `wgmma` runs and ALONE_CLOCKS otherwise.

    The tensor core is busy for `tensor` of these clocks: x = alu (1 + (BESIDE / ALONE - 1) tensor / x).
    """
    more = BESIDE_CLOCKS / ALONE_CLOCKS - 1
    return (alu + math.sqrt(alu * alu + 4 * alu * more * tensor)) / 2


def scores_of_chunk(name: str, pairs: float, gpu: Gpu) -> Launch:
    """Return the counts of the scores of a chunk with so many pairs of token and visible entry.

    Neighbouring tokens share the expanded keys (kernels/indexer/prefill_scores.py, prefill_tcgen05.py).
    """
    of_sm = pairs / gpu.multiprocessors
    tensor = 2 * HEADS * DIM / gpu.bf16_flops_clock
    busy = {"alu": alu_beside_products(PAIR_ALU, tensor)} if gpu.is_hopper else {"issue": PAIR_ISSUE}
    return Launch(
        name,
        ctas=gpu.multiprocessors,
        memory=4 * pairs,
        l2=4 * pairs,
        clocks={unit: of_sm * clocks for unit, clocks in {"tensor": tensor, **busy}.items()},
        from_l2=3,
        waves=4,
    )


def choice(name: str, tokens: int, entries: float, gpu: Gpu) -> Launch:
    """Return the counts of the choice of a token's entries by one CTA (kernels/indexer/topk.py)."""
    rounds = -(-entries // ENTRIES_A_ROUND)
    held = tokens <= few_tokens(gpu) and entries <= HELD
    loads = rounds * (1 if held else PASSES)
    of_multiprocessor = -(-tokens // gpu.multiprocessors)
    return Launch(
        name,
        ctas=min(tokens, gpu.multiprocessors),
        l2=tokens * entries * 4 * (1 if held else PASSES),
        clocks={"issue": of_multiprocessor * (CHOICE_ISSUE + CHOICE_ENTRY_ISSUE * entries)},
        chain=loads * L2_CLOCKS + 3 * PASSES * BARRIER_CLOCKS,
        instructions=CHOICE_INSTRUCTIONS,
        from_memory=0,
        from_l2=2,
        waves=tokens / gpu.multiprocessors,
    )
