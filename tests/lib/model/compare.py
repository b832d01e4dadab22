"""Comparison of logits with an oracle that may have decided a tied choice differently."""

from model.oracle import OracleRun
from torch import Tensor

TOLERANCE = 1e-4
"""Tolerance of logits with a standard deviation of about 1.4; fp32 rounding alone gives 2e-5 in transformers itself."""

MARGIN = 1e-5
"""A position is compared if its closest top-k or router decision was clearer than this, in the score's std."""


def worst_difference(actual: Tensor, expected: OracleRun) -> float:
    """Return the largest |logit difference| over the comparable positions of a prefix [n, vocab] of the oracle's
    sequence."""
    rows = slice(0, len(actual))
    difference = (actual - expected.logits[rows]).abs().amax(-1)
    return difference[expected.margins[rows] > MARGIN].amax().item()


def assert_equal_logits(actual: Tensor, expected: OracleRun, case: str = "") -> None:
    """Fail with the worst comparable position if any differs by more than TOLERANCE (NaN included)."""
    rows = slice(0, len(actual))
    difference = (actual - expected.logits[rows]).abs().amax(-1)
    comparable = expected.margins[rows] > MARGIN
    bad = comparable & ~(difference <= TOLERANCE)
    if bad.any():
        at = int(difference.masked_fill(~comparable, -1).nan_to_num(float("inf")).argmax())
        raise AssertionError(
            f"{case}: {int(bad.sum())} of {len(actual)} positions differ by more than {TOLERANCE}; "
            f"first {int(bad.nonzero()[0])}, worst {at}: {difference[at]:.3e} (margin {expected.margins[at]:.1e})"
        )


def relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    """Return |actual - expected| / |expected| in L2, per token (or entry)."""
    actual, expected = actual.float().flatten(1), expected.float().flatten(1)
    return (actual - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-9)
