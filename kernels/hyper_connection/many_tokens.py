"""A boundary of many tokens in two launches, with the bits of `kernel`, on Hopper and Blackwell (sm_90a, sm_100a).

Not chosen yet: no GPU has timed it (`bench_hyper_connection.py`: `ours_apart`).

In one launch a token group waits for all CTAs of its cluster, twice, and a team asks for its next group after that:
with 8,192 tokens a multiprocessor waits most of the time. Here no CTA waits for another:

    Multiplication    new streams; sums of their products with fn, and of their squares, over an eighth of the channels.
                      A CTA keeps its columns of fn. A thread asks for its next token group before it multiplies.
    Mixture           the rest, from these sums and the new streams, which are read again. A CTA has all channels of a
                      few tokens; many CTAs are resident.

    launch            reads                              writes
    Multiplication    y, streams, post, comb             new streams; sums [T, 8, rows + 4] fp32
    Mixture           new streams, sums                  post, comb, x, and x as e4m3
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr

from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.host.addresses import address
from dsv4_kernels.host.arch import hardware_multiprocessors
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.mailboxes import CLUSTER
from dsv4_kernels.hyper_connection.arithmetic import address_of, in_turn, load_words_if, store_words_if
from dsv4_kernels.hyper_connection.kernel import HyperConnection
from dsv4_kernels.hyper_connection.plan import CHANNELS, PRE_ROWS, QUAD, STREAMS, UNITS, WARP, Arguments, Plan

MIXTURE_TOKENS = 4
"""Tokens of a CTA of `Mixture`."""
MIXTURE_WARPS = 8
"""Warps of a CTA of `Mixture` that have channels; each has 128 channels at a time. One more warp balances comb."""

WARP_CHANNELS = UNITS * QUAD * CHANNELS

ArgumentsOfSums = NamedTuple("ArgumentsOfSums", [*Arguments.__annotations__.items(), ("sums", Int64)])
"""Dynamic arguments of both launches; `sums` is [T, CLUSTER, rows + 4] fp32: of a token and an eighth of the channels
the sums of the rows, the sum of squares and three zeros."""


class Multiplication(HyperConnection):
    """The first launch.

    Args:
        plan: of groups of eight tokens, with several teams, that keeps all of fn in shared memory.
    """

    @cute.jit
    def launch(self, arguments: ArgumentsOfSums, num_ctas: Int32, stream: cuda.CUstream) -> None:
        """Launches persistent CTAs, a multiple of CLUSTER."""
        self.kernel(arguments).launch(
            grid=[num_ctas, 1, 1],
            block=[self.plan.teams * self.plan.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=dependent_launch.is_on(),
        )

    @cute.kernel
    def kernel(self, args: ArgumentsOfSums) -> None:
        """Asks for fn; each team processes one token group after the other."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        rank = cta % CLUSTER
        shared = cutlass.utils.SmemAllocator().allocate(_shared_of_multiplication(plan))
        if thread == 0:
            for stage in cutlass.range_constexpr(STREAMS):
                cute.arch.mbarrier_init(shared.full.data_ptr() + stage, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier(barrier_id=1, number_of_threads=plan.teams * plan.threads)
        if thread < WARP:
            # May overlap the kernel before: no kernel of a forward writes fn, a weight.
            self.fetch(args, shared, thread, rank, Int32(0), STREAMS)
        dependent_launch.begin()
        team, in_team = thread // plan.threads, thread % plan.threads
        lane, warp = in_team % WARP, in_team // WARP
        channel, in_group = self.first_channel(rank, in_team), self.token_of(in_team)
        group, step = cta // CLUSTER * plan.teams + team, num_ctas // CLUSTER * plan.teams
        words = cute.make_rmem_tensor((plan.runs * (STREAMS + 1) * plan.run_words,), Uint32)
        weights = cute.make_rmem_tensor((STREAMS + STREAMS * STREAMS,), Float32)
        self.request(args, group * plan.tokens + in_group, channel, words, weights)
        while group * plan.tokens < args.num_tokens:
            first = group * plan.tokens
            x = self.write_back(args, first + in_group, channel, words, weights)
            group = group + step
            self.request(args, group * plan.tokens + in_group, channel, words, weights)
            self.add_up(shared, team, x, lane, warp)
            self.sync(team)
            self.store_sums(args, shared, team, in_team, rank, first)
            self.sync(team)  # before the sums of the next group

    def request(
        self, args: ArgumentsOfSums, token: Int32, channel: Int32, words: cute.Tensor, weights: cute.Tensor
    ) -> None:
        """Loads a token's old streams and output, [run][stream or output][word], and its post and comb."""
        plan, exists = self.plan, args.num_tokens - token
        places = [args.streams + Int64(token) * args.streams_stride + args.stream_stride * s for s in range(STREAMS)]
        places.append(args.y + Int64(token) * args.y_stride)
        for run in range(plan.runs):
            for s, place in enumerate(places):
                loaded = load_words_if(exists, place + (channel + run * plan.run_step) * 2, plan.run_words)
                for w, word in enumerate(loaded):
                    words[(run * (STREAMS + 1) + s) * plan.run_words + w] = word
        rows = [args.post + Int64(token) * args.post_stride]
        rows += [args.comb + Int64(token) * args.comb_stride + 16 * j for j in range(STREAMS)]
        for i, place in enumerate(rows):
            for k, value in enumerate(ptx.load_or_zeros(Float32, 4, place, exists, "gt.s32", cache="")):
                weights[4 * i + k] = value

    def write_back(
        self, args: ArgumentsOfSums, token: Int32, channel: Int32, words: cute.Tensor, weights: cute.Tensor
    ) -> cute.Tensor:
        """Writes a thread's channels of the new streams; returns them, [run][stream][word]."""
        plan, exists = self.plan, args.num_tokens - token
        x = cute.make_rmem_tensor((plan.runs * STREAMS * plan.run_words,), Uint32)
        target = args.out_streams + (Int64(token) * (STREAMS * plan.dim) + channel) * 2
        post, *comb = ([weights[4 * i + k] for k in range(STREAMS)] for i in range(1 + STREAMS))
        for run in range(plan.runs):
            first = run * (STREAMS + 1) * plan.run_words
            *old, output = (
                [words[first + s * plan.run_words + w] for w in range(plan.run_words)] for s in range(STREAMS + 1)
            )
            new = self.written_back(output, old, post, comb)
            for s in range(STREAMS):
                store_words_if(exists, target + (s * plan.dim + run * plan.run_step) * 2, new[s])
                for w in range(plan.run_words):
                    x[(run * STREAMS + s) * plan.run_words + w] = new[s][w]
        return x

    @cute.jit
    def store_sums(
        self,
        args: ArgumentsOfSums,
        shared: cutlass.Constexpr,
        team: Int32,
        thread: Int32,
        rank: Int32,
        first: Int32,
    ) -> None:
        """Adds up the sums of the warps, [warp][token][quad][4], and stores them."""
        quads, count = self.plan.quads, self.plan.tokens * self.plan.quads
        source = address_of(shared.sums, team, self.plan.warps * count * 16)
        for task in cutlass.range(thread, count, self.plan.threads, unroll=1):
            token, quad = first + task // quads, task % quads
            total = self.over_warps(source + task * 16, count * 16)
            if token < args.num_tokens:
                place = args.sums + ((Int64(token) * CLUSTER + rank) * quads + quad) * 16
                ptx.store_f32x4(place, tuple(total))

    def over_warps(self, place: Int32, warp_bytes: int) -> list:
        """Four sums, added over the warps of an eighth of the channels."""
        parts = [ptx.load_shared_f32x4(place + warp * warp_bytes) for warp in range(self.plan.warps)]
        return [in_turn([part[k] for part in parts]) for k in range(4)]


class Mixture(HyperConnection):
    """The second launch.

    Args:
        plan: of groups of MIXTURE_TOKENS tokens, with one team.
    """

    @cute.jit
    def launch(self, arguments: ArgumentsOfSums, num_ctas: Int32, stream: cuda.CUstream) -> None:
        """Launches a CTA for each token group."""
        self.kernel(arguments).launch(
            grid=[num_ctas, 1, 1],
            block=[(MIXTURE_WARPS + 1) * WARP, 1, 1],
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=25,  # percent: two CTAs need 10 KiB, and L1 has the weights
            use_pdl=dependent_launch.is_on(),
        )

    @cute.kernel
    def kernel(self, args: ArgumentsOfSums) -> None:
        """Sends every warp to its role."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        # The last groups first: their streams are the ones that L2 still has.
        first, lane, warp = (num_ctas - 1 - cta) * plan.tokens, thread % WARP, thread // WARP
        shared = cutlass.utils.SmemAllocator().allocate(_shared_of_mixture(plan))
        dependent_launch.begin()
        if warp < MIXTURE_WARPS:
            self.mix_tokens(args, shared, thread, first)
        else:
            parameters = self.comb_parameters(args)
            cute.arch.barrier(barrier_id=1, number_of_threads=(MIXTURE_WARPS + 1) * WARP)
            if (lane < plan.tokens) & (first + lane < args.num_tokens):
                self.write_comb(args, self.comb_before(args, shared, 0, lane, parameters), first + lane)

    @cute.jit
    def mix_tokens(self, args: ArgumentsOfSums, shared: cutlass.Constexpr, thread: Int32, first: Int32) -> None:
        """All that is done with the channels of a token group."""
        plan = self.plan
        lane, warp, in_group = thread % WARP, thread // WARP, self.token_of(thread)
        token = first + in_group
        exists = args.num_tokens - token
        parts = plan.dim // (MIXTURE_WARPS * WARP_CHANNELS)
        channels = [self.first_channel(0, thread) + i * (MIXTURE_WARPS * WARP_CHANNELS) for i in range(parts)]
        x = [self.loaded_streams(args, token, channels[0], exists)]
        self.copy_sums(args, shared, thread, first)
        base, scale = self.gate_parameters(args, thread)
        cute.arch.barrier(barrier_id=1, number_of_threads=(MIXTURE_WARPS + 1) * WARP)
        self.all_gates(args, shared, thread, first, base, scale)
        self.sync_warps()
        pre = ptx.load_shared_f32x4(self.pre(shared, 0) + in_group * (STREAMS * 4))
        mixed = []
        for i in cutlass.range_constexpr(parts):
            if const_expr(i + 1 < parts):
                x.append(self.loaded_streams(args, token, channels[i + 1], exists))
            mixed.append(self.mix(pre, x[i]))
            self.add_up_squares(shared, 0, mixed[i], lane, warp + i * MIXTURE_WARPS)
        self.sync_warps()
        self.add_up_warps(shared, thread)
        self.sync_warps()
        for i in cutlass.range_constexpr(parts):
            out = args.out + (Int64(token) * plan.dim + channels[i]) * 2
            weight = self.weight(args, channels[i])
            written = self.write_normalised(args, shared, 0, in_group, mixed[i], weight, out, exists)
            if const_expr(plan.fp8):
                self.write_codes(args, written, token, channels[i], lane, exists)

    def sync_warps(self) -> None:
        """Synchronises the warps that have channels."""
        cute.arch.barrier(barrier_id=2, number_of_threads=MIXTURE_WARPS * WARP)

    def loaded_streams(self, args: ArgumentsOfSums, token: Int32, channel: Int32, exists: Int32) -> cute.Tensor:
        """A thread's channels of the new streams, [run][stream][word]."""
        plan = self.plan
        x = cute.make_rmem_tensor((plan.runs * STREAMS * plan.run_words,), Uint32)
        source = args.out_streams + (Int64(token) * (STREAMS * plan.dim) + channel) * 2
        for run in range(plan.runs):
            for s in range(STREAMS):
                loaded = load_words_if(exists, source + (s * plan.dim + run * plan.run_step) * 2, plan.run_words)
                for w, word in enumerate(loaded):
                    x[(run * STREAMS + s) * plan.run_words + w] = word
        return x

    @cute.jit
    def copy_sums(self, args: ArgumentsOfSums, shared: cutlass.Constexpr, thread: Int32, first: Int32) -> None:
        """Copies the group's sums to shared memory: [eighth][token][quad][4]; zeros after the last token."""
        plan, quads = self.plan, self.plan.quads
        for task in cutlass.range(thread, CLUSTER * plan.tokens * quads, MIXTURE_WARPS * WARP, unroll=1):
            eighth, t, quad = task // (plan.tokens * quads), task // quads % plan.tokens, task % quads
            source = args.sums + ((Int64(first + t) * CLUSTER + eighth) * quads + quad) * 16
            exists = args.num_tokens - (first + t)
            place = address_of(shared.received, 0, 0) + task * 16
            ptx.store_shared(place, ptx.load_or_zeros(Float32, 4, source, exists, "gt.s32", cache=""))

    @cute.jit
    def all_gates(
        self,
        args: ArgumentsOfSums,
        shared: cutlass.Constexpr,
        thread: Int32,
        first: Int32,
        base: Float32,
        scale: Float32,
    ) -> None:
        """Stores pre for this CTA, and writes post."""
        count = self.num_gates()
        if thread < self.plan.tokens * count:
            t, gate = thread // count, thread % count
            value = self.gate(args, shared, 0, t, gate, base, scale)
            if gate < STREAMS:
                ptx.store_shared_f32(self.pre(shared, 0) + (t * STREAMS + gate) * 4, value + args.hc_eps)
            elif first + t < args.num_tokens:
                place = args.out_post + (Int64(first + t) * STREAMS + (gate - STREAMS)) * 4
                ptx.store_f32(place, value * 2.0)

    @cute.jit
    def add_up_warps(self, shared: cutlass.Constexpr, thread: Int32) -> None:
        """Adds up the sums of squares of each eighth's warps: [eighth][token]."""
        plan = self.plan
        if thread < CLUSTER * plan.square_slots:
            eighth, slot = thread // plan.square_slots, thread % plan.square_slots
            place = address_of(shared.squares, 0, 0) + eighth * (plan.warps * plan.square_slots * 4) + slot * 4
            parts = [ptx.load_shared_f32(place + warp * plan.square_slots * 4) for warp in range(plan.warps)]
            ptx.store_shared_f32(address_of(shared.received_squares, 0, 0) + thread * 4, in_turn(parts))


def plans(plan: Plan) -> tuple[Plan, Plan]:
    """The plans of both launches, from the plan of a boundary in one launch with several teams."""
    assert plan.teams > 1 and plan.post and plan.rows == PRE_ROWS and not plan.experts, plan
    return replace(plan, fp8=False), replace(plan, tokens=MIXTURE_TOKENS, teams=1)


def compile(plan: Plan, arch: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """The compiled launch functions of both launches: (arguments, CTAs, stream)."""
    multiplication, mixture = plans(plan)
    launches = (
        ("multiplication", multiplication, Multiplication(multiplication).launch),
        ("mixture", mixture, Mixture(mixture).launch),
    )
    first, second = (
        load_launcher(f"hyper_connection_{name}", made, arch, launched, ArgumentsOfSums, Int32)
        for name, made, launched in launches
    )
    return first, second


def launch(plan: Plan, arguments: Arguments, device: torch.device, arch: str) -> None:
    """Launches both kernels.

    Args:
        plan: of a boundary in one launch with several teams.
        arguments: of that boundary.
        device: of the tensors.
        arch: to compile for.
    """
    num_tokens = arguments.num_tokens
    sums = torch.empty(num_tokens, CLUSTER, plan.quads * 4, dtype=torch.float32, device=device)
    arguments, stream = ArgumentsOfSums(*arguments, address(sums)), current_stream(device)
    rounds = -(-num_tokens // (plan.tokens * plan.teams))
    multiply, mix = compile(plan, arch)
    multiply(arguments, Int32(min(rounds, hardware_multiprocessors(device) // CLUSTER) * CLUSTER), stream)
    mix(arguments, Int32(-(-num_tokens // MIXTURE_TOKENS)), stream)


def _shared_of_multiplication(plan: Plan) -> type:
    @cute.struct
    class Shared:
        fn: cute.struct.Align[cute.struct.MemRange[Uint8, STREAMS * plan.stage_bytes], 128]
        # fn: [stream][row][channel], fp32
        sums: cute.struct.Align[
            cute.struct.MemRange[Float32, plan.teams * plan.warps * plan.tokens * plan.quads * 4], 16
        ]
        # sums: [team][warp][token][quads * 4]
        full: cute.struct.MemRange[Int64, STREAMS]
        # full: [stream]; counts the bytes of its rows

    return Shared


def _shared_of_mixture(plan: Plan) -> type:
    @cute.struct
    class Shared:
        received: cute.struct.Align[cute.struct.MemRange[Float32, CLUSTER * plan.tokens * plan.quads * 4], 16]
        # received: [eighth][token][quads * 4]
        squares: cute.struct.Align[cute.struct.MemRange[Float32, CLUSTER * plan.warps * plan.square_slots], 16]
        # squares: [eighth][warp][token]
        received_squares: cute.struct.Align[cute.struct.MemRange[Float32, CLUSTER * plan.square_slots], 16]
        # received_squares: [eighth][token]
        pre: cute.struct.Align[cute.struct.MemRange[Float32, plan.tokens * STREAMS], 16]

    return Shared
