"""The compressors' benchmark on a CPU, with the definition instead of the kernel: its inputs, floors and contenders."""

from __future__ import annotations

import pytest
import torch
from bench_compressor import Case, Inputs, all_cases, build, number_of_sets, ours, parts, relative_error
from ops.number_formats import same_bits

CPU = torch.device("cpu")
CASES = (Case("", "csa", 6, 2), Case("", "hca", 3, 1), Case("", "csa", 16, None), Case("", "hca", 256, None))


def test_the_cases_are_those_of_a_server() -> None:
    cases = {case.name: case for case in all_cases()}
    assert len(cases) == len(all_cases())
    assert [cases[f"decode-csa-b{batch}-all"].closing for batch in (1, 16, 64, 128)] == [1, 16, 64, 128]
    assert cases["decode-hca-b128-average"].closing == 1 and cases["decode-csa-b64-quarter"].closing == 16
    assert {case.tokens for case in cases.values() if case.closing is None} == {8192}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.tokens}-{case.closing}")
def test_both_contenders_do_the_same(case: Case) -> None:
    """Both contenders leave bitwise equal states and tables, except for the null row, on the second of two sets."""
    results = []
    for make in (lambda sets: ours(sets, "ref"), parts):
        sets = build(case, 2, CPU)
        closed = int((sets[1].groups.sources >= 0).any(1).sum())
        assert closed == (case.closing if case.closing is not None else case.tokens // sets[1].groups.ratio)
        make(sets)[1]()
        results.append(sets[1])
    for a, b in zip(*(inputs.compressions for inputs in results), strict=True):
        rows = torch.arange(1, a.table.num_rows)
        assert same_bits(a.state, b.state) and same_bits(a.table.gather(rows), b.table.gather(rows))
        assert a.table.gather(results[0].groups.slots).any()
    assert relative_error(sets[0], "ref") == 0.0


def moved(case: Case) -> int:
    inputs: Inputs = build(case, 1, CPU)[0]
    return inputs.bytes(case)


def test_what_must_move() -> None:
    """Raw rows of 10 KB (CSA) and 4 KB (HCA) are read and kept; entries have 584 bytes, keys 68."""
    csa, hca, ape = 2 * 4 * 2 * (512 + 128), 2 * 4 * 512, 4 * 2 * 4 * (512 + 128)
    assert moved(CASES[0]) == 2 * 6 * csa + 2 * (584 + 68 + 7 * csa // 2) + ape
    assert moved(CASES[1]) == 2 * 3 * hca + 584 + 127 * hca + 128 * 512 * 4
    assert moved(CASES[2]) == (16 + 4) * csa + 4 * (584 + 68) + ape
    assert moved(CASES[3]) == 256 * hca + 2 * 584 + 128 * 512 * 4
    assert number_of_sets(CASES[3], 1) == 3 and number_of_sets(CASES[1], 1 << 30) == 1024
