"""A hook of our modules that SGLang's loaders call once weights are loaded."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from torch import Tensor, nn


class AfterLoading(QuantizeMethodBase):
    """A module's `quant_method` that calls `run`: SGLang's loaders call it after every load, dummy weights included.

    Args:
        run: function without arguments, of the module.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def apply(self, layer: nn.Module, *args: object, **kwargs: object) -> Tensor:
        """Not supported: the module is not one of SGLang's linear layers, and computes in its own forward."""
        raise NotImplementedError(f"{type(layer).__name__} computes in its forward, not by its quant_method")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Call `run`."""
        self._run()
