"""Python callbacks of the C stand-ins for CUDA's runtime libraries: launches, loads, tensor maps."""

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptx_emulator.device.recording import Dim3, parameter_bytes
from ptx_emulator.device.tensor_map import ElementType, Swizzle, TensorMapError, encode

BUILD_DIR = Path(__file__).resolve().parent / ".build"

_CUDA_SUCCESS, _INVALID_VALUE, _INVALID_IMAGE, _LAUNCH_FAILURE = 0, 1, 200, 719

_U32, _U64, _INT, _POINTER = ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
_U32S, _U64S, _POINTERS = (ctypes.POINTER(t) for t in (_U32, _U64, _POINTER))
_LAUNCH = ctypes.CFUNCTYPE(_INT, _U64, ctypes.c_char_p, _U32S, _U64, _POINTERS)
_LOAD = ctypes.CFUNCTYPE(_INT, _U64, _POINTER)
_ENCODE = ctypes.CFUNCTYPE(_INT, _POINTER, _U32, _U32, _U64, _U64S, _U64S, _U32S, _U32S, _U32, _U32, _U32)


def build_library(source: Path, name: str) -> Path:
    """The path of a C file's shared library called `name`, built once per content."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    library = BUILD_DIR / f"{source.stem}-{digest}" / name
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when complete, so that another process never loads half a file.
        partial = library.with_suffix(f".{os.getpid()}")
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(partial), str(source)]
        subprocess.run(command, check=True)
        partial.rename(library)
    return library


def unpack_launch(
    ptx: str, kernel: str, dims: Any, smem: int, arguments: Any
) -> tuple[Dim3, Dim3, Dim3, int, list[bytes], bool]:
    """(grid, block, cluster, shared memory, parameters, dependent) from a launch callback's arguments."""
    sizes = parameter_bytes(ptx, kernel)
    params = [ctypes.string_at(arguments[i], size) for i, size in enumerate(sizes)]
    grid, block, cluster = ((dims[i], dims[i + 1], dims[i + 2]) for i in (0, 3, 6))
    return grid, block, cluster, smem, params, bool(dims[9])


class HostCallbacks:
    """C-callable functions, and the first exception in one of them.

    No exception can cross the host code: the host code sees a CUDA error, and its caller raises the kept exception.
    """

    def __init__(
        self,
        launch: Callable[[int, bytes, Any, int, Any], None],
        load: Callable[[int, int], None] | None = None,
    ) -> None:
        self._error: BaseException | None = None
        self.launch = _LAUNCH(self._guard(launch, _LAUNCH_FAILURE))
        self.load = _LOAD(self._guard(load, _INVALID_IMAGE)) if load else _LOAD()
        self.encode = _ENCODE(self._guard(_encode_tensor_map, _INVALID_VALUE))

    def raise_pending(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def raising(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which raises the kept exception instead of the CUDA error that results from it."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                result = call(*args, **kwargs)
            except Exception:
                self.raise_pending()
                raise
            self.raise_pending()
            return result

        return wrapped

    def _guard(self, function: Callable[..., None], error_code: int) -> Callable[..., int]:
        def guarded(*args: Any) -> int:
            if self._error is not None:
                return error_code
            try:
                function(*args)
            except BaseException as error:  # raised again by raise_pending
                self._error = error
                return error_code
            return _CUDA_SUCCESS

        return guarded


def _encode_tensor_map(
    target: int,
    data_type: int,
    rank: int,
    address: int,
    sizes: Any,
    strides_bytes: Any,
    box: Any,
    element_strides: Any,
    interleave: int,
    swizzle: int,
    oob_fill: int,
) -> None:
    """Writes a tensor map to `target`, as cuTensorMapEncodeTiled does."""
    if interleave:
        raise TensorMapError("interleaved tensor maps are not supported")
    tensor_map = encode(
        address,
        ElementType(data_type),
        sizes[:rank],
        strides_bytes[: rank - 1],
        box[:rank],
        swizzle=Swizzle(swizzle),
        element_strides=element_strides[:rank],
        oob_nan=bool(oob_fill),
    )
    ctypes.memmove(target, tensor_map, len(tensor_map))
