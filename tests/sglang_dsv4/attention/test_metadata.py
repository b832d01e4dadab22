"""Rows that every token reads and writes, compared with a simulation that knows only requests and positions.

The grids cover: chunk edges inside and at the ends of CSA groups (4), windows and HCA groups (128) and pages (256);
prompts of 1-3 tokens after a long one in the same request slot; decode across all boundaries; verify with rejected
drafts; padding; idle.
"""

from __future__ import annotations

import random

import pytest
import torch
from cache.simulation import Simulation

from dsv4_kernels.kv_layout import RowFormat
from dsv4_radix_cache.moves import TailWrite
from sglang_dsv4.attention.metadata import extend_metadata, uniform_metadata
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.tail_memory import chunk_writes

EDGES = [*range(1, 10), *range(127, 131), *range(255, 258)]
FLASH = PoolGeometry(ratios=(0, 0, 4, 128, 4), row_format=RowFormat.FP8)
SPECULATIVE = PoolGeometry(ratios=(0, 4, 128), draft_tokens=4)
NARROW = PoolGeometry(ratios=(4, 128, 0), window_tokens=8)
GEOMETRIES = pytest.mark.parametrize("geometry", [FLASH, SPECULATIVE, NARROW], ids=["flash", "speculative", "window8"])


@GEOMETRIES
@pytest.mark.parametrize("chunk", [1, 3, 32, 64, 256, 600])
def test_prefill_in_chunks(geometry: PoolGeometry, chunk: int) -> None:
    total = 600 if chunk > 3 else 300
    sim = Simulation(geometry)
    while sim.length.get(0, 0) < total:
        sim.extend([(0, min(chunk, total - sim.length.get(0, 0)))])
    sim.uniform([0])


@pytest.mark.parametrize("prefix", EDGES)
def test_chunk_of_any_length_after_a_prefix(prefix: int) -> None:
    for length in EDGES:
        sim = Simulation(FLASH, seed=length)
        sim.extend([(0, prefix)])
        sim.extend([(0, length)])
        sim.uniform([0])


@GEOMETRIES
def test_decode_across_every_boundary(geometry: PoolGeometry) -> None:
    sim = Simulation(geometry)
    sim.extend([(0, 1), (1, 126), (2, 250)])
    for _ in range(270):
        sim.uniform([0, 1, 2])


@GEOMETRIES
@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompt_after_a_long_one_in_the_same_slot(geometry: PoolGeometry, length: int) -> None:
    sim = Simulation(geometry, slots=2)
    sim.extend([(0, 601)])
    sim.release(0)
    sim.extend([(1, length)])
    for _ in range(10):
        sim.uniform([1])


@GEOMETRIES
def test_mixed_batches_that_start_and_stop(geometry: PoolGeometry) -> None:
    """Random batches: prefill chunks with decoding requests, ends, reuse of request slots and pages, padding."""
    rng = random.Random(7)
    sim, fresh, todo = Simulation(geometry, slots=8, pages=40, seed=3), 0, {}
    for _ in range(120):
        while len(sim.free_slots) > 1 and len(sim.free_pages) > 8 and rng.random() < 0.4:
            todo[fresh] = rng.choice([*EDGES, 300, 500])
            sim.reserve(fresh, 1)
            fresh += 1
        batch = []
        for request in list(sim.slot):
            if todo[request] > 0:
                n = min(todo[request], rng.choice([1, 3, 32, 64, 256]))
                todo[request] -= n
                batch.append((request, n))
            elif rng.random() < 0.8:
                batch.append((request, 1))
        rng.shuffle(batch)
        if batch and all(n == 1 and sim.length[r] for r, n in batch) and rng.random() < 0.9:
            sim.uniform([r for r, _ in batch], padding=rng.choice([0, 0, 3]))
        else:
            sim.extend(batch, padding=rng.choice([0, 0, 5]))
        for request in list(sim.slot):
            if todo[request] <= 0 and rng.random() < 0.1:
                sim.release(request)
    assert fresh > 20, "the seed should lead to many requests"


@pytest.mark.parametrize("k", [1, 2, 3, 4, 9, 10])
def test_verify_with_rejected_drafts(k: int) -> None:
    """A rollback over a closed group must find the group's raw rows again, and close it again."""
    rng = random.Random(k)
    sim = Simulation(PoolGeometry(ratios=(0, 4, 128), draft_tokens=k))
    sim.extend([(0, 3), (1, 120), (2, 253)])
    for _ in range(100):
        sim.uniform([0, 1, 2], tokens=k, accept=[rng.randint(1, k) for _ in range(3)], padding=rng.choice([0, 2]))
        if rng.random() < 0.2:
            sim.uniform([2, 0])
    sim.extend([(0, 5), (1, 1)])


def test_ring_sizes() -> None:
    """Two tokens a step still fit the rows that CSA and HCA need for one token; ten fit 16 rows."""
    sizes = {k: PoolGeometry(ratios=(0, 4, 128), draft_tokens=k) for k in (0, 1, 2, 3, 10, 11)}
    assert {k: g.ring_rows for k, g in sizes.items()} == {0: 128, 1: 128, 2: 256, 3: 256, 10: 256, 11: 256}
    assert {k: g.state_rows(4) for k, g in sizes.items()} == {0: 8, 1: 8, 2: 8, 3: 16, 10: 16, 11: 32}
    assert {k: g.state_rows(128) for k, g in sizes.items()} == {0: 128, 1: 128, 2: 128, 3: 256, 10: 256, 11: 256}
    with pytest.raises(ValueError, match="use at most 129 draft tokens"):
        PoolGeometry(ratios=(0,), draft_tokens=130)


@GEOMETRIES
def test_idle_and_padding_only(geometry: PoolGeometry) -> None:
    sim = Simulation(geometry)
    none = torch.zeros(0, dtype=torch.int64)
    for padding in (0, 3):
        meta = extend_metadata([], [], none, sim.req_to_token, geometry, sim.slots, num_tokens=padding)
        assert meta.num_tokens == padding
        assert meta.ring_rows.tolist() == [-1] * padding
        assert all(plan.slots.numel() == 0 for plan in meta.compress.values())
        assert meta.token_to_request.tolist() == [0] * padding
        assert meta.page_table.shape[0] == (1 if padding else 0)
        # A padding token reads its own workspace row only.
        assert meta.window_rows[:, :-1].eq(-1).all()
        assert meta.window_rows[:, -1].tolist() == list(range(padding))


def test_too_few_rows_for_the_batch_is_refused() -> None:
    sim = Simulation(FLASH)
    slots = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="4 tokens, but its requests extend by 5"):
        extend_metadata([0], [5], slots, sim.req_to_token, FLASH, sim.slots, num_tokens=4)


def test_more_tokens_than_the_rings_hold_are_refused() -> None:
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="2 tokens a request, but the rings are laid out for at most 1"):
        uniform_metadata(one, one, 2, torch.ones((1, 512), dtype=torch.int32), 2, FLASH, 4)


@pytest.mark.parametrize("k", [1, 4])
def test_uniform_shapes_depend_on_the_batch_size_alone(k: int) -> None:
    """test_attention_backend.py tests that a graph's half reads no values."""
    table = torch.arange(8 * 4096, dtype=torch.int32).view(8, 4096)
    for first in (torch.ones(5, dtype=torch.int64), torch.tensor([0, 3, 127, 255, 3000])):
        meta = uniform_metadata(first, torch.arange(5), k, table, 16, SPECULATIVE, 8)
        assert meta.window_rows.shape == (5 * k, 128) and meta.page_table.shape == (5, 16)
        assert {r: tuple(p.sources.shape) for r, p in meta.compress.items()} == {4: (5, 8), 128: (5, 128)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_preparing_a_prefill_does_not_wait_for_the_gpu() -> None:
    """PyTorch raises at a synchronisation: the scheduler prepares a chunk while the chunk before it runs."""
    geometry = PoolGeometry(ratios=(0, 4, 128), row_dim=512, row_format=RowFormat.FP8, dtype=torch.bfloat16)
    slots = torch.tensor([1, 2], device="cuda")
    table = torch.arange(3 * 4096, dtype=torch.int32, device="cuda").view(3, 4096)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        meta = extend_metadata([0, 512], [700, 300], slots, table, geometry, 3, num_tokens=1024, host_slots=[1, 2])
        writes = chunk_writes([(0, 0, 700, TailWrite(512, 1))], "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meta.positions[[0, 699, 700, 999]].tolist() == [0, 699, 512, 811]
    assert writes is not None and writes.window_tokens.tolist() == list(range(384, 512))
