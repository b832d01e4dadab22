"""Sparse attention on Blackwell (sm_100a): one CTA for up to 64 heads, a pair of CTAs for up to 128.

A work item is (query token, part of the token's keys). Persistent CTAs, or pairs, take items in order; keys come in
tiles of 64, window rows first, then entries. Warps of a CTA, and what they wait for:

    GATHER (2 x 4 warps, alternate tiles)  rows from global memory to registers, dequantised into a KV stage in bf16
        waits pv_done[stage] (the tile that used the stage before is through), arrives at full[stage]
    MMA (1 warp, one thread, first CTA)    S = Q K^T, O += P V, for the whole pair
        waits q_ready once an item, full[stage] of all CTAs before S, p_ready[buffer] before P V;
        commits s_ready[buffer] and pv_done[stage] in all CTAs
    SOFTMAX (4 warps)                      Q into tensor memory; P = exp2(S - m); rescales O when a row's maximum has
        grown by more than RESCALE_LOG2; epilogue: sink, normalisation, output or partial result, merge of parts
        waits s_ready[buffer], full[stage] (key mask), pv_done of the tile two before (P's buffer) and, to touch O, of
        the tile before

Either kind of product uses all 128 lanes of tensor memory for a CTA's 64 rows: columns [0, N/2) lie in lanes 0-63 and
[N/2, N) in lanes 64-127, and A in tensor memory is read from the lanes that are written. One CTA does it with
`tcgen05.mma.ws` at M = 64, a pair with `cta_group::2` at M = 128, where each CTA also holds one of the halves of B.

S = Q K^T runs as one product with N = 128 and half of the channels: lanes 0-63 hold Q[:, 0:256] and meet the keys'
channels 0-255 (rows 0-63 of B), lanes 64-127 hold Q[:, 256:512] and meet channels 256-511 (rows 64-127 of B). The
softmax adds the two halves of S. So Q takes 128 columns instead of 256, and everything fits into tensor memory; and in
a pair each CTA holds 256 channels of every key, which are its half of B in both products: no key is gathered,
dequantised or read by the tensor core twice.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.experimental import primitives as prims

from dsv4_kernels.compile_cache import load_or_compile
from dsv4_kernels.kv_layout import ROW_DIM, RowFormat
from dsv4_kernels.sparse_attention.addresses import address, row_bytes, row_stride
from dsv4_kernels.sparse_attention.problem import Problem
from dsv4_kernels.sparse_attention.scratch import NUM_COUNTERS, Scratch
from dsv4_kernels.sparse_attention.sm100.gather import gather
from dsv4_kernels.sparse_attention.sm100.plan import (
    HALF_DIM,
    HEADS,
    LOG2_E,
    MMA_K,
    P_BYTES,
    STEPS_PER_BLOCK,
    SWIZZLE_ROW_BYTES,
    THREADS,
    TILE_KEYS,
    WARPS_OF_GROUP,
    Arguments,
    Barrier,
    Plan,
    Smem,
    Tmem,
    Warp,
    cta_rank,
    first_and_stride,
    item_of,
    tmem_columns,
    typed,
    wait,
    wait_for_tile,
)
from dsv4_kernels.sparse_attention.sm100.softmax import RowState, softmax
from dsv4_kernels.sparse_attention.split import STEP_KEYS


@dataclass(frozen=True)
class Config:
    """What a compiled kernel is specialised for."""

    row_format: RowFormat
    can_split: bool
    """Tokens may have several parts: partial results go through global memory and are merged."""
    plan: Plan
    """One CTA for up to 64 heads, a pair for more."""


# ---- MMA warp


@cute.jit
def multiply(
    a: Arguments, smem: cutlass.Pointer, barriers: cutlass.Pointer, tmem: prims.TmemAddr, plan: cutlass.Constexpr
) -> None:
    """One thread issues S of tile t + 1 before P V of tile t, so that the softmax of t hides behind it."""
    bf16 = cutlass.BFloat16
    rows = HEADS * plan.ctas
    scores = prims.Tcgen05InstrDesc.build(c_dtype=Float32, a_dtype=bf16, b_dtype=bf16, n_dim=2 * TILE_KEYS, m_dim=rows)
    values = prims.Tcgen05InstrDesc.build(
        c_dtype=Float32, a_dtype=bf16, b_dtype=bf16, b_major=1, n_dim=HALF_DIM, m_dim=rows
    )
    first, stride = first_and_stride(plan)
    before = Int32(0)
    items = Int32(0)
    for index in cutlass.range(first, a.num_items, stride):
        item = item_of(index, a, plan)
        if item.num_tiles > 0:
            wait(barriers, Int32(Barrier.Q_READY), items & 1)
            prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
            items = items + 1
            for tile in cutlass.range(item.num_tiles + 1):
                if tile < item.num_tiles:
                    multiply_scores(smem, barriers, tmem, before + tile, scores, plan)
                if tile > 0:
                    multiply_values(smem, barriers, tmem, before + tile - 1, tile > 1, values, plan)
        before = before + item.num_tiles


@cute.jit
def multiply_scores(
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    count: Int32,
    idesc: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """S[count % 2] = Q K^T as two summands (see the module's docstring).

    The softmax has read this buffer's last scores: it said so with p_ready, for which P V of that tile waited.
    """
    wait_for_tile(barriers, Barrier.FULL if plan.ctas == 1 else Barrier.ALL_FULL, count, plan)
    keys = swizzled(smem + (Smem.KV + count % plan.stages * plan.stage_bytes), leading_bytes=16)
    out = tmem_columns(tmem, Int32(0), Tmem.S + count % 2 * Tmem.S_COLUMNS, Float32)
    for step in cutlass.range_constexpr(HALF_DIM // MMA_K):
        block, step_of_block = step // STEPS_PER_BLOCK, step % STEPS_PER_BLOCK
        query = tmem_columns(tmem, Int32(0), Tmem.Q + step * MMA_K // 2, cutlass.BFloat16)
        key = keys.advance_start_address(plan.block_offset(block) + step_of_block * MMA_K * 2)
        mma(out, query, key, idesc, step > 0, plan)
    commit(barriers + (Barrier.S_READY + count % 2), plan)


@cute.jit
def multiply_values(
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    count: Int32,
    accumulate: Boolean,
    idesc: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """O += P V, two products for half of O's columns each; `accumulate` is False for an item's first tile."""
    wait(barriers, Barrier.P_READY + count % 2, count // 2 & 1)
    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
    weights = swizzled(smem + (Smem.P + count % 2 * P_BYTES), leading_bytes=16)
    stage = smem + (Smem.KV + count % plan.stages * plan.stage_bytes)
    for product in cutlass.range_constexpr(2):
        # Blocks of 64 channels at equal distances; within a block 8 keys every kilobyte.
        begin = plan.block_offset(plan.first_block_of_out(product))
        keys = swizzled(stage + begin, leading_bytes=plan.block_offset(1))
        out = tmem_columns(tmem, Int32(0), Tmem.O + product * (HALF_DIM // 2), Float32)
        for step in cutlass.range_constexpr(TILE_KEYS // MMA_K):
            weight = weights.advance_start_address(step * MMA_K * 2)
            key = keys.advance_start_address(step * MMA_K * SWIZZLE_ROW_BYTES)
            mma(out, weight, key, idesc, accumulate or step > 0, plan)
    commit(barriers + (Barrier.PV_DONE + count % plan.stages), plan)


def mma(
    out: cutlass.Array,
    a: cutlass.Array | prims.Tcgen05SmemDesc,
    b: prims.Tcgen05SmemDesc,
    idesc: Int32,
    accumulate: Boolean,
    plan: Plan,
) -> None:
    """The product of one CTA, or of a pair; in both every lane of tensor memory takes part."""
    kind = prims.Tcgen05MMAKind.F16
    if plan.ctas == 1:
        prims.tcgen05_mma_ws(kind, out, a, b, idesc, accumulate)
    else:
        prims.tcgen05_mma(kind, prims.CTAGroup.CTA_2, out, a, b, idesc, accumulate)


def commit(barrier: cutlass.Pointer, plan: Plan) -> None:
    """Arrives in every CTA when the products so far are done."""
    if plan.ctas == 1:
        prims.tcgen05_commit(barrier, group=prims.CTAGroup.CTA_1)
    else:
        prims.tcgen05_commit(barrier, multicast_mask=3, group=prims.CTAGroup.CTA_2)


def swizzled(start: cutlass.Pointer, leading_bytes: int) -> prims.Tcgen05SmemDesc:
    """Descriptor of an operand whose groups of 8 swizzled rows lie 1,024 bytes apart."""
    return prims.Tcgen05SmemDesc.build(
        start_address=start,
        leading_byte_offset=leading_bytes,
        stride_byte_offset=8 * SWIZZLE_ROW_BYTES,
        layout=prims.Tcgen05SmemSwizzle.SWIZZLE_128B,
    )


# ---- kernel


@cute.kernel
def attention_kernel(
    a: Arguments, fp8: cutlass.Constexpr, can_split: cutlass.Constexpr, plan: cutlass.Constexpr
) -> None:
    """Sets up barriers and tensor memory, and sends every warp to its role."""
    smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).raw_ptr()
    barriers = typed(smem + Smem.BARRIERS, Int64)
    tmem_address = typed(smem + Smem.TMEM_ADDRESS, Int32)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    rank = cta_rank(plan)
    group = f"cta_{plan.ctas}"

    if warp == Warp.MMA:
        if prims.elect_sync():
            for stage in cutlass.range_constexpr(plan.stages):
                prims.mbarrier_init(barriers + (Barrier.FULL + stage), WARPS_OF_GROUP)
                prims.mbarrier_init(barriers + (Barrier.ALL_FULL + stage), WARPS_OF_GROUP * plan.ctas)
                prims.mbarrier_init(barriers + (Barrier.PV_DONE + stage), 1)
            for buffer in cutlass.range_constexpr(2):
                prims.mbarrier_init(barriers + (Barrier.S_READY + buffer), 1)
                prims.mbarrier_init(barriers + (Barrier.P_READY + buffer), WARPS_OF_GROUP * plan.ctas)
            prims.mbarrier_init(barriers + Barrier.Q_READY, WARPS_OF_GROUP * plan.ctas)
            prims.fence_mbarrier_init()
        prims.tcgen05_alloc(tmem_address, Tmem.COLUMNS, group=group)
        prims.tcgen05_relinquish_alloc_permit(group=group)
    prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
    everybody(plan)
    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
    tmem = prims.TmemAddr(tmem_address.load())

    if warp < Warp.GATHER:
        softmax(a, smem, barriers, tmem, can_split, plan)
    elif warp < Warp.MMA:
        gather_group = (warp - Warp.GATHER) // WARPS_OF_GROUP
        if cutlass.const_expr(plan.ctas == 1):
            gather(a, smem, barriers, gather_group, warp % WARPS_OF_GROUP, lane, fp8, range(8), plan)
        elif rank == 0:
            gather(a, smem, barriers, gather_group, warp % WARPS_OF_GROUP, lane, fp8, range(4), plan)
        else:
            gather(a, smem, barriers, gather_group, warp % WARPS_OF_GROUP, lane, fp8, range(4, 8), plan)
    elif rank == 0:
        if prims.elect_sync():
            multiply(a, smem, barriers, tmem, plan)

    prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
    everybody(plan)
    if warp == Warp.MMA:
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        prims.tcgen05_dealloc(tmem.as_ptr(Float32), Tmem.COLUMNS, group=group)


def everybody(plan: Plan) -> None:
    """All threads of the CTA, or of the pair, meet."""
    if plan.ctas == 1:
        prims.barrier_cta_sync_aligned(0)
    else:
        prims.barrier_cluster_arrive_aligned()
        prims.barrier_cluster_wait_aligned()


@cute.jit
def launch(
    a: Arguments,
    num_ctas: Int32,
    fp8: cutlass.Constexpr,
    can_split: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Persistent: num_ctas is at most the number of multiprocessors."""
    attention_kernel(a, fp8, can_split, plan).launch(
        grid=(num_ctas, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(plan.ctas, 1, 1),
        smem=Smem.BYTES,
        stream=stream,
        min_blocks_per_mp=1,
    )


# ---- host

SLOT_BYTES = HEADS * ROW_DIM * 4
"""Of a partial O: see the last fields of `Arguments`."""
STATE_BYTES = len(RowState._fields) * HEADS * 4
"""Of the states of its rows."""


def configurations() -> tuple[Config, ...]:
    """All that `sparse_attention` may ask for, to compile them beforehand."""
    axes = ((RowFormat.FP8, RowFormat.PLAIN), (False, True), (Plan(1), Plan(2)))
    return tuple(Config(*point) for point in itertools.product(*axes))


def compile(config: Config, arch: str = "sm_100a") -> Callable[..., None]:
    """The launcher of a configuration, from memory, from disk or from the compiler.

    Raises:
        RuntimeError: CuTe DSL has the compiler of an older CUDA than 13.2.
    """

    def from_compiler() -> Callable[..., None]:
        if not cutlass.target_version(min_version="13.2"):
            raise RuntimeError(
                f"sparse_attention: CuTe DSL compiles with CUDA {cutlass.CUDA_VERSION.major}."
                f"{cutlass.CUDA_VERSION.minor}; expected 13.2 or later, for PTX 9.2. Install "
                "nvidia-cutlass-dsl[cu13], as SGLang does"
            )
        example = Arguments(*(kind(0) for kind in Arguments.__annotations__.values()))
        is_fp8 = config.row_format is RowFormat.FP8
        return cute.compile(launch, example, Int32(1), is_fp8, config.can_split, config.plan, cuda.CUstream(0))

    return load_or_compile("sparse_attention_sm100", config, arch, from_compiler)


def sparse_attention(problem: Problem) -> None:
    """Writes `problem.out` and, if it is there, `problem.lse`.

    See `dsv4_kernels.sparse_attention.sparse_attention` for what is computed.

    Raises:
        RuntimeError: a CUDA graph is being captured, and no such call has been made on the device.
        ValueError: more tokens than counters in a call with `split_keys`.
    """
    device, max_parts = problem.q.device, problem.max_parts
    plan = Plan(-(-problem.num_heads // HEADS))
    num_items = problem.num_tokens * max_parts
    num_sms, arch = device_facts(device)
    num_slots = num_items * plan.ctas
    states = slice(num_slots * SLOT_BYTES, num_slots * (SLOT_BYTES + STATE_BYTES))  # behind the slots of O
    scratch = None
    if max_parts > 1:
        if problem.num_tokens * plan.ctas > NUM_COUNTERS:
            raise ValueError(
                f"sparse_attention: {problem.num_tokens} tokens of {problem.num_heads} heads with split_keys; expected "
                f"at most {NUM_COUNTERS // plan.ctas}. Pass split_keys=None: so many tokens need no parts"
            )
        scratch = Scratch.on(device, states.stop)
    arguments = Arguments(
        q=Int64(address(problem.q)),
        q_token_stride=Int64(problem.q.stride(0)),
        q_head_stride=Int64(problem.q.stride(1)),
        window=Int64(address(problem.window_storage)),
        window_page_bytes=Int64(row_bytes(problem.window_storage)),
        entries=Int64(address(problem.entry_storage)),
        entry_page_bytes=Int64(row_bytes(problem.entry_storage)),
        window_rows=Int64(address(problem.window_rows)),
        window_rows_stride=Int64(problem.window_rows.stride(0)),
        window_slots=Int32(problem.window_slots),
        entry_rows=Int64(address(problem.entry_rows)),
        entry_rows_stride=Int64(row_stride(problem.entry_rows)),
        entry_slots=Int32(problem.max_entry_slots),
        page_table=Int64(address(problem.page_table)),
        page_table_stride=Int64(row_stride(problem.page_table)),
        entries_per_page=Int32(problem.entries_per_page),
        token_to_request=Int64(address(problem.token_to_request)),
        visible=Int64(address(problem.visible)),
        sink=Int64(address(problem.sink)),
        scale_log2=Float32(problem.scale * LOG2_E),
        out=Int64(address(problem.out)),
        out_token_stride=Int64(problem.out.stride(0)),
        out_head_stride=Int64(problem.out.stride(1)),
        out_is_fp32=Int32(problem.out.dtype == torch.float32),
        lse=Int64(address(problem.lse)),
        num_heads=Int32(problem.num_heads),
        split_steps=Int32(0 if problem.split_keys is None else problem.split_keys // STEP_KEYS),
        max_parts=Int32(max_parts),
        num_items=Int32(num_items),
        partial_out=Int64(address(scratch and scratch.slots, slice(0, states.start))),
        partial_state=Int64(address(scratch and scratch.slots, states)),
        arrived=Int64(address(scratch and scratch.counters)),
        zeros=Int64(address(zero_row(device))),
    )
    stream = cuda.CUstream(torch.cuda.current_stream(device).cuda_stream)
    num_ctas = plan.ctas * min(num_items, num_sms // plan.ctas)
    compile(Config(problem.row_format, max_parts > 1, plan), arch)(arguments, Int32(num_ctas), stream)


@functools.cache
def device_facts(device: torch.device) -> tuple[int, str]:
    """(multiprocessors, architecture to compile for)."""
    num_sms = cutlass.utils.HardwareInfo(device.index or 0).get_device_multiprocessor_count()
    minor = torch.cuda.get_device_capability(device)[1] if device.type == "cuda" else 0
    return num_sms, f"sm_10{minor}a"


@functools.cache
def zero_row(device: torch.device) -> torch.Tensor:
    """What stands for holes and missing heads.

    Raises:
        RuntimeError: a graph is being captured, whose memory this would be, and the kernel has not run on the device.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"sparse_attention: a CUDA graph is being captured, and the kernel has not run on {device} before; make "
            "the same call once without a graph"
        )
    return torch.zeros(ROW_DIM, dtype=torch.bfloat16, device=device)
