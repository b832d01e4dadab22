"""The coverage rule: spellings of a form, and agreement of the committed results with each other."""

import numpy as np
import pytest
from ptx_emulator import Device, Options
from ptx_emulator.campaigns import summaries
from ptx_emulator.campaigns.form_coverage import BY_DEFINITION, canonical, foreign_forms, report_of

PTX = """.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out) {
.reg .b64 %o; .reg .b32 %r<4>; .reg .pred %p;
ld.param.u64 %o, [out]; mov.u32 %r1, %tid.x; setp.eq.u32 %p, %r1, 77; @%p bra E; st.global.f32 [%o], %r1; ret;
E: xor.b32 %r2, %r1, %r1; st.global.u32 [%o], %r2; ret;
}
"""


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("tcgen05.mma.ws.cta_group::1.kind::f16.collector::b0::discard", "tcgen05.mma.ws.cta_group::1.kind::f16", True),
        ("tcgen05.mma.cta_group::1.kind::f16.collector::a::use", "tcgen05.mma.cta_group::1.kind::f16", False),
        ("setp.eq.s32", "setp.eq.b32", True),
        ("setp.gt.s32", "setp.gt.u32", False),
        ("st.shared.v4.f32", "st.shared.v4.b32", True),
        ("ld.global.s32", "ld.global.b32", False),  # into a wider register it extends the sign
    ],
)
def test_spellings(one: str, other: str, same: bool) -> None:
    assert (canonical(one) == canonical(other)) is same


def test_instructions_that_did_not_run_count_too() -> None:
    out = np.zeros(1, np.uint32)
    with Device(Options(), record=True) as device:
        device.run_ptx(PTX, "k", 1, 1, [out])
        recording = device.recordings[0]
    known = ("ld.param.u64", "mov.u32", "setp.eq.b32", "bra", "st.global.b32", "ret")
    foreign = {form: {"cases": 1, "first": "a case"} for form in known}
    document = report_of([recording], foreign)
    assert document["uncovered"] == ["st.global.u32", "xor.b32"]
    assert document["forms"] == len(document["covered"]) + 2


def test_every_form_was_executed_by_a_case_that_passed() -> None:
    results = {row["name"]: row["status"] for row in summaries.read("foreign")}
    assert {results[entry["first"]] for entry in foreign_forms().values()} == {"passed"}


def test_no_form_by_definition_is_executed_by_a_foreign_kernel() -> None:
    assert not BY_DEFINITION.keys() & {canonical(form) for form in foreign_forms()}


@pytest.mark.parametrize("kernel", summaries.read("coverage"))
def test_committed_coverage_follows_from_the_committed_forms(kernel: str) -> None:
    document = summaries.read("coverage")[kernel]
    assert document["uncovered"] == []
    assert set(document["by_definition"]) <= BY_DEFINITION.keys()
    assert document["forms"] == len(document["covered"]) + len(document["by_definition"])
    known = {canonical(form) for form in foreign_forms()}
    assert {canonical(form) for form in document["covered"]} <= known
