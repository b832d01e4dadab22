"""Runs programs that are written for CUDA tensors with CPU tensors.

Third-party examples create their tensors with `device="cuda"`, query the device's properties and time with events.
Inside `with torch_as_cuda():` these calls work with CPU tensors and one B200, or one H200 for sm_90a. Only the calls
that the suite's programs use are answered.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

# Compute capability, multiprocessors, L2 bytes.
_DEVICES = {"sm_100a": ((10, 0), 148, 126 << 20), "sm_90a": ((9, 0), 132, 50 << 20)}


def _is_cuda(value: object) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


class _CudaIsCpu(TorchFunctionMode):
    """Replaces CUDA devices by the CPU in the arguments of every torch function."""

    def __init__(self, padded: Callable[[torch.Tensor], object] | None) -> None:
        super().__init__()
        self.padded = padded

    def __torch_function__(self, function: Callable[..., Any], kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function == torch.Tensor.is_cuda.__get__:
            return True
        if function is torch.Tensor.cuda:
            return args[0].clone()
        if function is torch._scaled_mm:
            named = dict(zip(("input", "mat2", "scale_a", "scale_b"), args, strict=False)) | kwargs
            if named["scale_a"].dim() == 1:
                return _block_scaled_mm(**named)
        to_cuda = any(map(_is_cuda, (*args, *kwargs.values())))
        args = tuple("cpu" if _is_cuda(value) else value for value in args)
        kwargs = {name: "cpu" if _is_cuda(value) else value for name, value in kwargs.items()}
        result = function(*args, **kwargs)
        # A copy to the device must be a copy: a program may compare the original after the kernel.
        if to_cuda and args and result is args[0]:
            result = result.clone()
        if self.padded and to_cuda and function is torch.Tensor.to and result.dim() == 1:
            longer = torch.cat((result, torch.zeros_like(result)))
            self.padded(longer)
            return longer[: len(result)]
        return result


def _scale_per_row(scale: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Block scales as [rows, blocks], from the layout of tcgen05: tiles of 128 rows x 4 blocks, each stored as 32 rows
    by 4 row groups by 4 blocks."""
    row_tiles, block_tiles = -(-rows // 128), -(-blocks // 4)
    tiles = scale.float().reshape(row_tiles, block_tiles, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * 128, block_tiles * 4)[:rows, :blocks]


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _values(matrix: torch.Tensor) -> torch.Tensor:
    """The values [rows, k] of a row-major f8 matrix, or of a matrix with two e2m1 values in a byte."""
    if matrix.dtype != torch.float4_e2m1fn_x2:
        return matrix.float()
    pairs = matrix.view(torch.uint8).long()
    return torch.stack([_E2M1[pairs & 15], _E2M1[pairs >> 4]], -1).flatten(-2)


def _block_scaled_mm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: None = None,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The result of torch._scaled_mm with block scales, in float32; torch implements it on CUDA only."""
    scaled = []
    for matrix, scale in ((_values(input), scale_a), (_values(mat2.T), scale_b)):
        rows, k = matrix.shape
        block = 16 if scale.dtype == torch.float8_e4m3fn else 32
        factors = _scale_per_row(scale, rows, k // block).repeat_interleave(block, 1)
        scaled.append(matrix * factors)
    return (scaled[0] @ scaled[1].T).to(out_dtype)


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "_Event") -> float:
        return 1.0


class _Graph:
    def replay(self) -> None:
        pass


@contextlib.contextmanager
def torch_as_cuda(arch: str = "sm_100a", padded: Callable[[torch.Tensor], object] | None = None) -> Iterator[None]:
    """Inside, CUDA calls of torch work with CPU tensors.

    With `padded`, `to` appends to a 1-D tensor as many zeros as it has elements, and `padded` is called with the longer
    tensor, all of which a program may read.
    """
    capability, multiprocessors, l2_cache_bytes = _DEVICES[arch]
    properties = types.SimpleNamespace(
        name="emulated",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=multiprocessors,
        L2_cache_size=l2_cache_bytes,
        total_memory=1 << 37,
    )
    stream = types.SimpleNamespace(
        cuda_stream=0, device_index=0, synchronize=lambda: None, wait_stream=lambda other: None
    )

    @contextlib.contextmanager
    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "Stream": lambda *args, **kwargs: stream,
        "stream": nothing,
        "device": nothing,
        "graph": nothing,
        "CUDAGraph": _Graph,
        "Event": _Event,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(_CudaIsCpu(padded))
        yield
