"""Host code and kernels that nvcc compiles from C++: built once, and launched on the emulator.

A driver (*_driver.cu) calls the third party's own host functions with plain pointers. fake_cudart.c hands their
launches to the emulator, with the PTX of the same compilation.
"""

import ctypes
import hashlib
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ptx_emulator import Device
from ptx_emulator.dsl.host_callbacks import BUILD_DIR, HostCallbacks, build_library, unpack_launch

HERE = Path(__file__).resolve().parent
NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    # PTX only: the emulator needs no machine code.
    "-gencode=arch=compute_100a,code=compute_100a",
    "--expt-relaxed-constexpr",
    "-DNDEBUG",
    "-w",
]


def build(
    driver: Path, name: str, flags: Sequence[str], includes: Iterable[Path], sources: Iterable[Path]
) -> tuple[Path, str]:
    """(the driver's shared library, its PTX), built once per content of the driver and `sources`."""
    flags = [*NVCC_FLAGS, *flags]
    digest = hashlib.sha256("".join(flags).encode())
    for source in [driver, *sources]:
        digest.update(source.read_bytes())
    folder = BUILD_DIR / f"{name}-{digest.hexdigest()[:16]}"
    library, ptx = folder / "driver.so", folder / f"{driver.stem}.ptx"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["nvcc", *flags, "-shared", "-cudart", "none"]
        command += ["-Xcompiler", "-fPIC", "--keep", "--keep-dir", str(folder)]
        command += [f"-I{path}" for path in includes]
        subprocess.run([*command, "-o", str(library), str(driver)], check=True, cwd=folder)
    return library, ptx.read_text()


def attach(device: Device, ptx: str) -> HostCallbacks:
    """Loads fake_cudart.c as the driver's CUDA runtime, which launches on the device; returns its callbacks, to be
    kept."""

    def launch(library: int, kernel: bytes, dims: object, smem: int, arguments: object) -> None:
        name = kernel.decode()
        device.launch(ptx, name, *unpack_launch(ptx, name, dims, smem, arguments))

    callbacks = HostCallbacks(launch)
    path = build_library(HERE / "fake_cudart.c", "libcudart.so")
    runtime = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    runtime.fake_cudart_set_callbacks(callbacks.launch, callbacks.encode)
    return callbacks


def pointer(device: Device, tensor: torch.Tensor) -> ctypes.c_void_p:
    """The tensor's address on the device."""
    return ctypes.c_void_p(device.memory.address_of(tensor))
