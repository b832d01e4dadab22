"""Row kernels in the emulator with all its checks on; for the tests of several ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from ops.memory_layout import sparse, use_in_place
from torch import Tensor

if TYPE_CHECKING:
    from ptx_emulator import Device

NAN = float("nan")
KERNELS = ("sm90", "sm100")
ARCH = {"sm90": "sm_90a", "sm100": "sm_100a"}
SCHEDULES = ("late", "random")
LARGE_RESULT_BYTES = 1 << 24
"""Results of at least this size are neither filled nor copied."""
_empty = torch.empty


def poisoned(*args: object, **kwargs: object) -> Tensor:
    """Return `torch.empty` with 0xFF in every byte: NaN, or -1."""
    made = _empty(*args, **kwargs)
    if made.numel() and made.device.type == "cpu":
        made.view(torch.uint8).fill_(0xFF)
    return made


def results_of(device: Device) -> Callable[..., Tensor]:
    """Return `poisoned` for small results; a large one is zeros in `sparse` memory, which the device uses in place."""

    def empty(*args: object, **kwargs: object) -> Tensor:
        shape = _empty(*args, **{**kwargs, "device": "meta"})
        if shape.nbytes < LARGE_RESULT_BYTES:
            return poisoned(*args, **kwargs)
        made = sparse(tuple(shape.shape), shape.stride(), shape.dtype)
        device.memory.use_in_place(made)
        return made

    return empty


@contextlib.contextmanager
def emulated_row_kernel(
    name: str,
    schedule: str = "late",
    seed: int = 0,
    in_place: Sequence[Tensor] = (),
    ends: tuple[int, int] | None = None,
    constant: Sequence[Tensor] = (),
) -> Iterator[None]:
    """Run the GPU implementation `name` in the emulator inside. Small results are NaN before; warnings fail.

    Args:
        name: "sm90" or "sm100".
        schedule, seed, ends: options of the emulator (`ptx_emulator.Options`).
        in_place: tensors that are too large to be copied into the emulator (`memory_layout.sparse`).
        constant: tensors that a kernel may read before the launch before it has ended.
    """
    from ptx_emulator import Checks, emulated

    options = {"schedule": schedule, "seed": seed, "ends": ends}
    try:
        with emulated(checks=Checks.strict(), arch=ARCH[name], **options) as device:
            use_in_place(device, *in_place)
            for tensor in constant:
                device.memory.constant(tensor)
            torch.empty = results_of(device)
            yield
    finally:
        torch.empty = _empty
    assert device.reports and not [warning for report in device.reports for warning in report.warnings]


class Shifted(torch.Tensor):
    """A tensor whose address is `shift_bytes` lower than its memory, so that its rows have numbers that need 64-bit
    offsets."""

    shift_bytes = 0

    def data_ptr(self) -> int:
        return super().data_ptr() - self.shift_bytes


def shifted(x: Tensor, shift_bytes: int) -> Tensor:
    """Return x with a lower address: its row i is row `i + shift_bytes / bytes of a row` from there."""
    made = x.as_subclass(Shifted)
    made.shift_bytes = shift_bytes
    return made


def assert_no_spills(functions: dict[str, Callable[[], object]], most_registers: dict[str, int]) -> None:
    """Compile each function, and check that it uses no stack and at most `most_registers` registers a thread."""
    from lib.cubin import resources

    for name, compiled in functions.items():
        found = resources(compiled().__cubin__)
        assert found["stack_bytes"] == 0 and found["registers"] <= most_registers[name], f"{name}: {found}"
