"""compress_store on a GPU: against the bounds and the stored bytes that the emulated kernels have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ops.compressor_cases import (
    NAN,
    RATIOS,
    SLOTS,
    Forward,
    Setting,
    forward,
)
from ops.compressor_store_cases import (
    BF16,
    CHUNKS,
    FAR,
    FORMS,
    FP4,
    FP8,
    PLAIN,
    SETTINGS,
    UNIFORM,
    assert_allowed,
    assert_state,
    moved,
    uniform_requests,
)
from ops.number_formats import same_bits

from dsv4_kernels.compressor import compress_store
from dsv4_kernels.kv_layout import KVRows
from dsv4_kernels.quant import fp4_qdq, fp8_qdq, hadamard


@pytest.fixture
def kernel_here(kernel_on_gpu: Callable[[str], str]) -> str:
    return kernel_on_gpu("compress_store")


def back(f: Forward) -> Forward:
    """Tables, states and tails, copied to the CPU."""
    made = [
        replace(
            c,
            state=c.state.cpu(),
            overlap=None if c.overlap is None else c.overlap.cpu(),
            table=replace(c.table, storage=c.table.storage.cpu()),
        )
        for c in f.compressions
    ]
    groups = {
        name: None if (x := getattr(f.groups, name)) is None else x.cpu()
        for name in ("positions", "state_rows", "overlap_rows")
    }
    return Forward(replace(f.groups, **groups), made, f.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RATIOS)
def test_the_gpu_makes_a_chunk(kernel_here: str, kind: str) -> None:
    """Plain rows within their bounds, and the stored forms of the same rows."""
    overlaps = {(3, 8): 5, (1, FAR + 4): 2} if kind == "csa" else None
    plain = None
    for form, changed in FORMS.items():
        setting = replace(SETTINGS[kind], **changed)
        untouched = forward(setting, CHUNKS[kind], overlaps=overlaps, open_groups=2)
        f = moved(untouched, "cuda")
        compress_store(f.groups, f.compressions, BF16, kernel_here)
        f = back(f)
        if form == "plain":
            plain = f
            assert_allowed(setting, f)
        expected = forward(setting, CHUNKS[kind], overlaps=overlaps)
        for which, (c, e) in enumerate(zip(f.compressions, expected.compressions, strict=True)):
            rows = torch.stack(list(plain.entries(which).values()))
            if c.hadamard:
                rows = hadamard(rows)
            if c.table.format is PLAIN and c.values_of is FP4:
                rows = fp4_qdq(rows, 32)
            elif c.table.format is PLAIN and c.values_of is FP8:
                rows = torch.cat((fp8_qdq(rows[:, :-64], 64), rows[:, -64:]), 1)
            e.table.scatter(torch.tensor(list(f.rows.values())), rows)
            assert same_bits(c.table.storage, e.table.storage), form
        assert_state(setting, f, untouched)


@pytest.mark.gpu
@pytest.mark.parametrize("name", UNIFORM)
def test_the_gpu_makes_a_uniform_batch(kernel_here: str, name: str) -> None:
    """Eagerly and from a CUDA graph; the entries are those of a chunk."""
    kind, k, ring = UNIFORM[name]
    setting = Setting(kind, ring)
    requests = uniform_requests(setting.ratio, k)
    chunk = moved(forward(setting, requests, seed=1), "cuda")
    compress_store(chunk.groups, chunk.compressions, BF16, kernel_here)
    chunk = back(chunk)
    untouched = forward(setting, requests, k)
    f = moved(untouched, "cuda")
    states = [c.state.clone() for c in f.compressions]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compress_store(f.groups, f.compressions, BF16, kernel_here)
    for runs in (
        graph.replay,
        lambda: compress_store(f.groups, f.compressions, BF16, kernel_here),
        graph.replay,
    ):
        for c, state in zip(f.compressions, states, strict=True):
            c.state.copy_(state)
            c.table.storage.fill_(NAN)
        runs()
        result = back(f)
        assert_state(setting, result, forward(setting, requests, k))
        for which in range(len(f.compressions)):
            expected = chunk.entries(which)
            assert all(same_bits(row, expected[entry]) for entry, row in result.entries(which).items())


@pytest.mark.gpu
def test_the_gpu_finds_rows_beyond_two_gigabytes(kernel_here: str) -> None:
    """Rows of the state, the table and the products beyond 2 GB: 12 GB together."""
    setting = replace(SETTINGS["hca"], formats=(FP8,))
    near = forward(setting, CHUNKS["hca"])
    f = moved(near, "cuda")
    (c,), g, width = f.compressions, f.groups, 512
    compress_store(g, [c], BF16, kernel_here)
    fresh = moved(forward(setting, CHUNKS["hca"]), "cuda").compressions[0]
    skipped, pages, tokens = 2**20, 2**16, len(g.positions)
    state = torch.zeros(skipped + SLOTS * 128, 2, width, device="cuda")
    state[skipped:] = fresh.state
    storage = torch.zeros(pages + 4, 37440, dtype=torch.uint8, device="cuda")
    storage[pages:] = 255
    stride = 2**32 // tokens // 4 // 4 * 4
    product = torch.zeros(tokens * stride, device="cuda").as_strided((tokens, 2 * width), (stride, 1))
    product.copy_(torch.cat([fresh.kv, fresh.score], 1))
    far = replace(
        fresh,
        state=state,
        kv=product[:, :width],
        score=product[:, width:],
        table=KVRows(storage, FP8, 64 * (pages + 4), 512, 64),
    )
    far_groups = replace(
        g,
        sources=torch.where(g.sources >= 0, g.sources + skipped, -1),
        state_rows=torch.where(g.state_rows >= 0, g.state_rows + skipped, -1),
        slots=g.slots + 64 * pages,
    )
    compress_store(far_groups, [far], BF16, kernel_here)
    assert same_bits(state[skipped:].cpu(), c.state.cpu()) and not state[:skipped].any()
    assert same_bits(storage[pages:].cpu(), c.table.storage.cpu()) and not storage[:pages].any()
