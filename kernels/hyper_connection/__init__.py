"""Manifold-constrained hyper-connections (DeepSeek-V4 specification, sections 2.2 to 2.4).

A layer's state is n streams of width d. Each sublayer reads a mixture of them (`hc_pre`), and its output is written
back to all while the streams are mixed by a doubly stochastic matrix (`hc_post`). `hc_head` reads the last mixture.
"""

from __future__ import annotations

from torch import Tensor

from dsv4_kernels.registry import select


def hc_pre(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sublayer's input and the coefficients of the write-back.

    ::

        mix  = (x.flatten(1) @ fn.T) * rsqrt(mean(x²) + norm_eps)          # fp32, (2 + n)n numbers
        pre  = sigmoid(mix[:n] * scale[0] + base[:n]) + hc_eps
        post = 2 * sigmoid(mix[n:2n] * scale[1] + base[n:2n])
        C    = softmax((mix[2n:] * scale[2] + base[2n:]).view(n, n), -1) + hc_eps;  C /= C.sum(-2) + hc_eps
        repeat iterations - 1 times:  C /= C.sum(-1) + hc_eps;  C /= C.sum(-2) + hc_eps
        y    = Σ_n pre[n] * x[n]

    Args:
        x: [T, n, d] fp32 or bf16, the streams.
        fn: [(2 + n)n, n * d] fp32; column s * d + c belongs to channel c of stream s.
        base: [(2 + n)n] fp32.
        scale: [3] fp32.
        norm_eps: of the mean square over all n * d channels.
        hc_eps: of the mixture and of Sinkhorn's iteration.
        iterations: of Sinkhorn's iteration (20).
        impl: implementation by name; None lets the registry choose.

    Returns:
        y [T, d] in x's dtype, post [T, n] fp32, comb [T, n, n] fp32.

    Raises:
        ValueError: shapes that do not fit each other, or iterations < 1.
    """
    n = _check_streams("hc_pre", x)
    _check_parameters("hc_pre", x, fn, base, scale, (2 + n) * n, 3)
    if iterations < 1:
        raise ValueError(f"hc_pre: iterations is {iterations}; expected at least 1")
    return select("hc_pre", x.device, x.dtype, impl)(x, fn, base, scale, norm_eps, hc_eps, iterations)


def hc_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor, impl: str | None = None) -> Tensor:
    """`out[k] = post[k] * y + Σ_j comb[j, k] * x[j]`: the sum runs over the FIRST index of comb.

    Args:
        y: [T, d] fp32 or bf16, the sublayer's output.
        x: [T, n, d] in y's dtype, the streams that went into `hc_pre`.
        post: [T, n] fp32.
        comb: [T, n, n] fp32.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, n, d] in x's dtype; the sums are fp32, rounded once.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    n = _check_streams("hc_post", x)
    tokens, _, d = x.shape
    if y.shape != (tokens, d) or post.shape != (tokens, n) or comb.shape != (tokens, n, n):
        raise ValueError(
            f"hc_post: x {tuple(x.shape)} needs y ({tokens}, {d}), post ({tokens}, {n}) and comb ({tokens}, {n}, {n}); "
            f"got {tuple(y.shape)}, {tuple(post.shape)} and {tuple(comb.shape)}"
        )
    return select("hc_post", x.device, x.dtype, impl)(y, x, post, comb)


def hc_head(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, impl: str | None = None
) -> Tensor:
    """The streams' last mixture: `pre` of `hc_pre` alone, `Σ_n pre[n] * x[n]`.

    Args:
        x: [T, n, d] fp32 or bf16.
        fn: [n, n * d] fp32.
        base: [n] fp32.
        scale: [1] fp32.
        norm_eps: of the mean square over all n * d channels.
        hc_eps: added to the sigmoid.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, d] in x's dtype.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    n = _check_streams("hc_head", x)
    _check_parameters("hc_head", x, fn, base, scale, n, 1)
    return select("hc_head", x.device, x.dtype, impl)(x, fn, base, scale, norm_eps, hc_eps)


def _check_streams(name: str, x: Tensor) -> int:
    if x.dim() != 3:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; expected [T, streams, d]")
    return x.shape[1]


def _check_parameters(
    name: str, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rows: int, num_scales: int
) -> None:
    columns = x.shape[1] * x.shape[2]
    if fn.shape != (rows, columns) or base.shape != (rows,) or scale.shape != (num_scales,):
        raise ValueError(
            f"{name}: x {tuple(x.shape)} needs fn ({rows}, {columns}), base ({rows},) and scale ({num_scales},); "
            f"got {tuple(fn.shape)}, {tuple(base.shape)} and {tuple(scale.shape)}"
        )
