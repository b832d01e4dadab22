"""Scores of a CSA layer's entries in a prefill on Blackwell (sm_100a): neighbouring tokens share the expanded keys.

A CTA has twelve neighbouring tokens and a run of pages. The tokens' queries lie in shared memory. A product is 128 keys
times one token's heads: keys are the left operand, in tensor memory, whose lane r is key r, so the thread that weights
a key's products has all of its heads. A tile is two such halves, 256 keys (four pages): a thread weights two keys with
the weights that it loads once, because reading those for every key would keep shared memory busier than the tensor core
is. Warps of a CTA, and their waits:

    EXPAND (2 x 4 warps, alternate stages)   FP4 keys of a request from global memory to a stage, as bf16
        waits empty[stage], arrives at keys[stage]
    MMA (1 thread)                           2 x 8 instructions of K = 16 for each token that sees one of the keys
        waits keys[stage], free[buffer]; commits empty[stage], done[buffer]
    WEIGH (2 x 4 warps, alternate tokens)    ReLU, weights, sum over heads
        waits done[buffer], arrives at free[buffer]

All roles walk the same list: tiles of 256 keys, and in each the tokens that see its first key. A token whose request is
not that of the token before gets another stage.

Keys become bf16, although the tensor core multiplies FP4 with block scales four times as fast: a product's operands
must have one format, and a query has that of the model, bf16, which only `index_query(quantise=True)` rounds to FP4.
Block-scaled instructions would also sum 32 or 64 channels of one scale at a time, where the decode kernel sums four
channels of each of the four scales (`scores`): a token would get other scores in a prefill than in a decode step.
Channels are in the order of `scores`, in sets of 16, and so are the weighted heads, so that their bits are equal
wherever the tensor core adds sets in order; they are equal in any order if a key's and a query's products need no
rounding, which scales within a factor of 2^9 ensure.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.experimental import primitives as prims

from dsv4_kernels.device import dependent_launch, ptx, tcgen05
from dsv4_kernels.device.bf16_rows import add
from dsv4_kernels.device.mbarrier import arrive, wait
from dsv4_kernels.device.pipeline import stage_of
from dsv4_kernels.device.pointers import typed
from dsv4_kernels.device.tcgen05 import as_float, load_tmem, swizzled, tmem_columns
from dsv4_kernels.host.launch import load_launcher
from dsv4_kernels.indexer.prefill_scores import ROW_BYTES, store_queries
from dsv4_kernels.indexer.prefill_tcgen05_plan import (
    ACCUMULATORS,
    BLOCKS,
    CODE_WORDS,
    GROUP_THREADS,
    HALF_KEYS,
    HALVES,
    KEY_COLUMNS,
    STAGE_COLUMNS,
    STAGES,
    STEP_COLUMNS,
    THREADS,
    TILE_KEYS,
    TILE_PAGES,
    TOKENS,
    WARPS_OF_GROUP,
    WEIGH_GROUPS,
    Barrier,
    Plan,
    Warp,
)
from dsv4_kernels.indexer.scores import (
    CODE_BYTES,
    HEADS_A_TILE,
    SCALE_BYTES,
    STEPS,
    Arguments,
    dequantise,
    load_words_through_l1,
    scale_of,
)
from dsv4_kernels.kv_layout import PAGE_ROWS

CTAS = 512
"""Number of CTAs to aim at: several for each multiprocessor, with enough pages for each to be worth loading its
queries."""
MAX_PAGES_A_CTA = 64


def pages_a_cta(tokens: int, num_pages: int) -> int:
    """The number of pages in a run, which one CTA scores: a multiple of TILE_PAGES."""
    pages = min(MAX_PAGES_A_CTA, num_pages * -(-tokens // TOKENS) // CTAS)
    return max(1, -(-pages // TILE_PAGES)) * TILE_PAGES


@cute.jit
def launch(
    args: Arguments, plan: cutlass.Constexpr[Plan], runs: Int32, num_tokens: Int32, stream: cuda.CUstream
) -> None:
    """Launches one CTA for each run of pages and each twelve tokens."""
    kernel(args, plan, num_tokens).launch(
        grid=[runs, (num_tokens + (TOKENS - 1)) // TOKENS, 1],
        block=[THREADS, 1, 1],
        smem=plan.smem_bytes,
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(args: Arguments, plan: cutlass.Constexpr[Plan], num_tokens: Int32) -> None:
    """Sets up barriers, tensor memory and queries, and sends every warp to its role."""
    thread, _, _ = cute.arch.thread_idx()
    run, tile, _ = cute.arch.block_idx()
    smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).raw_ptr()
    barriers = typed(smem + plan.barriers_offset, Int64)
    tmem_address = typed(smem + plan.tmem_address_offset, Int32)
    tokens = Int32(smem.toint()) + plan.tokens_offset
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    first_token = tile * TOKENS
    if warp == Warp.MMA:
        groups = [
            (Barrier.KEYS, STAGES, WARPS_OF_GROUP),
            (Barrier.EMPTY, STAGES, 1),
            (Barrier.DONE, ACCUMULATORS, 1),
            (Barrier.FREE, ACCUMULATORS, WARPS_OF_GROUP),
        ]
        tcgen05.set_up(barriers, groups, tmem_address, plan.tmem_columns)
    else:
        dependent_launch.wait()
        load_token(args, tokens, thread, first_token, num_tokens)
    prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
    prims.barrier_cta_sync_aligned(0)  # barriers, tensor memory and the tokens' lengths are set up
    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
    dependent_launch.begin()  # the next kernel may start: tensor memory is allocated
    tmem = prims.TmemAddr(tmem_address.load())
    most = most_of_all(tokens)
    first_page = run * args.pages_a_cta
    if first_page * PAGE_ROWS < most:
        store_queries(args, plan.heads, plan.rows, TOKENS, first_token, num_tokens, thread, Int32(smem.toint()))
        load_weights(args, plan, smem, thread, first_token, num_tokens)
        most_of_request(tokens, thread)
        prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)  # queries, read by the MMA
        prims.barrier_cta_sync_aligned(0)  # queries, weights and the requests' lengths are in shared memory
        first = first_page // TILE_PAGES
        last = ptx.imin(first + args.pages_a_cta // TILE_PAGES, (most + (TILE_KEYS - 1)) // TILE_KEYS)
        if warp < Warp.EXPAND:
            weigh_tiles(args, smem, barriers, tmem, warp, first_token, first, last, plan)
        elif warp < Warp.MMA:
            expand_tiles(args, tokens, barriers, tmem, warp, first, last, plan)
        else:
            if prims.elect_sync():
                multiply_tiles(smem, tokens, barriers, tmem, first, last, plan)
    prims.barrier_cta_sync_aligned(0)  # the WEIGH warps have completed their last loads of tensor memory
    if warp == Warp.MMA:
        tcgen05.free(tmem, plan.tmem_columns)


# The tokens


@cute.jit
def load_token(args: Arguments, tokens: Int32, thread: Int32, first_token: Int32, num_tokens: Int32) -> None:
    """Thread i stores the number of entries that token i of the CTA sees, 0 if it is not scored, and its request."""
    if thread < TOKENS:
        count, request = Int32(0), Int32(0)
        if first_token + thread < num_tokens:
            count = ptx.load_i32(args.visible + Int64(first_token + thread) * 4)
            request = ptx.load_i32(args.token_to_request + Int64(first_token + thread) * 4)
            if count <= args.top_k:
                count = Int32(0)
        ptx.store_shared_u32(tokens + thread * 4, Uint32(count))
        ptx.store_shared_u32(tokens + (TOKENS + thread) * 4, Uint32(request))


def load_count(tokens: Int32, i: Int32 | int) -> Int32:
    """The number of entries that token i sees."""
    return _load_shared_i32(tokens + i * 4)


def load_request(tokens: Int32, i: Int32 | int) -> Int32:
    """The request of token i."""
    return _load_shared_i32(tokens + (TOKENS + i) * 4)


def load_most(tokens: Int32, i: Int32) -> Int32:
    """The most entries that a token of the CTA with token i's request sees."""
    return _load_shared_i32(tokens + (2 * TOKENS + i) * 4)


def _load_shared_i32(address: Int32) -> Int32:
    return ptx.asm("ld.shared.s32 {$w0}, [{$r0}];", [Int32], address)


def most_of_all(tokens: Int32) -> Int32:
    """The most entries that a token of the CTA sees."""
    most = Int32(0)
    for i in range(TOKENS):
        most = ptx.imax(most, load_count(tokens, i))
    return most


@cute.jit
def most_of_request(tokens: Int32, thread: Int32) -> None:
    """Thread i stores the most entries that a token with token i's request sees."""
    if thread < TOKENS:
        request, most = load_request(tokens, thread), Int32(0)
        for i in cutlass.range_constexpr(TOKENS):
            count = cutlass.select_(load_request(tokens, i) == request, load_count(tokens, i), Int32(0))
            most = ptx.imax(most, count)
        ptx.store_shared_u32(tokens + (2 * TOKENS + thread) * 4, Uint32(most))


@cute.jit
def load_weights(
    args: Arguments,
    plan: cutlass.Constexpr[Plan],
    smem: cutlass.Pointer,
    thread: Int32,
    first_token: Int32,
    num_tokens: Int32,
) -> None:
    """Stores the tokens' head weights to shared memory."""
    to = Int32(smem.toint()) + plan.weights_offset
    for at in cutlass.range(thread, TOKENS * plan.heads, THREADS, unroll=1):
        token = first_token + at // plan.heads
        if token < num_tokens:
            address = args.head_weights + Int64(token) * args.head_weights_token_bytes + at % plan.heads * 4
            ptx.store_shared_f32(to + at * 4, ptx.load_f32(address))


# EXPAND


@cute.jit
def expand_tiles(
    args: Arguments,
    tokens: Int32,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    warp: Int32,
    first: Int32,
    last: Int32,
    plan: cutlass.Constexpr[Plan],
) -> None:
    """Fills every second stage. Thread r of a group has keys r and 128 + r."""
    group, key = (warp - Warp.EXPAND) // WARPS_OF_GROUP, cute.arch.thread_idx()[0] % GROUP_THREADS
    words = cute.make_rmem_tensor((CODE_WORDS + 1,), Uint32)
    stages = Int32(0)
    for tile in cutlass.range(first, last, unroll=1):
        loaded = Int32(-1)  # the request whose keys are in the last stage
        for i in cutlass.range(TOKENS, unroll=1):
            request = load_request(tokens, i)
            if (tile * TILE_KEYS < load_count(tokens, i)) & (request != loaded):
                if stages % STAGES == group:
                    stage = stage_of(stages, STAGES)
                    if stages >= STAGES:
                        wait(barriers, Barrier.EMPTY + stage.index, stage.phase ^ 1)
                        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
                    column, most = plan.keys_column + stage.index * STAGE_COLUMNS, load_most(tokens, i)
                    for half in cutlass.range(HALVES, unroll=1):  # both at a time need more registers than there are
                        load_key(args, request, tile, most, half * HALF_KEYS + key, words)
                        store_key(words, tmem, warp, column + half * KEY_COLUMNS)
                    prims.tcgen05_wait(prims.Tcgen05Wait.STORE)
                    prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
                    arrive(barriers + (Barrier.KEYS + stage.index))
                stages += 1
                loaded = request


@cute.jit
def load_key(args: Arguments, request: Int32, tile: Int32, most: Int32, key: Int32, words: cute.Tensor) -> None:
    """Loads the codes of a key, and the word of its scales; zeros for a page that no token sees."""
    words.fill(0)
    page = tile * TILE_PAGES + key // PAGE_ROWS
    if page * PAGE_ROWS < most:
        number = ptx.load_i32(args.page_table + Int64(request) * args.page_table_row_bytes + Int64(page) * 4)
        codes, place = args.keys + Int64(number) * args.page_bytes, key % PAGE_ROWS
        for block in cutlass.range_constexpr(BLOCKS):
            loaded = load_words_through_l1(codes + place * CODE_BYTES + block * 16)
            for j in cutlass.range_constexpr(4):
                words[4 * block + j] = loaded[j]
        words[CODE_WORDS] = ptx.load_i32(codes + (PAGE_ROWS * CODE_BYTES + place * SCALE_BYTES)).to(Uint32)


@cute.jit
def store_key(words: cute.Tensor, tmem: prims.TmemAddr, warp: Int32, column: Int32) -> None:
    """Stores a key as bf16. Instruction s has channels [4 s, 4 s + 4) of each of the four blocks of a scale, first two
    channels of all blocks, then the other two, as queries do."""
    scales = [scale_of(words[CODE_WORDS], Int32(block)) for block in range(BLOCKS)]
    for word in cutlass.range_constexpr(4):
        pairs = [dequantise(words[4 * block + word], scales[block]) for block in range(BLOCKS)]
        ordered = tuple(pairs[block][pair] for pair in range(4) for block in range(BLOCKS))
        target = tmem_columns(tmem, warp, column + word * len(ordered), Int32)
        prims.tcgen05_st("32x32b", target, cutlass.Vector.from_elements(ordered, Uint32).bitcast(Int32))


# MMA


@cute.jit
def multiply_tiles(
    smem: cutlass.Pointer,
    tokens: Int32,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    first: Int32,
    last: Int32,
    plan: cutlass.Constexpr[Plan],
) -> None:
    """One thread issues all products."""
    zero = Int32(0)
    idesc = prims.Tcgen05InstrDesc.build(
        c_dtype=Float32, a_dtype=BFloat16, b_dtype=BFloat16, n_dim=plan.rows, m_dim=HALF_KEYS
    )
    stages, units = Int32(0), Int32(0)
    for tile in cutlass.range(first, last, unroll=1):
        loaded = Int32(-1)
        for i in cutlass.range(TOKENS, unroll=1):
            if tile * TILE_KEYS < load_count(tokens, i):
                request = load_request(tokens, i)
                if request != loaded:
                    if stages > 0:
                        before = stage_of(stages - 1, STAGES).index
                        prims.tcgen05_commit(barriers + (Barrier.EMPTY + before), group=prims.CTAGroup.CTA_1)
                    stage = stage_of(stages, STAGES)
                    wait(barriers, Barrier.KEYS + stage.index, stage.phase)
                    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
                    stages += 1
                    loaded = request
                buffer = stage_of(units, ACCUMULATORS)
                if units >= ACCUMULATORS:
                    wait(barriers, Barrier.FREE + buffer.index, buffer.phase ^ 1)
                    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
                column = plan.keys_column + stage_of(stages - 1, STAGES).index * STAGE_COLUMNS
                for half in cutlass.range_constexpr(HALVES):
                    out = tmem_columns(tmem, zero, (buffer.index * HALVES + half) * plan.rows, Float32)
                    for step in cutlass.range_constexpr(STEPS):
                        tile_of_query, within = step // (STEPS // 2), step % (STEPS // 2)
                        query = swizzled(smem + (i * plan.query_bytes + tile_of_query * (plan.rows * ROW_BYTES)))
                        prims.tcgen05_mma(
                            prims.Tcgen05MMAKind.F16,
                            prims.CTAGroup.CTA_1,
                            out,
                            tmem_columns(tmem, zero, column + half * KEY_COLUMNS + step * STEP_COLUMNS, BFloat16),
                            query.advance_start_address(within * (ROW_BYTES // (STEPS // 2))),
                            idesc,
                            step > 0,
                        )
                prims.tcgen05_commit(barriers + (Barrier.DONE + buffer.index), group=prims.CTAGroup.CTA_1)
                units += 1


# WEIGH


@cute.jit
def weigh_tiles(
    args: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    warp: Int32,
    first_token: Int32,
    first: Int32,
    last: Int32,
    plan: cutlass.Constexpr[Plan],
) -> None:
    """Stores the scores of every second token. Thread r of a group has keys r and 128 + r."""
    group, key = warp // WARPS_OF_GROUP, cute.arch.thread_idx()[0] % GROUP_THREADS
    tokens, weights = Int32(smem.toint()) + plan.tokens_offset, Int32(smem.toint()) + plan.weights_offset
    units = Int32(0)
    for tile in cutlass.range(first, last, unroll=1):
        for i in cutlass.range(TOKENS, unroll=1):
            count = load_count(tokens, i)
            if tile * TILE_KEYS < count:
                if units % WEIGH_GROUPS == group:
                    buffer = stage_of(units, ACCUMULATORS)
                    wait(barriers, Barrier.DONE + buffer.index, buffer.phase)
                    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
                    totals = [[Float32(0.0)] * 4 for _ in range(HALVES)]
                    for head in cutlass.range_constexpr(0, plan.heads, plan.chunk):
                        products = []
                        for half in cutlass.range_constexpr(HALVES):
                            column = (buffer.index * HALVES + half) * plan.rows + head
                            products.append(load_tmem(tmem_columns(tmem, warp, column, Int32), plan.chunk))
                        prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
                        if cutlass.const_expr(head + plan.chunk == plan.heads):
                            prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
                            arrive(barriers + (Barrier.FREE + buffer.index))
                        weigh(products, weights + i * (plan.heads * 4) + head * 4, totals)
                    out = args.scores + Int64(first_token + i) * args.scores_row_bytes
                    for half in cutlass.range_constexpr(HALVES):
                        entry = tile * TILE_KEYS + half * HALF_KEYS + key
                        if entry < count:
                            ptx.store_f32(out + Int64(entry) * 4, sum_of(totals[half]))
                units += 1


def weigh(products: list, weights: Int32, totals: list) -> None:
    """Adds to the totals of each key its products with some heads, weighted.

    `weights` is the shared-memory address of the weights of these heads.

    The order is that of `scores.weigh`: total q has heads 8 n + 2 q and the next, for rising n.
    """
    for n in range(0, len(products[0]), HEADS_A_TILE):
        of_tile = [*ptx.load_shared_f32x4(weights + n * 4), *ptx.load_shared_f32x4(weights + n * 4 + 16)]
        for of_key, sums in zip(products, totals, strict=True):
            for head, weight in enumerate(of_tile):
                positive = ptx.fmax(as_float(of_key[n + head]), Float32(0.0))
                sums[head // 2] = ptx.fma(positive, weight, sums[head // 2])


def sum_of(totals: list) -> Float32:
    """A key's score, in the order in which `scores.weigh` adds over a quad."""
    total = add(add(totals[0], totals[1]), add(totals[2], totals[3]))
    return add(total, Float32(0.0))  # -0.0 equals 0.0, but to the radix select it would be another number


def compile(arch: str, heads: int) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, runs, tokens, stream)."""

    return load_launcher("index_prefill_tcgen05", heads, arch, launch, Arguments, Plan(heads), Int32, Int32)
