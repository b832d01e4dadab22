"""How logits are compared with an oracle that may have taken a tied choice differently."""

from model.oracle import OracleRun
from torch import Tensor

TOLERANCE = 1e-4
"""Of logits whose standard deviation is about 1.4; fp32 rounding alone reaches 2e-5 in transformers itself."""

MARGIN = 1e-5
"""A position is compared if its closest top-k or router decision was clearer than this, in the score's std."""


def worst_difference(actual: Tensor, expected: OracleRun) -> float:
    """Largest |logit difference| over the comparable positions of a prefix [n, vocab] of the oracle's sequence."""
    rows = slice(0, len(actual))
    difference = (actual - expected.logits[rows]).abs().amax(-1)
    return difference[expected.margins[rows] > MARGIN].amax().item()


def assert_equal_logits(actual: Tensor, expected: OracleRun, case: str = "") -> None:
    """Fails with the worst comparable position if any is off by more than TOLERANCE (NaN included)."""
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
    """L2 of the difference over L2 of the expected value, per token (or entry)."""
    actual, expected = actual.float().flatten(1), expected.float().flatten(1)
    return (actual - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-9)
