"""TMA tensors of Q and O, and the loads of Q by the persistent kernel (persistent.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from dsv4_kernels.device import ptx
from dsv4_kernels.device.tma import TmaTensor, swizzled_atom, swizzled_layout, tma_partition
from dsv4_kernels.sparse_attention.sm90.barriers import sync
from dsv4_kernels.sparse_attention.sm90.plan import (
    BLOCK_BYTES,
    CONSUMER_THREADS,
    DIM,
    GROUP,
    GROUPS,
    HEADS,
    ROW_STRIDE,
    WARP_HEADS,
    Arguments,
    NamedBarrier,
)
from dsv4_kernels.sparse_attention.sm90.tile_scheduler import WorkTile, published_tile, whole_token_tile


def rows_of_heads(start: Int64, heads: Int32, tokens: Int32, head_stride: Int32, token_stride: Int32) -> cute.Tensor:
    """A tensor [heads, 512, tokens] bf16 in global memory."""
    strides = (cute.assume(head_stride, 8), 1, cute.assume(token_stride, 8))
    pointer = cute.make_ptr(BFloat16, start, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((heads, DIM, tokens), stride=strides))


def tma_of_q(arguments: Arguments) -> TmaTensor:
    """Q for loads of 64 heads and 64 channels at a time."""
    rows = (arguments.num_heads, arguments.num_tokens, arguments.q_head_stride, arguments.q_token_stride)
    q = rows_of_heads(arguments.q, *rows)
    return TmaTensor(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), q, *box_of_heads(HEADS)))


def tma_of_out(arguments: Arguments) -> TmaTensor:
    """O for stores of a warp's 16 heads and 64 channels at a time."""
    rows = (arguments.num_heads, arguments.num_tokens, arguments.out_head_stride, arguments.out_token_stride)
    out = rows_of_heads(arguments.out, *rows)
    return TmaTensor(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), out, *box_of_heads(WARP_HEADS)))


def box_of_heads(heads: int) -> tuple:
    """(layout in shared memory, shape) of a box: 64 channels of `heads` heads, swizzled."""
    return cute.tile_to_shape(swizzled_atom(), (heads, GROUP), order=(0, 1)), (heads, GROUP)


# Loads of Q, by the persistent kernel


@cute.jit
def load_q(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    tma_q: TmaTensor | None,
    thread: Int32,
    index: Int32,
    iteration: Int32,
) -> None:
    """Starts copying Q of a work tile to shared memory, with zeros for missing heads.

    One thread copies it by TMA. Where keys are divided, TMA would take too many registers: all consumers use cp.async.
    """
    if const_expr(config.split):
        load_q_rows(args, shared, thread, published_tile(config, shared, iteration))
    elif thread < 32:
        work_tile = whole_token_tile(config, args, index, Int32(0))
        full = shared.q_full.data_ptr()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, HEADS * DIM * 2)
        places = shared.q.get_tensor(*swizzled_layout((HEADS, GROUP, GROUPS)))
        targets, sources = tma_partition(tma_q, places)
        for group in cutlass.range_constexpr(GROUPS):
            source = sources[None, work_tile.head_block, group, work_tile.token]
            cute.copy(tma_q.atom, source, targets[None, group], tma_bar_ptr=full)


@cute.jit
def load_q_rows(args: Arguments, shared: cutlass.Constexpr, thread: Int32, work_tile: WorkTile) -> None:
    """Starts copying Q by cp.async of all consumer threads, 16 bytes at a time."""
    base = Int32(shared.q.data_ptr().toint())
    for i in cutlass.range_constexpr(HEADS * DIM * 2 // 16 // CONSUMER_THREADS):
        row = i * (CONSUMER_THREADS // 64) + thread // 64
        place = thread % 64  # unit of 16 bytes in the row
        head = work_tile.head_block * HEADS + row
        num_bytes = Int32(16)
        if head >= args.num_heads:
            num_bytes, head = Int32(0), Int32(0)
        source = Int64(work_tile.token) * args.q_token_stride + Int64(head) * args.q_head_stride
        block = base + (place // 8) * BLOCK_BYTES + row * ROW_STRIDE
        ptx.copy_async(block + ((place % 8) ^ (row & 7)) * 16, args.q + source * 2 + place * 16, num_bytes)
    cute.arch.cp_async_commit_group()


@cute.jit
def wait_for_q(config: cutlass.Constexpr, shared: cutlass.Constexpr, iteration: Int32) -> None:
    """Waits until Q of this iteration's work tile is in shared memory."""
    if const_expr(config.split):
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        sync(NamedBarrier.CONSUMERS)
    else:
        cute.arch.mbarrier_wait(shared.q_full.data_ptr(), iteration % 2)
