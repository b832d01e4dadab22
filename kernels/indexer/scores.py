"""Scores of a CSA layer's entries on a GPU (sm_90a, sm_100a): FP4 keys and queries on tensor cores by `mma.sync`.

Prefills on Hopper use `prefill_scores` instead, where tokens share the expanded keys.

A CTA has one token and a run of pages; its four warps have 16 keys of each page. In a forward of few tokens a CTA has
every n-th page instead, so that its n CTAs share a token's pages evenly, however many the token sees of the pages that
a CUDA graph has room for; and it loads a page's keys while it multiplies the keys of the page before.

The query stays in registers. The channels of a product may lie anywhere in a fragment as long as both operands agree: a
lane of a quad has 32 consecutive channels, so it loads 16 bytes of a key and the one scale that they share, and nothing
goes through shared memory.

FP4 times a power of two is exact in bf16, as is a query that was rounded to FP4; so are their products in fp32. A
score's summation order is the same in every batch: the instructions' order over channels, then a lane's heads, then the
quad.
"""

from collections.abc import Callable
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.device.bf16_rows import add, load_words, sum_over_lanes
from dsv4_kernels.device.mma import multiply_bf16
from dsv4_kernels.host.launch import load_launcher
from dsv4_kernels.kv_layout import FP4_SCALE_GROUP, PAGE_ROWS

KEY_DIM = 128
KEYS_A_WARP = 16
THREADS = 32 * PAGE_ROWS // KEYS_A_WARP
HEADS_A_TILE = 8
CODE_BYTES = KEY_DIM // 2
SCALE_BYTES = KEY_DIM // FP4_SCALE_GROUP
WORDS_OF_A_KEY = 5
"""Words that a lane loads of a key: four of codes, and the word of all four scales."""
STEPS = 8
"""Instructions for a key's channels: 16 channels each, 4 from every lane of a quad."""


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel; addresses are Int64."""

    q: Int64  # [T, Hi, 128] bf16
    q_token_bytes: Int64
    head_weights: Int64  # [T, Hi] fp32
    head_weights_token_bytes: Int64
    keys: Int64  # pages of 64 rows
    page_bytes: Int64
    page_table: Int64  # [B, P] int32
    page_table_row_bytes: Int64
    token_to_request: Int64  # [T] int32
    visible: Int64  # [T] int32
    scores: Int64  # [T, row_entries] fp32
    scores_row_bytes: Int64
    top_k: Int32  # a token that sees no more entries than this is not scored
    pages_a_cta: Int32


@cute.jit
def launch(
    args: Arguments,
    heads: cutlass.Constexpr[int],
    few_tokens: cutlass.Constexpr[bool],
    runs: Int32,
    tokens: Int32,
    stream: cuda.CUstream,
) -> None:
    """Launches `runs` CTAs for each token."""
    if cutlass.const_expr(few_tokens):  # first pages first: CTAs of later pages may have nothing to do
        kernel_of_few_tokens(args, heads).launch(
            grid=[tokens, runs, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
        )
    else:
        kernel(args, heads).launch(
            grid=[runs, tokens, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
        )


@cute.kernel
def kernel(args: Arguments, heads: cutlass.Constexpr[int]) -> None:
    """Computes the scores of one run of pages."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    run, token, _ = cute.arch.block_idx()
    visible = ptx.load_i32(args.visible + Int64(token) * 4)
    first_page = run * args.pages_a_cta
    if (visible > args.top_k) & (first_page * PAGE_ROWS < visible):
        lane, warp = thread % 32, thread // 32
        row, quad = lane // 4, lane % 4
        tiles = heads // HEADS_A_TILE
        q = cute.make_rmem_tensor((tiles * 2 * STEPS,), Uint32)
        weights = cute.make_rmem_tensor((2 * tiles,), Float32)
        load_query(args, token, row, quad, range(tiles), q, weights)
        request = ptx.load_i32(args.token_to_request + Int64(token) * 4)
        table = args.page_table + Int64(request) * args.page_table_row_bytes
        out = args.scores + Int64(token) * args.scores_row_bytes
        last_page = ptx.imin(first_page + args.pages_a_cta, (visible + (PAGE_ROWS - 1)) // PAGE_ROWS)
        key = warp * KEYS_A_WARP + row  # and key + 8
        for page in cutlass.range(first_page, last_page, unroll=1):
            number = ptx.load_i32(table + Int64(page) * 4)
            codes = args.keys + Int64(number) * args.page_bytes
            scores = page_scores(codes, key, quad, tiles, q, weights)
            entry = page * PAGE_ROWS + key
            for i in cutlass.range_constexpr(2):
                if (quad == 0) & (entry + 8 * i < visible):
                    ptx.store_f32(out + Int64(entry + 8 * i) * 4, scores[i])


@cute.kernel
def kernel_of_few_tokens(args: Arguments, heads: cutlass.Constexpr[int]) -> None:
    """Computes the scores of pages `run`, `run` + runs, ... of a token, in the same bits as `kernel`.

    A load that needs the result of another one takes some 0.4 us, as long as a page's products. So the length, the
    request and the first page's number do not wait for each other where they need not, the query is loaded meanwhile,
    and a page's number is loaded two pages ahead.
    """
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    token, run, _ = cute.arch.block_idx()
    _, runs, _ = cute.arch.grid_dim()
    visible = ptx.load_i32(args.visible + Int64(token) * 4)
    request = ptx.load_i32(args.token_to_request + Int64(token) * 4)
    table = args.page_table + Int64(request) * args.page_table_row_bytes
    number = ptx.load_i32(table + Int64(run) * 4)  # the table has at least as many pages as a token has CTAs
    if (visible > args.top_k) & (run * PAGE_ROWS < visible):
        lane, warp = thread % 32, thread // 32
        row, quad = lane // 4, lane % 4
        tiles = heads // HEADS_A_TILE
        q = cute.make_rmem_tensor((tiles * 2 * STEPS,), Uint32)
        weights = cute.make_rmem_tensor((2 * tiles,), Float32)
        key = warp * KEYS_A_WARP + row  # and key + 8
        loaded, ahead = (cute.make_rmem_tensor((2 * WORDS_OF_A_KEY,), Uint32) for _ in range(2))
        load_query(args, token, row, quad, range(tiles // 2), q, weights, True)
        load_page(args, number, key, quad, loaded)
        load_query(args, token, row, quad, range(tiles // 2, tiles), q, weights, True)
        last_page = (visible + (PAGE_ROWS - 1)) // PAGE_ROWS
        out = args.scores + Int64(token) * args.scores_row_bytes
        page = run
        number = page_number(table, page + runs, last_page)
        while page < last_page:
            if page + runs < last_page:
                load_page(args, number, key, quad, ahead)
            number = page_number(table, page + 2 * runs, last_page)
            words, scales = keys_of(loaded, quad)
            scores = multiply(words, scales, tiles, q, weights)
            entry = page * PAGE_ROWS + key
            for i in cutlass.range_constexpr(2):
                if (quad == 0) & (entry + 8 * i < visible):
                    ptx.store_f32(out + Int64(entry + 8 * i) * 4, scores[i])
            for i in cutlass.range_constexpr(2 * WORDS_OF_A_KEY):
                loaded[i] = ahead[i]
            page += runs


def page_number(table: Int64, page: Int32, last_page: Int32) -> Int32:
    """The number of a page of the token, 0 if it has no such page."""
    return ptx.load_or_zeros(Int32, 1, table + Int64(page) * 4, last_page - page, "gt.s32", cache="")


def load_page(args: Arguments, number: Int32, key: Int32, quad: Int32, loaded: cute.Tensor) -> None:
    """Loads a lane's part of two keys of a page, for `keys_of`; nothing waits for it."""
    codes = args.keys + Int64(number) * args.page_bytes
    for i in range(2):
        place = key + 8 * i
        words = load_words(codes + place * CODE_BYTES + quad * 16)
        scale = ptx.load_i32(codes + (PAGE_ROWS * CODE_BYTES + place * SCALE_BYTES)).to(Uint32)
        for j, word in enumerate((*words, scale)):
            loaded[i * WORDS_OF_A_KEY + j] = word


def load_words_through_l1(address: Int64) -> tuple:
    """`load_words` through L1, for words that other warps of the CTA load, too."""
    return ptx.asm("ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Uint32] * 4, address)


def scale_of(word: Uint32, quad: Int32) -> Uint32:
    """The scale of a lane's block of 32 channels, from the word with the four scales of a key."""
    return ptx.scale_pair((word >> (8 * quad)) & 0xFF)


def keys_of(loaded: cute.Tensor, quad: Int32) -> tuple:
    """The result of `load_keys`, from loaded words."""
    first = (0, WORDS_OF_A_KEY)
    words = [[loaded[at + j] for j in range(4)] for at in first]
    return words, [scale_of(loaded[at + 4], quad) for at in first]


@cute.jit
def load_query(
    args: Arguments,
    token: Int32,
    row: Int32,
    quad: Int32,
    tiles: cutlass.Constexpr[range],
    q: cute.Tensor,
    weights: cute.Tensor,
    through_l1: cutlass.Constexpr[bool] = False,
) -> None:
    """Loads a lane's part of some tiles of the query: channels [32 quad, 32 quad + 32) of heads 8 n + row, and the
    weights of two heads of each tile. All warps of a CTA load the same query."""
    begin = args.q + Int64(token) * args.q_token_bytes + quad * (2 * FP4_SCALE_GROUP)
    for n in cutlass.range_constexpr(tiles.start, tiles.stop):
        head = begin + (n * HEADS_A_TILE + row) * (2 * KEY_DIM)
        for i in cutlass.range_constexpr(4):
            words = load_words_through_l1(head + 16 * i) if through_l1 else load_words(head + 16 * i)
            for j in cutlass.range_constexpr(4):
                q[n * 2 * STEPS + 4 * i + j] = words[j]
        address = args.head_weights + Int64(token) * args.head_weights_token_bytes
        for i in cutlass.range_constexpr(2):
            weights[2 * n + i] = ptx.load_f32(address + (n * HEADS_A_TILE + 2 * quad + i) * 4)


@cute.jit
def page_scores(
    codes: Int64, key: Int32, quad: Int32, tiles: cutlass.Constexpr[int], q: cute.Tensor, weights: cute.Tensor
) -> tuple:
    """Scores of two keys of a page, in every lane of their quad."""
    words, scales = load_keys(codes, key, quad)
    return multiply(words, scales, tiles, q, weights)


def multiply(words: list, scales: list, tiles: int, q: cute.Tensor, weights: cute.Tensor) -> tuple:
    """Scores of two keys that `load_keys` returned, in every lane of their quad."""
    sums = cute.make_rmem_tensor((4 * tiles,), Float32)
    sums.fill(0.0)
    for word in range(4):
        for half, a in enumerate(fragments(words, scales, word)):
            step = 2 * word + half
            for n in range(tiles):
                b = (q[n * 2 * STEPS + 2 * step], q[n * 2 * STEPS + 2 * step + 1])
                d = multiply_bf16(a, b, tuple(sums[4 * n + i] for i in range(4)))
                for i in range(4):
                    sums[4 * n + i] = d[i]
    return weigh([sums[i] for i in range(4 * tiles)], [weights[i] for i in range(2 * tiles)])


def load_keys(codes: Int64, key: Int32, quad: Int32) -> tuple:
    """A lane's 32 channels of two keys of a page: four words of codes each, and their scales."""
    words, scales = [], []
    for i in range(2):
        place = key + 8 * i
        words.append(load_words(codes + place * CODE_BYTES + quad * 16))
        scale = codes + (PAGE_ROWS * CODE_BYTES + place * SCALE_BYTES)
        scales.append(scale_of(ptx.load_i32(scale).to(Uint32), quad))
    return words, scales


def fragments(words: list, scales: list, word: int) -> list:
    """Eight channels of a lane's two keys: its four words of the left operand, for each of two instructions."""
    first, second = (dequantise(words[i][word], scales[i]) for i in range(2))
    return [(first[2 * h], second[2 * h], first[2 * h + 1], second[2 * h + 1]) for h in range(2)]


def weigh(sums: list, weights: list) -> tuple:
    """Two keys' scores, in every lane of their quad. Of tile n a lane has products with heads 8 n + 2 quad and the
    next.

    Args:
        sums: for tile n, from 4 n on: the first key's products with both heads, then the second key's.
        weights: for tile n, from 2 n on: the weights of both heads.
    """
    totals = []
    for i in range(2):
        total = Float32(0.0)
        for n in range(len(sums) // 4):
            for j in range(2):
                total = ptx.fma(ptx.fmax(sums[4 * n + 2 * i + j], Float32(0.0)), weights[2 * n + j], total)
        # -0.0 equals 0.0, but to the radix select it would be another number.
        totals.append(add(sum_over_lanes(total, 4), Float32(0.0)))
    return tuple(totals)


def dequantise(codes: Uint32, scale: Uint32) -> tuple:
    """Eight e2m1 codes times a power of two (`ptx.scale_pair`), as four words of two bf16, in order."""
    words = []
    for half in range(2):
        part = codes >> (16 * half) if half else codes
        high = ptx.asm("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", [Uint32], *_high_bytes(), part & 0x7777)
        low = ptx.asm("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", [Uint32], *_low_bytes(), part & 0x7777)
        for order, signs in ((0x5140, (12, 24)), (0x7362, (4, 16))):
            pair = ptx.asm("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", [Uint32], low, high, Uint32(order))
            sign = ((part << signs[0]) & 0x8000) | ((part << signs[1]) & Uint32(0x80000000))
            words.append(ptx.asm("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", [Uint32], pair | sign, scale))
    return tuple(words)


def _high_bytes() -> tuple:
    return Uint32(0x3F3F3F00), Uint32(0x40404040)


def _low_bytes() -> tuple:
    return Uint32(0xC0800000), Uint32(0xC0804000)


def compile(arch: str, heads: int, few_tokens: bool = False) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, runs, tokens, stream)."""

    config = (heads, "few tokens") if few_tokens else heads
    return load_launcher("index_scores", config, arch, launch, Arguments, heads, few_tokens, Int32, Int32)
