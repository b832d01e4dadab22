"""Attention on Hopper: wgmma over gathered rows, one persistent kernel for decode, speculation and prefill. (Calls of
few tokens with few keys have another kernel with the same bits, cluster.py; calls of few heads have few_heads/.)

A work tile is one query token, one block of 64 heads, one sub-split of its keys and one split of the channels of O. A
CTA iterates over work tiles (tile_scheduler.py). For each it loads Q once, and then keys in steps of 128: two key tiles
of 64. The keys of a step are bf16 in shared memory and serve as K (K-major) and V (MN-major), with a pipeline stage for
each of the eight groups of 64 channels.

    who             does                                                        waits for
    producer 0, 1   gathers rows: e4m3 -> bf16, st.shared; cp.async             free[group], of its four groups
    consumer 0, 1   S = Q K^T of its key tile, group by group as they arrive    full[group], of all eight
                    the row max over both key tiles, P = 2**(S - row max)       the other consumer's row max
                    64 channels of P V at a time, of its half; merged into O    the other consumer's P

Producers and consumers are warpgroups, two of each running the same code. A consumer has the scores of one key tile and
half of the channels of O, in registers; a producer fills one half of the channels of both key tiles. A group is free
again when its product is done, which is its last reader: the scores came before, and the exchange of P implies that the
other key tile's scores are done. Consumer 0 publishes its P when its first product is under way. So the products
alternate: while one consumer merges, the other consumer's product runs.

bf16 rows are only copied, and one producer does that for both halves. The registers of the second producer then hold
the other consumer's P; otherwise `wgmma` would read P from shared memory again for every group, in addition to keys and
copies.

Where tokens have a CTA each, consecutive tokens overlap: Q of the next token is loaded as soon as the current Q has no
readers left, and the epilogue stores O from the memory of P during the first scores of the next token. Both use TMA.

Where tokens are few, several CTAs divide the channels of O (channel splits). Each computes all scores, which repeats
work, but only its own groups of the products, of the output and of the combined columns. Groups of other channel splits
are free after the scores. The registers that O no longer needs go to a second pair of producers, which alternates with
the first.

Every step is computed by itself, with its own row max and products that begin at zero. Then it is merged into O and
the row sums (`softmax.rescale_factors`): O = O * a + (P V) * b in fp32. So any CTA may compute a step, as long as the
order of the merges is kept: the steps of a token are merged within KV splits, then KV splits with each other, and the
KV splits follow from the token's own length alone (`split.num_kv_splits`, `split.kv_split_steps`). Results are bitwise
equal in any batch, on any number of multiprocessors, and with and without `split_keys` for a token that has one KV
split. Only the assignment of steps to CTAs depends on the batch: if all work tiles fit on the GPU at once, KV splits
are divided into sub-splits of a few steps, and the channels into channel splits; if tokens are many, a CTA has whole
tokens, and merges their KV splits by way of a scratch slot of its own. The scores are summed over the channels in one
order for every channel split. A sub-split at the beginning of a KV split merges its steps. Later sub-splits export one
partial result a step; the running (max, sum, O) that they continue is in another CTA.

Lazy rescaling: a row max, in units of log2, only moves when the row max of a step exceeds it by more than RESCALE_LOG2,
which is rare after a work tile's first step. The row sum is the sum of P as it is multiplied, in bf16.

Where keys are divided, one warp computes the next work tile while rows are being loaded, and the consumers read it
from shared memory (`publish_tile`). Producers, which are ahead of the consumers, compute their work tiles themselves,
except the first.

Partial results are fp32, in scratch slots of their CTA. Every CTA of a token then combines some of the columns, one
iteration later than it wrote its own, so no CTA waits while it has work. Where only the first sub-split of a token has
a step more than the others, the CTAs of the others combine, and prefetch all partial results but the first while they
wait for the first. A CTA waits for sub-splits of the token that it combines, whose numbers are below the number of the
work tile that it has just written; and before it overwrites a slot, for the combine that reads the slot, of a still
older work tile. So every wait ends, because all CTAs are resident at once (one a multiprocessor, by a cooperative
launch), and a token has at most as many KV splits as there are CTAs, which `launch.sparse_attention` checks.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.device.tma import TmaTensor
from dsv4_kernels.kv_layout import NOPE_DIM
from dsv4_kernels.sparse_attention.sm90 import gather, q_and_out
from dsv4_kernels.sparse_attention.sm90 import tile_scheduler as scheduler
from dsv4_kernels.sparse_attention.sm90.barriers import sync_producer
from dsv4_kernels.sparse_attention.sm90.consumer import consume
from dsv4_kernels.sparse_attention.sm90.plan import (
    BLOCK_BYTES,
    CONSUMER_THREADS,
    GROUP,
    GROUPS,
    HALF_GROUPS,
    PRODUCER_THREADS,
    ROW_STRIDE,
    STEP,
    Arguments,
    Entries,
    Shared,
    Split,
)


@cute.jit
def launch(config: cutlass.Constexpr, arguments: Arguments, num_ctas: Int32, stream: cuda.CUstream) -> None:
    """Launches the persistent kernel; all CTAs must be resident at once."""
    tma_q = None
    if const_expr(not config.split):
        tma_q = q_and_out.tma_of_q(arguments)
    kernel(config, arguments, tma_q, q_and_out.tma_of_out(arguments)).launch(
        grid=[num_ctas, 1, 1],
        block=[config.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        # CTAs wait for each other's partial results: they start together, whatever else runs on the GPU.
        cooperative=config.split is not Split.NONE,
        use_pdl=dependent_launch.may_begin_early(cooperative=config.split is not Split.NONE),
    )


@cute.kernel
def kernel(config: cutlass.Constexpr, args: Arguments, tma_q: TmaTensor | None, tma_out: TmaTensor) -> None:
    """Sets up barriers and the schedule, and sends every warp to its role with its number of registers."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared = cutlass.utils.SmemAllocator().allocate(Shared)
    if warp == 0:
        with cute.arch.elect_one():
            for group in cutlass.range_constexpr(GROUPS):
                arrivals = PRODUCER_THREADS // 32 + gather.async_arrivals(config, group)
                cute.arch.mbarrier_init(shared.full.data_ptr() + group, arrivals)
                cute.arch.mbarrier_init(shared.free.data_ptr() + group, 4)
            cute.arch.mbarrier_init(shared.q_full.data_ptr(), 1)
            cute.arch.mbarrier_init_fence()
    dependent_launch.begin()
    if const_expr(config.split):
        if warp == CONSUMER_THREADS // 32:
            scheduler.schedule_tiles(config, args, shared, thread % 32)
        elif warp > CONSUMER_THREADS // 32:
            gather.prefetch_lists(config, args, thread - CONSUMER_THREADS - 32)
    cute.arch.barrier()
    if warp < CONSUMER_THREADS // 32:
        cute.arch.setmaxregister_increase(config.registers[0])
        consume(config, args, shared, tma_q, tma_out, thread, warp // 4)
    else:
        cute.arch.setmaxregister_decrease(config.registers[1])
        producer = warp // 4 - CONSUMER_THREADS // 128
        produce(config, args, shared, thread % 128, producer % 2, producer // 2)


# Producer warps


@cute.jit
def produce(
    config: cutlass.Constexpr, args: Arguments, shared: cutlass.Constexpr, thread: Int32, half: Int32, rank: Int32
) -> None:
    """One producer warpgroup: fills the channel groups of a half, each as soon as it is free.

    It fills all groups of the half, or every second group from `rank` on; a single producer fills both halves.

    `config.rows` adjacent threads share `config.rows` rows, which are as far apart as possible, and read a row's bytes
    of a group together. FP8 rows wait in registers: loads are issued `prefetch_depth` groups before their conversion.
    Row indices are loaded a step before that: a thread loads one index, prefetches its FP8 row into L2 and passes the
    index to its warpgroup through shared memory.
    """
    fp8 = config.fp8_rows
    lane, warp = thread % 32, thread // 32
    row, row_lane = thread // config.rows, thread % config.rows
    per_half = config.producers_per_half
    if const_expr(per_half == 1):
        rank = 0
    # A producer that fills both halves alternately numbers the second half's groups after the first half's.
    halves = 2 if config.producers == 1 else 1
    row_indices = shared.row_indices.data_ptr() + (rank * 2 + half) * 2 * STEP
    depth = config.prefetch_depth
    words = [cute.make_rmem_tensor((4 * config.rows,), Uint32) for _ in range(depth)]
    scales = cute.make_rmem_tensor((config.rows,), Uint32)
    address = cute.make_rmem_tensor((config.rows,), Int64)
    num_groups = HALF_GROUPS // per_half * halves

    num_tiles = scheduler.count_work_tiles(config, args, shared)
    index, _, _ = cute.arch.block_idx()
    # Three steps are under way: the current step is written, the rows of the next step are prefetched into L2, and the
    # row indices of the leading step are loaded. There is a leading step while index < num_tiles.
    token, leading, end, visible = Int32(0), Int32(0), Int32(0), Int32(0)
    step, next_step = Int32(-1), Int32(-1)  # -1: no such step
    row_index, phase = Int32(-1), Int32(1)
    if index < num_tiles:
        work_tile = scheduler.work_tile_at(config, args, shared, index, Int32(0))
        token, leading, end, visible = work_tile.token, work_tile.first_step, work_tile.end_step, work_tile.visible
        step = leading
        (row_indices + thread).store(gather.load_row_index(config, args, token, visible, step, thread))
        sync_producer(rank * 2 + half)
        gather.locate_rows(config, args, step, row_indices + row, gather.first_byte(config, half, row_lane), address)
        if const_expr(fp8):
            for i in cutlass.range_constexpr(depth):
                gather.load_group(config, address, half, scheduler.group_at(i * per_half + rank), words[i])
        index, token, leading, end, visible = advance_step(
            config, args, shared, index, num_tiles, token, leading, end, visible
        )
        if index < num_tiles:
            next_step = leading
            row_index = gather.load_row_index(config, args, token, visible, leading, thread)
    while step >= 0:
        half = cute.arch.make_warp_uniform(half)  # values derived from it need no registers in between
        full, free = shared.full.data_ptr() + half * HALF_GROUPS, shared.free.data_ptr() + half * HALF_GROUPS
        place = Int32(shared.keys.data_ptr().toint()) + half * HALF_GROUPS * BLOCK_BYTES + row * ROW_STRIDE
        row_indices = shared.row_indices.data_ptr() + (rank * 2 + half) * 2 * STEP
        next_row_indices = row_indices + phase * STEP
        # The first groups of this step are being loaded, and the consumers are busy with the previous step.
        if const_expr(fp8):
            gather.load_scales(config, args, step, row_indices + ((phase ^ 1) * STEP + row), scales, half)
        (next_row_indices + thread).store(row_index)
        if const_expr(fp8 and config.entries != Entries.NONE):  # no gain for work tiles of a single step
            gather.prefetch_half_row(config, args, next_step, row_index, half)
        sync_producer(rank * 2 + half)
        row_index = Int32(-1)
        if index < num_tiles:
            index, token, leading, end, visible = advance_step(
                config, args, shared, index, num_tiles, token, leading, end, visible
            )
            if index < num_tiles:
                row_index = gather.load_row_index(config, args, token, visible, leading, thread)
        for i in cutlass.range_constexpr(num_groups):
            group = scheduler.group_at(i // halves * per_half + rank) + i % halves * HALF_GROUPS
            cute.arch.mbarrier_wait(free + group, phase)
            if const_expr(i == 0):
                if (half == 0) & (rank == 0):
                    own_index = row_indices + ((phase ^ 1) * STEP + thread)
                    gather.write_row_bits(config, shared, own_index, warp, lane, address)
            if const_expr(not fp8):
                gather.copy_group(config, place + group * BLOCK_BYTES, row, row_lane, address, group * (GROUP * 2))
            elif (half == 0) | (group < HALF_GROUPS - 1):
                gather.store_group(config, place + group * BLOCK_BYTES, row, row_lane, group, words[i % depth], scales)
            else:
                gather.copy_group(
                    config, place + group * BLOCK_BYTES, row, row_lane, address, NOPE_DIM - HALF_GROUPS * GROUP
                )
            gather.publish_group(config, full + group, lane, half, group)
            if const_expr(fp8 and i + depth < num_groups):
                coming_group = scheduler.group_at((i + depth) * per_half + rank)
                gather.load_group(config, address, half, coming_group, words[i % depth])
        # Not earlier: within a step the consumers wait for every group; after its last group they have other work.
        gather.locate_rows(
            config, args, next_step, next_row_indices + row, gather.first_byte(config, half, row_lane), address
        )
        if const_expr(fp8):
            for i in cutlass.range_constexpr(depth):
                gather.load_group(config, address, half, scheduler.group_at(i * per_half + rank), words[i])
        step, next_step = next_step, leading
        if index >= num_tiles:
            next_step = Int32(-1)
        phase ^= 1


@cute.jit
def advance_step(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    index: Int32,
    num_tiles: Int32,
    token: Int32,
    step: Int32,
    end: Int32,
    visible: Int32,
) -> tuple:
    """The next step: of the same work tile, or the first of this CTA's next work tile (none if index >= num_tiles)."""
    step += 1
    if step == end:
        ctas, _, _ = cute.arch.grid_dim()
        index += ctas
        if index < num_tiles:
            work_tile = scheduler.compute_tile(config, args, shared, index)
            token, step, end, visible = work_tile.token, work_tile.first_step, work_tile.end_step, work_tile.visible
    return index, token, step, end, visible
