"""Unpacking FP8 rows: the reference against values computed from the bits, and the emulated kernel against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from ops.attention_launch import unpack_emulated
from ops.early_launches import launched_early
from ops.memory_layout import BEYOND_BYTES, far_apart, sparse, strided
from ops.number_formats import E4M3, same_bits
from torch import Tensor

from dsv4_kernels.kv_layout import PAGE_BYTES, PAGE_ROWS, KVRows, RowFormat
from dsv4_kernels.sparse_attention import unpacking
from dsv4_kernels.sparse_attention.problem import FEW_HEADS
from dsv4_kernels.unpack import Pages, unpack_pages

NAN = float("nan")


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16 of a float64, ties to even, with subnormals and infinity; from the format's spacing."""
    magnitude = np.abs(x)
    exponent = np.maximum(np.frexp(np.where(magnitude, magnitude, 2.0**-126))[1] - 1, -126)
    steps = np.round(magnitude / np.exp2(exponent - 7.0)).astype(np.int64)  # 128 to 256 for a normal number
    bits = np.minimum(steps + (exponent + 126) * 128, 0x7F80)
    return np.where(np.signbit(x), bits | 0x8000, bits).astype(np.uint16)


def every_code_and_scale() -> tuple[KVRows, np.ndarray]:
    """(table of 255 rows, bits of its channels that are not rotated).

    All codes but NaN occur, and each scale byte but NaN in each of the seven scale groups, in no row twice.
    """
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    rows = KVRows.allocate(255, RowFormat.FP8, 512, 64, torch.bfloat16, "cpu", NAN)
    data, scales = rows._split_pages()
    chosen = np.resize(codes, (255, 448))
    page, place = np.arange(255) // 64, np.arange(255) % 64
    data[page, place, :448] = torch.from_numpy(chosen)
    data[page, place, 448:] = torch.arange(255 * 128).remainder(251).to(torch.uint8).view(255, 128)
    scale_bytes = (np.arange(255)[:, None] + np.arange(7) * 37) % 255
    scales[page, place, :7] = torch.from_numpy(scale_bytes.astype(np.uint8))
    values = E4M3[chosen & 0x7F] * np.where(chosen & 0x80, -1.0, 1.0)
    return rows, bf16_bits(values * np.exp2(np.repeat(scale_bytes, 64, axis=1) - 127.0))


def as_bits(rows: Tensor) -> np.ndarray:
    return rows.contiguous().view(torch.int16).numpy().view(np.uint16)


def filled(num_rows: int, named: Tensor, seed: int = 0) -> KVRows:
    """A table with noise in the named rows and NaN in the others; gaps between its pages depend on the seed."""
    rows = KVRows.allocate(num_rows, RowFormat.FP8, 512, 64, torch.bfloat16, "cpu", NAN)
    rows.scatter(named, torch.randn(len(named), 512, generator=torch.Generator().manual_seed(seed)).bfloat16())
    return replace(rows, storage=strided(rows.storage, 0, page_gap(seed)))


def page_gap(seed: int) -> int:
    return 48 + 128 * seed


PAGES = {
    "pages_of_64": (64, [3, 0, 2]),
    "pages_of_2": (2, [40, 7, 8, 100, 3]),
    "rows": (1, [70, 5, 64, 63, 0, 191, 128]),
    "repeated": (3, [9, 9, 1]),
    "holes": (4, [-1, 20, -1, 3, -1]),
    "only_holes": (64, [-1]),
    "one_row": (1, [130]),
}
"""(rows of a page, page numbers): counts that are not multiples of a CTA's rows, pages in no order."""


def named_rows(pages: list[int], rows_per_page: int) -> list[int]:
    return [page * rows_per_page + i if page >= 0 else -1 for page in pages for i in range(rows_per_page)]


def sentinels(num_rows: int) -> Tensor:
    return torch.full((num_rows, 512), -7.0, dtype=torch.bfloat16)


# ---- the definition


def test_every_code_with_every_scale() -> None:
    rows, expected = every_code_and_scale()
    (out,) = unpack_pages([Pages(rows, torch.arange(255), 1)], sentinels(255))
    assert (out.format, out.num_rows, out.row_dim, out.rope_dim) == (RowFormat.PLAIN, 255, 512, 64)
    assert np.array_equal(as_bits(out.storage[:, :448]), expected)
    rotated = torch.arange(255 * 128).remainder(251).to(torch.uint8).view(255, 128)
    assert torch.equal(out.storage[:, 448:].contiguous().view(torch.uint8), rotated)


@pytest.mark.parametrize("name", PAGES)
def test_pages_lie_side_by_side(name: str) -> None:
    """Rows that no page names are NaN; the rows of negative pages and the rows after the last do not change."""
    rows_per_page, pages = PAGES[name]
    named = torch.tensor(named_rows(pages, rows_per_page))
    rows = filled(300, named[named >= 0].unique())
    storage = sentinels(len(named) + 3)
    (out,) = unpack_pages([Pages(rows, torch.tensor(pages), rows_per_page)], storage)
    assert out.num_rows == len(named) and out.storage.data_ptr() == storage.data_ptr()
    for i, number in enumerate(named.tolist()):
        expected = torch.full((512,), -7.0) if number < 0 else rows.gather(torch.tensor(number))
        assert torch.equal(out.storage[i].float(), expected), f"row {i}, of {number}"
    assert (storage[len(named) :] == -7.0).all()


def test_no_pages_are_no_rows() -> None:
    storage = sentinels(2)
    nothing = Pages(filled(64, torch.tensor([3])), torch.zeros(0, dtype=torch.int32), 64)
    (out,) = unpack_pages([nothing], storage)
    assert out.num_rows == 0 and (storage == -7.0).all()
    with_nothing = unpack_pages([nothing, nothing], storage)
    assert [rows.num_rows for rows in with_nothing] == [0, 0] and (storage == -7.0).all()


def two_parts(names: tuple[str, str] = ("rows", "holes")) -> list[Pages]:
    """Two tables with pages of two sizes; NaN in the rows that are not named."""
    parts = []
    for seed, name in enumerate(names):
        rows_per_page, pages = PAGES[name]
        named = torch.tensor(named_rows(pages, rows_per_page))
        parts.append(Pages(filled(300, named[named >= 0].unique(), seed), torch.tensor(pages), rows_per_page))
    return parts


def test_a_second_part_lies_behind_the_first() -> None:
    first, second = parts = two_parts()
    storage = sentinels(first.num_rows + second.num_rows + 2)
    both = unpack_pages(parts, storage)
    assert [rows.num_rows for rows in both] == [first.num_rows, second.num_rows]
    for part, rows in zip(parts, both, strict=True):
        alone = sentinels(part.num_rows)
        unpack_pages([part], alone)
        assert torch.equal(rows.storage, alone)
    assert both[1].storage.data_ptr() == storage[first.num_rows].data_ptr()
    assert (storage[-2:] == -7.0).all()


def test_what_is_refused() -> None:
    rows, page, out = filled(64, torch.tensor([0])), torch.tensor([0]), sentinels(64)
    plain = KVRows.allocate(64, RowFormat.PLAIN, 512, 64, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match="takes FP8 rows; got plain"):
        unpack_pages([Pages(plain, page, 64)], out)
    for pages, per_page in ((page[None], 64), (page.float(), 64), (page, 0)):
        with pytest.raises(ValueError, match=r"needs pages \[n\] of an integer dtype and rows_per_page >= 1"):
            unpack_pages([Pages(rows, pages, per_page)], out)
    wide = torch.empty(64, 520, dtype=torch.bfloat16)
    for wrong in (out[:63], out.float(), out.T, out[:, :256], wide[:, 1:513], wide[:, ::1][:, 4:516], out.view(-1)):
        with pytest.raises(ValueError, match=r"needs out \[at least 64, 512\] torch.bfloat16"):
            unpack_pages([Pages(rows, page, 64)], wrong)
    with pytest.raises(ValueError, match=r"needs out \[at least 128, 512\]"):
        unpack_pages([Pages(rows, page, 64)] * 2, out)
    with pytest.raises(ValueError, match="move them to one device"):
        unpack_pages([Pages(rows, page.to("meta"), 64)], out)
    for parts in ([], [Pages(rows, page, 1)] * 3):
        with pytest.raises(ValueError, match=f"takes 1 to 2 parts; got {len(parts)}"):
            unpack_pages(parts, out)


# ---- the kernel


@pytest.fixture(params=["sm90", "sm100"])
def kernel(request: pytest.FixtureRequest, compiled_here: None) -> str:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    return request.param


def test_the_kernel_makes_the_same_bits(kernel: str) -> None:
    rows, expected = every_code_and_scale()
    out = sentinels(255)
    unpack_emulated(kernel, [Pages(rows, torch.arange(255, dtype=torch.int32), 1)], out)
    assert np.array_equal(as_bits(out[:, :448]), expected)
    assert same_bits(out, unpack_pages([Pages(rows, torch.arange(255), 1)], sentinels(255))[0].storage)


@pytest.mark.parametrize("name", PAGES)
def test_the_kernel_finds_the_pages(kernel: str, name: str) -> None:
    """Output rows with gaps: the gaps and the rows after the last do not change. Page numbers in two integer dtypes."""
    rows_per_page, pages = PAGES[name]
    named = torch.tensor(named_rows(pages, rows_per_page))
    rows = filled(300, named[named >= 0].unique(), seed=1)
    for dtype in (torch.int32, torch.int64):
        around = torch.full((len(named) + 3, 528), -7.0, dtype=torch.bfloat16)
        expected = around.clone()
        unpack_pages([Pages(rows, torch.tensor(pages), rows_per_page)], expected[1:, 8:520])
        out = around[1 : len(named) + 1, 8:520]
        unpack_emulated(kernel, [Pages(rows, torch.tensor(pages, dtype=dtype), rows_per_page)], out)
        assert same_bits(around, expected)


@pytest.mark.parametrize("empty", [None, 0, 1])
def test_the_kernel_makes_both_parts(kernel: str, empty: int | None) -> None:
    """Two parts, of which one may have no pages."""
    parts = two_parts()
    if empty is not None:
        parts[empty] = parts[empty]._replace(numbers=parts[empty].numbers[:0])
    expected, out = sentinels(60), sentinels(60)
    unpack_pages(parts, expected)
    unpack_emulated(kernel, parts, out[: sum(part.num_rows for part in parts)])
    assert same_bits(out, expected)


def test_it_may_begin_early(kernel: str) -> None:
    with launched_early():
        test_the_kernel_makes_both_parts(kernel, None)


@pytest.mark.parametrize("names", [("pages_of_64", "holes"), ("rows", "pages_of_2")], ids="-".join)
def test_the_kernel_finds_rows_beyond_32_bits(kernel: str, names: tuple[str, str]) -> None:
    """Offsets beyond 32 bits in the tables and in the output: before the second part, between CTAs of the first part,
    or between the rows of a thread."""
    first, second = (spread(part) for part in two_parts(names))
    expected = sentinels(first.num_rows + second.num_rows)
    unpack_pages([first, second], expected)
    out = far_apart(sentinels(len(expected)))
    unpack_emulated(kernel, [first, second], out)
    assert same_bits(out, expected)


def spread(part: Pages) -> Pages:
    """Pages of which one is page 0 and the others need 64-bit offsets."""
    table, last = part.table, len(part.table.storage) - 1
    step = -(-BEYOND_BYTES // (last * table.storage.stride(0)))
    large = sparse((last * step + 1, PAGE_BYTES), table.storage.stride(), torch.uint8)
    large[::step] = table.storage
    numbers = PAGE_ROWS // part.rows_per_page  # rows_per_page divides it here
    moved = part.numbers // numbers * step * numbers + part.numbers % numbers
    where = torch.where(part.numbers < 0, part.numbers, moved)
    return part._replace(table=replace(table, storage=large, num_rows=PAGE_ROWS * len(large)), numbers=where)


# ---- the kernel on a GPU


@pytest.fixture
def kernel_here(kernel_on_gpu: Callable[[str], str]) -> str:
    return kernel_on_gpu("unpack_pages")


def on_gpu(rows: KVRows) -> KVRows:
    """The same rows on the GPU, with the same strides."""
    gap = rows.storage.stride(0) - PAGE_BYTES
    return replace(rows, storage=strided(rows.storage, 0, gap, device="cuda"))


@pytest.mark.gpu
def test_the_gpu_makes_the_same_bits(kernel_here: str) -> None:
    rows, expected = every_code_and_scale()
    (out,) = unpack_pages([Pages(on_gpu(rows), torch.arange(255).cuda(), 1)], sentinels(255).cuda(), kernel_here)
    assert np.array_equal(as_bits(out.storage.cpu()[:, :448]), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAGES)
def test_the_gpu_finds_the_pages(kernel_here: str, name: str) -> None:
    """Eager calls, and a CUDA graph that is replayed with other pages."""
    rows_per_page, pages = PAGES[name]
    rows = filled(300, torch.arange(300))
    lists = [torch.tensor(pages), torch.tensor(pages).flip(0)]
    expected = [
        unpack_pages([Pages(rows, listed, rows_per_page)], sentinels(len(pages) * rows_per_page))[0] for listed in lists
    ]
    live, table = lists[0].int().cuda(), on_gpu(rows)
    out = sentinels(len(pages) * rows_per_page).cuda()
    unpack_pages([Pages(table, live, rows_per_page)], out, kernel_here)
    assert same_bits(out.cpu(), expected[0].storage)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        unpack_pages([Pages(table, live, rows_per_page)], out, kernel_here)
    for listed, wanted in zip(lists, expected, strict=True):
        live.copy_(listed)
        out.fill_(-7.0)
        graph.replay()
        assert same_bits(out.cpu(), wanted.storage)


@pytest.mark.gpu
def test_the_gpu_makes_both_parts(kernel_here: str) -> None:
    parts = two_parts()
    expected, out = sentinels(60), sentinels(60).cuda()
    unpack_pages(parts, expected)
    unpack_pages([Pages(on_gpu(p.table), p.numbers.cuda(), p.rows_per_page) for p in parts], out, kernel_here)
    assert same_bits(out.cpu(), expected)


@pytest.mark.gpu
def test_the_gpu_finds_rows_beyond_two_gigabytes(kernel_here: str) -> None:
    """Offsets beyond 32 bits in the table and in the output, 5 GB together."""
    num_pages = 2**31 // PAGE_BYTES + 2
    table = KVRows.allocate(64 * num_pages, RowFormat.FP8, 512, 64, torch.bfloat16, "cuda", 0.0)
    values = torch.randn(64, 512).bfloat16().cuda()
    table.scatter(torch.arange(64).cuda() + 64 * (num_pages - 1), values)
    out = torch.empty(2**21 + 64, 512, dtype=torch.bfloat16, device="cuda")
    pages = torch.full((2**15 + 1,), num_pages - 1, dtype=torch.int32, device="cuda")
    pages[:-1] = 0
    (unpacked,) = unpack_pages([Pages(table, pages, 64)], out, kernel_here)
    last = torch.arange(64).cuda()
    assert torch.equal(unpacked.gather(last + 2**21).float(), table.gather(last + 64 * (num_pages - 1)))
    assert not unpacked.storage[: 2**21].any()


# ---- when it pays


def test_what_pays() -> None:
    """Chunks of one request at 32K of context, as measured on an H200 (benchmarks/results)."""

    def of_chunk(tokens: int, entries: int, read: int, heads: int = 64) -> bool:
        return unpacking.pays(tokens + 127 + entries, tokens * (128 + read), heads)

    for heads in (FEW_HEADS + 1, 64, 128):
        assert all(of_chunk(t, 8192, 512, heads) for t in (512, 4096))  # CSA: saves 28 and 225 us with 64 heads
        assert all(of_chunk(t, 256, 256, heads) for t in (512, 4096))  # HCA: saves 17 and 109 us
        assert all(of_chunk(t, 0, 0, heads) for t in (512, 4096))  # windows: saves 2 and 53 us
    assert of_chunk(128, 8192, 512) and of_chunk(128, 256, 192)  # saves 7 and 5 us; unpacking takes 5 and 3
    # A row is converted once for every 64 heads, so 192 tokens over a window suffice with more heads.
    assert [of_chunk(192, 0, 0, heads) for heads in (40, 64, 65, 128)] == [False, False, True, True]
    # The kernel for few heads is not slower over FP8 rows.
    assert not any(of_chunk(4096, 8192, 512, heads) for heads in range(1, FEW_HEADS + 1))
    assert [unpacking.helps(kernel) for kernel in ("ref", "sm90", "sm100")] == [True, True, False]
    assert not of_chunk(1, 8192, 512) and not of_chunk(256, 2**17, 512)
    assert of_chunk(4096, 2**18 - 4096 - 127, 1024) and not of_chunk(4096, 2**18 - 4096 - 126, 1024)  # 256 MiB
