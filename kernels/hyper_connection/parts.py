"""The exchange of parts between ranks, inside of the boundary: a thread sends its channels of its token, and sums.

A thread asks for the next run's words while it writes a run back, so that of the latencies of its polls, which are
L2's, only the first one takes time; and the write-back begins when the first run is there.

Who waits for whom and why the wait ends is described in `all_reduce/gpu.py`; what differs here:

    a channel of the mailboxes    belongs to the CTA of this number. Every CTA of a launch has a token, so it sends
                                  words to, and gets words from, the CTA of its number on every rank, as the proof about
                                  two buffers demands. A launch of either op moves the bits of the channels that it
                                  uses.
    a thread that polls           waits for the thread with the same indices on every other rank, which sends before it
                                  polls. A CTA also waits for its cluster, so all CTAs of a launch must be resident at
                                  once: `choice.with_parts` bounds their number.
    a token after the last one    sends and awaits nothing, on all ranks alike.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4_kernels.device import bf16_rows, ptx
from dsv4_kernels.device.peer_words import EMPTY, poll_parts, sendable, store, total, wait_for_parts
from dsv4_kernels.host.mailboxes import VECTOR_BYTES
from dsv4_kernels.hyper_connection.arithmetic import load_words_if
from dsv4_kernels.hyper_connection.experts import Experts
from dsv4_kernels.hyper_connection.plan import ArgumentsOfParts, Plan


class Parts(Experts):
    """Methods of a thread of a plan with ranks."""

    plan: Plan

    def buffer_of(self, args: ArgumentsOfParts, cta: Int32) -> Int32:
        """Number of the buffer of this CTA's channel that this launch uses."""
        return ptx.load_i32(args.peers.buffer_of + cta * 4)

    def place_in_mailbox(self, args: ArgumentsOfParts, thread: Int32, cta: Int32, buffer: Int32) -> Int64:
        """Offset of a thread's first piece in any mailbox, from sender 0."""
        channel = Int64(buffer) * args.peers.buffer_bytes + cta * args.peers.channel_bytes
        return channel + thread * (self.plan.piece_words * 4)

    def place_of_piece(self, args: ArgumentsOfParts, place: Int64, piece: int, sender: Int32 | int) -> Int64:
        """Offset of a sender's piece in any mailbox."""
        plan = self.plan
        side_by_side = plan.sender_threads // plan.threads
        in_place = piece % side_by_side * plan.threads * VECTOR_BYTES
        sender_bytes = plan.sender_threads * VECTOR_BYTES
        return place + piece // side_by_side * args.peers.place_bytes + in_place + sender * sender_bytes

    def load_part(self, args: ArgumentsOfParts, token: Int32, channel: Int32, slots: list) -> list:
        """This thread's channels of this rank's part, as words of each piece; zeros after the last token. With experts
        the part is the sum of their rows."""
        plan = self.plan
        if plan.experts:
            words = self.sum_over_experts(args, token, channel, slots)
            return [words[first : first + plan.piece_words] for first in range(0, len(words), plan.piece_words)]
        size = 4 if plan.fp32_parts else 2
        part = args.y + Int64(token) * args.y_stride + channel * size
        pieces = []
        for piece in range(plan.pieces):
            first = piece * plan.piece_words * 4 // size  # channel of the thread
            in_run = plan.run_words * 2
            step = first // in_run * plan.run_step + first % in_run
            pieces.append(load_words_if(args.num_tokens - token, part + step * size, plan.piece_words))
        return pieces

    @cute.jit
    def send_part(self, args: ArgumentsOfParts, token: Int32, pieces: list, place: Int64) -> None:
        """Sends this thread's channels of this rank's part to all ranks."""
        plan = self.plan
        if token < args.num_tokens:
            for piece in cutlass.range_constexpr(plan.pieces):
                words = [sendable(word) for word in pieces[piece]]
                for r in cutlass.range_constexpr(plan.ranks):
                    store(args.peers.mailboxes[r] + self.place_of_piece(args, place, piece, args.peers.rank), words)

    def pieces_of(self, run: int) -> range:
        """A run's pieces."""
        of_run = self.plan.pieces // self.plan.runs
        return range(run * of_run, (run + 1) * of_run)

    def poll_run(self, args: ArgumentsOfParts, token: Int32, place: Int64, run: int) -> list:
        """Asks for the words of all ranks for this thread's channels of a run, [piece] as `poll_parts` returns them."""
        plan = self.plan
        places = [args.peers.own + self.place_of_piece(args, place, piece, 0) for piece in self.pieces_of(run)]
        sender_bytes, exists = plan.sender_threads * VECTOR_BYTES, args.num_tokens - token
        return [poll_parts(own, plan.ranks, sender_bytes, plan.piece_words, exists) for own in places]

    @cute.jit
    def sum_of_run(
        self,
        args: ArgumentsOfParts,
        token: Int32,
        place: Int64,
        run: cutlass.Constexpr,
        polled: list,
        time_limit: Int64,
    ) -> list:
        """The sum of all ranks' parts for this thread's channels of a run, rounded to bf16, as words; zeros after the
        last token. Waits for words that `polled`, the result of `poll_run`, has not."""
        plan, sender_bytes, count = self.plan, self.plan.sender_threads * VECTOR_BYTES, self.plan.piece_words
        words = []
        for piece, arrived in zip(self.pieces_of(run), polled, strict=True):
            own = args.peers.own + self.place_of_piece(args, place, piece, 0)
            wait_for_parts(args.peers, own, arrived, time_limit, plan.ranks, sender_bytes, count)
            parts = [[arrived[count * r + w] for w in range(count)] for r in range(plan.ranks)]
            words.extend(bf16_rows.packed(total(parts, plan.fp32_parts)))
            if token < args.num_tokens:
                for r in cutlass.range_constexpr(plan.ranks):
                    store(own + r * sender_bytes, [Uint32(EMPTY)] * count)
        return words

    def next_buffer(self, args: ArgumentsOfParts, cta: Int32, buffer: Int32) -> None:
        """Moves this CTA's channel to its other buffer; called by one thread, when all threads know which is in use."""
        ptx.store_i32(args.peers.buffer_of + cta * 4, buffer ^ 1)
