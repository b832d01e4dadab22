"""Row bytes by hand, page layout by hand, and tables of rows of every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ops.number_formats import quantise_e2m1, quantise_e4m3, same_bits

from dsv4_kernels import kv_layout
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.quant import fp4_qdq, fp8_qdq

FORMATS = {
    "plain_bf16": (RowFormat.PLAIN, 512, 64, torch.bfloat16),
    "plain_fp32_tiny": (RowFormat.PLAIN, 24, 8, torch.float32),
    "fp8": (RowFormat.FP8, 512, 64, torch.bfloat16),
    "index_fp4": (RowFormat.INDEX_FP4, 128, 64, torch.bfloat16),
    "index_fp4_small": (RowFormat.INDEX_FP4, 32, 8, torch.float32),
}


def table(name: str, num_rows: int, fill: float | None = 0.0) -> KVRows:
    format, row_dim, rope_dim, dtype = FORMATS[name]
    return KVRows.allocate(num_rows, format, row_dim, rope_dim, dtype, "cpu", fill)


def values_for(rows: KVRows, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, rows.row_dim, generator=torch.Generator().manual_seed(seed)).bfloat16()


def stored(rows: KVRows, values: torch.Tensor) -> torch.Tensor:
    """The values that a table returns for stored rows."""
    if rows.format is RowFormat.PLAIN:
        return values.to(rows.storage.dtype)
    if rows.format is RowFormat.FP8:
        return torch.cat((fp8_qdq(values[:, :448], 64), values[:, 448:]), 1).float()
    return fp4_qdq(values).float()


def row_bytes_by_hand(x: torch.Tensor) -> np.ndarray:
    """The bytes [N, 584] of rows [N, 512]: 448 e4m3, 64 bf16 little-endian, 7 biased exponents, one zero."""
    codes, exponents, _ = quantise_e4m3(x[:, :448], 64)
    rope = x[:, 448:].bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)
    rope_bytes = np.stack([rope & 0xFF, rope >> 8], -1).astype(np.uint8).reshape(len(x), 128)
    scales = np.concatenate([exponents + 127, np.zeros((len(x), 1))], 1).astype(np.uint8)
    return np.concatenate([codes, rope_bytes, scales], 1)


def test_constants_are_the_specification_s() -> None:
    assert (kv_layout.ROW_BYTES, kv_layout.ROW_DATA_BYTES, kv_layout.ROW_SCALE_BYTES) == (584, 576, 8)
    assert (kv_layout.PAGE_ROWS, kv_layout.PAGE_BYTES) == (64, 37_440)
    assert kv_layout.index_row_bytes_fp4(128) == (64, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_584_bytes(dtype: torch.dtype) -> None:
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 300).unsqueeze(1)
    x = x.to(dtype)
    x[0] = 0
    x[1, :448] = -0.0
    data, scales = kv_layout.pack_rows(x)
    assert np.array_equal(torch.cat((data, scales), 1).numpy(), row_bytes_by_hand(x))
    _, _, nope = quantise_e4m3(x[:, :448], 64)
    expected = torch.cat((torch.from_numpy(nope).float(), x[:, 448:].bfloat16().float()), 1)
    assert same_bits(kv_layout.unpack_rows(data, scales), expected)


def test_every_scale_byte_unpacks() -> None:
    """ue8m0 at its extremes: byte 0 is 2**-127 (below fp32's normal range), 254 is 2**127, 255 is NaN."""
    data = torch.full((256, 576), 0x38, dtype=torch.uint8)  # e4m3 1.0
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(-1, 8)
    nope = kv_layout.unpack_rows(data, scales)[:, :448].double()
    assert torch.equal(nope[:255], torch.exp2(torch.arange(255).double() - 127).unsqueeze(1).expand(-1, 448))
    assert nope[255].isnan().all()


def test_index_row_bytes() -> None:
    x = torch.randn(100, 128, generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 6, 100).unsqueeze(1)
    codes, exponents, values = quantise_e2m1(x, 32)
    packed, scales = kv_layout.pack_index_rows_fp4(x)
    assert packed.shape == (100, 64) and scales.shape == (100, 4)
    assert np.array_equal(packed.numpy(), codes[:, 0::2] | codes[:, 1::2] << 4)
    assert np.array_equal(scales.numpy(), exponents + 127)
    assert same_bits(kv_layout.unpack_index_rows_fp4(packed, scales), torch.from_numpy(values).float())


def test_fp8_page_bytes() -> None:
    """Rows 63, 64 and 130: data at row · 576 of its page, scales after all 64 rows' data, no other byte written."""
    rows = table("fp8", 150)
    assert rows.storage.shape == (3, 37_440) and rows.row_bytes == 584 and rows.nbytes == 3 * 37_440
    x = values_for(rows, 3)
    rows.scatter(torch.tensor([63, 64, 130]), x)
    expected = np.zeros((3, 37_440), np.uint8)
    for row, content in zip((63, 64, 130), row_bytes_by_hand(x), strict=True):
        page, place = divmod(row, 64)
        expected[page, place * 576 : place * 576 + 576] = content[:576]
        expected[page, 64 * 576 + place * 8 : 64 * 576 + place * 8 + 8] = content[576:]
    assert np.array_equal(rows.storage.numpy(), expected)


def test_index_fp4_page_bytes() -> None:
    rows = table("index_fp4", 65)
    assert rows.storage.shape == (2, 64 * 68) and rows.row_bytes == 68
    x = values_for(rows, 1)
    rows.scatter(torch.tensor([64 + 5]), x)
    codes, scales = kv_layout.pack_index_rows_fp4(x)
    expected = torch.zeros(2, 64 * 68, dtype=torch.uint8)
    expected[1, 5 * 64 : 6 * 64] = codes[0]
    expected[1, 64 * 64 + 5 * 4 : 64 * 64 + 6 * 4] = scales[0]
    assert torch.equal(rows.storage, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_scatter_then_gather(name: str) -> None:
    """Rows in any order, an index of any shape, int32 or int64; rows that were not written are still NaN."""
    rows = table(name, 200, fill=float("nan"))
    where = torch.randperm(200, generator=torch.Generator().manual_seed(3))[:90]
    x = values_for(rows, 90)
    rows.scatter(where.int(), x)
    expected = stored(rows, x)
    assert same_bits(rows.gather(where), expected)
    assert same_bits(rows.gather(where.view(9, 10).int()), expected.view(9, 10, -1))
    untouched = torch.tensor(sorted(set(range(200)) - set(where.tolist())))
    assert rows.gather(untouched).isnan().all()
    assert rows.gather(torch.empty(0, 4, dtype=torch.int64)).shape == (0, 4, rows.row_dim)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_written_twice_holds_one_of_the_values(name: str) -> None:
    rows = table(name, 64)
    x = values_for(rows, 2)
    rows.scatter(torch.tensor([7, 7]), x)
    got = rows.gather(torch.tensor([7]))
    assert any(same_bits(got, stored(rows, x[i : i + 1])) for i in range(2))


@pytest.mark.parametrize("name", FORMATS)
def test_copy_rows_moves_bytes(name: str) -> None:
    src, dst = table(name, 130), table(name, 300, fill=float("nan"))
    x = values_for(src, 130)
    src.scatter(torch.arange(130), x)
    to = torch.randperm(300, generator=torch.Generator().manual_seed(4))[:50]
    origin = torch.randint(0, 130, (50,), generator=torch.Generator().manual_seed(5))
    dst.copy_rows(to, src, origin)
    assert same_bits(dst.gather(to), src.gather(origin))
    untouched = torch.tensor(sorted(set(range(300)) - set(to.tolist())))
    assert dst.gather(untouched).isnan().all()


def test_fp8_rows_and_plain_rows_of_rounded_values_are_the_same_numbers() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(6)).bfloat16()
    fp8, plain = table("fp8", 64), table("plain_bf16", 64)
    fp8.scatter(torch.arange(64), x)
    plain.scatter(torch.arange(64), torch.cat((fp8_qdq(x[:, :448], 64), x[:, 448:]), 1))
    assert same_bits(fp8.gather(torch.arange(64)), plain.gather(torch.arange(64)).float())


def test_the_plan_can_be_measured_without_memory() -> None:
    rows = KVRows.allocate(10**9, RowFormat.FP8, 512, 64, torch.bfloat16, "meta")
    assert rows.nbytes == 10**9 // 64 * 37_440 and rows.device.type == "meta"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KVRows.allocate(4, RowFormat.FP8, 128, 64, torch.bfloat16, "cpu"), "head_dim 512 with 64.*got 128"),
        (lambda: KVRows.allocate(4, RowFormat.INDEX_FP4, 48, 16, torch.bfloat16, "cpu"), "multiple of 32.*got 48"),
        (lambda: KVRows.allocate(-1, RowFormat.PLAIN, 8, 4, torch.bfloat16, "cpu"), "num_rows is -1"),
        (lambda: KVRows.allocate(4, RowFormat.FP8, 512, 64, torch.bfloat16, "cpu", 1.0), "0.0 or NaN; got 1.0"),
        (lambda: kv_layout.pack_rows(torch.zeros(2, 448)), r"needs \[N, 512\]"),
        (lambda: table("fp8", 64).scatter(torch.tensor([1, 2]), torch.zeros(2, 448)), r"values \[N, 512\]"),
        (
            lambda: table("fp8", 64).copy_rows(torch.tensor([0]), table("plain_bf16", 64), torch.tensor([0])),
            "expected the same",
        ),
        (lambda: table("fp8", 64).copy_rows(torch.tensor([0]), table("fp8", 64), torch.tensor([0, 1])), "two lists"),
    ],
    ids=[
        *("fp8_dim", "fp4_dim", "num_rows", "fill", "pack", "scatter", "copy_format"),
        "copy_rows",
    ],
)
def test_errors_say_what_is_expected(call, message: str) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match=message):
        call()
