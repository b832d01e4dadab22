"""Blackwell's index scores of a prefill: plan, resources and instruction forms. Results: test_indexer_gpu.py."""

from __future__ import annotations

import json

import pytest
from ops.indexer_cases import PAGE, Case

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.usefixtures("compiled_here")
KERNELS = ("prefill", "many tokens", "few tokens")


def test_blackwell_s_prefill_fits_a_multiprocessor() -> None:
    """Shared and tensor memory, for any number of heads; runs of whole tiles, the fewer the more tokens a call has."""
    from dsv4_kernels.indexer import prefill_tcgen05 as prefill

    for heads in range(8, 65, 8):
        plan = prefill.Plan(heads)
        assert plan.smem_bytes <= 227 * 1024 and plan.tmem_columns <= 512 and heads % plan.chunk == 0
    assert [prefill.pages_a_cta(8192, pages) for pages in (1, 2, 3, 16, 2048)] == [4, 4, 4, 24, 64]
    assert [prefill.pages_a_cta(tokens, 256) for tokens in (1, 13, 100, 1000)] == [4, 4, 4, 44]


@pytest.mark.parametrize("name", ["prefill", *(pytest.param(name, marks=pytest.mark.slow) for name in KERNELS[1:])])
def test_resources_are_the_record_s(name: str) -> None:
    """No stack; and the table of bounds belongs to this kernel."""
    from lib.index_scores_sm100_static import RESULTS, resources_of
    from ptx_emulator import emulated

    recorded = json.loads(RESULTS.read_text())["resources"]
    assert tuple(recorded) == KERNELS
    with emulated():
        found = resources_of(name)
    assert found["stack_bytes"] == 0 and found == recorded[name]


def test_forms_are_those_of_known_right_kernels() -> None:
    """The product of 64 heads is one that released kernels execute."""
    from ptx_emulator import Checks, emulated
    from ptx_emulator.campaigns.form_coverage import foreign_forms, forms_of, uncovered

    from dsv4_kernels.indexer import gpu

    case = Case.of((130,), [(0, 130)])
    of_tokens = case.request, case.visible, 64, case.page_table, True
    with emulated(checks=Checks.strict(), record=True) as device:
        gpu.sm100(case.q, case.head_weights, case.keys, case.page_table, PAGE, *of_tokens)
    missing = set(uncovered(forms_of(device.recordings[0]), foreign_forms()))
    assert not {form for form in missing if "tcgen05" in form}, missing
