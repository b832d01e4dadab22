"""Q and rows of keys in the kernel for few heads, on their way to where `wgmma` reads them (kernel.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from dsv4_kernels import ptx
from dsv4_kernels.kv_layout import NOPE_DIM, PAGE_ROWS, ROW_DATA_BYTES, ROW_SCALE_BYTES
from dsv4_kernels.sparse_attention.sm90 import gather
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import ROWS, FewHeads
from dsv4_kernels.sparse_attention.sm90.plan import GROUP, GROUPS, KEY_TILE, ROW_STRIDE, STEP, Arguments, Entries

# Rows: global memory -> registers


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
    """Numbers of this thread's rows of a tile, -1 for holes and beyond the last tile."""
    window_tiles = (args.window_width + STEP - 1) // STEP * (STEP // KEY_TILE)
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
    """Of a list that has `left` entries from the first one on."""
    for i in range(ROWS):
        indices[i] = ptx.load_or_zeros(Int32, 1, first + 32 * i, left - 8 * i, "gt.s32", cache="", otherwise=-1)


@cute.jit
def locate(
    config: cutlass.Constexpr,
    args: Arguments,
    tile: Int32,
    half: Int32 | int,
    quad: Int32,
    indices: cute.Tensor,
    addresses: cute.Tensor,
    scales: cute.Tensor,
) -> None:
    """Addresses of this thread's first channels of its rows, and scales of the warpgroup's groups. Without branches."""
    table, page_bytes = gather.table_of_step(config, args, tile // (STEP // KEY_TILE))
    channel_bytes = 1 if config.fp8_rows else 2
    first = half * (config.groups * GROUP * channel_bytes) + quad * (16 * channel_bytes)
    for i in cutlass.range_constexpr(ROWS):
        number = ptx.imax(indices[i], Int32(0))
        if const_expr(config.fp8_rows):
            page, place = table + Int64(number >> 6) * page_bytes, number & (PAGE_ROWS - 1)
            row = page + (place * ROW_DATA_BYTES + first)
            scale_bytes = page + (place * ROW_SCALE_BYTES + PAGE_ROWS * ROW_DATA_BYTES)
            if const_expr(config.warpgroups == 1):
                scales[2 * i], scales[2 * i + 1] = ptx.load_8_bytes(scale_bytes, indices[i])
            else:
                scales[i] = ptx.load_4_bytes(scale_bytes + half * 4, indices[i])
        else:
            row = table + (Int64(number) * page_bytes + first)
        addresses[i] = cutlass.select_(indices[i] >= 0, row, Int64(ptx.HOLE))


def may_be_copied(config: FewHeads, i: int) -> bool:
    """Whether a warpgroup's i-th group may be one that is bf16 already: the last one of an FP8 row, or any."""
    return not config.fp8_rows or i == config.groups - 1


def always_copied(config: FewHeads, i: int) -> bool:
    """Whether it is in every warpgroup."""
    return not config.fp8_rows or (i == config.groups - 1 and config.warpgroups == 1)


@cute.jit
def load_group(
    config: cutlass.Constexpr,
    addresses: cute.Tensor,
    half: Int32 | int,
    quad: Int32,
    i: cutlass.Constexpr,
    words: cute.Tensor,
) -> None:
    """This thread's 16 channels of both rows, of the warpgroup's i-th group; zeros for holes."""
    if const_expr(always_copied(config, i)):
        load_bf16(config, addresses, quad, i, words)
    elif const_expr(may_be_copied(config, i)):
        if half == config.warpgroups - 1:
            load_bf16(config, addresses, quad, i, words)
        else:
            load_e4m3(addresses, i, words)
    else:
        load_e4m3(addresses, i, words)


def load_e4m3(addresses: cute.Tensor, i: int, words: cute.Tensor) -> None:
    """16 bytes of each row."""
    for row in range(ROWS):
        for j, word in enumerate(ptx.load_16_bytes(addresses[row], i * GROUP)):
            words[4 * row + j] = word


def load_bf16(config: FewHeads, addresses: cute.Tensor, quad: Int32, i: int, words: cute.Tensor) -> None:
    """32 bytes of each row."""
    offset = i * ROW_STRIDE
    if config.fp8_rows:  # behind the e4m3; addresses have 16 bytes a thread, not 32
        offset = quad * 16 + (NOPE_DIM - (config.warpgroups - 1) * config.groups * GROUP)
    for row in range(ROWS):
        for j in range(2):
            for k, word in enumerate(ptx.load_16_bytes(addresses[row], offset + 16 * j)):
                words[8 * row + 4 * j + k] = word


# -> operands of the scores, and values in shared memory


@cute.jit
def convert_half_group(
    config: cutlass.Constexpr,
    half: Int32 | int,
    i: cutlass.Constexpr,
    j: cutlass.Constexpr,
    words: cute.Tensor,
    scales: cute.Tensor,
    operand: cute.Tensor,
) -> None:
    """Eight channels of both rows of a loaded group as the left operands of two `wgmma`: 32 bits of row r, channels
    8 j + 2 c and 2 c + 1, at [2 * c + r]."""
    if const_expr(always_copied(config, i)):
        copy_words(j, words, operand)
    elif const_expr(may_be_copied(config, i)):
        if half == config.warpgroups - 1:
            copy_words(j, words, operand)
        else:
            dequantise_words(config, i, j, words, scales, operand)
    else:
        dequantise_words(config, i, j, words, scales, operand)


def copy_words(j: int, words: cute.Tensor, operand: cute.Tensor) -> None:
    """bf16 as they are."""
    for row in range(ROWS):
        for c in range(4):
            operand[2 * c + row] = words[8 * row + 4 * j + c]


def dequantise_words(
    config: FewHeads, i: int, j: int, words: cute.Tensor, scales: cute.Tensor, operand: cute.Tensor
) -> None:
    """e4m3 times their scale."""
    for row in range(ROWS):
        scale_word = scales[2 * row + i // 4] if config.warpgroups == 1 else scales[row]
        scale = ptx.scale_pair((scale_word >> (8 * (i % 4))) & 0xFF)
        for b in range(2):
            word = words[4 * row + 2 * j + b]
            operand[4 * b + row], operand[4 * b + 2 + row] = ptx.dequantise(word, scale)


def store_values(place: Int32, row: Int32, quad: Int32, j: int, operand: cute.Tensor) -> None:
    """The same to the rows of a swizzled block, at `place` the thread's first one."""
    for i in range(ROWS):
        words = tuple(operand[2 * c + i] for c in range(4))
        ptx.store_shared(place + (i * 8 * ROW_STRIDE + ((quad * 2 + j) ^ (row & 7)) * 16), words)


def multiply_half_group(
    mma: cute.TiledMma, scores: cute.Tensor, operand: cute.Tensor, q: cute.Tensor, j: int, accumulate: bool
) -> None:
    """scores (+)= operand @ Q^T over these channels, not waited for."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    for k in range(2):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(atom, scores, operand[None, None, k], q[None, None, 2 * j + k], scores)
    warpgroup.commit_group()


# Q


@cute.jit
def load_q(config: cutlass.Constexpr, args: Arguments, shared: cutlass.Constexpr, thread: Int32, token: Int32) -> None:
    """Q to shared memory, zeros where there are no heads; barriers must follow.

    A thread's 16 channels of a group are, four at a time, in one of the group's four operands: columns 2 q, 2 q + 1,
    2 q + 8 and 2 q + 9 of it if the thread is the q-th of four. So channel 16 q + 4 b + 2 h + j is at 16 b + 8 h + 2 q
    + j, and 16 bytes of shared memory are four words of Q, 32 bytes apart.
    """
    base = Int32(shared.q.data_ptr().toint())
    for i in cutlass.range_constexpr(config.heads * GROUPS * 8 // config.threads):
        number = i * config.threads + thread
        chunk, group, head = number % 8, number // 8 % GROUPS, number // (8 * GROUPS)
        exists = args.num_heads - 1 - head
        source = Int64(token) * args.q_token_stride + Int64(head) * args.q_head_stride
        address = args.q + source * 2 + (group * ROW_STRIDE + chunk * 4)
        words = [ptx.load_or_zeros(Uint32, 1, address + 32 * q, exists, "ge.s32", cache="") for q in range(4)]
        block = base + group * (config.heads * ROW_STRIDE) + head * ROW_STRIDE
        ptx.store_shared(block + ((chunk ^ (head & 7)) * 16), tuple(words))
    cute.arch.fence_view_async_shared()
