"""A CTA alone, or a pair of CTAs whose tensor cores multiply together (`cta_group::2` of tcgen05, Blackwell).

A pair is a cluster of two. Its first CTA issues the products. `ctas` is 1 or 2 when a kernel is compiled.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.experimental import primitives as prims


def group_of(ctas: int) -> prims.CTAGroup:
    """The group that products, copies to tensor memory and its allocation name."""
    return prims.CTAGroup.CTA_1 if ctas == 1 else prims.CTAGroup.CTA_2


def cta_rank(ctas: int) -> Int32:
    """This CTA's rank in its pair; 0 if it is alone."""
    return cute.arch.block_idx()[0] % ctas


def of_first_cta(barrier: cutlass.Pointer, ctas: int) -> cutlass.Pointer:
    """The same mbarrier in the first CTA."""
    return barrier if ctas == 1 else prims.mapa(barrier, 0)


def commit(barrier: cutlass.Pointer, ctas: int) -> None:
    """Arrives at the mbarrier in every CTA when all products issued so far are done."""
    if ctas == 1:
        prims.tcgen05_commit(barrier, group=prims.CTAGroup.CTA_1)
    else:
        prims.tcgen05_commit(barrier, multicast_mask=3, group=prims.CTAGroup.CTA_2)


def sync_all(ctas: int) -> None:
    """Barrier of all threads of the CTA, or of the pair."""
    if ctas == 1:
        prims.barrier_cta_sync_aligned(0)
    else:
        prims.barrier_cluster_arrive_aligned()
        prims.barrier_cluster_wait_aligned()
