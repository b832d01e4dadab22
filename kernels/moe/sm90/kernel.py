"""Routed experts on Hopper (sm_90a): e4m3 activations times MXFP4 weights, grouped by expert.

A slot is a pair of token and expert; eight slots of one expert are a group, and up to 4, 8 or 28 groups share a work
tile with 128 weight rows. Weights are the left operand of `wgmma`, unpacked in registers from four bits to e4m3, scales
included (weights.py); slots are the narrow right operand. All inputs have the same layout in global memory as in shared
memory, so one thread copies them by bulk copies, some stages ahead of the products and across work tiles:

    PRODUCER (1 thread)      waits empty[stage]; weights, slots and their scales arrive at full[stage]
    CONSUMER (2 warpgroups)  64 rows each: waits full[stage], arrives at empty[stage]

If the plan `gathers`, the slots are in no such order: the producer is a warp, and its lanes gather them from rows of
tokens by `cp.async`.

A step of K uses one stage. If the shape is `paired`, a step of a work tile that is wider than a stage's room uses two
adjacent stages, the first of them even (such work tiles are listed only if products have an even number of steps).

Persistent CTAs compute work tiles in order: all tokens of an expert with its first 128 rows, then with the next, so
weights that two work tiles need come from L2 the second time. The number of work tiles is in global memory.

The order of summation depends on K alone: 128 channels in four instructions, times the slot's scale, added to the sum
in fp32. N does not change a column, so a slot's bits depend neither on its neighbours nor on their number.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.device.bf16_rows import mul
from dsv4_kernels.device.pipeline import Stage, first_to_fill, first_to_read, following, wrapped
from dsv4_kernels.device.tma import copy_bulk
from dsv4_kernels.moe.activation import swiglu
from dsv4_kernels.moe.sm90.plan import (
    CHANNELS,
    CONSUMER_WARPS,
    GROUP_BYTES,
    WARP,
    Arguments,
    Plan,
    Product,
)
from dsv4_kernels.moe.sm90.products import LEFT_WORDS, fragments, multiply, multiply_and_convert
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

SLOTS_AT_ONCE = 4
"""Slots of which a warp copies 128 bytes each with one instruction."""


@cute.jit
def launch(args: Arguments, num_ctas: Int32, plan: cutlass.Constexpr, stream: cuda.CUstream) -> None:
    """Launches the persistent kernel; num_ctas is at most the CTAs that are resident at once."""
    kernel(args, plan).launch(
        grid=[num_ctas, 1, 1],
        block=[plan.shape.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=plan.shape.ctas_per_sm,
        preferred_smem_carveout=100,  # percent, so that the planned CTAs fit
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(args: Arguments, plan: cutlass.Constexpr) -> None:
    """Sets up barriers, and sends every warp to its role."""
    thread, _, _ = cute.arch.thread_idx()
    first, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    memory = cutlass.utils.SmemAllocator()
    shared = memory.allocate_array(Uint32, num_elems=plan.smem_bytes // 4, byte_alignment=1024)
    full = memory.allocate_array(Int64, num_elems=plan.shape.stages, byte_alignment=8)
    empty = memory.allocate_array(Int64, num_elems=plan.shape.stages, byte_alignment=8)
    base = Int32(shared.toint())
    if thread == 0:
        for stage in cutlass.range_constexpr(plan.shape.stages):
            cute.arch.mbarrier_init(full + stage, 1 + (WARP if plan.gathers else 0))
            cute.arch.mbarrier_init(empty + stage, CONSUMER_WARPS)
    # Columns of an instruction beyond a work tile's last slot multiply this memory, which must be initialised.
    for at in cutlass.range(thread * 16, plan.codes_offset, plan.shape.threads * 16, unroll=1):
        ptx.store_shared(base + at, (Uint32(0),) * 4)
    cute.arch.fence_view_async_shared()  # these zeros, and the barriers
    cute.arch.sync_threads()
    dependent_launch.begin()
    end = ptx.load_i32(args.num_tiles) * args.row_tiles
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < CONSUMER_WARPS:
        if cutlass.const_expr(plan.shape.registers is not None):
            cute.arch.setmaxregister_increase(plan.shape.registers[0])
        consume(args, plan, base, full, empty, thread, first, stride, end)
    else:
        if cutlass.const_expr(plan.shape.registers is not None):
            cute.arch.setmaxregister_decrease(plan.shape.registers[1])
        if warp == CONSUMER_WARPS:
            if cutlass.const_expr(plan.gathers):
                gather(args, plan, base, full, empty, thread % WARP, first, stride, end)
            else:
                with cute.arch.elect_one():
                    produce(args, plan, base, full, empty, first, stride, end)


@cute.jit
def work_tile(args: Arguments, index: Int32) -> tuple:
    """(row tile, expert, first group, groups) of a work tile by its number."""
    tile = index // args.row_tiles  # a work tile of the same expert
    address = args.tiles + Int64(tile) * (4 * TILE_WORDS)
    run_first = ptx.load_i32(address + 4 * TileField.RUN_FIRST)
    run_tiles = ptx.load_i32(address + 4 * TileField.RUN_TILES)
    within = index - run_first * args.row_tiles
    row_tile = within // run_tiles
    address = args.tiles + Int64(run_first + within - row_tile * run_tiles) * (4 * TILE_WORDS)
    expert, first_group = (ptx.load_i32(address + 4 * field) for field in (TileField.EXPERT, TileField.FIRST_GROUP))
    return row_tile, expert, first_group, ptx.load_i32(address + 4 * TileField.GROUPS)


def weights_of(args: Arguments, expert: Int32, row_tile: Int32) -> tuple:
    """Addresses of the codes and of the shifts of 128 rows of an expert."""
    codes = args.codes + (Int64(expert) * args.row_tiles + row_tile) * args.steps * CODE_BYTES
    return codes, args.shifts + expert * args.shift_expert_bytes + Int64(row_tile) * args.steps * SHIFT_BYTES


@cute.jit
def produce(
    args: Arguments,
    plan: cutlass.Constexpr,
    base: Int32,
    full: cute.Pointer,
    empty: cute.Pointer,
    first: Int32,
    stride: Int32,
    end: Int32,
) -> None:
    """One thread issues all copies, stage after stage."""
    stage = first_to_fill()
    for index in cutlass.range(first, end, stride, unroll=1):
        row_tile, expert, first_group, groups = work_tile(args, index)
        codes, shifts = weights_of(args, expert, row_tile)
        before = Int64(first_group) * args.steps
        tokens, scales = args.tokens + before * GROUP_BYTES, args.token_scales + before * (4 * GROUP)
        sources = codes, shifts, tokens, scales
        if cutlass.const_expr(plan.shape.paired):
            # Two loops: a branch in every step of a single loop cost decode 2 % of its time.
            if groups * GROUP > plan.shape.room:
                stage = copy_steps(args, plan, 2, base, full, empty, stage, sources, groups)
            else:
                stage = copy_steps(args, plan, 1, base, full, empty, stage, sources, groups)
        else:
            stage = copy_steps(args, plan, 1, base, full, empty, stage, sources, groups)


@cute.jit
def copy_steps(
    args: Arguments,
    plan: cutlass.Constexpr,
    stages: cutlass.Constexpr[int],
    base: Int32,
    full: cute.Pointer,
    empty: cute.Pointer,
    stage: Stage,
    sources: tuple,
    groups: Int32,
) -> Stage:
    """Issues the copies of a work tile whose steps use `stages` stages; returns the stage after it.

    With two stages, the tokens extend into the second stage, whose weight codes are not used.
    """
    codes, shifts, tokens, scales = sources
    token_bytes, scale_bytes = groups * GROUP_BYTES, groups * (4 * GROUP)
    for step in cutlass.range(args.steps, unroll=1):
        at = stage.index
        cute.arch.mbarrier_wait(empty + at + (stages - 1), stage.phase)  # warps give stages back in order
        for other in cutlass.range_constexpr(1, stages):
            cute.arch.mbarrier_arrive(full + at + other)
        barrier = full + at
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, CODE_BYTES + SHIFT_BYTES + token_bytes + scale_bytes)
        arrival = Int32(barrier.toint())
        copy_bulk(base + plan.codes_offset + at * CODE_BYTES, codes + Int64(step) * CODE_BYTES, CODE_BYTES, arrival)
        copy_bulk(base + plan.shifts_offset + at * SHIFT_BYTES, shifts + step * SHIFT_BYTES, SHIFT_BYTES, arrival)
        copy_bulk(base + at * plan.token_bytes, tokens + Int64(step) * token_bytes, token_bytes, arrival)
        to_scales = base + plan.scales_offset + at * (4 * plan.shape.room)
        copy_bulk(to_scales, scales + Int64(step) * scale_bytes, scale_bytes, arrival)
        stage = following(stage, plan.shape.stages, stages)
    return stage


@cute.jit
def gather(
    args: Arguments,
    plan: cutlass.Constexpr,
    base: Int32,
    full: cute.Pointer,
    empty: cute.Pointer,
    lane: Int32,
    first: Int32,
    stride: Int32,
    end: Int32,
) -> None:
    """One warp issues all copies of a stage: one lane copies the weights, every lane 16 bytes of each fourth slot and a
    slot's scale."""
    unit, sources = lane % (STEP // 16), cute.make_rmem_tensor((plan.shape.slots // SLOTS_AT_ONCE,), Int32)
    stage = first_to_fill()
    for index in cutlass.range(first, end, stride, unroll=1):
        row_tile, expert, first_group, groups = work_tile(args, index)
        codes, shifts = weights_of(args, expert, row_tile)
        slots, listed = groups * GROUP, args.source + Int64(first_group) * (4 * GROUP)
        for i in cutlass.range_constexpr(plan.shape.slots // SLOTS_AT_ONCE):
            slot = i * SLOTS_AT_ONCE + lane // (STEP // 16)
            sources[i] = source_of(listed, slot, slots)
        own = source_of(listed, lane, slots)
        for step in cutlass.range(args.steps, unroll=1):
            at = stage.index
            cute.arch.mbarrier_wait(empty + at, stage.phase)
            barrier = full + at
            arrival = Int32(barrier.toint())
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, CODE_BYTES + SHIFT_BYTES)
                copy_bulk(
                    base + plan.codes_offset + at * CODE_BYTES, codes + Int64(step) * CODE_BYTES, CODE_BYTES, arrival
                )
                copy_bulk(
                    base + plan.shifts_offset + at * SHIFT_BYTES, shifts + step * SHIFT_BYTES, SHIFT_BYTES, arrival
                )
            for i in cutlass.range_constexpr(plan.shape.slots // SLOTS_AT_ONCE):
                slot = i * SLOTS_AT_ONCE + lane // (STEP // 16)
                if slot < slots:
                    to = base + at * plan.token_bytes + slot * STEP + (unit ^ (slot % GROUP)) * 16
                    row = args.tokens + Int64(step) * STEP + unit * 16
                    ptx.copy_async(to, *of_source(row, sources[i], args.token_row_bytes, 16))
            if lane < slots:
                to = base + plan.scales_offset + (at * plan.shape.room + lane) * 4
                scale = args.token_scales + Int64(step) * args.scale_step_bytes
                ptx.copy_4_bytes_async(to, *of_source(scale, own, args.scale_row_bytes, 4))
            cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
            stage = following(stage, plan.shape.stages)


def source_of(listed: Int64, slot: Int32, slots: Int32) -> Int32:
    """The token of a slot of a work tile; negative for a slot that pads or does not exist."""
    return ptx.load_or_zeros(Int32, 1, listed + slot * 4, slots - slot, "gt.s32", cache="", otherwise=0xFFFFFFFF)


def of_source(begin: Int64, source: Int32, row_bytes: Int64, num_bytes: int) -> tuple:
    """(address, bytes to copy) of a token's part of a step: no bytes, for zeros, without a token."""
    exists = source >= 0
    address = begin + Int64(source) * row_bytes
    return cutlass.select_(exists, address, begin), cutlass.select_(exists, Int32(num_bytes), Int32(0))


@cute.jit
def consume(
    args: Arguments,
    plan: cutlass.Constexpr,
    base: Int32,
    full: cute.Pointer,
    empty: cute.Pointer,
    thread: Int32,
    first: Int32,
    stride: Int32,
    end: Int32,
) -> None:
    """A consumer warpgroup computes 64 rows of every work tile."""
    lane, unit = thread % WARP, thread // WARP
    barriers = full, empty
    sum_all = sum_products_ahead if plan.shape.ahead else sum_products
    stage = first_to_read()
    for index in cutlass.range(first, end, stride, unroll=1):
        row_tile, expert, first_group, groups = work_tile(args, index)
        least = 0
        for width in cutlass.range_constexpr(len(plan.shape.widths)):
            slots = plan.shape.widths[width]
            if (groups * GROUP > least) & (groups * GROUP <= slots):
                sums = cute.make_rmem_tensor((slots // 2,), Float32)
                sums.fill(0.0)
                sum_all(args.steps, plan, slots, base, barriers, lane, unit, stage, sums)
                finish(args, plan, slots, lane, unit, (row_tile, expert, first_group, groups), sums)
            least = slots
        index_after = stage.index + args.steps
        if cutlass.const_expr(plan.shape.paired):
            if groups * GROUP > plan.shape.room:
                index_after += args.steps
        stage = wrapped(index_after, stage.phase, plan.shape.stages)


def places_of(plan: Plan, base: Int32, lane: Int32, unit: Int32) -> tuple:
    """Addresses in the first stage: (a warp's codes, a warp's shifts, a lane's scales of its slots)."""
    codes = base + plan.codes_offset + unit * UNIT_BYTES
    shifts = base + plan.shifts_offset + unit * UNIT_SHIFT_BYTES
    return codes, shifts, base + plan.scales_offset + lane % 4 * 8


@cute.jit
def sum_products(
    steps: Int32,
    plan: cutlass.Constexpr,
    slots: cutlass.Constexpr[int],
    base: Int32,
    barriers: tuple,
    lane: Int32,
    unit: Int32,
    stage: Stage,
    sums: cute.Tensor,
) -> None:
    """Sums the products over all of K. Element 4 j + 2 h + b of a lane has row lane // 4 + 8 h of its warp's unit, and
    slot 8 j + 2 (lane % 4) + b of the work tile."""
    full, empty = barriers
    codes, shifts, scales = places_of(plan, base, lane, unit)
    for _ in cutlass.range(steps, unroll=1):
        at = stage.index
        cute.arch.mbarrier_wait(full + at, stage.phase)
        if cutlass.const_expr(plan.gathers):
            cute.arch.fence_view_async_shared()  # cp.async has written what `wgmma` reads
        left = fragments(codes + at * CODE_BYTES, shifts + at * SHIFT_BYTES, lane)
        of_slots = scales + at * (4 * plan.shape.room)
        # A work tile of two stages in two halves, because registers do not hold all of its products.
        width = slots // plan.shape.stages_of(slots)
        for first in cutlass.range_constexpr(0, slots, width):
            products = multiply(left, width, base + at * plan.token_bytes + first * STEP)
            add_scaled(sums, products, first, of_slots)
        give_back(plan, empty, lane, at, plan.shape.stages_of(slots))
        stage = following(stage, plan.shape.stages, plan.shape.stages_of(slots))


@cute.jit
def sum_products_ahead(
    steps: Int32,
    plan: cutlass.Constexpr,
    slots: cutlass.Constexpr[int],
    base: Int32,
    barriers: tuple,
    lane: Int32,
    unit: Int32,
    stage: Stage,
    sums: cute.Tensor,
) -> None:
    """Sums like `sum_products`, but converts the codes of a step while the products of the previous step run."""
    full = barriers[0]
    codes, shifts, _ = places = places_of(plan, base, lane, unit)
    even, odd = (cute.make_rmem_tensor((LEFT_WORDS,), Uint32) for _ in range(2))
    cute.arch.mbarrier_wait(full + stage.index, stage.phase)
    converted = fragments(codes + stage.index * CODE_BYTES, shifts + stage.index * SHIFT_BYTES, lane)
    for i in cutlass.range_constexpr(LEFT_WORDS):
        even[i] = converted[i]
    for pair in cutlass.range((steps + 1) // 2, unroll=1):
        # Two alternating sets of registers: with one set, ptxas would serialise the instructions.
        left = steps - 2 * pair - 1
        stage = step_ahead(plan, slots, base, places, barriers, lane, stage, sums, even, odd, left > 0)
        if left > 0:
            stage = step_ahead(plan, slots, base, places, barriers, lane, stage, sums, odd, even, left > 1)


@cute.jit
def step_ahead(
    plan: cutlass.Constexpr,
    slots: cutlass.Constexpr[int],
    base: Int32,
    places: tuple,
    barriers: tuple,
    lane: Int32,
    stage: Stage,
    sums: cute.Tensor,
    left: cute.Tensor,
    next_left: cute.Tensor,
    has_next: Boolean,
) -> Stage:
    """Adds a step's products and converts the next step's codes; returns the next stage."""
    (codes, shifts, scales), (full, empty) = places, barriers
    next_stage = following(stage, plan.shape.stages, plan.shape.stages_of(slots))
    source = stage.index  # after the last step nothing is left to convert: the same codes again, unused
    if has_next:
        cute.arch.mbarrier_wait(full + next_stage.index, next_stage.phase)
        source = next_stage.index
    converted = multiply_and_convert(
        [left[i] for i in range(LEFT_WORDS)],
        slots,
        base + stage.index * plan.token_bytes,
        scales + stage.index * (4 * plan.shape.room),
        codes + source * CODE_BYTES + lane * 16,
        shifts + source * SHIFT_BYTES + lane // 4 * 4,
        sums,
    )
    for i in cutlass.range_constexpr(LEFT_WORDS):
        next_left[i] = converted[i]
    give_back(plan, empty, lane, stage.index, plan.shape.stages_of(slots))
    return next_stage


@cute.jit
def give_back(
    plan: cutlass.Constexpr, empty: cute.Pointer, lane: Int32, stage: Int32, stages: cutlass.Constexpr[int]
) -> None:
    """Signals that this warp has read `stages` stages."""
    cute.arch.fence_view_async_shared()  # generic loads, before a bulk copy writes there
    cute.arch.sync_warp()
    if lane == 0:
        for i in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_arrive(empty + stage + i)


def add_scaled(sums: cute.Tensor, products: list, first: int, scales: Int32) -> None:
    """Adds a step's products of the slots from `first` on, each times the scale of its slot."""
    for j in range(len(products) // 4):
        at = first // 2 + 4 * j
        pair = ptx.load_shared_f32x2(scales + 4 * first + j * (4 * GROUP))
        for i in range(4):
            sums[at + i] = ptx.fma(products[4 * j + i], pair[i % 2], sums[at + i])


@cute.jit
def finish(
    args: Arguments,
    plan: cutlass.Constexpr,
    slots: cutlass.Constexpr[int],
    lane: Int32,
    unit: Int32,
    place: tuple,
    sums: cute.Tensor,
) -> None:
    """Multiplies by the rows' factors, and stores a work tile's part of h or of the output rows.

    Args:
        args, plan: arguments of the kernel.
        slots: the most slots of the work tile.
        lane: index of the thread in its warp.
        unit: index of the warp's 16 rows in the work tile.
        place: (row tile, expert, first group, number of groups).
        sums: result of `sum_products`.
    """
    row_tile, expert, first_group, groups = place
    row = row_tile * TILE_ROWS + unit * UNIT_ROWS + lane // 4
    factor = args.factors + expert * args.factor_expert_bytes + row * 4
    upper, lower = ptx.load_f32(factor), ptx.load_f32(factor + 4 * (UNIT_ROWS // 2))
    for j in cutlass.range_constexpr(slots // 8):
        if j < groups:
            for b in cutlass.range_constexpr(2):
                slot = Int64(first_group * GROUP + 8 * j + lane % 4 * 2 + b)
                pair = mul(sums[4 * j + b], upper), mul(sums[4 * j + 2 + b], lower)
                weight = Float32(0.0)
                if cutlass.const_expr(plan.product is Product.GATE_UP):
                    weight = ptx.load_f32(args.routing + slot * 4)
                store_slot(args, plan.product, (row_tile, unit, lane), slot, pair, weight)


@cute.jit
def store_slot(
    args: Arguments,
    product: cutlass.Constexpr[Product],
    place: tuple,
    slot: Int32 | Int64,
    pair: tuple,
    weight: Float32,
) -> None:
    """Stores a lane's channel of h, or its two neighbouring channels of an output row, of a slot.

    Args:
        args: arguments of the kernel.
        product: the product.
        place: (row tile, index of the warp's 16 rows in it, lane).
        slot: the slot.
        pair: the products of the lane's upper and lower row.
        weight: routing weight of the slot, for GATE_UP.
    """
    row_tile, unit, lane = place
    first, second = pair
    slot = Int64(slot)
    if cutlass.const_expr(product is Product.GATE_UP):
        h = mul(weight, swiglu(rounded(first), rounded(second), args.limit))
        channel = row_tile * CHANNELS + unit * (UNIT_ROWS // 2) + lane // 4
        ptx.store_bf16(args.out + (slot * args.row_tiles * CHANNELS + channel) * 2, h)
    else:
        channel = row_tile * TILE_ROWS + unit * UNIT_ROWS + lane // 4 * 2
        address = args.out + (slot * args.row_tiles * TILE_ROWS + channel) * 2
        ptx.store_u32(address, ptx.pack_bf16(first, second))


def rounded(x: Float32) -> Float32:
    """x rounded to bf16, like the output of a product."""
    return ptx.as_f32(ptx.pack_bf16(Float32(0.0), x) & 0xFFFF0000)
