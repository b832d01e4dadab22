"""The products of Hopper's experts for few tokens, a group of slots in each work tile.

With few slots `kernel.py` takes as long as one CTA needs for all of K: each step is a chain of a wait, a conversion,
`wgmma` and an addition, and a few experts do not have a work tile for every multiprocessor. Here work tiles have 64
rows, and a CTA has several warpgroups that share a work tile along K:

    WEIGHTS (2 warps)           wait empty[stage]; codes and shifts of 64 rows arrive at full[stage], and with the last
                                step the rows' factors, and routing weights and sources of the slots
    SLOTS (2 warps)             wait empty[stage]; codes and scales of the slots are gathered, or bf16 rows are
                                quantised; they arrive at full[stage]
    CONSUMER (n warpgroups)     warpgroup i multiplies the chunks i, i + n, ... of K: for each step waits full[stage],
                                keeps the products, arrives at empty[stage]; then waits given[i] for the sums of the
                                chunks before, arrives at taken[i]; adds its products step by step; waits taken[i + 1],
                                stores the sums, arrives at given[i + 1]. The last chunk's warpgroup finishes.

So the order of summation, and every bit, is that of `kernel.py`: products of 128 channels in four instructions, times
the slot's scale, added to the sum in fp32 in the order of K.

The second product begins to load weights before the launch before it has ended: it reads the work list, which is
complete when the first product begins, and weights, which no kernel writes (rule 1 of `dependent_launch`).
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels.device import bf16_rows, dependent_launch, e4m3, ptx
from dsv4_kernels.device.bf16_rows import CHUNK, CHUNK_BYTES, mul
from dsv4_kernels.device.tma import copy_bulk
from dsv4_kernels.moe.sm90.kernel import SLOTS_AT_ONCE, store_slot, weights_of
from dsv4_kernels.moe.sm90.plan import (
    FACTOR_BYTES,
    GROUP_BYTES,
    HALF_CODE_BYTES,
    HALF_ROWS,
    HALF_SHIFT_BYTES,
    SLOTS_BYTES,
    WARP,
    WARPGROUP,
    Arguments,
    FewPlan,
    Product,
)
from dsv4_kernels.moe.sm90.products import fragments, multiply
from dsv4_kernels.moe.sm90.weights import (
    CODE_BYTES,
    SHIFT_BYTES,
    STEP,
    TILE_ROWS,
    UNIT_BYTES,
    UNIT_ROWS,
    UNIT_SHIFT_BYTES,
)
from dsv4_kernels.moe.workspace import GROUP, TILE_WORDS, TileField

WARPS = WARPGROUP // WARP
HALVES = TILE_ROWS // HALF_ROWS
UNITS = STEP // 16
"""Units of 16 bytes of a slot's codes in a step."""
ROW_LANES = STEP // CHUNK
"""Lanes that quantise a slot's channels of a step."""
ROWS_AT_ONCE = WARP // ROW_LANES


@cute.jit
def launch(args: Arguments, num_ctas: Int32, plan: cutlass.Constexpr, stream: cuda.CUstream) -> None:
    """Launches the persistent kernel; num_ctas is at most the CTAs that are resident at once."""
    kernel(args, plan).launch(
        grid=[num_ctas, 1, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        preferred_smem_carveout=100,  # percent, so that CTAs of both products fit
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(args: Arguments, plan: cutlass.Constexpr) -> None:
    """Sets up barriers, and sends every warp to its role."""
    thread, _, _ = cute.arch.thread_idx()
    memory = cutlass.utils.SmemAllocator()
    shared = memory.allocate_array(Uint32, num_elems=plan.smem_bytes // 4, byte_alignment=1024)
    full, empty = (memory.allocate_array(Int64, num_elems=plan.stages, byte_alignment=8) for _ in range(2))
    given, taken = (memory.allocate_array(Int64, num_elems=plan.splits, byte_alignment=8) for _ in range(2))
    base = Int32(shared.toint())
    if thread < plan.stages:
        cute.arch.mbarrier_init(full + thread, 1 + (1 if plan.quantises else WARP))
        cute.arch.mbarrier_init(empty + thread, WARPS)
    if thread < plan.splits:
        cute.arch.mbarrier_init(given + thread, WARPS)
        cute.arch.mbarrier_init(taken + thread, WARPS)
    # Slots that do not exist are never loaded, but multiplied.
    for at in cutlass.range(thread * 16, plan.codes_offset, plan.threads * 16, unroll=1):
        ptx.store_shared(base + at, (Uint32(0),) * 4)
    for at in cutlass.range(thread * 4, plan.stages * SLOTS_BYTES, plan.threads * 4, unroll=1):
        ptx.store_shared_u32(base + plan.scales_offset + at, Uint32(0))
    cute.arch.fence_view_async_shared()  # these zeros, and the barriers
    cute.arch.sync_threads()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp >= plan.consumer_warps + plan.loading_warps:
        if cutlass.const_expr(plan.product is not Product.DOWN):
            dependent_launch.wait()
        with cute.arch.elect_one():
            load_weights(args, plan, base, full, empty, warp - (plan.consumer_warps + plan.loading_warps))
    else:
        if cutlass.const_expr(plan.product is not Product.DOWN):
            dependent_launch.begin()
        first, _, _ = cute.arch.block_idx()
        own = source_of(args, first // (args.row_tiles * HALVES), thread % WARP, Int32(1))
        end = listed(args.num_tiles, Int32(1)) * (args.row_tiles * HALVES)
        if cutlass.const_expr(plan.product is Product.DOWN):
            dependent_launch.begin()
        if warp < plan.consumer_warps:
            consume(args, plan, base, (full, empty, given, taken), thread, end)
        else:
            load_slots(args, plan, base, full, empty, warp - plan.consumer_warps, thread % WARP, own, end)


def listed(address: Int64, exists: Int32) -> Int32:
    """A number of the work list, or 0 unless `exists` is positive; from L2, because L1 may hold an earlier layer's
    list until this thread has waited."""
    return ptx.load_or_zeros(Int32, 1, address, exists, "gt.s32", cache=".cg")


def expert_of(args: Arguments, tile: Int32, exists: Int32) -> Int32:
    """The expert of a work tile, or 0 unless `exists` is positive."""
    return listed(args.tiles + Int64(tile) * (4 * TILE_WORDS) + 4 * TileField.EXPERT, exists)


def stage_at(plan: FewPlan, count: Int32) -> tuple:
    """(stage, phase of a consumer's wait) of the step that has number `count` among all steps of the CTA."""
    return count % plan.stages, count // plan.stages & 1


@cute.jit
def load_weights(
    args: Arguments, plan: cutlass.Constexpr, base: Int32, full: cute.Pointer, empty: cute.Pointer, of_warps: Int32
) -> None:
    """One thread issues the copies of every `loading_warps`-th chunk."""
    first, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    halves, chunks, count = args.row_tiles * HALVES, args.steps // plan.chunk, Int32(0)
    expert = expert_of(args, first // halves, Int32(1))  # under way together with the next load
    end = listed(args.num_tiles, Int32(1)) * halves
    for index in cutlass.range(first, end, stride, unroll=1):
        group = index // halves  # every work tile of the list has one group, so their numbers are the same
        half = index - group * halves
        codes, shifts = weights_of(args, expert, half // HALVES)
        codes += Int64(half % HALVES * HALF_CODE_BYTES)
        shifts += Int64(half % HALVES * HALF_SHIFT_BYTES)
        for chunk in cutlass.range(of_warps, chunks, plan.loading_warps, unroll=1):
            for i in cutlass.range(plan.chunk, unroll=1):
                step = chunk * plan.chunk + i
                at, phase = stage_at(plan, count + step)
                cute.arch.mbarrier_wait(empty + at, phase ^ 1)
                barrier = full + at
                arrival = Int32(barrier.toint())
                if step == args.steps - 1:
                    numbers = FACTOR_BYTES + SLOTS_BYTES * (2 if plan.product is Product.GATE_UP else 1)
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, HALF_CODE_BYTES + HALF_SHIFT_BYTES + numbers)
                    factors = args.factors + expert * args.factor_expert_bytes + Int64(half) * FACTOR_BYTES
                    copy_bulk(base + plan.factors_offset + at * FACTOR_BYTES, factors, FACTOR_BYTES, arrival)
                    source = args.source + Int64(group) * SLOTS_BYTES
                    copy_bulk(base + plan.source_offset + at * SLOTS_BYTES, source, SLOTS_BYTES, arrival)
                    if cutlass.const_expr(plan.product is Product.GATE_UP):
                        routing = args.routing + Int64(group) * SLOTS_BYTES
                        copy_bulk(base + plan.routing_offset + at * SLOTS_BYTES, routing, SLOTS_BYTES, arrival)
                else:
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, HALF_CODE_BYTES + HALF_SHIFT_BYTES)
                to = base + plan.codes_offset + at * HALF_CODE_BYTES
                copy_bulk(to, codes + Int64(step) * CODE_BYTES, HALF_CODE_BYTES, arrival)
                to = base + plan.shifts_offset + at * HALF_SHIFT_BYTES
                copy_bulk(to, shifts + Int64(step) * SHIFT_BYTES, HALF_SHIFT_BYTES, arrival)
        count += args.steps
        expert = expert_of(args, (index + stride) // halves, end - (index + stride))


@cute.jit
def load_slots(
    args: Arguments,
    plan: cutlass.Constexpr,
    base: Int32,
    full: cute.Pointer,
    empty: cute.Pointer,
    of_warps: Int32,
    lane: Int32,
    own: Int32,
    end: Int32,
) -> None:
    """One warp loads the slots of every `loading_warps`-th chunk."""
    first, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    halves, chunks, count = args.row_tiles * HALVES, args.steps // plan.chunk, Int32(0)
    for index in cutlass.range(first, end, stride, unroll=1):
        group = index // halves
        for chunk in cutlass.range(of_warps, chunks, plan.loading_warps, unroll=1):
            for i in cutlass.range(plan.chunk, unroll=1):
                step = chunk * plan.chunk + i
                at, phase = stage_at(plan, count + step)
                barrier = full + at
                slots, scales = base + at * GROUP_BYTES, base + plan.scales_offset + at * SLOTS_BYTES
                if cutlass.const_expr(plan.quantises):
                    rows = rows_of(args, plan, group, own, step, lane)
                    cute.arch.mbarrier_wait(empty + at, phase ^ 1)
                    for n in cutlass.range_constexpr(GROUP // ROWS_AT_ONCE):
                        # Slots that exist precede the others.
                        if cute.arch.shuffle_sync(own, n * ROWS_AT_ONCE) >= 0:
                            quantise(rows[n], n * ROWS_AT_ONCE + lane // ROW_LANES, lane % ROW_LANES, slots, scales)
                    cute.arch.fence_view_async_shared()  # these stores, before `wgmma` reads
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(barrier)
                else:
                    cute.arch.mbarrier_wait(empty + at, phase ^ 1)
                    gather(args, own, step, lane, slots, scales)
                    cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
        count += args.steps
        own = source_of(args, (index + stride) // halves, lane, end - (index + stride))


def source_of(args: Arguments, group: Int32, lane: Int32, exists: Int32) -> Int32:
    """The source of a lane's slot of a group, negative for a slot that does not exist and for lanes without a slot."""
    tested = cutlass.select_(lane < GROUP, exists, Int32(0))
    address = args.source + Int64(group * GROUP + lane) * 4
    return ptx.load_or_zeros(Int32, 1, address, tested, "gt.s32", cache=".cg", otherwise=0xFFFFFFFF)


@cute.jit
def gather(args: Arguments, own: Int32, step: Int32, lane: Int32, slots: Int32, scales: Int32) -> None:
    """Starts copies of the codes and scales of a step: 16 bytes of every fourth slot a lane."""
    unit = lane % UNITS
    for i in cutlass.range_constexpr(GROUP // SLOTS_AT_ONCE):
        slot = i * SLOTS_AT_ONCE + lane // UNITS
        source = cute.arch.shuffle_sync(own, slot)
        if source >= 0:
            row = args.tokens + Int64(source) * args.token_row_bytes + Int64(step) * STEP
            ptx.copy_async(slots + slot * STEP + (unit ^ slot) * 16, row + Int64(unit * 16), Int32(16))
    if own >= 0:
        scale = args.token_scales + Int64(own) * args.scale_row_bytes + Int64(step) * args.scale_step_bytes
        ptx.copy_4_bytes_async(scales + lane * 4, scale, Int32(4))


def rows_of(args: Arguments, plan: FewPlan, group: Int32, own: Int32, step: Int32, lane: Int32) -> list:
    """A lane's eight channels in a step of each second slot, as words of two bf16; zeros of slots that do not exist."""
    rows = []
    for n in range(GROUP // ROWS_AT_ONCE):
        slot = n * ROWS_AT_ONCE + lane // ROW_LANES
        source = cute.arch.shuffle_sync(own, slot)
        row = source if plan.product is Product.GATE_UP else group * GROUP + slot
        address = args.tokens + Int64(row) * args.token_row_bytes
        address += Int64((step * ROW_LANES + lane % ROW_LANES) * CHUNK_BYTES)
        rows.append(ptx.load_or_zeros(Uint32, 4, address, source, "ge.s32", cache=""))
    return rows


@cute.jit
def quantise(words: tuple, slot: Int32, chunk: Int32, slots: Int32, scales: Int32) -> None:
    """Stores e4m3 codes of a lane's channels and, by one lane of a slot, its scale; the numbers of `rows.quantise`."""
    values = bf16_rows.channels(words)
    exponent = e4m3.scale_exponent(bf16_rows.max_over_lanes(e4m3.largest(values), ROW_LANES))
    place = slots + slot * STEP + ((chunk // 2) ^ slot) * 16 + chunk % 2 * 8
    codes = e4m3.codes(values, exponent)
    ptx.asm("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", [], place, *codes)
    if chunk == 0:
        ptx.store_shared_f32(scales + slot * 4, e4m3.scale_of(exponent))


@cute.jit
def consume(args: Arguments, plan: cutlass.Constexpr, base: Int32, barriers: tuple, thread: Int32, end: Int32) -> None:
    """A warpgroup multiplies its chunks of every work tile."""
    full, empty, given, taken = barriers
    first, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    lane, unit, split = thread % WARP, thread // WARP % WARPS, thread // WARPGROUP
    next_split = (split + 1) % plan.splits
    own_sums, next_sums = (
        base + plan.sums_offset + (n * WARPGROUP + thread % WARPGROUP) * 16 for n in (split, next_split)
    )
    halves, chunks, count = args.row_tiles * HALVES, args.steps // plan.chunk, Int32(0)
    received, sent = Int32(0), Int32(0)
    products = cute.make_rmem_tensor((4 * plan.chunk,), Float32)
    scales = cute.make_rmem_tensor((2 * plan.chunk,), Float32)
    sums = cute.make_rmem_tensor((4,), Float32)
    for index in cutlass.range(first, end, stride, unroll=1):
        group = index // halves
        for chunk in cutlass.range(split, chunks, plan.splits, unroll=1):
            is_last = chunk == chunks - 1
            of_rows, of_slots, sources = (Float32(0.0),) * 2, (Float32(0.0),) * 2, (Int32(-1),) * 2
            for i in cutlass.range_constexpr(plan.chunk):
                at, phase = stage_at(plan, count + chunk * plan.chunk + i)
                cute.arch.mbarrier_wait(full + at, phase)
                if cutlass.const_expr(not plan.quantises):
                    cute.arch.fence_view_async_shared()  # cp.async has written what `wgmma` reads
                codes = base + plan.codes_offset + at * HALF_CODE_BYTES + unit * UNIT_BYTES
                shifts = base + plan.shifts_offset + at * HALF_SHIFT_BYTES + unit * UNIT_SHIFT_BYTES
                found = multiply(fragments(codes, shifts, lane), GROUP, base + at * GROUP_BYTES)
                for n in cutlass.range_constexpr(4):
                    products[4 * i + n] = found[n]
                pair = ptx.load_shared_f32x2(base + plan.scales_offset + at * SLOTS_BYTES + lane % 4 * 8)
                scales[2 * i], scales[2 * i + 1] = pair[0], pair[1]
                if cutlass.const_expr(i == plan.chunk - 1):
                    if is_last:
                        of_rows, of_slots, sources = numbers_of(plan, base, at, unit, lane)
                cute.arch.fence_view_async_shared()  # generic loads, before a bulk copy writes there
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(empty + at)
            sums.fill(0.0)
            if chunk > 0:
                cute.arch.mbarrier_wait(given + split, received & 1)
                received += 1
                before = ptx.load_shared_f32x4(own_sums)
                for n in cutlass.range_constexpr(4):
                    sums[n] = before[n]
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(taken + split)
            for i in cutlass.range_constexpr(plan.chunk):
                for n in cutlass.range_constexpr(4):
                    sums[n] = ptx.fma(products[4 * i + n], scales[2 * i + n % 2], sums[n])
            if is_last:
                half = index - group * halves
                for b in cutlass.range_constexpr(2):
                    if sources[b] >= 0:
                        place = half // HALVES, half % HALVES * WARPS + unit, lane
                        pair = mul(sums[b], of_rows[0]), mul(sums[2 + b], of_rows[1])
                        store_slot(args, plan.product, place, group * GROUP + lane % 4 * 2 + b, pair, of_slots[b])
            else:
                cute.arch.mbarrier_wait(taken + next_split, (sent & 1) ^ 1)
                sent += 1
                ptx.store_shared_f32x4(next_sums, tuple(sums[n] for n in range(4)))
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(given + next_split)
        count += args.steps


def numbers_of(plan: FewPlan, base: Int32, at: Int32, unit: Int32, lane: Int32) -> tuple:
    """(factors of the lane's two rows, routing weights of its two slots, their sources) of a work tile's last step."""
    factors = base + plan.factors_offset + at * FACTOR_BYTES + (unit * UNIT_ROWS + lane // 4) * 4
    of_rows = ptx.load_shared_f32(factors), ptx.load_shared_f32(factors + 4 * (UNIT_ROWS // 2))
    of_slots = Float32(0.0), Float32(0.0)
    if plan.product is Product.GATE_UP:
        of_slots = ptx.load_shared_f32x2(base + plan.routing_offset + at * SLOTS_BYTES + lane % 4 * 8)
    sources = base + plan.source_offset + at * SLOTS_BYTES + lane % 4 * 8
    of_sources = ptx.asm("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", [Int32] * 2, sources)
    return of_rows, tuple(of_slots), tuple(of_sources)
