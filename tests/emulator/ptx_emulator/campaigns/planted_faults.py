"""Faults planted in a right kernel, with the error that the emulator must raise for each.

The kernel is samples/attention.py. A fault is either a changed number of its plan or an edit of its compiled PTX.
`kinds` are the error kinds that may report it, and `says` is a pattern that the message must match: an error that does
not name the cause is not enough.

    PYTHONPATH=tests/emulator python -m ptx_emulator.campaigns.planted_faults

writes results/planted_faults.json: {fault: [kind, message]}.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ptx_emulator import Checks, EmulationError, Options, Program, Recording, emulated
from ptx_emulator.campaigns import summaries

if TYPE_CHECKING:
    from ptx_emulator.samples.attention import Plan

SCHEDULES = [("eager", 0), ("late", 1), ("random", 1), ("random_warps", 1), ("random", 2)]
# A planted fault may make a kernel loop for ever; the right launch executes 22 thousand instructions.
MAX_INSTRUCTIONS = 400_000


@dataclass(frozen=True)
class Fault:
    """A changed plan or a changed PTX, and the error that it must raise."""

    name: str
    kinds: str  # names of error kinds, separated by blanks
    says: str
    plan: dict[str, object] | None = None
    edit: Callable[[str], str] | None = None


@dataclass(frozen=True)
class Caught:
    """How a fault was noticed."""

    kind: str  # the name of the error kind, or "wrong result"
    message: str
    schedule: str


def statement(opcode: str) -> str:
    """A pattern that matches one statement, guard included, whose opcode matches `opcode`."""
    return rf"(?:@!?%\w+ +)?(?<![\w.:]){opcode}[^;]*;"


def delete(opcode: str, nth: int = 0) -> Callable[[str], str]:
    """An edit that deletes the nth statement whose opcode matches."""
    return substitute(statement(opcode), "", nth)


def substitute(pattern: str, replacement: str, nth: int = 0) -> Callable[[str], str]:
    """An edit that replaces the nth match; nth = -1: the last."""

    def edit(ptx: str) -> str:
        matches = list(re.finditer(pattern, ptx))
        assert matches, f"the kernel has no {pattern}"
        match = matches[nth]
        return ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]

    return edit


def never_wait(nth: int) -> Callable[[str], str]:
    """An edit that makes the nth mbarrier wait succeed at once."""
    return substitute(r"mbarrier\.try_wait[\w.:]*\s+(%p\d+)[^;]*;", r"mov.pred \1, -1;", nth)


def under_divergence(opcode: str) -> Callable[[str], str]:
    """An edit that lets only 16 lanes execute the instruction."""
    setup = "{ .reg .pred %fault; .reg .b32 %lane; mov.u32 %lane, %laneid; "
    setup += r"setp.lt.u32 %fault, %lane, 16; @%fault \g<0> }"
    return substitute(statement(opcode), setup)


def record(plan: "Plan | None" = None) -> tuple[Recording, str]:
    """One launch of the attention kernel, and the text of its error, or ""."""
    from ptx_emulator.samples.attention import RIGHT, attention

    torch.manual_seed(0)
    query, key, value = (torch.randn(rows, 64).half() for rows in (128, 320, 320))
    with emulated(record=True, lineinfo=False, max_instructions=MAX_INSTRUCTIONS) as device:
        try:
            attention(query, key, value, plan or RIGHT)
        except EmulationError as error:
            return device.recordings[0], str(error)
        return device.recordings[0], ""


def replay(
    recording: Recording,
    ptx: str,
    right: list[bytes],
    checks: Checks | None = None,
    max_instructions: int = MAX_INSTRUCTIONS,
) -> Caught | None:
    """How the first schedule that shows the fault shows it, or None."""
    program = Program.from_ptx(ptx)
    for schedule, seed in SCHEDULES:
        options = Options(schedule=schedule, seed=seed, checks=checks or Checks(), max_instructions=max_instructions)
        try:
            _, memory = recording.replay(options, program)
        except EmulationError as error:
            return Caught(error.kind.name, str(error), f"{schedule} {seed}")
        if memory != right:
            return Caught("wrong result", "", f"{schedule} {seed}")
    return None


def catch(fault: Fault, right: Recording) -> Caught | None:
    """How the fault is noticed, or None. right: a launch of the kernel without the fault."""
    from ptx_emulator.samples.attention import RIGHT

    if fault.plan is not None:
        recording, _ = record(replace(RIGHT, **fault.plan))
        return replay(recording, recording.ptx, right.results)
    return replay(right, fault.edit(right.ptx), right.results)


def faults() -> list[Fault]:
    """All faults; a function because the kernel's module imports the CuTe DSL."""
    from ptx_emulator.samples.attention import ATOM_BYTES, DIM, RIGHT, TILE_BYTES, TILE_KEYS

    return [
        # ---- errors that take weeks to find
        Fault(
            "P and O overlap in tensor memory",
            "tmem_overlap race",
            r"column",
            plan={"out_column": 80},
        ),
        Fault(
            "P stored in one lane map, read in another",
            "uninitialised_tmem tmem_overlap",
            r"lane",
            plan={"store_shape": "16x64b"},
        ),
        Fault(
            "descriptor stride in elements",
            "misaligned_descriptor uninitialised_smem out_of_bounds",
            r"stride|descriptor|(never|nothing has) written",
            plan={"query_stride_bytes": ATOM_BYTES // 2},
        ),
        Fault(
            "V's descriptor stride in elements",
            "misaligned_descriptor uninitialised_smem out_of_bounds",
            r"stride|descriptor|(never|nothing has) written",
            plan={"value_stride_bytes": ATOM_BYTES // 2},
        ),
        Fault(
            "shared memory allocated in the wrong unit",
            "out_of_bounds mbarrier race",
            r"shared",
            plan={"allocated_smem_elements": RIGHT.allocated_smem_elements // 2},
        ),
        Fault(
            "collective load under divergence",
            "divergent_collective",
            r"lanes",
            edit=under_divergence(r"tcgen05\.ld"),
        ),
        Fault(
            "scores accumulate onto the first tile",
            "uninitialised_tmem",
            r"(never|nothing has) written",
            plan={"accumulate_first_scores": True},
        ),
        Fault(
            "output accumulates onto the first tile",
            "uninitialised_tmem",
            r"(never|nothing has) written",
            plan={"accumulate_first_out": True},
        ),
        Fault(
            "transaction count forgets V",
            "tx_count race",
            r"transaction count|write by a TMA",
            plan={"tile_tx_bytes": TILE_BYTES},
        ),
        Fault(
            "no fence_view_async_tmem_store",
            "race",
            r"tcgen05\.st|tensor memory",
            edit=delete(r"tcgen05\.wait::st"),
        ),
        # ---- counts and phases
        Fault(
            "transaction count too large",
            "deadlock",
            r"bytes|tx",
            plan={"tile_tx_bytes": 2 * TILE_BYTES + 16},
        ),
        Fault("one arrival too many expected", "deadlock", r"wait", plan={"p_ready_arrivals": 129}),
        Fault(
            "half of the arrivals expected",
            "mbarrier race uninitialised_tmem deadlock",
            r"arriv",
            plan={"p_ready_arrivals": 64},
        ),
        Fault("a stage is never freed", "deadlock", r"wait", plan={"empty_arrivals": 2}),
        Fault(
            "wait on the wrong phase",
            "race uninitialised_tmem deadlock",
            r"race|(never|nothing has) written|wait|phase",
            edit=substitute(r"(mbarrier\.try_wait[\w.:]*\s+%p\d+, \[%r\d+\], )(%r\d+)", r"\g<1>1", nth=2),
        ),
        # ---- missing waits, fences, commits
        Fault(
            "load does not wait for the stage to be free",
            "race",
            r"race|TMA|tcgen05",
            edit=never_wait(0),
        ),
        Fault("MMA does not wait for Q", "race uninitialised_smem", r"MMA|mma", edit=never_wait(1)),
        Fault("MMA does not wait for K", "race uninitialised_smem", r"MMA|mma", edit=never_wait(2)),
        Fault("MMA does not wait for P", "race uninitialised_tmem", r"MMA|mma", edit=never_wait(3)),
        Fault(
            "softmax does not wait for S",
            "race uninitialised_tmem",
            r"tcgen05",
            edit=never_wait(4),
        ),
        Fault(
            "epilogue does not wait for O",
            "race uninitialised_tmem",
            r"tcgen05",
            edit=never_wait(5),
        ),
        Fault("no commit after S", "deadlock", r"wait", edit=delete(r"tcgen05\.commit", 0)),
        Fault("no commit of the stage", "deadlock", r"wait", edit=delete(r"tcgen05\.commit", 1)),
        Fault(
            "no proxy fence before the TMA store",
            "proxy_fence",
            r"fence\.proxy\.async",
            edit=delete(r"fence\.proxy\.async"),
        ),
        Fault(
            "no barrier before the TMA store",
            "race proxy_fence uninitialised_smem",
            r"TMA|bulk|async",
            edit=delete(r"barrier\.sync\s+1,"),
        ),
        Fault(
            "barrier expects a warp too many",
            "deadlock barrier",
            r"bar",
            edit=substitute(r"(barrier\.sync\s+1, )128", r"\g<1>160"),
        ),
        Fault(
            "an mbarrier is not initialised",
            "mbarrier uninitialised_smem",
            r"init",
            edit=delete(r"mbarrier\.init", 0),
        ),
        Fault(
            "no barrier after mbarrier.init and tcgen05.alloc",
            "race uninitialised_smem mbarrier out_of_bounds",
            r"init|race|(never|nothing has) written|alloc",
            edit=delete(r"barrier\.sync\s+0"),
        ),
        # ---- tensor memory
        Fault("tensor memory not freed", "tmem_leak", r"dealloc|freed", plan={"free_tmem": False}),
        Fault(
            "too few columns allocated",
            "out_of_bounds",
            r"alloc",
            plan={"tmem_columns": 128},
        ),
        Fault(
            "an allocation of 96 columns",
            "illegal_instruction out_of_bounds",
            r"column",
            edit=substitute(r"(tcgen05\.alloc[\w.:]*\s+\[%r\d+\], )%r\d+", r"\g<1>96"),
        ),
        Fault(
            "P read where it was not written",
            "uninitialised_tmem",
            r"(never|nothing has) written",
            plan={"p_read_column": 96},
        ),
        Fault(
            "a warp reads lanes of another's part",
            "out_of_bounds illegal_instruction uninitialised_tmem",
            r"lane",
            edit=substitute(
                r"(tcgen05\.ld\.sync\.aligned\.32x32b\.x64\.b32[^\[]*)\[(%r\d+)\]([^;]*);",
                r"{ .reg .b32 %w; add.s32 %w, \g<2>, 0x200000; \g<1>[%w]\g<3>; }",
            ),
        ),
        # ---- shared memory
        Fault(
            "stages overlap",
            "race",
            r"race|TMA|tcgen05",
            plan={"stage_elements": TILE_KEYS * DIM // 2},
        ),
        Fault(
            "every lane of the warp issues the MMA",
            "mbarrier race deadlock",
            r"arriv|race",
            edit=substitute(r"elect\.sync\s+%r\d+\|(%p\d+)[^;]*;", r"mov.pred \1, -1;", nth=2),
        ),
    ]


def main() -> None:
    right, error = record()
    assert not error, error
    document = {}
    for fault in faults():
        caught = catch(fault, right)
        assert caught is not None, f"not caught: {fault.name}"
        document[fault.name] = [caught.kind, caught.message.partition("\n    ")[0]]
    summaries.write("planted_faults", document)


if __name__ == "__main__":
    main()
