"""Runs the foreign suite and writes its log: which passed, at what size, in what time.

    DSV4_FOREIGN_KERNELS=/path python suite.py [--only NAME] [--schedule late --seed 1] [--write]

Each case is a process of its own. --write replaces the committed log by this run's results.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from cases import CASES, Case  # noqa: E402

RESULTS = HERE.parent / "results"
TIMEOUT_SECONDS = 1200
REASON_CHARACTERS = 400


def run_case(case: Case, schedule: str = "eager", seed: int = 0) -> dict[str, Any]:
    """One case in a process of its own: status passed, failed or skipped; sizes, seconds."""
    result: dict[str, Any] = {"name": case.name, "arguments": case.arguments}
    reason = case.unavailable()
    if reason:
        return result | {"status": "skipped", "reason": reason}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        script, *arguments = case.command(report, schedule, seed)
        environment = os.environ | {"PYTHONWARNINGS": "ignore"}
        start = time.monotonic()
        try:
            process = subprocess.run(
                [sys.executable, str(HERE / script), *arguments],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                env=environment,
                cwd=folder,
            )
        except subprocess.TimeoutExpired:
            return result | {"status": "failed", "reason": f"over {TIMEOUT_SECONDS} s"}
        result["wall_seconds"] = round(time.monotonic() - start, 1)
        if process.returncode:
            return result | {"status": "failed", "reason": _last_error(process)}
        return result | {"status": "passed"} | json.loads(report.read_text())


def _last_error(process: "subprocess.CompletedProcess[str]") -> str:
    """The exception's line: the last line that names one, else the output's end."""
    lines = [line for line in (process.stdout + process.stderr).splitlines() if line.strip()]
    errors = [n for n, line in enumerate(lines) if "Error" in line.split(":")[0]]
    text = "\n".join(lines[errors[-1] :] if errors else lines[-5:])
    return text[:REASON_CHARACTERS]


def readable(results: list[dict[str, Any]]) -> str:
    """The log for people, as a Markdown table."""
    passed = sum(result["status"] == "passed" for result in results)
    lines = [
        "# Foreign kernels on the emulator",
        "",
        f"{passed} of {len(results)} passed. Written by foreign/suite.py. A program checks itself;",
        "where a runner of ours does, `error` is relative to float64.",
        "",
        "| case | arguments | result | kernel launches | warp instructions | s | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        launches = result.get("launches", [])
        instructions = sum(launch["instructions"] for launch in launches)
        error = result.get("relative_error")
        cells = [
            result["name"],
            f"`{result['arguments']}`" if result["arguments"] else "",
            result["status"] if result["status"] == "passed" else _one_line(result),
            str(len(launches)) if launches else "",
            f"{instructions:,.0f}" if launches else "",
            str(result.get("wall_seconds", "")),
            f"{error:.1e}" if error is not None else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _one_line(result: dict[str, Any]) -> str:
    return f"{result['status']}: {result['reason'].splitlines()[0]}".replace("|", "/")


def write(results: list[dict[str, Any]]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "foreign.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "foreign.md").write_text(readable(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--schedule", default="eager")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    results = []
    for case in CASES:
        if options.only in case.name:
            results.append(run_case(case, options.schedule, options.seed))
            last = results[-1]
            note = "" if last["status"] == "passed" else last["reason"]
            print(last["status"], last.get("wall_seconds", ""), case.name, note, flush=True)
    if options.write:
        write(results)
    if any(result["status"] == "failed" for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
