"""The exchange of parts between ranks, inside of the boundary: a thread sends its channels of its token, and sums.

Who waits for whom and why the wait ends is described in `all_reduce/gpu.py`; what differs here:

    a channel of the mailboxes    belongs to the CTA of this number. Every CTA of a launch has a token, so it sends
                                  words to, and gets words from, the CTA of its number on every rank, as the proof about
                                  two buffers demands. A launch of either op moves the bits of the channels that it
                                  uses.
    a thread that polls           waits for the thread with the same indices on every other rank, which sends before it
                                  polls. A CTA also waits for its cluster, so all CTAs of a launch must be resident at
                                  once: `gpu.with_parts` bounds their number.
    a token after the last one    sends and awaits nothing, on all ranks alike.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4_kernels.device import bf16_rows, ptx
from dsv4_kernels.device.peer_words import EMPTY, sendable, store, time_limit_of, total, wait_for_parts
from dsv4_kernels.host.mailboxes import VECTOR_BYTES
from dsv4_kernels.hyper_connection.arithmetic import load_words
from dsv4_kernels.hyper_connection.experts import Experts
from dsv4_kernels.hyper_connection.plan import ArgumentsOfParts, Plan


class Parts(Experts):
    """Methods of a thread of a plan with ranks."""

    plan: Plan

    @cute.jit
    def place_in_mailbox(self, args: ArgumentsOfParts, thread: Int32, cta: Int32) -> Int64:
        """Offset of a thread's first piece in any mailbox, from sender 0, in the buffer that this launch uses."""
        buffer = ptx.load_i32(args.peers.buffer_of + cta * 4)
        channel = Int64(buffer) * args.peers.buffer_bytes + cta * args.peers.channel_bytes
        return channel + thread * (self.plan.piece_words * 4)

    def place_of_piece(self, args: ArgumentsOfParts, place: Int64, piece: int, sender: Int32 | int) -> Int64:
        """Offset of a sender's piece in any mailbox."""
        plan = self.plan
        side_by_side = plan.sender_threads // plan.threads
        in_place = piece % side_by_side * plan.threads * VECTOR_BYTES
        sender_bytes = plan.sender_threads * VECTOR_BYTES
        return place + piece // side_by_side * args.peers.place_bytes + in_place + sender * sender_bytes

    @cute.jit
    def send_part(self, args: ArgumentsOfParts, token: Int32, channel: Int32, place: Int64, slots: list) -> None:
        """Sends this thread's channels of this rank's part to all ranks."""
        plan = self.plan
        size = 4 if plan.fp32_parts else 2
        if token < args.num_tokens:
            part = args.y + Int64(token) * args.y_stride + channel * size
            pieces = []
            if cutlass.const_expr(plan.experts > 0):
                words = self.sum_over_experts(args, token, channel, slots)
                pieces = [words[first : first + plan.piece_words] for first in range(0, len(words), plan.piece_words)]
            for piece in cutlass.range_constexpr(0 if plan.experts else plan.pieces):
                first = piece * plan.piece_words * 4 // size  # channel of the thread
                in_run = plan.run_words * 2
                step = first // in_run * plan.run_step + first % in_run
                pieces.append(load_words(part + step * size, plan.piece_words))
            for piece in cutlass.range_constexpr(plan.pieces):
                words = [sendable(word) for word in pieces[piece]]
                for r in cutlass.range_constexpr(plan.ranks):
                    store(args.peers.mailboxes[r] + self.place_of_piece(args, place, piece, args.peers.rank), words)

    @cute.jit
    def sum_of_parts(self, args: ArgumentsOfParts, token: Int32, place: Int64) -> cute.Tensor:
        """The sum of all ranks' parts for this thread's channels, rounded to bf16, [run][word]; zeros after the last
        token."""
        plan = self.plan
        words = cute.make_rmem_tensor((plan.runs * plan.run_words,), Uint32)
        for w in cutlass.range_constexpr(plan.runs * plan.run_words):
            words[w] = Uint32(0)
        if token < args.num_tokens:
            peers, sender_bytes, count = args.peers, plan.sender_threads * VECTOR_BYTES, plan.piece_words
            time_limit = time_limit_of(peers)
            made = count // (1 + plan.fp32_parts)
            for piece in cutlass.range_constexpr(plan.pieces):
                own = peers.own + self.place_of_piece(args, place, piece, 0)
                arrived = wait_for_parts(peers, own, time_limit, plan.ranks, sender_bytes, count)
                parts = [[arrived[count * r + w] for w in range(count)] for r in range(plan.ranks)]
                packed = bf16_rows.packed(total(parts, plan.fp32_parts))
                for w in cutlass.range_constexpr(made):
                    words[made * piece + w] = packed[w]
                for r in cutlass.range_constexpr(plan.ranks):
                    store(own + r * sender_bytes, [Uint32(EMPTY)] * count)
        return words

    def next_buffer(self, args: ArgumentsOfParts, cta: Int32) -> None:
        """Moves this CTA's channel to its other buffer; called by one thread, when all threads know which is in use."""
        state = args.peers.buffer_of + cta * 4
        ptx.store_i32(state, ptx.load_i32(state) ^ 1)
