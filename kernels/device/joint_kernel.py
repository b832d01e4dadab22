"""One kernel for several launches that do not depend on each other (`dsv4_kernels.host.joint_launch`).

CTAs [begin, begin + count) of the grid run the body of one part, which sees CTAs [0, count) and its own number of
threads. A part begins at a whole cluster, so that no cluster has CTAs of two parts. CTAs and threads without work only
wait (rule 2 of `dependent_launch`). All parts use the same shared memory, since a CTA runs one of them.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4_kernels.device import dependent_launch


class Counts(NamedTuple):
    """CTAs of each part; 0 for a part that does not exist."""

    first: Int32
    second: Int32
    third: Int32


class Cta:
    """A CTA of a part, in place of the special registers of a launch of its own.

    Args:
        number: among the CTAs of the part.
        count: CTAs of the part.
        threads: of the part, for `sync_threads`; None in a launch of its own.
    """

    def __init__(self, number: Int32, count: Int32, threads: int | None) -> None:
        self.number, self.count, self.threads = number, count, threads


def sync_threads(threads: int | None) -> None:
    """Waits for all `threads` of a part in this CTA; None for all threads of the CTA."""
    if threads is None:
        cute.arch.sync_threads()
    else:
        cute.arch.barrier(barrier_id=0, number_of_threads=threads)


@cute.jit
def one_after_the_other(
    args: tuple, links: cutlass.Constexpr[tuple], prepared: tuple, cta: cutlass.Constexpr[Cta]
) -> None:
    """The body of a chain: each kernel's body, after all threads have ended the one before. A barrier makes their
    writes to global memory visible within the CTA."""
    for i in cutlass.range_constexpr(len(links)):
        if cutlass.const_expr(i > 0):
            sync_threads(cta.threads)
        links[i].body(args[i], links[i].configuration, (), cta)


def cta_of_launch() -> Cta:
    """The CTA of a launch of its own, with a grid of one dimension."""
    number, _, _ = cute.arch.block_idx()
    count, _, _ = cute.arch.grid_dim()
    return Cta(number, count, None)


@cute.jit
def launch(args: tuple, counts: Counts, parts: cutlass.Constexpr[tuple], stream: cuda.CUstream) -> None:
    """Launches the CTAs of all parts."""
    cluster = max(part.cluster for part in parts)
    prepared = tuple(part.prepare(*pair) for part, pair in zip(parts, pairs_of(args, parts), strict=True))
    ctas = Int32(0)
    for count in counts[: len(parts)]:
        ctas += padded(count, cluster)
    kernel(args, counts, prepared, parts).launch(
        grid=[ctas, 1, 1],
        cluster=[cluster, 1, 1],
        block=[max(part.threads for part in parts), 1, 1],
        stream=stream,
        min_blocks_per_mp=max(part.ctas_per_sm for part in parts),
        preferred_smem_carveout=100,  # percent: the planned number of CTAs fits
        smem_merge_branch_allocs=True,
        use_pdl=dependent_launch.is_on(),
    )


def pairs_of(args: tuple, parts: tuple) -> list:
    """(arguments, configuration) of each part."""
    return [(of_part, part.configuration) for of_part, part in zip(args, parts, strict=True)]


def padded(count: Int32, cluster: int) -> Int32:
    """CTAs of a part in the grid: whole clusters."""
    return (count + (cluster - 1)) // cluster * cluster


@cute.kernel
def kernel(args: tuple, counts: Counts, prepared: tuple, parts: cutlass.Constexpr[tuple]) -> None:
    """The kernel."""
    cta, _, _ = cute.arch.block_idx()
    send(args, counts, prepared, parts, 0, cta)


@cute.jit
def send(
    args: tuple,
    counts: Counts,
    prepared: tuple,
    parts: cutlass.Constexpr[tuple],
    i: cutlass.Constexpr[int],
    number: Int32,
) -> None:
    """Sends a CTA to part i, or to one of the parts after it; number: among the CTAs of these parts. The branches
    exclude each other, so that they share their memory."""
    thread, _, _ = cute.arch.thread_idx()
    end = padded(counts[i], max(part.cluster for part in parts))
    if number < end:
        if (number < counts[i]) & (thread < parts[i].threads):
            parts[i].body(args[i], parts[i].configuration, prepared[i], Cta(number, counts[i], parts[i].threads))
        else:
            dependent_launch.begin()
    else:
        if cutlass.const_expr(i + 1 < len(parts)):
            send(args, counts, prepared, parts, i + 1, number - end)
