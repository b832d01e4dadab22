"""Errors of the emulator: errors of a kernel, and instructions that the front end does not know."""

from __future__ import annotations

import enum


class ErrorKind(enum.IntEnum):
    """The kind of a kernel's error, in the same order as ErrorKind in core/machine.h."""

    race = 0
    proxy_fence = 1
    uninitialised_smem = 2
    uninitialised_tmem = 3
    out_of_bounds = 4
    tmem_overlap = 5
    divergent_collective = 6
    misaligned_descriptor = 7
    misaligned = 8
    tx_count = 9
    tmem_leak = 10
    deadlock = 11
    illegal_instruction = 12
    mbarrier = 13
    barrier = 14
    exited_cta = 15
    tmem_wait = 16
    trap = 17
    instruction_limit = 18
    internal = 19
    tmem_freed = 20
    tcgen05_fence = 21
    wgmma_fence = 22
    wgmma_wait = 23
    async_write_fence = 24
    mbarrier_init_fence = 25
    global_race = 26
    lane_race = 27
    grid_dependency = 28


class EmulationError(Exception):
    """An error of a kernel: wrong on a GPU, or not guaranteed to execute as intended."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        ptx_line: int,
        source: str | None,
        ptx_text: str | None,
        warp: int,
        cta: tuple[int, int, int],
    ) -> None:
        self.kind = kind
        self.message = message
        self.ptx_line = ptx_line
        self.source = source
        self.ptx_text = ptx_text
        self.warp = warp
        self.cta = cta
        where = f"ptx line {ptx_line}" + (f" ({source})" if source else "") + f", cta {cta}, warp {warp}"
        text = f"\n    {ptx_text}" if ptx_text else ""
        super().__init__(f"{kind.name}: {message}\n  at {where}{text}")


class UnknownInstruction(Exception):
    """An instruction, modifier or directive that is not in the decoder's tables."""

    def __init__(self, text: str, line: int, reason: str = "not in the decoder's tables") -> None:
        self.text = text
        self.line = line
        self.reason = reason
        super().__init__(f"ptx line {line}: {text.strip()}\n  {reason}")
