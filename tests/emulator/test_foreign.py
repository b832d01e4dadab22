"""Third-party kernels that are known to be right on B200 come out right here, unmodified.

Their sources are found through DSV4_FOREIGN_KERNELS; the last full run's log is
results/foreign.md. The quick cases run in `make test` where the sources are present.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

FOREIGN = Path(__file__).resolve().parent / "foreign"
sys.path.insert(0, str(FOREIGN))

from cases import CASES, Case  # noqa: E402
from suite import run_case  # noqa: E402


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.slow) for case in CASES],
)
def test_foreign_kernel(case: Case) -> None:
    reason = case.unavailable()
    if reason:
        pytest.skip(reason)
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("CuTe DSL is not installed")
    result = run_case(case)
    assert result["status"] == "passed", result.get("reason")
