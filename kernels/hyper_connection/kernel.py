"""The hyper-connections between two sublayers in one launch, on Hopper and Blackwell (sm_90a, sm_100a).

A cluster of eight CTAs processes a token group; each CTA has an eighth of the channels of all four streams. A thread
has some channels of one token (`streams`), and keeps its part of the new streams in registers from their computation to
the mixture, so that streams are read once and written once.

    who             does                                                            waits for
    one warp        asks for fn, by TMA (bulk copies), stream by stream             empty[stage], if it was in use
                    balances comb of the token that has this CTA's number           sums_there
    the others      new streams = post y + comb^T streams; writes them
                    products with the 24 rows of fn (`products`)                    full[stage]
                    sums over warps, sent to all CTAs of the cluster                the warps of the CTA
                    sigmoids: pre, and post of one token                            sums_there, from all CTAs
                    mixture; its sum of squares, sent to all CTAs                   the warps of the CTA
                    x = norm of the mixture; writes it, and as e4m3                 squares_there, from all CTAs

The order in which a token's sums are added depends on d only: over the channels of a warp unit by unit in each stream,
then over the streams, over warps and last over CTAs one after the other; a warp's squares are added as
`arithmetic.sum_over_units` says. Tokens of a group share the reads of fn and nothing else, so a token has the same bits
in any batch and in groups of any size. After the last token a group is filled with zeros, whose results are not
written.

With many tokens a CTA has two teams of threads, and clusters are persistent: a team processes one group after the
other, while fn stays in shared memory for both teams. Teams share read-only data. A team reuses its buffers without an
extra barrier: a thread that has received all CTAs' squares of a group knows that their threads are done with the
group's sums, and `taken` says that the balancing warp has read the sums that it needs; so the thread may send the next
group's sums. Likewise a thread that has received all CTAs' sums knows that their threads are done with the squares of
the group before.

No CTA waits for another cluster.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsv4_kernels.device import bf16_rows, dependent_launch, e4m3, ptx
from dsv4_kernels.host.mailboxes import CLUSTER
from dsv4_kernels.hyper_connection.arithmetic import (
    address_of,
    balance_matrix,
    in_turn,
    max_over_units,
    rsqrt,
    sigmoid,
    store_codes,
    store_words_if,
    sum_of_squares,
    sum_over_units,
)
from dsv4_kernels.hyper_connection.plan import (
    CHANNELS,
    PRE_ROWS,
    QUAD,
    STREAMS,
    TOKENS,
    UNITS,
    WARP,
    AnyArguments,
    Plan,
    shared_memory,
)
from dsv4_kernels.hyper_connection.products import Products

GATES = 2 * STREAMS
"""Rows of fn whose products become sigmoids, pre and post; the rows for comb follow."""


class HyperConnection(Products):
    """The kernel of one plan; `launch` is compiled."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan  # nothing slow here: every call makes this object to look its kernel up

    @cute.jit
    def launch(self, arguments: AnyArguments, num_clusters: Int32, stream: cuda.CUstream) -> None:
        """Launches one cluster for each token group; with several teams, as many clusters as run at once."""
        self.kernel(arguments).launch(
            grid=[num_clusters * CLUSTER, 1, 1],
            cluster=[CLUSTER, 1, 1],
            block=[self.plan.cta_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.plan.ctas,
            preferred_smem_carveout=100,  # percent: all shared memory, so that the planned number of CTAs fits
            use_pdl=dependent_launch.is_on(),
        )

    @cute.kernel
    def kernel(self, args: AnyArguments) -> None:
        """Sets up barriers and sends every warp to its role."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        rank, cluster = cta % CLUSTER, cta // CLUSTER
        shared = cutlass.utils.SmemAllocator().allocate(shared_memory(plan))
        if thread == plan.teams * plan.threads:
            for stage in cutlass.range_constexpr(plan.stages):
                cute.arch.mbarrier_init(shared.full.data_ptr() + stage, 1)
                cute.arch.mbarrier_init(shared.empty.data_ptr() + stage, plan.warps)
            for team in cutlass.range_constexpr(plan.teams):
                cute.arch.mbarrier_init(shared.sums_there.data_ptr() + team, 1)
                cute.arch.mbarrier_init(shared.taken.data_ptr() + team, 1)
                cute.arch.mbarrier_init(shared.squares_there.data_ptr() + team, 1)
            cute.arch.mbarrier_init_fence()
            for team in cutlass.range_constexpr(plan.teams):
                self.expect_sums(shared, team)
                self.expect_squares(shared, team)
        cute.arch.sync_warp()
        cute.arch.cluster_arrive_relaxed(aligned=True)
        if warp < plan.teams * plan.warps:
            slots, token = [], cluster * plan.tokens + self.token_of(thread)
            if const_expr(plan.reads_ahead):
                slots = self.slots(args, token)
            dependent_launch.begin()
            if const_expr(plan.experts > 0 and not plan.reads_ahead):
                slots = self.slots(args, token)
            self.compute(args, shared, thread % plan.threads, thread // plan.threads, rank, cluster, slots)
        else:
            team, lane = warp - plan.teams * plan.warps, thread % WARP
            if team == 0:
                # May overlap the kernel before: no kernel of a forward writes fn, a weight. Loading weights ends before
                # the embedding, an ordinary launch that comes before the first boundary.
                self.fetch(args, shared, lane, rank, Int32(0), plan.stages)
                if const_expr(plan.tokens < TOKENS[-1]):  # the clusters of a large launch would ask for it each
                    self.fetch_into_l2(args, lane, rank)
            dependent_launch.wait()
            self.sync_all()
            cute.arch.cluster_wait()
            if const_expr(plan.stages < STREAMS):
                self.fetch(args, shared, lane, rank, Int32(plan.stages), STREAMS)
            if const_expr(plan.rows == PRE_ROWS):
                if const_expr(plan.teams == 1):
                    self.balance(args, shared, lane, 0, rank, cluster * plan.tokens, Int32(0))
                else:
                    group, step, phase = self.first_group(cluster, team), self.group_step(), Int32(0)
                    while group * plan.tokens < args.num_tokens:
                        self.balance(args, shared, lane, team, rank, group * plan.tokens, phase)
                        group, phase = group + step, phase ^ 1

    def first_group(self, cluster: Int32, team: Int32) -> Int32:
        """Number of a team's first group; the teams of a cluster have neighbouring groups."""
        return cluster * self.plan.teams + team

    def group_step(self) -> Int32:
        """Distance from a team's group to its next."""
        num_ctas, _, _ = cute.arch.grid_dim()
        return num_ctas // CLUSTER * self.plan.teams

    def expect_sums(self, shared: cutlass.Constexpr, team: Int32 | int) -> None:
        """Arms `sums_there` for the next group; called by one thread."""
        num_bytes = CLUSTER * self.plan.tokens * self.plan.quads * 16
        cute.arch.mbarrier_arrive_and_expect_tx(shared.sums_there.data_ptr() + team, num_bytes)

    def expect_squares(self, shared: cutlass.Constexpr, team: Int32 | int) -> None:
        """Arms `squares_there` for the next group; called by one thread."""
        num_bytes = CLUSTER * self.plan.square_slots * 4
        cute.arch.mbarrier_arrive_and_expect_tx(shared.squares_there.data_ptr() + team, num_bytes)

    def sync_all(self) -> None:
        """Synchronises all threads of the CTA: then its mbarriers are set up."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.plan.cta_threads)

    # The fetching and balancing warp: comb (fn: `products`)

    @cute.jit
    def balance(
        self,
        args: AnyArguments,
        shared: cutlass.Constexpr,
        lane: Int32,
        team: Int32 | cutlass.Constexpr,
        rank: Int32,
        first: Int32,
        phase: Int32,
    ) -> None:
        """Writes comb of the token that has this CTA's number in the group, in one lane.

        No other thread waits for comb: the mixture needs pre only. The next boundary could balance it before its
        wait for the previous launch; that was slower (docs/log/decode_step.md, 2026-11-28).
        """
        token = first + rank
        if (lane == 0) & (rank < self.plan.tokens):
            parameters = self.comb_parameters(args)
            ptx.wait_cluster(address_of(shared.sums_there, team, 8), phase)
            comb = self.comb_before(args, shared, team, rank, parameters)
            if const_expr(self.plan.teams > 1):
                cute.arch.mbarrier_arrive(shared.taken.data_ptr() + team)
            if token < args.num_tokens:
                balance_matrix(comb, args.hc_eps, args.iterations)
                self.write_comb(args, comb, token)

    def comb_parameters(self, args: AnyArguments) -> tuple:
        """base of comb, 16 numbers, and its scale."""
        base = []
        for quad in range(STREAMS):
            base.extend(ptx.load_or_zeros(Float32, 4, args.base + (GATES + 4 * quad) * 4, Int32(1), cache=""))
        return base, ptx.load_f32(args.scale + 8)

    def comb_before(
        self, args: AnyArguments, shared: cutlass.Constexpr, team: Int32 | int, token: Int32, parameters: tuple
    ) -> cute.Tensor:
        """comb of a token of the group before its iteration, [4 * 4]."""
        base, scale = parameters
        inverse = self.inverse_rms(args, shared, team, token)
        comb = cute.make_rmem_tensor((STREAMS * STREAMS,), Float32)
        for quad in range(STREAMS):
            mix = self.quad_over_ctas(shared, team, token, GATES // 4 + quad)
            for k in range(4):
                comb[4 * quad + k] = ptx.fma(mix[k] * inverse, scale, base[4 * quad + k])
        return comb

    def write_comb(self, args: AnyArguments, comb: cute.Tensor, token: Int32) -> None:
        """Writes comb of a token to global memory."""
        out = args.out_comb + Int64(token) * (STREAMS * STREAMS * 4)
        for j in range(STREAMS):
            ptx.store_f32x4(out + j * 16, tuple(comb[STREAMS * j + k] for k in range(STREAMS)))

    # All other warps: streams, sums and mixture

    @cute.jit
    def compute(
        self,
        args: AnyArguments,
        shared: cutlass.Constexpr,
        thread: Int32,
        team: Int32,
        rank: Int32,
        cluster: Int32,
        slots: list,
    ) -> None:
        """The role of a thread that has channels."""
        plan = self.plan
        if const_expr(plan.teams == 1):
            self.group(args, shared, thread, 0, rank, cluster * plan.tokens, Int32(0), slots)
        else:
            self.sync_all()
            cute.arch.cluster_wait()
            group, step, phase = self.first_group(cluster, team), self.group_step(), Int32(0)
            while group * plan.tokens < args.num_tokens:
                self.group(args, shared, thread, team, rank, group * plan.tokens, phase, slots)
                group, phase = group + step, phase ^ 1

    @cute.jit
    def group(
        self,
        args: AnyArguments,
        shared: cutlass.Constexpr,
        thread: Int32,
        team: Int32 | cutlass.Constexpr,
        rank: Int32,
        first: Int32,
        phase: Int32,
        slots: list,
    ) -> None:
        """Processes a thread's channels of one token group."""
        plan = self.plan
        lane, warp = thread % WARP, thread // WARP
        channel, in_group = self.first_channel(rank, thread), self.token_of(thread)
        token = first + in_group
        cta, _, _ = cute.arch.block_idx()
        buffer = self.buffer_of(args, cta) if plan.ranks else Int32(0)
        x = self.new_streams(args, token, channel, thread, cta, buffer, slots)
        if const_expr(plan.teams == 1):
            self.sync_all()
        self.add_up(shared, team, x, lane, warp)
        gate_base, gate_scale = self.gate_parameters(args, thread)  # these loads overlap the exchange of sums
        weight = self.weight(args, channel)
        self.sync(team)
        if const_expr(plan.ranks > 0):
            if thread == 0:
                self.next_buffer(args, cta, buffer)
        if const_expr(plan.teams == 1):
            cute.arch.cluster_wait()  # all CTAs of the cluster have started and set up their mbarriers
        sums_there = address_of(shared.sums_there, team, 8)
        quads = plan.tokens * plan.quads
        source = address_of(shared.sums, team, plan.warps * quads * 16)
        target = address_of(shared.received, team, CLUSTER * quads * 16)
        self.send(source, target, sums_there, thread, rank, quads)
        ptx.wait_cluster(sums_there, phase)
        if const_expr(plan.teams > 1):
            if thread == 0:
                self.expect_sums(shared, team)
        self.gates(args, shared, team, thread, rank, first, gate_base, gate_scale)
        self.sync(team)
        words = self.mix(ptx.load_shared_f32x4(self.pre(shared, team) + in_group * (STREAMS * 4)), x)
        out = args.out + (Int64(token) * plan.dim + channel) * 2
        exists = args.num_tokens - token
        self.add_up_squares(shared, team, words, lane, warp)
        self.sync(team)
        if const_expr(plan.teams > 1 and plan.rows == PRE_ROWS):
            # A thread that has these squares from all CTAs sends the next group's sums.
            cute.arch.mbarrier_wait(shared.taken.data_ptr() + team, phase)
        squares_there = address_of(shared.squares_there, team, 8)
        source = address_of(shared.squares, team, plan.warps * plan.square_slots * 4)
        target = address_of(shared.received_squares, team, CLUSTER * plan.square_slots * 4)
        self.send(source, target, squares_there, thread, rank, plan.square_slots // 4)
        ptx.wait_cluster(squares_there, phase)
        if const_expr(plan.teams > 1):
            if thread == 0:
                self.expect_squares(shared, team)
        x = self.write_normalised(args, shared, team, in_group, words, weight, out, exists)
        if const_expr(plan.fp8):
            self.write_codes(args, x, token, channel, lane, exists)

    def sync(self, team: Int32 | int) -> None:
        """Synchronises the warps of a team that have channels."""
        cute.arch.barrier(barrier_id=2 + team, number_of_threads=self.plan.threads)

    @cute.jit
    def send(
        self,
        source: Int32,
        received: Int32,
        barrier: Int32,
        thread: Int32,
        rank: Int32,
        quads: cutlass.Constexpr,
    ) -> None:
        """Adds up the sums of the warps, [warp][quad][4], and sends them to all CTAs of the cluster: [CTA][quad][4]."""
        target = received + rank * (quads * 16)
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

    def quad_over_ctas(self, shared: cutlass.Constexpr, team: Int32 | int, token: Int32, quad: int) -> list:
        """Four sums of a token, over all channels."""
        quads = self.plan.quads
        place = self.received(shared, team) + (token * quads + quad) * 16
        parts = [ptx.load_shared_f32x4(place + cta * (self.plan.tokens * quads * 16)) for cta in range(CLUSTER)]
        return [in_turn([part[k] for part in parts]) for k in range(4)]

    def sum_over_ctas(self, shared: cutlass.Constexpr, team: Int32 | int, token: Int32, row: Int32 | int) -> Float32:
        """One sum of a token, over all channels."""
        token_bytes = self.plan.quads * 16
        place = self.received(shared, team) + token * token_bytes + row * 4
        parts = [ptx.load_shared_f32(place + cta * (self.plan.tokens * token_bytes)) for cta in range(CLUSTER)]
        return in_turn(parts)

    def received(self, shared: cutlass.Constexpr, team: Int32 | int) -> Int32:
        """The address of a team's sums from all CTAs."""
        return address_of(shared.received, team, CLUSTER * self.plan.tokens * self.plan.quads * 16)

    def inverse_rms(self, args: AnyArguments, shared: cutlass.Constexpr, team: Int32 | int, token: Int32) -> Float32:
        """1 / RMS of a token's new streams."""
        squares = self.sum_over_ctas(shared, team, token, self.plan.rows)
        return rsqrt(squares * (1.0 / (STREAMS * self.plan.dim)) + args.norm_eps)

    def num_gates(self) -> int:
        """Number of sigmoids of a token."""
        return min(self.plan.rows, GATES)

    @cute.jit
    def gate_parameters(self, args: AnyArguments, thread: Int32) -> tuple:
        """base and scale of this thread's sigmoid, the same for all tokens."""
        gate = thread % self.num_gates()
        return ptx.load_f32(args.base + Int64(gate) * 4), ptx.load_f32(args.scale + Int64(gate // STREAMS) * 4)

    @cute.jit
    def gates(
        self,
        args: AnyArguments,
        shared: cutlass.Constexpr,
        team: Int32 | cutlass.Constexpr,
        thread: Int32,
        rank: Int32,
        first: Int32,
        base: Float32,
        scale: Float32,
    ) -> None:
        """Stores pre of all tokens for this CTA, and writes post of the token that has this CTA's number."""
        count = self.num_gates()
        pre = self.pre(shared, team)
        for i in cutlass.range_constexpr(-(-self.plan.tokens * count // self.plan.threads)):
            task = thread + i * self.plan.threads
            if task < self.plan.tokens * count:
                t, gate = task // count, task % count
                value = self.gate(args, shared, team, t, gate, base, scale)
                if gate < STREAMS:
                    ptx.store_shared_f32(pre + (t * STREAMS + gate) * 4, value + args.hc_eps)
                elif (t == rank) & (first + t < args.num_tokens):
                    out = args.out_post + (Int64(first + t) * STREAMS + (gate - STREAMS)) * 4
                    ptx.store_f32(out, value * 2.0)

    def gate(
        self,
        args: AnyArguments,
        shared: cutlass.Constexpr,
        team: Int32 | int,
        token: Int32,
        gate: Int32,
        base: Float32,
        scale: Float32,
    ) -> Float32:
        """A sigmoid of a token of the group."""
        mix = self.sum_over_ctas(shared, team, token, gate) * self.inverse_rms(args, shared, team, token)
        return sigmoid(ptx.fma(mix, scale, base))

    def pre(self, shared: cutlass.Constexpr, team: Int32 | int) -> Int32:
        """The address of a team's pre coefficients."""
        return address_of(shared.pre, team, self.plan.tokens * STREAMS * 4)

    @cute.jit
    def add_up_squares(
        self,
        shared: cutlass.Constexpr,
        team: Int32 | cutlass.Constexpr,
        words: list,
        lane: Int32,
        warp: Int32,
    ) -> None:
        """Stores this warp's part of the sums of squares of the mixtures; lane groups after the last token repeat
        tokens."""
        plan = self.plan
        squares = [sum_of_squares(values) for values in self.by_units([bf16_rows.channels(run) for run in words])]
        square = sum_over_units(squares, plan.tokens)
        if (lane % QUAD == 0) & (lane // QUAD < plan.square_slots):
            place = address_of(shared.squares, team, plan.warps * plan.square_slots * 4)
            ptx.store_shared_f32(place + (warp * plan.square_slots + lane // QUAD) * 4, square)

    def write_normalised(
        self,
        args: AnyArguments,
        shared: cutlass.Constexpr,
        team: Int32 | int,
        in_group: Int32,
        words: list,
        weight: list,
        out: Int64,
        exists: Int32,
    ) -> list:
        """Writes x, the mixture over its RMS times the norm's weight; returns it as words of bf16 for each run."""
        plan, written = self.plan, []
        place = address_of(shared.received_squares, team, CLUSTER * plan.square_slots * 4) + in_group * 4
        square = in_turn([ptx.load_shared_f32(place + cta * plan.square_slots * 4) for cta in range(CLUSTER)])
        inverse = rsqrt(square * (1.0 / plan.dim) + args.norm_eps)
        for run in range(plan.runs):
            weights = bf16_rows.channels(weight[run]) if plan.bf16_weight else weight[run]
            x = [value * inverse * w for value, w in zip(bf16_rows.channels(words[run]), weights, strict=True)]
            packed = [ptx.pack_bf16(x[c], x[c + 1]) for c in range(0, len(x), 2)]
            store_words_if(exists, out + run * plan.run_step * 2, packed)
            written.append(packed)
        return written

    @cute.jit
    def write_codes(
        self, args: AnyArguments, x: list, token: Int32, channel: Int32, lane: Int32, exists: Int32
    ) -> None:
        """Writes x in the form that FP8 products read, with the bits of `fp8_quantise`: a warp has one block of each of
        its tokens."""
        plan = self.plan
        values = [bf16_rows.channels(words) for words in x]
        amax = max_over_units(e4m3.largest([value for run in values for value in run]), plan.tokens)
        exponent = e4m3.scale_exponent(amax)
        codes = args.out_codes + Int64(token) * plan.dim + channel
        if exists > 0:
            for run in cutlass.range_constexpr(plan.runs):
                store_codes(codes + run * plan.run_step, e4m3.codes(values[run], exponent))
            if (lane % QUAD == 0) & (lane // QUAD < plan.tokens):
                block = channel // (UNITS * QUAD * CHANNELS)
                ptx.store_f32(args.out_scales + block * args.scale_block_stride + token * 4, e4m3.scale_of(exponent))
