"""PTX for sm_100a and sm_90a on a CPU, with late and random completion of asynchronous work and a happens-before
checker.

    with emulated(schedule="late", seed=3) as device:  # CuTe DSL kernels on CPU torch tensors
        my_op(q, k, v, out)
    print(device.reports[0])

    run_ptx(text, "kernel", grid=1, block=128, args=[x, y, 5])  # PTX on arrays

    program = Program.from_ptx(text)  # the layer below: host addresses and packed parameters
    report = launch(program, "kernel", (1, 1, 1), (128, 1, 1), params=[...], memory=memory_map)

A launch raises EmulationError at the first error of the kernel. MODEL.md (in tests/emulator) lists the modelled
instructions, README.md the blind spots. Importing this package imports neither torch nor the CuTe DSL, and compiles
nothing.
"""

from ptx_emulator.device.device import Device, TensorMapOf
from ptx_emulator.device.recording import Recording, program_of
from ptx_emulator.device.tensor_map import ElementType, Swizzle
from ptx_emulator.dsl.session import emulated, run_ptx
from ptx_emulator.errors import EmulationError, ErrorKind, UnknownInstruction
from ptx_emulator.program import (
    Checks,
    Launch,
    Loaded,
    MemoryMap,
    Options,
    Program,
    launch,
    launch_kernels,
    launch_together,
)
from ptx_emulator.report import B200, H200, Report

__all__ = [
    "B200",
    "H200",
    "Checks",
    "Device",
    "ElementType",
    "EmulationError",
    "ErrorKind",
    "Launch",
    "Loaded",
    "MemoryMap",
    "Options",
    "Program",
    "Recording",
    "Report",
    "Swizzle",
    "TensorMapOf",
    "UnknownInstruction",
    "emulated",
    "launch",
    "launch_kernels",
    "launch_together",
    "program_of",
    "run_ptx",
]
