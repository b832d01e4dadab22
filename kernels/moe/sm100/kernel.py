"""Routed experts on Blackwell (sm_100a): block-scaled products grouped by expert, for both formats of `Numbers`.

A work tile is (expert, up to N of its slots, 128 output rows); a slot is a pair of token and expert. 128 rows of
weights are the left operand, slots the narrow right operand. Persistent CTAs compute work tiles in order; the number
of work tiles is in global memory. Warps of a CTA, and their waits:

    WEIGHTS (1 thread)     TMA: codes, which TMA pads to a byte each for MXFP4, and their scales
        waits empty[stage]; the bytes arrive at weights[stage]
    TOKENS (4 warps)       rows of activations by `cp.async`, some stages ahead, and their scales
        waits empty[stage], arrives at tokens[stage] of the first CTA
    MMA (1 thread)         scales into tensor memory, four products of K = 32 a stage and matrix
        waits free[buffer] once a work tile, weights[stage] and tokens[stage]; commits empty[stage], done[buffer]
        second CTA of a pair: waits weights[stage], arrives at the first CTA's tokens[stage]
    EPILOGUE (4 warps)     lane r of tensor memory is output row r; a column is a slot
        waits done[buffer], arrives at free[buffer] of the first CTA

Gate and up are two accumulators with the same lanes, so SwiGLU needs no exchange, and the 128 channels of a work tile
are whole blocks of h's quantiser.

With many slots a pair of CTAs computes two neighbouring work tiles of the same slots by products of 256 rows, which the
first CTA issues for both. Each CTA has the weights, scales, sums and epilogue of its own 128 rows, as alone; but it
loads half of the slots' codes, and its tensor core reads half: the port of shared memory, which has the largest bound
with many slots, moves less. The order of K is the same.

With MXFP4 weights the scale of 128 channels of the activations, fp32 in global memory, becomes a ue8m0 four times in a
word, because an instruction's K is 32 channels: the thread that copied it rewrites it in shared memory. All of K is
summed in tensor memory in one order, so a slot's bits depend neither on its neighbours nor
on their number.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as experimental_cuda
from cutlass import Float32, Int32, Int64
from cutlass.experimental import primitives as prims

from dsv4_kernels.device import dependent_launch, ptx, tcgen05
from dsv4_kernels.device.cta_pair import commit, cta_rank, group_of, of_first_cta, sync_all
from dsv4_kernels.device.mbarrier import arrive, wait
from dsv4_kernels.device.pipeline import stage_of
from dsv4_kernels.device.pointers import gmem, typed
from dsv4_kernels.device.tcgen05 import SWIZZLE_ROW_BYTES, swizzled, tmem_columns, unswizzled
from dsv4_kernels.moe.sm100.epilogue import finish_tiles
from dsv4_kernels.moe.sm100.plan import (
    ACCUMULATORS,
    CHUNK,
    GROUP_THREADS,
    PRODUCTS_PER_STEP,
    SCALE_COLUMNS,
    SCALE_TILE_BYTES,
    SCALES_PER_TILE,
    THREADS,
    TILE_ROWS,
    WARPS_OF_GROUP,
    WEIGHT_TILE_BYTES,
    Arguments,
    Barrier,
    Numbers,
    Product,
    Warp,
)
from dsv4_kernels.moe.sm100.tiles import expert_of, slots_of

PRODUCT_BYTES = SWIZZLE_ROW_BYTES // PRODUCTS_PER_STEP
AHEAD = 3
"""Stages whose activations a thread loads ahead."""


@cute.jit
def launch(a: Arguments, num_ctas: Int32, plan: cutlass.Constexpr, stream: cuda.CUstream) -> None:
    """Launches the persistent kernel; num_ctas is at most the number of multiprocessors."""
    weights = experimental_cuda.create_tensor_map_tiled(
        global_address=a.weights,
        dtype=cutlass.Float4E2M1FNx2,
        tma_format=weight_format(plan),
        global_dims=[a.k, a.weight_rows],
        global_strides=[Int64(a.k) * 4 // 128],
        box_dims=[plan.step, TILE_ROWS],
        swizzle=experimental_cuda.TensorMapSwizzle.s128b,
    )
    experts_kernel(a, weights, plan).launch(
        grid=(num_ctas, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(plan.ctas, 1, 1),
        smem=plan.smem_bytes,
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=dependent_launch.is_on(),
    )


def weight_format(plan: cutlass.Constexpr) -> experimental_cuda.TensorMapDataFormat:
    """TMA format of the codes: packed if both operands are e2m1, padded to a byte each if the other is e4m3."""
    formats = experimental_cuda.TensorMapDataFormat
    return formats.B4X16 if plan.numbers is Numbers.NVFP4 else formats.B4X16_P64


@cute.kernel
def experts_kernel(
    a: Arguments, weights: cutlass.GridConstant[experimental_cuda.TensorMap], plan: cutlass.Constexpr
) -> None:
    """Sets up barriers and tensor memory, and sends every warp to its role."""
    smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).raw_ptr()
    barriers = typed(smem + plan.barriers_offset, Int64)
    tmem_address = typed(smem + plan.tmem_address_offset, Int32)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cta_rank(plan.ctas)
    if warp == Warp.MMA:
        groups = [
            (Barrier.WEIGHTS, plan.stages, 1),
            (Barrier.TOKENS, plan.stages, WARPS_OF_GROUP * plan.ctas + (plan.ctas - 1)),
            (Barrier.EMPTY, plan.stages, 1),
            (Barrier.DONE, ACCUMULATORS, 1),
            (Barrier.FREE, ACCUMULATORS, WARPS_OF_GROUP * plan.ctas),
        ]
        tcgen05.set_up(barriers, groups, tmem_address, plan.tmem_columns, plan.ctas)
    sync_all(plan.ctas)  # barriers and tensor memory are set up
    if cutlass.const_expr(plan.ctas == 2):  # the first CTA's copies write the second's tensor memory
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
    dependent_launch.begin()  # the next kernel may start: tensor memory is allocated
    tmem = prims.TmemAddr(tmem_address.load())

    first, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    end = ptx.load_i32(a.num_tiles) * a.row_tiles
    if warp < Warp.TOKENS:
        finish_tiles(a, smem, barriers, tmem, warp, first, stride, end, plan)
    elif warp < Warp.WEIGHTS:
        load_tokens(a, smem, barriers, rank, first, stride, end, plan)
    elif warp == Warp.WEIGHTS:
        if prims.elect_sync():
            load_weights(a, weights, smem, barriers, first, stride, end, plan)
    elif rank == 0:
        if prims.elect_sync():
            multiply(a, smem, barriers, tmem, first, stride, end, plan)
    else:
        if prims.elect_sync():
            announce(a, barriers, first, stride, end, plan)

    sync_all(plan.ctas)  # the epilogues have completed their last loads of tensor memory
    if warp == Warp.MMA:
        tcgen05.free(tmem, plan.tmem_columns, plan.ctas)


@cute.jit
def wait_until_empty(barriers: cutlass.Pointer, count: Int32, plan: cutlass.Constexpr) -> None:
    """Waits until the products of the previous step in the stage of step `count` are done."""
    if count >= plan.stages:
        stage = stage_of(count, plan.stages)
        wait(barriers, Barrier.EMPTY + stage.index, stage.phase ^ 1)


# Weights


@cute.jit
def load_weights(
    a: Arguments,
    weights: experimental_cuda.TensorMap,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    first: Int32,
    stride: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """One thread loads the tile of each matrix and its scales, stage after stage."""
    steps = a.k // plan.step
    count = Int32(0)
    for index in cutlass.range(first, end, stride):
        row = expert_of(a, index) * a.rows + index % a.row_tiles * TILE_ROWS
        for step in cutlass.range(steps):
            wait_until_empty(barriers, count, plan)
            stage = stage_of(count, plan.stages).index
            target = smem + stage * plan.stage_bytes
            full = barriers + (Barrier.WEIGHTS + stage)
            prims.mbarrier_arrive_expect_tx(full, plan.loaded_bytes)
            for matrix in cutlass.range_constexpr(plan.matrices):
                row_of_matrix = row + matrix * (a.row_tiles * TILE_ROWS)  # w3's rows follow w1's
                prims.cp_async_bulk_tensor_shared_cta_global(
                    target + matrix * WEIGHT_TILE_BYTES, weights.get_ptr(), (step * plan.step, row_of_matrix), full
                )
                tile = Int64(row_of_matrix // TILE_ROWS) * steps + step
                prims.cp_async_bulk_shared_cluster_global(
                    target + (plan.scales_offset + matrix * plan.scale_bytes),
                    gmem(a.weight_scales + tile * plan.scale_bytes, cutlass.Uint8),
                    full,
                    plan.scale_bytes,
                )
            count = count + 1


# Activations


@cute.jit
def load_tokens(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    rank: Int32,
    first: Int32,
    stride: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Loads the activations. Eight threads share a row of 128 bytes; thread i also loads the scale of column i.

    Each CTA of a pair loads the codes of its half of the columns, but the scales of all, since its tensor core reads
    scales from its own tensor memory. Columns without a slot get zeros and a scale of zero bits, which is 2**-127 or 0.
    """
    thread = cute.arch.thread_idx()[0] % GROUP_THREADS
    base = Int32(smem.toint())
    steps = a.k // plan.step
    tokens_offset = plan.matrices * WEIGHT_TILE_BYTES
    scales_offset = plan.scales_offset + plan.matrices * plan.scale_bytes
    scale_place = thread % 32 * CHUNK + thread // 32 * SCALES_PER_TILE
    for stage in cutlass.range_constexpr(plan.stages):  # tcgen05.cp also copies the scales of columns beyond N
        for part in cutlass.range_constexpr(plan.scale_tiles):
            offset = stage * plan.stage_bytes + scales_offset + part * SCALE_TILE_BYTES
            ptx.asm("st.shared.b32 [{$r0}], 0;", [], base + offset + scale_place)
    count = Int32(0)
    for index in cutlass.range(first, end, stride):
        first_slot, num_slots = slots_of(a, index)
        rows = []
        for i in cutlass.range_constexpr(plan.own_tokens // CHUNK):
            column = thread // 8 + i * CHUNK
            of_tile = rank * plan.own_tokens + column
            row, exists = source_row(a, first_slot + of_tile, of_tile < num_slots, plan)
            place = column * SWIZZLE_ROW_BYTES + ((thread % 8) ^ (column % 8)) * CHUNK
            address = a.x + row * a.x_row_bytes + thread % 8 * CHUNK
            rows.append((address, place, cutlass.select_(exists, 16, 0)))
        scale_row, has_scale = source_row(a, first_slot + thread, thread < num_slots, plan)
        scales = a.x_scales + scale_row * a.scale_row_bytes
        scale_bytes = cutlass.select_(has_scale, Int32(4), Int32(0))
        for step in cutlass.range(steps):
            wait_until_empty(barriers, count, plan)
            target = base + stage_of(count, plan.stages).index * plan.stage_bytes
            for address, place, num_bytes in rows:
                ptx.copy_async(target + (tokens_offset + place), address + step * SWIZZLE_ROW_BYTES, Int32(num_bytes))
            if thread < plan.tokens:
                for part in cutlass.range_constexpr(plan.scale_tiles):
                    target_of_part = target + (scales_offset + part * SCALE_TILE_BYTES) + scale_place
                    address = scales + Int64(step) * a.scale_step_bytes + part * 4
                    ptx.copy_4_bytes_async(target_of_part, address, scale_bytes)
            cute.arch.cp_async_commit_group()
            if count >= AHEAD:
                cute.arch.cp_async_wait_group(AHEAD)
                publish_tokens(barriers, count - AHEAD, thread, base + (scales_offset + scale_place), plan)
            count = count + 1
    cute.arch.cp_async_wait_group(0)
    for late in cutlass.range(cutlass.max(count - AHEAD, 0), count):
        publish_tokens(barriers, late, thread, base + (scales_offset + scale_place), plan)


@cute.jit
def source_row(a: Arguments, slot: Int32, exists: cutlass.Boolean, plan: cutlass.Constexpr) -> tuple:
    """(row of x that a slot multiplies, whether there is one): a column without a slot, or whose slot pads a group,
    has row 0."""
    row = cutlass.select_(exists, slot, Int32(-1))
    if cutlass.const_expr(plan.product is Product.GATE_UP):
        row = ptx.load_or_zeros(Int32, 1, a.source + Int64(slot) * 4, Int32(exists), cache="", otherwise=-1)
    return Int64(cutlass.max(row, 0)), row >= 0


@cute.jit
def publish_tokens(
    barriers: cutlass.Pointer, count: Int32, thread: Int32, scale: Int32, plan: cutlass.Constexpr
) -> None:
    """Signals that this warp's copies for a step are complete and visible to the tensor core.

    `scale` is the address of this thread's fp32 scale in the first stage; it becomes its ue8m0 four times.
    """
    if cutlass.const_expr(plan.numbers is Numbers.MXFP8_MXFP4):
        if thread < plan.tokens:
            address = scale + stage_of(count, plan.stages).index * plan.stage_bytes
            exponent = ptx.as_u32(ptx.load_shared_f32(address)) >> 23
            ptx.store_shared_u32(address, exponent * 0x01010101)
    prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
    arrive(of_first_cta(barriers + (Barrier.TOKENS + stage_of(count, plan.stages).index), plan.ctas))


# Products


@cute.jit
def multiply(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    first: Int32,
    stride: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """One thread issues all products, those of a pair's second CTA too.

    One scale buffer suffices: the tensor pipe keeps copies and products in order.
    """
    steps = a.k // plan.step
    count, tiles = Int32(0), Int32(0)
    zero = Int32(0)
    for _ in cutlass.range(first, end, stride):
        buffer = stage_of(tiles, ACCUMULATORS)
        if tiles >= ACCUMULATORS:
            wait(barriers, Barrier.FREE + buffer.index, buffer.phase ^ 1)
            prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        for step in cutlass.range(steps):
            stage, phase = stage_of(count, plan.stages)
            wait(barriers, Barrier.WEIGHTS + stage, phase)
            wait(barriers, Barrier.TOKENS + stage, phase)
            start = smem + stage * plan.stage_bytes
            for part in cutlass.range_constexpr((plan.matrices + 1) * plan.scale_tiles):
                prims.tcgen05_cp(
                    prims.Tcgen05CpShape.SHAPE_32X128B,
                    tmem_columns(tmem, zero, plan.scales_column + part * SCALE_COLUMNS, Float32),
                    unswizzled(start + (plan.scales_offset + part * SCALE_TILE_BYTES)),
                    group=group_of(plan.ctas),
                    multicast=prims.Tcgen05CpMulticast.WARPX4,
                )
            tokens = swizzled(start + plan.matrices * WEIGHT_TILE_BYTES)
            for matrix in cutlass.range_constexpr(plan.matrices):
                weights = swizzled(start + matrix * WEIGHT_TILE_BYTES)
                out = tmem_columns(tmem, zero, buffer.index * plan.accumulator_columns + matrix * plan.tokens, Float32)
                for part in cutlass.range_constexpr(PRODUCTS_PER_STEP):
                    multiply_part(
                        out,
                        weights.advance_start_address(part * PRODUCT_BYTES),
                        tokens.advance_start_address(part * PRODUCT_BYTES),
                        (step > 0) if part == 0 else True,
                        scales_of(tmem, matrix, part, plan),
                        scales_of(tmem, plan.matrices, part, plan),
                        part,
                        plan,
                    )
            commit(barriers + (Barrier.EMPTY + stage), plan.ctas)
            count = count + 1
        commit(barriers + (Barrier.DONE + buffer.index), plan.ctas)
        tiles = tiles + 1


@cute.jit
def announce(
    a: Arguments, barriers: cutlass.Pointer, first: Int32, stride: Int32, end: Int32, plan: cutlass.Constexpr
) -> None:
    """One thread of a pair's second CTA tells the first CTA, stage after stage, that this CTA's weights are loaded."""
    count = Int32(0)
    for _ in cutlass.range(first, end, stride):
        for _ in cutlass.range(a.k // plan.step):
            stage, phase = stage_of(count, plan.stages)
            wait(barriers, Barrier.WEIGHTS + stage, phase)
            prims.mbarrier_arrive(of_first_cta(barriers + (Barrier.TOKENS + stage), plan.ctas))
            count = count + 1


def scales_of(tmem: prims.TmemAddr, operand: int, part: int, plan: cutlass.Constexpr) -> cutlass.Array:
    """Columns of the scales of quarter `part` of a step: one scale tile for all quarters, or one for each."""
    tile = operand * plan.scale_tiles + part % plan.scale_tiles
    return tmem_columns(tmem, Int32(0), plan.scales_column + tile * SCALE_COLUMNS, Float32)


def multiply_part(
    out: cutlass.Array,
    weights: prims.Tcgen05SmemDesc,
    tokens: prims.Tcgen05SmemDesc,
    accumulate: cutlass.Boolean,
    weight_scales: cutlass.Array,
    token_scales: cutlass.Array,
    part: int,
    plan: cutlass.Constexpr,
) -> None:
    """Issues one instruction: a quarter of a step."""
    e2m1 = cutlass.Float4E2M1FN
    if plan.numbers is Numbers.NVFP4:
        kind, per_row = prims.Tcgen05MMAKind.MXF4NVF4, prims.Tcgen05MMAScaleVecSize.BLOCK16
        descriptor = prims.Tcgen05MxOmmaInstrDesc.build(
            a_dtype=e2m1, b_dtype=e2m1, scale_format=0, n_dim=plan.tokens, m_dim=TILE_ROWS * plan.ctas
        )
    else:
        kind, per_row = prims.Tcgen05MMAKind.MXF8F6F4, prims.Tcgen05MMAScaleVecSize.BLOCK32
        descriptor = prims.Tcgen05MxInstrDesc.build(
            a_dtype=e2m1,
            b_dtype=cutlass.Float8E4M3FN,
            n_dim=plan.tokens,
            m_dim=TILE_ROWS * plan.ctas,
            a_sf_id=part,
            b_sf_id=part,
        )
    prims.tcgen05_mma_block_scale(
        kind,
        group_of(plan.ctas),
        out,
        weights,
        tokens,
        descriptor,
        accumulate,
        weight_scales,
        token_scales,
        scale_vec_size=per_row,
    )
