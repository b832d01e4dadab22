"""TMA copies: contiguous bytes to shared memory; tiles of bf16, swizzled by 128 bytes in shared memory, to and from
global memory."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsv4_kernels.device import ptx


class TmaTensor(NamedTuple):
    """A tensor in global memory, and the copy instruction that moves boxes of it."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def swizzled_atom() -> cute.ComposedLayout:
    """Layout of eight rows of 128 bytes (64 bf16), swizzled by 128 bytes, K-major."""
    return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)


def swizzled_layout(shape: tuple) -> tuple:
    """(outer layout, swizzle) of `shape` tiled with the swizzled atom, first modes first."""
    layout = cute.tile_to_shape(swizzled_atom(), shape, order=tuple(range(len(shape))))
    return layout.outer, layout.inner


def tma_partition(tma: TmaTensor, tiles: cute.Tensor) -> tuple:
    """(shared memory, global memory) operands of TMA copies: mode 0 is a box. The other modes are those of `tiles`
    after its first two in shared memory, and the box's coordinates in the tensor, which has three modes, in global
    memory."""
    box = tuple(cute.size(tiles, mode=[mode]) for mode in (0, 1))
    boxes = cute.local_tile(tma.tensor, box, (None, None, None))
    blocks = cute.group_modes(tiles, 0, 2), cute.group_modes(boxes, 0, 2)
    return cpasync.tma_partition(tma.atom, 0, cute.make_layout(1), *blocks)


def copy_bulk(shared: Int32, address: Int64, num_bytes: Int32 | int, barrier: Int32) -> None:
    """Starts a copy of contiguous bytes from global to shared memory (a bulk copy); its bytes arrive at an mbarrier."""
    ptx.asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        [],
        shared,
        address,
        Int32(num_bytes),
        barrier,
    )
