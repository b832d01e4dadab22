"""The report of a launch: instructions by class and by form, operations, bytes, and a lower bound in cycles by unit."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import TYPE_CHECKING

from ptx_emulator.errors import ErrorKind

if TYPE_CHECKING:
    from ptx_emulator.program import Kernel


@dataclasses.dataclass
class Report:
    """Counts of one launch, its warnings, and lower bounds of its cycles."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    instructions: int  # warp instructions executed
    by_class: dict[str, int]  # warp instructions by class
    by_form: dict[str, int]  # warp instructions by opcode, with the shape where one matters
    executed_lines: dict[int, int]  # ptx line -> warp executions
    blocked_lines: dict[int, int]  # ptx line of a wait -> number of unsuccessful tries
    unexecuted: int  # decoded instructions that were never executed
    mma_flops: float
    sfu_operations: int
    fma_operations: int  # lane operations of the f32 and f16 pipes
    alu_operations: int  # lane operations of the integer pipe; moves and selects are not counted
    bytes: dict[str, int]
    shared_wavefronts: int
    shared_conflicts: int  # wavefronts beyond the conflict-free number
    warnings: list[str]  # "kind at ptx line n, k times: text"
    # Lower bound by unit, all CTAs spread over the SMs of a B200 (sm_90a: an H200). The assembler may fuse or remove
    # instructions, so "fma", "alu" and "issue" are bounds of the PTX as written. "operands" counts shared memory
    # that the tensor core reads, "shared" accesses by threads and copies. "hbm" moves every tensor at most once, with
    # cold caches.
    cycles: dict[str, float]


# Every rate is the highest documented or measured one, so that the cycles are lower bounds.
#
# [1] NVIDIA's B200 datasheet: 2.25 PFLOP/s dense f16, 8 TB/s of HBM; 148 SMs.
# [2] CUTLASS, media/docs/cpp/blackwell_functionality.md: each kind of tcgen05.mma relative to Hopper's tensor core.
# [3] SemiAnalysisAI/microbench-blackwell, umma_throughput/tput_results_max.csv: clocks of tcgen05.mma, from a B200.
#     f16, f8, i8 and f4 reach [2]'s rates to 1 %; M=64 of one CTA takes as long as M=128, M=128 of two CTAs is at the
#     full rate; with A in shared memory and N < 128 the time is that of reading the operands at 128 bytes a clock.
# [4] FlashAttention-4 (Zadouri et al. 2026), roofline: 8192 flops, 16 exponentials, 128 bytes of shared memory a clock
#     and SM, for threads, copies and operands of tcgen05.mma together: the sum of "shared" and "operands" below.
# [5] CUDA C++ Programming Guide, throughput of arithmetic instructions, a clock and SM: 128 f32 add, multiply, fma; 64
#     integer, compare, min/max, logic, shift, convert; 16 special functions. Four schedulers issue one each.
@dataclasses.dataclass(frozen=True)
class Rates:
    """Throughputs of one GPU."""

    sms: int
    hbm_bytes_per_clock: float
    tensor_flops_per_clock: dict[str, int]  # dense, per SM, by kind (tcgen05) or element of A (wgmma)


B200 = Rates(
    sms=148,
    hbm_bytes_per_clock=8.0e12 / (2.25e15 / 148 / 8192),  # [1], which counts at 1.86 GHz
    tensor_flops_per_clock={  # [2, 3]; tf32 by [2] only
        "f16": 8192,
        "tf32": 4096,
        "f8f6f4": 16384,
        "mxf8f6f4": 16384,
        "mxf4": 32768,
        "mxf4nvf4": 32768,
        "i8": 16384,
    },
)
# Datasheet: 0.99 PFLOP/s dense f16 at 132 SMs and 1.83 GHz.
H200 = Rates(
    sms=132,
    hbm_bytes_per_clock=4.8e12 / 1.83e9,
    tensor_flops_per_clock={
        "f16": 4096,
        "bf16": 4096,
        "tf32": 2048,
        "e4m3": 8192,
        "e5m2": 8192,
        "s8": 8192,
        "u8": 8192,
    },
)


def rates_of(target: str) -> Rates:
    """The rates of the GPU for a program's .target."""
    return H200 if target == "sm_90a" else B200


WARP_LANES = 32
SFU_LANES_PER_CLOCK = 16  # [4, 5]
FMA_LANES_PER_CLOCK = 128  # [5]
ALU_LANES_PER_CLOCK = 64  # [5]
INSTRUCTIONS_PER_CLOCK = 4  # [5]
SHARED_BYTES_PER_CLOCK = 128  # [3, 4]
# Not published; bounded by the register file: one register of every lane in each of the four quarters.
TMEM_BYTES_PER_CLOCK = 512
# Into one SM. Not published for B200; microbenchmarks of Volta to Hopper find 64. [3]'s fastest TMA sweep reaches 46.
L2_BYTES_PER_CLOCK = 64

_SFU = re.compile(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.approx|div\.(approx|full)")
# Arithmetic of the f32 and f16 pipes; the rest of the class "alu" runs on the integer pipe.
_FMA = re.compile(r"(add|sub|mul|fma|mad)\.(\w+\.)*(f32|f16|bf16)(x2)?$")
# Registers of a lane that a tcgen05.ld or st of each shape moves for .x1.
_TMEM = re.compile(r"tcgen05\.(?P<op>ld|st)\.sync\.aligned\.(?P<shape>\w+)\.x(?P<n>\d+)")
_TMEM_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
_MMA_SYNC = re.compile(r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\..*\.(f16|bf16|tf32|e4m3|e5m2|s8|u8)\.")
_MMA_SYNC_KIND = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "s8": "i8", "u8": "i8"}  # other elements: f8f6f4
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
    """The instruction class of an opcode, a key of Report.by_class."""
    for name, pattern in _CLASSES:
        if pattern.match(opcode):
            return name
    return "alu"


def _product_cycles(kind: str, m: int, n: int, k: int, rates: Rates) -> float:
    """Clocks of one SM's tensor core for a product at the full rate."""
    return 2.0 * m * n * k / rates.tensor_flops_per_clock[kind]


def _mma_sync_kind(element: str, rates: Rates) -> str:
    return element if element in rates.tensor_flops_per_clock else _MMA_SYNC_KIND.get(element, "f8f6f4")


_MMA_FORM = re.compile(
    r"(?:tcgen05\.mma(?P<ws>\.ws)? kind::|wgmma\.mma_async \w+\.)(?P<kind>\w+)\b"
    r".* m(?P<m>\d+) n(?P<n>\d+) k(?P<k>\d+)"
)


def mma_cycles(form: str, rates: Rates = B200) -> float:
    """Tensor-core clocks of a form of Report.by_form, summed over the participating SMs; 0 for other instructions."""
    found = _MMA_FORM.match(form)
    if not found:
        return 0.0
    half_empty = found["m"] == "64" and "cta_group::1" in form and not found["ws"]  # as slow as M=128
    sizes = (int(found[name]) for name in "mnk")
    return _product_cycles(found["kind"], *sizes, rates) * (2 if half_empty else 1)


def make_report(
    k: Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int],
    counters: list[float],
    counts: list[list[int]],
    warnings: str,
    shapes: str,
    footprint: int,
) -> Report:
    """The report of a launch, from the core's counters. footprint: bytes of global memory that the launch may
    access."""
    rates = rates_of(k.target)
    executions, lanes, blocked = counts
    by_class: Counter[str] = Counter()
    by_form: Counter[str] = Counter()
    executed_lines: Counter[int] = Counter()
    blocked_lines: Counter[int] = Counter()
    sfu = fma = alu = unexecuted = copied = 0
    tmem = Counter({"ld": 0, "st": 0})
    tensor_cycles = 0.0
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
        elif _FMA.match(i.opcode):
            fma += lane_count * (2 if i.opcode.endswith("f32x2") else 1)
        elif kind in ("alu", "convert"):
            alu += lane_count
        elif kind == "cp.async" and i.handler == "cp.async":
            copied += lane_count * i.aux[0]
        elif m := _TMEM.match(i.opcode):
            tmem[m["op"]] += n * WARP_LANES * 4 * int(m["n"]) * _TMEM_REGISTERS[m["shape"]]
        elif m := _MMA_SYNC.match(i.opcode):
            # Its rate is not published; it runs on the same tensor core, so the rate of tcgen05.mma bounds it.
            tensor_cycles += n * _product_cycles(_mma_sync_kind(m[4], rates), *map(int, m.groups()[:3]), rates)
    for line in shapes.splitlines():
        key, value = line.rsplit("\t", 1)
        by_form[key] += int(value)
        tensor_cycles += int(value) * mma_cycles(key, rates)
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
    nbytes = {name: int(counters[1 + j]) for j, name in enumerate(names)} | {"operands_read": int(counters[13])}
    accesses, waves = int(counters[10]), int(counters[11])
    ctas = grid[0] * grid[1] * grid[2]
    sms = min(rates.sms, ctas)
    tma = nbytes["tma_loaded"] + nbytes["tma_stored"]
    traffic = nbytes["global_read"] + nbytes["global_written"] + tma
    cycles = {
        "tensor": tensor_cycles / sms,
        "sfu": sfu / SFU_LANES_PER_CLOCK / sms,
        "fma": fma / FMA_LANES_PER_CLOCK / sms,
        "alu": alu / ALU_LANES_PER_CLOCK / sms,
        "issue": counters[0] / INSTRUCTIONS_PER_CLOCK / sms,
        "shared": (waves + (tma + copied) / SHARED_BYTES_PER_CLOCK) / sms,
        "operands": nbytes["operands_read"] / SHARED_BYTES_PER_CLOCK / sms,
        "tmem": max(tmem.values()) / TMEM_BYTES_PER_CLOCK / sms,
        "l2": traffic / L2_BYTES_PER_CLOCK / sms,
        "hbm": min(traffic, footprint) / rates.hbm_bytes_per_clock,
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
        fma_operations=fma,
        alu_operations=alu,
        bytes=nbytes,
        shared_wavefronts=waves,
        shared_conflicts=max(0, waves - accesses),
        warnings=found,
        cycles=cycles,
    )
