"""Barriers between the Hopper kernels' warps; persistent.py and cluster.py say who waits for whom."""

import cutlass.cute as cute
from cutlass import Int32

from dsv4_kernels.sparse_attention.sm90.plan import CONSUMER_THREADS, PRODUCER_THREADS, NamedBarrier


def sync(barrier: NamedBarrier | Int32, threads: int = CONSUMER_THREADS) -> None:
    """Waits until `threads` threads, by default both consumers, have arrived at a named barrier."""
    cute.arch.barrier(barrier_id=int(barrier) if isinstance(barrier, int) else barrier, number_of_threads=threads)


def arrive(barrier: NamedBarrier | Int32) -> None:
    """Arrives at a named barrier at which the other consumer waits."""
    cute.arch.barrier_arrive(
        barrier_id=int(barrier) if isinstance(barrier, int) else barrier, number_of_threads=CONSUMER_THREADS
    )


def sync_producer(producer: Int32) -> None:
    """Waits for all threads of a producer warpgroup."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.PRODUCER) + producer, number_of_threads=PRODUCER_THREADS)


@cute.jit
def arrive_for_warp(barrier: cute.Pointer, lane: Int32) -> None:
    """Arrives once at an mbarrier for the warp."""
    if lane == 0:
        cute.arch.mbarrier_arrive(barrier)
