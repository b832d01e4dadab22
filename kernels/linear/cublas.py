"""The products on a GPU, by cuBLAS: bf16 operands, whose products are exact in fp32, summed in fp32.

cuBLAS chooses its tiles and K splits by the number of rows, so a row's last bit may depend on the number of other rows:
these implementations are not `batch_invariant`. A weight in fp32 is multiplied in fp32, without TF32, and slowly.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """See `dsv4_kernels.linear.linear_fp32`."""
    if x.dtype == weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return x.float() @ weight.float().T


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `dsv4_kernels.linear.grouped_linear`."""
    out = x.new_empty(x.shape[0], *weight.shape[:2])
    # cuBLAS writes a token's output groups contiguously, as the next product reads them.
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out
