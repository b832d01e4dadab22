"""Tensor memory, and descriptors of `tcgen05.mma` operands in shared memory (Blackwell)."""

from typing import ClassVar

import cutlass
from cutlass import Float32, Int32
from cutlass.experimental import primitives as prims

from dsv4_kernels.device import dependent_launch, mbarrier
from dsv4_kernels.device.cta_pair import group_of

SWIZZLE_ROW_BYTES = 128
"""The span of the 128-byte swizzle: 64 bf16."""


class TensorMemoryPlan:
    """The part of a kernel's plan that :func:`set_up` needs: the end of a CTA's shared memory, and tensor memory.

    Shared memory ends with the mbarriers, from `barriers_offset` on, and the word for the address of tensor memory.
    """

    num_barriers: ClassVar[int]

    @property
    def barriers_offset(self) -> int:
        """Offset of the mbarriers in shared memory, a multiple of 8."""
        raise NotImplementedError

    @property
    def used_columns(self) -> int:
        """Columns of tensor memory that the kernel uses."""
        raise NotImplementedError

    @property
    def tmem_address_offset(self) -> int:
        """Offset of the word to which the allocation of tensor memory writes its address."""
        return self.barriers_offset + 8 * self.num_barriers

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.tmem_address_offset + 16

    @property
    def tmem_columns(self) -> int:
        """Columns to allocate: a power of two, at least 32."""
        return 1 << max(self.used_columns - 1, 31).bit_length()


def tmem_columns(tmem: prims.TmemAddr, warp: Int32, column: Int32 | int, dtype: type) -> cutlass.Array:
    """Address of a column in the 32 lanes that warp `warp`, modulo 4, may access."""
    return prims.TmemAddr.from_row_col(tmem.row_id + warp % 4 * 32, tmem.col_id + column).as_ptr(dtype)


def load_tmem(columns: cutlass.Array, count: int) -> list[Int32]:
    """`count` columns of this thread's lane. A `tcgen05_wait(LOAD)` must follow before their first use."""
    words = prims.tcgen05_ld("32x32b", columns, num=count)
    return [words[i] for i in range(count)]


def as_float(word: Int32) -> Float32:
    """The fp32 with the same bits.

    PTX text, because the compiler would otherwise combine words in pairs between a load of tensor memory and its wait.
    """
    return prims.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def swizzled(start: cutlass.Pointer, leading_bytes: int = 16) -> prims.Tcgen05SmemDesc:
    """Descriptor of rows of 128 bytes, swizzled by 128 bytes, in groups of eight that are 1,024 bytes apart."""
    return prims.Tcgen05SmemDesc.build(
        start_address=start,
        leading_byte_offset=leading_bytes,
        stride_byte_offset=8 * SWIZZLE_ROW_BYTES,
        layout=prims.Tcgen05SmemSwizzle.SWIZZLE_128B,
    )


def unswizzled(start: cutlass.Pointer) -> prims.Tcgen05SmemDesc:
    """Descriptor of 32 adjacent rows of 16 bytes."""
    return prims.Tcgen05SmemDesc.build(
        start_address=start,
        leading_byte_offset=16,
        stride_byte_offset=8 * 16,
        layout=prims.Tcgen05SmemSwizzle.NONE,
    )


def set_up(
    barriers: cutlass.Pointer,
    groups: list[tuple[int, int, int]],
    tmem_address: cutlass.Pointer,
    columns: int,
    ctas: int = 1,
) -> None:
    """Initialises mbarriers and allocates tensor memory; called by one warp of each CTA, before a barrier of all warps
    (of a pair, see `cta_pair`).

    The allocation waits for the kernel before, which by then has freed its tensor memory (`dependent_launch`, rule 5).

    Args:
        barriers, groups: see `mbarrier.initialise`.
        tmem_address: the word of shared memory that gets the address.
        columns: a power of two from 32 to 512 (`TensorMemoryPlan.tmem_columns`).
        ctas: 1, or 2 for a pair, in which both CTAs allocate. There the barrier must be of both CTAs' warps, and a
            `tcgen05.fence::after_thread_sync` must follow it.
    """
    mbarrier.initialise(barriers, groups)
    allocate(tmem_address, columns, ctas)


def allocate(tmem_address: cutlass.Pointer, columns: int, ctas: int = 1) -> None:
    """Allocates tensor memory, as `set_up`, which initialises mbarriers too."""
    dependent_launch.wait()
    prims.tcgen05_alloc(tmem_address, columns, group=group_of(ctas))
    prims.tcgen05_relinquish_alloc_permit(group=group_of(ctas))
    if ctas == 2:
        prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)


def free(tmem: prims.TmemAddr, columns: int, ctas: int = 1) -> None:
    """Frees the tensor memory of `set_up`; called by the same warp, after a barrier of all warps that access it."""
    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
    prims.tcgen05_dealloc(tmem.as_ptr(Float32), columns, group=group_of(ctas))
