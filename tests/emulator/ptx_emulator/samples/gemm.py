"""C = A B^T on tcgen05 in one step of K, in the operand layouts that a wrong emulator confuses.

One tile, one or two CTAs, f16 in, f32 out. Threads write A to shared memory with an explicit swizzle, and TMA loads B:
this reveals a swizzle that TMA and MMA both get wrong. B may be shorter in K than the tile: TMA fills zeros, where A
holds ones.

    shape           lanes of the accumulator (row r of the CTA, column n)
    M=64,  1 CTA    r -> 32 * (r / 16) + r % 16
    M=128, 1 CTA    r -> r
    M=128, 2 CTAs   64 rows a CTA: r -> r, and r + 64 for the upper half of the columns
    M=256, 2 CTAs   128 rows a CTA: r -> r
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass.experimental import primitives as prims

K = 64  # one row of 128 bytes: the swizzle's span
N = 64
MMA_K = 16
ROW_BYTES = 128
ATOM_BYTES = 8 * ROW_BYTES
THREADS = 128
TMEM_COLUMNS = 64


@dataclass(frozen=True)
class Shape:
    m: int
    ctas: int = 1

    @property
    def rows(self) -> int:
        """The rows of A and of C in a CTA."""
        return self.m // self.ctas

    @property
    def columns(self) -> int:
        """The rows of B in a CTA."""
        return N // self.ctas

    @property
    def halves_columns(self) -> bool:
        """Whether the upper half of the columns is in lanes 64..127."""
        return self.ctas == 2 and self.m == 128


@cute.kernel
def gemm_kernel(
    a: cute.Tensor,
    b_map: cutlass.GridConstant[cuda.TensorMap],
    c: cute.Tensor,
    shape: cutlass.Constexpr,
) -> None:
    f16, i64, smem = cutlass.Float16, cutlass.Int64, cutlass.AddressSpace.smem
    a_tile = cutlass.Array(f16, shape.rows * K, space=smem, alignment=1024)
    b_tile = cutlass.Array(f16, shape.columns * K, space=smem, alignment=1024)
    b_full = cutlass.Array(i64, 1, space=smem)
    c_ready = cutlass.Array(i64, 1, space=smem)
    tmem_address = cutlass.Array(cutlass.Int32, 1, space=smem)
    group = "cta_1" if shape.ctas == 1 else "cta_2"
    mma_group = prims.CTAGroup.CTA_1 if shape.ctas == 1 else prims.CTAGroup.CTA_2

    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank, _, _ = cute.arch.block_idx()

    if warp == 0:
        if prims.elect_sync():
            prims.mbarrier_init(b_full, 1)
            prims.mbarrier_init(c_ready, 1)
            prims.fence_mbarrier_init()
        prims.tcgen05_alloc(tmem_address, TMEM_COLUMNS, group=group)
        prims.tcgen05_relinquish_alloc_permit(group=group)
    prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
    prims.barrier_cta_sync(0)
    tmem = prims.TmemAddr(tmem_address.load())
    lanes = prims.TmemAddr.from_row_col(tmem.row_id + warp * 32, tmem.col_id)

    if cutlass.const_expr(shape.m == 64):
        # The epilogue loads all 32 lanes of a warp; the MMA writes 16 of them.
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        zeros = cutlass.full([N], 0.0, dtype=cutlass.Float32)
        prims.tcgen05_st("32x32b", lanes.as_ptr(cutlass.Float32), zeros)
        prims.tcgen05_wait(prims.Tcgen05Wait.STORE)
        prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
    if warp == 0:
        if prims.elect_sync():
            prims.mbarrier_arrive_expect_tx(b_full, shape.columns * ROW_BYTES)
            prims.cp_async_bulk_tensor_shared_cta_global(b_tile, b_map.get_ptr(), (0, rank * shape.columns), b_full)
    if thread < shape.rows:
        # The 128-byte swizzle: 16-byte chunk c of row r is at chunk c ^ (r % 8).
        source = a.iterator.raw_ptr() + (rank * shape.rows + thread) * K
        for chunk in cutlass.range_constexpr(ROW_BYTES // 16):
            piece = (source + chunk * 8).load(count=8, alignment=16)
            place = thread * K + ((chunk ^ (thread & 7)) * 8)
            (a_tile.data_ptr() + place).store(piece, alignment=16)
    prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
    while not prims.mbarrier_try_wait_parity(b_full, 0):
        pass
    if cutlass.const_expr(shape.ctas == 2):
        prims.barrier_cluster_arrive_aligned()
        prims.barrier_cluster_wait_aligned()
    else:
        prims.barrier_cta_sync(0)
    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)

    if warp == 0:
        if rank == 0:
            if prims.elect_sync():
                idesc = prims.Tcgen05InstrDesc.build(
                    c_dtype=cutlass.Float32, a_dtype=f16, b_dtype=f16, n_dim=N, m_dim=shape.m
                )
                a_desc = prims.Tcgen05SmemDesc.build(
                    start_address=a_tile,
                    leading_byte_offset=16,
                    stride_byte_offset=ATOM_BYTES,
                    layout=prims.Tcgen05SmemSwizzle.SWIZZLE_128B,
                )
                b_desc = prims.Tcgen05SmemDesc.build(
                    start_address=b_tile,
                    leading_byte_offset=16,
                    stride_byte_offset=ATOM_BYTES,
                    layout=prims.Tcgen05SmemSwizzle.SWIZZLE_128B,
                )
                for k in cutlass.range_constexpr(K // MMA_K):
                    prims.tcgen05_mma(
                        prims.Tcgen05MMAKind.F16,
                        mma_group,
                        tmem.as_ptr(cutlass.Float32),
                        a_desc.advance_start_address(2 * k * MMA_K),
                        b_desc.advance_start_address(2 * k * MMA_K),
                        idesc,
                        k > 0,
                    )
                if cutlass.const_expr(shape.ctas == 2):
                    prims.tcgen05_commit(c_ready, multicast_mask=3, group=mma_group)
                else:
                    prims.tcgen05_commit(c_ready, group=mma_group)
    while not prims.mbarrier_try_wait_parity(c_ready, 0):
        pass
    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)

    width = N // 2 if shape.halves_columns else N
    values = prims.tcgen05_ld("32x32b", lanes.as_ptr(cutlass.Float32), num=width)
    prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
    row, column, mine = thread, cutlass.Int32(0), thread < shape.rows
    if cutlass.const_expr(shape.halves_columns):
        row, column, mine = thread % 64, (thread // 64) * width, thread < 128
    if cutlass.const_expr(shape.m == 64):
        row, mine = warp * 16 + thread % 32, thread % 32 < 16
    if mine:
        target = c.iterator.raw_ptr() + (rank * shape.rows + row) * N + column
        target.store(values, alignment=16)

    prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
    if cutlass.const_expr(shape.ctas == 2):
        prims.barrier_cluster_arrive_aligned()
        prims.barrier_cluster_wait_aligned()
    else:
        prims.barrier_cta_sync(0)
    if warp == 0:
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        prims.tcgen05_dealloc(tmem.as_ptr(cutlass.Float32), TMEM_COLUMNS, group=group)


@cute.jit
def gemm_host(
    a: cute.Tensor,  # [m, 64] f16
    b: cute.Tensor,  # [64, k] f16, k <= 64
    c: cute.Tensor,  # [m, 64] f32
    shape: cutlass.Constexpr,
) -> None:
    b_map = cuda.create_tensor_map_tiled(
        global_address=b.iterator.toint(),
        dtype=cutlass.Float16,
        global_dims=[b.shape[1], b.shape[0]],
        global_strides=[b.shape[1] * 2 // 16],
        box_dims=[K, shape.columns],
        swizzle=cuda.TensorMapSwizzle.s128b,
    )
    gemm_kernel(a, b_map, c, shape).launch(grid=(shape.ctas, 1, 1), block=(THREADS, 1, 1), cluster=(shape.ctas, 1, 1))


def gemm(a: torch.Tensor, b: torch.Tensor, shape: Shape) -> torch.Tensor:
    """A B^T by the kernel; call it inside `with emulated():`."""
    c = torch.zeros(shape.m, N)
    gemm_host(*(from_dlpack(tensor, assumed_align=16) for tensor in (a, b, c)), shape)
    return c


def gemm_inputs(shape: Shape, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of small integers, so that the product is exact; A holds ones beyond k."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-3, 4, (shape.m, K), generator=generator).half()
    a[:, k:] = 1
    return a, torch.randint(-3, 4, (N, k), generator=generator).half()


def gemm_ref(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[:, : b.shape[1]].float() @ b.float().T


SHAPES = [Shape(64), Shape(128), Shape(128, ctas=2), Shape(256, ctas=2)]
