"""Storing rows as e4m3 with one scale for 128 channels, with the bits of `fp8_quantise`.

A thread has a chunk of 8 channels, and 16 neighbouring lanes have a block. The threads of a row are padded to whole
blocks; threads after the row's end have zeros, which raise no maximum.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from dsv4_kernels.device import bf16_rows, e4m3, ptx
from dsv4_kernels.device.bf16_rows import CHUNK
from dsv4_kernels.host.fp8_rows import BLOCK, THREADS, Codes

BLOCK_LANES = BLOCK // CHUNK


def chunk_of_thread(to: Codes, cta: Int32) -> tuple:
    """(row, chunk of the row, whether the row has this chunk) of this thread of CTA `cta` of `num_ctas`."""
    thread, _, _ = cute.arch.thread_idx()
    unit = cta * THREADS + thread
    row = unit // (to.blocks * BLOCK_LANES)
    chunk = unit - row * (to.blocks * BLOCK_LANES)
    return row, chunk, (row < to.num_rows) & (chunk < to.chunks)


@cute.jit
def store_codes(to: Codes, row: Int32, chunk: Int32, exists: Boolean, values: list) -> None:
    """Stores the codes of a chunk's 8 channels, and once per block its scale. All lanes of the warp must call this."""
    exponent = e4m3.scale_exponent(bf16_rows.max_over_lanes(e4m3.largest(values), BLOCK_LANES))
    codes = e4m3.codes(values, exponent)
    if exists:
        bf16_rows.store_8_bytes(to.codes + (Int64(row) * to.chunks + chunk) * CHUNK, codes)
        if chunk % BLOCK_LANES == 0:
            scale = to.scales + Int64(row) * to.scale_row_bytes + Int64(chunk // BLOCK_LANES) * to.scale_block_bytes
            ptx.store_f32(scale, e4m3.scale_of(exponent))
