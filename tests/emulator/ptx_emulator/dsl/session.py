"""The emulator's public face: run CuTe DSL kernels, or PTX, on CPU tensors.

    with emulated(schedule="late", seed=3) as session:
        my_op(q, k, v, out)            # CuTe DSL kernels launched on CPU torch tensors
    print(session.reports[0])

    run_ptx(text, "kernel", grid=1, block=128, args=[x, y, 5])

Both take the emulator's options by name. Errors of a kernel are raised as EmulationError from the
call that launched it.
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
    """CuTe DSL kernels launched inside run on the emulator; yields the device, with its reports.

    multiprocessors: what persistent kernels are told; fewer make each CTA take more tiles.
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
    """Runs one kernel of a PTX text; arrays among the arguments are read and written in place."""
    with Device(Options(**options)) as device:
        return device.run_ptx(text, kernel, grid, block, args, cluster=cluster, dynamic_smem_bytes=dynamic_smem_bytes)
