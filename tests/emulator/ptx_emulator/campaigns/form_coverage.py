"""The coverage rule: our kernels use only instruction forms that known-right foreign kernels execute.

A form is an opcode with all its modifiers, and for tcgen05.mma also kind, CTA group, operand sources and majors, and
shape. results/foreign_forms.json holds the forms that the foreign suite executed; for these the emulator's semantics
gave right results. Spellings of the same operation count as one form (`canonical`). The few forms of ours that no
foreign kernel at hand executes are listed in `BY_DEFINITION` with the source of their meaning.

    PYTHONPATH=tests/emulator python -m ptx_emulator.campaigns.form_coverage RECORDING.npz [RECORDING.npz ...]
        [--write NAME]

lists the forms of recorded launches: every instruction of their kernels, executed or not, and the MMA shapes that they
executed. It fails if one is uncovered. --write replaces the entry NAME of results/coverage.json.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from ptx_emulator import Options, Recording, program_of
from ptx_emulator.campaigns import summaries


def foreign_forms() -> dict[str, dict[str, Any]]:
    """form -> {"cases": number of foreign cases that executed it, "first": the first of them}."""
    return {
        form: {"cases": cases, "first": first}
        for first, forms in summaries.read("foreign_forms").items()
        for form, cases in forms.items()
    }


def forms_of(recording: Recording) -> set[str]:
    """The forms of a recorded launch: all that its kernel contains, and the MMA shapes that it executed."""
    kernel = program_of(recording.ptx).kernel(recording.kernel)
    written = {
        f"{instruction.opcode} [{instruction.shape}]" if instruction.shape else instruction.opcode
        for instruction in kernel.instructions
    }
    report, _ = recording.replay(Options())
    return written | set(report.by_form)


# PTX gives these spellings one meaning: the default collector is a or b0, discarded; equality of integers ignores the
# sign; loads and stores of a float move its bits.
_SAME = (
    (re.compile(r"(tcgen05\.mma.*?)\.collector::(?:a|b0)::discard"), r"\1"),
    (re.compile(r"(setp\.(?:eq|ne))\.[su](16|32|64)$"), r"\1.b\2"),
    (re.compile(r"((?:ld|st)\..*)\.f(32|64)$"), r"\1.b\2"),
)


def canonical(form: str) -> str:
    """One spelling for all forms with the same meaning."""
    for pattern, replacement in _SAME:
        form = pattern.sub(replacement, form)
    return form


BY_DEFINITION = {
    "cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2": "the values of cvt.rn.f16x2.e4m3x2 times the factors of "
    "cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.s2f6x2, rounded once (PTX 9.2); foreign kernels execute both, and "
    "test_convert.py compares every code with every factor",
    **dict.fromkeys(
        ("ld.global.v2.s32", "ld.global.v4.s32"),
        "foreign kernels execute these with .nc, a promise that changes no value; they also execute ld.global.s32, "
        "ld.global.v2.b64 and ld.global.v4.b32",
    ),
}
"""Form -> why the emulator's semantics of it are trusted; hardware has not confirmed these."""


def _split(forms: set[str], foreign: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """(form -> the first foreign case with it, forms with neither a foreign case nor a definition)."""
    cases = {canonical(form): entry["first"] for form, entry in foreign.items()}
    covered = {form: cases[canonical(form)] for form in sorted(forms) if canonical(form) in cases}
    return covered, sorted(forms - covered.keys() - BY_DEFINITION.keys())


def uncovered(forms: set[str], foreign: dict[str, Any]) -> list[str]:
    """The forms that no foreign kernel executes and `BY_DEFINITION` does not list."""
    return _split(forms, foreign)[1]


def report_of(recordings: list[Recording], foreign: dict[str, Any]) -> dict[str, Any]:
    """The entry of results/coverage.json: the forms of these launches by how they are covered."""
    forms = set().union(*map(forms_of, recordings))
    covered, missing = _split(forms, foreign)
    return {
        "forms": len(forms),
        "uncovered": missing,
        "by_definition": sorted(forms & BY_DEFINITION.keys() - covered.keys()),
        "covered": sorted(covered),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--write", help="the kernel's name in results/coverage.json")
    options = parser.parse_args()
    document = report_of([Recording.load(path) for path in options.recordings], foreign_forms())
    print(f"{document['forms']} forms, {len(document['uncovered'])} of them uncovered:")
    print("\n".join(document["uncovered"]))
    if options.write:
        summaries.update("coverage", {options.write: document})
    raise SystemExit(bool(document["uncovered"]))


if __name__ == "__main__":
    main()
