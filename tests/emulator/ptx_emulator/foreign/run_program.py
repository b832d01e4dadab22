"""Runs a third-party CuTe DSL program, unmodified, on the emulator; reports its launches as JSON.

    PYTHONPATH=tests/emulator python -m ptx_emulator.foreign.run_program [--arch sm_90a] [--schedule late] [--seed 3]
        [--report out.json] [--recording out.npz] program.py [arguments]

The program checks its own results; a failed check or an EmulationError fails this script. Only the program's
environment is replaced: its kernels run on the emulator, a benchmark is one run, and the host calls that need a CUDA
driver are answered.
"""

import argparse
import contextlib
import json
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from ptx_emulator import Checks, Device, emulated
from ptx_emulator.dsl.torch_as_cuda import torch_as_cuda


def _benchmark(function: Callable[..., Any], *, kernel_arguments: Any = None, **_: Any) -> float:
    """Runs the kernel once and returns a meaningless time in microseconds.

    For some programs it is the only run; programs that generate workspaces for timing have checked their results
    before.
    """
    if kernel_arguments is not None:
        function(*kernel_arguments.args, **kernel_arguments.kwargs)
    return 1.0


class _NoProfile:
    """Stands in for torch.profiler.profile, which needs a CUDA context."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_NoProfile":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def key_averages(self) -> "_NoProfile":
        return self

    def table(self, *args: Any, **kwargs: Any) -> str:
        return ""


@contextlib.contextmanager
def driver_answers() -> Iterator[None]:
    """Inside, the host calls by which programs look for a device or time a kernel are answered."""
    import cuda.bindings.driver as driver
    import cuda.bindings.runtime as runtime
    import cutlass
    import cutlass.cuda
    import cutlass.cute.testing as cute_testing
    import cutlass.testing
    import torch.profiler

    success = driver.CUresult.CUDA_SUCCESS
    replacements: list[tuple[Any, str, Any]] = [
        (driver, "cuInit", lambda flags: (success,)),
        (driver, "cuDeviceGetCount", lambda: (success, 1)),
        (runtime, "cudaGetDeviceCount", lambda: (runtime.cudaError_t.cudaSuccess, 1)),
        (cute_testing, "benchmark", _benchmark),
        (cutlass.testing, "benchmark", _benchmark),
        (torch.profiler, "profile", _NoProfile),
        (cutlass.cuda, "initialize_cuda_context", lambda *args, **kwargs: None),
    ]
    with contextlib.ExitStack() as stack:
        for target, name, replacement in replacements:
            stack.enter_context(mock.patch.object(target, name, replacement))
        yield


def run_program(
    program: Path, arguments: list[str], arch: str = "sm_100a", pad_vectors: bool = False, **options: Any
) -> Device:
    """Runs the program as `python program.py arguments`; returns the device, with its reports."""
    argv, path = [str(program), *arguments], [str(program.resolve().parent), *sys.path]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", argv))
        stack.enter_context(mock.patch.object(sys, "path", path))
        device = stack.enter_context(emulated(arch=arch, **options))
        stack.enter_context(torch_as_cuda(arch, device.memory.address_of if pad_vectors else None))
        stack.enter_context(driver_answers())
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as exit_request:
            if exit_request.code not in (None, 0):
                raise
    return device


def checks_with_warnings(kinds: str) -> Checks:
    """The usual checks, with these comma-separated kinds as warnings."""
    return Checks(**{kind: "warn" for kind in kinds.split(",") if kind})


def summary(device: Device, seconds: float) -> dict[str, Any]:
    """The result of a run: its time, its launches, and the instruction forms that they executed."""
    return {
        "seconds": round(seconds, 2),
        "launch_cpu_seconds": round(device.launch_cpu_seconds, 3),
        "forms": sorted({form for report in device.reports for form in report.by_form}),
        "launches": [
            {
                "kernel": report.kernel,
                "grid": report.grid,
                "block": report.block,
                "cluster": report.cluster,
                "instructions": report.instructions,
                "warnings": report.warnings,
            }
            for report in device.reports
        ],
    }


def finish(device: Device, start: float, error: float, options: argparse.Namespace) -> None:
    """Ends a runner that computes the error itself: prints it, and writes `options.report` if given.

    Raises:
        SystemExit: the error exceeds `options.max_error`, or is NaN.
    """
    result = summary(device, time.monotonic() - start) | {"relative_error": error}
    print(f"[emulator] {result['seconds']} s, relative error {error:.2e}", flush=True)
    if options.report:
        options.report.write_text(json.dumps(result))
    if not error <= options.max_error:
        raise SystemExit(f"relative error {error:.2e} exceeds {options.max_error:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="sm_100a")
    parser.add_argument("--schedule", default="eager")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--warn", default="", help="error kinds to report as warnings")
    parser.add_argument("--recording", type=Path, help="save the last launch here, for the campaigns")
    parser.add_argument("--pad-vectors", action="store_true", help="append zeros to 1-D tensors")
    parser.add_argument("program", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    start = time.monotonic()
    device = run_program(
        options.program,
        options.arguments,
        arch=options.arch,
        pad_vectors=options.pad_vectors,
        schedule=options.schedule,
        seed=options.seed,
        checks=checks_with_warnings(options.warn),
        record=options.recording is not None,
    )
    if options.recording:
        device.recordings[-1].save(options.recording)
    result = summary(device, time.monotonic() - start)
    print(f"[emulator] {result['seconds']} s, {len(device.reports)} launches", flush=True)
    if options.report:
        options.report.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
