"""Checks that an op's kernels may be launched before the kernel in front of them has ended.

The emulator runs one launch after the other, so two launches never overlap in it. It checks in every launch what makes
overlap harmless: no lane touches memory that another kernel may use before it has waited, and every CTA waits. The
context manager below adds what the emulator cannot see: that the launch asked for an early start, and that ptxas left
the wait in front of the accesses to global memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from unittest import mock

import pytest

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host import compile_cache

ACCESSES = ("LDG", "STG", "LDGSTS", "UTMALDG")
WAIT, NEXT_MAY_BEGIN = "ACQBULK", "PREEXIT"


class UsedKernels(dict):
    """A cache of compiled kernels that remembers the keys that were asked for or added."""

    def __init__(self, kernels: Mapping) -> None:
        super().__init__(kernels)
        self.used: set = set()

    def get(self, key: object, default: object = None) -> object:
        self.used.add(key)
        return super().get(key, default)


@contextlib.contextmanager
def early_flags() -> Iterator[list[bool]]:
    """Yield a list that gets, for each emulated launch inside, whether it may begin early."""
    from ptx_emulator import Device

    seen: list[bool] = []
    launch = Device.launch

    def remembered(self: Device, *arguments: object) -> object:
        seen.append(bool(arguments[-1]))
        return launch(self, *arguments)

    with mock.patch.object(Device, "launch", remembered):
        yield seen


@contextlib.contextmanager
def launched_early(cooperative: bool = False, read_ahead: Mapping[str, Sequence[str]] | None = None) -> Iterator[None]:
    """Check every kernel that is launched inside, in the emulator.

    Args:
        cooperative: the kernels' CTAs wait for each other, so that rule 4 of `dependent_launch` forbids an early start.
        read_ahead: by name of a kernel, opcodes of the reads of constant memory that belong in front of the wait.
    """
    kernels = UsedKernels(compile_cache._in_memory)
    with (
        mock.patch.object(compile_cache, "_in_memory", kernels),
        dependent_launch.switched(True),
        early_flags() as early,
    ):
        yield
    compile_cache._in_memory.update(kernels)  # for the tests that follow
    assert early and early == [not cooperative] * len(early)
    assert kernels.used, "no kernel was asked for: its function is kept elsewhere than in compile_cache"
    for name, (_, waits), arch in kernels.used:
        cubin = kernels[name, (_, waits), arch].__cubin__
        assert_machine_code_waits(cubin, waits, (read_ahead or {}).get(name, ()))


def assert_machine_code_waits(cubin: bytes, waits: bool, ahead: Sequence[str]) -> None:
    """Check the order in machine code: reads of `ahead`, the wait, other accesses; the next kernel may begin after the
    wait.

    Without `waits` the code has neither a wait nor a signal.
    """
    from lib.cubin import opcodes

    found = [opcode for opcode in opcodes(cubin) if opcode in (WAIT, NEXT_MAY_BEGIN, *ACCESSES)]
    if not waits:
        assert not {NEXT_MAY_BEGIN, WAIT} & set(found), found
        return
    assert found.count(NEXT_MAY_BEGIN) == 1 and WAIT in found, found
    assert found[: len(ahead) + 1] == [*ahead, WAIT] and found.index(NEXT_MAY_BEGIN) > len(ahead), found


@contextlib.contextmanager
def a_missing_wait_is_noticed() -> Iterator[None]:
    """Compile kernels that are launched inside without their wait; fail unless the emulator refuses the launch."""
    from ptx_emulator import EmulationError

    with (
        mock.patch.object(compile_cache, "_in_memory", {}),
        mock.patch.object(dependent_launch, "wait", lambda: None),
        dependent_launch.switched(True),
        pytest.raises(EmulationError, match=r"before griddepcontrol\.wait"),
    ):
        yield
