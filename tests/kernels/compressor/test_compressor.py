"""The compressor through a small ring of states, against a loop over whole sequences (DeepSeek-V4 specification, 3.4).

Regimes: CSA (ratio 4, two halves) and HCA (one half); one request and several interleaved; chunks of every size around
the compression group; the first group, which has no predecessor; ring rows that must not be read filled with NaN.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dsv4_kernels.compressor import compress

D = 6
KINDS = {"csa": (4, 2), "hca_8": (8, 1), "hca_128": (128, 1), "odd_ratio": (3, 1)}


def sequence(length: int, halves: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, halves * D, generator=generator), 3 * torch.randn(
        length, halves * D, generator=generator
    )


def naive_entries(kv: torch.Tensor, score: torch.Tensor, ratio: int, halves: int) -> np.ndarray:
    """All entries of one sequence, token by token and channel by channel."""
    entries = []
    for group in range(len(kv) // ratio):
        own = range(group * ratio, (group + 1) * ratio)
        if halves == 1:
            members = [(t, 0) for t in own]
        else:
            members = [(t - ratio, 0) for t in own if t >= ratio] + [(t, D) for t in own]
        entry = []
        for channel in range(D):
            weights = [math.exp(score[t, offset + channel].item()) for t, offset in members]
            values = [kv[t, offset + channel].item() for t, offset in members]
            entry.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
        entries.append(entry)
    return np.array(entries).reshape(-1, D)


class ToyRing:
    """States of a few requests, `ring` rows each: a token at position p is in row slot · ring + p % ring."""

    def __init__(self, slots: int, ratio: int, halves: int) -> None:
        self.ratio, self.halves, self.ring = ratio, halves, ratio * halves
        self.rows = torch.full((slots * self.ring, 2, halves * D), float("nan"))

    def forward(self, chunks: list[tuple[int, int, torch.Tensor, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """Run one forward over several requests' (slot, first position, kv, score); return the closed entries by
        request slot."""
        num_state, sources, owners, first_token = len(self.rows), [], [], 0
        for slot, begin, kv, _ in chunks:
            end = begin + len(kv)
            for group in range(begin // self.ratio, end // self.ratio):
                last = (group + 1) * self.ratio
                row = []
                for position in range(last - self.ratio * self.halves, last):
                    if position < 0:
                        row.append(-1)
                    elif position < begin:
                        row.append(slot * self.ring + position % self.ring)
                    else:
                        row.append(num_state + first_token + position - begin)
                sources.append(row)
                owners.append(slot)
            first_token += len(kv)
        kv, score = torch.cat([c[2] for c in chunks]), torch.cat([c[3] for c in chunks])
        index = torch.tensor(sources, dtype=torch.int32).view(-1, self.ring)
        entries = compress(self.rows, kv, score, index, self.ratio, D)
        for slot, begin, chunk_kv, chunk_score in chunks:
            for position in range(begin, begin + len(chunk_kv)):
                row = self.rows[slot * self.ring + position % self.ring]
                row[0], row[1] = chunk_kv[position - begin], chunk_score[position - begin]
        owner = torch.tensor(owners, dtype=torch.int64)
        return {slot: entries[owner == slot] for slot, *_ in chunks}


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 8, 9, 64, 127, 129, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_any_chunking_gives_the_entries_of_the_whole(kind: str, chunk: int) -> None:
    ratio, halves = KINDS[kind]
    kv, score = sequence(2 * ratio + 2 * ratio // 3 + 14, halves, seed=0)
    ring = ToyRing(2, ratio, halves)
    pieces = [ring.forward([(1, t, kv[t : t + chunk], score[t : t + chunk])])[1] for t in range(0, len(kv), chunk)]
    entries = torch.cat(pieces)
    assert np.allclose(entries.numpy(), naive_entries(kv, score, ratio, halves), rtol=0, atol=3e-6)
    whole = ToyRing(1, ratio, halves).forward([(0, 0, kv, score)])[0]
    assert torch.equal(entries, whole)  # bitwise


@pytest.mark.parametrize("kind", KINDS)
def test_requests_in_one_batch_do_not_meet(kind: str) -> None:
    """Three requests with chunks of different sizes and phases; slot 1 never runs and stays NaN."""
    ratio, halves = KINDS[kind]
    ring = ToyRing(4, ratio, halves)
    sequences = {slot: sequence(2 * ratio + slot, halves, seed=slot) for slot in (0, 2, 3)}
    done, got = dict.fromkeys(sequences, 0), {slot: [] for slot in sequences}
    steps = [(5, 0, 1), (1, 1, 3), (0, ratio, 2), (2, 1, 1)] * ratio
    for step in steps:
        chunks = []
        for (slot, (kv, score)), n in zip(sequences.items(), step, strict=True):
            begin, end = done[slot], min(done[slot] + n, len(kv))
            if begin < end:
                chunks.append((slot, begin, kv[begin:end], score[begin:end]))
                done[slot] = end
        if chunks:
            for slot, entries in ring.forward(chunks).items():
                got[slot].append(entries)
    for slot, (kv, score) in sequences.items():
        assert done[slot] == len(kv)
        expected = naive_entries(kv, score, ratio, halves)
        assert np.allclose(torch.cat(got[slot]).numpy(), expected, rtol=0, atol=3e-6), slot


def test_csa_uses_the_first_half_of_the_previous_group_and_the_second_of_its_own() -> None:
    kv = torch.zeros(8, 2 * D)
    kv[:, :D], kv[:, D:] = torch.arange(8.0).unsqueeze(1), 100 + torch.arange(8.0).unsqueeze(1)
    sources = torch.tensor([[-1, -1, -1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int32)
    entries = compress(torch.empty(0, 2, 2 * D), kv, torch.zeros(8, 2 * D), sources, 4, D)
    assert entries.tolist() == [[(100 + 101 + 102 + 103) / 4] * D, [(0 + 1 + 2 + 3 + 104 + 105 + 106 + 107) / 8] * D]


def test_groups_without_sources_are_zero_and_touch_nothing() -> None:
    """Requests of a decode batch that close no group."""
    kv, score = sequence(3, 1, seed=1)
    kv[1], score[1] = float("nan"), float("nan")
    sources = torch.tensor([[-1] * 4, [0, 2, -1, -1], [-1] * 4], dtype=torch.int32)
    entries = compress(torch.full((0, 2, D), float("nan")), kv, score, sources, 4, D)
    assert not entries[0].any() and not entries[2].any()
    alone = compress(torch.full((0, 2, D), float("nan")), kv, score, sources[1:2], 4, D)
    assert torch.equal(entries[1], alone[0]) and alone.isfinite().all()
    assert compress(torch.empty(0, 2, D), kv, score, sources[:0], 4, D).shape == (0, D)


def test_large_scores_do_not_overflow() -> None:
    kv = torch.tensor([[1.0], [2.0], [3.0]])
    score = torch.tensor([[500.0], [-500.0], [499.0]])
    entry = compress(torch.empty(0, 2, 1), kv, score, torch.tensor([[0, 1, 2]]), 3, 1)
    assert entry.item() == pytest.approx((1 + 3 * math.exp(-1)) / (1 + math.exp(-1)), rel=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: compress(torch.zeros(4, 2, 8), torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(1, 12), 4, 8),
            r"expected \[M, 4\] or \[M, 8\]",
        ),
        (
            lambda: compress(torch.zeros(4, 2, 8), torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(1, 8), 4, 8),
            r"state \[S, 2, 16\]",
        ),
        (
            lambda: compress(
                *(torch.zeros(4, 2, 8), torch.zeros(2, 8).bfloat16(), torch.zeros(2, 8), torch.zeros(1, 4)), 4, 8
            ),
            "expected fp32",
        ),
    ],
    ids=["sources", "width", "dtype"],
)
def test_errors_say_what_is_expected(call, message: str) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match=message):
        call()
