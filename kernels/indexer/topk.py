"""The exact top-k of a token's scores on a GPU (sm_90a, sm_100a): a radix select by one CTA, and an ordered compaction.

Scores become unsigned numbers of the same order. Four passes of 8 bits find the k-th largest one and how many of its
equals belong to the choice; a last pass writes the chosen entries in rising order, of the equals the first ones.
"""

from collections.abc import Callable
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from dsv4_kernels import ptx
from dsv4_kernels.compile_cache import load_or_compile
from dsv4_kernels.kv_layout import PAGE_ROWS

THREADS = 512
WARPS = THREADS // 32
RADIX_BITS = 8
BUCKETS = 1 << RADIX_BITS
BUCKETS_A_LANE = BUCKETS // 32


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
    """One CTA a token."""
    kernel(args).launch(grid=[tokens, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.kernel
def kernel(args: Arguments) -> None:
    """Chooses one token's entries."""
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    counts = smem.allocate_tensor(Int32, cute.make_layout(BUCKETS), byte_alignment=16)
    found = smem.allocate_tensor(Int32, cute.make_layout(2), byte_alignment=16)
    warp_sums = smem.allocate_tensor(Int32, cute.make_layout(2 * WARPS), byte_alignment=16)
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
        threshold, equals = select(scores, visible, args.top_k, thread, counts, found)
        compact(scores, visible, threshold, equals, thread, pages, out, warp_sums)


@cute.jit
def select(
    scores: Int64, visible: Int32, top_k: Int32, thread: Int32, counts: cute.Tensor, found: cute.Tensor
) -> tuple:
    """The k-th largest score as an ordered number, and how many of its equals are among the k largest."""
    threshold, wanted = Uint32(0), top_k
    for i in cutlass.range_constexpr(32 // RADIX_BITS):
        shift = 32 - RADIX_BITS * (i + 1)
        if thread < BUCKETS:
            counts[thread] = 0
        cute.arch.sync_threads()
        for entry in cutlass.range(thread, visible, THREADS, unroll=1):
            key = ordered(scores, entry)
            digits = key >> shift
            same = Boolean(True)
            if cutlass.const_expr(i > 0):
                same = (digits >> RADIX_BITS) == (threshold >> (shift + RADIX_BITS))
            if same:
                ptx.asm(
                    "red.shared::cta.add.u32 [{$r0}], 1;",
                    [],
                    counts.iterator.toint() + (digits & (BUCKETS - 1)).to(Int32) * 4,
                )
        cute.arch.sync_threads()
        if thread < 32:
            find_bucket(counts, found, wanted, thread)
        cute.arch.sync_threads()
        threshold |= found[0].to(Uint32) << shift
        wanted = found[1]
    return threshold, wanted


@cute.jit
def find_bucket(counts: cute.Tensor, found: cute.Tensor, wanted: Int32, lane: Int32) -> None:
    """The bucket of the `wanted`-th largest, and its place within the bucket; by one warp, the highest bucket first."""
    total = Int32(0)
    for j in cutlass.range_constexpr(BUCKETS_A_LANE):
        total += counts[BUCKETS - 1 - (lane * BUCKETS_A_LANE + j)]
    before = total
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(before, offset=1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            before += other
    before -= total
    for j in cutlass.range_constexpr(BUCKETS_A_LANE):
        bucket = BUCKETS - 1 - (lane * BUCKETS_A_LANE + j)
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
    """Writes the rows of all scores above the threshold and of the first `equals` at it, by rising entry."""
    lane, warp = thread % 32, thread // 32
    below = (Uint32(1) << lane.to(Uint32)) - 1
    above_before, equal_before = Int32(0), Int32(0)
    for begin in cutlass.range(0, visible, THREADS, unroll=1):
        entry = begin + thread
        key = Uint32(0)
        if entry < visible:
            key = ordered(scores, entry)
        is_above = (entry < visible) & (key > threshold)
        is_equal = (entry < visible) & (key == threshold)
        above, equal = ballot(is_above), ballot(is_equal)
        if lane == 0:
            warp_sums[warp] = cute.arch.popc(above).to(Int32)
            warp_sums[WARPS + warp] = cute.arch.popc(equal).to(Int32)
        cute.arch.sync_threads()
        above_here, equal_here = above_before, equal_before
        for other in cutlass.range_constexpr(WARPS):
            a, e = warp_sums[other], warp_sums[WARPS + other]
            above_before += a
            equal_before += e
            if other < warp:
                above_here += a
                equal_here += e
        above_here += cute.arch.popc(above & below).to(Int32)
        equal_here += cute.arch.popc(equal & below).to(Int32)
        if is_above | (is_equal & (equal_here < equals)):
            place = above_here + ptx.imin(equal_here, equals)
            ptx.store_i32(out + Int64(place) * 4, row_of(pages, entry))
        cute.arch.sync_threads()


def ballot(x: Boolean) -> Uint32:
    """The lanes of the warp for which x is true."""
    return ptx.asm(
        "{\n.reg .pred p;\nsetp.ne.s32 p, {$r0}, 0;\nvote.sync.ballot.b32 {$w0}, p, 0xffffffff;\n}",
        [Uint32],
        Int32(x),
    )


def ordered(scores: Int64, entry: Int32) -> Uint32:
    """A score as a number of the same order: sign flipped if it is positive, all bits if not. Zeros are never -0.0."""
    return ptx.asm(
        "{\n.reg .b32 x, m;\nld.global.b32 x, [{$r0}];\nshr.s32 m, x, 31;\nor.b32 m, m, 0x80000000;\n"
        "xor.b32 {$w0}, x, m;\n}",
        [Uint32],
        scores + Int64(entry) * 4,
    )


def row_of(pages: Int64, entry: Int32) -> Int32:
    """The row of an entry in the entries' table."""
    return ptx.load_i32(pages + Int64(entry // PAGE_ROWS) * 4) * PAGE_ROWS + entry % PAGE_ROWS


def compile(arch: str) -> Callable[..., None]:
    """The launcher: (arguments, tokens, stream)."""

    def from_compiler() -> Callable[..., None]:
        example = Arguments(*(kind(1) for kind in Arguments.__annotations__.values()))
        return cute.compile(launch, example, Int32(1), cuda.CUstream(0))

    return load_or_compile("index_topk", "the only one", arch, from_compiler)
