"""Unpacking on Hopper and Blackwell (sm_90a, sm_100a): one kernel and one launch for both parts, bound by memory.

A row of 576 bytes and its scales become 1,024 bytes, 64 chunks of 16. A thread writes the same chunk of ROWS_A_THREAD
rows: from 8 e4m3 and a scale, or as a copy of 16 bytes of the rotated channels. So neighbouring threads read and write
neighbouring bytes, and a thread issues all its loads before it stores the first chunk. No thread waits for another.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32
from torch import Tensor

from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.host.addresses import row_bytes
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.kv_layout import (
    NOPE_DIM,
    PAGE_ROWS,
    ROW_DATA_BYTES,
    ROW_DIM,
    ROW_SCALE_BYTES,
    SCALE_GROUP,
)
from dsv4_kernels.unpack import Pages

THREADS = 256
CHUNK = 8
"""Channels of a chunk: 16 bytes in bf16."""
CHUNKS = ROW_DIM // CHUNK
E4M3_CHUNKS = NOPE_DIM // CHUNK
ROWS_A_THREAD = 4
ROW_STEP = THREADS // CHUNKS
"""Distance between consecutive rows of a thread."""
ROWS_A_CTA = ROWS_A_THREAD * ROW_STEP


class Part(NamedTuple):
    """Pages of one table; addresses are Int64."""

    table: Int64
    table_page_bytes: Int32  # of 64 rows
    pages: Int64  # int32
    rows_per_page: Int32
    num_rows: Int32  # rows of out


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel. The first `num_ctas` CTAs unpack the first part."""

    first: Part
    second: Part
    num_ctas: Int32
    out: Int64
    out_row_bytes: Int32


@cute.jit
def launch(arguments: Arguments, num_ctas: Int32, stream: cuda.CUstream) -> None:
    """Launches one CTA for ROWS_A_CTA rows of one part."""
    kernel(arguments).launch(
        grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def kernel(args: Arguments) -> None:
    """Writes a chunk of ROWS_A_THREAD rows."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    chunk = thread % CHUNKS
    is_second = cta >= args.num_ctas
    part = Part(*(cutlass.select_(is_second, b, a) for a, b in zip(args.first, args.second, strict=True)))
    out = args.out
    if is_second:
        cta -= args.num_ctas
        out += Int64(args.first.num_rows) * args.out_row_bytes
    first = cta * ROWS_A_CTA + thread // CHUNKS
    data = cute.make_rmem_tensor((ROWS_A_THREAD,), Int64)
    scales = cute.make_rmem_tensor((ROWS_A_THREAD,), Int64)
    words = cute.make_rmem_tensor((4 * ROWS_A_THREAD,), Uint32)
    locate(part, first, data, scales)
    out += Int64(first) * args.out_row_bytes + chunk * 16
    if chunk < E4M3_CHUNKS:
        group = chunk * CHUNK // SCALE_GROUP
        for i in cutlass.range_constexpr(ROWS_A_THREAD):
            loaded = ptx.load_or_zeros(Uint32, 2, data[i] + chunk * CHUNK, data[i], "ge.s64")
            words[4 * i], words[4 * i + 1] = loaded[0], loaded[1]
            four_scales = ptx.load_or_zeros(Uint32, 1, scales[i] + group // 4 * 4, data[i], "ge.s64", cache="")
            words[4 * i + 2] = four_scales
        for i in cutlass.range_constexpr(ROWS_A_THREAD):
            scale = ptx.scale_pair((words[4 * i + 2] >> (8 * (group % 4))) & 0xFF)
            low, high = ptx.dequantise(words[4 * i], scale), ptx.dequantise(words[4 * i + 1], scale)
            if data[i] >= 0:
                ptx.store_16_bytes(out + Int64(i * ROW_STEP) * args.out_row_bytes, (*low, *high))
    else:
        offset = NOPE_DIM + (chunk - E4M3_CHUNKS) * 16
        for i in cutlass.range_constexpr(ROWS_A_THREAD):
            loaded = ptx.load_16_bytes(data[i], offset)
            for j in cutlass.range_constexpr(4):
                words[4 * i + j] = loaded[j]
        for i in cutlass.range_constexpr(ROWS_A_THREAD):
            if data[i] >= 0:
                row = tuple(words[4 * i + j] for j in range(4))
                ptx.store_16_bytes(out + Int64(i * ROW_STEP) * args.out_row_bytes, row)


@cute.jit
def locate(part: Part, first: Int32, data: cute.Tensor, scales: cute.Tensor) -> None:
    """Writes the addresses of the data and scales of a thread's rows; data is HOLE for rows of `out` left unchanged.

    Without branches, so that the page numbers of all rows are loaded in parallel.
    """
    pages = cute.make_rmem_tensor((ROWS_A_THREAD,), Int32)
    places = cute.make_rmem_tensor((ROWS_A_THREAD,), Int32)
    for i in cutlass.range_constexpr(ROWS_A_THREAD):
        row = first + i * ROW_STEP
        page = row // part.rows_per_page
        places[i] = row - page * part.rows_per_page
        pages[i] = ptx.load_or_zeros(Int32, 1, part.pages + Int64(page) * 4, part.num_rows - row, "gt.s32", cache="")
    for i in cutlass.range_constexpr(ROWS_A_THREAD):
        number = pages[i] * part.rows_per_page + places[i]
        page = part.table + Int64(number // PAGE_ROWS) * part.table_page_bytes
        exists = (pages[i] >= 0) & (first + i * ROW_STEP < part.num_rows)
        data[i] = cutlass.select_(exists, page + number % PAGE_ROWS * ROW_DATA_BYTES, Int64(ptx.HOLE))
        scales[i] = page + (PAGE_ROWS * ROW_DATA_BYTES + number % PAGE_ROWS * ROW_SCALE_BYTES)


# Host side


def compile(arch: str) -> Callable[..., None]:
    """The launcher: (arguments, CTAs, stream)."""
    return load_launcher("unpack_pages", "the only one", arch, launch, Arguments, Int32)


def _run(name: str, parts: Sequence[Pages], out: Tensor) -> None:
    numbers = [part.numbers.to(torch.int32).contiguous() for part in parts]
    values = [
        Part(
            table=part.table.storage.data_ptr(),
            table_page_bytes=row_bytes(part.table.storage),
            pages=pages.data_ptr(),
            rows_per_page=part.rows_per_page,
            num_rows=part.num_rows,
        )
        for part, pages in zip(parts, numbers, strict=True)
    ]
    nothing = Part(table=0, table_page_bytes=0, pages=0, rows_per_page=1, num_rows=0)
    num_ctas = [-(-part.num_rows // ROWS_A_CTA) for part in parts]
    arguments = Arguments(
        first=values[0],
        second=values[1] if len(values) > 1 else nothing,
        num_ctas=num_ctas[0],
        out=out.data_ptr(),
        out_row_bytes=row_bytes(out),
    )
    compile(architecture(name, out.device))(arguments, Int32(sum(num_ctas)), current_stream(out.device))


def sm90(parts: Sequence[Pages], out: Tensor) -> None:
    """`dsv4_kernels.unpack.unpack_pages` on Hopper; writes all of `out` [rows of all parts, 512]."""
    _run("sm90", parts, out)


def sm100(parts: Sequence[Pages], out: Tensor) -> None:
    """`dsv4_kernels.unpack.unpack_pages` on Blackwell (B200, GB200, B300); as `sm90`."""
    _run("sm100", parts, out)
