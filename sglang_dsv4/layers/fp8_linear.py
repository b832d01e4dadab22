"""FP8 linear layers of few tokens by this package's product (`dsv4_kernels.linear.linear_fp8`), of more by SGLang's.

    SGLANG_DSV4_FP8_LINEAR    sm90: as said, on Hopper. deepgemm: SGLang's for any number. Unset it is sm90 on Hopper
                              where SGLang's is DeepGEMM's, whose bits are ours, and deepgemm elsewhere.

A layer, its parameters and its loading stay SGLang's. `FewTokensConfig` hands it SGLang's own quantisation method; only
what that method multiplies with is another one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from torch import Tensor, nn

from dsv4_kernels.linear import linear_fp8
from sglang_dsv4 import env
from sglang_dsv4.determinism.sglang_operators import is_deep_gemm
from sglang_dsv4.model_config.config import ConfigError
from sglang_dsv4.seam.bases import ModelBuiltConfig
from sglang_dsv4.seam.hooks import FP8_PRODUCT
from sglang_dsv4.seam.install import set_attribute

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_DSV4_FP8_LINEAR"
MOST_TOKENS = 64
"""Of ours. Launched early, a layer's products of Flash take 44, 47 and 54 us at 1, 16 and 64 tokens, DeepGEMM's 64, 58
and 56; at 128 they take 75 and 61 (benchmarks/results/linear_fp8_h200.json)."""


@functools.cache
def named() -> str | None:
    """What the environment asks for, if anything.

    Raises:
        ValueError: neither sm90 nor deepgemm.
    """
    return env.choice(VARIABLE)


def is_on(possible: bool) -> bool:
    """Whether few tokens are ours.

    Args:
        possible: whether this is a Hopper GPU and inputs are quantised for FP8 products: `linear.quantises_once`.

    Raises:
        ConfigError: ours is asked for, and can't be.
    """
    if named() == "sm90" and not possible:
        raise ConfigError(VARIABLE, "sm90", "'deepgemm' where weights are not FP8, or not on a Hopper GPU")
    return possible and named() != "deepgemm"


@functools.cache
def say(who: str) -> None:
    """A log line, once, on who multiplies."""
    logger.info("FP8 linear layers: %s", who)


def takes(weight: Tensor, block_size: list[int], weight_scale: Tensor) -> bool:
    """Whether the kernel is made for a layer."""
    fits = weight.shape[0] % 8 == 0 and weight.shape[1] % 128 == 0
    return fits and list(block_size) == [128, 128] and weight_scale.dtype == torch.float32


class FewTokensProduct:
    """What `Fp8LinearMethod` calls in place of SGLang's product.

    A layer's first product is SGLang's in any case: there it compiles DeepGEMM's kernels of a shape, for all numbers of
    tokens. Else it would when the first long prompt comes.

    Args:
        many: SGLang's, for more tokens, for inputs that are not quantised and for layers that ours is not made for.
    """

    def __init__(self, many: Callable[..., Tensor]) -> None:
        self.many = many
        self.func = getattr(many, "func", many)  # SGLang looks there for how weights are to be arranged
        self.takes_few: bool | None = None  # None before the first product

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
        first = self.takes_few is None
        if first:
            self.takes_few = takes(weight, block_size, weight_scale)
        if first or not self.takes_few or input_scale is None or input.shape[0] > MOST_TOKENS:
            return self.many(input, weight, block_size, weight_scale, input_scale, bias, **others)
        assert bias is None, "DeepSeek-V4 has no linear layer with a bias"
        return linear_fp8(input, input_scale, weight, weight_scale)


def few_tokens_product(many: Callable[..., Tensor], method: QuantizeMethodBase) -> FewTokensProduct:
    """The value of the attribute of SGLang's `Fp8LinearMethod` that holds its product."""
    return FewTokensProduct(many)


class FewTokensConfig(ModelBuiltConfig):
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
        many = getattr(method, FP8_PRODUCT, None)
        if many is None:
            return method
        if named() == "sm90" or is_deep_gemm(many):
            say(f"at most {MOST_TOKENS} tokens by dsv4_kernels.linear, more by SGLang's product")
            set_attribute(method, FP8_PRODUCT)
        else:
            say("by SGLang's product, which is not DeepGEMM")
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

    def get_scaled_act_names(self) -> list[str]:
        """As SGLang's."""
        return self.of_checkpoint.get_scaled_act_names()


def kernels() -> list[Callable[[], object]]:
    """What compiles the kernels of a forward, ahead of it."""
    from dsv4_kernels.linear import fp8

    return [functools.partial(fp8.compile, plan) for plan in fp8.plans(MOST_TOKENS)]
