"""What a launch did: instructions by class and by form, operations, bytes, and a lower bound in cycles by unit."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import TYPE_CHECKING

from errors import ErrorKind

if TYPE_CHECKING:
    from emulator import Kernel


@dataclasses.dataclass
class Report:
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    instructions: int  # warp instructions executed
    by_class: dict[str, int]  # warp instructions by class
    by_form: dict[str, int]  # warp instructions by opcode, with the shape where one matters
    executed_lines: dict[int, int]  # ptx line -> warp executions
    blocked_lines: dict[int, int]  # ptx line of a wait -> how often it found nothing
    unexecuted: int  # decoded instructions that never ran
    mma_flops: float
    sfu_operations: int
    alu_operations: int
    bytes: dict[str, int]
    shared_wavefronts: int
    shared_conflicts: int  # wavefronts beyond the conflict-free number
    warnings: list[str]  # "kind at ptx line n, k times: text"
    cycles: dict[str, float]  # lower bound by unit, per SM, all CTAs spread over the SMs of a B200 (sm_90a: an H200)


# Lane operations per clock and SM, sm_90 and sm_100 (CUDA C++ Programming Guide, "Arithmetic Instructions", compute
# capabilities 9.0 and 10.0): 128 for f32 and most integer operations, 16 for the special functions.
ALU_LANES_PER_CLOCK = 128
SFU_LANES_PER_CLOCK = 16
SHARED_BYTES_PER_CLOCK = 128
TMEM_READ_BYTES_PER_CLOCK = 512  # 16 B per clock and lane group of a warp, four warps (CUTLASS sm100 TMEM notes)


@dataclasses.dataclass(frozen=True)
class Rates:
    sms: int
    hbm_bytes_per_clock: float
    tensor_flops_per_clock: dict[str, int]  # dense, of one SM, by kind (tcgen05) or element of A (wgmma)


# Datasheet: 2.25 PFLOP/s dense f16 at 148 SMs and 1.85 GHz is 8192 flops per clock and SM; f8 and f6 twice, f4 four
# times, tf32 half of it.
B200 = Rates(
    148,
    8.0e12 / 1.85e9,
    {"f16": 8192, "tf32": 4096, "f8f6f4": 16384, "mxf8f6f4": 16384, "mxf4": 32768, "mxf4nvf4": 32768, "i8": 16384},
)
# Datasheet: 0.99 PFLOP/s dense f16 at 132 SMs and 1.83 GHz.
H200 = Rates(
    132,
    4.8e12 / 1.83e9,
    {"f16": 4096, "bf16": 4096, "tf32": 2048, "e4m3": 8192, "e5m2": 8192, "s8": 8192, "u8": 8192},
)


def rates_of(target: str) -> Rates:
    """Of the GPU that a program's .target stands for."""
    return H200 if target == "sm_90a" else B200


_SFU = re.compile(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.approx")
_CLASSES = (
    ("mma", re.compile(r"tcgen05\.mma|wgmma\.mma|mma\.")),
    ("tmem", re.compile(r"tcgen05\.")),
    ("tma", re.compile(r"cp\.(reduce\.)?async\.bulk")),
    ("mbarrier", re.compile(r"mbarrier\.")),
    ("cp.async", re.compile(r"cp\.async")),
    ("sfu", _SFU),
    ("barrier", re.compile(r"bar\.|barrier\.|fence|membar|wgmma\.")),
    ("warp", re.compile(r"shfl|vote|redux|match|elect|activemask")),
    ("shared", re.compile(r"(ld|st|atom|red)\.(\w+\.)*shared|ldmatrix|stmatrix")),
    ("global", re.compile(r"(ld|st|atom|red)\b")),
    ("control", re.compile(r"bra|brx|ret|exit|call|nanosleep")),
    ("convert", re.compile(r"cvt")),
    ("move", re.compile(r"mov|selp|prmt")),
)


def classify(opcode: str) -> str:
    for name, pattern in _CLASSES:
        if pattern.match(opcode):
            return name
    return "alu"


def make_report(
    k: Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int],
    counters: list[float],
    counts: list[list[int]],
    warnings: str,
    shapes: str,
) -> Report:
    executions, lanes, blocked = counts
    by_class: Counter[str] = Counter()
    by_form: Counter[str] = Counter()
    executed_lines: Counter[int] = Counter()
    blocked_lines: Counter[int] = Counter()
    sfu = alu = unexecuted = 0
    for i, n, lane_count, waits in zip(k.instructions, executions, lanes, blocked, strict=False):
        if waits:
            blocked_lines[i.line] += waits
        if not n:
            unexecuted += 1
            continue
        kind = classify(i.opcode)
        by_class[kind] += n
        by_form[i.opcode + (f" [{i.shape}]" if i.shape else "")] += n
        executed_lines[i.line] += n
        width = 2 if i.opcode.endswith(("f32x2", "f16x2", "bf16x2")) else 1
        if kind == "sfu":
            sfu += lane_count * width
        elif kind in ("alu", "convert", "move"):
            alu += lane_count * (2 if i.opcode.endswith("f32x2") else 1)
    rates = rates_of(k.target)
    tensor_cycles = 0.0
    for line in shapes.splitlines():
        key, value = line.rsplit("\t", 1)
        by_form[key] += int(value)
        m = re.search(r"(?:kind::|mma_async \w+\.)(\w+)\b.* m(\d+) n(\d+) k(\d+)", key)
        if m:
            flops = 2.0 * int(m[2]) * int(m[3]) * int(m[4]) * int(value)
            tensor_cycles += flops / rates.tensor_flops_per_clock[m[1]]
    names = (
        "global_read",
        "global_written",
        "shared_read",
        "shared_written",
        "tmem_read",
        "tmem_written",
        "tma_loaded",
        "tma_stored",
        "dsmem",
    )
    nbytes = {name: int(counters[1 + j]) for j, name in enumerate(names)}
    accesses, waves = int(counters[10]), int(counters[11])
    ctas = grid[0] * grid[1] * grid[2]
    sms = min(rates.sms, ctas)
    hbm = nbytes["global_read"] + nbytes["global_written"] + nbytes["tma_loaded"] + nbytes["tma_stored"]
    cycles = {
        "tensor": tensor_cycles / sms,
        "sfu": sfu / SFU_LANES_PER_CLOCK / sms,
        "alu": alu / ALU_LANES_PER_CLOCK / sms,
        "shared": (waves + (nbytes["tma_loaded"] + nbytes["tma_stored"]) / SHARED_BYTES_PER_CLOCK) / sms,
        "tmem": (nbytes["tmem_read"] + nbytes["tmem_written"]) / TMEM_READ_BYTES_PER_CLOCK / sms,
        "memory": hbm / rates.hbm_bytes_per_clock,
    }
    found = []
    for line in warnings.splitlines():
        kind, at, count, text = line.split("\t", 3)
        found.append(f"{ErrorKind(int(kind)).name} at ptx line {at}, {count} times: {text}")
    return Report(
        kernel=k.name,
        grid=grid,
        block=block,
        cluster=cluster,
        instructions=int(counters[0]),
        by_class=dict(by_class),
        by_form=dict(by_form),
        executed_lines=dict(executed_lines),
        blocked_lines=dict(blocked_lines),
        unexecuted=unexecuted,
        mma_flops=counters[12],
        sfu_operations=sfu,
        alu_operations=alu,
        bytes=nbytes,
        shared_wavefronts=waves,
        shared_conflicts=max(0, waves - accesses),
        warnings=found,
        cycles=cycles,
    )
