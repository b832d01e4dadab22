"""Manifold-constrained hyper-connections (DeepSeek-V4 specification, sections 2.2 to 2.4).

A layer's state is n streams of width d. Each sublayer reads a mixture of them (`hc_pre`); its output is written back to
all streams, while the streams are mixed by a doubly stochastic matrix (`hc_post`). `hc_head` computes the last mixture,
from which the logits are computed.

Between two sublayers lie `hc_post` of the first, `hc_pre` of the second and the RMSNorm of the second's input:
`hc_boundary` is these three; `hc_boundary_of_parts` sums the first's output over the ranks before them. Both also take
the rows of experts (`host.expert_rows`), which they sum first. `hc_enter` is the last two, for a model's first
sublayer, and `hc_finish` follows the last sublayer. A GPU kernel computes each of them in one launch, which reads and
writes the streams once.
`hc_pre`, `hc_post` and `hc_head` by themselves have no GPU kernel, only definitions in PyTorch.

`fn` is a weight: where launches may begin early (`dependent_launch`), the kernels read it while the kernel before still
runs. It must therefore have been written before an earlier ordinary launch or copy in the stream, as is the case after
loading.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.host.expert_rows import ExpertRows
from dsv4_kernels.host.mailboxes import Mailboxes
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
    """A sublayer's input, and the coefficients for writing its output back.

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
        ValueError: shapes that do not match, or iterations < 1.
    """
    n = _check_streams("hc_pre", x)
    _check_parameters("hc_pre", x, fn, base, scale, (2 + n) * n, 3)
    _check_iterations("hc_pre", iterations)
    return select("hc_pre", x.device, x.dtype, impl)(x, fn, base, scale, norm_eps, hc_eps, iterations)


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
    impl: str | None = None,
) -> tuple[Tensor, ...]:
    """The next sublayer's input, from a sublayer's output.

    ::

        streams = hc_post(y, streams, post, comb)
        row, post, comb = hc_pre(streams, fn, base, scale, norm_eps, hc_eps, iterations)
        x = rms_norm(row, norm_weight, norm_eps)
        codes, scales = fp8_quantise(x, 128, column_major=True)             # with fp8

    Args:
        y: [T, d] fp32 or bf16, the output of the sublayer that ends; or the rows of experts whose sum it is (a GPU's
            kernel takes at most 128 tokens then).
        streams: [T, n, d] in y's dtype, the streams that the ended sublayer's `hc_pre` read; they are not overwritten.
        post: [T, n] fp32, of the ended sublayer.
        comb: [T, n, n] fp32, of the ended sublayer.
        fn: [(2 + n)n, n * d] fp32; this and all following arguments belong to the sublayer that begins.
        base: [(2 + n)n] fp32.
        scale: [3] fp32.
        norm_weight: [d], any floating dtype.
        norm_eps: of both norms.
        hc_eps: of the mixture and of Sinkhorn's iteration.
        iterations: of Sinkhorn's iteration (20).
        fp8: whether x is also returned in the form that FP8 products read.
        impl: implementation by name; None lets the registry choose.

    Returns:
        streams [T, n, d] and x [T, d] in y's dtype, post [T, n] fp32, comb [T, n, n] fp32; with
            `fp8` also codes [T, d] float8_e4m3fn and scales [T, ceil(d / 128)] fp32 powers of two, the scales of
            neighbouring tokens contiguous.

    Raises:
        ValueError: shapes that do not match, or iterations < 1.
    """
    n = _check_streams("hc_boundary", streams)
    _check_output("hc_boundary", y, streams, post, comb)
    _check_parameters("hc_boundary", streams, fn, base, scale, (2 + n) * n, 3, norm_weight)
    _check_iterations("hc_boundary", iterations)
    boundary = select("hc_boundary", streams.device, streams.dtype, impl)
    after = (fn, base, scale, norm_weight, norm_eps, hc_eps, iterations, fp8)
    return boundary(y, streams, post, comb, *after)


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
    impl: str | None = None,
) -> tuple[Tensor, ...]:
    """The next sublayer's input, from a sublayer's output of which every rank has a part.

    ::

        y = all_reduce(part, mailboxes).to(streams.dtype)
        hc_boundary(y, streams, ...)

    The bits are those of the two ops. Every rank calls it, and `all_reduce` with the same mailboxes, with the same
    shapes, in the same order, on one stream.

    Args:
        part: [T, d] fp32 or bf16, this rank's, or the rows of experts whose sum it is; a GPU's kernel takes at most
            `choice.most_tokens_of_parts` tokens.
        mailboxes: of the group, on the device of `part`.
        streams, post, comb, fn, base, scale, norm_weight, norm_eps, hc_eps, iterations, fp8: as in
            `hc_boundary`.
        impl: implementation by name; None lets the registry choose.

    Returns:
        what `hc_boundary` returns. NaN where a rank's part did not arrive in time (`Mailboxes.late`).

    Raises:
        ValueError: shapes that do not match, iterations < 1, or more tokens than the kernel takes.
    """
    n = _check_streams("hc_boundary_of_parts", streams)
    _check_output("hc_boundary_of_parts", part, streams, post, comb, (streams.dtype, torch.float32))
    _check_parameters("hc_boundary_of_parts", streams, fn, base, scale, (2 + n) * n, 3, norm_weight)
    _check_iterations("hc_boundary_of_parts", iterations)
    boundary = select("hc_boundary_of_parts", streams.device, streams.dtype, impl)
    after = (fn, base, scale, norm_weight, norm_eps, hc_eps, iterations, fp8)
    return boundary(part, mailboxes, streams, post, comb, *after)


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
    impl: str | None = None,
) -> tuple[Tensor, ...]:
    """The input of a model's first sublayer: `hc_boundary` without `hc_post`, that is `hc_pre` of the streams, then the
    norm.

    Args and Raises: as in `hc_boundary`.

    Returns:
        x [T, d] in the streams' dtype, post [T, n] fp32, comb [T, n, n] fp32; with `fp8` also codes and scales as
            in `hc_boundary`.
    """
    n = _check_streams("hc_enter", streams)
    _check_parameters("hc_enter", streams, fn, base, scale, (2 + n) * n, 3, norm_weight)
    _check_iterations("hc_enter", iterations)
    enter = select("hc_enter", streams.device, streams.dtype, impl)
    return enter(streams, fn, base, scale, norm_weight, norm_eps, hc_eps, iterations, fp8)


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
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The row from which the logits are computed, from the last sublayer's output.

    ::

        streams = hc_post(y, streams, post, comb)
        x = rms_norm(hc_head(streams, fn, base, scale, norm_eps, hc_eps), norm_weight, norm_eps)

    Args:
        y, streams, post, comb, norm_weight: as in `hc_boundary`.
        fn: [n, n * d] fp32.
        base: [n] fp32.
        scale: [1] fp32.
        norm_eps: of both norms.
        hc_eps: added to the sigmoid.
        impl: implementation by name; None lets the registry choose.

    Returns:
        streams [T, n, d], which a speculative draft reads, and x [T, d], in y's dtype.

    Raises:
        ValueError: shapes that do not match.
    """
    n = _check_streams("hc_finish", streams)
    _check_output("hc_finish", y, streams, post, comb)
    _check_parameters("hc_finish", streams, fn, base, scale, n, 1, norm_weight)
    finish = select("hc_finish", streams.device, streams.dtype, impl)
    return finish(y, streams, post, comb, fn, base, scale, norm_weight, norm_eps, hc_eps)


def hc_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor, impl: str | None = None) -> Tensor:
    """`out[k] = post[k] * y + Σ_j comb[j, k] * x[j]`: the sum runs over the FIRST index of comb.

    Args:
        y: [T, d] fp32 or bf16, the sublayer's output.
        x: [T, n, d] in y's dtype, the streams that `hc_pre` read.
        post: [T, n] fp32.
        comb: [T, n, n] fp32.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, n, d] in x's dtype; the sums are fp32, rounded once.

    Raises:
        ValueError: shapes that do not match.
    """
    _check_streams("hc_post", x)
    _check_output("hc_post", y, x, post, comb)
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
        ValueError: shapes that do not match.
    """
    n = _check_streams("hc_head", x)
    _check_parameters("hc_head", x, fn, base, scale, n, 1)
    return select("hc_head", x.device, x.dtype, impl)(x, fn, base, scale, norm_eps, hc_eps)


def _check_streams(name: str, x: Tensor) -> int:
    if x.dim() != 3:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; expected [T, streams, d]")
    return x.shape[1]


def _check_iterations(name: str, iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"{name}: iterations is {iterations}; expected at least 1")


def _check_output(
    name: str,
    y: Tensor | ExpertRows,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    tokens, n, d = streams.shape
    dtypes = dtypes or (streams.dtype,)
    if y.shape != (tokens, d) or post.shape != (tokens, n) or comb.shape != (tokens, n, n) or y.dtype not in dtypes:
        raise ValueError(
            f"{name}: streams {tuple(streams.shape)} {streams.dtype} need y ({tokens}, {d}) "
            f"{' or '.join(map(str, dtypes))}, "
            f"post ({tokens}, {n}) and comb ({tokens}, {n}, {n}); "
            f"got {tuple(y.shape)} {y.dtype}, {tuple(post.shape)} and {tuple(comb.shape)}"
        )


def _check_parameters(
    name: str,
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    rows: int,
    num_scales: int,
    norm_weight: Tensor | None = None,
) -> None:
    columns = x.shape[1] * x.shape[2]
    if fn.shape != (rows, columns) or base.shape != (rows,) or scale.shape != (num_scales,):
        raise ValueError(
            f"{name}: x {tuple(x.shape)} needs fn ({rows}, {columns}), base ({rows},) and scale ({num_scales},); "
            f"got {tuple(fn.shape)}, {tuple(base.shape)} and {tuple(scale.shape)}"
        )
    if norm_weight is not None and norm_weight.shape != x.shape[2:]:
        raise ValueError(
            f"{name}: x {tuple(x.shape)} needs norm_weight ({x.shape[2]},); got {tuple(norm_weight.shape)}"
        )
