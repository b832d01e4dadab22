"""Gather warps of the Blackwell kernel: rows from global memory into a stage of shared memory, as bf16."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.experimental import primitives as prims

from dsv4_kernels.kv_layout import NOPE_DIM, PAGE_ROWS, ROW_DATA_BYTES, ROW_SCALE_BYTES, SCALE_GROUP
from dsv4_kernels.sparse_attention.sm100_plan import (
    GATHER_GROUPS,
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


def in_register(bits: int) -> Int32:
    """A constant that is no immediate operand: packed bf16 arithmetic takes none."""
    return prims.inline_ptx(f"mov.b32 {{$w0}}, {bits};", write_only_types=[Int32])


def spread_byte_pair(word: Int32, low: int, high: int) -> Uint32:
    """Two bytes of a word into the upper bytes of its halves."""
    selector = 0x0404 | low << 4 | high << 12
    return prims.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, {selector};", write_only_types=[Uint32], read_only_args=[word]
    )


def masked_or(a: Uint32, mask: int, b: Uint32) -> Int32:
    """(a & mask) | b in one instruction."""
    table = (0xF0 & 0xCC) | 0xAA
    return prims.inline_ptx(
        f"lop3.b32 {{$w0}}, {{$r0}}, {mask:#x}, {{$r1}}, {table:#x};", write_only_types=[Int32], read_only_args=[a, b]
    )


def bf16x2_of_e4m3x4(word: Int32, factor: Int32) -> list[Int32]:
    """Four e4m3 -> two words of bf16 pairs, times 2**-120 and times a pair of equal powers of two; exact if normal.

    A byte's sign goes to bit 15 and its other bits to 10..4, where e4m3's exponent and mantissa meet bf16's; the biases
    differ by 120. The multiplication takes and gives subnormals.
    """
    pairs = []
    for low in (0, 2):
        spread = spread_byte_pair(word, low, low + 1)
        bits = masked_or(spread, 0x80008000, (spread >> 4) & Uint32(0x07F007F0))
        pairs.append(prims.mul_bf16x2(bits, factor))
    return pairs


def factor_of_group(scales: list[Int32], group: int) -> Int32:
    """bf16 pair of 2**120 times the ue8m0 scale of a group, 2**(E - 127) for the byte E, where E is below 128."""
    byte = group % 4
    exponent = spread_byte_pair(scales[group // 4], byte, byte) >> 1
    return Int32(exponent + Uint32(120 << 23 | 120 << 7))


@cute.jit
def row_addresses(
    item: Item, tile: Int32, row: Int32, a: Arguments, fp8: cutlass.Constexpr
) -> tuple[Int64, Int64, Float32]:
    """(data, scales, mask) of the row at place `row` of a tile; for a hole a row of zeros, and -inf as mask."""
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
    data, scales, mask = a.zeros, a.zeros, Float32(-math.inf)
    if index >= 0:
        mask = Float32(0.0)
        if cutlass.const_expr(fp8):
            page, place = index // PAGE_ROWS, index % PAGE_ROWS
            base = table + page * page_bytes
            data = base + place * ROW_DATA_BYTES
            scales = base + PAGE_ROWS * ROW_DATA_BYTES + place * ROW_SCALE_BYTES
        else:
            data = table + index * page_bytes
    return data, scales, mask


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
            factor = factor_of_group(scales, block)
            words = [pair for word in next(pieces) for pair in bf16x2_of_e4m3x4(word, factor)]
            chunks = (words[:4], words[4:])
        else:
            chunks = (next(pieces), next(pieces))
        for place, chunk in zip((place_0, place_1), chunks, strict=True):
            store_words(target + plan.block_offset(block - blocks[0]) + place, chunk)


@cute.jit
def repair_large_scales(
    target: cutlass.Pointer,
    data: Int64,
    low: Int32,
    high: Int32,
    quarter: Int32,
    place_0: Int32,
    place_1: Int32,
    blocks: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Writes a row again of which a scale, one of the bytes of `low` and `high`, is 2 or more.

    No sane key has such a scale; one of 2**8 or more is beyond `factor_of_group`. 2**120 and the scale in turn then.
    Codes are loaded in another way than by `load_row`, so that ptxas does not keep those in registers until here.
    """
    if ((low & Int32(0x80808080 - 2**32)) | (high & Int32(0x00808080))) != 0:  # the eighth byte is unused
        exponent_shift = in_register((120 + 127) << 23 | (120 + 127) << 7)
        for block in cutlass.range(blocks[0], min(blocks[-1] + 1, NOPE_DIM // SWIZZLE_CHANNELS), unroll=1):
            byte = (cutlass.select_(block < 4, low, high) >> (block % 4 * 8)) & 0xFF
            scale = cutlass.max(byte << 7, Int32(0x40))  # 2**-127 is a subnormal
            codes = gmem(data + quarter * 16 + block * SCALE_GROUP, Int32).load(count=4, alignment=16)
            words = [
                prims.mul_bf16x2(pair, scale | scale << 16)
                for i in range(4)
                for pair in bf16x2_of_e4m3x4(codes[i], exponent_shift)
            ]
            place = target + plan.block_offset(block - blocks[0])
            store_words(place + place_0, words[:4])
            store_words(place + place_1, words[4:])


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
        data_0, scales_0, mask_0 = row_addresses(item, item.first_tile + begin, row_0, a, fp8)
        data_1, scales_1, mask_1 = row_addresses(item, item.first_tile + begin, row_1, a, fp8)
        for tile in cutlass.range(begin, item.num_tiles, GATHER_GROUPS):
            count = before + tile
            stage = count % plan.stages
            target = smem + (Smem.KV + stage * plan.stage_bytes)
            pieces_0 = load_row(data_0, scales_0, quarter, fp8, blocks)
            if cutlass.const_expr(fp8):  # bf16 rows have twice the bytes: one row's in registers at a time
                pieces_1 = load_row(data_1, scales_1, quarter, fp8, blocks)
            # The next rows' numbers are on their way while these rows are.
            next_tile = item.first_tile + tile + GATHER_GROUPS
            next_data_0, next_scales_0, next_mask_0 = row_addresses(item, next_tile, row_0, a, fp8)
            next_data_1, next_scales_1, next_mask_1 = row_addresses(item, next_tile, row_1, a, fp8)
            if count >= plan.stages:
                wait_for_tile(barriers, Barrier.PV_DONE, count - plan.stages, plan)
            target_0, target_1 = target + row_0 * SWIZZLE_ROW_BYTES, target + row_1 * SWIZZLE_ROW_BYTES
            store_row(target_0, pieces_0, place_0, place_1, fp8, blocks, plan)
            if cutlass.const_expr(not fp8):
                pieces_1 = load_row(data_1, scales_1, quarter, fp8, blocks)
            store_row(target_1, pieces_1, place_0, place_1, fp8, blocks, plan)
            if cutlass.const_expr(fp8):
                repair_large_scales(target_0, data_0, *pieces_0[0], quarter, place_0, place_1, blocks, plan)
                repair_large_scales(target_1, data_1, *pieces_1[0], quarter, place_0, place_1, blocks, plan)
            if quarter == 0:
                mask = typed(smem + (Smem.MASK + stage * TILE_KEYS * 4), Float32)
                (mask + row_0).store(mask_0)
                (mask + row_1).store(mask_1)
            prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
            arrive(barriers + (Barrier.FULL + stage))
            if cutlass.const_expr(plan.ctas == 2):
                arrive(of_first_cta(barriers + (Barrier.ALL_FULL + stage), plan))
            data_0, scales_0, mask_0 = next_data_0, next_scales_0, next_mask_0
            data_1, scales_1, mask_1 = next_data_1, next_scales_1, next_mask_1
        before = before + item.num_tiles
