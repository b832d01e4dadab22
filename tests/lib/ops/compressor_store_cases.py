"""Requests, forms and checks for tests of compress_store."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from ops.compressor_cases import (
    RATIOS,
    Forward,
    Request,
    Setting,
    allowed_entry,
)
from ops.number_formats import same_bits

from dsv4_kernels.kv_layout import RowFormat

BF16 = torch.bfloat16
PLAIN, FP8, FP4 = RowFormat.PLAIN, RowFormat.FP8, RowFormat.INDEX_FP4
RING = {"csa": 8, "hca": 128}


FAR = 2**20 - 128


CHUNKS = {
    "csa": (
        Request(3, 0, 9),  # a first group; one token remains
        Request(1, FAR - 6, 11),  # its first group lies in the state, the batch and, before it, the state
        Request(4, 8, 2),  # closes none
        Request(2, 5, 3),  # closes [4, 8)
        Request(7, 1027, 1),
    ),
    "hca": (Request(3, 0, 130), Request(1, FAR - 2, 5), Request(4, 5, 2), Request(2, 255, 1)),
}


SETTINGS = {kind: Setting(kind, RING[kind]) for kind in RATIOS}


FORMS = {
    "plain": {},
    "rounded": {"rounded": True, "hadamard": True},
    "bytes": {"formats": (FP8, FP4), "hadamard": True},
    "bytes_without_hadamard": {"formats": (FP8, FP4)},
    "only_hadamard": {"hadamard": True},
}


def moved(f: Forward, device: torch.device | str) -> Forward:
    """Return a copy of the inputs on a device; kv and score remain halves of one product."""
    tensors = ("ape", "state", "norm_weight", "frequencies", "overlap")
    made = []
    for c in f.compressions:
        there = {name: getattr(c, name).to(device) for name in tensors if getattr(c, name) is not None}
        product, width = torch.cat([c.kv, c.score], 1).to(device), c.kv.shape[1]
        table = replace(c.table, storage=c.table.storage.to(device))
        made.append(replace(c, **there, kv=product[:, :width], score=product[:, width:], table=table))
    lists = ("positions", "sources", "entry_positions", "slots", "state_rows", "overlap_rows")
    there = {name: getattr(f.groups, name).to(device) for name in lists if getattr(f.groups, name) is not None}
    return Forward(replace(f.groups, **there), made, f.rows)


def assert_state(setting: Setting, f: Forward, untouched: Forward) -> None:
    """The state has the kept rows, bit for bit, and is otherwise unchanged; so have the tails."""
    for c, was in zip(f.compressions, untouched.compressions, strict=True):
        score = was.score + was.ape[f.groups.positions % f.groups.ratio]
        for rows, kept, table in (
            (f.groups.state_rows, was.state, c.state),
            (f.groups.overlap_rows, was.overlap, c.overlap),
        ):
            if rows is not None:
                tokens, width = rows >= 0, kept.shape[-1]
                kept[rows[tokens]] = torch.stack([was.kv, score], 1)[tokens][:, :, :width]
                assert same_bits(table, kept)


def assert_allowed(setting: Setting, f: Forward) -> None:
    """Check that entries are in their allowed intervals, most of which are one number, and no other row is written."""
    for which, dim in enumerate(setting.all_dims):
        entries, certain = f.entries(which), []
        for (slot, number), row in entries.items():
            low, high = allowed_entry(setting, dim, slot, number)
            got = row.double().numpy()
            assert ((low <= got) & (got <= high)).all(), (dim, slot, number, np.abs(got - low).max())
            certain.append((low == high).mean())
        assert len(entries) and np.mean(certain) > 0.8, certain
        table = f.compressions[which].table
        others = [row for row in range(table.num_rows) if row not in f.rows.values()]
        assert table.gather(torch.tensor(others)).isnan().all()


UNIFORM = {
    # k, ring: the smallest that the pools have, so that the last token overwrites a row that is read
    "csa_1": ("csa", 1, 8),
    "csa_2": ("csa", 2, 8),
    "csa_3": ("csa", 3, 16),
    "csa_10": ("csa", 10, 16),
    "hca_1": ("hca", 1, 128),
    "hca_2": ("hca", 2, 128),
    "hca_3": ("hca", 3, 256),
    "hca_17": ("hca", 17, 256),
}


def uniform_requests(ratio: int, k: int) -> list[Request]:
    """Return requests whose group ends at various of the k tokens, two that close none if k allows it, and padding."""
    ends = [ratio * (5 + i) - 1 - i for i in range(0, min(k, ratio), 1 + min(k, ratio) // 8)]
    others = [ratio * 3, FAR] if k <= ratio - 2 else []
    begins = [0, *ends, *others]
    return [Request(0, 0, k), *(Request(i + 1, begin, k) for i, begin in enumerate(begins)), Request(0, 0, k)]
