"""Child processes with a time limit: a case, a kernel's tests, and the question whether the GPU still answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dsv4.kernel_check.catalogue import CASE_SECONDS, Kernel

ANSWER_SECONDS = 90.0
LAST_LINES = 15
NO_TESTS = 5  # pytest's exit status
PATHS = ("tests/lib", "tests/emulator", "benchmarks")
"""Folders of a checkout from which tests import."""

DESCRIBE = """
import json, sys, torch
from importlib import metadata
if torch.version.cuda is None:
    sys.exit(f"torch {torch.__version__} is a CPU build; install this package with [gpu] on a host with a GPU")
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} for CUDA {torch.version.cuda} sees no GPU: nvidia-smi shows the driver; "
        "CUDA_VISIBLE_DEVICES may hide a GPU")
d = torch.cuda.current_device()
x = torch.ones(4, device="cuda")
assert float((x + x).sum()) == 8
versions = {}
for name in ("torch", "sglang", "sglang-dsv4", "nvidia-cutlass-dsl", "cuda-bindings", "triton"):
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = None
properties = torch.cuda.get_device_properties(d)
print(json.dumps(dict(name=properties.name, capability=list(torch.cuda.get_device_capability(d)),
    gpus=torch.cuda.device_count(), multiprocessors=properties.multi_processor_count,
    memory_bytes=properties.total_memory, cuda=torch.version.cuda, versions=versions)))
"""


@dataclass(frozen=True)
class Ended:
    """How a child process ended."""

    status: int | None
    """Exit status; negative: the signal; None: it ran out of time."""
    seconds: float
    output: str

    @property
    def how(self) -> str:
        """The end in words."""
        if self.status is None:
            return f"no end within {self.seconds:.0f} s"
        if self.status < 0:
            return f"ended by {signal.Signals(-self.status).name}"
        return f"exit status {self.status}"

    @property
    def last_lines(self) -> str:
        """The end of the output."""
        return "\n".join(self.output.strip().splitlines()[-LAST_LINES:])


@dataclass
class Checked:
    """The findings for one kernel."""

    name: str
    cases: list[dict[str, Any]] = field(default_factory=list)
    """Fields of `emulated_results.Outcome`; a case whose process failed has `case`, `ok` and `said`."""
    tests: dict[str, int] = field(default_factory=dict)
    """passed, failed, skipped."""
    failures: list[str] = field(default_factory=list)
    """Names of failed tests, or the end of a process that left no report."""
    seconds: float = 0.0
    left_out: str = ""
    """Reason why nothing ran."""

    @property
    def ok(self) -> bool | None:
        """Whether all that ran was right; None if nothing ran."""
        if not self.cases and not self.tests.get("passed") and not self.failures:
            return None
        return not self.failures and all(case["ok"] for case in self.cases)


def run(arguments: list[str], checkout: Path, log: Path, limit_seconds: float) -> Ended:
    """Run Python with these arguments in a process group of its own, in the checkout; end the group at the limit.

    Args:
        arguments: after `python`.
        checkout: the folder with `tests`.
        log: file that gets the whole output.
        limit_seconds: after which every process of the group is killed.
    """
    folders = [str(checkout), *(str(checkout / path) for path in PATHS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONFAULTHANDLER": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with log.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = child.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(child)
    return Ended(status, time.monotonic() - begin, log.read_text(errors="replace"))


def end_group(child: subprocess.Popen) -> None:
    """Kill what is left of a child's process group."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def described(checkout: Path, out: Path) -> dict[str, Any]:
    """Name, capability, memory and count of the GPUs, and versions of packages.

    Raises:
        RuntimeError: the GPU doesn't answer, or there is none.
    """
    ended = run(["-c", DESCRIBE], checkout, out / "logs" / "gpu.log", ANSWER_SECONDS)
    if ended.status != 0:
        raise RuntimeError(f"no NVIDIA GPU answers ({ended.how}):\n{ended.last_lines}")
    return json.loads(ended.output.strip().splitlines()[-1])


def check(kernel: Kernel, implementation: str, cases: list[str], checkout: Path, out: Path) -> Checked:
    """The results of a kernel's cases and tests.

    Args:
        kernel: of the catalogue.
        implementation: "sm90" or "sm100".
        cases: those of the kernel that this implementation has.
        checkout: the folder with `tests`.
        out: folder for logs.
    """
    found, begin = Checked(kernel.name), time.monotonic()
    for case in cases:
        arguments = ["-m", "ops.emulated_results", "--case", case, "--kernel", implementation]
        found.cases.append(_outcome(case, run(arguments, checkout, _log(out, case), CASE_SECONDS)))
    if kernel.tests:
        _run_tests(kernel, found, checkout, out)
    found.seconds = round(time.monotonic() - begin, 1)
    return found


def _outcome(case: str, ended: Ended) -> dict[str, Any]:
    if ended.status == 0:
        return json.loads(ended.output.strip().splitlines()[-1])
    return {"case": case, "ok": False, "said": f"{ended.how}: {ended.last_lines}"}


def _run_tests(kernel: Kernel, found: Checked, checkout: Path, out: Path) -> None:
    report = out / "logs" / f"{_file_name(kernel.name)}.xml"
    report.unlink(missing_ok=True)
    files = [f"tests/kernels/{path}" for path in kernel.tests]
    options = ["-m", "gpu", "-q", "--maxfail=10", "-p", "no:cacheprovider", "-p", "ops.poisoned_memory"]
    arguments = ["-m", "pytest", *options, f"--junitxml={report}", *files]
    ended = run(arguments, checkout, _log(out, kernel.name), 60 * kernel.minutes)
    if ended.status in (0, 1) and report.exists():
        found.tests, found.failures = read_report(report)
    elif ended.status != NO_TESTS:
        found.failures = [f"{ended.how}: {ended.last_lines}"]


def read_report(report: Path) -> tuple[dict[str, int], list[str]]:
    """(numbers of passed, failed and skipped tests, names of the failed ones) from pytest's junit file."""
    tests = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [test for test in tests if test.find("failure") is not None or test.find("error") is not None]
    skipped = sum(test.find("skipped") is not None for test in tests)
    numbers = {"passed": len(tests) - len(failed) - skipped, "failed": len(failed), "skipped": skipped}
    return numbers, [f"{test.get('classname')}::{test.get('name')}" for test in failed]


def _log(out: Path, name: str) -> Path:
    return out / "logs" / f"{_file_name(name)}.log"


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
