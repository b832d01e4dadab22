"""The hyper-connections between two sublayers in one launch, on Hopper and Blackwell (sm_90a, sm_100a).

A cluster of eight CTAs takes a group of tokens, and each of its CTAs an eighth of the channels of all four streams. A
thread has four neighbouring channels and keeps its part of the new streams in registers from when they are made to
when they are mixed, so that streams are read once and written once.

    who             does                                                            waits for
    one warp        asks for fn's rows, by the copy engine, row by row              empty[stage], if it has had a row
                    balances comb of the token that has this CTA's number           sums_there
    the others      new streams = post y + comb^T streams; writes them
                    24 products with fn, added up over lanes                        full[stage]
                    sums over warps, sent to all CTAs of the cluster                the warps of the CTA
                    sigmoids: pre, and post of one token                            sums_there, from all CTAs
                    mixture; its sum of squares, sent to all CTAs                   the warps of the CTA
                    x = norm of the mixture; writes it                              squares_there, from all CTAs

How a token's sums are added up depends on nothing but d: over a thread's channels stream by stream, over the lanes of a
warp by halves, over warps and then over CTAs one after the other. Tokens of a group share what is read of fn and
nothing else, so a token has the same bits in any batch and in groups of any size. Behind the last token a group has
zeros, and nothing of them is written.

No CTA waits for another cluster. Nothing in shared memory is used twice but the stages.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from dsv4_kernels import ptx
from dsv4_kernels.hyper_connection.plan import (
    CHANNELS,
    CLUSTER,
    PRE_ROWS,
    STREAMS,
    WARP,
    Arguments,
    Plan,
    shared_memory,
)

LOG2_E = 1.4426950408889634
GATES = 2 * STREAMS
"""The rows of fn whose products become sigmoids, pre and post; those of comb follow."""
VALUES = STREAMS * CHANNELS
"""Of a token, in a thread."""


class HyperConnection:
    """The kernel of one plan. `launch` is what is compiled."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.shared_memory = shared_memory(plan) if plan.rows else None

    @cute.jit
    def launch(self, arguments: Arguments, num_groups: Int32, stream: cuda.CUstream) -> None:
        """One cluster for a group of tokens."""
        if const_expr(self.plan.rows > 0):
            self.kernel(arguments).launch(
                grid=[num_groups * CLUSTER, 1, 1],
                cluster=[CLUSTER, 1, 1],
                block=[self.plan.cta_threads, 1, 1],
                stream=stream,
                min_blocks_per_mp=self.plan.ctas,
                preferred_smem_carveout=100,  # percent: all shared memory, so that as many CTAs fit as were planned
            )
        else:
            self.write_back(arguments).launch(
                grid=[num_groups * CLUSTER, 1, 1], block=[self.plan.cta_threads, 1, 1], stream=stream
            )

    @cute.kernel
    def write_back(self, args: Arguments) -> None:
        """`hc_post` alone: CTAs have nothing to tell each other."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        self.new_streams(args, cta // CLUSTER * self.plan.tokens, self.first_channel(cta % CLUSTER, thread))

    @cute.kernel
    def kernel(self, args: Arguments) -> None:
        """Sets up barriers and sends every warp to its role."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        rank, first = cta % CLUSTER, cta // CLUSTER * plan.tokens
        shared = cutlass.utils.SmemAllocator().allocate(self.shared_memory)
        if thread == plan.threads:
            for stage in cutlass.range_constexpr(plan.stages):
                cute.arch.mbarrier_init(shared.full.data_ptr() + stage, 1)
                cute.arch.mbarrier_init(shared.empty.data_ptr() + stage, plan.warps)
            cute.arch.mbarrier_init(shared.sums_there.data_ptr(), 1)
            cute.arch.mbarrier_init(shared.squares_there.data_ptr(), 1)
            cute.arch.mbarrier_init_fence()
            received_bytes = CLUSTER * plan.tokens * plan.quads * 16
            cute.arch.mbarrier_arrive_and_expect_tx(shared.sums_there.data_ptr(), received_bytes)
            square_bytes = CLUSTER * plan.square_slots * 4
            cute.arch.mbarrier_arrive_and_expect_tx(shared.squares_there.data_ptr(), square_bytes)
        cute.arch.sync_warp()
        cute.arch.cluster_arrive_relaxed(aligned=True)
        if warp < plan.warps:
            self.compute(args, shared, thread, rank, first)
        else:
            self.fetch(args, shared, thread % WARP, rank)
            if const_expr(plan.rows == PRE_ROWS):
                self.balance(args, shared, thread % WARP, rank, first)

    # One warp: fn and comb

    @cute.jit
    def fetch(self, args: Arguments, shared: cutlass.Constexpr, lane: Int32, rank: Int32) -> None:
        """Asks for this CTA's columns of fn, row by row; a lane has a stream."""
        plan = self.plan
        piece = plan.row_bytes // STREAMS
        source = args.fn + Int64(lane * plan.dim + rank * plan.slice) * 4
        target = Int32(shared.fn.data_ptr().toint()) + lane * piece
        for row in cutlass.range(0, plan.stages, 1, unroll=1):
            self.fetch_row(shared, lane, row, source + Int64(row) * (STREAMS * plan.dim * 4), target)
        cute.arch.barrier(barrier_id=1, number_of_threads=plan.cta_threads)
        cute.arch.cluster_wait()
        if const_expr(plan.stages < plan.rows):
            for row in cutlass.range(plan.stages, plan.rows, 1, unroll=1):
                cute.arch.mbarrier_wait(shared.empty.data_ptr() + row % plan.stages, (row // plan.stages - 1) & 1)
                cute.arch.fence_view_async_shared()  # what was read by loads is written by the copy engine
                self.fetch_row(shared, lane, row, source + Int64(row) * (STREAMS * plan.dim * 4), target)

    @cute.jit
    def fetch_row(self, shared: cutlass.Constexpr, lane: Int32, row: Int32, source: Int64, target: Int32) -> None:
        """Asks for one row."""
        stage = row % self.plan.stages
        full = shared.full.data_ptr() + stage
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.plan.row_bytes)
        cute.arch.sync_warp()
        if lane < STREAMS:
            piece = self.plan.row_bytes // STREAMS
            copy_bulk(target + stage * self.plan.row_bytes, source, piece, Int32(full.toint()))

    @cute.jit
    def balance(self, args: Arguments, shared: cutlass.Constexpr, lane: Int32, rank: Int32, first: Int32) -> None:
        """comb of the token that has this CTA's number in the group: softmax, then Sinkhorn's iteration, by one lane.

        Nobody waits for it: the mixture needs pre only. With a matrix in one thread no step of the iteration goes
        through the exchange of lanes, which takes longer than adding up in turn.
        """
        token = first + rank
        if (lane == 0) & (rank < self.plan.tokens) & (token < args.num_tokens):
            base = []
            for quad in cutlass.range_constexpr(STREAMS):
                base.extend(ptx.load_or_zeros(Float32, 4, args.base + (GATES + 4 * quad) * 4, Int32(1), cache=""))
            scale = ptx.load_f32(args.scale + 8)
            ptx.wait_cluster(Int32(shared.sums_there.data_ptr().toint()), Int32(0))
            inverse = self.inverse_rms(args, shared, rank)
            comb = cute.make_rmem_tensor((STREAMS * STREAMS,), Float32)
            for quad in cutlass.range_constexpr(STREAMS):
                mix = self.quad_over_ctas(shared, rank, GATES // 4 + quad)
                for k in cutlass.range_constexpr(4):
                    comb[4 * quad + k] = ptx.fma(mix[k] * inverse, scale, base[4 * quad + k])
            for j in cutlass.range_constexpr(STREAMS):
                row = [comb[STREAMS * j + k] for k in range(STREAMS)]
                highest = ptx.fmax(ptx.fmax(row[0], row[1]), ptx.fmax(row[2], row[3]))
                row = [ptx.exp2((value - highest) * LOG2_E) for value in row]
                inverse_sum = reciprocal((row[0] + row[1]) + (row[2] + row[3]))
                for k in cutlass.range_constexpr(STREAMS):
                    comb[STREAMS * j + k] = ptx.fma(row[k], inverse_sum, args.hc_eps)
            divide_columns(comb, args.hc_eps)
            for _ in cutlass.range(1, args.iterations, 1, unroll=1):
                divide_rows(comb, args.hc_eps)
                divide_columns(comb, args.hc_eps)
            out = args.out_comb + Int64(token) * (STREAMS * STREAMS * 4)
            for j in cutlass.range_constexpr(STREAMS):
                ptx.store_f32x4(out + j * 16, tuple(comb[STREAMS * j + k] for k in range(STREAMS)))

    # The others: streams, sums and mixture

    @cute.jit
    def compute(self, args: Arguments, shared: cutlass.Constexpr, thread: Int32, rank: Int32, first: Int32) -> None:
        """All that a thread does with its channels."""
        plan = self.plan
        lane, warp = thread % WARP, thread // WARP
        channel = self.first_channel(rank, thread)
        x = self.new_streams(args, first, channel)
        gate_base, gate_scale = self.gate_parameters(args, thread)
        weight = None
        if const_expr(plan.norm):
            weight = self.weight(args, channel)
        cute.arch.barrier(barrier_id=1, number_of_threads=plan.cta_threads)  # barriers are set up
        self.add_up(shared, x, lane, warp)
        self.sync()
        cute.arch.cluster_wait()  # all CTAs of the cluster have begun, and set up theirs
        self.send(shared.sums, shared.received, shared.sums_there, thread, rank, plan.tokens * plan.quads)
        ptx.wait_cluster(Int32(shared.sums_there.data_ptr().toint()), Int32(0))
        self.gates(args, shared, thread, rank, first, gate_base, gate_scale)
        self.sync()
        words = self.mix(shared, x)
        out = args.out + (Int64(first) * plan.dim + channel) * 2
        if const_expr(not plan.norm):
            for t in cutlass.range_constexpr(plan.tokens):
                store_8_bytes_if(args.num_tokens - first - t, out + t * plan.dim * 2, words[2 * t], words[2 * t + 1])
        else:
            self.add_up_squares(shared, words, lane, warp)
            self.sync()
            self.send(
                shared.squares,
                shared.received_squares,
                shared.squares_there,
                thread,
                rank,
                plan.square_slots // 4,
            )
            ptx.wait_cluster(Int32(shared.squares_there.data_ptr().toint()), Int32(0))
            self.write_normalised(args, shared, words, weight, out, first)

    def first_channel(self, rank: Int32, thread: Int32) -> Int32:
        """Of a thread."""
        return rank * self.plan.slice + thread * CHANNELS

    def sync(self) -> None:
        """Of the warps that have channels."""
        cute.arch.barrier(barrier_id=2, number_of_threads=self.plan.threads)

    def new_streams(self, args: Arguments, first: Int32, channel: Int32) -> cute.Tensor:
        """Makes this thread's channels of the new streams, or loads them: [token][stream][channel], in fp32.

        All loads of streams are on their way before the first sum is made; coefficients, which all threads of the CTA
        load, a token ahead.
        """
        plan = self.plan
        x = cute.make_rmem_tensor((plan.tokens * VALUES,), Float32)
        loaded, outputs, following = [], [], None
        for t in range(plan.tokens):
            exists = args.num_tokens - first - t
            source = args.streams + Int64(first + t) * args.streams_stride + channel * 2
            loaded.append([load_8_bytes_if(exists, source + args.stream_stride * s) for s in range(STREAMS)])
            if plan.post:
                outputs.append(load_8_bytes_if(exists, args.y + Int64(first + t) * args.y_stride + channel * 2))
        if plan.post:
            following = self.coefficients(args, first, 0)
        for t in range(plan.tokens):
            old = [unpack(words) for words in loaded[t]]
            words = [word for pair in loaded[t] for word in pair]
            if plan.post:
                coefficients = following
                if t + 1 < plan.tokens:
                    following = self.coefficients(args, first, t + 1)
                words = self.written_back(unpack(outputs[t]), old, *coefficients)
                target = args.out_streams + (Int64(first + t) * (STREAMS * plan.dim) + channel) * 2
                for s in range(STREAMS):
                    place = target + s * plan.dim * 2
                    store_8_bytes_if(args.num_tokens - first - t, place, words[2 * s], words[2 * s + 1])
            for i, value in enumerate(unpack(words)):
                x[t * VALUES + i] = value
        return x

    def coefficients(self, args: Arguments, first: Int32, t: int) -> tuple:
        """post and comb of a token, of the sublayer that ends."""
        exists = args.num_tokens - first - t
        post = args.post + Int64(first + t) * args.post_stride
        comb = args.comb + Int64(first + t) * args.comb_stride
        rows = [ptx.load_or_zeros(Float32, 4, comb + 16 * j, exists, "gt.s32", cache="") for j in range(STREAMS)]
        return ptx.load_or_zeros(Float32, 4, post, exists, "gt.s32", cache=""), rows

    def written_back(self, y: list, old: list, post: tuple, comb: list) -> list:
        """The new streams as words of bf16: post[k] y + sum of comb[j][k] x[j], of stream after stream."""
        words = []
        for k in range(STREAMS):
            values = []
            for c in range(CHANNELS):
                value = post[k] * y[c]
                for j in range(STREAMS):
                    value = ptx.fma(comb[j][k], old[j][c], value)
                values.append(value)
            words += [ptx.pack_bf16(values[c], values[c + 1]) for c in range(0, CHANNELS, 2)]
        return words

    @cute.jit
    def add_up(self, shared: cutlass.Constexpr, x: cute.Tensor, lane: Int32, warp: Int32) -> None:
        """This warp's part of the sum of squares and of the products with fn."""
        plan = self.plan
        sums = Int32(shared.sums.data_ptr().toint()) + warp * (plan.tokens * plan.quads * 16)
        squares = []
        for t in cutlass.range_constexpr(plan.tokens):
            square = x[t * VALUES] * x[t * VALUES]
            for i in cutlass.range_constexpr(1, VALUES):
                square = ptx.fma(x[t * VALUES + i], x[t * VALUES + i], square)
            squares.append(square)
        square = sum_over_lanes(squares, lane)
        share = WARP // plan.tokens
        if lane % share == 0:
            place = sums + (lane // share * plan.quads + plan.quads - 1) * 16
            ptx.store_shared(place, (square, Float32(0.0), Float32(0.0), Float32(0.0)))
        fn = Int32(shared.fn.data_ptr().toint()) + (warp * WARP + lane) * (CHANNELS * 4)
        share = WARP // (plan.tokens * plan.batch)
        for batch in cutlass.range(0, plan.rows // plan.batch, 1, unroll=1):
            products = []
            for b in cutlass.range_constexpr(plan.batch):
                row = batch * plan.batch + b
                stage = row % plan.stages
                cute.arch.mbarrier_wait(shared.full.data_ptr() + stage, (row // plan.stages) & 1)
                factors = []
                for s in cutlass.range_constexpr(STREAMS):
                    place = fn + stage * plan.row_bytes + s * (plan.row_bytes // STREAMS)
                    factors.extend(ptx.load_shared_f32x4(place))
                for t in cutlass.range_constexpr(plan.tokens):
                    product = x[t * VALUES] * factors[0]
                    for i in cutlass.range_constexpr(1, VALUES):
                        product = ptx.fma(x[t * VALUES + i], factors[i], product)
                    products.append(product)
                if const_expr(plan.stages < plan.rows):
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(shared.empty.data_ptr() + stage)
            product = sum_over_lanes(products, lane)
            if lane % share == 0:
                held = lane // share
                row, t = batch * plan.batch + held // plan.tokens, held % plan.tokens
                ptx.store_shared_f32(sums + t * (plan.quads * 16) + row * 4, product)

    @cute.jit
    def send(
        self,
        sums: cutlass.Constexpr,
        received: cutlass.Constexpr,
        there: cutlass.Constexpr,
        thread: Int32,
        rank: Int32,
        quads: cutlass.Constexpr,
    ) -> None:
        """Adds up what the warps have, [warp][quad][4], and gives it to all CTAs of the cluster: [CTA][quad][4]."""
        source, barrier = Int32(sums.data_ptr().toint()), Int32(there.data_ptr().toint())
        target = Int32(received.data_ptr().toint()) + rank * (quads * 16)
        for i in cutlass.range_constexpr(-(-quads * CLUSTER // self.plan.threads)):
            task = thread + i * self.plan.threads
            if task < quads * CLUSTER:
                quad, cta = task // CLUSTER, task % CLUSTER
                total = list(ptx.load_shared_f32x4(source + quad * 16))
                for warp in cutlass.range_constexpr(1, self.plan.warps):
                    part = ptx.load_shared_f32x4(source + (warp * quads + quad) * 16)
                    for k in cutlass.range_constexpr(4):
                        total[k] = total[k] + part[k]
                place = ptx.remote(target + quad * 16, cta)
                ptx.store_async_f32x4(place, tuple(total), ptx.remote(barrier, cta))

    def quad_over_ctas(self, shared: cutlass.Constexpr, token: Int32, quad: int) -> list:
        """Four sums of a token, over all channels."""
        quads = self.plan.quads
        place = Int32(shared.received.data_ptr().toint()) + (token * quads + quad) * 16
        parts = [ptx.load_shared_f32x4(place + cta * (self.plan.tokens * quads * 16)) for cta in range(CLUSTER)]
        return [in_turn([part[k] for part in parts]) for k in range(4)]

    def sum_over_ctas(self, shared: cutlass.Constexpr, token: Int32, row: Int32 | int) -> Float32:
        """One sum of a token, over all channels."""
        token_bytes = self.plan.quads * 16
        place = Int32(shared.received.data_ptr().toint()) + token * token_bytes + row * 4
        parts = [ptx.load_shared_f32(place + cta * (self.plan.tokens * token_bytes)) for cta in range(CLUSTER)]
        return in_turn(parts)

    def inverse_rms(self, args: Arguments, shared: cutlass.Constexpr, token: Int32) -> Float32:
        """Of a token's new streams."""
        squares = self.sum_over_ctas(shared, token, self.plan.rows)
        return rsqrt(squares * (1.0 / (STREAMS * self.plan.dim)) + args.norm_eps)

    def num_gates(self) -> int:
        """Sigmoids of a token."""
        return min(self.plan.rows, GATES)

    @cute.jit
    def gate_parameters(self, args: Arguments, thread: Int32) -> tuple:
        """base and scale of the sigmoid that this thread has, of whatever token."""
        gate = thread % self.num_gates()
        return ptx.load_f32(args.base + Int64(gate) * 4), ptx.load_f32(args.scale + Int64(gate // STREAMS) * 4)

    @cute.jit
    def gates(
        self,
        args: Arguments,
        shared: cutlass.Constexpr,
        thread: Int32,
        rank: Int32,
        first: Int32,
        base: Float32,
        scale: Float32,
    ) -> None:
        """pre of all tokens, for this CTA, and post of the token that has this CTA's number."""
        count = self.num_gates()
        pre = Int32(shared.pre.data_ptr().toint())
        for i in cutlass.range_constexpr(-(-self.plan.tokens * count // self.plan.threads)):
            task = thread + i * self.plan.threads
            if task < self.plan.tokens * count:
                t, gate = task // count, task % count
                mix = self.sum_over_ctas(shared, t, gate) * self.inverse_rms(args, shared, t)
                value = sigmoid(ptx.fma(mix, scale, base))
                if gate < STREAMS:
                    ptx.store_shared_f32(pre + (t * STREAMS + gate) * 4, value + args.hc_eps)
                elif (t == rank) & (first + t < args.num_tokens):
                    out = args.out_post + (Int64(first + t) * STREAMS + (gate - STREAMS)) * 4
                    ptx.store_f32(out, value * 2.0)

    def mix(self, shared: cutlass.Constexpr, x: cute.Tensor) -> list:
        """The mixtures, as two words of bf16 for each token."""
        words = []
        for t in range(self.plan.tokens):
            pre = ptx.load_shared_f32x4(Int32(shared.pre.data_ptr().toint()) + t * (STREAMS * 4))
            values = []
            for c in range(CHANNELS):
                value = pre[0] * x[t * VALUES + c]
                for s in range(1, STREAMS):
                    value = ptx.fma(pre[s], x[t * VALUES + s * CHANNELS + c], value)
                values.append(value)
            words += [ptx.pack_bf16(values[c], values[c + 1]) for c in range(0, CHANNELS, 2)]
        return words

    @cute.jit
    def add_up_squares(self, shared: cutlass.Constexpr, words: list, lane: Int32, warp: Int32) -> None:
        """This warp's part of the sums of squares of the mixtures."""
        squares = []
        for t in cutlass.range_constexpr(self.plan.tokens):
            values = unpack(words[2 * t : 2 * t + 2])
            square = values[0] * values[0]
            for value in values[1:]:
                square = ptx.fma(value, value, square)
            squares.append(square)
        square = sum_over_lanes(squares, lane)
        share = WARP // self.plan.square_slots
        if lane % share == 0:
            slot = warp * self.plan.square_slots + lane // share
            ptx.store_shared_f32(Int32(shared.squares.data_ptr().toint()) + slot * 4, square)

    def weight(self, args: Arguments, channel: Int32) -> list:
        """Of this thread's channels in the norm."""
        if self.plan.bf16_weight:
            return unpack(load_8_bytes_if(Int32(1), args.norm_weight + channel * 2))
        return list(ptx.load_or_zeros(Float32, 4, args.norm_weight + channel * 4, Int32(1), cache=""))

    def write_normalised(
        self, args: Arguments, shared: cutlass.Constexpr, words: list, weight: list, out: Int64, first: Int32
    ) -> None:
        """x: the mixtures over their RMS, times the norm's weight."""
        plan = self.plan
        squares = []
        for quad in range(plan.square_slots // 4):
            place = Int32(shared.received_squares.data_ptr().toint()) + quad * 16
            parts = [ptx.load_shared_f32x4(place + cta * plan.square_slots * 4) for cta in range(CLUSTER)]
            squares += [in_turn([part[k] for part in parts]) for k in range(4)]
        for t in range(plan.tokens):
            square = squares[t * plan.square_slots // plan.tokens]
            inverse = rsqrt(square * (1.0 / plan.dim) + args.norm_eps)
            x = [value * inverse * w for value, w in zip(unpack(words[2 * t : 2 * t + 2]), weight, strict=True)]
            low, high = (ptx.pack_bf16(x[c], x[c + 1]) for c in range(0, CHANNELS, 2))
            store_8_bytes_if(args.num_tokens - first - t, out + t * plan.dim * 2, low, high)


# Arithmetic


def sum_over_lanes(values: list, lane: Int32) -> Float32:
    """The sums of a power of two of values over a warp; lane l gets that of values[l * len(values) // 32].

    Each step adds what lanes have that differ in one bit of their number, the highest first. Of several values a lane
    goes on with half of them, and the bits are those of a single one.
    """
    offset = WARP // 2
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & offset) != 0
        halves = list(zip(values[:half], values[half:], strict=True))
        kept = [cutlass.select_(upper, b, a) for a, b in halves]
        given = [cutlass.select_(upper, a, b) for a, b in halves]
        values = [k + cute.arch.shuffle_sync_bfly(g, offset) for k, g in zip(kept, given, strict=True)]
        offset //= 2
    value = values[0]
    while offset:
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
        offset //= 2
    return value


def in_turn(values: list) -> Float32:
    """The sum, one after the other."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def divide_rows(matrix: cute.Tensor, eps: Float32) -> None:
    """Each row by its sum and eps."""
    _divide(matrix, [[STREAMS * j + k for k in range(STREAMS)] for j in range(STREAMS)], eps)


def divide_columns(matrix: cute.Tensor, eps: Float32) -> None:
    """Each column by its sum and eps."""
    _divide(matrix, [[STREAMS * j + k for j in range(STREAMS)] for k in range(STREAMS)], eps)


def _divide(matrix: cute.Tensor, lines: list, eps: Float32) -> None:
    for line in lines:
        a, b, c, d = (matrix[i] for i in line)
        inverse = reciprocal(((a + b) + (c + d)) + eps)
        for i in line:
            matrix[i] = matrix[i] * inverse


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x)): 0 where exp(-x) overflows."""
    return reciprocal(1.0 + ptx.exp2(x * -LOG2_E))


def reciprocal(x: Float32) -> Float32:
    """1 / x, to one unit in the last place."""
    return ptx.asm("rcp.approx.ftz.f32 {$w0}, {$r0};", [Float32], x)


def rsqrt(x: Float32) -> Float32:
    """1 / sqrt(x), to 2**-22.9."""
    return ptx.asm("rsqrt.approx.ftz.f32 {$w0}, {$r0};", [Float32], x)


def unpack(words: tuple | list) -> list:
    """bf16 in words -> fp32, the low halves first."""
    return [ptx.as_f32(half) for word in words for half in (word << 16, word & 0xFFFF0000)]


# Memory


def load_8_bytes_if(exists: Int32, address: Int64) -> tuple:
    """Two words that are read once, or zeros unless `exists` is positive."""
    return ptx.load_or_zeros(Uint32, 2, address, exists, "gt.s32")


def store_8_bytes_if(exists: Int32, address: Int64, low: Uint32, high: Uint32) -> None:
    """Two words to global memory, if `exists` is positive."""
    ptx.asm(
        "{\n.reg .pred p;\nsetp.gt.s32 p, {$r0}, 0;\n@p st.global.v2.b32 [{$r1}], {{$r2}, {$r3}};\n}",
        [],
        exists,
        address,
        low,
        high,
    )


def copy_bulk(shared: Int32, address: Int64, num_bytes: int, barrier: Int32) -> None:
    """Neighbouring bytes from global to shared memory, by the copy engine; a barrier counts them."""
    ptx.asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        [],
        shared,
        address,
        Int32(num_bytes),
        barrier,
    )
