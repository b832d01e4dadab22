"""FP8 linear layers of few tokens by this package's product (`dsv4_kernels.linear.linear_fp8`), of more by SGLang's.

    SGLANG_DSV4_FP8_LINEAR    sm90: as said, on Hopper; deepgemm (default): SGLang's for any number. Not timed yet.

A layer, its parameters and its loading stay SGLang's. `FewTokensConfig` hands it SGLang's own quantisation method; only
what that method multiplies with is another one.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from torch import Tensor, nn

from dsv4_kernels.linear import linear_fp8

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_DSV4_FP8_LINEAR"
MOST_TOKENS = 64
"""From here on SGLang's."""
PRODUCT = "w8a8_block_fp8_linear"
"""The attribute of SGLang's `Fp8LinearMethod` that holds its product."""


@functools.cache
def is_on() -> bool:
    """Whether the environment asks for it.

    Raises:
        ValueError: neither sm90 nor deepgemm.
    """
    value = os.environ.get(VARIABLE, "deepgemm").strip().lower()
    if value not in ("sm90", "deepgemm"):
        raise ValueError(f"{VARIABLE} must be 'sm90' or 'deepgemm', got {value!r}")
    if value == "sm90":
        logger.info("%s=sm90: FP8 linear layers of at most %d tokens by dsv4_kernels.linear", VARIABLE, MOST_TOKENS)
    return value == "sm90"


class FewTokensProduct:
    """What `Fp8LinearMethod` calls in place of SGLang's product.

    Args:
        many: SGLang's, for more tokens and for inputs that are not quantised.
    """

    def __init__(self, many: Callable[..., Tensor]) -> None:
        self.many = many
        self.func = getattr(many, "func", many)  # SGLang looks there for how weights are to be arranged

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        block_size: list[int],
        weight_scale: Tensor,
        input_scale: Tensor | None = None,
        bias: Tensor | None = None,
        **others: Any,  # noqa: ANN401 - SGLang's
    ) -> Tensor:
        """`input [T, K]` times `weight [N, K]`, both e4m3 with scales: [T, N] bf16."""
        if input_scale is None or input.shape[0] > MOST_TOKENS:
            return self.many(input, weight, block_size, weight_scale, input_scale, bias, **others)
        assert bias is None, "DeepSeek-V4 has no linear layer with a bias"
        return linear_fp8(input, input_scale, weight, weight_scale)


class FewTokensConfig(QuantizationConfig):
    """SGLang's config of a checkpoint, whose FP8 linear layers multiply by `FewTokensProduct`.

    Args:
        of_checkpoint: SGLang's; what it says of itself is said here.
    """

    def __init__(self, of_checkpoint: QuantizationConfig) -> None:
        super().__init__()
        self.of_checkpoint = of_checkpoint
        self.packed_modules_mapping = of_checkpoint.packed_modules_mapping

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """SGLang's method of a linear layer."""
        method = self.of_checkpoint.get_quant_method(layer, prefix)
        many = getattr(method, PRODUCT, None)
        if many is not None:
            setattr(method, PRODUCT, FewTokensProduct(many))
        return method

    def get_name(self) -> str:
        """As SGLang's."""
        return self.of_checkpoint.get_name()

    def get_supported_act_dtypes(self) -> list:
        """As SGLang's."""
        return self.of_checkpoint.get_supported_act_dtypes()

    def get_min_capability(self) -> int:
        """As SGLang's."""
        return self.of_checkpoint.get_min_capability()

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Nothing to read: the model builds this config."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FewTokensConfig:
        """Not how this config comes to be.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("FewTokensConfig is built by the model, not from a checkpoint")

    def get_scaled_act_names(self) -> list[str]:
        """As SGLang's."""
        return self.of_checkpoint.get_scaled_act_names()


def kernels() -> list[Callable[[], object]]:
    """What compiles the kernels of a forward, ahead of it."""
    from dsv4_kernels.linear import fp8

    return [functools.partial(fp8.compile, plan) for plan in fp8.plans(MOST_TOKENS)]
