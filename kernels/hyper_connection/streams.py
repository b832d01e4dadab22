"""What a thread does with its own channels: writing a sublayer's output back to the streams, and mixing them."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4_kernels import ptx
from dsv4_kernels.hyper_connection.arithmetic import load_8_bytes_if, store_8_bytes_if, unpack
from dsv4_kernels.hyper_connection.plan import CHANNELS, STREAMS, Arguments, Plan

VALUES = STREAMS * CHANNELS
"""Of a token, in a thread."""


class Streams:
    """Parts of the kernel in which no thread needs another one."""

    plan: Plan

    def first_channel(self, rank: Int32, thread: Int32) -> Int32:
        """Of a thread."""
        return rank * self.plan.slice + thread * CHANNELS

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

    def mix(self, pre_of_tokens: Int32, x: cute.Tensor) -> list:
        """The mixtures, as two words of bf16 for each token; pre of all tokens is in shared memory."""
        words = []
        for t in range(self.plan.tokens):
            pre = ptx.load_shared_f32x4(pre_of_tokens + t * (STREAMS * 4))
            values = []
            for c in range(CHANNELS):
                value = pre[0] * x[t * VALUES + c]
                for s in range(1, STREAMS):
                    value = ptx.fma(pre[s], x[t * VALUES + s * CHANNELS + c], value)
                values.append(value)
            words += [ptx.pack_bf16(values[c], values[c + 1]) for c in range(0, CHANNELS, 2)]
        return words

    def weight(self, args: Arguments, channel: Int32) -> list:
        """Of this thread's channels in the norm."""
        if self.plan.bf16_weight:
            return unpack(load_8_bytes_if(Int32(1), args.norm_weight + channel * 2))
        return list(ptx.load_or_zeros(Float32, 4, args.norm_weight + channel * 4, Int32(1), cache=""))
