"""Host code and kernels that nvcc compiled from C++: built once, and launched on the emulator.

A driver (*_driver.cu) calls the third party's own host functions with plain pointers. fake_cudart.c hands what they
launch to the emulator, with the PTX of the same compilation.
"""

import ctypes
import hashlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from host import Device  # noqa: E402
from host_callbacks import BUILD_DIR, HostCallbacks, build_library, unpack_launch  # noqa: E402

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
    """Loads fake_cudart.c, as a driver's library needs; its launches go to the device."""

    def launch(library: int, kernel: bytes, dims: object, smem: int, arguments: object) -> None:
        name = kernel.decode()
        device.launch(ptx, name, *unpack_launch(ptx, name, dims, smem, arguments))

    callbacks = HostCallbacks(launch)
    path = build_library(HERE / "fake_cudart.c", "libcudart.so")
    runtime = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    runtime.fake_cudart_set_callbacks(callbacks.launch, callbacks.encode)
    return callbacks


def pointer(device: Device, tensor: torch.Tensor) -> ctypes.c_void_p:
    """Its address on the device."""
    return ctypes.c_void_p(device.memory.address_of(tensor))
