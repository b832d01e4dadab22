"""An emulated device: its memory, its launches, and their reports and recordings."""

import contextlib
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.device.memory import DeviceMemory, Extent
from ptx_emulator.device.recording import Dim3, Recording, memory_map_of, parameter_bytes, program_of
from ptx_emulator.device.tensor_map import ElementType, Swizzle, encode
from ptx_emulator.program import Launch, Loaded, Options, Report, launch, launch_kernels

if TYPE_CHECKING:
    import torch

    Array = np.ndarray | torch.Tensor


@dataclass(frozen=True)
class TensorMapOf:
    """A tensor map over an array, encoded when the array's device address is known."""

    array: "Array"
    box: tuple[int, ...]  # elements, innermost first
    element_type: ElementType
    swizzle: Swizzle = Swizzle.NONE
    sizes: tuple[int, ...] | None = None  # innermost first; default: the array's shape
    strides_bytes: tuple[int, ...] | None = None  # dimensions 1..; default: the array's
    element_strides: tuple[int, ...] | None = None
    oob_nan: bool = False

    def encode_at(self, address: int) -> bytes:
        shape = tuple(self.array.shape)
        sizes = self.sizes or shape[::-1]
        strides = self.strides_bytes
        if strides is None:
            strides = _strides_bytes(self.array)[::-1][1:]
        return encode(
            address,
            self.element_type,
            sizes,
            strides,
            self.box,
            swizzle=self.swizzle,
            element_strides=self.element_strides,
            oob_nan=self.oob_nan,
        )


Argument = "Array | TensorMapOf | int | float | bytes | np.generic"


class Device:
    """One emulated GPU. `with Device(options) as device:` owns the process's device memory."""

    def __init__(self, options: Options, *, record: bool = False) -> None:
        self.options = options
        self.memory = DeviceMemory()
        self.reports: list[Report] = []
        self.recordings: list[Recording] = []
        self.launch_cpu_seconds = 0.0
        self.dependent_launches = 0
        self._record = record
        self._together: _Together | None = None

    def __enter__(self) -> "Device":
        self.memory.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.memory.__exit__(*exc)

    def launch(
        self,
        ptx: str,
        kernel: str,
        grid: Dim3,
        block: Dim3,
        cluster: Dim3,
        dynamic_smem_bytes: int,
        params: list[bytes],
        dependent: bool = False,
    ) -> Report | None:
        """Launches a kernel on the device's memory; returns the report. dependent: see `program.launch`.

        Inside `several_gpus` the launch is only noted, and there is no report yet.
        """
        self.dependent_launches += dependent
        if self._together is not None:
            loaded = Loaded(program_of(ptx), kernel, cluster, dynamic_smem_bytes)
            self._together.note(loaded, grid, block, params, dependent)
            return None
        with self.memory.on_device():
            recording = None
            if self._record:
                before = [(e.address, e.name, self._read(e)) for e in self.memory.extents()]
                dims = (grid, block, cluster, dynamic_smem_bytes)
                recording = Recording(ptx, kernel, *dims, params, before)
                # Also kept if the launch fails, so that the failure can be replayed.
                self.recordings.append(recording)
            program = program_of(ptx)
            start = time.process_time()
            report = launch(
                program,
                kernel,
                grid,
                block,
                cluster=cluster,
                dynamic_smem_bytes=dynamic_smem_bytes,
                params=params,
                memory=memory_map_of(self.memory),
                options=self.options,
                dependent=dependent,
            )
            self.launch_cpu_seconds += time.process_time() - start
            if recording is not None:
                recording.results.extend(self._read(e) for e in self.memory.extents())
        self.reports.append(report)
        return report

    @contextlib.contextmanager
    def several_gpus(self, late: Sequence[int] = ()) -> Iterator[Callable[[int], None]]:
        """Runs the launches of a block together, at its end; yields a function that chooses the GPU of later launches.

        Those of a GPU run one after the other, those of different GPUs side by side. The GPUs share the device's
        memory, as peers that have mapped each other's. Each kernel gets a report.

        late: GPUs that start nothing while any other GPU can do anything but wait.
        """
        if self._record:
            raise ValueError("launches on several GPUs cannot be recorded")
        self._together = together = _Together(frozenset(late))
        try:
            yield together.choose
        finally:
            self._together = None
        if not together.launches:
            return
        with self.memory.on_device():
            start = time.process_time()
            reports = launch_kernels(together.loaded, together.launches, memory_map_of(self.memory), self.options)
            self.launch_cpu_seconds += time.process_time() - start
        self.reports += reports

    def run_ptx(
        self,
        text: str,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Argument],
        *,
        cluster: int | Sequence[int] = 1,
        dynamic_smem_bytes: int = 0,
    ) -> Report:
        """Launches a kernel of a PTX text with explicit arguments, one for each `.param`; returns the report."""
        sizes = parameter_bytes(text, kernel)
        if len(sizes) != len(args):
            raise ValueError(f"{kernel} has {len(sizes)} parameters, got {len(args)} arguments")
        params = [self._encode(arg, size) for arg, size in zip(args, sizes, strict=True)]
        return self.launch(text, kernel, _dim3(grid), _dim3(block), _dim3(cluster), dynamic_smem_bytes, params)

    def _read(self, extent: Extent) -> bytes:
        return self.memory.read(extent.address, extent.nbytes)

    def _encode(self, argument: Argument, size: int) -> bytes:
        if isinstance(argument, TensorMapOf):
            encoded = argument.encode_at(self.memory.address_of(argument.array, "tensor map of"))
        elif isinstance(argument, bytes):
            encoded = argument
        elif isinstance(argument, np.generic):
            encoded = argument.tobytes()
        elif isinstance(argument, int):
            encoded = (argument & (1 << 8 * size) - 1).to_bytes(size, "little")
        elif isinstance(argument, float):
            encoded = struct.pack("<f" if size == 4 else "<d", argument)
        else:
            encoded = self.memory.address_of(argument).to_bytes(8, "little")
        if len(encoded) != size:
            raise ValueError(f"the parameter has {size} bytes, the argument {len(encoded)}")
        return encoded


class _Together:
    """The launches of a block of `Device.several_gpus`."""

    def __init__(self, late: frozenset[int]) -> None:
        self.launches: list[Launch] = []
        self.loaded: list[Loaded] = []
        self._late = late
        self._gpu = 0

    def choose(self, gpu: int) -> None:
        self._gpu = gpu

    def note(self, loaded: Loaded, grid: Dim3, block: Dim3, params: list[bytes], dependent: bool) -> None:
        if loaded not in self.loaded:
            self.loaded.append(loaded)
        number, late = self.loaded.index(loaded), self._gpu in self._late
        self.launches.append(Launch(grid, block, params, self._gpu, dependent, late, number))


def _dim3(value: int | Sequence[int]) -> Dim3:
    dims = (value,) if isinstance(value, int) else tuple(value)
    x, y, z = dims + (1,) * (3 - len(dims))
    return x, y, z


def _strides_bytes(array: "Array") -> tuple[int, ...]:
    if isinstance(array, np.ndarray):
        return array.strides
    return tuple(stride * array.element_size() for stride in array.stride())
