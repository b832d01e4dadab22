"""Attention over window, entries and sink against a softmax in float64 (DeepSeek-V4 specification, section 3.3).

Regimes: lists with holes, repeats, any order; window and entry counts around the 64-key tile; no entries, only holes;
dense addressing against the same rows as a list; sink absent, finite, huge, ±inf; rows that are not named are NaN in
every case; strided q; all row formats; small and real dimensions; numbers of heads that no tile divides; KV splits and
their merge. The op runs before the oracle, so that recycled memory cannot hold the right answer.

Tolerance: the fp32 error may be twice the largest one of a plain fp32 softmax of the same rows (against float64),
plus 4 fp32 ulps of the largest value; a bf16 output adds one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.sparse_attention import sparse_attention

INF = float("inf")
FP32_ULP, BF16_ULP = 2.0**-24, 2.0**-8


def table(num_rows: int, dim: int, dtype: torch.dtype, named: Tensor, seed: int, fp8: bool = False) -> KVRows:
    """A table whose named rows are random and whose other rows are NaN."""
    format = RowFormat.FP8 if fp8 else RowFormat.PLAIN
    rows = KVRows.allocate(num_rows, format, dim, 64 if fp8 else 8, dtype, "cpu", float("nan"))
    where = named[named >= 0].unique().long()
    rows.scatter(where, torch.randn(len(where), dim, generator=torch.Generator().manual_seed(seed)).to(dtype))
    return rows


def random_list(tokens: int, length: int, num_rows: int, seed: int, holes: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, num_rows, (tokens, length), generator=generator)
    rows[torch.rand(tokens, length, generator=generator) < holes] = -1
    return rows.int()


def softmax_of_union(q: Tensor, keys: Tensor, sink: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """out [H, D] of one token from q [H, D] and keys [n, D], in `dtype` throughout."""
    s = q.to(dtype) @ keys.to(dtype).T * scale
    lse = s.logsumexp(1) if len(keys) else torch.full((len(q),), -INF, dtype=dtype)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(dtype))
    p = torch.where(s.isfinite(), torch.exp(s - total.unsqueeze(1)), torch.zeros((), dtype=dtype))
    return p @ keys.to(dtype)


@dataclass
class Case:
    """Arguments of one call, and the values of the rows that each token reads."""

    q: Tensor
    window: KVRows
    window_rows: Tensor
    entries: KVRows | None
    entry_indices: Tensor | None
    sink: Tensor | None
    scale: float

    def run(self, **overrides) -> Tensor:  # noqa: ANN003
        arguments = dict(entries=self.entries, entry_indices=self.entry_indices, sink=self.sink, scale=self.scale)
        return sparse_attention(self.q, self.window, self.window_rows, **{**arguments, **overrides})

    def keys(self, token: int) -> Tensor:
        parts = []
        for rows, index in ((self.window, self.window_rows), (self.entries, self.entry_indices)):
            if rows is not None:
                index = index[token]
                parts.append(rows.gather(index[index >= 0]).float())
        return torch.cat(parts)

    def oracle(self, dtype: torch.dtype) -> Tensor:
        outs = [softmax_of_union(q, self.keys(t), self.sink, self.scale, dtype) for t, q in enumerate(self.q)]
        return torch.stack(outs).double()

    def check(self, out: Tensor) -> None:
        assert out.dtype == self.q.dtype and out.shape == self.q.shape
        exact, plain = self.oracle(torch.float64), self.oracle(torch.float32)
        largest = max((self.keys(t).abs().max().item() for t in range(len(self.q)) if len(self.keys(t))), default=0.0)
        bound = 2 * (plain - exact).abs().max() + 4 * FP32_ULP * largest
        if out.dtype == torch.bfloat16:
            bound = bound + BF16_ULP * exact.abs()
        error = (out.double() - exact).abs()
        assert (error <= bound).all(), f"error {error.max():.3g}, bound {bound.min():.3g}"


def case(
    tokens: int = 5,
    heads: int = 6,
    dim: int = 32,
    window: int = 16,
    entries: int | None = 24,
    dtype: torch.dtype = torch.float32,
    sink: str = "random",
    holes: float = 0.3,
    fp8: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    window_rows = random_list(tokens, window, 300, seed + 1, holes)
    entry_indices = None if entries is None else random_list(tokens, entries, 500, seed + 2, holes)
    sinks = {"none": None, "random": torch.randn(heads, generator=generator)}
    return Case(
        q=torch.randn(tokens, heads, dim, generator=generator).to(dtype),
        window=table(300, dim, dtype, window_rows, seed + 3, fp8),
        window_rows=window_rows,
        entries=None if entries is None else table(500, dim, dtype, entry_indices, seed + 4, fp8),
        entry_indices=entry_indices,
        sink=sinks[sink],
        scale=dim**-0.5,
    )


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("sink", ["none", "random"], ids=["no_sink", "sink"])
@pytest.mark.parametrize("entries", [None, 0, 1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("window", [1, 64, 127, 128, 129])
def test_lists(window: int, entries: int | None, sink: str, dtype: torch.dtype) -> None:
    c = case(tokens=3, heads=3, dim=16, window=window, entries=entries, dtype=dtype, sink=sink)
    c.check(c.run())


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("heads", [8, 64])
def test_real_dimensions(heads: int, fp8: bool) -> None:
    c = case(tokens=3, heads=heads, dim=512, window=128, entries=512, dtype=torch.bfloat16, fp8=fp8)
    c.check(c.run())


@pytest.mark.parametrize("heads", [1, 2, 5, 128])
@pytest.mark.parametrize("dim", [8, 24, 100])
def test_odd_heads_and_dimensions(dim: int, heads: int) -> None:
    c = case(heads=heads, dim=dim)
    c.check(c.run())


@DTYPES
def test_early_tokens_have_holes_in_front(dtype: torch.dtype) -> None:
    """The window of the tokens 0, 1, … of a sequence: slot i of the list is the position t - W + 1 + i."""
    tokens, window = 20, 16
    c = case(tokens=tokens, window=window, dtype=dtype, entries=None, holes=0.0)
    c.window_rows = torch.arange(tokens).unsqueeze(1) - window + 1 + torch.arange(window)
    c.window = table(300, 32, dtype, c.window_rows, seed=9)
    out = c.run()
    c.check(out)
    first = c.window.gather(torch.tensor([0])).float()
    kept = torch.sigmoid(c.q[0].float() @ first[0] * c.scale - c.sink)
    assert torch.allclose(out[0].float(), kept.unsqueeze(1) * first, rtol=2.0**-8, atol=1e-6)


@DTYPES
def test_a_repeated_row_counts_twice(dtype: torch.dtype) -> None:
    c = case(dtype=dtype, holes=0.0)
    c.entry_indices[:, 1:9] = c.entry_indices[:, :1]
    c.check(c.run())


def test_only_holes() -> None:
    """A token without rows gets zero, with or without sink, and does not change its neighbours."""
    c = case(tokens=4)
    c.window_rows[2], c.entry_indices[2] = -1, -1
    for sink in (c.sink, None):
        c.sink = sink
        out = c.run()
        c.check(out)
        assert not out[2].any()
    everything = case(tokens=4)
    everything.window_rows.fill_(-1)
    everything.entry_indices.fill_(-1)
    assert not everything.run().any()


@pytest.mark.parametrize("value", [INF, -INF, 1e4, -1e4, 80.0], ids=str)
def test_extreme_sinks(value: float) -> None:
    c = case(tokens=4, heads=4)
    c.window_rows[1], c.entry_indices[1] = -1, -1
    c.sink = torch.tensor([0.3, value, -0.7, value])
    out = c.run()
    assert out.isfinite().all()
    if value in (INF, 1e4):
        assert not out[:, 1::2].any()
    if value in (-INF, -1e4):
        without = c.run(sink=None)
        assert torch.equal(out[:, 1::2], without[:, 1::2])
    if value != INF:  # inf - inf is beyond the oracle
        c.check(out)
    assert not out[1].any()


@DTYPES
def test_large_scores(dtype: torch.dtype) -> None:
    c = case(dtype=dtype)
    c.q = c.q * 300
    c.check(c.run())


@DTYPES
def test_strided_q_and_given_output(dtype: torch.dtype) -> None:
    c = case(dtype=dtype)
    wide = torch.full((5, 6, 80), float("nan"), dtype=dtype)
    wide[..., 7:39] = c.q
    contiguous = c.run()
    c.q = wide[..., 7:39]
    out = torch.full((5, 6, 32), float("nan"), dtype=dtype)
    returned = c.run(out=out)
    assert returned is out and torch.equal(out, contiguous)
    c.q = c.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(c.run(), contiguous)


@DTYPES
@pytest.mark.parametrize("entries_per_page", [2, 16, 64])
def test_dense_entries_are_the_list_of_all_visible(entries_per_page: int, dtype: torch.dtype) -> None:
    """Two requests, pages in any order, every visible length from none to all: bitwise equal to the list's result."""
    pages = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:20].view(2, 10)
    visible = torch.tensor([0, 1, 2, 3, 7, 10 * entries_per_page, 10 * entries_per_page - 1, 5, 0])
    visible = visible.clamp(max=10 * entries_per_page)
    request = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0, 1])
    lists = torch.full((9, 10 * entries_per_page), -1)
    for t in range(9):
        for j in range(int(visible[t])):
            page = int(pages[request[t], j // entries_per_page])
            lists[t, j] = page * entries_per_page + j % entries_per_page
    c = case(tokens=9, dtype=dtype)
    c.entries, c.entry_indices = table(40 * entries_per_page, 32, dtype, lists, seed=5), lists
    dense = c.run(
        entry_indices=None,
        page_table=pages.int(),
        entries_per_page=entries_per_page,
        token_to_request=request.int(),
        visible=visible.int(),
    )
    c.check(dense)
    assert torch.equal(dense, c.run())


@DTYPES
def test_a_list_is_looked_at_up_to_its_visible_slots(dtype: torch.dtype) -> None:
    """Slots from visible[t] on hold arbitrary memory; a length beyond the list means the whole list."""
    c = case(tokens=5, entries=150, dtype=dtype)
    visible = torch.tensor([0, 1, 64, 150, 4000], dtype=torch.int32)
    cut = torch.where(torch.arange(150) < visible[:, None], c.entry_indices, -1)
    expected = c.run(entry_indices=cut)
    c.entry_indices = torch.where(torch.arange(150) < visible[:, None], c.entry_indices, 2**31 - 1).int()
    assert torch.equal(c.run(visible=visible), expected)


def test_split_keys_do_not_change_the_definition() -> None:
    c = case(entries=150)
    assert torch.equal(c.run(split_keys=128), c.run())


@pytest.mark.parametrize("tokens", [1, 70])
def test_many_entries(tokens: int) -> None:
    """8,192 entries (HCA of a million tokens), and enough tokens for several chunks."""
    c = case(tokens=tokens, heads=2, dim=16, entries=8192 if tokens == 1 else 6000)
    c.check(c.run())


def test_a_prefill_unpacks_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 tokens with growing numbers of rows and different entries have the bits of single-token calls."""
    tokens, unpacked = 40, []
    window_rows = (torch.arange(tokens)[:, None] + torch.arange(128)).int()
    window_rows[:9, :7] = -1
    entry_indices = random_list(tokens, 70, 40, 5)
    window, entries = (
        table(n, 512, torch.bfloat16, rows, 6, fp8=True) for n, rows in ((300, window_rows), (64, entry_indices))
    )
    q = torch.randn(tokens, 3, 512, generator=torch.Generator().manual_seed(7)).bfloat16()
    sink = torch.randn(3)
    alone = [
        sparse_attention(
            q[t : t + 1], window, window_rows[t : t + 1], entries, entry_indices[t : t + 1], sink=sink, scale=0.1
        )
        for t in range(tokens)
    ]
    gather = KVRows.gather
    monkeypatch.setattr(
        KVRows, "gather", lambda self, rows: unpacked.append((self.format, rows.numel())) or gather(self, rows)
    )
    together = sparse_attention(q, window, window_rows, entries, entry_indices, sink=sink, scale=0.1)
    assert torch.equal(together, torch.cat(alone)) and together.isfinite().all()
    assert [n for format, n in unpacked if format is RowFormat.FP8] == [128 + 39 - 7, len(entry_indices.unique()) - 1]


def test_a_uniform_window_is_a_mean() -> None:
    """Computed by hand: with zero scores, 3 rows and a sink of 0 get a quarter each."""
    window = KVRows.allocate(3, RowFormat.PLAIN, 2, 2, torch.float32, "cpu")
    window.storage.copy_(torch.tensor([[4.0, 0.0], [8.0, 0.0], [0.0, 4.0]]))
    rows = torch.tensor([[0, 1, 2]])
    out = sparse_attention(torch.zeros(1, 1, 2), window, rows, sink=torch.zeros(1), scale=1.0)
    assert out.flatten().tolist() == [3.0, 1.0]


WRONG = {
    "q": ({"q": torch.zeros(2, 3, 8)}, r"expected \[T, H, 16\]"),
    "window_rows": ({"window_rows": torch.zeros(3, 4)}, r"expected \[2, W\]"),
    "sink": ({"sink": torch.zeros(4)}, r"expected \(3,\)"),
    "out": ({"out": torch.zeros(2, 3, 16).bfloat16()}, "out is"),
    "no_entries": ({"entry_indices": torch.zeros(2, 4)}, "entries is None"),
    "unnamed": ({"entries": "table"}, "either by entry_indices or by all of page_table"),
    "both": (
        {"entries": "table", "entry_indices": torch.zeros(2, 4), "page_table": torch.zeros(1, 1)},
        "either by entry_indices",
    ),
    "visible": (
        {"entries": "table", "entry_indices": torch.zeros(2, 4), "visible": torch.zeros(3)},
        r"expected \(2,\)",
    ),
    "visible_of_nothing": ({"visible": torch.zeros(2)}, "entries is None"),
    "split_keys": ({"split_keys": 192}, "positive multiple of 128"),
    "no_split_keys": ({"split_keys": 0}, "positive multiple of 128"),
    "half_dense": ({"entries": "table", "visible": torch.zeros(2)}, "all of page_table"),
    "entry_indices": ({"entries": "table", "entry_indices": torch.zeros(3, 4)}, r"expected \[2, K\]"),
    "dense": (
        {
            "entries": "table",
            "page_table": torch.zeros(1, 1),
            "token_to_request": torch.zeros(3),
            "visible": torch.zeros(2),
            "entries_per_page": 64,
        },
        "dense entries need",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_is_expected(name: str) -> None:
    change, message = WRONG[name]
    rows = KVRows.allocate(64, RowFormat.PLAIN, 16, 8, torch.float32, "cpu", 0.0)
    arguments = {"q": torch.zeros(2, 3, 16), "window": rows, "window_rows": torch.zeros(2, 4).int(), "scale": 1.0}
    change = {key: rows if isinstance(value, str) else value for key, value in change.items()}
    with pytest.raises(ValueError, match=message):
        sparse_attention(**{**arguments, **change})
