"""A token's bits do not depend on the batch or chunk that it is computed in: for every op, bitwise.

Each op is a function of N = 300 tokens with inputs of their own. All tokens are computed at once, and then parts of
them: ranges of 1 to 257 tokens from several positions (chunking), and tokens picked in random order (batch
composition). Attention and indexer also get tokens with longer lists in the same batch, so that their padding differs.
In fp32 and bf16, with one, two and three threads; all of them give the bits of one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels.compressor import compress
from dsv4_kernels.hyper_connection import hc_head, hc_post, hc_pre
from dsv4_kernels.indexer import index_scores, index_topk
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.linear import grouped_linear, linear, linear_fp32
from dsv4_kernels.moe import expert_rows, experts_forward, sum_expert_rows, swiglu
from dsv4_kernels.norm import rms_norm
from dsv4_kernels.quant import fp4_qdq, fp8_qdq, hadamard
from dsv4_kernels.rope import apply_rope, rope_frequencies
from dsv4_kernels.router import route_hash, route_topk
from dsv4_kernels.sparse_attention import sparse_attention

N = 300
SIZES = (1, 2, 3, 7, 16, 17, 64, 100, 257)
Op = Callable[[Tensor], list[Tensor]]
"""Tokens [n] int64, indices into the N -> results, each [n, ...]."""


def make_normal(dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(dtype)


def products(dtype: torch.dtype, n: int, k: int) -> Op:
    normal = make_normal(dtype)
    x, weight = normal(N, k), normal(n, k)
    return lambda t: [linear(x[t], weight), linear(x[t], weight, act_qdq_block=128), linear_fp32(x[t], weight)]


def grouped_products(dtype: torch.dtype) -> Op:
    normal = make_normal(dtype)
    x, weight = normal(N, 4, 96), normal(4, 40, 96)
    return lambda t: [grouped_linear(x[t], weight)]


def norms_and_rotations(dtype: torch.dtype) -> Op:
    normal = make_normal(dtype)
    x, weight, frequencies = normal(N, 3, 56), normal(56), rope_frequencies(24, 1e4, None)
    positions = torch.arange(N) * 37
    return lambda t: [
        rms_norm(x[t], weight, 1e-6),
        rms_norm(x[t].flatten(1), None, 1e-6),
        apply_rope(x[t], positions[t], frequencies),
        apply_rope(x[t], positions[t], frequencies, inverse=True),
    ]


def quantisers(dtype: torch.dtype) -> Op:
    x = make_normal(dtype)(N, 3, 64)
    return lambda t: [fp8_qdq(x[t], 64), fp4_qdq(x[t]), hadamard(x[t])]


def hyper_connections(dtype: torch.dtype, d: int) -> Op:
    normal, params = make_normal(dtype), make_normal(torch.float32)
    x, y = normal(N, 4, d), normal(N, d)
    fn, base, scale = params(24, 4 * d) / (4 * d) ** 0.5, params(24), params(3)

    def op(t: Tensor) -> list[Tensor]:
        mixed, post, comb = hc_pre(x[t], fn, base, scale, 1e-6, 1e-6, 20)
        head = hc_head(x[t], fn[:4], base[:4], scale[:1], 1e-6, 1e-6)
        return [mixed, post, comb, hc_post(y[t], x[t], post, comb), head]

    return op


def routers(dtype: torch.dtype) -> Op:
    normal = make_normal(dtype)
    x, gate, bias = normal(N, 64), normal(16, 64), normal(16).float()
    expert_table = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:6] for i in range(50)])
    ids = torch.arange(N) % 50
    return lambda t: [
        *route_topk(x[t], gate, bias, 6, 2.5),
        *route_hash(x[t], gate, expert_table, ids[t], 1.5),
    ]


def experts(dtype: torch.dtype, act_qdq_block: int | None) -> Op:
    normal = make_normal(dtype)
    x, w13, w2 = normal(N, 64), normal(8, 48, 64), normal(8, 64, 24)
    weights, chosen = route_topk(x, normal(8, 64), normal(8).float(), 3, 2.5)
    rows, places = normal(3 * N, 64), torch.arange(3 * N).flip(0).view(N, 3)
    return lambda t: [
        experts_forward(x[t], weights[t], chosen[t], w13, w2, 10.0, act_qdq_block),
        expert_rows(x[t], weights[t], chosen[t], w13, w2, 10.0, act_qdq_block),
        sum_expert_rows(rows, places[t], chosen[t]),
        swiglu(x[t, :25], x[t, 25:50], 1.0),
    ]


def compressor(ratio: int, halves: int) -> Op:
    """A "token" is a compression group here; its sources lie in the state, among the tokens, or do not exist."""
    normal = make_normal(torch.float32)
    state, kv, score = normal(50, 2, halves * 20), normal(80, halves * 20), normal(80, halves * 20)
    sources = torch.randint(-1, 130, (N, halves * ratio), generator=torch.Generator().manual_seed(1)).int()
    sources[5] = -1
    return lambda t: [compress(state, kv, score, sources[t], ratio, 20)]


def indexer(dtype: torch.dtype, heads: int, format: RowFormat) -> Op:
    normal = make_normal(dtype)
    keys = KVRows.allocate(6 * 16 * 64, format, 32, 8, dtype, "cpu")
    keys.scatter(torch.arange(keys.num_rows), normal(keys.num_rows, 32))
    q, weights = normal(N, heads, 32), normal(N, heads).float()
    page_table = torch.randperm(6 * 16, generator=torch.Generator().manual_seed(2)).view(6, 16)
    request = torch.arange(N) % 6
    visible = torch.arange(N) * 7 % 300

    def op(t: Tensor) -> list[Tensor]:
        arguments = (q[t], weights[t], keys, page_table, 64, request[t], visible[t])
        scores = torch.full((len(t), 300), -torch.inf)
        dense = index_scores(*arguments)
        scores[:, : dense.shape[1]] = dense
        return [scores, index_topk(*arguments, 20), index_topk(*arguments, 200)]

    return op


def attention(dtype: torch.dtype, heads: int, dim: int, format: RowFormat = RowFormat.PLAIN) -> Op:
    """CSA lists of a length per token, HCA's dense entries, a window alone, and a KV split with its merge."""
    normal = make_normal(dtype)
    rows = KVRows.allocate(1024, format, dim, 64 if format is RowFormat.FP8 else 8, dtype, "cpu")
    rows.scatter(torch.arange(1024), normal(1024, dim))
    q, sink = normal(N, heads, dim), normal(heads).float()
    generator = torch.Generator().manual_seed(3)
    window = torch.randint(-1, 1024, (N, 128), generator=generator).int()
    listed = torch.randint(0, 1024, (N, 150), generator=generator).int()
    visible = torch.arange(N) * 7 % 151
    listed[torch.arange(150) >= visible.unsqueeze(1)] = -1
    page_table = torch.randperm(16, generator=generator).view(2, 8)[:, :3]
    request = torch.arange(N) % 2

    def op(t: Tensor) -> list[Tensor]:
        own = (q[t], rows, window[t])
        if format is RowFormat.FP8:  # unpacking is slow, and adds only a gather to the cases with plain rows
            return [sparse_attention(*own, rows, listed[t], sink=sink, scale=0.3)]
        dense = {
            "page_table": page_table,
            "entries_per_page": 64,
            "token_to_request": request[t],
            "visible": visible[t],
        }
        return [
            sparse_attention(*own, sink=sink, scale=0.3),
            sparse_attention(*own, rows, listed[t], sink=sink, scale=0.3),
            sparse_attention(*own, rows, **dense, sink=sink, scale=0.3),
        ]

    return op


OPS: dict[str, Callable[[torch.dtype], Op]] = {
    "linear_8x512": lambda dtype: products(dtype, 8, 512),
    "linear_96x250": lambda dtype: products(dtype, 96, 250),
    "linear_300x33": lambda dtype: products(dtype, 300, 33),
    "linear_1024x512": lambda dtype: products(dtype, 1024, 512),
    "linear_24x4096": lambda dtype: products(dtype, 24, 4096),
    "grouped_linear": grouped_products,
    "norm_rope": norms_and_rotations,
    "quantisers": quantisers,
    "hyper_connection_20": lambda dtype: hyper_connections(dtype, 20),
    "hyper_connection_512": lambda dtype: hyper_connections(dtype, 512),
    "router": routers,
    "experts": lambda dtype: experts(dtype, None),
    "experts_fp8_inputs": lambda dtype: experts(dtype, 128),
    "compressor_csa": lambda _: compressor(4, 2),
    "compressor_hca": lambda _: compressor(128, 1),
    "indexer_3_heads": lambda dtype: indexer(dtype, 3, RowFormat.PLAIN),
    "indexer_64_heads": lambda dtype: indexer(dtype, 64, RowFormat.PLAIN),
    "indexer_fp4": lambda dtype: indexer(dtype, 4, RowFormat.INDEX_FP4),
    "attention_5x24": lambda dtype: attention(dtype, 5, 24),
    "attention_1x32": lambda dtype: attention(dtype, 1, 32),
    "attention_64x64": lambda dtype: attention(dtype, 64, 64),
    "attention_fp8": lambda dtype: attention(dtype, 2, 512, RowFormat.FP8),
}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def parts_of_the_whole() -> Iterator[tuple[str, Tensor]]:
    for size in SIZES:
        for begin in {0, 5, N - size}:
            if begin + size <= N:
                yield f"tokens [{begin}, {begin + size})", torch.arange(begin, begin + size)
        picked = torch.randperm(N, generator=torch.Generator().manual_seed(size))[:size]
        yield f"{size} picked tokens", picked


def assert_parts_equal_the_whole(op: Op, whole: list[Tensor], parts: list[tuple[str, Tensor]]) -> None:
    for name, tokens in parts:
        for i, (got, expected) in enumerate(zip(op(tokens), whole, strict=True)):
            assert same_bits(got, expected[tokens]), f"result {i} of {name} differs from the whole's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPS)
def test_one_thread(name: str, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    threads(1)
    op = OPS[name](dtype)
    assert_parts_equal_the_whole(op, op(torch.arange(N)), list(parts_of_the_whole()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("count", [2, 3])
def test_more_threads(count: int, name: str, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    """Fewer parts; all tokens at once are bitwise equal to the result of one thread.

    Two threads changed the bits of five heads' attention in a batch of one; three threads changed the bits of products
    with few columns.
    """
    op = OPS[name](dtype)
    threads(1)
    with_one = op(torch.arange(N))
    threads(count)
    for got, expected in zip(op(torch.arange(N)), with_one, strict=True):
        assert same_bits(got, expected), f"{count} threads differ from one"
    parts = list(parts_of_the_whole())
    assert_parts_equal_the_whole(op, with_one, [parts[0], parts[9], parts[-1]])


def test_an_op_that_is_not_invariant_is_caught(threads: Callable[[int], None]) -> None:
    """PyTorch's own functions fail this test: the reason for `reference.batch_invariant` and for the tiles."""
    threads(1)
    x, weight = torch.randn(N, 40, generator=torch.Generator().manual_seed(4)), torch.ones(3, 40) / 3
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("without vector instructions torch.sigmoid has one routine only")
    for op in (lambda t: [torch.sigmoid(x[t, :3])], lambda t: [x[t] @ weight.T]):
        with pytest.raises(AssertionError, match="differs from the whole's"):
            assert_parts_equal_the_whole(op, op(torch.arange(N)), list(parts_of_the_whole()))
