"""Compiling a kernel's launch function with example arguments, and the stream of a launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import cuda.bindings.driver as cuda
import torch

from dsv4_kernels.host.compile_cache import load_or_compile
from dsv4_kernels.host.launch_arguments import example

MOST_CTAS_IN_Y = 65_535
"""CTAs of a grid in its second and third dimension at most (CUDA programming guide, technical specifications)."""


def load_launcher(name: str, config: Hashable, arch: str, launch: Callable[..., None], *arguments: object) -> Callable:
    """The compiled `launch` (`@cute.jit`), from memory, from disk or from the compiler.

    Call the result with the arguments of `launch` in order, without its compile-time constants.

    Args:
        name: of the kernel, in file names and log lines.
        config: everything that the code depends on besides `arch`; see `compile_cache.load_or_compile`.
        arch: "sm_90a".
        launch: its last parameter is the stream.
        arguments: one for each parameter of `launch` but the stream. A type (a NamedTuple of the DSL's types, or one of
            these) stands for an example value of it; any other value is a compile-time constant.
    """

    def compile() -> Callable:
        from cutlass import cute

        return cute.compile(launch, *map(_example, arguments), cuda.CUstream(0))

    return load_or_compile(name, config, arch, compile)


def _example(argument: object) -> object:
    if isinstance(argument, type):
        return example(argument)
    if type(argument) is tuple:
        return tuple(map(_example, argument))
    return argument


def current_stream(device: torch.device) -> cuda.CUstream:
    """The stream that PyTorch enqueues to; on a CPU (the emulator) the default stream."""
    return cuda.CUstream(torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
