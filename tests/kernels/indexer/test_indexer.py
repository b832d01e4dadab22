"""Indexer scores and the choice of entries against loops (DeepSeek-V4 specification, section 3.5).

Regimes: no, few, exactly top_k and more visible entries; pages in any order, requests of different length in one batch;
ties everywhere; negative head weights; all row formats; entries beyond the visible ones filled with NaN.
"""

from __future__ import annotations

import pytest
import torch

from dsv4_kernels.indexer import index_scores, index_topk
from dsv4_kernels.kv_layout import KVRows, RowFormat

ENTRIES_PER_PAGE = 16
FORMATS = {
    "plain_fp32": (RowFormat.PLAIN, 16, torch.float32),
    "plain_bf16": (RowFormat.PLAIN, 16, torch.bfloat16),
    "index_fp4": (RowFormat.INDEX_FP4, 32, torch.bfloat16),
}


class Case:
    """Two requests with shuffled pages; every row outside [0, lengths[b]) of a request is NaN."""

    def __init__(self, name: str, lengths: tuple[int, int], heads: int = 3, integers: bool = False) -> None:
        generator = torch.Generator().manual_seed(sum(lengths) + heads)
        format, dim, dtype = FORMATS[name]
        self.keys = KVRows.allocate(512, format, dim, 8, dtype, "cpu", float("nan"))
        self.page_table = torch.randperm(32, generator=generator)[:20].view(2, 10).int()
        for request, length in enumerate(lengths):
            values = torch.randn(length, dim, generator=generator)
            values = torch.randint(-1, 2, (length, dim), generator=generator).float() if integers else values
            self.keys.scatter(self.rows(request, length), values)
        # Every third length of both requests, and the longer one in full.
        tokens_of = [(request, v) for request in (0, 1) for v in range(0, lengths[request] + 1, 3)]
        tokens_of.append((int(lengths[1] > lengths[0]), max(lengths)))
        self.request, self.visible = torch.tensor(tokens_of, dtype=torch.int32).unbind(1)
        tokens = len(tokens_of)
        self.q = torch.randn(tokens, heads, dim, generator=generator)
        self.weights = torch.randn(tokens, heads, generator=generator)
        if integers:
            self.q = torch.randint(-1, 2, self.q.shape, generator=generator).float()
            self.weights = torch.randint(-1, 2, self.weights.shape, generator=generator).float()
        self.q = self.q.to(dtype)

    def rows(self, request: int, length: int) -> torch.Tensor:
        pages = self.page_table[request].tolist()
        return torch.tensor(
            [pages[j // ENTRIES_PER_PAGE] * ENTRIES_PER_PAGE + j % ENTRIES_PER_PAGE for j in range(length)],
            dtype=torch.int64,
        )

    def arguments(self) -> tuple:
        return self.q, self.weights, self.keys, self.page_table, ENTRIES_PER_PAGE, self.request, self.visible

    def naive_scores(self, token: int) -> list[float]:
        key = self.keys.gather(self.rows(int(self.request[token]), int(self.visible[token]))).double()
        products = (self.q[token].double() @ key.T).relu()
        return (self.weights[token].double() @ products).tolist()


LENGTHS = pytest.mark.parametrize("lengths", [(1, 0), (5, 63), (64, 65), (150, 40)], ids=str)


@LENGTHS
@pytest.mark.parametrize("name", FORMATS)
def test_scores(name: str, lengths: tuple[int, int]) -> None:
    case = Case(name, lengths)
    scores = index_scores(*case.arguments())
    assert scores.dtype == torch.float32 and scores.shape == (len(case.visible), max(lengths))
    for token, visible in enumerate(case.visible.tolist()):
        assert scores[token, :visible].tolist() == pytest.approx(case.naive_scores(token), abs=2e-5)
        assert (scores[token, visible:] == -torch.inf).all()


@LENGTHS
@pytest.mark.parametrize("top_k", [1, 8, 64])
@pytest.mark.parametrize("name", FORMATS)
def test_topk(name: str, top_k: int, lengths: tuple[int, int]) -> None:
    """The choice by float64 scores, except where two scores are closer than fp32 can resolve (no such pair here)."""
    case = Case(name, lengths)
    got = index_topk(*case.arguments(), top_k)
    assert got.dtype == torch.int32 and got.shape == (len(case.visible), top_k)
    for token, visible in enumerate(case.visible.tolist()):
        scores = case.naive_scores(token)
        best = sorted(sorted(range(visible), key=lambda j: (-scores[j], j))[:top_k])
        rows = case.rows(int(case.request[token]), visible)[best].tolist()
        assert got[token].tolist() == rows + [-1] * (top_k - len(rows))


@pytest.mark.parametrize("top_k", [8, 200])
def test_rows_of_a_table_with_other_pages(top_k: int) -> None:
    """Keys are addressed by page_table, the returned rows by row_pages; the choice is the same."""
    case = Case("plain_fp32", (150, 40))
    elsewhere = torch.arange(100, 120).view(2, 10).flip(1).int()
    in_keys = index_topk(*case.arguments(), top_k)
    got = index_topk(*case.arguments(), top_k, row_pages=elsewhere)
    case.page_table = elsewhere
    numbers = {(r, row): j for r in (0, 1) for j, row in enumerate(Case("plain_fp32", (150, 40)).rows(r, 150).tolist())}
    for request, rows, others in zip(case.request.tolist(), in_keys.tolist(), got.tolist(), strict=True):
        entries = case.rows(request, 150).tolist()
        assert others == [-1 if row < 0 else entries[numbers[request, row]] for row in rows]


@pytest.mark.parametrize("top_k", [1, 5, 17, 100])
def test_of_equal_scores_the_lower_entry_wins(top_k: int) -> None:
    """Small integers: scores have no rounding error, and most of them tie, at zero and elsewhere, also at negative
    values."""
    case = Case("plain_fp32", (150, 40), heads=2, integers=True)
    got = index_topk(*case.arguments(), top_k)
    ties = 0
    for token, visible in enumerate(case.visible.tolist()):
        scores = case.naive_scores(token)
        order = sorted(range(visible), key=lambda j: (-scores[j], j))
        ties += visible > top_k and scores[order[top_k - 1]] == scores[order[top_k]]
        rows = case.rows(int(case.request[token]), visible)[sorted(order[:top_k])].tolist()
        assert got[token].tolist() == rows + [-1] * (top_k - len(rows))
    assert ties > 5


def test_all_scores_zero() -> None:
    """All products are negative: relu makes every score 0, and the first entries win, whatever the weights' signs."""
    keys = KVRows.allocate(64, RowFormat.PLAIN, 8, 4, torch.float32, "cpu", -1.0)
    weights = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    visible = torch.tensor([64, 10])
    got = index_topk(torch.ones(2, 2, 8), weights, keys, torch.tensor([[0]]), 64, torch.tensor([0, 0]), visible, 4)
    assert got.tolist() == [[0, 1, 2, 3]] * 2


def test_no_tokens_and_no_entries() -> None:
    keys = KVRows.allocate(64, RowFormat.PLAIN, 8, 4, torch.float32, "cpu", float("nan"))
    none = torch.zeros(0, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    assert index_topk(torch.ones(0, 2, 8), torch.ones(0, 2), keys, table, 64, none, none, 4).shape == (0, 4)
    zero = torch.zeros(3, dtype=torch.int32)
    assert index_topk(torch.ones(3, 2, 8), torch.ones(3, 2), keys, table, 64, zero, zero, 4).tolist() == [[-1] * 4] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"q": torch.zeros(2, 3, 8)}, r"q \[T, Hi, 16\]"),
        ({"head_weights": torch.zeros(2, 4)}, r"head_weights \[T, Hi\]"),
        ({"head_weights": torch.zeros(2, 3).bfloat16()}, "expected torch.float32"),
        ({"visible": torch.zeros(3)}, r"visible \(2,\)"),
        ({"row_pages": torch.zeros(1, 2, dtype=torch.int32)}, r"row_pages are \(1, 2\); expected .* \(1, 1\)"),
    ],
    ids=["top_k", "q", "head_weights", "dtype", "visible", "row_pages"],
)
def test_errors_say_what_is_expected(change: dict, message: str) -> None:
    arguments = {
        "q": torch.zeros(2, 3, 16),
        "head_weights": torch.zeros(2, 3),
        "keys": KVRows.allocate(64, RowFormat.PLAIN, 16, 8, torch.float32, "cpu", 0.0),
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
        "entries_per_page": 64,
        "token_to_request": torch.zeros(2, dtype=torch.int32),
        "visible": torch.ones(2, dtype=torch.int32),
        "top_k": 4,
    }
    with pytest.raises(ValueError, match=message):
        index_topk(**{**arguments, **change})
