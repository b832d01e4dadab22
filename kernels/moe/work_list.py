"""The assignment of slots to pairs of token and expert, and the list of work tiles, without the host.

Slots of an expert begin at a multiple of eight, a group; the last group is padded with empty slots. The slot of a pair
among its expert's slots depends on timing (a counter in shared memory). The result does not: a slot's numbers do not
depend on its index, and `sums.kernel` finds a token's slots by pair. One kernel serves Hopper and Blackwell.

Few pairs are one CTA's. The writes of many go to scattered sectors, of which a multiprocessor writes about one a clock:
49,152 pairs of a prefill chunk took one CTA 116 us. A cluster shares them out. Each CTA counts its own pairs, reads the
counts of the others, and gives its pairs the slots after those of the CTAs before it.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, const_expr
from torch import Tensor

from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.device.bf16_rows import WARP
from dsv4_kernels.device.joint_kernel import Cta, cta_of_launch, sync_threads
from dsv4_kernels.device.warp import prefix_sum
from dsv4_kernels.host import joint_launch
from dsv4_kernels.host.joint_launch import CHAIN_THREADS, Part
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.moe.workspace import GROUP, TILE_WORDS, TileField, most_groups

THREADS = CHAIN_THREADS
MAX_EXPERTS = THREADS
"""Experts of a rank at most: one a thread."""
CLUSTER = 8
"""CTAs that share many pairs out."""
AT_ONCE = {1: 8, CLUSTER: 2}
"""CTAs -> pairs that a thread loads at a time."""
MOST_OF_ONE_CTA = THREADS * AT_ONCE[1]
"""Most pairs of a single CTA."""
EMPTY = -1
"""Source of a slot that pads a group, and slot of a pair whose expert is on another rank."""
SUMS = 3
"""Numbers that are summed over all experts: groups, and work tiles of either width."""
NEVER = (1 << 31) - 1
"""Fewest paired work tiles of a list that has none."""


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel; addresses are Int64."""

    experts: Int64  # int32 [pairs], among all experts
    weights: Int64  # fp32 [pairs]
    num_pairs: Int32
    chosen: Int32  # experts of a token
    num_experts: Int32  # experts of this rank
    first_expert: Int32
    tile_groups: Int32  # groups of the widest work tile whose steps use one stage
    paired_groups: Int32  # groups of the widest work tile of two stages; tile_groups if there is none
    least_tiles: Int32  # paired tiles are listed if there are at least this many
    slot_of_pair: Int64  # int32 [pairs]; EMPTY: the expert is on another rank
    source: Int64  # int32 [slots]: token; EMPTY: padding
    routing: Int64  # fp32 [slots]
    group_tile: Int64  # int32 [groups]: work tile of the group
    tiles: Int64  # int32 [tiles, TILE_WORDS]
    totals: Int64  # int32 [2]: work tiles, groups


@cute.jit
def launch(args: Arguments, ctas: cutlass.Constexpr[int], stream: cuda.CUstream) -> None:
    """Launches one CTA, or one cluster."""
    kernel(args, ctas).launch(
        grid=[ctas, 1, 1],
        cluster=[ctas, 1, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(args: Arguments, ctas: cutlass.Constexpr[int]) -> None:
    """The kernel of a launch of its own."""
    body(args, ctas, (), cta_of_launch())


@cute.jit
def body(args: Arguments, ctas: cutlass.Constexpr[int], prepared: tuple, cta: cutlass.Constexpr[Cta]) -> None:
    """Counts pairs, sums groups and work tiles over experts, and assigns slots.

    Args:
        args: of the launch.
        ctas: of the cluster that shares the pairs out; 1 for a CTA with all of them.
        prepared: nothing.
        cta: this CTA.
    """
    thread, _, _ = cute.arch.thread_idx()
    memory = cutlass.utils.SmemAllocator()
    # For each expert: this CTA's number of its pairs, then the next free slot of this CTA's pairs.
    counts = Int32(memory.allocate_array(Int32, num_elems=MAX_EXPERTS, byte_alignment=16).toint())
    next_slots = counts
    if const_expr(ctas > 1):  # the other CTAs read the counts
        next_slots = Int32(memory.allocate_array(Int32, num_elems=MAX_EXPERTS, byte_alignment=16).toint())
    warp_sums = Int32(memory.allocate_array(Int32, num_elems=SUMS * WARP, byte_alignment=16).toint())
    ours = counts + thread * 4
    ptx.store_shared_u32(ours, Int32(0))
    sync_threads(cta.threads)
    dependent_launch.begin()
    rank = cta.number if const_expr(ctas > 1) else Int32(0)
    at_once = AT_ONCE[ctas]
    for first in cutlass.range(rank * (THREADS * at_once), args.num_pairs, ctas * THREADS * at_once, unroll=1):
        pairs = [first + thread + i * THREADS for i in range(at_once)]
        experts = [local_expert(args, pair) for pair in pairs]
        for i in cutlass.range_constexpr(at_once):
            if experts[i] >= 0:
                count_one(counts + experts[i] * 4)
    count, count_before = Int32(0), Int32(0)  # of the cluster's pairs, and of the pairs of CTAs before this one
    if const_expr(ctas > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        for other in cutlass.range_constexpr(ctas):
            of_other = ptx.load_cluster_i32(ptx.remote(ours, Int32(other)))
            count += of_other
            count_before += cutlass.select_(other < rank, of_other, Int32(0))
        cute.arch.cluster_arrive_relaxed()
    else:
        sync_threads(cta.threads)
        count = load_shared_i32(ours)
    groups = (count + (GROUP - 1)) // GROUP
    own = tuple((groups + (width - 1)) // width for width in (args.tile_groups, args.paired_groups))
    before, of_all = sums_before(warp_sums, thread, (groups, *own), cta.threads)
    groups_before, tiles, tiles_before, all_groups, all_tiles = before[0], own[0], before[1], of_all[0], of_all[1]
    if of_all[2] >= args.least_tiles:
        tiles, tiles_before, all_tiles = own[1], before[2], of_all[2]
    if (thread == 0) & (rank == 0):
        ptx.store_i32(args.totals, all_tiles)
        ptx.store_i32(args.totals + 4, all_groups)
    # An expert's own thread has read its count.
    ptx.store_shared_u32(next_slots + thread * 4, groups_before * GROUP + count_before)
    sync_threads(cta.threads)
    if (groups > 0) & (thread % ctas == rank):
        list_tiles(args, thread, groups_before, groups, tiles_before, tiles)
        for filler in cutlass.range(groups_before * GROUP + count, (groups_before + groups) * GROUP, unroll=1):
            ptx.store_i32(args.source + Int64(filler) * 4, Int32(EMPTY))
            ptx.store_i32(args.routing + Int64(filler) * 4, Int32(0))
    for first in cutlass.range(rank * (THREADS * at_once), args.num_pairs, ctas * THREADS * at_once, unroll=1):
        pairs = [first + thread + i * THREADS for i in range(at_once)]
        experts = [local_expert(args, pair) for pair in pairs]
        weights = [
            ptx.load_or_zeros(Int32, 1, args.weights + Int64(pair) * 4, args.num_pairs - pair, "gt.s32", cache="")
            for pair in pairs
        ]
        for i in cutlass.range_constexpr(at_once):
            if pairs[i] < args.num_pairs:
                slot = Int32(EMPTY)
                if experts[i] >= 0:
                    slot = count_one(next_slots + experts[i] * 4)
                    ptx.store_i32(args.source + Int64(slot) * 4, pairs[i] // args.chosen)
                    ptx.store_i32(args.routing + Int64(slot) * 4, weights[i])
                ptx.store_i32(args.slot_of_pair + Int64(pairs[i]) * 4, slot)
    if const_expr(ctas > 1):
        cute.arch.cluster_wait()  # the other CTAs have read this CTA's counts


def local_expert(args: Arguments, pair: Int32) -> Int32:
    """The expert of a pair, as an index among this rank's; -1 for another rank's expert or a missing pair."""
    exists = args.num_pairs - pair
    expert = ptx.load_or_zeros(Int32, 1, args.experts + Int64(pair) * 4, exists, "gt.s32", cache="")
    local = expert - args.first_expert
    return cutlass.select_((exists > 0) & (local >= 0) & (local < args.num_experts), local, Int32(-1))


@cute.jit
def list_tiles(args: Arguments, expert: Int32, first_group: Int32, groups: Int32, first: Int32, tiles: Int32) -> None:
    """Lists the work tiles of an expert and the work tile of each group, by one thread; widths differ by at most one
    group."""
    least, wider = groups // tiles, groups % tiles
    group = first_group
    for i in cutlass.range(tiles, unroll=1):
        width = least
        if i < wider:
            width += 1
        address = args.tiles + Int64(first + i) * (4 * TILE_WORDS)
        fields = {
            TileField.EXPERT: expert,
            TileField.FIRST_GROUP: group,
            TileField.GROUPS: width,
            TileField.RUN_FIRST: first,
            TileField.RUN_TILES: tiles,
        }
        for field, value in fields.items():
            ptx.store_i32(address + 4 * field, value)
        for j in cutlass.range(width, unroll=1):
            ptx.store_i32(args.group_tile + Int64(group + j) * 4, first + i)
        group += width


@cute.jit
def sums_before(shared: Int32, thread: Int32, own: tuple, threads: cutlass.Constexpr[int | None]) -> tuple:
    """(sums over all lower threads, sums over all threads) of the SUMS numbers that each thread has."""
    lane, warp = thread % WARP, thread // WARP
    inclusive = tuple(prefix_sum(x, lane) for x in own)
    if lane == WARP - 1:
        for i in cutlass.range_constexpr(SUMS):
            ptx.store_shared_u32(shared + (i * WARP + warp) * 4, inclusive[i])
    sync_threads(threads)
    of_warps = tuple(prefix_sum(load_shared_i32(shared + (i * WARP + lane) * 4), lane) for i in range(SUMS))
    before = tuple(
        inclusive[i]
        - own[i]
        + cutlass.select_(warp > 0, cute.arch.shuffle_sync(of_warps[i], cutlass.max(warp - 1, 0)), Int32(0))
        for i in range(SUMS)
    )
    return before, tuple(cute.arch.shuffle_sync(x, WARP - 1) for x in of_warps)


def load_shared_i32(address: Int32) -> Int32:
    """Loads an int32 from shared memory."""
    return ptx.asm("ld.shared.b32 {$w0}, [{$r0}];", [Int32], address)


def count_one(address: Int32) -> Int32:
    """Increments a counter in shared memory; returns its value before."""
    return ptx.asm("atom.relaxed.cta.shared.add.s32 {$w0}, [{$r0}], 1;", [Int32], address)


# Host side


class Listed(NamedTuple):
    """The result of `list_work`. Buffers may be longer than the list; their rest is undefined."""

    slot_of_pair: Tensor  # int32 [T, k]; negative: the expert is on another rank
    source: Tensor  # int32 [slots]; negative: the slot pads a group
    routing: Tensor  # fp32 [slots]
    group_tile: Tensor  # int32 [groups]
    tiles: Tensor  # int32 [tiles, TILE_WORDS], see `workspace.TileField`
    totals: Tensor  # int32 [2]: work tiles, groups

    @property
    def groups(self) -> int:
        """The most groups of slots that the list can have."""
        return len(self.group_tile)


PART = Part("experts_work_list", 1, Arguments, body, threads=THREADS)
"""The kernel in a chain."""


def compile(arch: str, ctas: int) -> Callable[..., None]:
    """The launcher of one CTA, or of CLUSTER: (arguments, stream)."""
    return load_launcher("experts_work_list", ctas, arch, launch, Arguments, ctas)


def compile_jobs(arch: str) -> list[Callable[[], object]]:
    """The compile jobs of both."""
    return [partial(compile, arch, ctas) for ctas in (1, CLUSTER)]


def list_work(
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    offset: int,
    tile_slots: int,
    arch: str,
    paired: tuple[int, int] | None = None,
) -> Listed:
    """The slots and work tiles of a call.

    Args:
        weights: [T, k] fp32, contiguous.
        experts: [T, k] int32, contiguous, among all experts.
        num_experts: experts of this rank; the first has id `offset`.
        offset: id of this rank's first expert.
        tile_slots: slots of the widest work tile.
        arch: to compile for.
        paired: (slots of the widest work tile whose steps use two stages, fewest such tiles with which they are
            listed); None if no step uses two.

    Raises:
        ValueError: there are more experts than the kernel has threads.
    """
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"mxfp4_experts_forward: {num_experts} experts on a rank; at most {MAX_EXPERTS}")
    device, pairs = experts.device, experts.numel()
    groups = most_groups(pairs, num_experts)
    integers = partial(torch.empty, dtype=torch.int32, device=device)
    listed = Listed(
        slot_of_pair=integers(experts.shape),
        source=integers(groups * GROUP),
        routing=torch.empty(groups * GROUP, dtype=torch.float32, device=device),
        group_tile=integers(groups),
        tiles=integers(groups, TILE_WORDS),
        totals=integers(2),
    )
    paired_slots, least_paired = paired or (tile_slots, NEVER)
    arguments = Arguments(
        experts=experts.data_ptr(),
        weights=weights.data_ptr(),
        num_pairs=pairs,
        chosen=experts.shape[1],
        num_experts=num_experts,
        first_expert=offset,
        tile_groups=tile_slots // GROUP,
        paired_groups=paired_slots // GROUP,
        least_tiles=least_paired,
        slot_of_pair=listed.slot_of_pair.data_ptr(),
        source=listed.source.data_ptr(),
        routing=listed.routing.data_ptr(),
        group_tile=listed.group_tile.data_ptr(),
        tiles=listed.tiles.data_ptr(),
        totals=listed.totals.data_ptr(),
    )
    stream = current_stream(device)
    if pairs > MOST_OF_ONE_CTA:
        compile(arch, CLUSTER)(arguments, stream)
    else:
        launched = (weights, experts)
        joint_launch.run(PART, arch, arguments, 1, stream, launched, alone=lambda: compile(arch, 1)(arguments, stream))
    return listed
