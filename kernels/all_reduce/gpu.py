"""Sum over ranks on Hopper and Blackwell (sm_90a, sm_100a): each rank stores its part into all mailboxes, and adds what
arrives in its own.

Protocol. A mailbox is filled with EMPTY words. A thread reads 16 bytes of its rank's part, replaces EMPTY in it by
another NaN, and stores the words to its place in every rank's mailbox. Then it polls the same place in its own mailbox,
where the other ranks store, until no word is EMPTY, adds the parts in fp32 in the order of the ranks, and writes EMPTY
back. No flag says that data are there: each word does, so stores may arrive in any order, and a sum takes one crossing
of the link. (A flag needs a release, which waits until the data have arrived, hence two crossings.)

Who waits for whom, and why the wait ends:

    a thread that polls         the thread with the same indices on every other rank, which stores before it polls. Its
                                CTA becomes resident: a launch has at most 128 CTAs, which wait for no CTA of their own
                                GPU, and kernels of other streams end by themselves (`device/dependent_launch.py`, rule
                                3). That rank's earlier kernels wait for nothing that this kernel holds.
    this rank's next sum        this rank's sum, by the order of the stream.
    the store of sum k + 2      nothing, and needs no wait: its rank has seen words of sum k + 1 from every reader of
    into a buffer               sum k in this buffer, and a rank sends these after its sum k has ended.

Two buffers are therefore enough, and each channel (a CTA's part of the mailbox) keeps one bit that says which is next.
The bit lies in device memory, so a CUDA graph can be replayed any number of times; nothing counts, so nothing
overflows. EMPTY words of sum k are in place before the next writer: the end of a grid and the start of the next one in
the stream order all accesses of the system, and the part of sum k + 1 is sent after it.

Sums of one group must run on one stream, in one order on all ranks: two at once would share channels. A boundary that
sums (`hyper_connection/parts.py`) is such a sum.

A thread that waits longer than the limit stores 1 for the missing sender to `late`, which the host reads, returns NaN,
and marks the mailbox as failed: later sums wait only a moment and return NaN, so the host soon gets control. A failed
group stays failed.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32
from torch import Tensor

from dsv4_kernels.device import bf16_rows, dependent_launch, ptx
from dsv4_kernels.device.peer_words import (
    EMPTY,
    Peers,
    peers_of,
    poll_parts,
    sendable,
    store,
    time_limit_of,
    total,
    wait_for_parts,
)
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.mailboxes import MOST_THREADS, VECTOR_BYTES, Mailboxes
from dsv4_kernels.model_shapes import ModelShapes


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel; addresses are Int64."""

    part: Int64
    out: Int64
    vectors: Int32
    """Vectors of 16 bytes of the part."""
    peers: Peers


@cute.jit
def launch(
    args: Arguments,
    ranks: cutlass.Constexpr,
    most_threads: cutlass.Constexpr,
    fp32: cutlass.Constexpr,
    ctas: Int32,
    threads: Int32,
    stream: cuda.CUstream,
) -> None:
    """Launches CTAs as `Plan.launch` says."""
    kernel(args, ranks, most_threads, fp32).launch(
        grid=[ctas, 1, 1],
        block=[threads, 1, 1],
        max_number_threads=[most_threads, 1, 1],
        stream=stream,
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(args: Arguments, ranks: cutlass.Constexpr, most_threads: cutlass.Constexpr, fp32: cutlass.Constexpr) -> None:
    """Sends and sums the blocks of one CTA."""
    thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    threads, ctas = cute.arch.block_dim()[0], cute.arch.grid_dim()[0]
    peers, sender_bytes = args.peers, most_threads * VECTOR_BYTES
    dependent_launch.begin()
    state = peers.buffer_of + cta * 4
    buffer = ptx.load_i32(state)
    time_limit = time_limit_of(peers)
    place = Int64(buffer) * peers.buffer_bytes + cta * peers.channel_bytes + thread * VECTOR_BYTES
    first = cta * threads + thread

    vector, offset = first, place
    while vector < args.vectors:
        words = [sendable(word) for word in bf16_rows.load_words(args.part + Int64(vector) * VECTOR_BYTES)]
        for r in cutlass.range_constexpr(ranks):
            store(peers.mailboxes[r] + offset + peers.rank * sender_bytes, words)
        vector += ctas * threads
        offset += peers.place_bytes

    vector, offset = first, place
    while vector < args.vectors:
        arrived = poll_parts(peers.own + offset, ranks, sender_bytes, 4)
        wait_for_parts(peers, peers.own + offset, arrived, time_limit, ranks, sender_bytes, 4)
        added = total([[arrived[4 * r + w] for w in range(4)] for r in range(ranks)], fp32)
        words = tuple(ptx.as_u32(x) for x in added) if fp32 else bf16_rows.packed(added)
        ptx.store_16_bytes(args.out + Int64(vector) * VECTOR_BYTES, words)
        for r in cutlass.range_constexpr(ranks):
            store(peers.own + offset + r * sender_bytes, [Uint32(EMPTY)] * 4)
        vector += ctas * threads
        offset += peers.place_bytes

    cute.arch.sync_threads()  # all threads have read which buffer to use
    if thread == 0:
        ptx.store_i32(state, buffer ^ 1)


# Host side


def compile(arch: str, ranks: int, most_threads: int, dtype: torch.dtype) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, CTAs, threads, stream)."""
    config = ranks, most_threads, dtype == torch.float32
    return load_launcher("all_reduce", config, arch, launch, Arguments, *config, Int32, Int32)


def _run(name: str, part: Tensor, mailboxes: Mailboxes) -> Tensor:
    num_bytes, plan = part.numel() * part.element_size(), mailboxes.plan
    if num_bytes > plan.most_bytes or num_bytes % VECTOR_BYTES:
        raise ValueError(
            f"all_reduce: a part of {num_bytes} bytes; expected a multiple of {VECTOR_BYTES} and at most "
            f"{plan.most_bytes}, the size that the mailboxes were made for"
        )
    out, vectors = torch.empty_like(part), num_bytes // VECTOR_BYTES
    launcher = compile(architecture(name, part.device), plan.ranks, plan.threads, part.dtype)
    if vectors:
        arguments = Arguments(part.data_ptr(), out.data_ptr(), vectors, peers_of(mailboxes))
        launcher(arguments, *map(Int32, plan.launch(vectors)), current_stream(part.device))
    return out


def sm90(part: Tensor, mailboxes: Mailboxes) -> Tensor:
    """`dsv4_kernels.all_reduce.all_reduce` on Hopper."""
    return _run("sm90", part, mailboxes)


def sm100(part: Tensor, mailboxes: Mailboxes) -> Tensor:
    """`dsv4_kernels.all_reduce.all_reduce` on Blackwell (B200, GB200, B300)."""
    return _run("sm100", part, mailboxes)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """The compile jobs of `all_reduce`: parts of the attention, and of the experts."""
    dtypes = {model.attention.dtype, torch.float32 if model.experts_sum_fp32 else model.attention.dtype}
    return [partial(compile, arch, model.peer_sum_ranks, MOST_THREADS, dtype) for dtype in sorted(dtypes, key=str)]
