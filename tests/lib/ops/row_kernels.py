"""Row kernels in the emulator with all its checks on; for the tests of several ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from ops.memory_layout import use_in_place
from torch import Tensor

NAN = float("nan")
KERNELS = ("sm90", "sm100")
ARCH = {"sm90": "sm_90a", "sm100": "sm_100a"}
SCHEDULES = ("late", "random")
_empty = torch.empty


def poisoned(*args: object, **kwargs: object) -> Tensor:
    """Return `torch.empty` with 0xFF in every byte: NaN, or -1."""
    made = _empty(*args, **kwargs)
    if made.numel() and made.device.type == "cpu":
        made.view(torch.uint8).fill_(0xFF)
    return made


@contextlib.contextmanager
def emulated_row_kernel(
    name: str, schedule: str = "late", seed: int = 0, in_place: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Run the GPU implementation `name` in the emulator inside. Results are NaN before; warnings fail.

    in_place: tensors that are too large to be copied into the emulator (`memory_layout.sparse`).
    """
    from ptx_emulator import Checks, emulated

    torch.empty = poisoned
    try:
        with emulated(checks=Checks.strict(), arch=ARCH[name], schedule=schedule, seed=seed) as device:
            use_in_place(device, *in_place)
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
