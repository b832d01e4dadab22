"""Byte formats of rows in the KV pools, and a table of rows (DeepSeek-V4 specification, section 4.1).

The FP8 row of keys (K and V are the same row) has 584 bytes::

    data    448 e4m3 (channels 0-447)  |  64 bf16 (channels 448-511, rotated)          576 bytes
    scales  7 ue8m0 (one for 64 e4m3 channels)  |  1 unused                              8 bytes

64 rows share a page, `[64 x 576 data][64 x 8 scales]`, padded to a multiple of 576: 37,440 bytes. The FP4 row of
indexer keys has 68 bytes at dimension 128: 64 with two e2m1 codes each (even channel in the low nibble), 4 ue8m0 (one
for 32 channels); its page is `[64 x 64 codes][64 x 4 scales]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_kernels.number_formats import decode_fp4, decode_fp8, encode_fp4, encode_fp8, pack_nibbles, unpack_nibbles

NOPE_DIM = 448
ROPE_DIM = 64
ROW_DIM = NOPE_DIM + ROPE_DIM
SCALE_GROUP = 64
"""Channels of the unrotated part that share a scale."""
NUM_SCALES = NOPE_DIM // SCALE_GROUP
ROW_DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM
ROW_SCALE_BYTES = NUM_SCALES + 1
ROW_BYTES = ROW_DATA_BYTES + ROW_SCALE_BYTES
PAGE_ROWS = 64
PAGE_BYTES = -(-PAGE_ROWS * ROW_BYTES // ROW_DATA_BYTES) * ROW_DATA_BYTES

FP4_SCALE_GROUP = 32
"""Channels of an FP4 indexer row that share a scale."""


def index_row_bytes_fp4(row_dim: int) -> tuple[int, int]:
    """(bytes of codes, bytes of scales) of an FP4 indexer row of `row_dim` channels: (64, 4) for 128."""
    return row_dim // 2, row_dim // FP4_SCALE_GROUP


def entry_rows(page_table: Tensor, request: Tensor | int, entry: Tensor, entries_per_page: int) -> Tensor:
    """Rows of compressed entries in their pool, which is addressed through the page tables of requests.

    Args:
        page_table: [B, P] integer page numbers.
        request: integer row(s) of page_table, broadcast against entry.
        entry: [...] int64, each below P * entries_per_page.
        entries_per_page: entries in a page.

    Returns:
        [...] int64.
    """
    page = page_table[request, entry // entries_per_page].long()
    return page * entries_per_page + entry % entries_per_page


def pack_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises rows into the 584-byte format.

    The unrotated channels are quantised from x in its own dtype (bf16 in the release); the rotated channels are cast to
    bf16.

    Args:
        x: [N, 512] fp32 or bf16.

    Returns:
        data [N, 576] uint8, scales [N, 8] uint8 (the last one 0).

    Raises:
        ValueError: x is not [N, 512].
    """
    if x.dim() != 2 or x.shape[1] != ROW_DIM:
        raise ValueError(f"pack_rows needs [N, {ROW_DIM}]; got {tuple(x.shape)}")
    codes, scales = encode_fp8(x[:, :NOPE_DIM], SCALE_GROUP)
    rope = x[:, NOPE_DIM:].to(torch.bfloat16).contiguous()
    data = torch.cat((codes.contiguous().view(torch.uint8), rope.view(torch.uint8)), 1)
    return data, torch.nn.functional.pad(_ue8m0_bytes(scales), (0, 1))


def unpack_rows(data: Tensor, scales: Tensor) -> Tensor:
    """The values of `pack_rows`'s result.

    Args:
        data: [N, 576] uint8.
        scales: [N, 8] uint8.

    Returns:
        [N, 512] fp32.
    """
    nope = data[:, :NOPE_DIM].contiguous().view(torch.float8_e4m3fn)
    rope = data[:, NOPE_DIM:].contiguous().view(torch.bfloat16)
    return torch.cat((decode_fp8(nope, _ue8m0_values(scales[:, :NUM_SCALES]), SCALE_GROUP), rope.float()), 1)


def pack_index_rows_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises indexer keys into e2m1 with one ue8m0 scale for 32 channels.

    Args:
        x: [N, D] fp32 or bf16, D a multiple of 32.

    Returns:
        codes [N, D / 2] uint8, scales [N, D / 32] uint8.

    Raises:
        ValueError: D is not a multiple of 32.
    """
    if x.dim() != 2 or x.shape[1] % FP4_SCALE_GROUP:
        raise ValueError(
            f"pack_index_rows_fp4 needs [N, D] with D a multiple of {FP4_SCALE_GROUP}; got {tuple(x.shape)}"
        )
    codes, scales = encode_fp4(x, FP4_SCALE_GROUP)
    return pack_nibbles(codes), _ue8m0_bytes(scales)


def unpack_index_rows_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    """The values of `pack_index_rows_fp4`'s result: [N, D] fp32."""
    return decode_fp4(unpack_nibbles(codes), _ue8m0_values(scales), FP4_SCALE_GROUP)


def _ue8m0_bytes(scales: Tensor) -> Tensor:
    """Biased exponents, uint8, of powers of two in fp32."""
    return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def _ue8m0_values(exponents: Tensor) -> Tensor:
    """Powers of two in fp32: the inverse of `_ue8m0_bytes`; 0 is 2**-127 and 255 is NaN, as the format says."""
    return exponents.contiguous().view(torch.float8_e8m0fnu).float()


class RowFormat(Enum):
    """How a row is stored."""

    PLAIN = "plain"
    """The values in the model's dtype; any dimension."""
    FP8 = "fp8"
    """584 bytes; dimension 512, of which 64 channels are rotated."""
    INDEX_FP4 = "index_fp4"
    """68 bytes at dimension 128; any multiple of 32."""


class RowPlaces(NamedTuple):
    """Pages and positions of rows in a byte format, computed once for many copies."""

    rows: Tensor  # [N] int64
    page: Tensor  # [N] int64
    place: Tensor  # [N] int64, row within the page

    @classmethod
    def of(cls, rows: Tensor) -> RowPlaces:
        """The places of [N] integer rows."""
        rows = rows.long()
        return cls(rows, rows // PAGE_ROWS, rows % PAGE_ROWS)


@dataclass(frozen=True)
class KVRows:
    """A table of rows of keys, addressed by row number.

    The object is a view: it owns no state besides the tensor `storage`, which several objects may share.
    """

    storage: Tensor
    """PLAIN: [num_rows, row_dim] in the model's dtype; else [pages, page bytes] uint8, 64 rows a page."""
    format: RowFormat
    num_rows: int
    row_dim: int
    rope_dim: int
    """Rotated channels at the end of a row."""

    @staticmethod
    def allocate(
        num_rows: int,
        format: RowFormat,
        row_dim: int,
        rope_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        fill: float | None = None,
    ) -> KVRows:
        """A table with a storage tensor of its own.

        Args:
            num_rows: at least 0; byte formats round the storage up to whole pages.
            format: of a row.
            row_dim: channels of a row; FP8 demands 512, INDEX_FP4 a multiple of 32.
            rope_dim: rotated channels; FP8 demands 64.
            dtype: of PLAIN rows; byte formats ignore it.
            device: of the storage.
            fill: None leaves the rows uninitialised; byte formats accept 0.0 and NaN only.

        Raises:
            ValueError: dimensions or a fill value that the format cannot represent.
        """
        if num_rows < 0:
            raise ValueError(f"num_rows is {num_rows}; expected at least 0")
        if format is RowFormat.PLAIN:
            storage = torch.empty(num_rows, row_dim, dtype=dtype, device=device)
            if fill is not None:
                storage.fill_(fill)
            return KVRows(storage, format, num_rows, row_dim, rope_dim)
        page_bytes = KVRows._page_bytes(format, row_dim, rope_dim)
        storage = torch.empty(-(-num_rows // PAGE_ROWS), page_bytes, dtype=torch.uint8, device=device)
        if fill is not None:
            if fill == fill and fill != 0:
                raise ValueError(f"rows of format {format.value} can be filled with 0.0 or NaN; got {fill}")
            storage.fill_(0 if fill == 0 else 0xFF)  # 0xFF is NaN in e4m3, bf16 and ue8m0
        return KVRows(storage, format, num_rows, row_dim, rope_dim)

    @staticmethod
    def _page_bytes(format: RowFormat, row_dim: int, rope_dim: int) -> int:
        if format is RowFormat.FP8:
            if (row_dim, rope_dim) != (ROW_DIM, ROPE_DIM):
                raise ValueError(
                    f"FP8 rows hold head_dim {ROW_DIM} with {ROPE_DIM} rotated channels; got {row_dim} with {rope_dim}."
                    " Use plain rows for other dimensions"
                )
            return PAGE_BYTES
        if row_dim <= 0 or row_dim % FP4_SCALE_GROUP:
            raise ValueError(f"FP4 indexer rows need a multiple of {FP4_SCALE_GROUP} channels; got {row_dim}")
        return PAGE_ROWS * sum(index_row_bytes_fp4(row_dim))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's content (584, 68, or dtype size times row_dim), without a page's padding."""
        if self.format is RowFormat.PLAIN:
            return self.row_dim * self.storage.element_size()
        return ROW_BYTES if self.format is RowFormat.FP8 else sum(index_row_bytes_fp4(self.row_dim))

    @property
    def nbytes(self) -> int:
        """Bytes of the storage tensor."""
        return self.storage.numel() * self.storage.element_size()

    @property
    def device(self) -> torch.device:
        """Device of the storage tensor."""
        return self.storage.device

    def _split_pages(self) -> tuple[Tensor, Tensor]:
        """Views of a byte format's storage: data [pages, 64, data bytes] and scales [pages, 64, scale bytes]."""
        if self.format is RowFormat.FP8:
            data_bytes, scale_bytes = ROW_DATA_BYTES, ROW_SCALE_BYTES
        else:
            data_bytes, scale_bytes = index_row_bytes_fp4(self.row_dim)
        end_of_data = PAGE_ROWS * data_bytes
        data = self.storage[:, :end_of_data].unflatten(1, (PAGE_ROWS, data_bytes))
        scales = self.storage[:, end_of_data : end_of_data + PAGE_ROWS * scale_bytes]
        return data, scales.unflatten(1, (PAGE_ROWS, scale_bytes))

    def page_views(self, rows: int) -> list[Tensor]:
        """Views of the storage's bytes by pages of `rows` rows.

        Args:
            rows: a divisor of 64.

        Returns:
            Tensors [N, per, bytes] uint8: page p's bytes are at [p // per, p % per] of each. In a byte format a page of
                64 rows is one run of bytes, padding included; fewer rows are two runs, data and scales.

        Raises:
            ValueError: 64 rows, or all rows of the table, do not divide into whole pages.
        """
        if PAGE_ROWS % rows or self.num_rows % rows:
            raise ValueError(f"{self.num_rows} rows in blocks of {PAGE_ROWS} are not pages of {rows} rows")
        if self.format is RowFormat.PLAIN:
            return [self.storage.view(torch.uint8).view(self.num_rows // rows, 1, rows * self.row_bytes)]
        if rows == PAGE_ROWS:
            return [self.storage.unflatten(1, (1, -1))]
        return [part.unflatten(1, (PAGE_ROWS // rows, rows)).flatten(2) for part in self._split_pages()]

    def gather(self, rows: Tensor) -> Tensor:
        """The values of rows.

        Args:
            rows: [...] integer, each in [0, num_rows).

        Returns:
            [..., row_dim]; PLAIN in the storage's dtype, else fp32.
        """
        flat = rows.reshape(-1).long()
        if self.format is RowFormat.PLAIN:
            values = self.storage.index_select(0, flat)
        else:
            data, scales = self._split_pages()
            page, place = flat // PAGE_ROWS, flat % PAGE_ROWS
            unpack = unpack_rows if self.format is RowFormat.FP8 else unpack_index_rows_fp4
            values = unpack(data[page, place], scales[page, place])
        return values.view(*rows.shape, self.row_dim)

    def scatter(self, rows: Tensor, values: Tensor) -> None:
        """Writes rows, quantised by the format. A row that is named twice gets either value.

        Args:
            rows: [N] integer, each in [0, num_rows).
            values: [N, row_dim] fp32 or bf16.

        Raises:
            ValueError: values is not [N, row_dim].
        """
        if values.shape != (*rows.shape, self.row_dim) or rows.dim() != 1:
            raise ValueError(
                f"scatter of rows {tuple(rows.shape)} needs values [N, {self.row_dim}]; got {tuple(values.shape)}"
            )
        flat = rows.long()
        if self.format is RowFormat.PLAIN:
            self.storage[flat] = values.to(self.storage.dtype)
            return
        pack = pack_rows if self.format is RowFormat.FP8 else pack_index_rows_fp4
        data, scales = self._split_pages()
        page, place = flat // PAGE_ROWS, flat % PAGE_ROWS
        data[page, place], scales[page, place] = pack(values)

    def copy_rows(self, dst_rows: Tensor | RowPlaces, src: KVRows, src_rows: Tensor | RowPlaces) -> None:
        """Copies rows byte for byte, without quantising again. A destination that is named twice gets either row.

        Args:
            dst_rows: [N] integer rows of this table, or their places, which can serve many tables.
            src: a table of the same format and dimensions.
            src_rows: [N] integer rows of src, or their places.

        Raises:
            ValueError: another format or other dimensions, or row lists of different shapes.
        """
        self._check_same_rows("copy_rows", src)
        to, origin = (rows if isinstance(rows, RowPlaces) else RowPlaces.of(rows) for rows in (dst_rows, src_rows))
        if to.rows.dim() != 1 or to.rows.shape != origin.rows.shape:
            raise ValueError(
                f"copy_rows needs two lists of N rows; got {tuple(to.rows.shape)} and {tuple(origin.rows.shape)}"
            )
        if self.format is RowFormat.PLAIN:
            self.storage[to.rows] = src.storage.index_select(0, origin.rows)
            return
        for dst_part, src_part in zip(self._split_pages(), src._split_pages(), strict=True):
            dst_part[to.page, to.place] = src_part[origin.page, origin.place]

    def _check_same_rows(self, name: str, src: KVRows) -> None:
        if (src.format, src.row_dim, src.storage.dtype) != (self.format, self.row_dim, self.storage.dtype):
            raise ValueError(
                f"{name} from {src.format.value} rows of {src.row_dim} {src.storage.dtype} to {self.format.value} rows "
                f"of {self.row_dim} {self.storage.dtype}; expected the same"
            )
