"""Runs CuTe DSL kernels, or PTX, on CPU tensors.

Both entry points take the emulator's options by name. A kernel's error is raised as EmulationError from the call that
launched it.
"""

import contextlib
from collections.abc import Iterator, Sequence

from ptx_emulator.device.device import Argument, Device
from ptx_emulator.dsl.attachment import attached
from ptx_emulator.program import Options, Report


@contextlib.contextmanager
def emulated(
    *,
    record: bool = False,
    arch: str = "sm_100a",
    multiprocessors: int = 148,
    lineinfo: bool = True,
    **options: object,
) -> Iterator[Device]:
    """Runs CuTe DSL kernels that are launched inside on the emulator; yields the device, with its reports.

    multiprocessors: the number that host code is told; fewer give each CTA of a persistent kernel more tiles.
    record: keep every launch in `recordings`, to replay it without the DSL.
    """
    with Device(Options(**options), record=record) as device:
        with attached(device, arch=arch, multiprocessors=multiprocessors, lineinfo=lineinfo):
            yield device


def run_ptx(
    text: str,
    kernel: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Argument],
    *,
    cluster: int | Sequence[int] = 1,
    dynamic_smem_bytes: int = 0,
    **options: object,
) -> Report:
    """Runs one kernel of a PTX text on arrays, which it reads and writes in place; returns the report."""
    with Device(Options(**options)) as device:
        return device.run_ptx(text, kernel, grid, block, args, cluster=cluster, dynamic_smem_bytes=dynamic_smem_bytes)
