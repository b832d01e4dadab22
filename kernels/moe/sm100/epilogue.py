"""The epilogue of the experts on Blackwell: SwiGLU and the quantiser of h, or rows in bf16 (kernel.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.experimental import primitives as prims

from dsv4_kernels.device import bf16_rows, e4m3, ptx
from dsv4_kernels.device.cta_pair import of_first_cta
from dsv4_kernels.device.mbarrier import arrive, wait
from dsv4_kernels.device.pipeline import stage_of
from dsv4_kernels.device.tcgen05 import as_float, load_tmem, tmem_columns
from dsv4_kernels.moe.activation import swiglu
from dsv4_kernels.moe.sm100.nvfp4 import NVFP4_BLOCK, block_scale, to_e2m1
from dsv4_kernels.moe.sm100.plan import (
    ACCUMULATORS,
    CHUNK,
    GROUP_THREADS,
    TILE_ROWS,
    WARPS_OF_GROUP,
    Arguments,
    Barrier,
    NamedBarrier,
    Numbers,
    Product,
)
from dsv4_kernels.moe.sm100.tiles import expert_of, slots_of


@cute.jit
def finish_tiles(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    warp: Int32,
    first: Int32,
    stride: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Finishes all work tiles of a CTA. Thread r has output row r of a work tile, for all its slots, 16 at a time."""
    thread = cute.arch.thread_idx()[0]
    largest = Int32((smem + plan.largest_offset).toint())
    tiles = Int32(0)
    for index in cutlass.range(first, end, stride):
        first_slot, num_slots = slots_of(a, index)
        row_tile = index % a.row_tiles
        if cutlass.const_expr(plan.numbers is Numbers.NVFP4):
            of_expert = a.factors + Int64(expert_of(a, index)) * 8
            factor, up_factor = ptx.load_f32(of_expert), ptx.load_f32(of_expert + 4)
        buffer = stage_of(tiles, ACCUMULATORS)
        wait(barriers, Barrier.DONE + buffer.index, buffer.phase)
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        start = buffer.index * plan.accumulator_columns
        for column in cutlass.range(0, plan.tokens, CHUNK):
            words = load_tmem(tmem_columns(tmem, warp, start + column, Int32), CHUNK)
            if cutlass.const_expr(plan.product is Product.GATE_UP):
                up_words = load_tmem(tmem_columns(tmem, warp, start + plan.tokens + column, Int32), CHUNK)
            prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
            sums = [as_float(word) for word in words]
            if cutlass.const_expr(plan.numbers is Numbers.NVFP4):
                sums = [bf16_rows.mul(value, factor) for value in sums]
            slot, left = first_slot + column, num_slots - column
            if cutlass.const_expr(plan.product is Product.GATE_UP):
                ups = [as_float(word) for word in up_words]
                if cutlass.const_expr(plan.numbers is Numbers.NVFP4):
                    ups = [bf16_rows.mul(value, up_factor) for value in ups]
                chunk = tiles * (plan.tokens // CHUNK) + column // CHUNK  # alternating buffers, across work tiles too
                place = largest + chunk % 2 * (WARPS_OF_GROUP * CHUNK * 4)
                hidden = hidden_of(a, sums, ups, slot, left)
                if cutlass.const_expr(plan.numbers is Numbers.NVFP4):
                    store_nvfp4(a, hidden, slot, left, row_tile, thread)
                else:
                    store_e4m3(a, hidden, slot, left, row_tile, thread, warp, place)
            else:
                store_rows(a, sums, slot, left, row_tile, thread)
        prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
        arrive(of_first_cta(barriers + (Barrier.FREE + buffer.index), plan.ctas))
        tiles = tiles + 1


@cute.jit
def hidden_of(a: Arguments, gates: list, ups: list, slot: Int32, count: Int32) -> list:
    """h of 16 slots, of which `count` exist, with the release's roundings to bf16."""
    gates, ups = rounded(gates), rounded(ups)
    hidden = []
    for i in cutlass.range_constexpr(CHUNK):
        weight = ptx.load_or_zeros(Float32, 1, a.routing + Int64(slot + i) * 4, Int32(i < count), cache="")
        hidden.append(bf16_rows.mul(weight, swiglu(gates[i], ups[i], a.limit)))
    return rounded(hidden)


@cute.jit
def store_nvfp4(a: Arguments, hidden: list, slot: Int32, count: Int32, row_tile: Int32, thread: Int32) -> None:
    """Stores e2m1 of 16 slots, a byte for two neighbouring lanes, with an e4m3 scale for the channels of 16 lanes."""
    factor = ptx.load_f32(a.hidden_factor)
    largest_code = bf16_rows.mul(factor, Float32(6.0))
    width = a.row_tiles * TILE_ROWS
    for i in cutlass.range_constexpr(CHUNK):
        largest = bf16_rows.max_over_lanes(bf16_rows.magnitude(hidden[i]), NVFP4_BLOCK)
        scale, value = block_scale(largest, largest_code)
        quotient = bf16_rows.divide(hidden[i], bf16_rows.mul(value, factor))
        code = to_e2m1(quotient, cute.arch.shuffle_sync_bfly(quotient, offset=1))
        if i < count:
            channel = Int64(slot + i) * width + row_tile * TILE_ROWS + thread
            if thread % 2 == 0:
                ptx.asm("st.global.b8 [{$r0}], {$r1};", [], a.out + channel // 2, code)
            if thread % NVFP4_BLOCK == 0:
                ptx.asm("st.global.b8 [{$r0}], {$r1};", [], a.out_scales + channel // NVFP4_BLOCK, scale)


@cute.jit
def store_e4m3(
    a: Arguments,
    hidden: list,
    slot: Int32,
    count: Int32,
    row_tile: Int32,
    thread: Int32,
    warp: Int32,
    largest: Int32,
) -> None:
    """Stores e4m3 of 16 slots, with one scale for the channels of all four warps."""
    own = [cute.arch.warp_redux_sync(Int32(ptx.as_u32(bf16_rows.magnitude(value))), "max") for value in hidden]
    if thread % 32 == 0:
        for i in cutlass.range_constexpr(0, CHUNK, 4):
            ptx.store_shared(largest + (warp * (CHUNK * 4) + i * 4), tuple(own[i : i + 4]))
    prims.barrier_cta_sync_aligned(NamedBarrier.EPILOGUE, thread_count=GROUP_THREADS)
    of_warps = [
        [
            value
            for i in range(0, CHUNK, 4)
            for value in ptx.load_shared_f32x4(largest + (of_warp * (CHUNK * 4) + i * 4))
        ]
        for of_warp in range(WARPS_OF_GROUP)
    ]
    width = a.row_tiles * TILE_ROWS
    for i in cutlass.range_constexpr(CHUNK):
        exponent = e4m3.scale_exponent(
            ptx.fmax(ptx.fmax(of_warps[0][i], of_warps[1][i]), ptx.fmax(of_warps[2][i], of_warps[3][i]))
        )
        code = e4m3.codes([hidden[i]] * 4, exponent)[0]
        if i < count:
            place = Int64(slot + i)
            ptx.asm("st.global.b8 [{$r0}], {$r1};", [], a.out + place * width + row_tile * TILE_ROWS + thread, code)
            if thread == 0:
                ptx.store_f32(a.out_scales + (place * a.row_tiles + row_tile) * 4, e4m3.scale_of(exponent))


def rounded(values: list) -> list:
    """Values rounded to bf16."""
    return bf16_rows.channels(bf16_rows.packed(values))


@cute.jit
def store_rows(a: Arguments, sums: list, slot: Int32, count: Int32, row_tile: Int32, thread: Int32) -> None:
    """Stores one output row of 16 slots, in bf16."""
    width = a.row_tiles * TILE_ROWS
    words = bf16_rows.packed(sums)
    for i in cutlass.range_constexpr(CHUNK):
        if i < count:
            address = a.out + (Int64(slot + i) * width + row_tile * TILE_ROWS + thread) * 2
            half = words[i // 2] if i % 2 == 0 else words[i // 2] >> 16
            ptx.asm("st.global.b16 [{$r0}], {$r1};", [], address, Uint32(half))
