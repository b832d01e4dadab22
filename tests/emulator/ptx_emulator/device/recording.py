"""Recordings: all that one launch depends on, to save, load and replay."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ptx_emulator.device.memory import DeviceMemory
from ptx_emulator.program import MemoryMap, Options, Program, Report, launch

Dim3 = tuple[int, int, int]

_programs: dict[str, Program] = {}


def program_of(ptx: str) -> Program:
    """The program of a PTX text, cached, since decoding takes longer than many launches."""
    key = hashlib.sha256(ptx.encode()).hexdigest()
    if key not in _programs:
        _programs[key] = Program.from_ptx(ptx)
    return _programs[key]


def parameter_bytes(ptx: str, kernel: str) -> list[int]:
    """The sizes of a kernel's parameters."""
    return [parameter.nbytes for parameter in program_of(ptx).kernel(kernel).function.params]


@dataclass(frozen=True)
class Recording:
    """The inputs of one launch, and the memory before and after it.

    Addresses are in the arena, so they are valid in any process.
    """

    ptx: str
    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem_bytes: int
    params: list[bytes]
    memory: list[tuple[int, str, bytes]]  # (address, name, bytes) before the launch
    results: list[bytes] = field(default_factory=list)  # the same ranges after it

    def save(self, path: Path) -> None:
        lengths = [len(contents) for _, _, contents in self.memory]
        np.savez_compressed(
            path,
            ptx=np.frombuffer(self.ptx.encode(), np.uint8),
            kernel=self.kernel,
            dims=np.array([self.grid, self.block, self.cluster]),
            dynamic_smem_bytes=self.dynamic_smem_bytes,
            params=np.frombuffer(b"".join(self.params), np.uint8),
            param_bytes=np.array([len(p) for p in self.params], np.int64),
            addresses=np.array([address for address, _, _ in self.memory], np.int64),
            names=np.array([name for _, name, _ in self.memory]),
            lengths=np.array(lengths, np.int64),
            before=np.frombuffer(b"".join(c for _, _, c in self.memory), np.uint8),
            after=np.frombuffer(b"".join(self.results), np.uint8),
        )

    @staticmethod
    def load(path: Path) -> "Recording":
        with np.load(path) as file:
            f = {key: file[key] for key in file.files}

        def split(joined: np.ndarray, lengths: np.ndarray) -> list[bytes]:
            return [p.tobytes() for p in np.split(joined, np.cumsum(lengths)[:-1])]

        grid, block, cluster = (tuple(int(n) for n in row) for row in f["dims"])
        before = split(f["before"], f["lengths"])
        places = zip(f["addresses"].tolist(), f["names"].tolist(), before, strict=True)
        return Recording(
            ptx=f["ptx"].tobytes().decode(),
            kernel=str(f["kernel"]),
            grid=grid,
            block=block,
            cluster=cluster,
            dynamic_smem_bytes=int(f["dynamic_smem_bytes"]),
            params=split(f["params"], f["param_bytes"]),
            memory=[(address, name, contents) for address, name, contents in places],
            results=split(f["after"], f["lengths"]),
        )

    def replay(self, options: Options, ptx: str | Program | None = None) -> tuple[Report, list[bytes]]:
        """Launches again, with changed PTX if given; returns the report and the memory after the launch."""
        program = Program.from_ptx(ptx) if isinstance(ptx, str) else ptx or program_of(self.ptx)
        with DeviceMemory() as memory:
            for address, name, contents in self.memory:
                memory.place_at(address, contents, name)
            report = launch(
                program,
                self.kernel,
                self.grid,
                self.block,
                cluster=self.cluster,
                dynamic_smem_bytes=self.dynamic_smem_bytes,
                params=self.params,
                memory=memory_map_of(memory),
                options=options,
            )
            return report, [memory.read(address, len(c)) for address, _, c in self.memory]


def memory_map_of(memory: DeviceMemory) -> MemoryMap:
    """The ranges that a launch on this memory may access."""
    memory_map = MemoryMap()
    for extent in memory.extents():
        memory_map.add(extent.address, extent.nbytes, extent.name, constant=extent.constant)
    return memory_map
