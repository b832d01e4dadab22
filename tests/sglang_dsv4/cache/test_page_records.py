"""A page's record holds every byte of the page, and no byte of another page."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from dsv4_kernels.kv_layout import KVRows, RowFormat
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.host_records import HostRecords, runs
from sglang_dsv4.cache.kv_pool import Dsv4KVPool
from sglang_dsv4.cache.page_copies import PageCopies
from sglang_dsv4.cache.page_records import pages_of
from sglang_dsv4.prefix.host_tier import HostTier

FORMATS = {
    "plain": {"row_dim": 64, "rope_dim": 16, "index_dim": 32, "dtype": torch.float32},
    "fp8": {"row_format": RowFormat.FP8},
    "fp8-fp4": {"row_format": RowFormat.FP8, "index_format": RowFormat.INDEX_FP4},
}
PAGES = 9


def pool_of(name: str, ratios: tuple[int, ...] = (0, 4, 128, 4)) -> Dsv4KVPool:
    """Eight pages and the null page: HCA pages of two rows share a block of 64."""
    geometry = PoolGeometry(ratios, **FORMATS[name])
    return Dsv4KVPool(geometry, full_tokens=(PAGES - 1) * 256, request_slots=2, device="cpu")


def tables(pool: Dsv4KVPool) -> list[torch.Tensor]:
    """The bytes of all tables that follow FULL pages."""
    names = ("CSA entries", "HCA entries", "indexer keys")
    return [storage.view(torch.uint8) for name, _, storage in pool.tensors() if name in names]


def fill(pool: Dsv4KVPool, seed: int) -> None:
    """Random bytes, padding included."""
    generator = torch.Generator().manual_seed(seed)
    for storage in tables(pool):
        storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8, generator=generator))


def rows_of_page(pool: Dsv4KVPool, page: int) -> list[torch.Tensor]:
    """Every row of a page, byte for byte, found by the pools' own row numbers."""
    found = []
    for layer in pool.geometry.layers():
        ratio = pool.geometry.layer_ratio(layer)
        held = [pool.entries] * bool(ratio) + [pool.index_keys] * (ratio == 4)
        for table in (rows_of(layer) for rows_of in held):
            rows = torch.arange(page * 256 // ratio, (page + 1) * 256 // ratio)
            copy = KVRows.allocate(64, table.format, table.row_dim, table.rope_dim, table.storage.dtype, "cpu", 0.0)
            copy.copy_rows(torch.arange(len(rows)), table, rows)
            found.append(copy.storage.view(torch.uint8))
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip(name: str) -> None:
    """Three pages are copied to another pool: their rows are equal there, and all other rows are unchanged."""
    source, target = pool_of(name), pool_of(name)
    fill(source, 1)
    fill(target, 2)
    before = [rows_of_page(target, page) for page in range(PAGES)]
    records = source.page_records()
    pages, places = torch.tensor([7, 2, 5]), torch.tensor([1, 8, 4])
    copied = torch.zeros(3, records.record_bytes, dtype=torch.uint8)
    records.gather(pages, copied)
    target.page_records().scatter(places, copied)
    moved = dict(zip(places.tolist(), pages.tolist(), strict=True))
    for page in range(PAGES):
        expected = rows_of_page(source, moved[page]) if page in moved else before[page]
        for row, wanted in zip(rows_of_page(target, page), expected, strict=True):
            assert torch.equal(row, wanted), f"page {page}"


@pytest.mark.parametrize("name", FORMATS)
def test_host_memory_round_trip(name: str) -> None:
    """Records are copied in batches of two, to slots in any order."""
    pool = pool_of(name)
    fill(pool, 3)
    host = HostRecords(pool.page_records(), 12)
    host.batch = 2
    expected = [rows_of_page(pool, page) for page in (3, 1, 8, 6, 2)]
    host.save(torch.tensor([3, 1, 8, 6, 2]), [4, 5, 0, 11, 7])
    fill(pool, 4)
    host.load([11, 4, 7, 0, 5], torch.tensor([2, 4, 5, 6, 7]))
    for page, original in zip((2, 4, 5, 6, 7), (3, 0, 4, 2, 1), strict=True):
        for row, wanted in zip(rows_of_page(pool, page), expected[original], strict=True):
            assert torch.equal(row, wanted)
    assert (host.saved.pages, host.loaded.pages) == (5, 5)
    assert host.saved.bytes == 5 * host.records.record_bytes and host.mark()()


def test_sizes_of_the_release() -> None:
    """V4-Flash with FP8 rows: 37,440 B per CSA layer, 4,352 B for its FP4 keys, 1,168 B per HCA layer."""
    geometry = PoolGeometry((4, 128), row_format=RowFormat.FP8, index_format=RowFormat.INDEX_FP4)
    pool = Dsv4KVPool(geometry, full_tokens=768, request_slots=2, device="cpu")
    assert pool.page_records().record_bytes == 37_440 + 4_352 + 1_168


def test_the_layout_tells_formats_apart() -> None:
    prints = [pool_of(name).page_records().fingerprint for name in FORMATS]
    prints.append(pool_of("fp8", (0, 128, 4, 4)).page_records().fingerprint)
    assert len(set(prints)) == 4
    assert pool_of("fp8").page_records().fingerprint == prints[1]


def test_a_page_of_other_rows_is_refused() -> None:
    rows = KVRows.allocate(130, RowFormat.PLAIN, 8, 0, torch.float32, "cpu")
    with pytest.raises(ValueError, match="130 rows in blocks of 64 are not pages of 64 rows"):
        rows.page_views(64)


def test_neighbouring_slots_travel_together() -> None:
    assert list(runs([4, 5, 6, 2, 9, 10])) == [(0, 3, 4), (3, 4, 2), (4, 6, 9)]
    assert list(runs([])) == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8-fp4", "plain"])
def test_a_gpus_copies_are_ordered_by_the_stream_of_the_forwards(name: str) -> None:
    """In each round a forward writes a page, which is saved, and overwritten at once; then all are loaded into pages
    that a forward reads at once. Batches of two records, so that staging buffers are reused many times."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: on a CPU nothing is asynchronous")
    geometry = PoolGeometry((0, 4, 128, 4), **FORMATS[name])
    pool = Dsv4KVPool(geometry, full_tokens=(PAGES - 1) * 256, request_slots=2, device="cuda")
    records = pool.page_records()
    host = HostRecords(records, 64)
    host.batch = 2
    stream = torch.cuda.Stream()
    whole = torch.ones((8, records.record_bytes), dtype=torch.uint8, device="cuda")
    padding = torch.zeros_like(whole[:1])
    records.scatter(torch.arange(1, 9, device="cuda"), whole)
    records.gather(torch.tensor([1], device="cuda"), padding)
    content = padding.bool()[0]  # bytes of a record that are not padding
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        device_pages = torch.arange(1, 9, device="cuda")
        for turn in range(8):
            values = torch.arange(8, device="cuda", dtype=torch.uint8)[:, None] + 8 * turn + 1
            records.scatter(device_pages, values.expand_as(whole).contiguous())
            host.save(device_pages, [8 * turn + i for i in range(8)])
            records.scatter(device_pages, torch.full_like(whole, 255))  # the next request's forward
        for turn in range(8):
            host.load([8 * turn + i for i in range(8)], device_pages)
            found = torch.zeros_like(whole)
            records.gather(device_pages, found)
            expected = torch.arange(8, device="cuda", dtype=torch.uint8)[:, None] + 8 * turn + 1
            assert bool((found[:, content] == expected).all()), f"round {turn}"
        done = host.mark()
    torch.cuda.synchronize()
    host.collect_times()
    assert done() and host.saved.seconds > 0 and host.loaded.seconds > 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_pages_way_through_the_tiers(device: str) -> None:
    """Saved, evicted, overwritten by the next owner of the pool's pages, and loaded into other pages, in two streams as
    in SGLang. On a GPU none of it may wait; CUDA's debug mode checks that."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU: on a CPU nothing waits")
    geometry = PoolGeometry((0, 4, 128, 4), **FORMATS["fp8-fp4"])
    pool = Dsv4KVPool(geometry, full_tokens=(PAGES - 1) * 256, request_slots=2, device=device)
    host = HostRecords(pool.page_records(), 16)
    host.batch = 2
    tiers = HostTier(PageCopies(host, pool.tail_memory, on_gpu=device == "cuda"))
    for storage in tables(pool):
        storage.random_(0, 256)
    slots = torch.arange(256, PAGES * 256, device=device)
    empty = torch.zeros((8, host.records.record_bytes), dtype=torch.uint8, device=device)
    first, back = (torch.tensor(pages, device=device) for pages in ([1, 2, 3, 4], [8, 6, 5, 7]))
    wanted = empty[:4].clone()
    host.records.gather(first, wanted)
    digests = [bytes([i]) * 16 for i in range(4)]
    forward = torch.cuda.Stream() if device == "cuda" else None
    before = torch.cuda.get_sync_debug_mode() if forward else None

    def issue() -> None:
        if forward is None:
            tiers.copies.issue()
            return
        forward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(forward):
            tiers.copies.issue()

    try:
        if forward:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        tiers.inserted(digests, pages_of(slots[: 4 * 256]))
        issue()
        tiers.leaving_tree(tiers.last_pages(digests[-1], 4))
        with torch.cuda.stream(forward) if forward else nullcontext():
            host.records.scatter(pages_of(slots), empty)  # the next requests' forwards
        with tiers.pinned(digests):
            new = tiers.inserted(digests, back)
            tiers.load(digests, [digests[i] for i in new])
        issue()
    finally:
        if forward:
            torch.cuda.set_sync_debug_mode(before)
            torch.cuda.synchronize()
    found = torch.zeros_like(wanted)
    host.records.gather(back, found)
    assert torch.equal(found, wanted) and host.loaded.pages == 4 and tiers.copies.idle
    host.records.gather(first, found)
    assert not found.any()
