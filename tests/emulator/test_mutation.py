"""Deleting a synchronisation instruction of the sample kernels is noticed.

campaigns/mutation.py runs the same on any recorded launch; results/mutation.json holds the summaries.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from ptx_emulator import Checks, Options, Recording
from ptx_emulator.campaigns import summaries
from ptx_emulator.campaigns.mutation import (
    SCHEDULES,
    MutationTest,
    rate,
    reasons_for,
    redundant_of,
    run,
    summary,
    unexplained,
    without,
)
from ptx_emulator.campaigns.wrong_semantics import save_right_kernels

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
    """Every deletion is caught or has a reason in results/mutation_reasons.json, as results/mutation.json says."""
    result = run(case, own_kernels[name], checks=Checks.strict())
    reasons = reasons_for(case)
    assert not unexplained(result, reasons)
    for class_name, counts in result.by_class(reasons).items():
        assert rate(*counts) >= ENOUGH, f"{class_name}: caught, redundant, all are {counts}"
    assert summary(result, reasons)["classes"] == summaries.read("mutation")[case]["classes"]


@pytest.mark.parametrize("case", summaries.read("mutation"))
def test_committed_deletions_that_are_not_caught_have_reasons(case: str) -> None:
    committed, reasons = summaries.read("mutation")[case], reasons_for(case)
    found = dict.fromkeys(committed["classes"], (0, 0))  # redundant, not caught
    for (class_name, text), count in Counter(map(tuple, committed["not caught"])).items():
        redundant, missed = found[class_name]
        found[class_name] = (redundant + redundant_of(text, count, reasons), missed + count)
    for class_name, (caught, redundant, mutants, _) in committed["classes"].items():
        assert found[class_name] == (redundant, mutants - caught), class_name


def test_deleting_keeps_the_line_numbers(own_kernels: dict[str, Recording]) -> None:
    recording = own_kernels["attention"]
    test = MutationTest(recording)
    for site in test.sites():
        mutant = without(recording.ptx, site)
        assert mutant.count("\n") == recording.ptx.count("\n")
        assert mutant != recording.ptx


@pytest.mark.slow
def test_fa4_sparse_mla() -> None:
    """DSV4_FA4_RECORDING names a file that foreign/flash_attention_4.py --recording wrote (arguments: README.md)."""
    path = os.environ.get("DSV4_FA4_RECORDING")
    if not path:
        pytest.skip("DSV4_FA4_RECORDING is not set")
    recording = Recording.load(Path(path))
    report, _ = recording.replay(Options())
    assert report.instructions
    result = run("fa4_sparse_mla", recording, checks=Checks(async_write_fence="error"))
    for name, counts in result.by_class(reasons_for("fa4_sparse_mla")).items():
        assert rate(*counts) >= ENOUGH, f"{name}: caught, redundant, all are {counts}"
