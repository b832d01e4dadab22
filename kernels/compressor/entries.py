"""Device code that makes stored rows from a thread's four channels of an entry: norm, RoPE, Hadamard, quantisation.

Neighbouring lanes have neighbouring channels, four each, as two words of bf16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels.compressor.rows import CHUNK, Batch, Problem, weights_of
from dsv4_kernels.device import e2m1, e4m3, ptx
from dsv4_kernels.device.bf16_rows import (
    channels,
    load_i64,
    max_over_lanes,
    mul,
    packed,
    reciprocal,
    reciprocal_root,
    store_8_bytes,
)
from dsv4_kernels.device.rotation import cosine_and_sine, position_of, turned
from dsv4_kernels.kv_layout import (
    FP4_SCALE_GROUP,
    NOPE_DIM,
    PAGE_ROWS,
    ROPE_DIM,
    ROW_DATA_BYTES,
    ROW_SCALE_BYTES,
    SCALE_GROUP,
    index_row_bytes_fp4,
)

INDEX_DIM = 128
PAGE_SHIFT = PAGE_ROWS.bit_length() - 1
FP8_LANES = SCALE_GROUP // CHUNK
FP4_LANES = FP4_SCALE_GROUP // CHUNK
FP4_CODE_BYTES, FP4_SCALE_BYTES = index_row_bytes_fp4(INDEX_DIM)


def rounded(sums: list, totals: list) -> list:
    """Weighted sums divided by the sums of weights, rounded to bf16: four fp32."""
    values = []
    for weighted_sum, total in zip(sums, totals, strict=True):
        divisor = cutlass.select_(total == 0.0, Float32(1.0), total)
        values.append(mul(weighted_sum, reciprocal(divisor)))
    return channels(packed(values))


@cute.jit
def normed_and_rotated(
    batch: Batch, p: Problem, group: Int32, values: list, total: Float32, dim: int, channel: Int32
) -> cute.Tensor:
    """`x * rsqrt(mean(x**2) + eps) * weight` in two words of bf16, rotated if they are among the last ROPE_DIM
    channels.

    total: sum of the squares of all `dim` channels.
    """
    made = cute.make_rmem_tensor((2,), Uint32)
    factor = reciprocal_root(ptx.fma(total, Float32(1 / dim), p.eps))
    scaled = [mul(mul(x, factor), weight) for x, weight in zip(values, weights_of(p, channel), strict=True)]
    made[0], made[1] = packed(scaled)
    first = channel - (dim - ROPE_DIM)
    if first >= 0:
        position = position_of(batch.entry_positions + Int64(group) * 8)
        for i in cutlass.range_constexpr(2):
            frequency = ptx.load_f32(p.frequencies + (first // 2 + i) * 4)
            made[i] = turned(made[i], *cosine_and_sine(mul(position, frequency)))
    return made


def store_byte(address: Int64, x: Uint32) -> None:
    """Stores the lowest byte of a word."""
    ptx.asm("st.global.b8 [{$r0}], {$r1};", [], address, x)


def store_2_bytes(address: Int64, x: Uint32) -> None:
    """Stores the lower half of a word."""
    ptx.asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, {$r1};\nst.global.b16 [{$r0}], low;\n}", [], address, x)


@cute.jit
def store_main(batch: Batch, p: Problem, group: Int32, made: cute.Tensor, channel: Int32) -> None:
    """Stores an entry of 512 channels, as FP8 bytes or as plain values. All lanes of the warp must call this."""
    slot = load_i64(batch.slots + Int64(group) * 8)
    words = (made[0], made[1])
    values = channels(words)
    exponent = e4m3.scale_exponent(max_over_lanes(e4m3.largest(values), FP8_LANES))
    (code,) = e4m3.codes(values, exponent)
    is_rotated = channel >= NOPE_DIM
    if p.is_packed != 0:
        page = p.table + (slot >> PAGE_SHIFT) * p.page_bytes
        place = slot & (PAGE_ROWS - 1)
        row = page + place * ROW_DATA_BYTES
        if is_rotated:
            store_8_bytes(row + NOPE_DIM + (channel - NOPE_DIM) * 2, words)
        else:
            ptx.store_u32(row + channel, code)
        if channel % SCALE_GROUP == 0:
            byte = cutlass.select_(is_rotated, Uint32(0), exponent)  # after the scales comes a byte that is 0
            block = page + PAGE_ROWS * ROW_DATA_BYTES + place * ROW_SCALE_BYTES
            store_byte(block + channel // SCALE_GROUP, byte)
    else:
        replaced = (p.is_rounded != 0) & (channel < NOPE_DIM)
        kept = ptx.dequantise(code, ptx.scale_pair(exponent))
        kept = tuple(cutlass.select_(replaced, a, b) for a, b in zip(kept, words, strict=True))
        store_8_bytes(p.table + slot * p.page_bytes + channel * 2, kept)


@cute.jit
def store_index(batch: Batch, p: Problem, group: Int32, made: cute.Tensor, lane: Int32) -> None:
    """Stores an indexer key of 128 channels, as FP4 bytes or as plain values, with one warp."""
    slot = load_i64(batch.slots + Int64(group) * 8)
    words = (made[0], made[1])
    turned_words = packed(e2m1.hadamard(channels(words), lane))
    words = tuple(cutlass.select_(p.hadamard != 0, a, b) for a, b in zip(turned_words, words, strict=True))
    values = channels(words)
    exponent = e2m1.scale_exponent(max_over_lanes(e4m3.largest(values), FP4_LANES))
    codes = e2m1.codes(values, exponent)
    if p.is_packed != 0:
        page = p.table + (slot >> PAGE_SHIFT) * p.page_bytes
        place = slot & (PAGE_ROWS - 1)
        word = codes[0] | codes[1] << 4 | codes[2] << 8 | codes[3] << 12
        store_2_bytes(page + place * FP4_CODE_BYTES + lane * 2, word)
        if lane % FP4_LANES == 0:
            store_byte(page + PAGE_ROWS * FP4_CODE_BYTES + place * FP4_SCALE_BYTES + lane // FP4_LANES, exponent)
    else:
        plain = packed([e2m1.value_of(code, exponent) for code in codes])
        kept = tuple(cutlass.select_(p.is_rounded != 0, a, b) for a, b in zip(plain, words, strict=True))
        store_8_bytes(p.table + slot * p.page_bytes + lane * 8, kept)
