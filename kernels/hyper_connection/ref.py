"""Definition of the hyper-connections, in plain PyTorch (DeepSeek-V4 specification, sections 2.2 to 2.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.all_reduce.ref import all_reduce
from dsv4_kernels.host.expert_rows import ExpertRows, summed
from dsv4_kernels.host.mailboxes import Mailboxes
from dsv4_kernels.linear import linear_fp32
from dsv4_kernels.norm import rms_norm
from dsv4_kernels.quant import fp8_quantise
from dsv4_kernels.reference.batch_invariant import sigmoid, tree_sum


def hc_pre(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `dsv4_kernels.hyper_connection.hc_pre`."""
    n = x.shape[1]
    mix = _normalised_products(x, fn, norm_eps)
    pre = sigmoid(mix[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2.0 * sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mix[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n))
    return _mixture(pre, x), post, _sinkhorn(comb, hc_eps, iterations)


def hc_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `dsv4_kernels.hyper_connection.hc_post`."""
    out = post.unsqueeze(-1) * y.float().unsqueeze(1)
    for j in range(x.shape[1]):
        out += comb[:, j].unsqueeze(-1) * x[:, j].float().unsqueeze(1)
    return out.to(x.dtype)


def hc_head(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float) -> Tensor:
    """See `dsv4_kernels.hyper_connection.hc_head`."""
    mix = _normalised_products(x, fn, norm_eps)
    return _mixture(sigmoid(mix * scale + base) + hc_eps, x)


def hc_boundary(
    y: Tensor | ExpertRows,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    fp8: bool = False,
) -> tuple[Tensor, ...]:
    """See `dsv4_kernels.hyper_connection.hc_boundary`."""
    streams = hc_post(summed(y), streams, post, comb)
    return streams, *hc_enter(streams, fn, base, scale, norm_weight, norm_eps, hc_eps, iterations, fp8)


def hc_boundary_of_parts(
    part: Tensor | ExpertRows,
    mailboxes: Mailboxes,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    fp8: bool = False,
) -> tuple[Tensor, ...]:
    """See `dsv4_kernels.hyper_connection.hc_boundary_of_parts`."""
    y = all_reduce(summed(part), mailboxes).to(streams.dtype)
    return hc_boundary(y, streams, post, comb, fn, base, scale, norm_weight, norm_eps, hc_eps, iterations, fp8)


def hc_enter(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    fp8: bool = False,
) -> tuple[Tensor, ...]:
    """See `dsv4_kernels.hyper_connection.hc_enter`."""
    row, post, comb = hc_pre(streams, fn, base, scale, norm_eps, hc_eps, iterations)
    x = rms_norm(row, norm_weight, norm_eps)
    return (x, post, comb, *fp8_quantise(x, column_major=True)) if fp8 else (x, post, comb)


def hc_finish(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor]:
    """See `dsv4_kernels.hyper_connection.hc_finish`."""
    streams = hc_post(y, streams, post, comb)
    return streams, rms_norm(hc_head(streams, fn, base, scale, norm_eps, hc_eps), norm_weight, norm_eps)


def _normalised_products(x: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """The products of fn with the flattened, RMS-normalised streams, [T, rows] fp32; the norm is applied to the
    products."""
    x32 = x.float()
    mean_square = tree_sum(x32.square().mean(-1), 1) / x.shape[1]
    return linear_fp32(x32.flatten(1), fn) * torch.rsqrt(mean_square + norm_eps).unsqueeze(1)


def _mixture(pre: Tensor, x: Tensor) -> Tensor:
    """`Σ_n pre[n] * x[n]`, [T, d] in x's dtype."""
    total = pre[:, 0, None] * x[:, 0].float()
    for stream in range(1, x.shape[1]):
        total += pre[:, stream, None] * x[:, stream].float()
    return total.to(x.dtype)


def _sinkhorn(comb: Tensor, eps: float, iterations: int) -> Tensor:
    """comb made doubly stochastic, [T, n, n] fp32: rows by softmax, then rows and columns in turns, a column step
    last."""
    comb = torch.exp(comb - comb.amax(2, keepdim=True))
    comb = comb / comb.sum(2, keepdim=True) + eps
    comb /= comb.sum(1, keepdim=True) + eps
    for _ in range(iterations - 1):
        comb /= comb.sum(2, keepdim=True) + eps
        comb /= comb.sum(1, keepdim=True) + eps
    return comb
