"""The work of a thread on its own channels of its own token: writing a sublayer's output back, and mixing the streams.

A warp has 128 channels of all tokens of the token group, in eight units of sixteen: four threads, four channels each.
Lane 4 g + t has token g % tokens, and as many neighbouring units as there are tokens, with the t-th four channels of
each; so with eight tokens a thread has all units of one token, and with a single token one unit. Two adjacent units are
32 channels, of which a thread has eight consecutive ones: it loads and stores these at a time (four, if it has only one
unit).
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels.device import bf16_rows, ptx
from dsv4_kernels.device.peer_words import time_limit_of
from dsv4_kernels.hyper_connection.arithmetic import load_words_if, load_words_or_floats, store_words_if
from dsv4_kernels.hyper_connection.parts import Parts
from dsv4_kernels.hyper_connection.plan import CHANNELS, QUAD, STREAMS, UNITS, WARP, AnyArguments, Plan


class Streams(Parts):
    """Parts of the kernel in which a thread needs no other thread."""

    plan: Plan

    def token_of(self, thread: Int32) -> Int32:
        """Index in the token group of a thread's token."""
        return thread % WARP // QUAD % self.plan.tokens

    def first_channel(self, rank: Int32, thread: Int32) -> Int32:
        """The first channel of a thread."""
        lane, warp = thread % WARP, thread // WARP
        unit = lane // QUAD // self.plan.tokens * self.plan.tokens
        in_warp = unit // 2 * (2 * QUAD * CHANNELS) + unit % 2 * CHANNELS + lane % QUAD * (2 * CHANNELS)
        return rank * self.plan.slice + warp * (UNITS * QUAD * CHANNELS) + in_warp

    def new_streams(
        self,
        args: AnyArguments,
        token: Int32,
        channel: Int32,
        thread: Int32,
        cta: Int32,
        buffer: Int32,
        slots: list,
    ) -> cute.Tensor:
        """This thread's channels of the new streams, or of the old ones without `post`: [run][stream][word], two bf16 a
        word.

        All loads are issued before the first sum is computed; with ranks, the part is sent before, and the other ranks'
        parts are awaited after that, run by run; `buffer` is the mailboxes'. With experts, the rows of a part are
        loaded and added first, those of an output are loaded last.
        """
        plan = self.plan
        if plan.ranks:
            part = self.load_part(args, token, channel, slots)
            in_mailbox = self.place_in_mailbox(args, thread, cta, buffer)
            self.send_part(args, token, part, in_mailbox)
        x = cute.make_rmem_tensor((plan.runs * STREAMS * plan.run_words,), Uint32)
        exists = args.num_tokens - token
        source = args.streams + Int64(token) * args.streams_stride + channel * 2
        output = args.y + Int64(token) * args.y_stride + channel * 2
        target = args.out_streams + (Int64(token) * (STREAMS * plan.dim) + channel) * 2
        loaded = []
        for run in range(plan.runs):
            step = run * plan.run_step * 2
            places = [source + args.stream_stride * s + step for s in range(STREAMS)]
            words = [load_words_if(exists, place, plan.run_words) for place in places]
            loads_output = plan.post and not plan.ranks and not plan.experts
            loaded.append((load_words_if(exists, output + step, plan.run_words) if loads_output else (), words))
        if plan.post:
            post = args.post + Int64(token) * args.post_stride
            comb = args.comb + Int64(token) * args.comb_stride
            weights = ptx.load_or_zeros(Float32, 4, post, exists, "gt.s32", cache="")
            rows = [ptx.load_or_zeros(Float32, 4, comb + 16 * j, exists, "gt.s32", cache="") for j in range(STREAMS)]
        if plan.ranks:
            polled = self.poll_run(args, token, in_mailbox, 0)
            time_limit = time_limit_of(args.peers)
        elif plan.experts:
            y = self.sum_over_experts(args, token, channel, slots)
        for run in range(plan.runs):
            outputs, words = loaded[run]
            if plan.ranks:
                outputs = self.sum_of_run(args, token, in_mailbox, run, polled, time_limit)
                if run + 1 < plan.runs:
                    polled = self.poll_run(args, token, in_mailbox, run + 1)
            elif plan.experts:
                outputs = tuple(y[run * plan.run_words + w] for w in range(plan.run_words))
            if plan.post:
                words = self.written_back(outputs, words, weights, rows)
                for s in range(STREAMS):
                    place = target + (s * plan.dim + run * plan.run_step) * 2
                    store_words_if(exists, place, words[s])
            for s in range(STREAMS):
                for w in range(plan.run_words):
                    x[(run * STREAMS + s) * plan.run_words + w] = words[s][w]
        return x

    def written_back(self, y: tuple, old: list, post: tuple, comb: list) -> list:
        """The new streams as words of bf16, a list for each: post[k] y + sum of comb[j][k] x[j].

        Two channels at a time, so that few values are in registers as fp32.
        """
        streams = [[] for _ in range(STREAMS)]
        for w in range(len(y)):
            outputs = bf16_rows.channels(y[w : w + 1])
            channels = [bf16_rows.channels(words[w : w + 1]) for words in old]
            for k in range(STREAMS):
                values = []
                for c in range(2):
                    value = post[k] * outputs[c]
                    for j in range(STREAMS):
                        value = ptx.fma(comb[j][k], channels[j][c], value)
                    values.append(value)
                streams[k].append(ptx.pack_bf16(*values))
        return streams

    def words_of(self, x: cute.Tensor, run: int, stream: int) -> list:
        """A thread's words of one run of one stream."""
        first = (run * STREAMS + stream) * self.plan.run_words
        return [x[first + w] for w in range(self.plan.run_words)]

    def by_units(self, runs: list) -> list:
        """A thread's values of a stream, given run by run, as lists of a unit's four channels."""
        values = [value for run in runs for value in run]
        return [values[first : first + CHANNELS] for first in range(0, len(values), CHANNELS)]

    def mix(self, pre: tuple, x: cute.Tensor) -> list:
        """The token's mixture, as words of bf16 for each run."""
        mixed = []
        for run in range(self.plan.runs):
            streams = [bf16_rows.channels(self.words_of(x, run, s)) for s in range(STREAMS)]
            values = []
            for c in range(2 * self.plan.run_words):
                value = pre[0] * streams[0][c]
                for s in range(1, STREAMS):
                    value = ptx.fma(pre[s], streams[s][c], value)
                values.append(value)
            mixed.append([ptx.pack_bf16(values[c], values[c + 1]) for c in range(0, len(values), 2)])
        return mixed

    def weight(self, args: AnyArguments, channel: Int32) -> list:
        """The norm's weights of this thread's channels, a list for each run; bf16 weights stay packed in words."""
        size = 2 if self.plan.bf16_weight else 4
        words = self.plan.run_words * size // 2
        return [
            load_words_or_floats(args.norm_weight + (channel + run * self.plan.run_step) * size, words, size == 4)
            for run in range(self.plan.runs)
        ]
