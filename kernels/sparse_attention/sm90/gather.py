"""The producers of the Hopper kernels: rows of keys from global to shared memory, as bf16 (persistent.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, Uint32, const_expr

from dsv4_kernels.device import ptx
from dsv4_kernels.kv_layout import PAGE_ROWS, ROW_DATA_BYTES, ROW_SCALE_BYTES
from dsv4_kernels.sparse_attention.sm90.barriers import arrive_for_warp
from dsv4_kernels.sparse_attention.sm90.plan import (
    GROUP,
    GROUPS,
    HALF_GROUPS,
    KEY_TILE,
    KEY_TILE_BYTES,
    PRODUCER_THREADS,
    ROW_STRIDE,
    STEP,
    Arguments,
    Configuration,
    Entries,
)

# Row indices


@cute.jit
def load_row_index(
    config: cutlass.Constexpr, args: Arguments, token: Int32, visible: Int32, step: Int32, place: Int32
) -> Int32:
    """The row index of key `place` of a step, -1 for a hole."""
    window_steps = (args.window_width + STEP - 1) // STEP
    row_index = Int32(-1)
    slot = step * STEP + place
    if step < window_steps:
        if slot < args.window_width:
            row_index = ptx.load_i32(args.window_rows + (Int64(token) * args.window_rows_stride + slot) * 4)
    elif const_expr(config.entries == Entries.LIST):
        entry = slot - window_steps * STEP
        if entry < visible:
            row_index = ptx.load_i32(args.entry_list + (Int64(token) * args.entry_list_stride + entry) * 4)
    elif const_expr(config.entries == Entries.PAGES):
        entry = slot - window_steps * STEP
        if entry < visible:
            request = ptx.load_i32(args.token_to_request + Int64(token) * 4)
            page = args.entry_list + (Int64(request) * args.entry_list_stride + entry // args.entries_per_page) * 4
            row_index = ptx.load_i32(page) * args.entries_per_page + entry % args.entries_per_page
    return row_index


@cute.jit
def load_listed_row(config: cutlass.Constexpr, args: Arguments, token: Int32, step: Int32, place: Int32) -> Int32:
    """The row index that a list has for key `place` of a step, visible to the token or not; -1 outside of the lists.

    Unlike `load_row_index` it does not need the number of visible entries, which is loaded in parallel (cluster.py).
    """
    window_steps = (args.window_width + STEP - 1) // STEP
    slot, row_index = step * STEP + place, Int32(-1)
    if step < window_steps:
        if slot < args.window_width:
            row_index = ptx.load_i32(args.window_rows + (Int64(token) * args.window_rows_stride + slot) * 4)
    else:
        entry = slot - window_steps * STEP
        if entry < args.num_entries:
            if const_expr(config.entries == Entries.LIST):
                row_index = ptx.load_i32(args.entry_list + (Int64(token) * args.entry_list_stride + entry) * 4)
            elif const_expr(config.entries == Entries.PAGES):
                request = ptx.load_i32(args.token_to_request + Int64(token) * 4)
                page = Int64(request) * args.entry_list_stride + entry // args.entries_per_page
                row_index = ptx.load_i32(args.entry_list + page * 4)
                row_index = row_index * args.entries_per_page + entry % args.entries_per_page
    return row_index


@cute.jit
def hide_invisible(args: Arguments, visible: Int32, step: Int32, place: Int32, row_index: Int32) -> Int32:
    """The row index, or -1 if the entry is not visible to the token."""
    slot = (step - (args.window_width + STEP - 1) // STEP) * STEP + place
    if slot >= visible:
        if slot >= 0:
            row_index = Int32(-1)
    return row_index


@cute.jit
def prefetch_lists(config: cutlass.Constexpr, args: Arguments, thread: Int32) -> None:
    """Prefetches the first lines of all tokens' lists into L2, before the CTA knows its work tiles."""
    for i in cutlass.range_constexpr(2):
        place = thread * 32 + i * 32 * (config.producers * PRODUCER_THREADS - 32)
        if place < (args.num_tokens - 1) * args.window_rows_stride + args.window_width:
            ptx.prefetch(args.window_rows, place * 4)
        if const_expr(config.entries == Entries.LIST):
            if place < (args.num_tokens - 1) * args.entry_list_stride + args.num_entries:
                ptx.prefetch(args.entry_list, place * 4)


# Addresses of rows


@cute.jit
def table_of_step(config: cutlass.Constexpr, args: Arguments, step: Int32) -> tuple:
    """(address of the table that holds a step's rows, bytes of its page (FP8) or row (bf16))."""
    address, page_bytes = args.window, args.window_page_bytes
    if const_expr(config.entries != Entries.NONE):
        if step >= (args.window_width + STEP - 1) // STEP:
            address, page_bytes = args.entries, args.entries_page_bytes
    return address, page_bytes


@cute.jit
def row_address(config: cutlass.Constexpr, args: Arguments, step: Int32, row_index: Int32) -> Int64:
    """Address of a row's channels; HOLE for a hole."""
    table, page_bytes = table_of_step(config, args, step)
    address = Int64(ptx.HOLE)
    if row_index >= 0:
        if const_expr(config.fp8_rows):
            address = table + (Int64(row_index // PAGE_ROWS) * page_bytes + row_index % PAGE_ROWS * ROW_DATA_BYTES)
        else:
            address = table + Int64(row_index) * page_bytes
    return address


@cute.jit
def scales_address(
    config: cutlass.Constexpr, args: Arguments, step: Int32, row_index: Int32, first: Int32 | int = 0
) -> Int64:
    """Address of a row's scale bytes from byte `first` on; for a hole, of row 0's scale bytes."""
    table, page_bytes = table_of_step(config, args, step)
    existing = row_index
    if row_index < 0:
        existing = Int32(0)
    offset = PAGE_ROWS * ROW_DATA_BYTES + first + existing % PAGE_ROWS * ROW_SCALE_BYTES
    return table + (Int64(existing // PAGE_ROWS) * page_bytes + offset)


def first_byte(config: Configuration, half: Int32, row_lane: Int32) -> Int32:
    """Offset of a thread's bytes in a row, for this half of the channels."""
    channel_bytes = 1 if config.fp8_rows else 2
    return half * (HALF_GROUPS * GROUP * channel_bytes) + row_lane * 16


@cute.jit
def locate_rows(
    config: cutlass.Constexpr,
    args: Arguments,
    step: Int32,
    row_indices: cute.Pointer,
    first: Int32,
    addresses: cute.Tensor,
) -> None:
    """Writes the addresses of this thread's first bytes of its rows; channel groups are constant offsets from them."""
    for i in cutlass.range_constexpr(config.rows):
        addresses[i] = row_address(config, args, step, (row_indices + i * config.row_step).load()) + first


def row_offset(config: Configuration, i: int) -> int:
    """Offset of a thread's row i from its row 0 in shared memory."""
    row = i * config.row_step
    return row // KEY_TILE * KEY_TILE_BYTES + row % KEY_TILE * ROW_STRIDE


# FP8 rows: global memory -> registers -> bf16 in shared memory


@cute.jit
def prefetch_half_row(config: cutlass.Constexpr, args: Arguments, step: Int32, row_index: Int32, half: Int32) -> None:
    """Prefetches this half of a row's channels into L2."""
    address, half_bytes = row_address(config, args, step, row_index), ROW_DATA_BYTES // 2
    for i in cutlass.range_constexpr(3):
        ptx.prefetch(address, half * half_bytes + min(128 * i, half_bytes - 1))


@cute.jit
def load_scales(
    config: cutlass.Constexpr,
    args: Arguments,
    step: Int32,
    row_indices: cute.Pointer,
    scales: cute.Tensor,
    half: Int32,
) -> None:
    """Loads the four scale bytes of each row for this half of the channels; 0 for holes."""
    for i in cutlass.range_constexpr(config.rows):
        row_index = (row_indices + i * config.row_step).load()
        scales[i] = ptx.load_4_bytes(scales_address(config, args, step, row_index, half * 4), row_index)


@cute.jit
def load_group(
    config: cutlass.Constexpr, addresses: cute.Tensor, half: Int32, group: Int32 | int, words: cute.Tensor
) -> None:
    """Loads this thread's e4m3 of a channel group of its rows; zeros for the group that is bf16."""
    for i in cutlass.range_constexpr(config.rows):
        row = addresses[i]
        if const_expr(not isinstance(group, int) or group == HALF_GROUPS - 1):
            if (half == 1) & (group == HALF_GROUPS - 1):
                row = Int64(ptx.HOLE)
        loaded = ptx.load_16_bytes(row, group * GROUP)
        for j in cutlass.range_constexpr(4):
            words[4 * i + j] = loaded[j]


@cute.jit
def store_group(
    config: cutlass.Constexpr,
    place: Int32,
    row: Int32,
    row_lane: Int32,
    group: Int32 | int,
    words: cute.Tensor,
    scales: cute.Tensor,
) -> None:
    """Stores the loaded e4m3 as bf16 to the rows in swizzled blocks."""
    for i in cutlass.range_constexpr(config.rows):
        scale = ptx.scale_pair((scales[i] >> (8 * group)) & 0xFF)
        store_16_channels(place, row_offset(config, i), row, row_lane, [words[4 * i + j] for j in range(4)], scale)


def store_16_channels(
    place: Int32, offset: int, row: Int32, row_lane: Int32, words: list | tuple, scale: Uint32
) -> None:
    """Stores 16 e4m3 of a row as bf16, `offset` bytes after `place`."""
    for j in range(2):
        low, high = (ptx.dequantise(words[2 * j + k], scale) for k in range(2))
        ptx.store_shared(place + (offset + ((row_lane * 2 + j) ^ (row & 7)) * 16), (*low, *high))


# bf16 rows, and the last channels of FP8 rows: global -> shared memory by cp.async


@cute.jit
def copy_group(
    config: cutlass.Constexpr,
    place: Int32,
    row: Int32,
    row_lane: Int32,
    addresses: cute.Tensor,
    offset: Int32 | int,
) -> None:
    """Starts copying a group that is bf16, `offset` bytes after `addresses`; zeros for holes."""
    side_by_side = config.rows
    for i in cutlass.range_constexpr(config.rows):
        for j in cutlass.range_constexpr(ROW_STRIDE // 16 // side_by_side):
            target = place + (row_offset(config, i) + ((j * side_by_side + row_lane) ^ (row & 7)) * 16)
            ptx.copy_row_async(target, addresses[i], offset + j * side_by_side * 16)


def async_arrivals(config: Configuration, group: int) -> int:
    """Arrivals at full[group] by completed cp.async: for bf16 rows, and the last channels of FP8 rows."""
    return PRODUCER_THREADS if group == GROUPS - 1 or not config.fp8_rows else 0


# Signals to the consumers


@cute.jit
def publish_group(
    config: cutlass.Constexpr, barrier: cute.Pointer, lane: Int32, half: Int32, group: Int32 | int
) -> None:
    """Signals that this warp's rows of a group are written, or will be when its copies complete."""
    if const_expr(config.fp8_rows):
        cute.arch.fence_view_async_shared()  # generic stores, read by wgmma
        cute.arch.sync_warp()
    arrive_for_warp(barrier, lane)
    if const_expr(not config.fp8_rows):
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
    elif const_expr(not isinstance(group, int) or group == HALF_GROUPS - 1):
        if (half == 1) & (group == HALF_GROUPS - 1):
            cute.arch.cp_async_mbarrier_arrive_noinc(barrier)


@cute.jit
def write_row_bits(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    row_index: cute.Pointer,
    warp: Int32,
    lane: Int32,
    addresses: cute.Tensor,
) -> None:
    """Writes a bit for each of the warp's rows, 0 for a hole; `row_index` is this lane's."""
    if const_expr(config.fp8_rows):
        # From the addresses, to save registers; four adjacent lanes have the same rows.
        rows = shared.rows.data_ptr() + warp
        for i in cutlass.range_constexpr(config.rows):
            bits = bits_of_rows(addresses[i] >= 0)
            if lane == 0:
                (rows + i * config.row_step // 8).store(Uint8(bits))
    else:
        bits = cute.arch.vote_ballot_sync(row_index.load() >= 0)
        if lane == 0:
            (cute.recast_ptr(shared.rows.data_ptr(), dtype=Uint32) + warp).store(Uint32(bits))


def bits_of_rows(exists: Boolean) -> Uint32:
    """A bit for each of the warp's eight rows; four lanes share a row."""
    bits = cute.arch.vote_ballot_sync(exists) & 0x11111111
    bits = (bits | (bits >> 3)) & 0x03030303
    bits = (bits | (bits >> 6)) & 0x000F000F
    return (bits | (bits >> 12)) & 0xFF
