"""The FP8 product on Blackwell (sm_100a): e4m3 times e4m3 by block-scaled `tcgen05.mma`, for any number of tokens.

A work tile is 32, 64 or 128 rows of the weight times up to N tokens. Weights are the left operand, tokens the narrow
right one, so a decode step streams the weight once. Persistent CTAs compute work tiles in order, tiles of rows fastest:
tokens stay in L2. An instruction always has M = 128, since block scales allow no less: in a tile of 32 rows the other
96 rows are codes of what lies behind the tile's in the stage, and their lanes of tensor memory are never read.
Warps of a CTA, and their waits:

    CODES (1 thread)       TMA: the codes of weight and tokens; rows after the end are zeros
        waits empty[stage]; the bytes arrive at codes[stage]
    SCALES (4 warps)       the scales of both by `cp.async`, some stages ahead, packed in shared memory
        waits empty[stage], arrives at scales[stage]
    MMA (1 thread)         scales into tensor memory, four products of K = 32 a block of 128 channels
        waits free[buffer] once a work tile, codes[stage] and scales[stage]; commits empty[stage], done[buffer]
    EPILOGUE (4 warps)     lane r of tensor memory is row r of the tile; a column is a token
        waits done[buffer], arrives at free[buffer]

A scale of 128 channels, fp32 and a power of two in global memory, becomes a ue8m0, byte b of a word for block b of the
stage; the four products of a block name that byte. A weight's scale is that of 128 rows. All of K is summed in tensor
memory in one order, so a token's bits depend neither on the other tokens nor on the work tile.

CODES does not wait for the kernel before, to load weights (`dependent_launch`, rule 1): while that kernel ends, the
weights of all stages that the first work tile fills are in flight.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as experimental_cuda
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.experimental import primitives as prims

from dsv4_kernels.device import bf16_rows, dependent_launch, mbarrier, ptx, tcgen05
from dsv4_kernels.device.mbarrier import arrive, wait
from dsv4_kernels.device.pipeline import stage_of
from dsv4_kernels.device.pointers import typed
from dsv4_kernels.device.tcgen05 import as_float, load_tmem, swizzled, tmem_columns, unswizzled
from dsv4_kernels.linear.fp8_tcgen05_plan import (
    ACCUMULATORS,
    BLOCK,
    CHUNK,
    GROUP_THREADS,
    LANES,
    PRODUCT_BYTES,
    PRODUCTS_PER_BLOCK,
    SCALE_COLUMNS,
    SCALE_ROWS,
    SCALE_TILE_BYTES,
    THREADS,
    WARPS_OF_GROUP,
    Arguments,
    Barrier,
    Warp,
)


@cute.jit
def launch(a: Arguments, num_ctas: Int32, plan: cutlass.Constexpr, stream: cuda.CUstream) -> None:
    """Launches the persistent kernel; num_ctas is at most the number of multiprocessors."""
    weight = tensor_map(a.weight, a.num_blocks * BLOCK, a.num_rows, a.weight_row_bytes, plan.rows)
    codes = tensor_map(a.codes, a.num_blocks * BLOCK, a.num_tokens, a.codes_row_bytes, plan.tokens)
    kernel(a, weight, codes, plan).launch(
        grid=(num_ctas, 1, 1),
        block=(THREADS, 1, 1),
        smem=plan.smem_bytes,
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=dependent_launch.is_on(),
    )


def tensor_map(address: Int64, k: Int32, rows: Int32, row_bytes: Int64, box_rows: int) -> experimental_cuda.TensorMap:
    """The TMA descriptor of rows of codes, of which a copy takes BLOCK channels of `box_rows` rows."""
    return experimental_cuda.create_tensor_map_tiled(
        global_address=address,
        dtype=cutlass.Uint8,
        global_dims=[k, rows],
        global_strides=[row_bytes // 16],
        box_dims=[BLOCK, box_rows],
        swizzle=experimental_cuda.TensorMapSwizzle.s128b,
    )


@cute.kernel
def kernel(
    a: Arguments,
    weight: cutlass.GridConstant[experimental_cuda.TensorMap],
    codes: cutlass.GridConstant[experimental_cuda.TensorMap],
    plan: cutlass.Constexpr,
) -> None:
    """Sets up barriers and tensor memory, and sends every warp to its role."""
    smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).raw_ptr()
    barriers = typed(smem + plan.barriers_offset, Int64)
    tmem_address = typed(smem + plan.tmem_address_offset, Int32)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    first, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    if warp == Warp.CODES:
        groups = [
            (Barrier.CODES, plan.stages, 1),
            (Barrier.SCALES, plan.stages, WARPS_OF_GROUP),
            (Barrier.EMPTY, plan.stages, 1),
            (Barrier.DONE, ACCUMULATORS, 1),
            (Barrier.FREE, ACCUMULATORS, plan.epilogue_warps),
        ]
        mbarrier.initialise(barriers, groups)
        if prims.elect_sync():  # the same lane each time
            load_first_weights(a, weight, smem, barriers, first, plan)
    if warp == Warp.MMA:
        tcgen05.allocate(tmem_address, plan.tmem_columns)
    prims.barrier_cta_sync_aligned(0)  # barriers and tensor memory are set up
    dependent_launch.begin()  # the next kernel may start: tensor memory is allocated
    tmem = prims.TmemAddr(tmem_address.load())

    if warp < Warp.SCALES:
        if warp < plan.epilogue_warps:
            finish_tiles(a, barriers, tmem, warp, first, stride, plan)
    elif warp < Warp.CODES:
        load_scales(a, smem, barriers, first, stride, plan)
    elif warp == Warp.CODES:
        if prims.elect_sync():
            load_codes(a, weight, codes, smem, barriers, first, stride, plan)
    else:
        if prims.elect_sync():
            multiply(a, smem, barriers, tmem, first, stride, plan)

    prims.barrier_cta_sync_aligned(0)  # the epilogue has completed its last loads of tensor memory
    if warp == Warp.MMA:
        tcgen05.free(tmem, plan.tmem_columns)


@cute.jit
def wait_until_empty(barriers: cutlass.Pointer, count: Int32, plan: cutlass.Constexpr) -> None:
    """Waits until the products of the previous step in the stage of step `count` are done."""
    if count >= plan.stages:
        stage = stage_of(count, plan.stages)
        wait(barriers, Barrier.EMPTY + stage.index, stage.phase ^ 1)


@cute.jit
def stages_of_first_tile(a: Arguments, plan: cutlass.Constexpr) -> Int32:
    """The stages that the first work tile fills at once."""
    return cutlass.min((a.num_blocks + (plan.blocks - 1)) // plan.blocks, Int32(plan.stages))


@cute.jit
def load_first_weights(
    a: Arguments,
    weight: experimental_cuda.TensorMap,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    first: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """One thread loads the weights of the stages that need not become empty, while the kernel before may still run."""
    row = first % a.row_tiles * plan.rows
    for stage in cutlass.range(stages_of_first_tile(a, plan)):
        load_weights(weight, smem, barriers, stage, stage * plan.blocks, row, plan)


@cute.jit
def load_weights(
    weight: experimental_cuda.TensorMap,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    stage: Int32,
    block: Int32,
    row: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Announces a stage's bytes of both operands, and loads the weight's, from `block` on: zeros after the last."""
    full = barriers + (Barrier.CODES + stage)
    prims.mbarrier_arrive_expect_tx(full, plan.codes_bytes)
    for i in cutlass.range_constexpr(plan.blocks):
        target = smem + (stage * plan.stage_bytes + i * plan.weight_bytes)
        prims.cp_async_bulk_tensor_shared_cta_global(target, weight.get_ptr(), ((block + i) * BLOCK, row), full)


@cute.jit
def load_codes(
    a: Arguments,
    weight: experimental_cuda.TensorMap,
    codes: experimental_cuda.TensorMap,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    first: Int32,
    stride: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """One thread loads the codes of both operands, stage after stage; the first stages have their weights."""
    count = Int32(0)
    for index in cutlass.range(first, a.num_tiles, stride):
        row = index % a.row_tiles * plan.rows
        token = index // a.row_tiles * plan.tokens
        for block in cutlass.range(0, a.num_blocks, plan.blocks):
            stage = stage_of(count, plan.stages).index
            if count >= stages_of_first_tile(a, plan):
                wait_until_empty(barriers, count, plan)
                load_weights(weight, smem, barriers, stage, block, row, plan)
            full = barriers + (Barrier.CODES + stage)
            for i in cutlass.range_constexpr(plan.blocks):
                offset = plan.blocks * plan.weight_bytes + i * plan.token_bytes
                target = smem + (stage * plan.stage_bytes + offset)
                prims.cp_async_bulk_tensor_shared_cta_global(
                    target, codes.get_ptr(), ((block + i) * BLOCK, token), full
                )
            count = count + 1


@cute.jit
def load_scales(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    first: Int32,
    stride: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Thread i loads the scales of lane i of the weight, and of tokens i and 128 + i, of every block of a stage. Tokens
    and blocks that do not exist get zeros."""
    thread = cute.arch.thread_idx()[0] % GROUP_THREADS
    place = Int32(smem.toint()) + plan.scales_offset + thread % 32 * CHUNK + thread // 32 * 4
    for stage in cutlass.range_constexpr(plan.stages):  # tcgen05.cp also copies the scales of columns beyond N
        for tile in cutlass.range_constexpr(plan.token_scale_tiles * plan.blocks):
            at = place + stage * plan.stage_bytes + (plan.blocks + tile) * SCALE_TILE_BYTES
            ptx.store_shared_u32(at, Int32(0))
    count = Int32(0)
    for index in cutlass.range(first, a.num_tiles, stride):
        row = index % a.row_tiles * plan.rows
        of_weight = a.weight_scale + Int64(row // BLOCK) * a.weight_scale_row_bytes
        token = index // a.row_tiles * plan.tokens + thread
        sources = [(of_weight, Int64(4), Int32(4))]
        for tile in cutlass.range_constexpr(plan.token_scale_tiles):
            exists = (token + tile * SCALE_ROWS < a.num_tokens) & (thread + tile * SCALE_ROWS < plan.tokens)
            number = cutlass.select_(exists, token + tile * SCALE_ROWS, Int32(0))
            num_bytes = cutlass.select_(exists, Int32(4), Int32(0))
            sources.append((a.scales + Int64(number) * a.scales_row_bytes, a.scales_block_bytes, num_bytes))
        for block in cutlass.range(0, a.num_blocks, plan.blocks):
            wait_until_empty(barriers, count, plan)
            target = place + stage_of(count, plan.stages).index * plan.stage_bytes
            for tile in cutlass.range_constexpr(1 + plan.token_scale_tiles):
                address, block_bytes, num_bytes = sources[tile]
                address = address + Int64(block) * block_bytes
                for i in cutlass.range_constexpr(plan.blocks):
                    of_block = num_bytes
                    if i > 0:
                        of_block = cutlass.select_(block + i < a.num_blocks, num_bytes, Int32(0))
                        address = address + block_bytes
                    to = target + (tile * plan.blocks + i) * SCALE_TILE_BYTES
                    ptx.copy_4_bytes_async(to, address, of_block)
            cute.arch.cp_async_commit_group()
            if count >= plan.ahead:
                cute.arch.cp_async_wait_group(plan.ahead)
                publish_scales(barriers, count - plan.ahead, place, plan)
            count = count + 1
    cute.arch.cp_async_wait_group(0)
    for late in cutlass.range(cutlass.max(count - plan.ahead, 0), count):
        publish_scales(barriers, late, place, plan)


@cute.jit
def publish_scales(barriers: cutlass.Pointer, count: Int32, place: Int32, plan: cutlass.Constexpr) -> None:
    """Packs the exponents of this thread's fp32 scales, a byte for each block of the stage, and signals that the
    stage's scales are complete."""
    stage = stage_of(count, plan.stages).index
    for tile in cutlass.range_constexpr(1 + plan.token_scale_tiles):
        address = place + stage * plan.stage_bytes + tile * plan.blocks * SCALE_TILE_BYTES
        word = ptx.as_u32(ptx.load_shared_f32(address)) >> 23
        for i in cutlass.range_constexpr(1, plan.blocks):
            exponent = ptx.as_u32(ptx.load_shared_f32(address + i * SCALE_TILE_BYTES)) >> 23
            word = word | exponent << 8 * i
        ptx.store_shared_u32(address, word)
    prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
    arrive(barriers + (Barrier.SCALES + stage))


@cute.jit
def multiply(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    first: Int32,
    stride: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """One thread issues all products. One scale buffer suffices: the tensor pipe keeps copies and products in order."""
    count, tiles = Int32(0), Int32(0)
    zero = Int32(0)
    for _ in cutlass.range(first, a.num_tiles, stride):
        buffer = stage_of(tiles, ACCUMULATORS)
        if tiles >= ACCUMULATORS:
            wait(barriers, Barrier.FREE + buffer.index, buffer.phase ^ 1)
            prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        out = tmem_columns(tmem, zero, buffer.index * plan.tokens, Float32)
        for block in cutlass.range(0, a.num_blocks, plan.blocks):
            stage, phase = stage_of(count, plan.stages)
            wait(barriers, Barrier.CODES + stage, phase)
            wait(barriers, Barrier.SCALES + stage, phase)
            start = smem + stage * plan.stage_bytes
            for tile in cutlass.range_constexpr(1 + plan.token_scale_tiles):
                prims.tcgen05_cp(
                    prims.Tcgen05CpShape.SHAPE_32X128B,
                    tmem_columns(tmem, zero, plan.scales_column + tile * SCALE_COLUMNS, Float32),
                    unswizzled(start + (plan.scales_offset + tile * plan.blocks * SCALE_TILE_BYTES)),
                    group=prims.CTAGroup.CTA_1,
                    multicast=prims.Tcgen05CpMulticast.WARPX4,
                )
            for i in cutlass.range_constexpr(plan.blocks):
                if cutlass.const_expr(i == 0) or block + i < a.num_blocks:
                    multiply_block(start, tmem, out, i, (block > 0) if i == 0 else True, plan)
            prims.tcgen05_commit(barriers + (Barrier.EMPTY + stage), group=prims.CTAGroup.CTA_1)
            count = count + 1
        prims.tcgen05_commit(barriers + (Barrier.DONE + buffer.index), group=prims.CTAGroup.CTA_1)
        tiles = tiles + 1


@cute.jit
def multiply_block(
    stage: cutlass.Pointer,
    tmem: prims.TmemAddr,
    out: cutlass.Array,
    number: cutlass.Constexpr,
    adds: bool,
    plan: cutlass.Constexpr,
) -> None:
    """Issues the products of block `number` of a stage; the first one overwrites `out` unless `adds`. The left operand
    is LANES rows from the tile's first on; they end within the stage."""
    zero = Int32(0)
    weights = swizzled(stage + number * plan.weight_bytes)
    tokens = swizzled(stage + (plan.blocks * plan.weight_bytes + number * plan.token_bytes))
    for part in cutlass.range_constexpr(PRODUCTS_PER_BLOCK):
        prims.tcgen05_mma_block_scale(
            prims.Tcgen05MMAKind.MXF8F6F4,
            prims.CTAGroup.CTA_1,
            out,
            weights.advance_start_address(part * PRODUCT_BYTES),
            tokens.advance_start_address(part * PRODUCT_BYTES),
            prims.Tcgen05MxInstrDesc.build(
                a_dtype=cutlass.Float8E4M3FN,
                b_dtype=cutlass.Float8E4M3FN,
                n_dim=plan.tokens,
                m_dim=LANES,
                a_sf_id=number,
                b_sf_id=number,
            ),
            adds if part == 0 else True,
            tmem_columns(tmem, zero, plan.scales_column, Float32),
            tmem_columns(tmem, zero, plan.scales_column + SCALE_COLUMNS, Float32),
            scale_vec_size=None,
        )


@cute.jit
def finish_tiles(
    a: Arguments,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    warp: Int32,
    first: Int32,
    stride: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Stores all work tiles of a CTA in bf16. Thread r has row r of the tile, for all tokens, 16 at a time."""
    thread = cute.arch.thread_idx()[0]
    tiles = Int32(0)
    for index in cutlass.range(first, a.num_tiles, stride):
        row = index % a.row_tiles * plan.rows + thread
        token = index // a.row_tiles * plan.tokens
        buffer = stage_of(tiles, ACCUMULATORS)
        wait(barriers, Barrier.DONE + buffer.index, buffer.phase)
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        for column in cutlass.range(0, plan.tokens, CHUNK):
            words = load_tmem(tmem_columns(tmem, warp, buffer.index * plan.tokens + column, Int32), CHUNK)
            prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
            pairs = bf16_rows.packed([as_float(word) for word in words])
            left = cutlass.select_(row < a.num_rows, a.num_tokens - token - column, Int32(0))
            address = a.out + Int64(token + column) * a.out_row_bytes + Int64(row) * 2
            for i in cutlass.range_constexpr(CHUNK):
                if i < left:
                    half = pairs[i // 2] if i % 2 == 0 else pairs[i // 2] >> 16
                    ptx.asm("st.global.b16 [{$r0}], {$r1};", [], address + i * a.out_row_bytes, Uint32(half))
        prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
        arrive(barriers + (Barrier.FREE + buffer.index))
        tiles = tiles + 1
