"""Loads of Q and of key rows in the kernel for few heads, and their conversion to `wgmma` operands (kernel.py)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from dsv4_kernels.device import ptx
from dsv4_kernels.kv_layout import NOPE_DIM, PAGE_ROWS, ROW_DATA_BYTES, ROW_SCALE_BYTES
from dsv4_kernels.sparse_attention.sm90 import gather
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import (
    COLUMNS,
    ROWS,
    STAGE_BYTES,
    TILES_OF_STEP,
    WARPGROUP,
    FewHeads,
)
from dsv4_kernels.sparse_attention.sm90.plan import (
    BLOCK_BYTES,
    GROUP,
    GROUPS,
    KEY_TILE,
    ROW_STRIDE,
    STEP,
    Arguments,
    Entries,
)

# Row indices and addresses


@cute.jit
def load_indices(
    config: cutlass.Constexpr,
    args: Arguments,
    token: Int32,
    visible: Int32,
    tile: Int32,
    end: Int32,
    row: Int32,
    indices: cute.Tensor,
) -> None:
    """Loads the indices of this thread's rows of a tile; -1 for holes and beyond the last tile."""
    window_tiles = (args.window_width + STEP - 1) // STEP * TILES_OF_STEP
    indices.fill(-1)
    if tile < end:
        if tile < window_tiles:
            slot = tile * KEY_TILE + row
            first = args.window_rows + (Int64(token) * args.window_rows_stride + slot) * 4
            load_listed(first, args.window_width - slot, indices)
        elif const_expr(config.entries == Entries.LIST):
            slot = (tile - window_tiles) * KEY_TILE + row
            first = args.entry_list + (Int64(token) * args.entry_list_stride + slot) * 4
            load_listed(first, visible - slot, indices)
        elif const_expr(config.entries == Entries.PAGES):
            slot = (tile - window_tiles) * KEY_TILE + row
            request = ptx.load_i32(args.token_to_request + Int64(token) * 4)
            pages = args.entry_list + Int64(request) * args.entry_list_stride * 4
            for i in cutlass.range_constexpr(ROWS):
                page = (slot + 8 * i) // args.entries_per_page
                place = (slot + 8 * i) - page * args.entries_per_page
                exists = visible - slot - 8 * i
                number = ptx.load_or_zeros(Int32, 1, pages + Int64(page) * 4, exists, "gt.s32", cache="")
                indices[i] = cutlass.select_(exists > 0, number * args.entries_per_page + place, Int32(-1))


def load_listed(first: Int64, left: Int32, indices: cute.Tensor) -> None:
    """Loads row indices from a list that has `left` slots from `first` on; -1 beyond it."""
    for i in range(ROWS):
        indices[i] = ptx.load_or_zeros(Int32, 1, first + 32 * i, left - 8 * i, "gt.s32", cache="", otherwise=-1)


@cute.jit
def locate(
    config: cutlass.Constexpr,
    args: Arguments,
    tile: Int32,
    quad: Int32,
    indices: cute.Tensor,
    addresses: cute.Tensor,
    scales: cute.Tensor,
) -> None:
    """Computes the addresses of this thread's first channels of its rows, and loads the scales, without branches."""
    table, page_bytes = gather.table_of_step(config, args, tile // TILES_OF_STEP)
    first = quad * (16 if config.fp8_rows else 32)
    for i in cutlass.range_constexpr(ROWS):
        number = ptx.imax(indices[i], Int32(0))
        if const_expr(config.fp8_rows):
            page, place = table + Int64(number >> 6) * page_bytes, number & (PAGE_ROWS - 1)
            row = page + (place * ROW_DATA_BYTES + first)
            scale_bytes = page + (place * ROW_SCALE_BYTES + PAGE_ROWS * ROW_DATA_BYTES)
            scales[2 * i], scales[2 * i + 1] = ptx.load_8_bytes(scale_bytes, indices[i])
        else:
            row = table + (Int64(number) * page_bytes + first)
        addresses[i] = cutlass.select_(indices[i] >= 0, row, Int64(ptx.HOLE))


# Rows: global -> shared memory by cp.async, 16 channels of every group of both of this thread's rows


class Places(NamedTuple):
    """A thread's addresses in shared memory."""

    stage: Int32
    """The thread's 16 bytes of the first e4m3 buffer."""
    chunks: tuple
    """The thread's two 16-byte chunks of its first row in the first block of values."""
    matrix: Int32
    """The thread's row of the four matrices that the warp stores by one `stmatrix` to the first block of values."""

    @staticmethod
    def of(shared: cutlass.Constexpr, thread: Int32) -> "Places":
        """The addresses of thread `thread` of the CTA."""
        values = Int32(shared.values.data_ptr().toint())
        lane, quad, first = thread % 32, thread % 4, thread % WARPGROUP // 32 * 16
        row = first + lane // 4
        chunks = tuple(values + row * ROW_STRIDE + ((quad * 2 + j) ^ (row & 7)) * 16 for j in range(2))
        # Lane l has row l % 8 of matrix l // 8: keys of the first or second half of 16, channels of either half.
        matrix_row = first + lane // 8 % 2 * 8 + lane % 8
        matrix = values + matrix_row * ROW_STRIDE + ((lane // 16) ^ (lane & 7)) * 16
        return Places(Int32(shared.stages.data_ptr().toint()) + thread * 16, chunks, matrix)


def copy_group(config: FewHeads, addresses: cute.Tensor, places: Places, quad: Int32, group: int) -> None:
    """Starts copying a channel group, zeros for holes: e4m3 to the thread's buffer, bf16 to the values. Groups are
    copied in order, so that `wait_for_group` can count them."""
    for row in range(ROWS):
        if group < config.staged_groups:
            ptx.copy_row_async(places.stage + (group * ROWS + row) * STAGE_BYTES, addresses[row], group * GROUP)
            continue
        offset = group * ROW_STRIDE
        if config.fp8_rows:  # after the e4m3; addresses count 16 bytes a thread, bf16 takes 32
            offset = quad * 16 + NOPE_DIM
        for j in range(2):
            target = places.chunks[j] + (group * BLOCK_BYTES + row * 8 * ROW_STRIDE)
            ptx.copy_row_async(target, addresses[row], offset + 16 * j)
    cute.arch.cp_async_commit_group()


def wait_for_group(config: FewHeads, group: int) -> None:
    """Waits for this thread's copies of a group of this tile.

    Copies that were started later may remain: of this tile's later groups and, if this group is not early, of the next
    tile's early groups.
    """
    asked_for_again = config.early_groups if group > config.early_groups else 0
    cute.arch.cp_async_wait_group(GROUPS - 1 - group + asked_for_again)


def load_group(config: FewHeads, places: Places, group: int) -> list:
    """The words [row][word] of a group that has arrived."""
    if group < config.staged_groups:
        stages = [places.stage + (group * ROWS + row) * STAGE_BYTES for row in range(ROWS)]
        return [list(ptx.load_shared_16_bytes(stage)) for stage in stages]
    chunks = [[chunk + (group * BLOCK_BYTES + row * 8 * ROW_STRIDE) for chunk in places.chunks] for row in range(ROWS)]
    return [[word for chunk in of_row for word in ptx.load_shared_16_bytes(chunk)] for of_row in chunks]


# Loaded groups -> operands of the scores, and values in shared memory


def convert_half_group(
    config: FewHeads, group: int, j: int, words: list, scales: cute.Tensor, operand: cute.Tensor
) -> None:
    """Writes eight channels of both rows of a loaded group to `operand`, the left operands of two `wgmma`: element
    2 * c + r has channels 8 j + 2 c and 8 j + 2 c + 1 of row r."""
    for row in range(ROWS):
        if group >= config.staged_groups:  # bf16 as they are
            for c in range(4):
                operand[2 * c + row] = words[row][4 * j + c]
            continue
        scale = ptx.scale_pair((scales[2 * row + group // 4] >> (8 * (group % 4))) & 0xFF)
        for b in range(2):
            operand[4 * b + row], operand[4 * b + 2 + row] = ptx.dequantise(words[row][2 * j + b], scale)


def store_values(config: FewHeads, places: Places, group: int, j: int, operand: cute.Tensor) -> None:
    """Stores an operand that was e4m3 to its block of values, its channels permuted as by `store_q`.

    Groups of bf16 have been copied there already, in their own order.
    """
    if group < config.staged_groups:
        for b in range(2):
            place = (places.matrix ^ ((4 * j + 2 * b) * 16)) + group * BLOCK_BYTES
            ptx.store_matrices(place, tuple(operand[4 * b + k] for k in range(4)))


def multiply_half_group(
    mma: cute.TiledMma, scores: cute.Tensor, operand: cute.Tensor, q: cute.Tensor, j: int, accumulate: bool
) -> None:
    """Issues scores (+)= operand @ Q^T over these channels, without waiting."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    for k in range(2):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(atom, scores, operand[None, None, k], q[None, None, 2 * j + k], scores)
    warpgroup.commit_group()


# Q


def load_q(args: Arguments, thread: Int32, token: Int32, words: cute.Tensor) -> None:
    """Loads this thread's 16 bytes of every channel group of Q for `store_q`, zeros for a missing head or token.

    A warp loads 128 bytes of four heads at a time.
    """
    head, chunk = thread // 8, thread % 8
    source = Int64(token) * args.q_token_stride + Int64(head) * args.q_head_stride
    address = args.q + source * 2 + chunk * 16
    exists = cutlass.select_(token < args.num_tokens, args.num_heads - head, Int32(0))
    for group in range(GROUPS):
        loaded = ptx.load_or_zeros(Uint32, 4, address + group * ROW_STRIDE, exists, "gt.s32")
        for k in range(4):
            words[4 * group + k] = loaded[k]


def store_q(shared: cutlass.Constexpr, thread: Int32, words: cute.Tensor) -> None:
    """Stores Q to shared memory, its channels permuted to the order of the operands of the scores.

    Of a thread's 16 channels of a group, four are in each of the group's four operands: columns 2 q, 2 q + 1, 2 q + 8
    and 2 q + 9 for the q-th of four threads. So channel 16 q + 4 b + 2 h + j is stored at 16 b + 8 h + 2 q + j: 16
    adjacent bytes become four words, 16 bytes apart except for the swizzle.
    """
    head, chunk = thread // 8, thread % 8
    row = Int32(shared.q.data_ptr().toint()) + (head * ROW_STRIDE + chunk // 2 * 4)
    places = [row + ((chunk % 2 * 4 + k) ^ (head & 7)) * 16 for k in range(4)]
    for group in range(GROUPS):
        for k in range(4):
            ptx.store_shared_u32(places[k] + group * (COLUMNS * ROW_STRIDE), words[4 * group + k])


@cute.jit
def prefetch_lists(config: cutlass.Constexpr, args: Arguments, thread: Int32, token: Int32) -> None:
    """Prefetches the token's lists into L2, a line a thread, while their visible lengths are loaded."""
    place = thread * 32
    if (place < args.window_width) & (token < args.num_tokens):
        ptx.prefetch(args.window_rows + Int64(token) * args.window_rows_stride * 4, place * 4)
    if const_expr(config.entries == Entries.LIST):
        if (place < args.num_entries) & (token < args.num_tokens):
            ptx.prefetch(args.entry_list + Int64(token) * args.entry_list_stride * 4, place * 4)
