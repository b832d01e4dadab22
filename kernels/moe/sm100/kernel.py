"""Routed experts on Blackwell (sm_100a): e4m3 activations times MXFP4 weights, block-scaled, grouped by expert.

A work tile is (expert, up to N of its slots, 128 output rows); a slot is a pair of token and expert. Weights are the
left operand, 128 rows of it, and slots the narrow right one. Persistent CTAs take work tiles in order; how many there
are stands in global memory. Warps of a CTA, and what they wait for:

    WEIGHTS (1 thread)     TMA: codes, padded to a byte each on the way, and their scales
        waits empty[stage]; the bytes arrive at weights[stage]
    TOKENS (4 warps)       rows of activations by `cp.async`, some stages ahead, and their scales
        waits empty[stage], arrives at tokens[stage]
    MMA (1 thread)         scales into tensor memory, four products of K = 32 a stage and matrix
        waits free[buffer] once a work tile, weights[stage] and tokens[stage]; commits empty[stage], done[buffer]
    EPILOGUE (4 warps)     lane r of tensor memory is output row r; a column is a slot
        waits done[buffer], arrives at free[buffer]

Gate and up are two accumulators with the same lanes, so SwiGLU needs no exchange, and the 128 channels of a work tile
are one block of h's quantiser: only its largest magnitude goes through shared memory.

The activations' scale of 128 channels stands four times in a word, as the four of 32 that an instruction's K is. All of
K is summed up in tensor memory in one order, so a slot's bits depend neither on its neighbours nor on their number.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as experimental_cuda
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.experimental import primitives as prims

from dsv4_kernels import bf16_rows, ptx
from dsv4_kernels.moe.sm100.plan import (
    CHUNK,
    GROUP_THREADS,
    MMA_K,
    SCALE_COLUMNS,
    SCALE_TILE_BYTES,
    SCALES_PER_STEP,
    STEP,
    SWIZZLE_ROW_BYTES,
    THREADS,
    TILE_ROWS,
    WARPS_OF_GROUP,
    WEIGHT_TILE_BYTES,
    Arguments,
    Barrier,
    NamedBarrier,
    Product,
    Warp,
)
from dsv4_kernels.quant import e4m3
from dsv4_kernels.sparse_attention.sm100.barriers import arrive, wait
from dsv4_kernels.sparse_attention.sm100.memory import as_float, gmem, load_tmem, tmem_columns, typed

AHEAD = 3
"""Stages whose activations are on their way while a thread waits for an empty one."""


@cute.jit
def launch(a: Arguments, num_ctas: Int32, plan: cutlass.Constexpr, stream: cuda.CUstream) -> None:
    """Persistent: num_ctas is at most the number of multiprocessors."""
    weights = experimental_cuda.create_tensor_map_tiled(
        global_address=a.weights,
        dtype=cutlass.Float4E2M1FNx2,
        tma_format=experimental_cuda.TensorMapDataFormat.B4X16_P64,
        global_dims=[a.k, a.weight_rows],
        global_strides=[Int64(a.k) * 4 // 128],
        box_dims=[STEP, TILE_ROWS],
        swizzle=experimental_cuda.TensorMapSwizzle.s128b,
    )
    experts_kernel(a, weights, plan).launch(
        grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), smem=plan.smem_bytes, stream=stream, min_blocks_per_mp=1
    )


@cute.kernel
def experts_kernel(
    a: Arguments, weights: cutlass.GridConstant[experimental_cuda.TensorMap], plan: cutlass.Constexpr
) -> None:
    """Sets up barriers and tensor memory, and sends every warp to its role."""
    smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).raw_ptr()
    barriers = typed(smem + plan.barriers_offset, Int64)
    tmem_address = typed(smem + plan.tmem_address_offset, Int32)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == Warp.MMA:
        if prims.elect_sync():
            for stage in cutlass.range_constexpr(plan.stages):
                prims.mbarrier_init(barriers + (Barrier.WEIGHTS + stage), 1)
                prims.mbarrier_init(barriers + (Barrier.TOKENS + stage), WARPS_OF_GROUP)
                prims.mbarrier_init(barriers + (Barrier.EMPTY + stage), 1)
            for buffer in cutlass.range_constexpr(2):
                prims.mbarrier_init(barriers + (Barrier.DONE + buffer), 1)
                prims.mbarrier_init(barriers + (Barrier.FREE + buffer), WARPS_OF_GROUP)
            prims.fence_mbarrier_init()
        prims.tcgen05_alloc(tmem_address, plan.tmem_columns, group="cta_1")
        prims.tcgen05_relinquish_alloc_permit(group="cta_1")
    prims.barrier_cta_sync_aligned(0)  # nobody has touched tensor memory yet
    tmem = prims.TmemAddr(tmem_address.load())

    first, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    end = ptx.load_i32(a.num_tiles) * a.row_tiles
    if warp < Warp.TOKENS:
        finish_tiles(a, smem, barriers, tmem, warp, first, stride, end, plan)
    elif warp < Warp.WEIGHTS:
        load_tokens(a, smem, barriers, first, stride, end, plan)
    elif warp == Warp.WEIGHTS:
        if prims.elect_sync():
            load_weights(a, weights, smem, barriers, first, stride, end, plan)
    else:
        if prims.elect_sync():
            multiply(a, smem, barriers, tmem, first, stride, end, plan)

    prims.barrier_cta_sync_aligned(0)  # behind the last loads the epilogue has said that it is done with them
    if warp == Warp.MMA:
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        prims.tcgen05_dealloc(tmem.as_ptr(Float32), plan.tmem_columns, group="cta_1")


@cute.jit
def wait_until_empty(barriers: cutlass.Pointer, count: Int32, plan: cutlass.Constexpr) -> None:
    """Until the products of the step that had this step's stage before are through."""
    if count >= plan.stages:
        wait(barriers, Barrier.EMPTY + count % plan.stages, (count // plan.stages - 1) & 1)


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
    """One thread: the tile of each matrix and its scales, a stage after the other."""
    steps = a.k // STEP
    count = Int32(0)
    for index in cutlass.range(first, end, stride):
        expert = ptx.load_i32(a.tile_expert + Int64(index // a.row_tiles) * 4)
        row = expert * a.rows + index % a.row_tiles * TILE_ROWS
        for step in cutlass.range(steps):
            wait_until_empty(barriers, count, plan)
            stage = count % plan.stages
            target = smem + stage * plan.stage_bytes
            full = barriers + (Barrier.WEIGHTS + stage)
            prims.mbarrier_arrive_expect_tx(full, plan.loaded_bytes)
            for matrix in cutlass.range_constexpr(plan.matrices):
                row_of_matrix = row + matrix * (a.row_tiles * TILE_ROWS)  # w3's rows stand behind w1's
                prims.cp_async_bulk_tensor_shared_cta_global(
                    target + matrix * WEIGHT_TILE_BYTES, weights.get_ptr(), (step * STEP, row_of_matrix), full
                )
                tile = Int64(row_of_matrix // TILE_ROWS) * steps + step
                prims.cp_async_bulk_shared_cluster_global(
                    target + (plan.scales_offset + matrix * SCALE_TILE_BYTES),
                    gmem(a.weight_scales + tile * SCALE_TILE_BYTES, cutlass.Uint8),
                    full,
                    SCALE_TILE_BYTES,
                )
            count = count + 1


# Activations


@cute.jit
def load_tokens(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    first: Int32,
    stride: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Eight threads share a row of 128 bytes; thread i also brings the scale of column i. Columns without a slot get
    zeros, and zeros for a scale, which is 2**-127."""
    thread = cute.arch.thread_idx()[0] % GROUP_THREADS
    base = Int32(smem.toint())
    steps = a.k // STEP
    tokens_offset = plan.matrices * WEIGHT_TILE_BYTES
    scales_offset = plan.scales_offset + plan.matrices * SCALE_TILE_BYTES
    scale_place = thread % 32 * CHUNK + thread // 32 * SCALES_PER_STEP
    for stage in cutlass.range_constexpr(plan.stages):  # columns beyond N are copied along with the others
        ptx.asm("st.shared.b32 [{$r0}], 0;", [], base + (stage * plan.stage_bytes + scales_offset) + scale_place)
    count = Int32(0)
    for index in cutlass.range(first, end, stride):
        tile = Int64(index // a.row_tiles) * 4
        first_slot, num_slots = ptx.load_i32(a.tile_first + tile), ptx.load_i32(a.tile_count + tile)
        rows = []
        for i in cutlass.range_constexpr(plan.tokens // CHUNK):
            column = thread // 8 + i * CHUNK
            row = source_row(a, first_slot + column, column < num_slots, plan)
            place = column * SWIZZLE_ROW_BYTES + ((thread % 8) ^ (column % 8)) * CHUNK
            rows.append((a.x + row * a.k + thread % 8 * CHUNK, place, cutlass.select_(column < num_slots, 16, 0)))
        scale_row = source_row(a, first_slot + thread, thread < num_slots, plan)
        scales = a.x_scales + scale_row * steps * 4
        scale_bytes = cutlass.select_(thread < num_slots, Int32(4), Int32(0))
        for step in cutlass.range(steps):
            wait_until_empty(barriers, count, plan)
            target = base + count % plan.stages * plan.stage_bytes
            for address, place, num_bytes in rows:
                ptx.copy_async(target + (tokens_offset + place), address + step * STEP, Int32(num_bytes))
            if thread < plan.tokens:
                copy_scale(target + (scales_offset + scale_place), scales + step * 4, scale_bytes)
            cute.arch.cp_async_commit_group()
            if count >= AHEAD:
                cute.arch.cp_async_wait_group(AHEAD)
                publish_tokens(barriers, count - AHEAD, plan)
            count = count + 1
    cute.arch.cp_async_wait_group(0)
    for late in cutlass.range(cutlass.max(count - AHEAD, 0), count):
        publish_tokens(barriers, late, plan)


@cute.jit
def source_row(a: Arguments, slot: Int32, exists: cutlass.Boolean, plan: cutlass.Constexpr) -> Int64:
    """The row of x that a slot multiplies; 0 for a column without one."""
    row = cutlass.select_(exists, slot, Int32(0))
    if cutlass.const_expr(plan.product is Product.GATE_UP):
        row = ptx.load_or_zeros(Int32, 1, a.source + Int64(slot) * 4, Int32(exists), cache="")
    return Int64(row)


def copy_scale(shared: Int32, address: Int64, num_bytes: Int32) -> None:
    """4 bytes from global to shared memory, of which those from num_bytes on are zeros."""
    ptx.asm("cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};", [], shared, address, num_bytes)


@cute.jit
def publish_tokens(barriers: cutlass.Pointer, count: Int32, plan: cutlass.Constexpr) -> None:
    """What this warp copied for a step is there, for the tensor core too."""
    prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
    arrive(barriers + (Barrier.TOKENS + count % plan.stages))


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
    """One thread. The tensor pipe keeps the order of copies and products, so one place for scales is enough."""
    steps = a.k // STEP
    count, tiles = Int32(0), Int32(0)
    zero = Int32(0)
    for _ in cutlass.range(first, end, stride):
        buffer = tiles % 2
        if tiles >= 2:
            wait(barriers, Barrier.FREE + buffer, (tiles // 2 - 1) & 1)
            prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        for step in cutlass.range(steps):
            stage = count % plan.stages
            parity = count // plan.stages & 1
            wait(barriers, Barrier.WEIGHTS + stage, parity)
            wait(barriers, Barrier.TOKENS + stage, parity)
            start = smem + stage * plan.stage_bytes
            for part in cutlass.range_constexpr(plan.matrices + 1):
                prims.tcgen05_cp(
                    prims.Tcgen05CpShape.SHAPE_32X128B,
                    tmem_columns(tmem, zero, plan.scales_column + part * SCALE_COLUMNS, Float32),
                    unswizzled(start + (plan.scales_offset + part * SCALE_TILE_BYTES)),
                    group=prims.CTAGroup.CTA_1,
                    multicast=prims.Tcgen05CpMulticast.WARPX4,
                )
            tokens = swizzled(start + plan.matrices * WEIGHT_TILE_BYTES)
            of_tokens = tmem_columns(tmem, zero, plan.scales_column + plan.matrices * SCALE_COLUMNS, Float32)
            for matrix in cutlass.range_constexpr(plan.matrices):
                weights = swizzled(start + matrix * WEIGHT_TILE_BYTES)
                out = tmem_columns(tmem, zero, buffer * plan.accumulator_columns + matrix * plan.tokens, Float32)
                of_weights = tmem_columns(tmem, zero, plan.scales_column + matrix * SCALE_COLUMNS, Float32)
                for part in cutlass.range_constexpr(SCALES_PER_STEP):
                    prims.tcgen05_mma_block_scale(
                        prims.Tcgen05MMAKind.MXF8F6F4,
                        prims.CTAGroup.CTA_1,
                        out,
                        weights.advance_start_address(part * MMA_K),
                        tokens.advance_start_address(part * MMA_K),
                        instruction(part, plan),
                        (step > 0) if part == 0 else True,
                        of_weights,
                        of_tokens,
                    )
            prims.tcgen05_commit(barriers + (Barrier.EMPTY + stage), group=prims.CTAGroup.CTA_1)
            count = count + 1
        prims.tcgen05_commit(barriers + (Barrier.DONE + buffer), group=prims.CTAGroup.CTA_1)
        tiles = tiles + 1


def instruction(part: int, plan: cutlass.Constexpr) -> prims.Tcgen05MxInstrDesc:
    """Descriptor of the product with the scales of quarter `part` of a step."""
    return prims.Tcgen05MxInstrDesc.build(
        a_dtype=cutlass.Float4E2M1FN,
        b_dtype=cutlass.Float8E4M3FN,
        n_dim=plan.tokens,
        m_dim=TILE_ROWS,
        a_sf_id=part,
        b_sf_id=part,
    )


def swizzled(start: cutlass.Pointer) -> prims.Tcgen05SmemDesc:
    """Descriptor of rows of 128 bytes, K innermost."""
    return prims.Tcgen05SmemDesc.build(
        start_address=start,
        leading_byte_offset=16,
        stride_byte_offset=8 * SWIZZLE_ROW_BYTES,
        layout=prims.Tcgen05SmemSwizzle.SWIZZLE_128B,
    )


def unswizzled(start: cutlass.Pointer) -> prims.Tcgen05SmemDesc:
    """Descriptor of 32 rows of 16 bytes in a row."""
    return prims.Tcgen05SmemDesc.build(
        start_address=start,
        leading_byte_offset=16,
        stride_byte_offset=8 * CHUNK,
        layout=prims.Tcgen05SmemSwizzle.NONE,
    )


# Epilogue


@cute.jit
def finish_tiles(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    warp: Int32,
    first: Int32,
    stride: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Thread r has output row r of the work tile, for all its slots, 16 of them at a time."""
    thread = cute.arch.thread_idx()[0]
    largest = Int32((smem + plan.largest_offset).toint())
    tiles = Int32(0)
    for index in cutlass.range(first, end, stride):
        tile = Int64(index // a.row_tiles) * 4
        first_slot, num_slots = ptx.load_i32(a.tile_first + tile), ptx.load_i32(a.tile_count + tile)
        row_tile = index % a.row_tiles
        buffer = tiles % 2
        wait(barriers, Barrier.DONE + buffer, tiles // 2 & 1)
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        start = buffer * plan.accumulator_columns
        for column in cutlass.range(0, plan.tokens, CHUNK):
            words = load_tmem(tmem_columns(tmem, warp, start + column, Int32), CHUNK)
            if cutlass.const_expr(plan.product is Product.GATE_UP):
                up_words = load_tmem(tmem_columns(tmem, warp, start + plan.tokens + column, Int32), CHUNK)
            prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
            sums = [as_float(word) for word in words]
            slot, left = first_slot + column, num_slots - column
            if cutlass.const_expr(plan.product is Product.GATE_UP):
                ups = [as_float(word) for word in up_words]
                chunk = tiles * (plan.tokens // CHUNK) + column // CHUNK  # alternate places, across work tiles too
                place = largest + chunk % 2 * (WARPS_OF_GROUP * CHUNK * 4)
                store_hidden(a, sums, ups, slot, left, row_tile, thread, warp, place)
            else:
                store_rows(a, sums, slot, left, row_tile, thread)
        prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
        arrive(barriers + (Barrier.FREE + buffer))
        tiles = tiles + 1


@cute.jit
def store_hidden(
    a: Arguments,
    gates: list,
    ups: list,
    slot: Int32,
    count: Int32,
    row_tile: Int32,
    thread: Int32,
    warp: Int32,
    largest: Int32,
) -> None:
    """h of 16 slots, of which `count` exist: rounded to bf16 where the release does, then to e4m3 over 128 channels."""
    gates, ups = rounded(gates), rounded(ups)
    hidden = []
    for i in cutlass.range_constexpr(CHUNK):
        weight = ptx.load_or_zeros(Float32, 1, a.routing + Int64(slot + i) * 4, Int32(i < count), cache="")
        hidden.append(bf16_rows.mul(weight, swiglu(gates[i], ups[i], a.limit)))
    hidden = rounded(hidden)
    own = [ptx.warp_max(Int32(bf16_rows.bits_of(bf16_rows.magnitude(value)))) for value in hidden]
    if thread % 32 == 0:
        for i in cutlass.range_constexpr(0, CHUNK, 4):
            ptx.store_shared(largest + (warp * (CHUNK * 4) + i * 4), tuple(own[i : i + 4]))
    prims.barrier_cta_sync_aligned(NamedBarrier.EPILOGUE, thread_count=GROUP_THREADS)
    of_warps = [
        [
            value
            for i in range(0, CHUNK, 4)
            for value in ptx.load_shared_f32x4(largest + (of_warp * (CHUNK * 4) + i * 4))
        ]
        for of_warp in range(WARPS_OF_GROUP)
    ]
    width = a.row_tiles * TILE_ROWS
    for i in cutlass.range_constexpr(CHUNK):
        exponent = e4m3.scale_exponent(
            ptx.fmax(ptx.fmax(of_warps[0][i], of_warps[1][i]), ptx.fmax(of_warps[2][i], of_warps[3][i]))
        )
        code = e4m3.codes([hidden[i]] * 4, exponent)[0]
        if i < count:
            place = Int64(slot + i)
            ptx.asm("st.global.b8 [{$r0}], {$r1};", [], a.out + place * width + row_tile * TILE_ROWS + thread, code)
            if thread == 0:
                ptx.store_u32(a.out_scales + (place * a.row_tiles + row_tile) * 4, exponent * 0x01010101)


def swiglu(gate: Float32, up: Float32, limit: Float32) -> Float32:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` in fp32."""
    gate = bf16_rows.at_most(gate, limit)
    silu = bf16_rows.mul(gate, bf16_rows.reciprocal(bf16_rows.add(Float32(1.0), bf16_rows.exp(-gate))))
    return bf16_rows.mul(silu, bf16_rows.at_most(bf16_rows.at_least(up, -limit), limit))


def rounded(values: list) -> list:
    """Values as bf16 has them."""
    return bf16_rows.channels(bf16_rows.packed(values))


@cute.jit
def store_rows(a: Arguments, sums: list, slot: Int32, count: Int32, row_tile: Int32, thread: Int32) -> None:
    """One output row of 16 slots, in bf16."""
    width = a.row_tiles * TILE_ROWS
    words = bf16_rows.packed(sums)
    for i in cutlass.range_constexpr(CHUNK):
        if i < count:
            address = a.out + (Int64(slot + i) * width + row_tile * TILE_ROWS + thread) * 2
            half = words[i // 2] if i % 2 == 0 else words[i // 2] >> 16
            ptx.asm("st.global.b16 [{$r0}], {$r1};", [], address, Uint32(half))
