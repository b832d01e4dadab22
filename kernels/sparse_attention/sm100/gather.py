"""The gather warps of the Blackwell kernel: a row from global memory to bf16 in a stage (kernel.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.experimental import primitives as prims

from dsv4_kernels.device.pointers import gmem, load_words, store_words
from dsv4_kernels.device.tcgen05 import SWIZZLE_ROW_BYTES
from dsv4_kernels.kv_layout import NOPE_DIM, PAGE_ROWS, ROW_DATA_BYTES, ROW_SCALE_BYTES, SCALE_GROUP
from dsv4_kernels.sparse_attention.sm100.plan import (
    EIGHT_ROWS,
    SWIZZLE_CHANNELS,
    TILE_KEYS,
    Arguments,
    Plan,
)
from dsv4_kernels.sparse_attention.sm100.tile_scheduler import WorkTile


def pair_of_byte(word: Int32, byte: int) -> Int32:
    """A byte of a word, duplicated in the lower half."""
    return prims.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, {0x4400 | byte << 4 | byte:#x};",
        write_only_types=[Int32],
        read_only_args=[word],
    )


def bf16_of_e4m3(word: Int32, scales: Int32) -> list[Int32]:
    """Two words of bf16 pairs: four e4m3 times the two ue8m0 in the lower half of `scales` (low, high of each pair).

    One instruction a pair (PTX 9.2): the product is rounded once, and only if it is subnormal in bf16.
    """
    convert = "cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2"
    return list(
        prims.inline_ptx(
            "{\n.reg .b16 low, high, scales, unused;\nmov.b32 {low, high}, {$r0};\nmov.b32 {scales, unused}, {$r1};\n"
            f"{convert} {{$w0}}, low, scales;\n{convert} {{$w1}}, high, scales;\n}}",
            write_only_types=[Int32] * 2,
            read_only_args=[word, scales],
        )
    )


@cute.jit
def row_addresses(
    work_tile: WorkTile, tile: Int32, row: Int32, a: Arguments, fp8: cutlass.Constexpr
) -> tuple[Int64, Int64, Boolean]:
    """(address of the data, address of the scales, whether the row exists) of row `row` of a key tile.

    For a hole, both are the address of a row of zeros.
    """
    slot = tile * TILE_KEYS + row
    table, page_bytes = a.window, a.window_page_bytes
    index = Int32(-1)
    if tile < work_tile.window_tiles:
        if slot < a.window_slots:
            index = (gmem(a.window_rows, Int32) + (work_tile.token * a.window_rows_stride + slot)).load()
    else:
        slot = slot - work_tile.window_tiles * TILE_KEYS
        table, page_bytes = a.entries, a.entry_page_bytes
        if slot < work_tile.num_entries:
            if a.entry_indices != 0:
                index = (gmem(a.entry_indices, Int32) + (work_tile.token * a.entry_indices_stride + slot)).load()
            else:
                request = (gmem(a.token_to_request, Int32) + work_tile.token).load()
                page = slot // a.entries_per_page
                number = (gmem(a.page_table, Int32) + (request * a.page_table_stride + page)).load()
                index = number * a.entries_per_page + (slot - page * a.entries_per_page)
    data, scales = a.zeros, a.zeros
    if index >= 0:
        if cutlass.const_expr(fp8):
            page, place = index // PAGE_ROWS, index % PAGE_ROWS
            base = table + page * page_bytes
            data = base + place * ROW_DATA_BYTES
            scales = base + PAGE_ROWS * ROW_DATA_BYTES + place * ROW_SCALE_BYTES
        else:
            data = table + index * page_bytes
    return data, scales, index >= 0


def is_e4m3(block: int, fp8: bool) -> bool:
    """Whether a block of 64 channels is stored as e4m3; the rotated block is bf16 in either format."""
    return fp8 and block < NOPE_DIM // SWIZZLE_CHANNELS


def load_row(data: Int64, scales: Int64, quarter: Int32, fp8: bool, blocks: range) -> list[list[Int32]]:
    """Loads this lane's quarter of these blocks of a row, 16 bytes at a time; for FP8 rows the scales come first."""
    loads = [load_words(scales, 0, 2)] if fp8 else []
    bytes_begin, bf16_begin = data + quarter * 16, data + quarter * 32
    for block in blocks:
        if is_e4m3(block, fp8):
            loads.append(load_words(bytes_begin, block * SCALE_GROUP, 4))
        else:
            offset = NOPE_DIM if fp8 else block * SWIZZLE_ROW_BYTES
            loads += [load_words(bf16_begin, offset, 4), load_words(bf16_begin, offset + 16, 4)]
    return loads


def store_row(
    target: cutlass.Pointer,
    loads: list[list[Int32]],
    place_0: Int32,
    place_1: Int32,
    fp8: bool,
    blocks: range,
    plan: Plan,
) -> None:
    """Stores the result of `load_row` to the row of a stage, as bf16."""
    loads = iter(loads)
    scales = next(loads) if fp8 else None
    for block in blocks:
        if is_e4m3(block, fp8):
            scale = pair_of_byte(scales[block // 4], block % 4)
            words = [pair for word in next(loads) for pair in bf16_of_e4m3(word, scale)]
            chunks = (words[:4], words[4:])
        else:
            chunks = (next(loads), next(loads))
        for place, chunk in zip((place_0, place_1), chunks, strict=True):
            store_words(target + plan.block_offset(block - blocks[0]) + place, chunk)


def row_bits(exists_0: Boolean, exists_1: Boolean) -> Int32:
    """Bits of a warp's 16 rows, 0 for a hole, in the order of `ALL_ROWS`; four lanes share a row."""
    bits = [prims.vote_sync(0xFFFFFFFF, exists, prims.VoteSync.BALLOT) for exists in (exists_0, exists_1)]
    return (bits[0] & EIGHT_ROWS) | (bits[1] & EIGHT_ROWS << 1)
