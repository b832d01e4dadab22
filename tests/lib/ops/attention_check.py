"""The bound on the error of a sparse attention kernel: expected results in fp64, and the checks of an output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from ops.attention_cases import INF, Case
from torch import Tensor

from dsv4_kernels.kv_layout import SCALE_GROUP


@dataclass(frozen=True)
class Reference:
    """Expected results, [T, H, 512] in fp64."""

    out: Tensor
    bf16_out: Tensor
    """The same computation in bf16 PyTorch: bf16 operands, fp32 sums, weights and output rounded."""
    p_rounding: Tensor
    """Largest error from rounding the weights to bf16: half an ulp of each, 2**-9 * sum of p * |v| over the keys."""
    reads_nothing: Tensor
    """[T] bool: the token has no key."""


def reference(case: Case) -> Reference:
    """Return the results in fp64, and as PyTorch computes them with bf16 operands."""
    results = [_attend(case, token) for token in range(case.q.shape[0])]
    *exact, keys = zip(*results, strict=True)
    return Reference(*(torch.stack(of_tokens).double() for of_tokens in exact), torch.tensor(keys) == 0)


def _keys(case: Case, token: int) -> Tensor:
    """Return the rows [n, 512] that a token reads."""
    parts = []
    for table, rows in ((case.window, case.window_rows), (case.entries, case.read_entries)):
        if table is not None:
            named = rows[token]
            parts.append(table.gather(named[named >= 0]).float())
    return torch.cat(parts)


def _attend(case: Case, token: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return, for one token, the fields of Reference, the last one as the number of keys."""
    keys, q, scale = _keys(case, token), case.q[token], case.scale
    sink = torch.full(q.shape[:1], -INF, device=q.device) if case.sink is None else case.sink
    s = q.double() @ keys.double().T * scale
    total = torch.logaddexp(s.logsumexp(1) if len(keys) else torch.full_like(sink, -INF).double(), sink.double())
    total = torch.where(total == -INF, 0.0, total)  # no key: nothing to weigh
    weight = torch.exp(s - total[:, None])
    out, p_rounding = weight @ keys.double(), 2.0**-9 * (weight @ keys.double().abs())
    s = q.float() @ keys.float().T * scale
    largest = s.amax(1) if len(keys) else torch.zeros_like(sink)
    weight = torch.exp(s - largest[:, None])
    total = weight.sum(1) + torch.exp(sink - largest)
    bf16_out = weight.bfloat16().float() @ keys / torch.where(total == 0, 1.0, total)[:, None]
    return out, bf16_out.bfloat16(), p_rounding, len(keys)


OUT_FLOOR = 2.0**-9
"""Floor relative to the largest value of a token's channel group: half a bf16 ulp."""


def check_surroundings(case: Case, launch: Callable[..., Tensor]) -> None:
    """Check that a result computed into a part of a larger tensor is right, and that the rest of that tensor is
    unchanged.

    Args:
        case: of any size.
        launch: called with the case and `out`, which it must return.
    """
    tokens, heads, dim = case.q.shape
    around = torch.full((tokens + 2, heads + 4, dim + 16), -7.0, dtype=torch.bfloat16, device=case.q.device)
    out = around[1 : tokens + 1, 2 : heads + 2, 8 : dim + 8]
    assert launch(case, out=out) is out
    check(case, out.clone())
    out.fill_(-7.0)
    assert (around == -7.0).all()


def check(case: Case, out: Tensor, expected: Reference | None = None) -> None:
    """Raise AssertionError unless the error of every token is within twice that of bf16 PyTorch, plus a floor.

    The floor is half an ulp of the output and the error that rounding P may cause. The latter is needed because
    PyTorch's error is one sample of that rounding and can be a lucky one: PyTorch takes weights relative to the
    largest, which then is exactly one, while a kernel that walks tiles takes them relative to the largest so far and
    rounds other numbers.

    Errors are compared by channel group (64 channels, all heads), since groups may differ in scale. A token without
    keys must give zero.
    """
    assert out.shape == case.q.shape and out.dtype == torch.bfloat16
    expected = reference(case) if expected is None else expected
    error, plain, largest, p_rounding = (
        x.abs().unflatten(2, (-1, SCALE_GROUP)).amax((1, 3))  # [T, groups]
        for x in (out.double() - expected.out, expected.bf16_out - expected.out, expected.out, expected.p_rounding)
    )
    floor = OUT_FLOOR * largest + p_rounding
    wrong = ~(error <= 2 * plain + floor)  # NaN is wrong
    if wrong.any():
        token, group = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"out of token {token}, channels from {group * SCALE_GROUP}: error {error[token, group]:.3g} > twice bf16 "
            f"PyTorch's {plain[token, group]:.3g} + floor {floor[token, group]:.3g} (largest value "
            f"{largest[token, group]:.3g}); {int(wrong.any(1).sum())} of {len(wrong)} tokens are wrong"
        )
    assert not out[expected.reads_nothing].any(), "out must be zero where a token reads nothing"


def relative_error(out: Tensor, exact: Tensor) -> float:
    """Return |out - exact| / |exact| in the Frobenius norm."""
    return float((out.double() - exact).norm() / exact.norm())
