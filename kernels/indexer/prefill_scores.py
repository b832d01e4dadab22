"""Scores of a CSA layer's entries in a prefill on Hopper (sm_90a): neighbouring tokens share the expanded keys.

A CTA has eight neighbouring tokens and a run of pages. The tokens' queries lie in shared memory. Each of its four
warpgroups processes every fourth page: it expands the page's 64 keys to bf16 in registers once, as the left operand of
`wgmma`, and multiplies them with one token's queries after the other's, while the other warpgroups weight their
products.

A lane of a quad has 32 consecutive channels of a key, as in `scores`; so the queries' channels are stored in the order
that matches fragments of that left operand.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from dsv4_kernels.device import bf16_rows, dependent_launch, ptx, wgmma
from dsv4_kernels.host.launch import load_launcher
from dsv4_kernels.indexer.scores import (
    HEADS_A_TILE,
    KEY_DIM,
    KEYS_A_WARP,
    STEPS,
    Arguments,
    fragments,
    load_keys,
    weigh,
)
from dsv4_kernels.kv_layout import PAGE_ROWS

TOKENS = 8
"""Tokens of a CTA: 16 KiB of shared memory each, with 64 heads."""
WARPGROUP = 128
WARPGROUPS = 4
THREADS = WARPGROUPS * WARPGROUP
HALF_CHANNELS = KEY_DIM // 2
"""Channels of a row of 128 bytes, within which the swizzle exchanges units of 16 bytes."""
ROW_BYTES = 2 * HALF_CHANNELS
SWIZZLE_ROWS = 8
CTAS = 512
"""Number of CTAs to aim at: several for each multiprocessor, with enough pages for each to be worth loading its
queries."""
MAX_PAGES_A_CTA = 64


def pages_a_cta(tokens: int, num_pages: int) -> int:
    """The number of pages in a run, which one CTA scores."""
    return max(WARPGROUPS, min(MAX_PAGES_A_CTA, num_pages * -(-tokens // TOKENS) // CTAS))


@cute.jit
def launch(
    args: Arguments, heads: cutlass.Constexpr[int], runs: Int32, num_tokens: Int32, stream: cuda.CUstream
) -> None:
    """Launches one CTA for each run of pages and each eight tokens."""
    kernel(args, heads, num_tokens).launch(
        grid=[runs, (num_tokens + (TOKENS - 1)) // TOKENS, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(args: Arguments, heads: cutlass.Constexpr[int], num_tokens: Int32) -> None:
    """Computes the scores of one run of pages."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    run, tile, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    queries = smem.allocate_tensor(Uint8, cute.make_layout(TOKENS * heads * 2 * KEY_DIM), byte_alignment=1024)
    weights = smem.allocate_tensor(Float32, cute.make_layout(TOKENS * heads), byte_alignment=16)
    counts = smem.allocate_tensor(Int32, cute.make_layout(TOKENS), byte_alignment=16)
    requests = smem.allocate_tensor(Int32, cute.make_layout(TOKENS), byte_alignment=16)
    first_token, first_page = tile * TOKENS, run * args.pages_a_cta
    most = Int32(0)
    for i in cutlass.range_constexpr(TOKENS):
        count, request = Int32(0), Int32(0)
        if first_token + i < num_tokens:
            count = ptx.load_i32(args.visible + Int64(first_token + i) * 4)
            request = ptx.load_i32(args.token_to_request + Int64(first_token + i) * 4)
            if count <= args.top_k:
                count = Int32(0)
        if thread == 0:
            counts[i] = count
            requests[i] = request
        most = ptx.imax(most, count)
    if first_page * PAGE_ROWS < most:
        store_queries(args, heads, heads, TOKENS, first_token, num_tokens, thread, queries.iterator.toint())
        if thread < TOKENS * heads:
            token = first_token + thread // heads
            if token < num_tokens:
                address = args.head_weights + Int64(token) * args.head_weights_token_bytes
                weights[thread] = ptx.load_f32(address + (thread % heads) * 4)
        cute.arch.fence_view_async_shared()  # generic stores, read by wgmma
        cute.arch.sync_threads()
        last_page = ptx.imin(first_page + args.pages_a_cta, (most + (PAGE_ROWS - 1)) // PAGE_ROWS)
        lane, warp = thread % 32, thread % WARPGROUP // 32
        quad, key = lane % 4, warp * KEYS_A_WARP + lane // 4
        a = cute.make_rmem_tensor((4 * STEPS,), Uint32)
        for page in cutlass.range(first_page + thread // WARPGROUP, last_page, WARPGROUPS, unroll=1):
            loaded = Int32(-1)  # the request whose keys are in `a`
            for i in cutlass.range(0, TOKENS, unroll=1):
                count, request = counts[i], requests[i]
                if page * PAGE_ROWS < count:
                    if request != loaded:
                        load_page(args, request, page, key, quad, a)
                        loaded = request
                    sums = multiply(a, heads, queries.iterator.toint() + i * (heads * 2 * KEY_DIM))
                    of_token = weights.iterator.toint() + (i * heads + 2 * quad) * 4
                    pairs = [ptx.load_shared_f32x2(of_token + n * (4 * HEADS_A_TILE)) for n in range(heads // 8)]
                    scores = weigh(sums, [weight for pair in pairs for weight in pair])
                    entry = page * PAGE_ROWS + key
                    out = args.scores + Int64(first_token + i) * args.scores_row_bytes
                    for j in cutlass.range_constexpr(2):
                        if (quad == 0) & (entry + 8 * j < count):
                            ptx.store_f32(out + Int64(entry + 8 * j) * 4, scores[j])


@cute.jit
def store_queries(
    args: Arguments,
    heads: cutlass.Constexpr[int],
    rows: cutlass.Constexpr[int],
    tokens: cutlass.Constexpr[int],
    first_token: Int32,
    num_tokens: Int32,
    thread: Int32,
    queries: Int32,
) -> None:
    """Stores the CTA's queries to shared memory: for each token two tiles [rows][64 channels], swizzled by 128 bytes.
    Rows after the heads are zeros.

    A thread has one head's channels of one instruction: four channels for each lane of a quad. 512 threads call it.
    """
    head, step = thread // STEPS, thread % STEPS
    row = queries + step // (STEPS // 2) * (rows * ROW_BYTES) + head * ROW_BYTES
    unit = step % (STEPS // 2) * 2
    for i in cutlass.range_constexpr(tokens):
        if (head < heads) & (first_token + i < num_tokens):
            address = args.q + Int64(first_token + i) * args.q_token_bytes + head * (2 * KEY_DIM) + step * 8
            pairs = [bf16_rows.load_8_bytes(address + lane * (2 * KEY_DIM // 4)) for lane in range(4)]
            for j in cutlass.range_constexpr(2):
                swizzled = ((unit + j) ^ (head % SWIZZLE_ROWS)) * 16
                ptx.store_shared(row + i * (rows * 2 * KEY_DIM) + swizzled, tuple(pair[j] for pair in pairs))
        if cutlass.const_expr(rows > heads):
            if (head >= heads) & (head < rows):
                for j in cutlass.range_constexpr(2):
                    ptx.store_shared(row + i * (rows * 2 * KEY_DIM) + (unit + j) * 16, (Uint32(0),) * 4)


@cute.jit
def load_page(args: Arguments, request: Int32, page: Int32, key: Int32, quad: Int32, a: cute.Tensor) -> None:
    """Loads a lane's part of 64 keys, as the left operand of all instructions."""
    number = ptx.load_i32(args.page_table + Int64(request) * args.page_table_row_bytes + Int64(page) * 4)
    words, scales = load_keys(args.keys + Int64(number) * args.page_bytes, key, quad)
    for word in cutlass.range_constexpr(4):
        for half, fragment in enumerate(fragments(words, scales, word)):
            for i in cutlass.range_constexpr(4):
                a[(2 * word + half) * 4 + i] = fragment[i]


def multiply(a: cute.Tensor, heads: int, queries: Int32) -> list:
    """A lane's sums of 64 keys with one token's queries in shared memory, in the order that `weigh` takes.

    One PTX statement from the fence to the wait: the compiler must not touch the registers in between.
    """
    outs = ", ".join(f"{{$w{i}}}" for i in range(heads // 2))
    lines = ["{", *wgmma.prepared(f"{{$r{4 * STEPS}}}"), "wgmma.fence.sync.aligned;"]
    for step in range(STEPS):
        half, within = divmod(step, STEPS // 2)
        left = ", ".join(f"{{$r{4 * step + i}}}" for i in range(4))
        lines += [
            f"add.s64 b, at, {(half * heads * ROW_BYTES + within * 32) // 16};",
            f"wgmma.mma_async.sync.aligned.m64n{heads}k16.f32.bf16.bf16 {{{outs}}}, {{{left}}}, b, "
            f"{'add' if step else 'add_none'}, 1, 1, 0;",
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
    arguments = [a[i] for i in range(4 * STEPS)]
    return list(ptx.asm("\n".join(lines), [Float32] * (heads // 2), *arguments, queries))


def compile(arch: str, heads: int) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, runs, tokens, stream)."""

    return load_launcher("index_prefill_scores", heads, arch, launch, Arguments, heads, Int32, Int32)
