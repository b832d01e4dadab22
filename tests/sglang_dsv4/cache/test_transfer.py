"""Pages and rings that go from one pool to another, as a transfer engine copies them: by address and item."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from dsv4_kernels.kv_layout import RowFormat
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.kv_pool import DraftOf, Dsv4KVPool
from sglang_dsv4.cache.transfer import describe, differences

PAGES, SLOTS = 40, 4  # more pages than the 32 that share a block of 64 HCA rows
FP8 = PoolGeometry((0, 4, 128, 4, 128), row_format=RowFormat.FP8, index_format=RowFormat.INDEX_FP4, transfers=True)
PLAIN = PoolGeometry((0, 4, 128, 4, 128), row_dim=32, rope_dim=8, index_dim=32, dtype=torch.float32, transfers=True)
GEOMETRIES = pytest.mark.parametrize("geometry", [PLAIN, FP8], ids=["plain", "fp8"])


def pool_of(geometry: PoolGeometry, seed: int, draft_of: Dsv4KVPool | None = None) -> Dsv4KVPool:
    """Return a pool with random bytes in every tensor."""
    join = None if draft_of is None else DraftOf(draft_of, torch.nn.Identity(), injected=False)
    pool = Dsv4KVPool(
        geometry, full_tokens=256 * (PAGES - 1), request_slots=SLOTS, device="cpu", draft_of=join, layout="x"
    )
    generator = torch.Generator().manual_seed(seed)
    for _, _, tensor in pool.tensors():
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return pool


def send(buffers: Sequence[list[int]], to: Sequence[list[int]], items: Sequence[int], to_items: Sequence[int]) -> None:
    """Copy items as an engine does, which knows addresses and the bytes of an item, the sender's."""
    assert [lengths for lengths in buffers[2]] == [lengths for lengths in to[2]]
    for address, destination, length, its_bytes in zip(buffers[0], to[0], buffers[2], to[1], strict=True):
        for item, to_item in zip(items, to_items, strict=True):
            assert (to_item + 1) * length <= its_bytes
            ctypes.memmove(destination + to_item * length, address + item * length, length)


def records_of(pool: Dsv4KVPool, pages: Sequence[int]) -> torch.Tensor:
    records = pool.page_records()
    gathered = torch.zeros((len(pages), records.record_bytes), dtype=torch.uint8)
    records.gather(torch.tensor(pages), gathered)
    return gathered


def rings_of(pool: Dsv4KVPool, slot: int) -> list[torch.Tensor]:
    return [stack.view(torch.uint8).view(len(stack), SLOTS, -1)[:, slot].clone() for stack in pool.rings.values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@GEOMETRIES
def test_pages_arrive_and_others_stay(geometry: PoolGeometry) -> None:
    sender, receiver = pool_of(geometry, 1), pool_of(geometry, 2)
    pages, to_pages = [3, 39, 1, 32], [31, 2, 38, 33]
    others = [page for page in range(PAGES) if page not in to_pages]
    before = records_of(receiver, others)
    if sender.packed_pages is not None:
        sender.packed_pages.pack(torch.tensor(pages))
    send(sender.get_contiguous_buf_infos(), receiver.get_contiguous_buf_infos(), pages, to_pages)
    if receiver.packed_pages is not None:
        receiver.packed_pages.unpack(torch.tensor(to_pages))
    assert torch.equal(records_of(receiver, to_pages), records_of(sender, pages))
    assert torch.equal(records_of(receiver, others), before)


@GEOMETRIES
@pytest.mark.parametrize("draft_tokens", [0, 4], ids=["", "speculative"])
def test_rings_arrive_and_others_stay(geometry: PoolGeometry, draft_tokens: int) -> None:
    geometry = replace(geometry, draft_tokens=draft_tokens, draft_layers=1 if draft_tokens else 0)
    pools = [(pool_of(geometry, seed),) for seed in (1, 2)]
    if draft_tokens:
        alone = replace(geometry, ratios=(0,), draft_layers=0, transfers=False)
        pools = [(target, pool_of(alone, 5 + i, target)) for i, (target,) in enumerate(pools)]
    for sender, receiver in zip(*pools, strict=True):
        before = rings_of(receiver, 1)
        send(sender.ring_buf_infos(), receiver.ring_buf_infos(), [3], [2])
        assert same(rings_of(receiver, 2), rings_of(sender, 3))
        assert same(rings_of(receiver, 1), before)


def test_pages_that_come_from_the_host_are_packed_anew() -> None:
    """A page that a tier loads is sent without a forward having written it."""
    sender, receiver = pool_of(FP8, 1), pool_of(FP8, 2)
    record = records_of(pool_of(FP8, 3), [7])
    sender.page_records().scatter(torch.tensor([5]), record)
    send(sender.get_contiguous_buf_infos(), receiver.get_contiguous_buf_infos(), [5], [6])
    receiver.packed_pages.unpack(torch.tensor([6]))
    assert torch.equal(records_of(receiver, [6]), record)


@GEOMETRIES
def test_a_retracted_request_comes_back(geometry: PoolGeometry) -> None:
    """Pages and rings, a draft's too, return to other pages and another slot after others have overwritten them."""
    geometry = replace(geometry, draft_tokens=4, draft_layers=1)
    pool = pool_of(geometry, 1)
    draft = pool_of(replace(geometry, ratios=(0,), draft_layers=0, transfers=False), 2, pool)
    pages, slots = [9, 4, 35], torch.tensor([[page * 256 + i for i in range(256)] for page in (9, 4, 35)]).flatten()
    saved, rings, draft_rings = records_of(pool, pages), rings_of(pool, 1), rings_of(draft, 1)
    copy = pool.get_cpu_copy(slots[:600], req_pool_index=1)
    for tensor in (*pool.rings.values(), *pool.tables.values(), *draft.rings.values()):
        tensor.zero_()
    pool.load_cpu_copy(copy, torch.cat([slots[256:512], slots[:256], slots[512:600]]), req_pool_index=3)
    assert torch.equal(records_of(pool, [4, 9, 35]), saved)
    assert same(rings_of(pool, 3), rings) and same(rings_of(draft, 3), draft_rings)
    assert not any(ring.any() for ring in rings_of(pool, 1))


CHANGES = {
    "layers": {"ratios": (0, 4, 128, 4)},
    "rows": {"row_format": RowFormat.FP8, "row_dim": 512, "rope_dim": 64},
    "indexer-keys": {"index_dim": 64},
    "dtype": {"dtype": torch.bfloat16},
    "draft-layers": {"draft_layers": 3},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_is_named(name: str) -> None:
    ours, theirs = (describe(g, "1.0", "abc") for g in (PLAIN, replace(PLAIN, **CHANGES[name])))
    (difference,) = differences(theirs, ours)
    assert difference.startswith(f"{name}: ") and " there, " in difference and difference.endswith(" here")
    assert differences(ours, ours) == []


def test_speculation_version_and_model_are_named() -> None:
    ours = describe(PLAIN, "1.0", "abc")
    drafting = describe(replace(PLAIN, draft_tokens=4), "1.0", "abc")
    assert differences(drafting, ours) == [
        "window-ring: 256 there, 128 here",
        "compressor-rings: 4: 16, 128: 256 there, 4: 8, 128: 128 here",
        "draft-tokens: 4 there, 0 here",
    ]
    assert differences(describe(PLAIN, "1.1", "abd"), ours) == [
        "sglang-dsv4: 1.1 there, 1.0 here",
        "model: abd there, abc here",
    ]
    assert "dtype: nothing there, float32 here" in differences("a layout of SGLang's own pools", ours)
