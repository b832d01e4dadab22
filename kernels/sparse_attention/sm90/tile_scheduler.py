"""The tile scheduler of the Hopper kernels: keys, heads and channels of every CTA (persistent.py).

A token's steps are divided into KV splits (split.py), each of which may be divided into sub-splits. A work tile is a
sub-split, or a whole token, for a block of heads and a channel split. CTA c of n computes work tiles c, c + n, c + 2n
and so on.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from dsv4_kernels.device import ptx
from dsv4_kernels.device.warp import prefix_sum
from dsv4_kernels.sparse_attention.sm90.plan import (
    HALF_GROUPS,
    HEADS,
    MAX_SUB_SPLIT_STEPS,
    PUBLISHED_TILES,
    SLOTS_PER_CTA,
    STEP,
    TILE_WORDS,
    WHOLE_TOKENS,
    Arguments,
    Configuration,
    Entries,
    Split,
)


class WorkTile(NamedTuple):
    """Steps [first_step, end_step) of a token, for a block of heads and a channel split."""

    token: Int32
    head_block: Int32
    first_step: Int32
    end_step: Int32
    channel_split: Int32
    sub_split: Int32
    """Index among all sub-splits of the token."""
    sub_splits: Int32
    begins_kv_split: Boolean
    """Whether this sub-split is the first of its KV split."""
    visible: Int32


class TokenSplits(NamedTuple):
    """The division of a token's steps into `kv_splits` KV splits of `sub_splits` each."""

    steps: Int32
    kv_splits: Int32
    sub_splits: Int32
    """Sub-splits of a KV split; 0 if there are several KV splits and every step is a sub-split."""
    all_sub_splits: Int32


# Work tiles by number


def work_tile_at(
    config: Configuration, args: Arguments, shared: cutlass.Constexpr, index: Int32, iteration: Int32
) -> WorkTile:
    """A work tile by its number, or, where keys are divided, by this CTA's iteration.

    Where keys are divided, one warp has computed it for all warps, because that takes several hundred cycles.
    """
    return published_tile(config, shared, iteration) if config.split else compute_tile(config, args, shared, index)


@cute.jit
def published_tile(config: cutlass.Constexpr, shared: cutlass.Constexpr, iteration: Int32) -> WorkTile:
    """The work tile that `publish_tile` wrote for an iteration."""
    place = shared.tiles.data_ptr() + iteration % PUBLISHED_TILES * TILE_WORDS
    words = [(place + i).load() for i in range(TILE_WORDS)]
    block, _, _ = cute.arch.block_idx()
    token, head_block, first, end, sub_split, sub_splits, begins, visible = words
    channel_split = channel_split_of(config, block)
    return WorkTile(token, head_block, first, end, channel_split, sub_split, sub_splits, begins != 0, visible)


@cute.jit
def publish_tile(
    config: cutlass.Constexpr, args: Arguments, shared: cutlass.Constexpr, index: Int32, iteration: Int32, lane: Int32
) -> None:
    """Computes a work tile and writes it to shared memory, by one warp; a barrier must follow."""
    tile = compute_tile(config, args, shared, index)
    place = shared.tiles.data_ptr() + iteration % PUBLISHED_TILES * TILE_WORDS
    span = (tile.first_step, tile.end_step, tile.sub_split, tile.sub_splits, tile.begins_kv_split)
    words = (tile.token, tile.head_block, *span, tile.visible)
    if lane == 0:
        for i in cutlass.range_constexpr(TILE_WORDS):
            (place + i).store(Int32(words[i]))


def whole_token_tile(config: Configuration, args: Arguments, index: Int32, steps: Int32) -> WorkTile:
    """A work tile by its number, if keys are not divided."""
    token = index // config.channel_splits >> (count_head_blocks(args) - 1)
    # If the compiler knew that this is 0, it would keep running sums of addresses in registers, which then spill.
    first = ptx.opaque(Int32(0))
    head_block = head_block_of(config, args, index)
    channel_split = channel_split_of(config, index)
    return WorkTile(token, head_block, first, steps, channel_split, Int32(0), Int32(1), Boolean(True), Int32(0))


@cute.jit
def compute_tile(config: cutlass.Constexpr, args: Arguments, shared: cutlass.Constexpr, index: Int32) -> WorkTile:
    """A work tile, from its number and the schedule in shared memory."""
    token, head_block, first, _, channel_split, *_ = whole_token_tile(config, args, index, Int32(0))
    sub_split = Int32(0)
    if const_expr(config.split):
        wanted, sub_splits_of_all = token, shared.sub_splits_of_all.data_ptr().load()
        if sub_splits_of_all > 0:
            token = ptx.divide(wanted, sub_splits_of_all)
            sub_split = wanted - token * sub_splits_of_all
        else:
            token = token_of_sub_split(args, shared, wanted)
            sub_split = wanted - (shared.starts.data_ptr() + token).load()
    token = ptx.imin(token, args.num_tokens - 1)
    visible = visible_entries(config, args, token)
    end = count_steps(args, visible)
    sub_splits, begins = Int32(1), Boolean(True)
    if const_expr(config.split):
        splits = divide_token(args, end, shared.sub_split_steps.data_ptr().load())
        first, end, begins = steps_of_sub_split(splits, sub_split)
        sub_splits = splits.all_sub_splits
    return WorkTile(token, head_block, first, end, channel_split, sub_split, sub_splits, begins, visible)


@cute.jit
def token_of_sub_split(args: Arguments, shared: cutlass.Constexpr, sub_split: Int32) -> Int32:
    """The token of a sub-split, from the sub-split's number in the launch; all lanes of a warp search together."""
    starts, lane = shared.starts.data_ptr(), cute.arch.lane_idx()
    token, last, stride = Int32(0), args.num_tokens - 1, (args.num_tokens + 31) // 32
    while stride > 0:
        candidate = token + lane * stride
        is_before = Boolean(False)
        if candidate <= last:
            is_before = (starts + candidate).load() <= sub_split
        found = token + (cute.arch.popc(cute.arch.vote_ballot_sync(is_before)) - 1) * stride
        last = ptx.imin(last, found + stride - 1)
        token = found
        stride = (stride + 31) // 32 - Int32(stride == 1)
    return token


@cute.jit
def count_work_tiles(config: cutlass.Constexpr, args: Arguments, shared: cutlass.Constexpr) -> Int32:
    """Work tiles of the launch."""
    num_tiles = args.num_tokens * tiles_per_sub_split(config, args)
    if const_expr(config.split):
        num_tiles = shared.num_tiles.data_ptr().load()
    return num_tiles


def tiles_per_sub_split(config: Configuration, args: Arguments) -> Int32:
    """Work tiles with the same keys: blocks of heads times channel splits."""
    return count_head_blocks(args) * config.channel_splits


def count_head_blocks(args: Arguments) -> Int32:
    """Blocks of 64 heads: 1 or 2, because there are at most 128 heads."""
    return (args.num_heads + HEADS - 1) // HEADS


def head_block_of(config: Configuration, args: Arguments, index: Int32) -> Int32:
    """The block of heads of a work tile, by its number."""
    return index // config.channel_splits & (count_head_blocks(args) - 1)


# Channels


def channel_split_of(config: Configuration, index: Int32) -> Int32 | int:
    """The channel split of a work tile, by its number; the same for all work tiles of a CTA."""
    return 0 if config.channel_splits == 1 else index % config.channel_splits


def rematerialise(config: Configuration, channel_split: Int32 | int) -> Int32 | int:
    """`channel_split`, opaque to the compiler, so that values derived from it are recomputed, not kept in registers."""
    return 0 if config.channel_splits == 1 else cute.arch.make_warp_uniform(channel_split)


def group_at(i: Int32 | int) -> Int32 | int:
    """The channel group, within either half, that is filled and read as the i-th.

    A half's last group comes first: in the upper half of FP8 rows it is bf16 and is copied asynchronously. The scores
    are summed in this order for every channel split.
    """
    return (HALF_GROUPS - 1 + i) % HALF_GROUPS


def groups_in_order() -> list[int]:
    """All channel groups in the order in which they are filled and read, alternating between the halves."""
    return [i % 2 * HALF_GROUPS + group_at(i // 2) for i in range(2 * HALF_GROUPS)]


# Steps of a token, and their division


@cute.jit
def visible_entries(config: cutlass.Constexpr, args: Arguments, token: Int32) -> Int32:
    """Entries that a token may read; in a list, its first slots."""
    visible = Int32(0)
    if const_expr(config.entries != Entries.NONE):
        visible = args.num_entries
        if args.visible != 0:
            visible = ptx.imin(ptx.load_i32(args.visible + Int64(token) * 4), visible)
    return visible


@cute.jit
def count_steps(args: Arguments, visible: Int32) -> Int32:
    """Steps of a token, at least one: steps of its window, then of its entries."""
    steps = (args.window_width + STEP - 1) // STEP + (visible + STEP - 1) // STEP
    if steps < 1:
        steps = Int32(1)
    return steps


@cute.jit
def steps_of_token(config: cutlass.Constexpr, args: Arguments, token: Int32) -> Int32:
    """Steps of a token, by its number."""
    return count_steps(args, visible_entries(config, args, token))


@cute.jit
def steps_of_tile(config: cutlass.Constexpr, args: Arguments, index: Int32) -> Int32:
    """Steps of a work tile, if keys are not divided."""
    return steps_of_token(config, args, whole_token_tile(config, args, index, Int32(0)).token)


def count_kv_splits(args: Arguments, steps: Int32) -> Int32:
    """KV splits of a token that has more steps than a KV split may have."""
    return ptx.divide(steps + args.steps_per_kv_split - 1, args.steps_per_kv_split)


def begins_kv_split(steps: Int32, kv_splits: Int32, step: Int32) -> Boolean:
    """Whether `step`, above 0, is the first step of a KV split, or the end of the last KV split."""
    kv_split = ptx.divide(step * kv_splits + steps - 1, steps)
    return ptx.divide(kv_split * steps, kv_splits) == step


@cute.jit
def ends_kv_split(args: Arguments, work_tile: WorkTile, step: Int32) -> Boolean:
    """Whether a KV split ends before `step`, in a work tile that is a whole token of several KV splits."""
    ends = Boolean(False)
    if work_tile.end_step - work_tile.first_step > args.steps_per_kv_split:
        ends = begins_kv_split(work_tile.end_step, count_kv_splits(args, work_tile.end_step), step)
    return ends


@cute.jit
def divide_token(args: Arguments, steps: Int32, sub_split_steps: Int32) -> TokenSplits:
    """The division of a token of `steps` steps.

    `sub_split_steps` > 0: KV splits are divided into sub-splits of this many steps, unless they are at most one step
    longer.
    `sub_split_steps` < 0: KV splits are divided into as many sub-splits as a token with -sub_split_steps CTAs allows.
    `sub_split_steps` = 0: KV splits stay whole.
    `sub_split_steps` = WHOLE_TOKENS: tokens stay whole, and their CTA merges their KV splits.
    """
    kv_splits, shortest, most = Int32(1), steps, -sub_split_steps
    if (steps > args.steps_per_kv_split) & (sub_split_steps != WHOLE_TOKENS):
        kv_splits = count_kv_splits(args, steps)
        shortest = ptx.divide(steps, kv_splits)
        most = ptx.divide(ptx.imax(most, Int32(0)), kv_splits)
    sub_splits = Int32(1)
    if sub_split_steps > 0:
        if shortest > sub_split_steps + 1:
            sub_splits = ptx.divide(shortest + sub_split_steps - 1, sub_split_steps)
    elif most > 1:
        most = ptx.imin(most, shortest)
        if shortest <= most * SLOTS_PER_CTA + 1:  # every sub-split but a KV split's first exports all of its steps
            sub_splits = most
    all_sub_splits = kv_splits * sub_splits
    if (kv_splits > 1) & (kv_splits < steps) & (steps <= -sub_split_steps):
        sub_splits, all_sub_splits = Int32(0), steps  # a step each: no sub-split is longer than another
    return TokenSplits(steps, kv_splits, sub_splits, all_sub_splits)


@cute.jit
def steps_of_sub_split(splits: TokenSplits, sub_split: Int32) -> tuple:
    """(first step, end, whether it is the first of its KV split) of a token's sub-split.

    The longer sub-splits of a KV split come first. If sub-splits are long, the first has one step more: it exports a
    single partial result, while the others export one for every step.
    """
    place, sub_splits, begin, end = sub_split, splits.sub_splits, Int32(0), splits.steps
    begins = place == 0
    if sub_splits == 0:
        begins = begins_kv_split(splits.steps, splits.kv_splits, sub_split)
        place, sub_splits, begin, end = Int32(0), Int32(1), sub_split, sub_split + 1
    elif splits.kv_splits > 1:
        kv_split = ptx.divide(sub_split, sub_splits)
        place = sub_split - kv_split * sub_splits
        begins = place == 0
        begin = ptx.divide(kv_split * splits.steps, splits.kv_splits)
        if kv_split + 1 < splits.kv_splits:
            end = ptx.divide((kv_split + 1) * splits.steps, splits.kv_splits)
    more = Int32(end - begin > (SLOTS_PER_CTA - 1) * sub_splits + 1)
    evenly, up = end - begin - more, sub_splits - 1
    first = begin
    if place > 0:
        first = begin + more + ptx.divide(place * evenly + up, sub_splits)
    last = begin + more + ptx.divide((place + 1) * evenly + up, sub_splits)
    return first, last, begins


@cute.jit
def count_sub_splits(args: Arguments, steps: Int32, sub_split_steps: Int32) -> Int32:
    """Sub-splits of a token of `steps` steps."""
    return divide_token(args, steps, sub_split_steps).all_sub_splits


@cute.jit
def sub_splits_of_token(config: cutlass.Constexpr, args: Arguments, token: Int32, sub_split_steps: Int32) -> Int32:
    """Sub-splits of a token by its number; 0 beyond the last token."""
    sub_splits = Int32(0)
    if token < args.num_tokens:
        sub_splits = count_sub_splits(args, steps_of_token(config, args, token), sub_split_steps)
    return sub_splits


# The schedule of a launch that divides keys; every CTA computes it


@cute.jit
def schedule_tiles(config: cutlass.Constexpr, args: Arguments, shared: cutlass.Constexpr, lane: Int32) -> None:
    """Writes the schedule and this CTA's first work tile, by one warp; a barrier must follow.

    If all tokens have the same number of steps, they have the same number of sub-splits.
    """
    longest, least, base = Int32(0), Int32(-(1 << 20)), Int32(0)
    while base < args.num_tokens:
        steps = steps_of_token(config, args, ptx.imin(base + lane, args.num_tokens - 1))
        longest, least = ptx.imax(longest, steps), ptx.imax(least, -steps)
        base += 32
    longest, least = cute.arch.warp_redux_sync(longest, "max"), cute.arch.warp_redux_sync(least, "max")
    sub_split_steps, rows = -args.ctas_per_token, Int32(0)
    sub_splits_of_all = Int32(0)
    if longest == -least:
        sub_splits_of_all = count_sub_splits(args, longest, sub_split_steps)
        rows = args.num_tokens * sub_splits_of_all
        if const_expr(config.split == Split.KV_SPLITS):
            # Tokens stay whole if no CTA gets more KV splits that way.
            ctas, _, _ = cute.arch.grid_dim()
            tokens = args.num_tokens * tiles_per_sub_split(config, args)
            kv_splits = rows * tiles_per_sub_split(config, args)
            if ptx.divide(tokens + ctas - 1, ctas) * sub_splits_of_all <= ptx.divide(kv_splits + ctas - 1, ctas):
                sub_split_steps, sub_splits_of_all, rows = Int32(WHOLE_TOKENS), Int32(1), args.num_tokens
    else:
        sub_split_steps = choose_sub_split_steps(config, args, longest, lane)
        rows = store_starts(config, args, shared.starts.data_ptr(), sub_split_steps, lane)
    block, _, _ = cute.arch.block_idx()
    if lane == 0:
        shared.sub_split_steps.data_ptr().store(sub_split_steps)
        shared.sub_splits_of_all.data_ptr().store(sub_splits_of_all)
        shared.num_tiles.data_ptr().store(rows * tiles_per_sub_split(config, args))
        shared.prefetches.data_ptr().store(Int32(0))
    cute.arch.sync_warp()
    publish_tile(config, args, shared, block, Int32(0), lane)


@cute.jit
def choose_sub_split_steps(config: cutlass.Constexpr, args: Arguments, longest: Int32, lane: Int32) -> Int32:
    """`sub_split_steps` of `divide_token` with which all sub-splits fit on the GPU at once; computed by one warp.

    Either every token gets the same number of CTAs, or all sub-splits get the same length, the shortest possible, if
    that gives shorter sub-splits, which helps where tokens differ in steps. The choice depends on the whole batch;
    results do not depend on the choice.
    """
    chosen, each = Int32(0), args.ctas_per_token
    if const_expr(config.split == Split.KV_SPLITS):
        each = 0  # a compile-time 0 removes the rest
    if each > 0:
        ctas, _, _ = cute.arch.grid_dim()
        room = ptx.divide(ctas, tiles_per_sub_split(config, args))
        candidate = ptx.imin(ptx.divide(longest + each - 1, each) - 1, Int32(MAX_SUB_SPLIT_STEPS))
        if total_sub_splits(config, args, lane, -each) <= room:
            chosen = -each
        else:
            candidate = Int32(MAX_SUB_SPLIT_STEPS)  # some tokens have more KV splits than `each`
        while candidate > 0:
            if total_sub_splits(config, args, lane, candidate) <= room:
                chosen = candidate
            candidate -= 1
    return chosen


@cute.jit
def total_sub_splits(config: cutlass.Constexpr, args: Arguments, lane: Int32, sub_split_steps: Int32) -> Int32:
    """Sub-splits of all tokens; computed by one warp."""
    total, base = Int32(0), Int32(0)
    while base < args.num_tokens:
        total += cute.arch.warp_redux_sync(sub_splits_of_token(config, args, base + lane, sub_split_steps), "add")
        base += 32
    return total


@cute.jit
def store_starts(
    config: cutlass.Constexpr, args: Arguments, starts: cute.Pointer, sub_split_steps: Int32, lane: Int32
) -> Int32:
    """Writes starts[t] = sub-splits of the tokens before t, by one warp; returns the sub-splits of all tokens."""
    before, base = Int32(0), Int32(0)
    while base < args.num_tokens:
        token = base + lane
        before += prefix_sum(sub_splits_of_token(config, args, token, sub_split_steps), lane)
        if token < args.num_tokens:
            (starts + token + 1).store(before)
        before = cute.arch.shuffle_sync(before, 31)
        base += 32
    if lane == 0:
        starts.store(Int32(0))
    return before
