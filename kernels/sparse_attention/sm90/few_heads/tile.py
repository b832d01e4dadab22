"""Attention on Hopper with at most 16 heads for few tokens with few keys: every tile of 64 keys has its own CTA.

With few tokens a launch takes as long as one CTA's chain of loads, products and exchanges, and as the fetch of its
instructions, which no CTA before it has fetched. So here a CTA computes one tile and ends: no loop over tiles or
tokens, no merge before the exchange, a loop over channel groups instead of eight copies of its body (a third of the
instructions of kernel.py). A tile's number follows from the CTA alone, so row numbers do not wait for the token's
length, and all rows are requested at once.

The CTAs of a token are a cluster. Each sends its tile's result, 64 channels at a time, to the shared memory of the CTA
that merges these channels (`st.async`). So no CTA waits for a reply, as where a CTA reads the results of the others,
and none for its own stores to become visible.

A page table may have room for more keys than the cluster has CTAs, because a CUDA graph has tables for the longest
request. A token that has so many is computed by kernel.py's code, by up to eight CTAs of the cluster.

Tiles are computed as in kernel.py and merged in its order, to elements and then to the result, so the bits are the
same; which of the two computes a call may depend on the batch.

    who waits         for what                                                      at
    a thread          its rows                                                      cp.async group
    the CTA           Q                                                             barrier 0
    the CTA           maxima of its warps                                           TILE_BARRIER
    the CTA           P, values and sums                                            TILE_BARRIER
    the cluster       the mbarriers below                                           cluster barrier
    a CTA with a tile the CTAs that merge: results overwrite their values           mbarrier `ready`
    a CTA that merges results of all tiles                                          mbarrier `received`
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.kv_layout import NOPE_DIM
from dsv4_kernels.sparse_attention.sm90 import tile_scheduler as scheduler
from dsv4_kernels.sparse_attention.sm90.barriers import sync
from dsv4_kernels.sparse_attention.sm90.epilogue import inverse_sum, load_sink
from dsv4_kernels.sparse_attention.sm90.few_heads import elements, rows, softmax
from dsv4_kernels.sparse_attention.sm90.few_heads import kernel as kernel_of_many
from dsv4_kernels.sparse_attention.sm90.few_heads.operands import mma_operands
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import (
    COLUMNS,
    CTAS,
    GROUP_BYTES,
    PIECES,
    ROWS,
    STAGE_BYTES,
    STATISTICS,
    TILE_BARRIER,
    TILES_OF_STEP,
    WARPGROUP,
    shared_memory,
)
from dsv4_kernels.sparse_attention.sm90.plan import (
    BLOCK_BYTES,
    GROUP,
    GROUPS,
    KEY_TILE,
    NO_ROW_MAX,
    STEP,
    Arguments,
    Entries,
)
from dsv4_kernels.sparse_attention.sm90.softmax import multiply, rescale_factors


@cute.jit
def launch(config: cutlass.Constexpr, arguments: Arguments, clusters: Int32, stream: cuda.CUstream) -> None:
    """Launches a cluster for each token, with a CTA for each of `ctas_per_token` tiles."""
    kernel(config, arguments).launch(
        grid=[arguments.ctas_per_token, clusters, 1],
        cluster=[arguments.ctas_per_token, 1, 1],
        block=[WARPGROUP, 1, 1],
        stream=stream,
        min_blocks_per_mp=CTAS,
        preferred_smem_carveout=100,
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(config: cutlass.Constexpr, args: Arguments) -> None:
    """Computes one tile of a token's keys, and merges some channels of all its tiles."""
    thread, _, _ = cute.arch.thread_idx()
    tile, token, _ = cute.arch.block_idx()
    parts, _, _ = cute.arch.grid_dim()
    shared = cutlass.utils.SmemAllocator().allocate(shared_memory(config))
    dependent_launch.begin()
    row = thread // 32 * 16 + thread % 32 // 4
    q = cute.make_rmem_tensor((4 * GROUPS,), Uint32)
    indices = cute.make_rmem_tensor((ROWS,), Int32)
    visible = scheduler.visible_entries(config, args, token)
    if const_expr(config.entries == Entries.PAGES):
        request = ptx.load_i32(args.token_to_request + Int64(token) * 4)
        rows.load_q(args, thread, token, q)
        load_indices(config, args, token, tile, row, request, indices)
    else:
        load_indices(config, args, token, tile, row, Int32(0), indices)
        rows.load_q(args, thread, token, q)
    sink = load_sink(args, thread % COLUMNS)
    tiles = scheduler.count_steps(args, visible) * TILES_OF_STEP
    if tiles <= parts:
        window_tiles = (args.window_width + STEP - 1) // STEP * TILES_OF_STEP
        if tile >= window_tiles:
            for i in cutlass.range_constexpr(ROWS):
                slot = (tile - window_tiles) * KEY_TILE + row + 8 * i
                indices[i] = cutlass.select_(slot < visible, indices[i], Int32(-1))
        set_up_barriers(shared, thread, tile, tiles, parts)
        if tile < tiles:
            compute(config, args, shared, thread, tile, tiles, parts, indices, q)
        else:
            cute.arch.cluster_wait()
        if tile < num_combiners(parts):
            ptx.wait_cluster(Int32(shared.barriers.data_ptr().toint()) + 8, Int32(0))
            combine(args, shared, thread, token, tiles, tile, parts, sink)
    elif const_expr(config.entries == Entries.PAGES):
        _, clusters, _ = cute.arch.grid_dim()
        if tile < num_combiners(parts):  # the other CTAs end; barriers of the cluster do not wait for them
            kernel_of_many.attend(config, args, shared, thread, token, clusters, tile, num_combiners(parts))


def num_combiners(parts: Int32) -> Int32:
    """CTAs that merge channels: the largest power of two up to `parts` and up to the number of channel groups."""
    found = Int32(1)
    for n in (2, 4, 8):
        found = Int32(cutlass.select_(parts >= n, Int32(n), found))
    return found


@cute.jit
def set_up_barriers(shared: cutlass.Constexpr, thread: Int32, tile: Int32, tiles: Int32, parts: Int32) -> None:
    """Initialises the mbarriers, and arrives at the cluster's barrier."""
    combiners = num_combiners(parts)
    if thread == 0:
        ready, received = shared.barriers.data_ptr(), shared.barriers.data_ptr() + 1
        cute.arch.mbarrier_init(ready, ptx.imin(tiles, combiners))
        cute.arch.mbarrier_init(received, 1)
        cute.arch.mbarrier_init_fence()
        if tile < combiners:
            num_bytes = tiles * (groups_of_cta(parts) * GROUP_BYTES + STATS_BYTES)
            cute.arch.mbarrier_arrive_and_expect_tx(received, num_bytes)
    cute.arch.sync_warp()
    cute.arch.cluster_arrive_relaxed(aligned=True)


@cute.jit
def compute(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    thread: Int32,
    tile: Int32,
    tiles: Int32,
    parts: Int32,
    indices: cute.Tensor,
    q: cute.Tensor,
) -> None:
    """Computes a tile of loaded row indices and Q, and sends its result."""
    lane, warp = thread % 32, thread // 32
    quad = lane % 4
    places = rows.Places.of(shared, thread)
    scores_mma, out_mma, q_operand, value_operand, p_operand = mma_operands(shared, thread)
    scales = cute.make_rmem_tensor((2 * ROWS,), Uint32)
    addresses = cute.make_rmem_tensor((ROWS,), Int64)
    rows.locate(config, args, tile, quad, indices, addresses, scales)
    copy_rows(config, addresses, places, quad)
    rows.store_q(shared, thread, q)
    cute.arch.fence_view_async_shared()
    cute.arch.cp_async_wait_group(0)
    cute.arch.barrier()
    scores = cute.make_rmem_tensor(scores_mma.partition_shape_C((KEY_TILE, COLUMNS)), Float32)
    compute_scores(config, places, scales, scores_mma, q_operand, scores)
    is_hole = (indices[0] < 0, indices[1] < 0)
    tile_max = softmax.find_tile_max(args, shared, warp, lane, is_hole, scores)
    softmax.exponentiate(args, shared, warp, lane, tile_max, scores)
    shape = out_mma.partition_shape_C((GROUP, COLUMNS))
    products = [cute.make_rmem_tensor(shape, Float32) for _ in range(GROUPS)]
    for i in cutlass.range_constexpr(GROUPS):
        multiply(out_mma, products[i], value_operand[None, None, None, i], p_operand, 0, False)
        warpgroup.commit_group()
    row_max, row_sum, weight = (cute.make_rmem_tensor((STATISTICS,), Float32) for _ in range(3))
    row_max.fill(NO_ROW_MAX)
    for c in cutlass.range_constexpr(STATISTICS):
        _, weight[c] = rescale_factors(row_max, tile_max[c], c)
    sums = softmax.load_of_warps(softmax.place_of_columns(shared.row_sums, quad))
    for c in cutlass.range_constexpr(STATISTICS):
        s0, s1, s2, s3 = sums[c]
        row_sum[c] = ((s0 + s1) + (s2 + s3)) * weight[c]
    warpgroup.wait_group(0)
    sync(TILE_BARRIER, WARPGROUP)  # all values of this CTA have been read
    cute.arch.cluster_wait()
    if (tile < num_combiners(parts)) & (thread < tiles):  # a CTA without a tile has no values
        ptx.arrive_remote(ptx.remote(Int32(shared.barriers.data_ptr().toint()), thread))
    ptx.wait_cluster(Int32(shared.barriers.data_ptr().toint()), Int32(0))
    send_statistics(shared, warp, lane, tile, parts, row_max, row_sum)
    send_values(config, shared, warp, lane, tile, parts, weight, products)


@cute.jit
def load_indices(
    config: cutlass.Constexpr,
    args: Arguments,
    token: Int32,
    tile: Int32,
    row: Int32,
    request: Int32,
    indices: cute.Tensor,
) -> None:
    """Loads the indices of this thread's rows of a tile; -1 for holes and beyond the list, anything for entries that
    the token does not see."""
    window_tiles = (args.window_width + STEP - 1) // STEP * TILES_OF_STEP
    indices.fill(-1)
    if tile < window_tiles:
        slot = tile * KEY_TILE + row
        first = args.window_rows + (Int64(token) * args.window_rows_stride + slot) * 4
        rows.load_listed(first, args.window_width - slot, indices)
    elif const_expr(config.entries == Entries.LIST):
        slot = (tile - window_tiles) * KEY_TILE + row
        first = args.entry_list + (Int64(token) * args.entry_list_stride + slot) * 4
        rows.load_listed(first, args.num_entries - slot, indices)
    elif const_expr(config.entries == Entries.PAGES):
        pages = args.entry_list + Int64(request) * args.entry_list_stride * 4
        for i in cutlass.range_constexpr(ROWS):
            slot = (tile - window_tiles) * KEY_TILE + row + 8 * i
            page = slot // args.entries_per_page
            exists = args.num_entries - slot
            number = ptx.load_or_zeros(Int32, 1, pages + Int64(page) * 4, exists, "gt.s32", cache="")
            indices[i] = number * args.entries_per_page + (slot - page * args.entries_per_page)


@cute.jit
def copy_rows(config: cutlass.Constexpr, addresses: cute.Tensor, places: rows.Places, quad: Int32) -> None:
    """Starts copying all channels of this thread's rows, to where `rows.copy_group` copies them."""
    for group in cutlass.range_constexpr(GROUPS):
        for i in cutlass.range_constexpr(ROWS):
            if const_expr(group < config.staged_groups):
                ptx.copy_row_async(places.stage + (group * ROWS + i) * STAGE_BYTES, addresses[i], group * GROUP)
            else:
                offset = quad * 16 + NOPE_DIM if config.fp8_rows else group * 2 * GROUP
                for j in cutlass.range_constexpr(2):
                    target = places.chunks[j] + (group * BLOCK_BYTES + i * 8 * 2 * GROUP)
                    ptx.copy_row_async(target, addresses[i], offset + 16 * j)
    cute.arch.cp_async_commit_group()


@cute.jit
def compute_scores(
    config: cutlass.Constexpr,
    places: rows.Places,
    scales: cute.Tensor,
    mma: cute.TiledMma,
    q: cute.Tensor,
    scores: cute.Tensor,
) -> None:
    """Scores of the tile, by the same products in the same order as in kernel.py; stores the values."""
    shape = mma.partition_shape_A((KEY_TILE, GROUP // 2))
    operands = [cute.make_rmem_tensor(shape, BFloat16) for _ in range(2)]
    for group in cutlass.range(config.staged_groups, unroll=1):
        stages = [places.stage + (group * ROWS + i) * STAGE_BYTES for i in range(ROWS)]
        words = [ptx.load_shared_16_bytes(stage) for stage in stages]
        scale = []
        for i in cutlass.range_constexpr(ROWS):
            of_four = Uint32(cutlass.select_(group < 4, scales[2 * i], scales[2 * i + 1]))
            scale.append(ptx.scale_pair((of_four >> (8 * (group % 4))) & 0xFF))
        for j in cutlass.range_constexpr(2):
            warpgroup.wait_group(1)  # the operand's previous contents have been multiplied
            packed = cute.recast_tensor(operands[j], Uint32)
            for i in cutlass.range_constexpr(ROWS):
                for b in cutlass.range_constexpr(2):
                    packed[4 * b + i], packed[4 * b + 2 + i] = ptx.dequantise(words[i][2 * j + b], scale[i])
            for b in cutlass.range_constexpr(2):
                place = (places.matrix ^ ((4 * j + 2 * b) * 16)) + group * BLOCK_BYTES
                ptx.store_matrices(place, tuple(packed[4 * b + k] for k in range(4)))
            multiply_half_group(mma, scores, operands[j], q[None, None, None, group], j, (group > 0) | (j > 0))
    for group in cutlass.range_constexpr(config.staged_groups, GROUPS):
        words = rows.load_group(config, places, group)
        for j in cutlass.range_constexpr(2):
            warpgroup.wait_group(1)
            packed = cute.recast_tensor(operands[j], Uint32)
            rows.convert_half_group(config, group, j, words, scales, packed)
            multiply_half_group(mma, scores, operands[j], q[None, None, None, group], j, group + j > 0)
    warpgroup.wait_group(0)


def multiply_half_group(
    mma: cute.TiledMma, scores: cute.Tensor, operand: cute.Tensor, q: cute.Tensor, j: int, accumulate: object
) -> None:
    """Multiplies as `rows.multiply_half_group`; the GPU may decide whether the first product accumulates."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    for k in range(2):
        atom.set(warpgroup.Field.ACCUMULATE, True if k else accumulate)
        cute.gemm(atom, scores, operand[None, None, k], q[None, None, 2 * j + k], scores)
    warpgroup.commit_group()


# The exchange: a CTA that merges has, for each tile and each of its channel groups, GROUP_BYTES of results where its
# values have been: [tile][group of the CTA][64 channels][heads] fp32, in the order of `place_of`.

STATS_BYTES = COLUMNS * 8
"""Bytes of a tile's maxima and sums."""


def groups_of_cta(parts: Int32) -> Int32:
    """Channel groups that a CTA merges."""
    return ptx.divide(Int32(GROUPS), num_combiners(parts))


def place_of(channel: Int32, quad: Int32) -> Int32:
    """Byte offset of heads 2 quad, 2 quad + 1, 2 quad + 8 and 2 quad + 9 of a channel within a group's results.

    Bit 3 of the channel flips its bit 0, so that the threads that merge access different banks.
    """
    return (channel ^ (channel // 8 & 1)) * (COLUMNS * 4) + quad * 16


@cute.jit
def send_statistics(
    shared: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
    tile: Int32,
    parts: Int32,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
) -> None:
    """Sends a tile's maxima and sums to all CTAs that merge: eight at most, four lanes each."""
    if (warp == 0) & (lane // 4 < num_combiners(parts)):
        received = ptx.remote(Int32(shared.barriers.data_ptr().toint()) + 8, lane // 4)
        own = Int32(shared.stats.data_ptr().toint()) + (tile * COLUMNS + lane % 4 * 2) * 8
        stats = ptx.remote(own, lane // 4)
        for i in cutlass.range_constexpr(2):
            c = 2 * i
            words = (row_max[c], row_sum[c], row_max[c + 1], row_sum[c + 1])
            ptx.store_async_f32x4(stats + i * 64, words, received)


@cute.jit
def send_values(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
    tile: Int32,
    parts: Int32,
    weight: cute.Tensor,
    products: list,
) -> None:
    """Sends each channel group of a tile's O to the CTA that merges it; undoes the permutation of channels."""
    combiners, groups = num_combiners(parts), groups_of_cta(parts)
    received = Int32(shared.barriers.data_ptr().toint()) + 8
    own = Int32(shared.values.data_ptr().toint()) + tile * groups * GROUP_BYTES
    plain = [warp * 16 + lane // 4 + 8 * i for i in range(2)]
    staged = [lane // 8 * 16 + warp * 4 + 2 * i + lane // 4 % 2 for i in range(2)]  # as in `elements.leave_element`
    for group in cutlass.range_constexpr(GROUPS):
        cta = group & (combiners - 1)
        of_group = ptx.remote(own + ptx.divide(group - cta, combiners) * GROUP_BYTES, cta)
        barrier = ptx.remote(received, cta)
        channels = staged if group < config.staged_groups else plain
        for i in cutlass.range_constexpr(2):
            words = []
            for c in cutlass.range_constexpr(STATISTICS):
                at = c // 2 * 4 + 2 * i + c % 2
                words.append(ptx.fma(products[group][at], weight[c], Float32(0.0)))
            ptx.store_async_f32x4(of_group + place_of(channels[i], lane % 4), tuple(words), barrier)


@cute.jit
def combine(
    args: Arguments,
    shared: cutlass.Constexpr,
    thread: Int32,
    token: Int32,
    tiles: Int32,
    part: Int32,
    parts: Int32,
    sink: Float32,
) -> None:
    """Merges all tiles for this CTA's channel groups, tiles to elements first, and writes O.

    A thread has one head and eight channels of each group. The elements are merged side by side, because each merge
    waits for the one before.
    """
    head, chunk = thread % COLUMNS, thread // COLUMNS
    combiners, groups = num_combiners(parts), groups_of_cta(parts)
    own = Int32(shared.values.data_ptr().toint()) + (head // 8 * 2 + head % 2) * 4
    places = [own + place_of(chunk * 8 + j, head % 8 // 2) for j in range(8)]
    of_head = Int32(shared.stats.data_ptr().toint()) + head * 8
    pieces = ptx.imin(tiles, Int32(PIECES))
    begins = [ptx.divide(ptx.imin(Int32(e), pieces) * tiles, pieces) for e in range(PIECES + 1)]
    row_max, row_sum = (cute.make_rmem_tensor((1,), Float32) for _ in range(2))
    out = cute.make_rmem_tensor((8,), Float32)
    of_elements = [[cute.make_rmem_tensor((n,), Float32) for n in (1, 1, 8)] for _ in range(PIECES)]
    for n in cutlass.range(groups, unroll=1):
        for of_element in of_elements:
            elements.clear(*of_element)
        for i in cutlass.range((tiles + PIECES - 1) // PIECES, unroll=1):
            for e in cutlass.range_constexpr(PIECES):
                # A tile beyond the element is the element's last one, or the token's, and is not merged.
                tile = ptx.imin(begins[e] + i, tiles - 1)
                merge_tile(
                    begins[e] + i < begins[e + 1],
                    of_head + tile * STATS_BYTES,
                    places,
                    tile * groups + n,
                    of_elements[e],
                )
        elements.clear(row_max, row_sum, out)
        for e in cutlass.range_constexpr(PIECES):
            if e < pieces:
                tiles_max, tiles_sum, tiles_out = of_elements[e]
                elements.merge_into(row_max, row_sum, out, tiles_max[0], tiles_sum[0], tiles_out)
        inverse = inverse_sum(sink, row_max[0], row_sum[0])
        if head < args.num_heads:
            channel = (part + n * combiners) * GROUP + chunk * 8
            at = Int64(token) * args.out_token_stride + Int64(head) * args.out_head_stride + channel
            pairs = [ptx.pack_bf16(out[j] * inverse, out[j + 1] * inverse) for j in (0, 2, 4, 6)]
            ptx.store_16_bytes(args.out + at * 2, tuple(pairs))


def merge_tile(exists: Boolean, stats: Int32, places: list, slot: Int32, of_element: list) -> None:
    """Merges the results of a tile in `slot`, if it exists, into its element; without branches."""
    tiles_max, tiles_sum, tiles_out = of_element
    joining_max, joining_sum = ptx.load_shared_f32x2(stats)
    joining = [ptx.load_shared_f32(place + slot * GROUP_BYTES) for place in places]
    # A maximum that is not larger changes no maximum; the other results are selected.
    before, weight = rescale_factors(tiles_max, Float32(cutlass.select_(exists, joining_max, Float32(NO_ROW_MAX))), 0)
    merged = ptx.fma(joining_sum, weight, tiles_sum[0] * before)
    tiles_sum[0] = Float32(cutlass.select_(exists, merged, tiles_sum[0]))
    for j in range(8):
        merged = ptx.fma(joining[j], weight, tiles_out[j] * before)
        tiles_out[j] = Float32(cutlass.select_(exists, merged, tiles_out[j]))
