"""Hand-written PTX for the unit tests: a kernel around a body, run on NumPy arrays."""

from __future__ import annotations

import struct

import numpy as np

from ptx_emulator.program import Checks, MemoryMap, Options, Program, Report, launch

HEADER = """.version 9.0
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
"""


def kernel(body: str, params: int, target: str = "sm_100a") -> str:
    """The PTX of a module with kernel `k`: 64-bit parameters p0.. in %rd100.. on entry, and many registers of each
    type."""
    declared = ", ".join(f".param .b64 p{i}" for i in range(params))
    loads = "\n".join(f"ld.param.b64 %rd{100 + i}, [p{i}];" for i in range(params))
    return f"""{HEADER.format(target=target)}.visible .entry k({declared}) {{
.reg .pred %p<40>; .reg .b16 %h<200>; .reg .b32 %r<400>; .reg .f32 %f<200>; .reg .b64 %rd<200>;
.reg .f64 %d<20>; .reg .b128 %q<8>;
{loads}
mov.u32 %r100, %tid.x; mov.u32 %r101, %laneid; shr.u32 %r102, %r100, 5; mov.b32 %r103, smem;
{body}
ret;
}}
"""


def run(
    body: str,
    *args: np.ndarray | int,
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    smem: int = 65536,
    read_only: tuple[int, ...] = (),
    constant: tuple[int, ...] = (),
    checks: Checks | None = None,
    schedule: str = "eager",
    seed: int = 0,
    target: str = "sm_100a",
    dependent: bool = False,
) -> Report:
    """Runs `body` on arrays (passed by address) and integers, with bounds checked against the arrays; returns the
    report."""
    memory = MemoryMap()
    values = []
    for i, a in enumerate(args):
        if isinstance(a, np.ndarray):
            memory.add(a.ctypes.data, a.nbytes, f"p{i}", writable=i not in read_only, constant=i in constant)
            values.append(struct.pack("<Q", a.ctypes.data))
        else:
            values.append(struct.pack("<Q", a & (1 << 64) - 1))
    program = Program.from_ptx(kernel(body, len(args), target))
    return launch(
        program,
        "k",
        (grid, 1, 1),
        (threads, 1, 1),
        cluster=(cluster, 1, 1),
        dynamic_smem_bytes=smem,
        params=values,
        memory=memory,
        options=Options(schedule=schedule, seed=seed, checks=checks or Checks(), max_instructions=50_000_000),
        dependent=dependent,
    )


def aligned(array: np.ndarray, alignment: int = 128) -> np.ndarray:
    """A copy whose address is a multiple of `alignment`, as TMA requires."""
    raw = np.zeros(array.nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out
