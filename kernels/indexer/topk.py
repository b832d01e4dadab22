"""The top-k of a token's scores on a GPU (sm_90a, sm_100a): a radix select by one CTA, and an ordered compaction.

Scores become unsigned numbers of the same order. Three passes of 11, 11 and 10 bits find the k-th largest number and
how many scores equal to it are chosen; a last pass writes the chosen entries in rising order, of equal scores the first
ones. The first pass includes two bits of the mantissa, so that scores of one magnitude do not all share one counter.

In a forward of few tokens the CTA's time is a chain of loads and barriers. So there each thread copies its scores and
their page numbers to shared memory once, each pass has counters of its own, which are cleared before the scores exist,
and the passes end with the first bucket that is chosen as a whole. The choice is the same.
"""

from collections.abc import Callable
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.device.warp import prefix_sum
from dsv4_kernels.host.launch import load_launcher
from dsv4_kernels.kv_layout import PAGE_ROWS

THREADS = 512
WARPS = THREADS // 32
PASSES = ((21, 11), (10, 11), (0, 10))
"""Shift and number of bits of each pass."""
BUCKETS = 1 << max(bits for _, bits in PASSES)
BUCKETS_A_THREAD = BUCKETS // THREADS
ENTRIES_A_LOAD = 4
ENTRIES_A_ROUND = THREADS * ENTRIES_A_LOAD
HELD_ROUNDS = 4
"""Rounds whose scores are in shared memory: 8,192 entries, 32K tokens of context. Further entries are loaded in every
pass, as by the kernel for many tokens."""
HELD = HELD_ROUNDS * ENTRIES_A_ROUND


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel; addresses are Int64."""

    scores: Int64  # [T, row_entries] fp32
    scores_row_bytes: Int64
    row_pages: Int64  # [B, P] int32
    row_pages_row_bytes: Int64
    token_to_request: Int64  # [T] int32
    visible: Int64  # [T] int32
    rows: Int64  # [T, top_k] int32
    top_k: Int32


@cute.jit
def launch(args: Arguments, few_tokens: cutlass.Constexpr[bool], tokens: Int32, stream: cuda.CUstream) -> None:
    """Launches one CTA for each token."""
    if cutlass.const_expr(few_tokens):
        kernel_of_few_tokens(args).launch(
            grid=[tokens, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
        )
    else:
        kernel(args).launch(grid=[tokens, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on())


@cute.kernel
def kernel(args: Arguments) -> None:
    """Chooses one token's entries."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    counts = smem.allocate_tensor(Int32, cute.make_layout(BUCKETS), byte_alignment=16)
    found = smem.allocate_tensor(Int32, cute.make_layout(2), byte_alignment=16)
    warp_sums = smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
    visible = ptx.load_i32(args.visible + Int64(token) * 4)
    request = ptx.load_i32(args.token_to_request + Int64(token) * 4)
    pages, out = addresses(args, token, request)
    scores = args.scores + Int64(token) * args.scores_row_bytes
    if visible <= args.top_k:
        choose_all(args.top_k, visible, thread, pages, out)
    else:
        threshold, equals = select(scores, visible, args.top_k, thread, counts, found, warp_sums)
        compact(scores, visible, threshold, equals, thread, pages, out, warp_sums)


class Held(NamedTuple):
    """A thread's addresses in shared memory, of data that no other thread accesses."""

    scores: Int32
    """Four adjacent scores (fp32) of the first round; those of the next round lie ENTRIES_A_ROUND * 4 bytes later."""
    numbers: Int32
    """The number of their page; that of the next round lies THREADS * 4 bytes later."""


def addresses(args: Arguments, token: Int32, request: Int32) -> tuple:
    """Addresses of the request's row of the page table, and of the token's chosen rows."""
    pages = args.row_pages + Int64(request) * args.row_pages_row_bytes
    return pages, args.rows + Int64(token) * (Int64(args.top_k) * 4)


@cute.jit
def choose_all(top_k: Int32, visible: Int32, thread: Int32, pages: Int64, out: Int64) -> None:
    """Writes the rows of all visible entries, at most `top_k`, and -1 after them."""
    for place in cutlass.range(thread, top_k, THREADS, unroll=1):
        row = Int32(-1)
        if place < visible:
            row = row_of(pages, place)
        ptx.store_i32(out + Int64(place) * 4, row)


@cute.kernel
def kernel_of_few_tokens(args: Arguments) -> None:
    """Chooses one token's entries, the same as `kernel`."""
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    counts = smem.allocate_tensor(Int32, cute.make_layout(len(PASSES) * BUCKETS), byte_alignment=16)
    found = smem.allocate_tensor(Int32, cute.make_layout(4 * len(PASSES)), byte_alignment=16)
    warp_sums = smem.allocate_tensor(Int32, cute.make_layout(2 * WARPS), byte_alignment=16)
    scores_of_all = smem.allocate_tensor(Int32, cute.make_layout(HELD), byte_alignment=16)
    numbers_of_all = smem.allocate_tensor(Int32, cute.make_layout(HELD_ROUNDS * THREADS), byte_alignment=16)
    held = Held(scores_of_all.iterator.toint() + thread * 16, numbers_of_all.iterator.toint() + thread * 4)
    for i in cutlass.range_constexpr(len(PASSES) * BUCKETS // (4 * THREADS)):
        ptx.store_shared(counts.iterator.toint() + (i * THREADS + thread) * 16, (Uint32(0),) * 4)
    dependent_launch.begin()
    visible = ptx.load_i32(args.visible + Int64(token) * 4)
    request = ptx.load_i32(args.token_to_request + Int64(token) * 4)
    scores = args.scores + Int64(token) * args.scores_row_bytes
    first = thread * ENTRIES_A_LOAD
    if (args.scores != 0) & (Int64(first) * 4 < args.scores_row_bytes):
        # The first round does not wait for the length: a row of scores has whole pages.
        ptx.copy_async(held.scores, scores + Int64(first) * 4, Int32(16))
    pages, out = addresses(args, token, request)
    if visible <= args.top_k:
        choose_all(args.top_k, visible, thread, pages, out)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
    else:
        for at in cutlass.range(first, ptx.imin(visible, Int32(HELD)), ENTRIES_A_ROUND, unroll=1):
            ptx.copy_4_bytes_async(held.numbers + (at - first), pages + Int64(at // PAGE_ROWS) * 4, Int32(4))
            if at > first:
                ptx.copy_async(held.scores + (at - first) * 4, scores + Int64(at) * 4, Int32(16))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # the counters are cleared
        places = (counts.iterator.toint(), found.iterator.toint(), warp_sums.iterator.toint())
        threshold, equals = select_held(scores, visible, args.top_k, thread, held, *places)
        compact_held(scores, visible, threshold, equals, thread, held, pages, out, places[2])


@cute.jit
def load_keys(scores: Int64, at: Int32, thread: Int32, held: Held) -> tuple:
    """The ordered numbers of a thread's scores of the round that begins with entry `at` of the thread."""
    keys = cute.make_rmem_tensor((ENTRIES_A_LOAD,), Uint32)
    if at < HELD:
        words = ptx.load_shared_16_bytes(held.scores + (at - thread * ENTRIES_A_LOAD) * 4)
        for j in cutlass.range_constexpr(ENTRIES_A_LOAD):
            keys[j] = in_order(words[j])
    else:
        ordered = ordered_keys(scores, at)
        for j in cutlass.range_constexpr(ENTRIES_A_LOAD):
            keys[j] = ordered[j]
    return keys[0], keys[1], keys[2], keys[3]


@cute.jit
def select_held(
    scores: Int64,
    visible: Int32,
    top_k: Int32,
    thread: Int32,
    held: Held,
    counts: Int32,
    found: Int32,
    warp_sums: Int32,
) -> tuple:
    """The results of `select`. If all scores of a bucket are chosen, the threshold is the number before the bucket's,
    and no score equal to it is chosen."""
    threshold, wanted, searching = Uint32(0), top_k, Int32(1)
    for n in cutlass.range_constexpr(len(PASSES)):
        shift, bits = PASSES[n]
        if searching != 0:
            of_pass = counts + n * (BUCKETS * 4)
            for at in cutlass.range(thread * ENTRIES_A_LOAD, visible, ENTRIES_A_ROUND, unroll=1):
                for j, key in enumerate(load_keys(scores, at, thread, held)):
                    digits = key >> shift
                    counted = at + j < visible
                    if cutlass.const_expr(shift + bits < 32):
                        counted = counted & ((digits >> bits) == (threshold >> (shift + bits)))
                    if counted:
                        bucket = (digits & ((1 << bits) - 1)).to(Int32)
                        ptx.asm("red.shared::cta.add.u32 [{$r0}], 1;", [], of_pass + bucket * 4)
            cute.arch.sync_threads()
            result = found + n * 16
            find_held_bucket(of_pass, result, wanted, thread, warp_sums + n % 2 * (WARPS * 4))
            cute.arch.sync_threads()
            bucket, wanted_of_it, of_it, _ = ptx.load_shared_16_bytes(result)
            threshold |= bucket << shift
            wanted = wanted_of_it.to(Int32)
            if wanted_of_it == of_it:
                # More entries than `top_k` are visible, so the lowest bucket is never chosen as a whole.
                threshold, wanted, searching = threshold - 1, Int32(0), Int32(0)
    return threshold, wanted


@cute.jit
def sums_before(warp_sums: Int32, warp: Int32) -> tuple:
    """(sum of the earlier warps, sum of all warps) of the numbers that the warps have stored."""
    before, total = Int32(0), Int32(0)
    for other in cutlass.range_constexpr(0, WARPS, 4):
        for j, word in enumerate(ptx.load_shared_16_bytes(warp_sums + other * 4)):
            of_warp = word.to(Int32)
            total += of_warp
            before += cutlass.select_(other + j < warp, of_warp, Int32(0))
    return before, total


@cute.jit
def find_held_bucket(counts: Int32, found: Int32, wanted: Int32, thread: Int32, warp_sums: Int32) -> None:
    """The results of `find_bucket`, but the third is the bucket's number of scores."""
    lane, warp = thread % 32, thread // 32
    highest = BUCKETS - 1 - thread * BUCKETS_A_THREAD
    words = ptx.load_shared_16_bytes(counts + (highest - (BUCKETS_A_THREAD - 1)) * 4)
    of_bucket = [words[BUCKETS_A_THREAD - 1 - j].to(Int32) for j in range(BUCKETS_A_THREAD)]
    total = of_bucket[0] + of_bucket[1] + of_bucket[2] + of_bucket[3]
    up_to_here = prefix_sum(total, lane)
    if lane == 31:
        ptx.store_shared_u32(warp_sums + warp * 4, up_to_here.to(Uint32))
    cute.arch.sync_threads()
    before, _ = sums_before(warp_sums, warp)
    before += up_to_here - total
    for j in cutlass.range_constexpr(BUCKETS_A_THREAD):
        if (before < wanted) & (wanted <= before + of_bucket[j]):
            result = (highest - j, wanted - before, of_bucket[j], Int32(0))
            ptx.store_shared(found, tuple(x.to(Uint32) for x in result))
        before += of_bucket[j]


@cute.jit
def compact_held(
    scores: Int64,
    visible: Int32,
    threshold: Uint32,
    equals: Int32,
    thread: Int32,
    held: Held,
    pages: Int64,
    out: Int64,
    warp_sums: Int32,
) -> None:
    """Writes the chosen entries as `compact` does, from scores in registers."""
    lane, warp = thread % 32, thread // 32
    above_before, equal_before, parity = Int32(0), Int32(0), Int32(0)
    for begin in cutlass.range(0, visible, ENTRIES_A_ROUND, unroll=1):
        first = begin + thread * ENTRIES_A_LOAD
        kinds = cute.make_rmem_tensor((ENTRIES_A_LOAD,), Int32)  # 1: above, 1 << 16: equal
        kinds.fill(0)
        if first < visible:
            for j, key in enumerate(load_keys(scores, first, thread, held)):
                if first + j < visible:
                    kinds[j] = Int32(key > threshold) + (Int32(key == threshold) << 16)
        mine = kinds[0] + kinds[1] + kinds[2] + kinds[3]
        up_to_here = prefix_sum(mine, lane)
        # The other half of the sums is of the round before: a warp that reads them has passed one barrier less.
        of_round = warp_sums + parity * (WARPS * 4)
        if lane == 31:
            ptx.store_shared_u32(of_round + warp * 4, up_to_here.to(Uint32))
        cute.arch.sync_threads()
        here, all_warps = sums_before(of_round, warp)
        here += up_to_here - mine
        above_here, equal_here = above_before + (here & 0xFFFF), equal_before + (here >> 16)
        if mine != 0:
            number = Int32(0)
            if first < HELD:
                number = ptx.asm("ld.shared.b32 {$w0}, [{$r0}];", [Int32], held.numbers + begin)
            else:
                number = ptx.load_i32(pages + Int64(first // PAGE_ROWS) * 4)
            row = number * PAGE_ROWS + first % PAGE_ROWS  # the thread's entries are of one page
            for j in cutlass.range_constexpr(ENTRIES_A_LOAD):
                is_above, is_equal = kinds[j] & 0xFFFF, kinds[j] >> 16
                if (is_above != 0) | ((is_equal != 0) & (equal_here < equals)):
                    place = above_here + ptx.imin(equal_here, equals)
                    ptx.store_i32(out + Int64(place) * 4, row + j)
                above_here += is_above
                equal_here += is_equal
        above_before += all_warps & 0xFFFF
        equal_before += all_warps >> 16
        parity = 1 - parity


@cute.jit
def select(
    scores: Int64,
    visible: Int32,
    top_k: Int32,
    thread: Int32,
    counts: cute.Tensor,
    found: cute.Tensor,
    warp_sums: cute.Tensor,
) -> tuple:
    """The k-th largest score as an ordered number, and how many scores equal to it are among the k largest."""
    threshold, wanted = Uint32(0), top_k
    for shift, bits in PASSES:
        for j in cutlass.range_constexpr(BUCKETS_A_THREAD):
            counts[j * THREADS + thread] = 0
        cute.arch.sync_threads()
        for begin in cutlass.range(thread * ENTRIES_A_LOAD, visible, THREADS * ENTRIES_A_LOAD, unroll=1):
            for j, key in enumerate(ordered_keys(scores, begin)):  # a row of scores has whole pages
                digits = key >> shift
                counted = begin + j < visible
                if cutlass.const_expr(shift + bits < 32):
                    counted = counted & ((digits >> bits) == (threshold >> (shift + bits)))
                if counted:
                    ptx.asm(
                        "red.shared::cta.add.u32 [{$r0}], 1;",
                        [],
                        counts.iterator.toint() + (digits & ((1 << bits) - 1)).to(Int32) * 4,
                    )
        cute.arch.sync_threads()
        find_bucket(counts, found, wanted, thread, warp_sums)
        cute.arch.sync_threads()
        threshold |= found[0].to(Uint32) << shift
        wanted = found[1]
    return threshold, wanted


@cute.jit
def find_bucket(counts: cute.Tensor, found: cute.Tensor, wanted: Int32, thread: Int32, warp_sums: cute.Tensor) -> None:
    """Finds the bucket of the `wanted`-th largest score, and its rank within the bucket; the first thread has the
    highest buckets."""
    lane, warp = thread % 32, thread // 32
    total = Int32(0)
    for j in cutlass.range_constexpr(BUCKETS_A_THREAD):
        total += counts[BUCKETS - 1 - (thread * BUCKETS_A_THREAD + j)]
    before = prefix_sum(total, lane)
    if lane == 31:
        warp_sums[warp] = before
    cute.arch.sync_threads()
    before -= total
    for other in cutlass.range_constexpr(WARPS):
        if other < warp:
            before += warp_sums[other]
    for j in cutlass.range_constexpr(BUCKETS_A_THREAD):
        bucket = BUCKETS - 1 - (thread * BUCKETS_A_THREAD + j)
        count = counts[bucket]
        if (before < wanted) & (wanted <= before + count):
            found[0] = bucket
            found[1] = wanted - before
        before += count


@cute.jit
def compact(
    scores: Int64,
    visible: Int32,
    threshold: Uint32,
    equals: Int32,
    thread: Int32,
    pages: Int64,
    out: Int64,
    warp_sums: cute.Tensor,
) -> None:
    """Writes the rows of all scores above the threshold and of the first `equals` scores at it, by rising entry.

    A thread has neighbouring entries. The counts of one round fit 16 bits, so the counts of scores above and at the
    threshold are summed as one number.
    """
    lane, warp = thread % 32, thread // 32
    above_before, equal_before = Int32(0), Int32(0)
    for begin in cutlass.range(0, visible, THREADS * ENTRIES_A_LOAD, unroll=1):
        first = begin + thread * ENTRIES_A_LOAD
        kinds = cute.make_rmem_tensor((ENTRIES_A_LOAD,), Int32)  # 1: above, 1 << 16: equal
        kinds.fill(0)
        if first < visible:
            for j, key in enumerate(ordered_keys(scores, first)):
                if first + j < visible:
                    kinds[j] = Int32(key > threshold) + (Int32(key == threshold) << 16)
        mine = kinds[0] + kinds[1] + kinds[2] + kinds[3]
        up_to_here = prefix_sum(mine, lane)
        if lane == 31:
            warp_sums[warp] = up_to_here
        cute.arch.sync_threads()
        here, all_warps = up_to_here - mine, Int32(0)
        for other in cutlass.range_constexpr(WARPS):
            of_warp = warp_sums[other]
            all_warps += of_warp
            if other < warp:
                here += of_warp
        above_here, equal_here = above_before + (here & 0xFFFF), equal_before + (here >> 16)
        for j in cutlass.range_constexpr(ENTRIES_A_LOAD):
            is_above, is_equal = kinds[j] & 0xFFFF, kinds[j] >> 16
            if (is_above != 0) | ((is_equal != 0) & (equal_here < equals)):
                place = above_here + ptx.imin(equal_here, equals)
                ptx.store_i32(out + Int64(place) * 4, row_of(pages, first + j))
            above_here += is_above
            equal_here += is_equal
        above_before += all_warps & 0xFFFF
        equal_before += all_warps >> 16
        cute.arch.sync_threads()


def ordered_keys(scores: Int64, entry: Int32) -> list:
    """The ordered numbers (`in_order`) of ENTRIES_A_LOAD neighbouring scores."""
    words = ptx.asm(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        [Uint32] * ENTRIES_A_LOAD,
        scores + Int64(entry) * 4,
    )
    return [in_order(word) for word in words]


def in_order(bits: Uint32) -> Uint32:
    """The bits of an fp32 as an unsigned number of the same order: a positive number's sign bit flipped, a negative
    number's bits all flipped."""
    code = "{\n.reg .b32 m;\nshr.s32 m, {$r0}, 31;\nor.b32 m, m, 0x80000000;\nxor.b32 {$w0}, {$r0}, m;\n}"
    return ptx.asm(code, [Uint32], bits)


def row_of(pages: Int64, entry: Int32) -> Int32:
    """The row of an entry in the table of entries."""
    return ptx.load_i32(pages + Int64(entry // PAGE_ROWS) * 4) * PAGE_ROWS + entry % PAGE_ROWS


def compile(arch: str, few_tokens: bool = False) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, tokens, stream)."""

    config = "few tokens" if few_tokens else "the only one"
    return load_launcher("index_topk", config, arch, launch, Arguments, few_tokens, Int32)
