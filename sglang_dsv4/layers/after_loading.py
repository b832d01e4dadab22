"""What a module of ours does once its weights are loaded."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from torch import Tensor, nn


class AfterLoading(QuantizeMethodBase):
    """As a module's `quant_method`: SGLang's loaders call it behind every load, also of dummy weights.

    Args:
        run: of the module.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def apply(self, layer: nn.Module, *args: object, **kwargs: object) -> Tensor:
        """Not called: the module is no linear layer of SGLang's."""
        raise NotImplementedError(f"{type(layer).__name__}.forward is what computes")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Run it."""
        self._run()
