"""Products of linear layers: SGLang's quantised kernels on a GPU, the reference operation on a CPU.

On a GPU SGLang's own quantisation methods keep FP8 weights as they are in the file. On a CPU SGLang has no FP8 path, so
weights are dequantised while they are loaded, and `ReferenceLinearMethod` multiplies them; it quantises the input first
where the release does (DeepSeek-V4 specification, section 4.3). Sharding is SGLang's in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.utils import set_weight_attrs
from torch import Tensor, nn

from dsv4_kernels.linear import linear, linear_fp32
from dsv4_kernels.quant import fp8_quantise
from sglang_dsv4.layers import fp8_linear
from sglang_dsv4.layers.fp8_linear import OurProductConfig
from sglang_dsv4.model_config.config import ACTIVATION_BLOCK, Config, ConfigError
from sglang_dsv4.seam.bases import ModelBuiltConfig


def builds_on_cpu() -> bool:
    """Whether modules are being built for a CPU: SGLang's loader sets the target device as torch's default."""
    return torch.get_default_device().type == "cpu"


def fp32_product_dtype() -> torch.dtype:
    """Dtype of matrices whose products are summed and returned in fp32: the file's dtype on a GPU.

    On a CPU it is fp32, since PyTorch has no product of bf16 into fp32 there.
    """
    return torch.float32 if builds_on_cpu() else torch.get_default_dtype()


class Fp8Input(NamedTuple):
    """A quantised input of FP8 products; SGLang's linear layers accept such a pair."""

    codes: Tensor  # [T, k] float8_e4m3fn
    scales: Tensor  # [T, ceil(k / 128)] fp32 powers of two, column-major: scales of neighbouring tokens are adjacent

    @classmethod
    def of(cls, x: Tensor) -> Fp8Input:
        """Quantise `x [T, k]` as the release does (section 4.2)."""
        return cls(*fp8_quantise(x, ACTIVATION_BLOCK, column_major=True))

    def of_tokens(self, tokens: slice) -> Fp8Input:
        """The input of some of the tokens, with scales in the layout that products of these tokens alone require."""
        if tokens == slice(None):
            return self
        codes, scales = self.codes[tokens], self.scales[tokens]
        columns = scales.new_empty(scales.shape[1], -(-len(scales) // 4) * 4)
        return Fp8Input(codes, columns.T[: len(scales)].copy_(scales))


def some_tokens(x: Tensor | Fp8Input, tokens: slice) -> Tensor | Fp8Input:
    """The input [T, k] of some of the tokens."""
    return x.of_tokens(tokens) if isinstance(x, Fp8Input) else x[tokens]


class SublayerInput(NamedTuple):
    """A sublayer's normed input, also quantised for its FP8 products if `quantises_once` holds."""

    rows: Tensor  # [T, d] model dtype
    fp8: Fp8Input | None

    @property
    def of_linear(self) -> Tensor | Fp8Input:
        """The argument for SGLang's linear layers: the quantised input if it exists, else the rows."""
        return self.rows if self.fp8 is None else self.fp8


def quantises_once(config: Config) -> bool:
    """Whether our kernels, not SGLang's, quantise the input of FP8 products, once for all products with that input.

    They do where our product multiplies (`fp8_linear.most_tokens`): it takes fp32 scales, as DeepGEMM does on Hopper.
    SGLang's products on Blackwell need another layout, which SGLang makes.
    """
    on_gpu = not builds_on_cpu() and torch.cuda.is_available()
    return on_gpu and quantises_once_on(torch.cuda.get_device_capability()[0], config)


def quantises_once_on(generation: int, config: Config) -> bool:
    """`quantises_once` for GPUs of this major compute capability (9: Hopper)."""
    return fp8_linear.most_tokens(generation) > 0 and config.qat.activations_fp8


class ReferenceLinearMethod(LinearMethodBase):
    """Multiplies a dequantised weight by `dsv4_kernels.linear`; a row's result never depends on other rows.

    Args:
        activation_block: channels per scale of the FP8 fake-quantisation of inputs, None for none.
    """

    def __init__(self, activation_block: int | None) -> None:
        self.activation_block = activation_block

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,  # noqa: ANN401 - SGLang's hook: weight_loader and more
    ) -> None:
        """Register `weight [sum(output_partition_sizes), input_size_per_partition]` in `params_dtype`.

        Raises:
            ConfigError: a rank's share of the input would cut a quantisation block, which would change its scale.
        """
        block = self.activation_block
        if block is not None and input_size_per_partition != input_size and input_size_per_partition % block:
            ranks = input_size // input_size_per_partition
            raise ConfigError("tp_size", ranks, f"a size that splits {input_size} channels into multiples of {block}")
        weight = nn.Parameter(
            torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype), requires_grad=False
        )
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
        layer.register_parameter("weight", weight)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product [T, n] of `x [T, k]` in x's dtype. DeepSeek-V4's linear layers have no bias."""
        assert bias is None, "DeepSeek-V4 has no linear layer with a bias"
        return linear(x, layer.weight, act_qdq_block=self.activation_block)


class ReferenceLinearConfig(ModelBuiltConfig):
    """Quantisation config that gives `ReferenceLinearMethod` to SGLang's linear layers.

    Args:
        activation_block: channels per scale of the FP8 fake-quantisation of inputs, None for none.
    """

    def __init__(self, activation_block: int | None) -> None:
        super().__init__()
        self.activation_block = activation_block

    def get_name(self) -> str:
        """The name in SGLang's logs."""
        return "dsv4_reference"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Supported dtypes of activations."""
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """0: no GPU is needed."""
        return 0

    def get_quant_method(self, layer: nn.Module, prefix: str) -> ReferenceLinearMethod:
        """The method for any linear layer."""
        return ReferenceLinearMethod(self.activation_block)

    def get_scaled_act_names(self) -> list[str]:
        """An empty list: only AWQ has scaled activations."""
        return []


def quantised_linear_config(config: Config, quant_config: QuantizationConfig | None) -> QuantizationConfig | None:
    """Quantisation config of the `lin8` layers, which are FP8 in an official checkpoint (section 3.1).

    Args:
        config: the model's.
        quant_config: SGLang's config of the checkpoint; None for an unquantised one.

    Raises:
        ConfigError: FP8 weights on a GPU with the activations' quantiser switched off, while SGLang's FP8 products
            always quantise their input.
    """
    if builds_on_cpu():
        return ReferenceLinearConfig(config.activation_block)
    if (quant_config is not None) != config.qat.activations_fp8:
        raise ConfigError(
            "activations_fp8",
            config.qat.activations_fp8,
            "True with FP8 weights and False without on a GPU (leave SGLANG_DSV4_QAT unset there)",
        )
    if quant_config is None:
        return None
    if quantises_once(config):
        return OurProductConfig(quant_config)
    fp8_linear.say("by SGLang's product")
    return quant_config


class StackedProjection(nn.Module):
    """One product for the matrices of several modules that multiply the same input, accumulated and returned in fp32.

    Each matrix is a parameter of its own module and a view of the memory here.

    Args:
        in_features: columns of every matrix.
        widths: rows of each matrix.
    """

    def __init__(self, in_features: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = tuple(widths)
        dtype = fp32_product_dtype()
        # Not in the state dict: weights are loaded through the parameters.
        self.register_buffer("weight", torch.empty(sum(widths), in_features, dtype=dtype), persistent=False)

    def parameters_of(self) -> tuple[nn.Parameter, ...]:
        """The matrices, [width, in_features] each, for the modules that own them to register."""
        return tuple(nn.Parameter(rows, requires_grad=False) for rows in self.weight.split(self.widths))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The products of `x [T, in_features]`: one view [T, width] fp32 of the same tensor for each matrix."""
        return linear_fp32(x, self.weight).split(self.widths, 1)


def load_row_shard(rank: int) -> Callable[[nn.Parameter, Tensor], None]:
    """A weight loader that loads shard `rank` of the first axis, for parameters that no SGLang layer owns.

    The loaded tensor may fold leading axes of the parameter into its first one.
    """

    def load(param: nn.Parameter, loaded: Tensor) -> None:
        rows = param.data.view(-1, *loaded.shape[1:])
        rows.copy_(loaded[rank * rows.shape[0] : (rank + 1) * rows.shape[0]])

    return load
