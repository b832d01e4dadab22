"""Meeting points of the Hopper kernels' warps; who waits for whom is in persistent.py and cluster.py."""

import cutlass.cute as cute
from cutlass import Int32

from dsv4_kernels.sparse_attention.sm90.plan import CONSUMER_THREADS, PRODUCER_THREADS, NamedBarrier


def sync(barrier: NamedBarrier | Int32, threads: int = CONSUMER_THREADS) -> None:
    """Waits until both consumers, or so many of their threads, have come to a named barrier."""
    cute.arch.barrier(barrier_id=int(barrier) if isinstance(barrier, int) else barrier, number_of_threads=threads)


def arrive(barrier: NamedBarrier | Int32) -> None:
    """Comes to a named barrier at which the other consumer waits."""
    cute.arch.barrier_arrive(
        barrier_id=int(barrier) if isinstance(barrier, int) else barrier, number_of_threads=CONSUMER_THREADS
    )


def sync_producer(producer: Int32) -> None:
    """Waits for all threads of a producer warpgroup."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.PRODUCER) + producer, number_of_threads=PRODUCER_THREADS)


@cute.jit
def arrive_for_warp(barrier: cute.Pointer, lane: Int32) -> None:
    """One arrival at an mbarrier for the warp."""
    if lane == 0:
        cute.arch.mbarrier_arrive(barrier)
