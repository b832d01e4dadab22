"""CuTe DSL on an emulated device.

The DSL compiles a `@cute.jit` function to host code and to a cubin, and can keep the PTX. The host code calls a runtime
library to load the cubin and to launch. `attached(device)` replaces this library by our own (fake_runtime.c) for the
duration of a `with` block, and types CPU tensors as global memory. At the end it restores all that it changed, so that
compile-only users and a real GPU in the same process are not affected.

A block changes the DSL's environment objects (runtime library, PTX and cubin kept, architecture, line information), the
entry of tensors and pointers into the DSL, the calls of compiled functions, and the queries that need a driver
(`HardwareInfo`, `torch.cuda.current_stream`). Functions compiled in one block may be called in a later one; functions
compiled outside any block call the real runtime and are refused.
"""

import contextlib
import ctypes
import functools
import os
import struct
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ptx_emulator.device.device import Device
from ptx_emulator.dsl import source_locations
from ptx_emulator.dsl.host_callbacks import HostCallbacks, build_library, unpack_launch

_RUNTIME_SOURCE = Path(__file__).resolve().with_name("fake_runtime.c")
_KDL_CUDA = 2
_FATBIN_MAGIC = 0xBA55ED50

# Compiled functions, cubins and loaded libraries outlive their block: owners commonly compile a kernel once and cache
# it.
_compiled: "weakref.WeakSet[Any]" = weakref.WeakSet()
_ptx_of_cubin: dict[bytes, str] = {}
_ptx_of_library: dict[int, str] = {}


class _DeviceView:
    """A DLPack view of a CPU tensor that claims to be on CUDA device 0, at the device address."""

    def __init__(self, tensor: Any, address: int) -> None:
        self._tensor, self._address = tensor, address

    def __dlpack_device__(self) -> tuple[int, int]:
        return _KDL_CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        import torch

        tensor = torch.from_numpy(self._tensor) if _is_numpy(self._tensor) else self._tensor
        capsule = torch.utils.dlpack.to_dlpack(tensor.detach())
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # DLTensor begins: void *data; struct { int32 device_type, device_id; } device.
        start = pointer(capsule, b"dltensor")
        ctypes.c_uint64.from_address(start).value = self._address
        ctypes.c_int32.from_address(start + 8).value = _KDL_CUDA
        return capsule


def _fatbin_bytes(image: int) -> bytes:
    """The payload of a fat binary: u32 magic, u16 version, u16 header bytes, u64 bytes after the header."""
    magic, header_bytes, payload_bytes = struct.unpack("<I2xHQ", ctypes.string_at(image, 16))
    if magic != _FATBIN_MAGIC:
        raise RuntimeError(f"the host code loaded an image with magic {magic:#x}, not a fat binary")
    return ctypes.string_at(image + header_bytes, payload_bytes)


def _is_numpy(value: object) -> bool:
    return isinstance(value, np.ndarray)


class _Attachment:
    """The device and the callbacks of one block."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.callbacks = HostCallbacks(self._launch, self._load)

    def _load(self, library: int, image: int) -> None:
        contents = _fatbin_bytes(image)
        for cubin, ptx in _ptx_of_cubin.items():
            if cubin in contents:
                _ptx_of_library[library] = ptx
                return
        raise RuntimeError(
            "a cubin was loaded that was not compiled inside `with emulated():`, so its PTX is "
            "unknown; compile the function inside the block"
        )

    def _launch(self, library: int, kernel: bytes, dims: Any, smem: int, arguments: Any) -> None:
        ptx, name = _ptx_of_library[library], kernel.decode()
        self.device.launch(ptx, name, *unpack_launch(ptx, name, dims, smem, arguments))


@contextlib.contextmanager
def attached(
    device: Device, *, arch: str = "sm_100a", multiprocessors: int = 148, lineinfo: bool = True
) -> Iterator[None]:
    """Directs CuTe DSL launches to `device` until the block ends."""
    attachment = _Attachment(device)
    callbacks = attachment.callbacks
    # The DSL's JIT looks the library up by its usual name.
    library_path = str(build_library(_RUNTIME_SOURCE, "libcute_dsl_runtime.so"))
    runtime = ctypes.CDLL(library_path, mode=ctypes.RTLD_GLOBAL)
    with contextlib.ExitStack() as stack:
        dump_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="emulated-"))
        # For DSL objects that are created inside the block, and for the TVM-FFI path, which reads the environment.
        environment = {
            "CUTE_DSL_LIBS": library_path,
            "CUTE_DSL_ARCH": arch,
            "CUTE_DSL_KEEP": "ptx,cubin",
            "CUTE_DSL_DUMP_DIR": dump_dir,
            "CUTE_DSL_LINEINFO": "1" if lineinfo else "0",
        }
        stack.enter_context(mock.patch.dict(os.environ, environment))
        import cutlass  # noqa: F401 - creates the DSL objects that are changed below
        from cutlass.base_dsl.dsl import DSLSingletonMeta

        settings = {
            "shared_libs": library_path,
            "_arch": arch,
            "keep_ptx": True,
            "keep_cubin": True,
            "no_cache": True,
            "dump_dir": dump_dir,
            "lineinfo": lineinfo,
        }
        for dsl in DSLSingletonMeta._instances.values():
            for name, value in settings.items():
                stack.enter_context(mock.patch.object(dsl.envar, name, value))
        for target, name, replacement in _replacements(attachment, multiprocessors):
            stack.enter_context(mock.patch.object(target, name, replacement))
        runtime.fake_runtime_set_callbacks(callbacks.launch, callbacks.load, callbacks.encode)
        try:
            yield
        finally:
            runtime.fake_runtime_set_callbacks(None, None, None)
            source_locations.forget_context()
    callbacks.raise_pending()


def _replacements(attachment: _Attachment, multiprocessors: int) -> Iterator[tuple[Any, str, Any]]:
    """(object, attribute, replacement) for every replaced Python function."""
    yield from _compile_and_call(attachment)
    yield from _tensors_and_pointers(attachment.device)
    yield from _driver_queries(multiprocessors)
    yield from source_locations.replacements()


def _compile_and_call(attachment: _Attachment) -> Iterator[tuple[Any, str, Any]]:
    from cutlass.base_dsl.jit_executor import JitCompiledFunction, JitExecutor
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    original_init = JitCompiledFunction.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        if self.has_gpu_module:
            _compiled.add(self)
            _ptx_of_cubin[self.__cubin__] = self.__ptx__

    yield JitCompiledFunction, "__init__", init

    original_load = CudaDialectJitCompiledFunction._load_cuda_library

    def load(self: Any) -> list[Any]:
        if self not in _compiled:
            raise RuntimeError(f"{self.function_name} was compiled outside `with emulated():`; compile it inside")
        attachment.callbacks.raising(original_load)(self)
        return []  # so that the function unloads nothing through the real CUDA runtime

    yield CudaDialectJitCompiledFunction, "_load_cuda_library", load
    yield CudaDialectJitCompiledFunction, "num_devices", property(lambda self: 1)

    def called(call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which runs compiled host code, with the tensors' contents on the device."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with attachment.device.memory.on_device():
                return call(*args, **kwargs)

        return attachment.callbacks.raising(wrapped)

    yield JitExecutor, "run_compiled_program", called(JitExecutor.run_compiled_program)

    try:
        import tvm_ffi
        from cutlass.cutlass_dsl import tvm_ffi_provider as provider
    except ImportError:
        return

    def on_device(value: Any) -> Any:
        if _is_cpu_tensor(value):
            view = _DeviceView(value, attachment.device.memory.address_of(value))
            return tvm_ffi.from_dlpack(view)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(on_device, value))
        if isinstance(value, tuple | list):
            return type(value)(map(on_device, value))
        return value

    def converting(call: Callable[..., Any]) -> Callable[..., Any]:
        call = called(call)

        @functools.wraps(call)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            named = {name: on_device(value) for name, value in kwargs.items()}
            return call(self, *map(on_device, args), **named)

        return wrapped

    for function_type in (
        provider.TVMFFIJitCompiledFunction,
        provider.TVMFFIJitCompiledFunctionWithKwargs,
    ):
        yield function_type, "__call__", converting(function_type.__call__)


def _is_cpu_tensor(value: object) -> bool:
    import torch

    is_fake = isinstance(value, torch._subclasses.fake_tensor.FakeTensor)
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and not is_fake


def _tensors_and_pointers(device: Device) -> Iterator[tuple[Any, str, Any]]:
    import torch
    from cutlass.cute import runtime

    original_init = runtime._Tensor.__init__

    def init(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        if _is_cpu_tensor(tensor) or _is_numpy(tensor):
            tensor = _DeviceView(tensor, device.memory.address_of(tensor))
        original_init(self, tensor, *args, **kwargs)

    yield runtime._Tensor, "__init__", init

    original_data_ptr = torch.Tensor.data_ptr

    def data_ptr(self: torch.Tensor) -> int:
        """The device address, which host code passes as a raw pointer or in pointer arrays."""
        if _is_cpu_tensor(self):
            return device.memory.address_of(self)
        return original_data_ptr(self)

    yield torch.Tensor, "data_ptr", data_ptr


def _driver_queries(multiprocessors: int) -> Iterator[tuple[Any, str, Any]]:
    import torch
    from cutlass.utils import HardwareInfo

    yield HardwareInfo, "__init__", lambda self, device_id=0: None
    yield (
        HardwareInfo,
        "get_max_active_clusters",
        lambda self, cluster_size, stream=None: multiprocessors // cluster_size,
    )
    yield HardwareInfo, "get_l2_cache_size_in_bytes", lambda self: 126 << 20
    yield HardwareInfo, "get_device_multiprocessor_count", lambda self: multiprocessors
    stream = types.SimpleNamespace(cuda_stream=0, device_index=0, synchronize=lambda: None)
    yield torch.cuda, "current_stream", lambda device=None: stream
    yield torch.cuda, "default_stream", lambda device=None: stream
    yield torch.cuda, "synchronize", lambda device=None: None
