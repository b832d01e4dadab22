"""Tensor and mode classes that fail a test when the host would wait for a device, usable without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OnDevice(Tensor):
    """A tensor that is on the GPU in a server; results of operations on it are on the GPU, too."""


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__iter__", "__contains__")
SHAPES = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "equal", "allclose")
FROM_HOST = ("tensor", "as_tensor", "from_numpy", "asarray")


class NoWaiting(TorchFunctionMode):
    """Fails on operations that make the host wait for a device; records the operations launched on it."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if any(isinstance(a, OnDevice) for a in given):
            self._check(name, args, kwargs)
            if name not in ("__get__", "data_ptr", "size", "dim", "stride", "__len__", "numel"):
                self.launched.append(name)
        if name in FROM_HOST:
            raise AssertionError(f"torch.{name} of what the host has: from pageable memory, not by way of `to_device`")
        found = func(*args, **kwargs)
        made_there = isinstance(kwargs.get("device"), torch.device) and isinstance(found, Tensor)
        return found.as_subclass(OnDevice) if made_there else found

    def _check(self, name: str, args: tuple, kwargs: dict) -> None:
        assert name not in READS, f"{name} reads a tensor of the device on the host"
        assert name not in SHAPES, f"{name}: its shape or answer is known on the device only"
        assert name != "where" or len(args) == 3, "where with one argument is nonzero"
        assert name != "repeat_interleave" or "output_size" in kwargs or not isinstance(args[1], Tensor), name
        if name in ("__getitem__", "__setitem__"):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(p, Tensor) and p.dtype == torch.bool for p in places), "indexing by a mask"
            assert not any(isinstance(p, OnDevice) and p.ndim == 0 for p in places), "an index on the device is read"
        if name == "to" and any(device in ("cpu", torch.device("cpu")) for device in (*args[1:], *kwargs.values())):
            raise AssertionError("to('cpu') waits")
        if name == "copy_" and isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice):
            assert kwargs.get("non_blocking"), "a copy between host and device that is not asynchronous"
