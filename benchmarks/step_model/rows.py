"""Counts of row kernels, of boundaries between sublayers, and of sums over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lib.experts_inputs import CHOSEN

from dsv4_kernels.host.mailboxes import CLUSTER
from dsv4_kernels.hyper_connection import choice
from dsv4_kernels.hyper_connection.plan import PRE_ROWS, STREAMS, Plan
from step_model.attention import CLUSTERS, REMOTE_CLOCKS
from step_model.hardware import L2_CLOCKS, Gpu
from step_model.launch import Launch


@dataclass(frozen=True)
class RowKernel:
    """Counts of a row kernel for a token."""

    instructions: float
    """PTX instructions of a warp that has a whole token or row, as the emulator executes them."""
    loads: int
    """Loads from L2 one after the other."""
    num_bytes: float
    """Bytes read and written a token, with V4-Flash's widths."""


ROW_KERNELS = {
    "rms_norm_fp8": RowKernel(900, 1, 7.2e3),
    "index_query": RowKernel(650, 2, 12.4e3),
    "norm_rope_store": RowKernel(440, 2, 24e3),
    "apply_rope_in_place": RowKernel(644, 2, 2.4e3),
    "fp8_quantise": RowKernel(167, 1, 12.4e3),
    "route_topk_logits": RowKernel(1027, 1, 2.1e3),
    "swiglu_fp8": RowKernel(613, 1, 10.3e3),
    "compress_store": RowKernel(900, 3, 24e3),
    "fused_swiglu": RowKernel(491, 1, 24.6e3),
}
CLOCKS_TO_SUMS = {1: 4086, 2: 4327, 4: 4845, 8: 7389}
"""Clocks of a warp from the wait for the launch before to the wait for a cluster's sums, by the tokens of its group:
from the stalls and scoreboards that the machine code for sm_90a names (V4-Flash), without latencies of L2."""
INTERLEAVED_CLOCKS_TO_SUMS = {1: 2745, 2: 2945, 4: 3356, 8: 4110}
"""These clocks if products of all streams are interleaved, for sm_100a."""
TEAM_CLOCKS_TO_SUMS = 7200
"""These clocks of a group of eight tokens of a team, for both GPUs."""
TEAM_LOADS = 3
"""Loads of a team's group one after the other: registers do not suffice to have all of them on their way, so that the
compiler moves arithmetic between them (docs/log/indexer_and_boundary.md, 2026-11-25)."""
AFTER_SUMS_CLOCKS = 1500
"""Clocks from a cluster's sums to the end of a group in the warps that have channels."""
L2_BYTES = 50e6
"""Bytes of rows from which on the launch before has left them in memory: an H200's L2, also on Blackwell."""
BALANCE_CLOCKS = 3515
"""Clocks from a cluster's sums to the end of the warp that balances comb: 760, and 19 times 145 for both divisions of
an iteration, 64 of which are eight reciprocals."""
EXPERTS_INSTRUCTIONS = {1: 401, 2: 573, 4: 933, 8: 1652}
"""PTX instructions that a sum over a token's six experts adds to a warp of a boundary, by the tokens of its group:
emulated, with V4-Flash's width."""
MOST_BYTES = {2: 8 << 20, 4: 4 << 20, 8: 1 << 20}
"""The largest part that our kernel sums, by ranks (sglang_dsv4/layers/peer_sums.py); NCCL sums larger ones."""
RING_CTAS = 32


def row_kernel(name: str, tokens: int, gpu: Gpu, widths: float = 1.0) -> Launch:
    """Return the counts of a row kernel; `widths` multiplies its bytes."""
    kernel = ROW_KERNELS[name]
    num_bytes = kernel.num_bytes * tokens * widths
    return Launch(
        name,
        ctas=min(gpu.multiprocessors, -(-tokens // 2)),
        l2=num_bytes,
        instructions=kernel.instructions,
        from_memory=0,
        from_l2=kernel.loads,
        waves=tokens,
    )


def boundary(
    name: str,
    tokens: int,
    dim: int,
    gpu: Gpu,
    plan: Plan | None = None,
    at_once: int = 0,
) -> Launch:
    """Return the counts of `hc_boundary` (kernels/hyper_connection).

    A cluster of eight CTAs reads fn, from memory once and from L2 for every group of tokens; clusters beyond those that
    find a multiprocessor for each CTA share multiprocessors. With many tokens persistent clusters keep fn.

    Args:
        name: of the launch.
        tokens, dim: of the call.
        gpu: rates.
        plan: None for the kernel's choice.
        at_once: clusters that run at once, one CTA a multiprocessor; 0 for an H200's number, also on Blackwell.
    """
    at_once = at_once or CLUSTERS[CLUSTER]
    form = (dim, PRE_ROWS, True, False, True)
    plan = plan or choice.chosen(tokens, *form, None if gpu.is_hopper else at_once)
    groups = -(-tokens // plan.tokens)
    keeps = plan.teams > 1
    rounds = -(-groups // at_once)
    fn = PRE_ROWS * STREAMS * dim * 4
    rows = tokens * dim * (2 + 2 * STREAMS * 2 + 3)
    reads = min(groups, at_once) if keeps else groups
    of_fn, of_rows = (1 if keeps else rounds) * fn / CLUSTER, rows / (min(groups, at_once) * CLUSTER)
    to_sums = INTERLEAVED_CLOCKS_TO_SUMS if plan.side_by_side > 1 else CLOCKS_TO_SUMS
    from_memory = rows > L2_BYTES
    latency = gpu.fitted.dram_us * gpu.clocks_us if from_memory else L2_CLOCKS
    of_group = to_sums[plan.tokens] + REMOTE_CLOCKS + BALANCE_CLOCKS
    of_team = TEAM_CLOCKS_TO_SUMS + 2 * REMOTE_CLOCKS + AFTER_SUMS_CLOCKS + TEAM_LOADS * latency
    again = rounds - 1 if plan.ctas == 1 else 0  # rounds in which a whole CTA follows another one
    first_fn = (0.5 if keeps else plan.stages / STREAMS) * fn / CLUSTER
    return Launch(
        name,
        ctas=min(groups * CLUSTER, gpu.multiprocessors),
        memory=fn + (rows if from_memory else 0),
        l2=reads * fn + rows,
        busiest=of_fn + of_rows,
        clocks={"groups": -(-groups // (at_once * plan.teams)) * of_team} if keeps else {},
        chain=0.0 if keeps else of_group + again * (of_group + latency),
        from_memory=1,
        from_l2=0 if keeps else 1,
        ahead=first_fn / (of_fn + of_rows),
        waves=rounds,
    )


def sum_over_ranks(name: str, tokens: int, dim: int, ranks: int, gpu: Gpu) -> Launch:
    """Return the counts of a sum of rows in bf16: `all_reduce` (kernels/all_reduce), or NCCL's ring for large ones."""
    num_bytes = tokens * dim * 2
    if num_bytes > MOST_BYTES[ranks]:
        moved = num_bytes * 2 * (ranks - 1) / ranks
        return Launch(name, ctas=RING_CTAS, l2=2 * moved, crossings=2 * (ranks - 1), link=moved, from_memory=0)
    return Launch(
        name,
        l2=num_bytes * (2 * ranks + 2),
        instructions=150,
        from_memory=0,
        from_l2=1,
        crossings=1,
        link=num_bytes * (ranks - 1),
        ctas=min(128, -(-num_bytes // 2048)),
    )


def boundary_of_parts(
    name: str,
    tokens: int,
    dim: int,
    ranks: int,
    gpu: Gpu,
    plan: Plan | None = None,
    at_once: int = 0,
    in_turn: bool = False,
) -> Launch:
    """Return the counts of `hc_boundary_of_parts`: a boundary that begins with the sum of the ranks' parts.

    Args:
        name, tokens, dim, gpu, plan, at_once: as for `boundary`.
        ranks: that sum.
        in_turn: whether the kernel is that of before 2026-11-28, in which more loads from L2 were one after the other:
            the number of the buffer before the part, and again before the sums of a cluster; and every run's polls.
    """
    alone = boundary(name, tokens, dim, gpu, plan, at_once)
    parts = sum_over_ranks(name, tokens, dim, ranks, gpu)
    if in_turn:
        plan = plan or choice.chosen(tokens, dim, PRE_ROWS, True, False, True)
        alone = replace(alone, from_l2=alone.from_l2 + 1 + plan.runs)
    return replace(alone, crossings=1, link=parts.link, waits_for_link=True, l2=alone.l2 + parts.l2)


def summing_experts(boundary: Launch, tokens: int, dim: int, gpu: Gpu) -> Launch:
    """Return the counts of a boundary of few tokens that also sums over experts (kernels/hyper_connection/experts.py).

    It reads a token's list, and then seven rows in place of one: of its experts and of the shared expert.
    """
    plan = choice.chosen(tokens, dim, PRE_ROWS, True, False, True, None if gpu.is_hopper else CLUSTERS[CLUSTER])
    rows = tokens * CHOSEN * dim * 2
    return replace(
        boundary,
        l2=boundary.l2 + rows,
        busiest=boundary.busiest + rows / boundary.ctas,
        instructions=boundary.instructions + EXPERTS_INSTRUCTIONS[plan.tokens],
        from_l2=boundary.from_l2 + 1,
    )
