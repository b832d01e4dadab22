"""The first half of the grouped output projection, from the attention's result to wo_b's input (specification, section
3).

The release multiplies wo_a in the model's dtype and does not quantise its input, so the FP8 weight is dequantised,
without rounding, at one of two points:

    SGLANG_DSV4_WO_A    bf16: when it is loaded. Only this takes scales that are no powers of two.
                        fp8: when it is multiplied; it then needs half the memory. For few tokens one launch reads half
                        the bytes, undoes the rotation, multiplies and quantises
                        (`dsv4_kernels.linear.grouped_linear_fp8_weight`). For many tokens the weight is expanded into a
                        buffer that all layers share, and multiplied as a bf16 weight. On an H200 that is faster than
                        bf16 up to 16 tokens, and slower beyond (benchmarks/results/grouped_linear_h200.json).
                        both: FP8 for up to 16 tokens, bf16 for more; one and a half times the memory of bf16. The
                        default where that kernel serves (Hopper and Blackwell, FP8 weights); elsewhere it is bf16. On
                        an H200 a decode step of six layers keeps the GPU busy for 0.97 of bf16's time at 1 and 4 tokens
                        (serve_switches_h200.json).

All of them give the bits of our kernels of `dsv4_kernels.linear.grouped_linear`; on Blackwell without the deterministic
flag products of bf16 are cuBLAS's. On a CPU the variable has no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import torch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import set_weight_attrs
from torch import Tensor, nn

from dsv4_kernels.linear import HeadRotation, expand_fp8_weight, grouped_linear, grouped_linear_fp8_weight
from sglang_dsv4 import env
from sglang_dsv4.layers import data_parallel
from sglang_dsv4.layers.after_loading import AfterLoading
from sglang_dsv4.layers.linear import Fp8Input, builds_on_cpu, load_row_shard
from sglang_dsv4.layers.rope import Rotation
from sglang_dsv4.model_config.config import WEIGHT_BLOCK, Config, ConfigError

VARIABLE = "SGLANG_DSV4_WO_A"
MOST_TOKENS = 512
"""Most tokens of a forward that multiplies in FP8. With Flash's 8 output groups that takes 46 us at 64 tokens and 73 us
at 128; expanding, cuBLAS, rotation and quantiser take 244 and 247 us. Lines through these points cross at 590 tokens;
with 4 and 2 output groups a rank at 480 and 600, with Pro's 16 at 630."""
FEW_TOKENS = 16
"""MOST_TOKENS where the weight is kept in bf16 as well."""
GENERATIONS = (9, 10)
"""Major compute capabilities with a kernel."""
MOST_BYTES_OF_GROUPS = 3 << 30
"""With attention data parallelism each group has the attention's weights: a bf16 form of all layers that takes
more than this on a rank is not kept beside the FP8 form, and the memory goes to KV. Flash's takes 2.7 GiB /
attn_tp_size, Pro's 7.6."""


def asked() -> str | None:
    """The environment's choice: both, fp8 or bf16; None if the variable is not set.

    Raises:
        ValueError: the variable holds another word.
    """
    return env.choice(VARIABLE)


def reason_against(config: Config, generation: int, dtype: torch.dtype) -> str | None:
    """The reason why the FP8 kernel can't serve this model; None if it can.

    Args:
        config: the model's.
        generation: major compute capability of the GPU (9: Hopper, 10: Blackwell).
        dtype: of the model.
    """
    rows, channels = config.o_lora_rank, config.num_attention_heads * config.head_dim // config.o_groups
    rotated = config.qk_rope_head_dim
    if generation not in GENERATIONS:
        return f"its kernels are Hopper's and Blackwell's; the GPU has compute capability {generation}.x"
    if not config.quantised_checkpoint:
        return "the checkpoint's weights are not FP8"
    if dtype != torch.bfloat16:
        return f"it multiplies bfloat16, not {dtype}"
    if rows % 128 or channels % 512 or (config.head_dim, rotated) != (512, 64):
        return (
            "its kernel takes o_lora_rank in multiples of 128, channels of an output group in multiples of 512, and "
            f"heads of 512 with 64 rotated; got {rows}, {channels}, {config.head_dim} and {rotated}"
        )
    return None


def kept(config: Config, generation: int | None, dtype: torch.dtype) -> str:
    """The formats in which a module keeps its weight: "bf16", "fp8" or "both".

    Args:
        config: the model's.
        generation: major compute capability of the GPU; None for a CPU.
        dtype: of the model.

    Raises:
        ConfigError: the environment asks for FP8, and the kernel can't serve.
    """
    if generation is None or asked() == "bf16":
        return "bf16"
    reason = reason_against(config, generation, dtype)
    if asked() is None:
        if reason is not None:
            return "bf16"
        return "fp8" if data_parallel.is_on() and bf16_bytes(config) > MOST_BYTES_OF_GROUPS else "both"
    if reason is not None:
        raise ConfigError(VARIABLE, asked(), f"bf16: {reason}")
    return asked()


def bf16_bytes(config: Config) -> int:
    """Bytes of the weights of all layers on this rank, in bf16."""
    channels = config.num_attention_heads * config.head_dim
    return 2 * config.num_hidden_layers * config.o_lora_rank * channels // get_parallel().attn_tp_size


def most_tokens_in_fp8(kept: str) -> int:
    """Most tokens of a forward that multiplies in FP8; 0 where only bf16 is kept."""
    return {"bf16": 0, "both": FEW_TOKENS, "fp8": MOST_TOKENS}[kept]


@functools.cache
def _expanded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The buffer into which layers of this shape expand their weight, one after the other.

    It is allocated with the model, so that it is counted before the pools are sized.
    """
    return torch.empty(shape, dtype=dtype, device=device)


class GroupedProjection(nn.Module):
    """wo_a of this rank's output groups, with the rotation before it and the quantiser after it.

    Args:
        config: the model's.

    Raises:
        ConfigError: see `kept`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        parallel = get_parallel()
        self.groups, self.head_dim = config.o_groups // parallel.attn_tp_size, config.head_dim
        shape = self.groups, config.o_lora_rank, config.num_attention_heads * self.head_dim // config.o_groups
        load_own_rows = load_row_shard(parallel.attn_tp_rank)
        generation = None if builds_on_cpu() else torch.cuda.get_device_capability()[0]
        self.kept = kept(config, generation, torch.get_default_dtype())
        if self.kept == "bf16":
            self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        else:
            blocks = shape[0], shape[1] // WEIGHT_BLOCK, shape[2] // WEIGHT_BLOCK
            self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float8_e4m3fn), requires_grad=False)
            # SGLang's dummy loader fills parameters of this name with ones.
            self.weight_scale_inv = nn.Parameter(torch.empty(blocks, dtype=torch.float32), requires_grad=False)
            set_weight_attrs(self.weight_scale_inv, {"weight_loader": partial(_load_powers_of_two, load_own_rows)})
        if self.kept == "fp8":
            self.expanded = _expanded(shape, torch.get_default_dtype(), torch.get_default_device())
        elif self.kept == "both":
            self.register_buffer("expanded", torch.empty(shape), persistent=False)
            self.quant_method = AfterLoading(self.expand, derives=True)
        set_weight_attrs(self.weight, {"weight_loader": load_own_rows})

    def expand(self) -> Tensor:
        """The weight in bf16; it is written to its buffer."""
        return expand_fp8_weight(self.weight, self.weight_scale_inv, self.expanded)

    def forward(self, o: Tensor, positions: Tensor, rope: Rotation, quantises: bool) -> Tensor | Fp8Input:
        """wo_b's input: [T, local output groups * o_lora_rank] in o's dtype, or quantised.

        Args:
            o: [T, local heads, head_dim], the attention's result. It may be overwritten.
            positions: [T] int64.
            rope: of the layer. K and V are one row, so V carries the rotation of its own position, which is undone
                relative to the query's.
            quantises: whether wo_b's input is quantised here.
        """
        if self.kept != "bf16" and len(o) <= most_tokens_in_fp8(self.kept):
            rotation = HeadRotation(positions, rope.frequencies, self.head_dim)
            made = grouped_linear_fp8_weight(
                _grouped(o, self.groups), self.weight, self.weight_scale_inv, rotation, quantises
            )
            return Fp8Input(*made) if quantises else made.flatten(1)
        made = self.multiply(o, positions, rope, self.in_model_dtype())
        return Fp8Input.of(made) if quantises else made

    def in_model_dtype(self) -> Tensor:
        """The weight [local output groups, o_lora_rank, channels] in the model's dtype."""
        if self.kept == "bf16":
            return self.weight
        return self.expand() if self.kept == "fp8" else self.expanded

    def multiply(self, o: Tensor, positions: Tensor, rope: Rotation, weight: Tensor) -> Tensor:
        """The product [T, groups * o_lora_rank] of the attention's result with a weight in the model's dtype.

        Args:
            o: [T, heads, head_dim]. It may be overwritten.
            positions: [T] int64.
            rope: of the layer.
            weight: [groups, o_lora_rank, channels], of this rank's output groups or of others, with o's heads.
        """
        return grouped_linear(_grouped(rope.undo(o, positions), len(weight)), weight).flatten(1)


def _grouped(o: Tensor, groups: int) -> Tensor:
    return o.flatten(1).unflatten(-1, (groups, -1))


def _load_powers_of_two(load: Callable[[nn.Parameter, Tensor], None], param: nn.Parameter, loaded: Tensor) -> None:
    """Load scales after checking them: the kernel's conversion is free of rounding with powers of two only.

    Raises:
        ValueError: a scale is not a power of two.
    """
    if loaded.dtype == torch.float32 and not (torch.frexp(loaded).mantissa == 0.5).all():
        raise ValueError(f"scales of wo_a are not powers of two: {VARIABLE}=bf16 accepts any")
    load(param, loaded)
