"""The coverage rule: ours use only instruction forms that known-right foreign kernels execute.

A form is an opcode with all its modifiers, and for tcgen05.mma also kind, CTA group, operand
sources and majors, and shape. What the foreign suite executed is in results/foreign_forms.json,
written by foreign/suite.py; there the emulator's semantics were seen to give right results.

    python form_coverage.py RECORDING.npz [--write NAME]

lists the forms of a recorded launch: every instruction of its kernel, executed or not, and the MMA
shapes that it executed.
"""

import argparse
import json
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


def uncovered(forms: set[str], foreign: dict[str, Any]) -> list[str]:
    return sorted(forms - foreign.keys())


def report_of(recording: Recording, foreign: dict[str, Any]) -> dict[str, Any]:
    forms = forms_of(recording)
    return {
        "kernel": recording.kernel,
        "forms": len(forms),
        "uncovered": uncovered(forms, foreign),
        "covered": {form: foreign[form]["first"] for form in sorted(forms & foreign.keys())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--write", help="the kernel's name in results/coverage_NAME.json")
    options = parser.parse_args()
    document = report_of(Recording.load(options.recording), foreign_forms())
    print(f"{document['forms']} forms, {len(document['uncovered'])} of them uncovered:")
    print("\n".join(document["uncovered"]))
    if options.write:
        path = RESULTS / f"coverage_{options.write}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
