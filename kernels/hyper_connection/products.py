"""The products of the new streams with fn, on tensor cores, and a warp's part of their sums.

The products are in tf32: streams are bf16, so exact in tf32, and fn is split into two tf32 numbers whose sum equals fn
except for the last two bits (`arithmetic.split_tf32`). Rows of fn are the left operand, as they lie in shared memory.
The right operand has eight columns of channels, one token each, in the registers of the threads that own them. If a
token group has fewer than eight tokens, threads that own another unit of the same token pass on their values, unit
after unit, and the columns after the last token repeat the tokens.

Within a stream the products of a row are one chain. Streams are independent until their sums are added, in turn, to the
totals, so a plan may compute them side by side (`Plan.interleaved`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from dsv4_kernels.device import bf16_rows, pipeline, ptx
from dsv4_kernels.device.mma import multiply_tf32
from dsv4_kernels.device.tma import copy_bulk
from dsv4_kernels.hyper_connection.arithmetic import (
    UPPER_BITS,
    address_of,
    split_tf32,
    sum_of_squares,
    sum_over_units,
    upper_bits_at_run_time,
)
from dsv4_kernels.hyper_connection.plan import CHANNELS, QUAD, STREAMS, UNITS, AnyArguments
from dsv4_kernels.hyper_connection.streams import Streams


class Products(Streams):
    """The work of a warp with its own channels of all streams and all rows of fn, and the copies of fn."""

    @cute.jit
    def fetch(
        self,
        args: AnyArguments,
        shared: cutlass.Constexpr,
        lane: Int32,
        rank: Int32,
        begin: Int32,
        end: cutlass.Constexpr,
    ) -> None:
        """Starts the copies of this CTA's columns of fn, one stream after the other; a lane has a row."""
        plan = self.plan
        source = args.fn + (Int64(lane) * (STREAMS * plan.dim) + rank * plan.slice) * 4
        target = Int32(shared.fn.data_ptr().toint()) + lane * plan.row_bytes
        for stream in cutlass.range(begin, end, 1, unroll=1):
            stage = stream % plan.stages
            full = shared.full.data_ptr() + stage
            if const_expr(end > plan.stages):
                cute.arch.mbarrier_wait(shared.empty.data_ptr() + stage, (stream // plan.stages - 1) & 1)
                cute.arch.fence_view_async_shared()  # generic loads before writes by TMA (bulk copies)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, plan.rows * plan.slice * 4)
            cute.arch.sync_warp()
            if lane < plan.rows:
                place = target + stage * plan.stage_bytes
                copy_bulk(place, source + Int64(stream) * plan.dim * 4, plan.slice * 4, Int32(full.toint()))

    @cute.jit
    def fetch_into_l2(self, args: AnyArguments, lane: Int32, rank: Int32) -> None:
        """Fetches the weights that this CTA reads later: columns of fn that have no stage yet, and the norm's weight.

        A model reads its weights once a forward, so they are in memory and not in L2 when the kernel before ends.
        """
        plan = self.plan
        if lane < plan.rows:
            source = args.fn + (Int64(lane) * (STREAMS * plan.dim) + rank * plan.slice) * 4
            for stream in cutlass.range_constexpr(plan.stages, STREAMS):
                ptx.fetch_into_l2(source + stream * (plan.dim * 4), plan.slice * 4)
        elif lane == plan.rows:
            size = 2 if plan.bf16_weight else 4
            ptx.fetch_into_l2(args.norm_weight + rank * (plan.slice * size), plan.slice * size)

    @cute.jit
    def add_up(
        self,
        shared: cutlass.Constexpr,
        team: Int32 | cutlass.Constexpr,
        x: cute.Tensor,
        lane: Int32,
        warp: Int32,
    ) -> None:
        """Stores this warp's part of the sum of squares and of the products with fn, [token][row]."""
        plan = self.plan
        row_group, in_quad = lane // QUAD, lane % QUAD
        token_bytes = plan.quads * 16
        sums = address_of(shared.sums, team, plan.warps * plan.tokens * token_bytes) + warp * plan.tokens * token_bytes
        streams = [[bf16_rows.channels(self.words_of(x, run, s)) for run in range(plan.runs)] for s in range(STREAMS)]
        units = zip(*[self.by_units(runs) for runs in streams], strict=True)
        squares = [sum_of_squares([v for values in unit for v in values]) for unit in units]
        square = sum_over_units(squares, plan.tokens)
        if (in_quad == 0) & (row_group < plan.tokens):
            place = sums + (row_group * plan.quads + plan.quads - 1) * 16
            ptx.store_shared(place, (square, Float32(0.0), Float32(0.0), Float32(0.0)))
        # Rows 0 to 15 of fn need one instruction for each half of the split numbers; the last eight have both in one.
        upper_row = row_group % STREAMS if plan.rows < 8 else row_group
        fn = Int32(shared.fn.data_ptr().toint()) + (warp * (UNITS * QUAD * CHANNELS) + in_quad * (2 * CHANNELS)) * 4
        rows = [fn + (upper_row + 8 * i) * plan.row_bytes for i in range(max(1, plan.rows // 8))]
        upper_bits = upper_bits_at_run_time() if plan.interleaved else Uint32(UPPER_BITS)
        totals = [[Float32(0.0)] * 4 for _ in range(-(-plan.rows // 16))]
        for first in cutlass.range_constexpr(0, STREAMS, plan.side_by_side):
            streams = range(first, first + plan.side_by_side)
            for stream in streams:
                stage, phase = pipeline.stage_of(stream, plan.stages)
                cute.arch.mbarrier_wait(shared.full.data_ptr() + stage, phase)
            products = [[[Float32(0.0)] * 4 for _ in totals] for _ in streams]
            for unit in cutlass.range_constexpr(UNITS):
                place = (unit // 2 * (2 * QUAD) + unit % 2) * CHANNELS * 4
                offsets = [pipeline.stage_of(stream, plan.stages)[0] * plan.stage_bytes + place for stream in streams]
                # [stream][row][channel][upper or lower half]
                factors = [
                    [[split_tf32(f, upper_bits) for f in ptx.load_shared_f32x4(row + o)] for row in rows]
                    for o in offsets
                ]
                columns = [self.columns(x, stream, unit, lane) for stream in streams]
                for step in cutlass.range_constexpr(CHANNELS // 2):
                    pairs = [of_stream[2 * step : 2 * step + 2] for of_stream in columns]
                    # [stream][row][channel of the pair][upper or lower half]
                    halves = [[row[2 * step : 2 * step + 2] for row in of_stream] for of_stream in factors]
                    if const_expr(plan.rows > 8):
                        for half in cutlass.range_constexpr(2):
                            for i in cutlass.range_constexpr(plan.side_by_side):
                                above, below = halves[i][0], halves[i][1]  # eight rows apart
                                left = (above[0][half], below[0][half], above[1][half], below[1][half])
                                products[i][0] = multiply_tf32(left, pairs[i], products[i][0])
                    for i in cutlass.range_constexpr(plan.side_by_side):
                        left = (*halves[i][-1][0], *halves[i][-1][1])
                        products[i][-1] = multiply_tf32(left, pairs[i], products[i][-1])
            if const_expr(first + plan.stages < STREAMS):  # the stage will be refilled; streams are in turn
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(shared.empty.data_ptr() + first % plan.stages)
            for of_stream in products:
                totals = [[t + p for t, p in zip(*pair, strict=True)] for pair in zip(totals, of_stream, strict=True)]
        if const_expr(plan.rows > 8):
            columns = [totals[0][:2], totals[0][2:]]
        else:
            columns = []
        columns.append([totals[-1][i] + totals[-1][2 + i] for i in range(2)])
        for i in cutlass.range_constexpr(len(columns)):
            row = row_group + 8 * i
            for k in cutlass.range_constexpr(2):
                token = 2 * in_quad + k
                if (token < plan.tokens) & (row < plan.rows):
                    ptx.store_shared_f32(sums + token * token_bytes + row * 4, columns[i][k])

    def columns(self, x: cute.Tensor, stream: int, unit: int, lane: Int32) -> list:
        """A thread's four channels of a unit, of its column's token, as words of the right operand (the bits of
        fp32)."""
        plan = self.plan
        first = unit % plan.tokens * (CHANNELS // 2)
        run, first = first // plan.run_words, first % plan.run_words
        words = self.words_of(x, run, stream)[first : first + CHANNELS // 2]
        if plan.tokens < UNITS:
            # The lane of the same token that owns the unit.
            owner = (unit // plan.tokens * plan.tokens + lane // QUAD % plan.tokens) * QUAD + lane % QUAD
            words = [Uint32(cute.arch.shuffle_sync(word, owner)) for word in words]
        return [ptx.as_u32(value) for value in bf16_rows.channels(words)]
