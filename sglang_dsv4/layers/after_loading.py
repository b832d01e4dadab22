"""A hook of our modules that SGLang's loaders call once weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from torch import Tensor, nn


class AfterLoading(QuantizeMethodBase):
    """A module's `quant_method` that calls `run`: SGLang's loaders call it after every load, dummy weights included.

    Args:
        run: function without arguments, of the module.
        derives: whether `run` computes other tensors from the parameters, so that it must run again when they change.
            Otherwise `run` rearranges freshly loaded parameters, and may run only once after each load.
        gathers: whether `run` computes other tensors from the parameters of all ranks, so that all ranks must call it
            together, when the parameters of all have changed.
    """

    _is_suspended: ClassVar[bool] = False

    def __init__(self, run: Callable[[], object], derives: bool, gathers: bool = False) -> None:
        self._run, self.derives, self.gathers = run, derives, gathers

    @classmethod
    @contextmanager
    def suspended(cls) -> Iterator[None]:
        """Context in which `run` is not called: SGLang's loaders run, but write no parameter."""
        cls._is_suspended = True
        try:
            yield
        finally:
            cls._is_suspended = False

    @staticmethod
    def of_modules(model: nn.Module) -> Iterator[tuple[nn.Module, AfterLoading]]:
        """The modules of a model that have this hook, in the model's order, and their hooks."""
        for module in model.modules():
            if isinstance(method := getattr(module, "quant_method", None), AfterLoading):
                yield module, method

    def apply(self, layer: nn.Module, *args: object, **kwargs: object) -> Tensor:
        """Not supported: the module is not one of SGLang's linear layers, and computes in its own forward."""
        raise NotImplementedError(f"{type(layer).__name__} computes in its forward, not by its quant_method")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Call `run`."""
        if not self._is_suspended:
            self._run()
