"""The command; the package's docstring describes it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sglang_dsv4
import sglang_dsv4.kernel_check as package
from sglang_dsv4.kernel_check import children
from sglang_dsv4.kernel_check.catalogue import KERNELS, KERNELS_OF, Kernel
from sglang_dsv4.kernel_check.children import Checked
from sglang_dsv4.kernel_check.page import page

DIGESTS = "tests/emulator/results/kernel_results.json"
NEEDED = ("tests/kernels/conftest.py", "tests/lib/ops/emulated_results.py", DIGESTS)


def found_checkout(given: Path | None) -> Path:
    """The folder with the tests: the given one, or the one that this package is imported from.

    Raises:
        SystemExit: it has no tests.
    """
    folder = (given or Path(sglang_dsv4.__file__).parents[1]).resolve()
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise SystemExit(
            f"{folder} has no {', '.join(missing)}. The tests are not in the wheel: clone the repository at the "
            "installed version, and run this command there or with --checkout FOLDER"
        )
    return folder


def cases_of(kernel: Kernel, implementation: str, known: dict[str, Any]) -> list[str]:
    """The cases of a kernel that this implementation has: those whose results the emulator has."""
    return [case for case in kernel.cases if case in known[implementation]]


def implementation_for(gpu: dict[str, Any]) -> str:
    """The implementation for a GPU.

    Raises:
        SystemExit: there is none.
    """
    major = gpu["capability"][0]
    if major not in KERNELS_OF:
        raise SystemExit(
            f"{gpu['name']} has compute capability {'.'.join(map(str, gpu['capability']))}; there are kernels for 9.0 "
            "(H100, H200) and 10.x (B200, B300)"
        )
    return KERNELS_OF[major]


def checked(kernels: Sequence[Kernel], gpu: dict[str, Any], checkout: Path, out: Path, command: str) -> list[Checked]:
    """Check the kernels in turn; JSON and page are written after each. Returns what was found."""
    implementation, results = implementation_for(gpu), []
    known = json.loads((checkout / DIGESTS).read_text())
    answers = True
    for kernel in kernels:
        if not answers:
            found = Checked(kernel.name, left_out="the GPU did not answer any more after an earlier failure")
        elif gpu["gpus"] < kernel.least_gpus:
            found = Checked(kernel.name, left_out=f"it needs {kernel.least_gpus} GPUs")
        else:
            print(f"{kernel.name} …", flush=True)
            found = children.check(kernel, implementation, cases_of(kernel, implementation, known), checkout, out)
            if found.ok is None:
                found.left_out = f"none of its tests and cases runs on {implementation}"
            print(f"{kernel.name}: {({True: 'right', False: 'WRONG', None: 'left out'})[found.ok]}", flush=True)
        results.append(found)
        if found.ok is False and answers:
            answers = _answers(checkout, out)
        document = {"gpu": gpu, "implementation": implementation, "command": command}
        rows = [asdict(row) | {"ok": row.ok} for row in results]
        (out / "kernel_check.json").write_text(json.dumps(document | {"kernels": rows}, indent=1) + "\n")
        (out / "kernel_check.md").write_text(page(gpu, implementation, results, command))
    return results


def _answers(checkout: Path, out: Path) -> bool:
    try:
        children.described(checkout, out)
    except RuntimeError as error:
        print(error, flush=True)
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all that ran was right, 1 if a kernel was wrong, 2 if nothing could run."""
    parser = argparse.ArgumentParser(
        "python -m sglang_dsv4.kernel_check",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkout", type=Path, help="folder with the tests; default: where this package is")
    parser.add_argument("--out", type=Path, default=Path("kernel_check"), help="folder for JSON, page and logs")
    parser.add_argument("--only", default="", help="regular expression: the kernels whose names match")
    parser.add_argument("--timeout", type=float, help="minutes for the tests of one kernel")
    parser.add_argument("--list", action="store_true", help="print the kernels and their tests, and end")
    options = parser.parse_args(argv)
    try:
        kernels = [kernel for kernel in KERNELS if re.search(options.only, kernel.name)]
    except re.error as error:
        parser.error(f"--only {options.only!r} is no regular expression: {error}")
    if options.timeout:
        kernels = [Kernel(**asdict(kernel) | {"minutes": options.timeout}) for kernel in kernels]
    if options.list:
        for kernel in kernels:
            print(f"{kernel.name}: {', '.join((*kernel.cases, *kernel.tests))}")
        return 0
    if not kernels:
        raise SystemExit(f"no kernel matches {options.only!r}; the kernels: {', '.join(k.name for k in KERNELS)}")
    checkout, out = found_checkout(options.checkout), options.out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "logs").mkdir(exist_ok=True)
    except OSError as error:
        parser.error(f"{out} can't be written ({error.strerror}); name another folder: --out FOLDER")
    try:
        gpu = children.described(checkout, out)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    command = " ".join(["python -m sglang_dsv4.kernel_check", *(sys.argv[1:] if argv is None else argv)])
    results = checked(kernels, gpu, checkout, out, command)
    print(f"{out / 'kernel_check.md'}\n{out / 'kernel_check.json'}")
    return int(any(found.ok is False for found in results))


if __name__ == "__main__":
    sys.exit(main())
