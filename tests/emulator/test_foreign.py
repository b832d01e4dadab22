"""Third-party kernels that are known to be right on B200 or H200 come out right here, unmodified.

DSV4_FOREIGN_KERNELS names the folder of their sources. The quick cases run in `make test` where the sources are
present; results/foreign.json is the summary of the last full run.
"""

import importlib.util

import pytest
from ptx_emulator.campaigns import summaries
from ptx_emulator.foreign.case import Case
from ptx_emulator.foreign.cases import CASES
from ptx_emulator.foreign.suite import run_case


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


def test_every_case_has_a_committed_row_of_the_same_arguments() -> None:
    rows = {row["name"]: row for row in summaries.read("foreign")}
    assert [*rows] == [case.name for case in CASES]
    assert all(rows[case.name]["arguments"] == case.arguments for case in CASES)


def test_findings_are_of_the_kinds_that_the_cases_forgive() -> None:
    forgiven = {case.name: case.forgiven for case in CASES}
    findings = {row["name"]: row["finding"].split(": ")[1] for row in summaries.read("foreign") if "finding" in row}
    assert findings
    assert all(kind in forgiven[name] for name, kind in findings.items())
