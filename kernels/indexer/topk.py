"""The top-k of a token's scores on a GPU (sm_90a, sm_100a): a radix select by one CTA, and an ordered compaction.

Scores become unsigned numbers of the same order. Three passes of 11, 11 and 10 bits find the k-th largest number and
how many scores equal to it are chosen; a last pass writes the chosen entries in rising order, of equal scores the first
ones. The first pass includes two bits of the mantissa, so that scores of one magnitude do not all share one counter.
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
def launch(args: Arguments, tokens: Int32, stream: cuda.CUstream) -> None:
    """Launches one CTA for each token."""
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
    pages = args.row_pages + Int64(request) * args.row_pages_row_bytes
    out = args.rows + Int64(token) * (Int64(args.top_k) * 4)
    scores = args.scores + Int64(token) * args.scores_row_bytes
    if visible <= args.top_k:
        for place in cutlass.range(thread, args.top_k, THREADS, unroll=1):
            row = Int32(-1)
            if place < visible:
                row = row_of(pages, place)
            ptx.store_i32(out + Int64(place) * 4, row)
    else:
        threshold, equals = select(scores, visible, args.top_k, thread, counts, found, warp_sums)
        compact(scores, visible, threshold, equals, thread, pages, out, warp_sums)


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


def compile(arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, tokens, stream)."""

    return load_launcher("index_topk", "the only one", arch, launch, Arguments, Int32)
