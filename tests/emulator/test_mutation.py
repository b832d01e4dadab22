"""Deleting a synchronisation instruction of our own attention kernel is noticed.

The long run, on FlashAttention-4's sparse MLA too, is mutation.py; its results are in results/.
"""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulator import Options
from mutation import RESULTS, MutationTest, run, without
from planted_faults import record

# What is not modelled, or redundant in this kernel: results/mutation_attention.md says why.
UNCHECKED_CLASSES = {"tcgen05.fence"}
ENOUGH = 0.95


def test_every_class_is_caught() -> None:
    recording, error = record()
    assert not error
    result = run("attention", recording)
    reasons = json.loads((RESULTS / "mutation_reasons.json").read_text())["attention"]
    redundant = [o for o in result.missed() if o.site.text in reasons]
    for name, (caught, total) in result.by_class().items():
        if name not in UNCHECKED_CLASSES:
            excused = sum(outcome.site.class_name == name for outcome in redundant)
            assert caught >= ENOUGH * (total - excused), f"{name}: {caught} of {total} caught"


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
    result = run("fa4_sparse_mla", recording)
    assert len(result.missed()) <= (1 - ENOUGH) * len(result.outcomes)
