"""Deleting a synchronisation instruction of our own kernels is noticed.

The long run, on FlashAttention-4's sparse MLA too, is mutation.py; its results are in results/.
"""

import os
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from device import Recording
from emulator import Checks, Options
from mutation import NOT_ANALYSED, SCHEDULES, MutationTest, rate, reason_of, reasons_for, run, without
from wrong_semantics import save_right_kernels

ENOUGH = 0.95


@pytest.fixture(scope="module")
def own_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    folder = tmp_path_factory.mktemp("recordings")
    return {name: Recording.load(folder / f"{name}.npz") for name in save_right_kernels(folder)}


def test_own_kernels_pass_every_check(own_kernels: dict[str, Recording]) -> None:
    for name, recording in own_kernels.items():
        for schedule, seed in SCHEDULES:
            report, memory = recording.replay(Options(schedule=schedule, seed=seed, checks=Checks.strict()))
            assert memory == recording.results, f"{name} under {schedule} {seed}"
            assert not report.warnings


@pytest.mark.parametrize(("case", "name"), [("attention", "attention"), ("gemm_2_cta", "gemm m256 2 CTA k64")])
def test_every_class_is_caught(own_kernels: dict[str, Recording], case: str, name: str) -> None:
    """Whatever is not caught has a reason in results/mutation_reasons.json."""
    result = run(case, own_kernels[name], checks=Checks.strict())
    reasons = reasons_for(case)
    unexplained = [o.site for o in result.missed() if reason_of(o.site, reasons) == NOT_ANALYSED]
    assert not unexplained
    for class_name, counts in result.by_class(reasons).items():
        assert rate(*counts) >= ENOUGH, f"{class_name}: caught, redundant, all are {counts}"


def test_deleting_keeps_the_line_numbers(own_kernels: dict[str, Recording]) -> None:
    recording = own_kernels["attention"]
    test = MutationTest(recording)
    for site in test.sites():
        mutant = without(recording.ptx, site)
        assert mutant.count("\n") == recording.ptx.count("\n")
        assert mutant != recording.ptx


@pytest.mark.slow
def test_fa4_sparse_mla() -> None:
    """DSV4_FA4_RECORDING: written by foreign/flash_attention_4.py --recording (README.md has the arguments)."""
    path = os.environ.get("DSV4_FA4_RECORDING")
    if not path:
        pytest.skip("DSV4_FA4_RECORDING is not set")
    recording = Recording.load(Path(path))
    report, _ = recording.replay(Options())
    assert report.instructions
    result = run("fa4_sparse_mla", recording, checks=Checks(async_write_fence="error"))
    for name, counts in result.by_class(reasons_for("fa4_sparse_mla")).items():
        assert rate(*counts) >= ENOUGH, f"{name}: caught, redundant, all are {counts}"
