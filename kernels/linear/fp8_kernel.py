"""FP8 products of few tokens on Hopper (sm_90a): the kernel. fp8_plan.py has its shapes, fp8.py the host side.

The kernel is bound by memory: a weight is read once, at 4.3 TB/s of an H200, which is 33 GB/s or some 19 bytes a clock
for each multiprocessor.

The order of summation is DeepGEMM's, and so are the bits: four instructions of 32 channels follow each other in one
accumulator, that of a block of 128 channels; it is multiplied by (scale of the token * scale of the weight) and added,
`sum = fma(block, scale, sum)`, in the order of K; the sum is rounded to bf16 once. As in DeepGEMM, tokens are the left
operand of `wgmma` and weights the right one. So K cannot be split without exchanging sums: four bytes for each token
and weight row, which at 32 tokens is as much as the block's weights.

Instead tiles are narrow. A tile is 16, 32 or 64 rows of the weight and all of K, so that most multiprocessors have one
(N = 4,096: 128 tiles of 32 rows; N = 1,536: 96 of 16); for a larger weight, persistent CTAs process several. As the
right operand a tile has no padding. The left operand always has 64 rows, but it comes from registers: a warp has 16
tokens of it, and a warp without tokens loads nothing. An instruction of 32 rows or less takes 16 clocks, a block 64:
less than the 110 clocks in which 16 rows of it arrive from memory.

Every CTA reads all tokens. At 64 tokens and tiles of 32 rows these are twice as many bytes as its weights, and L2 does
not deliver three times memory's bandwidth. So each CTA of a cluster loads a part of the tokens for all of them (TMA
multicast).

    WEIGHTS (1 warp)             waits empty[stage]; weights (TMA) and their scales (cp.async) arrive at full[stage]
    TOKENS (1 warp)              the same for tokens and their scales
    CONSUMER (1 warpgroup or 2)  64 tokens each: waits full[stage], arrives at empty[stage] of the whole cluster

A stage holds one, two or four blocks of a tile. WEIGHTS does not wait for the kernel before (`dependent_launch`, rule
1): while that kernel ends, the weights of all stages are in flight.

A token's sum depends neither on its index, nor on the number of tokens, nor on the plan.
"""

from enum import IntEnum
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsv4_kernels.device import dependent_launch, pipeline, ptx
from dsv4_kernels.device.joint_kernel import Cta, cta_of_launch, sync_threads
from dsv4_kernels.device.tma import TmaTensor
from dsv4_kernels.linear.fp8_plan import BLOCK, WARP, Arguments, Plan
from dsv4_kernels.linear.fp8_products import fragments, multiply_add, places_of_scales, places_of_tokens


class Producer(IntEnum):
    """Producer warps, numbered after the consumers'."""

    WEIGHTS = 0
    TOKENS = 1


class Work(NamedTuple):
    """Tiles of a CTA: first, first + stride, ..., `turns` of them; and the steps of each, one stage a step."""

    first: Int32
    stride: Int32
    turns: Int32
    steps: Int32


class Ring(NamedTuple):
    """The stages in shared memory: addresses of the first stage's parts, and barriers of all stages."""

    weights: Int32  # [stages, blocks, rows, 128] e4m3, swizzled by 128 bytes
    tokens: Int32  # [stages, blocks, tokens, 128] e4m3, swizzled by 128 bytes
    scales: Int32  # [stages, plan.scale_bytes]
    full: cute.Pointer
    empty: cute.Pointer


@cute.jit
def launch(args: Arguments, num_clusters: Int32, plan: cutlass.Constexpr, stream: cuda.CUstream) -> None:
    """Launches persistent clusters: num_clusters is at most the number that is resident at once."""
    kernel(args, plan, *tma_tensors(args, plan)).launch(
        grid=[num_clusters * plan.cluster, 1, 1],
        cluster=[plan.cluster, 1, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=plan.ctas_per_sm,
        preferred_smem_carveout=100,  # percent: the planned number of CTAs fits
        use_pdl=dependent_launch.is_on(),
    )


def tma_tensors(args: Arguments, plan: Plan) -> tuple[TmaTensor, TmaTensor]:
    """TMA loads of weights and of tokens."""
    weights = tma_of(args.weight, args.num_rows, args.weight_row_bytes, args.num_blocks, plan.rows, 1)
    tokens = tma_of(args.codes, args.num_tokens, args.codes_row_bytes, args.num_blocks, plan.brought, plan.cluster)
    return weights, tokens


def swizzled(shape: tuple) -> cute.ComposedLayout:
    """Layout of consecutive boxes of rows of 128 bytes, swizzled."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def tma_of(start: Int64, rows: Int32, row_bytes: Int64, blocks: Int32, box_rows: int, cluster: int) -> TmaTensor:
    """TMA loads of one block of some rows; zeros for rows that do not exist."""
    pointer = cute.make_ptr(Float8E4M3FN, start, cute.AddressSpace.gmem, assumed_align=16)
    layout = cute.make_layout((rows, blocks * BLOCK), stride=(cute.assume(row_bytes, 16), 1))
    operation = cpasync.CopyBulkTensorTileG2SMulticastOp() if cluster > 1 else cpasync.CopyBulkTensorTileG2SOp()
    box = (box_rows, BLOCK)
    return TmaTensor(*cpasync.make_tiled_tma_atom(operation, cute.make_tensor(pointer, layout), swizzled(box), box))


@cute.kernel
def kernel(args: Arguments, plan: cutlass.Constexpr, tma_weights: TmaTensor, tma_tokens: TmaTensor) -> None:
    """The kernel of a launch of its own."""
    body(args, plan, (tma_weights, tma_tokens), cta_of_launch())


@cute.jit
def body(
    args: Arguments, plan: cutlass.Constexpr, prepared: tuple[TmaTensor, TmaTensor], place: cutlass.Constexpr[Cta]
) -> None:
    """Sets up barriers, and sends every warp to its role."""
    tma_weights, tma_tokens = prepared
    thread, _, _ = cute.arch.thread_idx()
    cta, ctas = place.number, place.count
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = cutlass.utils.SmemAllocator()
    weights = memory.allocate_array(Float8E4M3FN, num_elems=plan.stages * plan.weight_bytes, byte_alignment=1024)
    tokens = memory.allocate_array(Float8E4M3FN, num_elems=plan.stages * plan.token_bytes, byte_alignment=1024)
    scales = memory.allocate_array(Float32, num_elems=plan.stages * plan.scale_bytes // 4, byte_alignment=16)
    full = memory.allocate_array(Int64, num_elems=plan.stages, byte_alignment=8)
    empty = memory.allocate_array(Int64, num_elems=plan.stages, byte_alignment=8)
    if warp == plan.consumer_warps + Producer.WEIGHTS:
        cpasync.prefetch_descriptor(tma_weights.atom)
        cpasync.prefetch_descriptor(tma_tokens.atom)
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(plan.stages):
                # Arrivals: the announcement of TMA's bytes, scales of the weight, scales of tokens.
                cute.arch.mbarrier_init(full + stage, 1 + plan.blocks + WARP)
                cute.arch.mbarrier_init(empty + stage, plan.consumer_warps * plan.cluster)
            cute.arch.mbarrier_init_fence()
    if const_expr(plan.cluster > 1):
        cute.arch.sync_warp()
        cute.arch.cluster_arrive_relaxed(aligned=True)
    else:
        sync_threads(place.threads)
    cluster, clusters = cta // plan.cluster, ctas // plan.cluster
    rank = cta - cluster * plan.cluster
    work = Work(
        first=cta,
        stride=ctas,
        turns=(args.num_tiles - cluster + clusters - 1) // clusters,
        steps=(args.num_blocks + (plan.blocks - 1)) // plan.blocks,
    )
    ring = Ring(Int32(weights.toint()), Int32(tokens.toint()), Int32(scales.toint()), full, empty)
    lane = thread % WARP
    if warp == plan.consumer_warps + Producer.WEIGHTS:
        boxes = boxes_of(tma_weights, weights, plan.rows, plan.stages * plan.blocks)
        load_weights(args, plan, tma_weights, boxes, ring, work, lane)
        if const_expr(plan.cluster > 1):
            cute.arch.cluster_wait()
    else:
        dependent_launch.begin()
        if const_expr(plan.cluster > 1):
            cute.arch.cluster_wait()  # the barriers of all CTAs are set up
        if warp == plan.consumer_warps + Producer.TOKENS:
            boxes = boxes_of(tma_tokens, tokens, plan.brought, plan.stages * plan.blocks * plan.cluster)
            load_tokens(args, plan, tma_tokens, boxes, ring, work, rank, lane)
        else:
            consume(args, plan, ring, work, thread)
    if const_expr(plan.cluster > 1):
        # Consumers wait for the copies of other CTAs, but no thread waits for the last arrivals of other CTAs at this
        # CTA's barriers. So this CTA must not end before the others.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def boxes_of(tma: TmaTensor, start: cute.Pointer, rows: int, count: int) -> tuple:
    """(shared memory, global memory) operands of TMA copies. Mode 0 is a box; the other modes are [count] in shared
    memory and [box of rows, block] in global memory."""
    layout = swizzled((rows, BLOCK, count))
    places = cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=Float8E4M3FN), layout.outer)
    blocks = cute.local_tile(tma.tensor, (rows, BLOCK), (None, None))
    blocks = cute.group_modes(places, 0, 2), cute.group_modes(blocks, 0, 2)
    return cpasync.tma_partition(tma.atom, 0, cute.make_layout(1), *blocks)


# Producers


@cute.jit
def wait_empty(plan: cutlass.Constexpr, ring: Ring, stage: pipeline.Stage) -> None:
    """Waits until all consumers that read this stage, here or in CTAs that receive this CTA's copies, have released
    it."""
    if const_expr(plan.cluster > 1):
        ptx.wait_cluster(Int32((ring.empty + stage.index).toint()), stage.phase)
    else:
        cute.arch.mbarrier_wait(ring.empty + stage.index, stage.phase)


@cute.jit
def load_weights(
    args: Arguments,
    plan: cutlass.Constexpr,
    tma_weights: TmaTensor,
    boxes: tuple,
    ring: Ring,
    work: Work,
    lane: Int32,
) -> None:
    """Copies weights and their scales, one stage after the other, and announces a stage's bytes of weights and tokens
    to its barrier."""
    targets, sources = boxes
    stage = pipeline.first_to_fill()
    for turn in cutlass.range(work.turns, unroll=1):
        tile = work.first + turn * work.stride
        # A cluster's last tiles may not exist: no address is computed for them.
        has_scales = tile * plan.rows < args.num_rows
        scale_row = args.weight_scale
        if has_scales:
            scale_row += Int64(tile * plan.rows // BLOCK) * args.weight_scale_row_bytes
        for step in cutlass.range(work.steps, unroll=1):
            wait_empty(plan, ring, stage)
            full = ring.full + stage.index
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, plan.weight_bytes + plan.token_bytes)
            for i in cutlass.range_constexpr(plan.blocks):
                source = sources[None, tile, step * plan.blocks + i]
                cute.copy(tma_weights.atom, source, targets[None, stage.index * plan.blocks + i], tma_bar_ptr=full)
            if lane < plan.blocks:
                block = step * plan.blocks + lane
                address, num_bytes = scale_row, Int32(0)
                if has_scales & (block < args.num_blocks):
                    address, num_bytes = scale_row + Int64(block) * 4, Int32(4)
                index = plan.blocks * plan.tokens + lane  # after the tokens' scales
                scales = ring.scales + stage.index * plan.scale_bytes
                ptx.copy_4_bytes_async(scales + index * 4, address, num_bytes)
                cute.arch.cp_async_mbarrier_arrive_noinc(full)
            stage = pipeline.following(stage, plan.stages)


@cute.jit
def load_tokens(
    args: Arguments,
    plan: cutlass.Constexpr,
    tma_tokens: TmaTensor,
    boxes: tuple,
    ring: Ring,
    work: Work,
    rank: Int32,
    lane: Int32,
) -> None:
    """Copies this CTA's part of the tokens to the whole cluster, and the scales of all tokens to its own stages."""
    targets, sources = boxes
    stage = pipeline.first_to_fill()
    for _ in cutlass.range(work.turns, unroll=1):
        for step in cutlass.range(work.steps, unroll=1):
            wait_empty(plan, ring, stage)
            full = ring.full + stage.index
            for i in cutlass.range_constexpr(plan.blocks):
                source = sources[None, rank, step * plan.blocks + i]
                target = targets[None, (stage.index * plan.blocks + i) * plan.cluster + rank]
                if const_expr(plan.cluster > 1):
                    all_ctas = cutlass.Int16((1 << plan.cluster) - 1)
                    cute.copy(tma_tokens.atom, source, target, tma_bar_ptr=full, mcast_mask=all_ctas)
                else:
                    cute.copy(tma_tokens.atom, source, target, tma_bar_ptr=full)
            copy_scales(args, plan, ring.scales + stage.index * plan.scale_bytes, step * plan.blocks, lane)
            cute.arch.cp_async_mbarrier_arrive_noinc(full)
            stage = pipeline.following(stage, plan.stages)


@cute.jit
def copy_scales(args: Arguments, plan: cutlass.Constexpr, shared: Int32, first_block: Int32, lane: Int32) -> None:
    """Starts the copies of the scales of a stage's tokens, a lane each; zeros where there is no token or no block."""
    count = plan.blocks * plan.tokens
    for first in cutlass.range_constexpr(0, count, WARP):
        number = first + lane
        token, block = number % plan.tokens, first_block + number // plan.tokens
        if (count % WARP == 0) | (number < count):
            address, num_bytes = args.scales, Int32(0)
            if (token < args.num_tokens) & (block < args.num_blocks):
                address += Int64(token) * args.scales_row_bytes + Int64(block) * args.scales_block_bytes
                num_bytes = Int32(4)
            ptx.copy_4_bytes_async(shared + number * 4, address, num_bytes)


# Consumers


@cute.jit
def consume(args: Arguments, plan: cutlass.Constexpr, ring: Ring, work: Work, thread: Int32) -> None:
    """A consumer warpgroup: computes 64 tokens of every tile, 16 a warp."""
    lane, first_token = thread % WARP, thread // WARP * 16
    exists = Int32(first_token < args.num_tokens)
    places = places_of_tokens(plan, first_token, lane), places_of_scales(plan, first_token, lane)
    stage = pipeline.first_to_read()
    for turn in cutlass.range(work.turns, unroll=1):
        sums = cute.make_rmem_tensor((plan.accumulators,), Float32)
        sums.fill(0.0)
        for _ in cutlass.range(work.steps, unroll=1):
            cute.arch.mbarrier_wait(ring.full + stage.index, stage.phase)
            left = fragments(plan, ring.tokens + stage.index * plan.token_bytes, places[0], exists)
            weights = ring.weights + stage.index * plan.weight_bytes
            scales = ring.scales + stage.index * plan.scale_bytes
            multiply_add(plan, left, weights, scales, places[1], sums)
            cute.arch.fence_view_async_shared()  # generic loads before writes by TMA
            cute.arch.sync_warp()
            give_back(plan, ring.empty + stage.index, lane)
            stage = pipeline.following(stage, plan.stages)
        store(args, plan, work.first + turn * work.stride, first_token, lane, sums)


@cute.jit
def give_back(plan: cutlass.Constexpr, empty: cute.Pointer, lane: Int32) -> None:
    """Arrives at `empty` of a stage that this warp has read, in every CTA that may write there."""
    if const_expr(plan.cluster > 1):
        if lane < plan.cluster:
            ptx.arrive_remote(ptx.remote(Int32(empty.toint()), lane))
    elif lane == 0:
        cute.arch.mbarrier_arrive(empty)


@cute.jit
def store(
    args: Arguments, plan: cutlass.Constexpr, tile: Int32, first_token: Int32, lane: Int32, sums: cute.Tensor
) -> None:
    """Writes a warp's tokens of a tile, two neighbouring numbers at a time."""
    for half in cutlass.range_constexpr(2):
        token = first_token + lane // 4 + 8 * half
        row = tile * plan.rows + lane % 4 * 2
        address = args.out + Int64(token) * args.out_row_bytes + Int64(row) * 2
        for j in cutlass.range_constexpr(plan.rows // 8):
            if (token < args.num_tokens) & (row + 8 * j < args.num_rows):
                pair = ptx.pack_bf16(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1])
                ptx.store_u32(address + 16 * j, pair)
