"""Gather warps of the Blackwell kernel: rows from global memory into a stage of shared memory, as bf16."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.experimental import primitives as prims

from dsv4_kernels.kv_layout import NOPE_DIM, PAGE_ROWS, ROW_DATA_BYTES, ROW_SCALE_BYTES, SCALE_GROUP
from dsv4_kernels.sparse_attention.sm100.plan import (
    EIGHT_ROWS,
    GATHER_GROUPS,
    ROW_BITS_BYTES,
    SWIZZLE_CHANNELS,
    SWIZZLE_ROW_BYTES,
    TILE_KEYS,
    Arguments,
    Barrier,
    Item,
    Plan,
    Smem,
    arrive,
    first_and_stride,
    gmem,
    item_of,
    load_words,
    of_first_cta,
    store_words,
    typed,
    wait_for_tile,
)


def pair_of_byte(word: Int32, byte: int) -> Int32:
    """A byte of a word, twice, in the lower half."""
    return prims.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, {0x4400 | byte << 4 | byte:#x};",
        write_only_types=[Int32],
        read_only_args=[word],
    )


def bf16_of_e4m3(word: Int32, scales: Int32) -> list[Int32]:
    """Four e4m3 -> two words of bf16 pairs, times the two ue8m0 in the lower half of `scales`, in pairs.

    One instruction a pair (PTX 9.2): the product is rounded once, so it is exact unless it is subnormal.
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
    item: Item, tile: Int32, row: Int32, a: Arguments, fp8: cutlass.Constexpr
) -> tuple[Int64, Int64, Boolean]:
    """(data, scales, whether it exists) of the row at place `row` of a tile; for a hole a row of zeros."""
    slot = tile * TILE_KEYS + row
    table, page_bytes = a.window, a.window_page_bytes
    index = Int32(-1)
    if tile < item.window_tiles:
        if slot < a.window_slots:
            index = (gmem(a.window_rows, Int32) + (item.token * a.window_rows_stride + slot)).load()
    else:
        slot = slot - item.window_tiles * TILE_KEYS
        table, page_bytes = a.entries, a.entry_page_bytes
        if slot < item.num_entries:
            if a.entry_rows != 0:
                index = (gmem(a.entry_rows, Int32) + (item.token * a.entry_rows_stride + slot)).load()
            else:
                request = (gmem(a.token_to_request, Int32) + item.token).load()
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
    """Whether a block of 64 channels is stored as bytes; the rotated one is bf16 in either format."""
    return fp8 and block < NOPE_DIM // SWIZZLE_CHANNELS


def load_row(data: Int64, scales: Int64, quarter: Int32, fp8: bool, blocks: range) -> list[list[Int32]]:
    """This lane's quarter of these blocks of a row, in pieces of 16 bytes; FP8 rows have their scales in front."""
    pieces = [load_words(scales, 0, 2)] if fp8 else []
    bytes_begin, bf16_begin = data + quarter * 16, data + quarter * 32
    for block in blocks:
        if is_e4m3(block, fp8):
            pieces.append(load_words(bytes_begin, block * SCALE_GROUP, 4))
        else:
            offset = NOPE_DIM if fp8 else block * SWIZZLE_ROW_BYTES
            pieces += [load_words(bf16_begin, offset, 4), load_words(bf16_begin, offset + 16, 4)]
    return pieces


def store_row(
    target: cutlass.Pointer,
    pieces: list[list[Int32]],
    place_0: Int32,
    place_1: Int32,
    fp8: bool,
    blocks: range,
    plan: Plan,
) -> None:
    """Writes what `load_row` has loaded into the row of a stage, as bf16."""
    pieces = iter(pieces)
    scales = next(pieces) if fp8 else None
    for block in blocks:
        if is_e4m3(block, fp8):
            scale = pair_of_byte(scales[block // 4], block % 4)
            words = [pair for word in next(pieces) for pair in bf16_of_e4m3(word, scale)]
            chunks = (words[:4], words[4:])
        else:
            chunks = (next(pieces), next(pieces))
        for place, chunk in zip((place_0, place_1), chunks, strict=True):
            store_words(target + plan.block_offset(block - blocks[0]) + place, chunk)


def row_bits(exists_0: Boolean, exists_1: Boolean) -> Int32:
    """Which of a warp's 16 rows are no holes, as in `ALL_ROWS`; four lanes know of each."""
    bits = [prims.vote_sync(0xFFFFFFFF, exists, prims.VoteSync.BALLOT) for exists in (exists_0, exists_1)]
    return (bits[0] & EIGHT_ROWS) | (bits[1] & EIGHT_ROWS << 1)


@cute.jit
def gather(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    group: Int32,
    group_warp: Int32,
    lane: Int32,
    fp8: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Fills the stages of every second tile with these blocks of 64 channels.

    Four lanes share a row: of a block of 64 channels, lane q of the four makes channels [16 q, 16 q + 16), which are
    the 16-byte chunks 2 q and 2 q + 1 of a swizzled row. A warp's 8 rows then meet every bank equally often.
    """
    quarter = lane % 4
    row_in_8 = lane // 4
    row_0 = group_warp * 16 + row_in_8
    row_1 = row_0 + 8
    # Row r of the 128-byte swizzle holds chunk c at place c ^ (r % 8).
    place_0 = ((2 * quarter) ^ row_in_8) * 16
    place_1 = ((2 * quarter + 1) ^ row_in_8) * 16
    before = Int32(0)  # tiles of the items before this one
    first, stride = first_and_stride(plan)
    for index in cutlass.range(first, a.num_items, stride):
        item = item_of(index, a, plan)
        begin = (before + group) % GATHER_GROUPS
        data_0, scales_0, exists_0 = row_addresses(item, item.first_tile + begin, row_0, a, fp8)
        data_1, scales_1, exists_1 = row_addresses(item, item.first_tile + begin, row_1, a, fp8)
        for tile in cutlass.range(begin, item.num_tiles, GATHER_GROUPS):
            count = before + tile
            stage = count % plan.stages
            target = smem + (Smem.KV + stage * plan.stage_bytes)
            pieces_0 = load_row(data_0, scales_0, quarter, fp8, blocks)
            if cutlass.const_expr(fp8):  # bf16 rows have twice the bytes: one row's in registers at a time
                pieces_1 = load_row(data_1, scales_1, quarter, fp8, blocks)
            # The next rows' numbers are on their way while these rows are.
            next_tile = item.first_tile + tile + GATHER_GROUPS
            next_data_0, next_scales_0, next_exists_0 = row_addresses(item, next_tile, row_0, a, fp8)
            next_data_1, next_scales_1, next_exists_1 = row_addresses(item, next_tile, row_1, a, fp8)
            if count >= plan.stages:
                wait_for_tile(barriers, Barrier.PV_DONE, count - plan.stages, plan)
            target_0, target_1 = target + row_0 * SWIZZLE_ROW_BYTES, target + row_1 * SWIZZLE_ROW_BYTES
            store_row(target_0, pieces_0, place_0, place_1, fp8, blocks, plan)
            if cutlass.const_expr(not fp8):
                pieces_1 = load_row(data_1, scales_1, quarter, fp8, blocks)
            store_row(target_1, pieces_1, place_0, place_1, fp8, blocks, plan)
            bits = row_bits(exists_0, exists_1)
            if lane == 0:
                (typed(smem + (Smem.ROWS + stage * ROW_BITS_BYTES), Int32) + group_warp).store(bits)
            prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
            arrive(barriers + (Barrier.FULL + stage))
            if cutlass.const_expr(plan.ctas == 2):
                arrive(of_first_cta(barriers + (Barrier.ALL_FULL + stage), plan))
            data_0, scales_0, exists_0 = next_data_0, next_scales_0, next_exists_0
            data_1, scales_1, exists_1 = next_data_1, next_scales_1, next_exists_1
        before = before + item.num_tiles
