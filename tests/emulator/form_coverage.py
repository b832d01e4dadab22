"""The coverage rule: ours use only instruction forms that known-right foreign kernels execute.

A form is an opcode with all its modifiers, and for tcgen05.mma also kind, CTA group, operand
sources and majors, and shape. What the foreign suite executed is in results/foreign_forms.json,
written by foreign/suite.py; there the emulator's semantics were seen to give right results.
Spellings of one and the same operation count as one form (`canonical`). The few forms of ours that no
foreign kernel at hand executes are listed with what their meaning is known from (`BY_DEFINITION`).

    python form_coverage.py RECORDING.npz [RECORDING.npz ...] [--write NAME]

lists the forms of recorded launches: every instruction of their kernels, executed or not, and the
MMA shapes that they executed. It fails if one is uncovered.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from device import Recording, program_of
from emulator import Options

RESULTS = Path(__file__).resolve().parent / "results"


def foreign_forms(path: Path = RESULTS / "foreign_forms.json") -> dict[str, Any]:
    """form -> how many cases executed it, and the first of them."""
    return json.loads(path.read_text())


def forms_of(recording: Recording) -> set[str]:
    kernel = program_of(recording.ptx).kernel(recording.kernel)
    written = {
        f"{instruction.opcode} [{instruction.shape}]" if instruction.shape else instruction.opcode
        for instruction in kernel.instructions
    }
    report, _ = recording.replay(Options())
    return written | set(report.by_form)


# PTX gives these spellings one meaning: the default collector is a or b0, discarded; equality of integers has no sign;
# loads and stores of a float move its bits.
_SAME = (
    (re.compile(r"(tcgen05\.mma.*?)\.collector::(?:a|b0)::discard"), r"\1"),
    (re.compile(r"(setp\.(?:eq|ne))\.[su](16|32|64)$"), r"\1.b\2"),
    (re.compile(r"((?:ld|st)\..*)\.f(32|64)$"), r"\1.b\2"),
)


def canonical(form: str) -> str:
    """One spelling for all that mean the same."""
    for pattern, replacement in _SAME:
        form = pattern.sub(replacement, form)
    return form


BY_DEFINITION = {
    "cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2": "what cvt.rn.f16x2.e4m3x2 converts times the factors that "
    "cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.s2f6x2 takes, rounded once (PTX 9.2); foreign kernels execute both, "
    "and test_convert.py compares every code with every factor",
    **dict.fromkeys(
        ("ld.global.v2.s32", "ld.global.v4.s32"),
        "what foreign kernels execute with .nc, a promise that changes no value; they execute ld.global.s32, "
        "ld.global.v2.b64 and ld.global.v4.b32, too",
    ),
}
"""Form -> why the emulator is trusted with it; hardware has not confirmed these."""


def _split(forms: set[str], foreign: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """(form -> the first foreign case with it, forms that none has and nothing defines)."""
    cases = {canonical(form): entry["first"] for form, entry in foreign.items()}
    covered = {form: cases[canonical(form)] for form in sorted(forms) if canonical(form) in cases}
    return covered, sorted(forms - covered.keys() - BY_DEFINITION.keys())


def uncovered(forms: set[str], foreign: dict[str, Any]) -> list[str]:
    return _split(forms, foreign)[1]


def report_of(recordings: list[Recording], foreign: dict[str, Any]) -> dict[str, Any]:
    forms = set().union(*map(forms_of, recordings))
    covered, missing = _split(forms, foreign)
    kernels = sorted({recording.kernel for recording in recordings})
    defined = {form: reason for form, reason in BY_DEFINITION.items() if form in forms - covered.keys()}
    return {
        "kernels": kernels,
        "forms": len(forms),
        "uncovered": missing,
        "by_definition": defined,
        "covered": covered,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--write", help="the kernel's name in results/coverage_NAME.json")
    options = parser.parse_args()
    document = report_of([Recording.load(path) for path in options.recordings], foreign_forms())
    print(f"{document['forms']} forms, {len(document['uncovered'])} of them uncovered:")
    print("\n".join(document["uncovered"]))
    if options.write:
        path = RESULTS / f"coverage_{options.write}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
    raise SystemExit(bool(document["uncovered"]))


if __name__ == "__main__":
    main()
