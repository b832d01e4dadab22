"""A kernel that computes cosine and sine of a list of angles; for tests of `dsv4_kernels.device.rotation`."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from dsv4_kernels.device import ptx
from dsv4_kernels.device.rotation import cosine_and_sine

THREADS = 128


@cute.jit
def launch(x: Int64, out: Int64, count: Int32, num_ctas: Int32, stream: cuda.CUstream) -> None:
    """Launch one thread an angle."""
    every_angle(x, out, count).launch(grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.kernel
def every_angle(x: Int64, out: Int64, count: Int32) -> None:
    """Compute cosine and sine of one angle."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * THREADS + thread
    if i < count:
        ptx.store_f32x2(out + Int64(i) * 8, cosine_and_sine(ptx.load_f32(x + Int64(i) * 4)))


def cosines_and_sines(angles: Tensor) -> Tensor:
    """Return [n, 2] fp32 for angles [n]."""
    out = torch.empty(len(angles), 2)
    arguments = (Int64(angles.data_ptr()), Int64(out.data_ptr()), Int32(len(angles)))
    launch(*arguments, Int32(-(-len(angles) // THREADS)), cuda.CUstream(0))
    return out
