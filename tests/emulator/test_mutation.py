"""Deleting a synchronisation instruction of our own attention kernel is noticed.

The long run, on FlashAttention-4's sparse MLA too, is mutation.py; its results are in results/.
"""

import os
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulator import Checks, Options
from mutation import NOT_ANALYSED, MutationTest, rate, reason_of, reasons_for, run, without
from planted_faults import record

ENOUGH = 0.95


def test_every_class_is_caught() -> None:
    """Whatever is not caught has a reason in results/mutation_reasons.json."""
    recording, error = record()
    assert not error
    result = run("attention", recording, checks=Checks.strict())
    reasons = reasons_for("attention")
    unexplained = [o.site for o in result.missed() if reason_of(o.site, reasons) == NOT_ANALYSED]
    assert not unexplained
    for name, counts in result.by_class(reasons).items():
        assert rate(*counts) >= ENOUGH, f"{name}: caught, redundant, all are {counts}"


def test_deleting_keeps_the_line_numbers() -> None:
    recording, _ = record()
    test = MutationTest(recording)
    for site in test.sites():
        mutant = without(recording.ptx, site)
        assert mutant.count("\n") == recording.ptx.count("\n")
        assert mutant != recording.ptx


@pytest.mark.slow
def test_fa4_sparse_mla() -> None:
    """DSV4_FA4_RECORDING: written by foreign/flash_attention_4.py --recording."""
    path = os.environ.get("DSV4_FA4_RECORDING")
    if not path:
        pytest.skip("DSV4_FA4_RECORDING is not set")
    from device import Recording

    recording = Recording.load(Path(path))
    report, _ = recording.replay(Options())
    assert report.instructions
    result = run("fa4_sparse_mla", recording, checks=Checks(async_write_fence="error"))
    for name, counts in result.by_class(reasons_for("fa4_sparse_mla")).items():
        assert rate(*counts) >= ENOUGH, f"{name}: caught, redundant, all are {counts}"
