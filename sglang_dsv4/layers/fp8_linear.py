"""FP8 linear layers that multiply by this package's product (`dsv4_kernels.linear.linear_fp8`).

On Hopper, where SGLang's product is DeepGEMM, our product multiplies up to MOST_TOKENS tokens and gives the same bits;
DeepGEMM multiplies more tokens. On Blackwell our product, which was verified by emulation only, multiplies any number
of tokens:

    SGLANG_DSV4_FP8_LINEAR    auto (default): under --enable-deterministic-inference, because DeepGEMM exchanges the
                              operands of `tcgen05.mma` by the number of tokens, and nothing shows that bits stay.
                              ours: always. Elsewhere the variable has no effect.

The layer, its parameters and its loading stay SGLang's. `OurProductConfig` gives it SGLang's quantisation method with
another product.
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
from dsv4_kernels.quant import fp8_quantise
from sglang_dsv4 import env
from sglang_dsv4.determinism import flag
from sglang_dsv4.determinism.sglang_operators import is_deep_gemm
from sglang_dsv4.seam.bases import ModelBuiltConfig
from sglang_dsv4.seam.hooks import FP8_PRODUCT
from sglang_dsv4.seam.install import set_attribute

logger = logging.getLogger(__name__)

MOST_TOKENS = 64
"""Most tokens that our product multiplies. Launched early, the products of a Flash layer take 44, 47 and 54 us at 1, 16
and 64 tokens, by DeepGEMM 64, 58 and 56 us; at 128 tokens they take 75 us, by DeepGEMM 61 us
(benchmarks/results/linear_fp8_h200.json). A decode step of six layers keeps the GPU busy for 0.92, 0.94 and 0.97 of
DeepGEMM's time at 1, 4 and 16 tokens (serve_switches_h200.json)."""


VARIABLE = "SGLANG_DSV4_FP8_LINEAR"
BLOCK = 128
ALL_TOKENS = 1 << 30
"""The most tokens of our product where it multiplies any number."""


def most_tokens(generation: int) -> int:
    """Most tokens that our product multiplies on GPUs of this major compute capability; 0 if it multiplies none.

    Raises:
        ValueError: the environment variable holds another word.
    """
    ours = env.choice(VARIABLE) == "ours" or flag.is_on()
    return {9: MOST_TOKENS, 10: ALL_TOKENS if ours else 0}.get(generation, 0)


@functools.cache
def say(who: str) -> None:
    """Log once which product the FP8 linear layers use."""
    logger.info("FP8 linear layers: %s", who)


def takes(weight: Tensor, block_size: list[int], weight_scale: Tensor) -> bool:
    """Whether our kernel serves a layer with this weight and these scales."""
    fits = weight.shape[0] % 8 == 0 and weight.shape[1] % 128 == 0
    return fits and list(block_size) == [128, 128] and weight_scale.dtype == torch.float32


class FewTokensProduct:
    """The product that `Fp8LinearMethod` calls instead of SGLang's.

    The first product of a shape is SGLang's in any case: it compiles DeepGEMM's kernels of the shape for all numbers of
    tokens, which would otherwise happen during the first long prompt.

    Args:
        many: SGLang's product, for more tokens, for inputs that are not quantised, and for layers that our kernel does
            not serve.
    """

    def __init__(self, many: Callable[..., Tensor]) -> None:
        self.many = many
        self.func = getattr(many, "func", many)  # SGLang decides by it how weights are arranged
        self.takes_few: dict[torch.Size, bool] = {}  # by the weight's shape

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
        """The product [T, N] bf16 of `input [T, K]` and `weight [N, K]`, both e4m3 with scales."""
        first = weight.shape not in self.takes_few
        if first:
            self.takes_few[weight.shape] = takes(weight, block_size, weight_scale)
        if first or not self.takes_few[weight.shape] or input_scale is None or input.shape[0] > MOST_TOKENS:
            return self.many(input, weight, block_size, weight_scale, input_scale, bias, **others)
        assert bias is None, "DeepSeek-V4 has no linear layer with a bias"
        return linear_fp8(input, input_scale, weight, weight_scale)


class AllTokensProduct:
    """The product that `Fp8LinearMethod` calls on Blackwell instead of SGLang's, for any number of tokens."""

    def __init__(self) -> None:
        self.func = linear_fp8  # not DeepGEMM's: SGLang then leaves scales as they are in the file
        self.is_checked = False

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
        """The product [T, N] bf16 of `input [T, K]`, e4m3 with scales or bf16, and `weight [N, K]`.

        Raises:
            ValueError: the kernel does not serve the layer.
        """
        if not self.is_checked:
            require_served(weight, block_size, weight_scale)
            self.is_checked = True
        assert bias is None, "DeepSeek-V4 has no linear layer with a bias"
        codes, scales = fp8_quantise(input, BLOCK) if input_scale is None else (input, input_scale)
        return linear_fp8(codes, scales, weight, weight_scale)


def require_served(weight: Tensor, block_size: list[int], weight_scale: Tensor) -> None:
    """Refuse a layer that Blackwell's kernel does not serve; reads its scales once.

    Raises:
        ValueError: says which property of the layer.
    """
    what = ""
    if list(block_size) != [BLOCK, BLOCK] or weight.shape[1] % BLOCK:
        what = f"blocks of {list(block_size)} and {weight.shape[1]} columns; it takes blocks of 128 x 128"
    elif weight_scale.dtype != torch.float32:
        what = f"scales in {weight_scale.dtype}; it takes fp32"
    elif not (torch.frexp(weight_scale).mantissa == 0.5).all():
        what = "scales that are no powers of two"
    if what:
        raise ValueError(
            f"an FP8 layer {tuple(weight.shape)} has {what}: leave {VARIABLE} and {flag.FLAG} out, SGLang's product "
            "serves it"
        )


def our_product(many: Callable[..., Tensor], method: QuantizeMethodBase) -> FewTokensProduct | AllTokensProduct:
    """The value of the attribute of SGLang's `Fp8LinearMethod` that holds its product."""
    return AllTokensProduct() if multiplies_all_tokens() else FewTokensProduct(many)


def multiplies_all_tokens() -> bool:
    """Whether our product multiplies any number of tokens on this process's GPU."""
    return torch.cuda.is_available() and most_tokens(torch.cuda.get_device_capability()[0]) == ALL_TOKENS


class OurProductConfig(ModelBuiltConfig):
    """SGLang's quantisation config, except that FP8 linear layers multiply by our product.

    Args:
        of_checkpoint: SGLang's config of the checkpoint; all other calls are passed on to it.
    """

    def __init__(self, of_checkpoint: QuantizationConfig) -> None:
        super().__init__()
        self.of_checkpoint = of_checkpoint
        self.packed_modules_mapping = of_checkpoint.packed_modules_mapping

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """SGLang's method for a layer, with our product if it is an FP8 linear layer and the product serves it."""
        method = self.of_checkpoint.get_quant_method(layer, prefix)
        many = getattr(method, FP8_PRODUCT, None)
        if many is None:
            return method
        if multiplies_all_tokens():
            say("by dsv4_kernels.linear")
            set_attribute(method, FP8_PRODUCT)
        elif is_deep_gemm(many):
            say(f"at most {MOST_TOKENS} tokens by dsv4_kernels.linear, more by SGLang's product")
            set_attribute(method, FP8_PRODUCT)
        else:
            say("by SGLang's product, which is not DeepGEMM")
        return method

    def get_name(self) -> str:
        """The answer of SGLang's config."""
        return self.of_checkpoint.get_name()

    def get_supported_act_dtypes(self) -> list:
        """The answer of SGLang's config."""
        return self.of_checkpoint.get_supported_act_dtypes()

    def get_min_capability(self) -> int:
        """The answer of SGLang's config."""
        return self.of_checkpoint.get_min_capability()

    def get_scaled_act_names(self) -> list[str]:
        """The answer of SGLang's config."""
        return self.of_checkpoint.get_scaled_act_names()
