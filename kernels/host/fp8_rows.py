"""Results of kernels that store rows as e4m3 with one scale for 128 channels (`dsv4_kernels.device.fp8_rows`)."""

from typing import NamedTuple

import torch
from cutlass import Int32, Int64
from torch import Tensor

from dsv4_kernels.host.strides import stride_bytes

THREADS = 256
"""Threads of a CTA where one thread makes one chunk."""
BLOCK = 128
"""Channels that share a scale."""
CHUNK = 8
"""Channels of a thread."""


class Codes(NamedTuple):
    """Addresses at which a kernel writes codes and scales, Int64, and the dimensions of the result."""

    codes: Int64  # e4m3, contiguous
    scales: Int64  # fp32
    scale_row_bytes: Int64
    scale_block_bytes: Int64
    chunks: Int32  # of a row
    blocks: Int32  # of a row; the last one may be shorter
    num_rows: Int32


def new_codes(rows: int, dim: int, column_major: bool, device: torch.device) -> tuple[Tensor, Tensor, Codes]:
    """Uninitialised codes [rows, dim] float8_e4m3fn, scales [rows, ceil(dim / 128)] fp32, and their addresses.

    Args:
        rows, dim: of the result; dim is a multiple of 8.
        column_major: the scales of neighbouring rows are contiguous, and each column begins at a multiple of 16 bytes.
        device: of the result.
    """
    codes = torch.empty(rows, dim, dtype=torch.float8_e4m3fn, device=device)
    blocks = -(-dim // BLOCK)
    if column_major:
        scales = torch.empty(blocks, -(-rows // 4) * 4, dtype=torch.float32, device=device).T[:rows]
    else:
        scales = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    to = Codes(
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        scale_row_bytes=stride_bytes(scales, 0),
        scale_block_bytes=stride_bytes(scales, 1),
        chunks=dim // CHUNK,
        blocks=blocks,
        num_rows=rows,
    )
    return codes, scales, to


def bf16_result(out: Tensor, rows: int, dim: int) -> Codes:
    """The addresses of a bf16 result [rows, dim] of a kernel that can also store codes: no scales."""
    return Codes(
        codes=out.data_ptr(),
        scales=0,
        scale_row_bytes=0,
        scale_block_bytes=0,
        chunks=dim // CHUNK,
        blocks=-(-dim // BLOCK),
        num_rows=rows,
    )


def num_ctas(rows: int, dim: int) -> int:
    """CTAs of a launch with one thread for each chunk of a result [rows, dim], rows padded to whole blocks."""
    return -(-rows * -(-dim // BLOCK) * (BLOCK // CHUNK) // THREADS)
