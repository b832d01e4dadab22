"""Programs and launches: decode PTX once, launch it on host memory, get a report or an EmulationError.

    program = Program.from_ptx(text)
    report = launch(program, "kernel", (1, 1, 1), (128, 1, 1), params=[struct.pack("<Q", array.ctypes.data)])

Global memory addresses are host addresses. See MODEL.md for the modelled instructions.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

from ptx_emulator.core.build import build_core
from ptx_emulator.errors import EmulationError, ErrorKind, UnknownInstruction
from ptx_emulator.front_end.decoder import Decoder, Instruction
from ptx_emulator.front_end.parser import Module, parse
from ptx_emulator.report import Report, make_report, rates_of

Dims = tuple[int, int, int]
MOST_CTAS = (2**31 - 1, 65_535, 65_535)
"""CTAs of a grid in each dimension (CUDA programming guide, technical specifications)."""
SCHEDULES = {"eager": 0, "random": 1, "late": 2, "random_warps": 3}
OFF, WARN, ERROR = 0, 1, 2
_LEVELS = {"off": OFF, "warn": WARN, "error": ERROR, False: OFF, True: ERROR}


@dataclasses.dataclass(frozen=True)
class Checks:
    """The level of each check: "error", "warn" or "off".

    `order` tracks happens-before, which the race and fence checks and the checks of never-written memory need; without
    it the emulator is about twice as fast.
    """

    order: bool = True
    race: str = "error"
    global_race: str = "error"  # races in global memory, among all CTAs of the launch
    proxy_fence: str = "error"
    uninitialised_smem: str = "error"
    uninitialised_tmem: str = "error"
    out_of_bounds: str = "error"
    tmem_overlap: str = "error"
    divergent_collective: str = "error"
    misaligned_descriptor: str = "error"
    misaligned: str = "error"
    tmem_leak: str = "error"
    barrier: str = "error"
    exited_cta: str = "error"
    # The compiler itself waits for the registers of a tcgen05.ld, and released CUTLASS kernels rely on it.
    tmem_wait: str = "warn"
    # Released kernels free tensor memory that another warp may still read: it harms only the next CTA.
    tmem_freed: str = "warn"
    # Pairs of tcgen05.fence around every barrier that orders tensor memory between warps: PTX requires them, released
    # kernels omit them.
    tcgen05_fence: str = "off"
    # Registers of wgmma.mma_async: accesses by other instructions without a wgmma.fence after them, or before the wait.
    wgmma_fence: str = "error"
    wgmma_wait: str = "error"
    # A proxy fence between a generic access and an asynchronous write of the same memory.
    async_write_fence: str = "off"
    # fence.mbarrier_init (or fence.proxy.async) between mbarrier.init and the first asynchronous arrival.
    mbarrier_init_fence: str = "warn"
    # A lane that builds on, or publishes, accesses of another lane of its warp without a bar.warp.sync between.
    lane_race: str = "off"
    # In a launch with programmatic stream serialization: accesses before griddepcontrol.wait, or a CTA without it.
    grid_dependency: str = "error"

    @classmethod
    def strict(cls) -> Checks:
        """Checks that also demand what PTX requires and released kernels omit; our own kernels must pass them."""
        asked = ("tmem_wait", "tmem_freed", "tcgen05_fence", "async_write_fence", "mbarrier_init_fence", "lane_race")
        return cls(**dict.fromkeys(asked, "error"))


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run a launch.

    Schedules: `eager` performs asynchronous work at issue and runs warps in order; `random` defers it to random times
    and runs warps in random order; `late` defers it as long as any warp can continue without it; `random_warps`
    performs it at issue and runs warps in random order.
    """

    schedule: str = "eager"
    seed: int = 0
    checks: Checks = Checks()
    max_instructions: int = 20_000_000_000
    ends: tuple[int, int] | None = None
    """(first, last): of the clusters of a launch, only so many first and so many last ones run. A grid of millions of
    CTAs then takes no longer than a small one. For kernels whose CTAs do not wait for each other."""


class MemoryMap:
    """The global memory that a launch may access: ranges of host addresses with names."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int, str, bool, bool]] = []

    def add(
        self, address: int, nbytes: int, name: str = "tensor", *, writable: bool = True, constant: bool = False
    ) -> None:
        """Adds a range. constant: no grid that may still run writes it, so kernels may read it before
        `griddepcontrol.wait`."""
        if nbytes:
            self.ranges.append((address, address + nbytes, name, writable, constant))

    def merged(self) -> list[tuple[int, int, str, bool, bool]]:
        """(begin, end, name, writable, constant) of all ranges, sorted; overlapping ones (views of a buffer) are
        merged."""
        out: list[tuple[int, int, str, bool, bool]] = []
        for begin, end, name, writable, constant in sorted(self.ranges):
            if out and begin < out[-1][1]:
                b, e, n, w, c = out[-1]
                names = n if name in n.split(" / ") else f"{n} / {name}"
                out[-1] = (b, max(e, end), names, w or writable, c and constant)
            else:
                out.append((begin, end, name, writable, constant))
        return out


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A kernel, and what all of its launches have in common (`launch_kernels`)."""

    program: Program
    name: str
    cluster: Dims = (1, 1, 1)
    dynamic_smem_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Launch:
    """One of several launches that run side by side (`launch_together`, `launch_kernels`)."""

    grid: Dims
    block: Dims
    params: Sequence[bytes] | bytes
    gpu: int = 0
    dependent: bool = False
    """See `launch`."""
    late: bool = False
    """The GPU starts nothing while any other GPU can do anything but wait."""
    kernel: int = 0
    """Place of its kernel among those of `launch_kernels`."""


class _ProgramArguments(ctypes.Structure):
    _fields_: ClassVar = [
        ("program", ctypes.c_void_p),
        ("dynamic_smem", ctypes.c_uint64),
        ("cluster", ctypes.c_uint32 * 3),
        ("pad", ctypes.c_uint32),
        ("counts", ctypes.c_void_p * 3),
    ]


class _GridArguments(ctypes.Structure):
    _fields_: ClassVar = [
        ("device", ctypes.c_uint32),
        ("dependent", ctypes.c_uint32),
        ("program", ctypes.c_uint32),
        ("size", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("late", ctypes.c_uint32),
        ("params", ctypes.c_void_p),
        ("params_bytes", ctypes.c_uint64),
        ("left_out_from", ctypes.c_uint64),
        ("left_out_to", ctypes.c_uint64),
    ]


class _LaunchArguments(ctypes.Structure):
    _fields_: ClassVar = [
        ("schedule", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("max_instructions", ctypes.c_uint64),
        ("programs", ctypes.POINTER(_ProgramArguments)),
        ("program_count", ctypes.c_uint64),
        ("grids", ctypes.POINTER(_GridArguments)),
        ("grid_count", ctypes.c_uint64),
        ("ranges", ctypes.c_void_p),
        ("range_names", ctypes.c_void_p),
        ("range_count", ctypes.c_uint64),
        ("check_global", ctypes.c_uint32),
        ("track_order", ctypes.c_uint32),
        ("level", ctypes.c_uint8 * 32),
        ("multiprocessors", ctypes.c_uint32),
    ]


class _LaunchResult(ctypes.Structure):
    _fields_: ClassVar = [
        ("failed", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("warp", ctypes.c_int32),
        ("cta", ctypes.c_uint32 * 3),
        ("program", ctypes.c_uint32),
        ("counters", ctypes.c_double * 16),
    ]


@functools.cache
def _core() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build_core()))
    lib.emu_program.restype = ctypes.c_void_p
    lib.emu_program_free.argtypes = [ctypes.c_void_p]
    for name in ("emu_message", "emu_warnings", "emu_shapes"):
        getattr(lib, name).restype = ctypes.c_char_p
    return lib


class Kernel:
    """One decoded `.entry`, loaded into the core."""

    def __init__(self, name: str, decoder: Decoder) -> None:
        self.name = name
        self.function = decoder.function
        self.target = decoder.module.target
        self.param_bytes = decoder.function.param_bytes
        self.instructions: list[Instruction] = decoder.instructions
        self.static_smem_bytes = decoder.static_smem_bytes
        lib = _core()
        n = len(self.instructions)
        for i in self.instructions:
            if i.handler not in ("bra", "brx", "exit") and not lib.emu_has_handler(i.handler.encode()):
                raise UnknownInstruction(i.text, i.line, f"the core has no handler {i.handler!r}")
        names = (ctypes.c_char_p * n)(*[i.handler.encode() for i in self.instructions])
        table: list[int] = []
        operands: list[int] = []
        for i in self.instructions:
            table += [i.guard, i.line, len(i.operands), len(operands), *i.aux]
            operands += i.operands
        constants = bytes(decoder.constants)
        self._handle = lib.emu_program(
            n,
            names,
            (ctypes.c_int64 * len(table))(*table),
            (ctypes.c_uint32 * max(1, len(operands)))(*operands),
            len(operands),
            constants,
            len(constants),
            (ctypes.c_uint32 * max(1, len(decoder.jump_tables)))(*decoder.jump_tables),
            len(decoder.jump_tables),
            decoder.register_bytes + 512,
            decoder.predicates + 1,
            decoder.local_bytes,
            decoder.static_smem_bytes,
        )
        assert self._handle, "the core refused the program"

    @property
    def handle(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            _core().emu_program_free(ctypes.c_void_p(self._handle))


class Program:
    """A PTX module. A kernel is decoded at first use, so that unused kernels may contain unknown instructions."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._kernels: dict[str, Kernel] = {}
        # Module-scope .global and .const variables have host buffers with the lifetime of the program.
        self._globals: dict[str, ctypes.Array] = {}
        self.global_addresses: dict[str, int] = {}
        for v in module.variables.values():
            if v.space in ("global", "const"):
                buffer = ctypes.create_string_buffer(v.data or b"", (v.nbytes or 0) + 64)
                self._globals[v.name] = buffer
                self.global_addresses[v.name] = -(-ctypes.addressof(buffer) // 16) * 16
                if v.data:
                    ctypes.memmove(self.global_addresses[v.name], v.data, len(v.data))

    @classmethod
    def from_ptx(cls, text: str) -> Program:
        return cls(parse(text))

    @property
    def kernels(self) -> list[str]:
        return list(self.module.functions)

    def kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            if name not in self.module.functions:
                raise KeyError(f"no kernel {name!r}; the module has {self.kernels}")
            self._kernels[name] = Kernel(name, Decoder(self.module.functions[name], self.module, self.global_addresses))
        return self._kernels[name]

    def global_ranges(self) -> list[tuple[int, int, str, bool, bool]]:
        found = []
        for name, begin in self.global_addresses.items():
            variable = self.module.variables[name]
            if variable.nbytes:
                found.append((begin, begin + variable.nbytes, name, True, variable.space == "const"))
        return found


def _pack_params(kernel: Kernel, params: Sequence[bytes] | bytes) -> bytes:
    if isinstance(params, bytes | bytearray | memoryview):
        data = bytes(params)
        if len(data) != kernel.param_bytes:
            raise ValueError(f"{kernel.name} takes {kernel.param_bytes} parameter bytes, got {len(data)}")
        return data
    wanted = kernel.function.params
    if len(params) != len(wanted):
        raise ValueError(f"{kernel.name} takes {len(wanted)} parameters, got {len(params)}")
    buffer = bytearray(kernel.param_bytes)
    for p, value in zip(wanted, params, strict=True):
        if len(value) != p.nbytes:
            raise ValueError(f"parameter {p.name} has {p.nbytes} bytes, got {len(value)}")
        buffer[p.offset : p.offset + p.nbytes] = value
    return bytes(buffer)


def launch(
    program: Program,
    kernel: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    *,
    cluster: tuple[int, int, int] = (1, 1, 1),
    dynamic_smem_bytes: int = 0,
    params: Sequence[bytes] | bytes = (),
    memory: MemoryMap | None = None,
    options: Options | None = None,
    dependent: bool = False,
) -> Report:
    """Runs one kernel to its end; returns its report, or raises EmulationError at its first error.

    dependent: launch with programmatic stream serialization, so that the previous grid might still run.
    """
    return launch_together(
        program,
        kernel,
        [Launch(grid, block, params, dependent=dependent)],
        cluster=cluster,
        dynamic_smem_bytes=dynamic_smem_bytes,
        memory=memory,
        options=options,
    )


def launch_together(
    program: Program,
    kernel: str,
    launches: Sequence[Launch],
    *,
    cluster: tuple[int, int, int] = (1, 1, 1),
    dynamic_smem_bytes: int = 0,
    memory: MemoryMap | None = None,
    options: Options | None = None,
) -> Report:
    """Runs launches of one kernel to their ends; returns their common report, or raises EmulationError.

    The launches of a GPU run one after the other, those of different GPUs side by side, on one memory.
    """
    (report,) = launch_kernels([Loaded(program, kernel, cluster, dynamic_smem_bytes)], launches, memory, options)
    return report


def launch_kernels(
    loaded: Sequence[Loaded],
    launches: Sequence[Launch],
    memory: MemoryMap | None = None,
    options: Options | None = None,
) -> list[Report]:
    """Runs launches of several kernels as `launch_together`; returns a report for each kernel.

    Bytes, products and cycles are counted for all kernels together, in the first report.
    """
    options = options or Options()
    kernels = [one.program.kernel(one.name) for one in loaded]
    counts = [[(ctypes.c_uint64 * max(1, len(k.instructions)))() for _ in range(3)] for k in kernels]
    programs = (_ProgramArguments * len(loaded))()
    for p, one, k, count in zip(programs, loaded, kernels, counts, strict=True):
        p.program, p.dynamic_smem, p.cluster[:] = k.handle, one.dynamic_smem_bytes, one.cluster
        p.counts[:] = [ctypes.addressof(c) for c in count]
    buffers = []
    grids = (_GridArguments * len(launches))()
    for g, one in zip(grids, launches, strict=True):
        k, of = kernels[one.kernel], loaded[one.kernel]
        _check_shape(k, one.grid, one.block, of.cluster, of.dynamic_smem_bytes)
        data = _pack_params(k, one.params)
        # Tensor maps among the parameters are read in place and must be 64-byte aligned.
        buffers.append(ctypes.create_string_buffer(len(data) + 256))
        g.params = -(-ctypes.addressof(buffers[-1]) // 128) * 128
        ctypes.memmove(g.params, data, len(data))
        g.device, g.dependent, g.program, g.late = one.gpu, one.dependent, one.kernel, one.late
        g.params_bytes = k.param_bytes
        g.size[:], g.block[:] = one.grid, one.block
        g.left_out_from, g.left_out_to = _left_out(one.grid, of.cluster, options.ends)

    ranges = list(memory.merged() if memory is not None else [])
    for program in {id(one.program): one.program for one in loaded}.values():
        ranges += program.global_ranges()
    flat = [x for begin, end, _, writable, constant in ranges for x in (begin, end, writable + 2 * constant)]
    range_array = (ctypes.c_uint64 * max(1, len(flat)))(*flat)
    name_array = (ctypes.c_char_p * max(1, len(ranges)))(*[r[2].encode() for r in ranges])
    a = _LaunchArguments()
    a.schedule, a.seed, a.max_instructions = SCHEDULES[options.schedule], options.seed, options.max_instructions
    a.programs, a.program_count = programs, len(programs)
    a.grids, a.grid_count = grids, len(launches)
    a.ranges = ctypes.cast(range_array, ctypes.c_void_p)
    a.range_names = ctypes.cast(name_array, ctypes.c_void_p)
    a.range_count, a.check_global = len(ranges), int(memory is not None)
    a.track_order = int(options.checks.order)
    a.multiprocessors = rates_of(kernels[0].target).sms
    for kind in ErrorKind:
        a.level[kind] = _LEVELS[getattr(options.checks, kind.name, "error")]

    result = _LaunchResult()
    lib = _core()
    lib.emu_launch(ctypes.byref(a), ctypes.byref(result))
    if result.failed:
        raise _error(kernels[result.program], result, lib.emu_message().decode(errors="replace"))
    warnings = [line.split("\t", 1) for line in lib.emu_warnings().decode(errors="replace").splitlines()]
    reports = []
    for number, (one, k, count) in enumerate(zip(loaded, kernels, counts, strict=True)):
        own = [launch for launch in launches if launch.kernel == number]
        reports.append(
            make_report(
                k,
                own[0].grid if len(own) == 1 else (sum(math.prod(launch.grid) for launch in own), 1, 1),
                own[0].block,
                one.cluster,
                [0.0 if number else x for x in result.counters],
                [list(c) for c in count],
                "\n".join(text for program, text in warnings if int(program) == number),
                "" if number else lib.emu_shapes().decode(),
                footprint=sum(end - begin for begin, end, *_ in ranges),
            )
        )
    return reports


def _left_out(grid: Dims, cluster: Dims, ends: tuple[int, int] | None) -> tuple[int, int]:
    """Clusters [from, to) of a launch that do not run (`Options.ends`)."""
    clusters = math.prod(grid) // math.prod(cluster)
    first, last = ends or (clusters, 0)
    if first < 0 or last < 0 or not first + last:
        raise ValueError(f"ends are {ends}; expected numbers of first and of last clusters, together at least 1")
    return (first, clusters - last) if first + last < clusters else (clusters, clusters)


def _check_shape(k: Kernel, grid: Iterable[int], block: tuple[int, ...], cluster: tuple[int, ...], smem: int) -> None:
    threads = block[0] * block[1] * block[2]
    if not 0 < threads <= 1024:
        raise ValueError(f"a block of {threads} threads: 1 to 1024 are possible")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ValueError(f"grid {grid} is not a multiple of cluster {cluster}")
    if any(g > most for g, most in zip(grid, MOST_CTAS, strict=True)):
        raise ValueError(f"grid {grid}: a launch has at most {MOST_CTAS} CTAs")
    if cluster[0] * cluster[1] * cluster[2] > 16:
        raise ValueError(f"cluster {cluster}: at most 16 CTAs")
    required = k.function.required_threads
    if required and threads != functools.reduce(lambda x, y: x * y, required):
        raise ValueError(f"{k.name} requires {required} threads, got {block}")
    limit = 227 * 1024
    if k.static_smem_bytes + smem > limit:
        raise ValueError(f"{k.static_smem_bytes} static and {smem} dynamic bytes of shared memory exceed {limit}")


def _error(k: Kernel, result: _LaunchResult, message: str) -> EmulationError:
    at = next((i for i in k.instructions if i.line == result.line), None)
    return EmulationError(
        ErrorKind(result.kind),
        message,
        ptx_line=result.line,
        source=at.source if at else None,
        ptx_text=at.text if at else None,
        warp=result.warp,
        cta=tuple(result.cta),
    )
