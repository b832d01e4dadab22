"""The first half of the grouped output projection, from what was attended to wo_b's input (specification, section 3).

The release multiplies wo_a in the model's dtype and leaves its input alone, so the weight is dequantised, exactly, at
one of two places:

    SGLANG_DSV4_WO_A    bf16: while it is loaded.
                        fp8: where it is multiplied, on Hopper; it then takes half the memory. Few tokens are turned
                        back, multiplied and quantised in one launch that reads half the bytes
                        (`dsv4_kernels.linear.grouped_linear_fp8_weight`). For many tokens it is expanded into a buffer
                        that all layers share, and multiplied as the other one is. It is faster than bf16 up to 16
                        tokens, and slower beyond (benchmarks/results/grouped_linear_h200.json).
                        both: FP8 for up to 16 tokens, bf16 for more; one and a half times the memory of bf16.
                        auto (default): both where that kernel serves (Hopper, FP8 weights), else bf16.

All have the same bits, those of `dsv4_kernels.linear.grouped_linear` on Hopper. On a CPU the variable changes nothing.
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
from sglang_dsv4.layers.after_loading import AfterLoading
from sglang_dsv4.layers.linear import Fp8Input, builds_on_cpu, load_row_shard
from sglang_dsv4.layers.rope import Rotation
from sglang_dsv4.model_config.config import WEIGHT_BLOCK, Config, ConfigError

VARIABLE = "SGLANG_DSV4_WO_A"
MOST_TOKENS = 512
"""Of a forward that multiplies FP8. For Flash's 8 groups that takes 46 us at 64 tokens and 73 at 128; expanding, cuBLAS
and what is beside it take 244 and 247. On lines through these both take as long at 590 tokens; with 4 and 2 groups of a
rank at 480 and 600, with Pro's 16 at 630."""
FEW_TOKENS = 16
"""The same, where the weight is there in bf16 as well."""


def asked() -> str:
    """What the environment asks for: bf16, fp8, both or auto.

    Raises:
        ValueError: none of these.
    """
    return env.choice(VARIABLE) or "auto"


def reason_against(config: Config, generation: int, dtype: torch.dtype) -> str | None:
    """Why FP8 can't serve, if it can't.

    Args:
        config: the model's.
        generation: of the GPU, as its compute capability has it (9: Hopper).
        dtype: of the model.
    """
    rows, channels = config.o_lora_rank, config.num_attention_heads * config.head_dim // config.o_groups
    rotated = config.qk_rope_head_dim
    if generation != 9:
        return "its kernel is Hopper's"
    if not config.quantised_checkpoint:
        return "the checkpoint's weights are not FP8"
    if dtype != torch.bfloat16:
        return f"it multiplies bfloat16, not {dtype}"
    if rows % 128 or channels % 512 or (config.head_dim, rotated) != (512, 64):
        return (
            "its kernel takes o_lora_rank in multiples of 128, channels of a group in multiples of 512, and heads of "
            f"512 with 64 turned; got {rows}, {channels}, {config.head_dim} and {rotated}"
        )
    return None


def kept(config: Config, generation: int | None, dtype: torch.dtype) -> str:
    """In what a module keeps its weight: bf16, fp8 or both.

    Args:
        config: the model's.
        generation: of the GPU; None for a CPU.
        dtype: of the model.

    Raises:
        ConfigError: FP8 was asked for, and can't be.
    """
    if generation is None or asked() == "bf16":
        return "bf16"
    reason = reason_against(config, generation, dtype)
    if asked() == "auto":
        return "both" if reason is None else "bf16"
    if reason is not None:
        raise ConfigError(VARIABLE, asked(), f"bf16, auto: {reason}")
    return asked()


def most_tokens_in_fp8(kept: str) -> int:
    """Of a forward, where FP8 is kept."""
    return FEW_TOKENS if kept == "both" else MOST_TOKENS


@functools.cache
def _expanded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where layers of this shape expand their weight, one after the other. Made with the model, so that it is counted
    before the pools are sized."""
    return torch.empty(shape, dtype=dtype, device=device)


class GroupedProjection(nn.Module):
    """wo_a of this rank's groups, with what stands on either side of it.

    Args:
        config: the model's.

    Raises:
        ConfigError: see `kept`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        parallel = get_parallel()
        self.groups, self.head_dim = config.o_groups // parallel.tp_size, config.head_dim
        shape = self.groups, config.o_lora_rank, config.num_attention_heads * self.head_dim // config.o_groups
        load_own_rows = load_row_shard(parallel.tp_rank)
        generation = None if builds_on_cpu() else torch.cuda.get_device_capability()[0]
        self.kept = kept(config, generation, torch.get_default_dtype())
        if self.kept == "bf16":
            self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        else:
            blocks = shape[0], shape[1] // WEIGHT_BLOCK, shape[2] // WEIGHT_BLOCK
            self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float8_e4m3fn), requires_grad=False)
            # Named so that SGLang's dummy loader fills it with ones.
            self.weight_scale_inv = nn.Parameter(torch.empty(blocks, dtype=torch.float32), requires_grad=False)
            set_weight_attrs(self.weight_scale_inv, {"weight_loader": partial(_load_powers_of_two, load_own_rows)})
        if self.kept == "fp8":
            self.expanded = _expanded(shape, torch.get_default_dtype(), torch.get_default_device())
        elif self.kept == "both":
            self.register_buffer("expanded", torch.empty(shape), persistent=False)
            self.quant_method = AfterLoading(self.expand)
        set_weight_attrs(self.weight, {"weight_loader": load_own_rows})

    def expand(self) -> Tensor:
        """The weight in bf16, written to its buffer."""
        return expand_fp8_weight(self.weight, self.weight_scale_inv, self.expanded)

    def forward(self, o: Tensor, positions: Tensor, rope: Rotation, quantises: bool) -> Tensor | Fp8Input:
        """What wo_b takes.

        Args:
            o: [T, local heads, head_dim], what was attended. It may be written to.
            positions: [T] int64.
            rope: of the layer. K and V are one row, so V carries the rotation of its own position, which is undone
                relative to the query's.
            quantises: whether wo_b's input is quantised here.

        Returns:
            [T, local groups * o_lora_rank] in o's dtype, or quantised.
        """
        if self.kept != "bf16" and len(o) <= most_tokens_in_fp8(self.kept):
            rotation = HeadRotation(positions, rope.frequencies, self.head_dim)
            made = grouped_linear_fp8_weight(self._grouped(o), self.weight, self.weight_scale_inv, rotation, quantises)
            return Fp8Input(*made) if quantises else made.flatten(1)
        weight = self.weight
        if self.kept != "bf16":
            weight = self.expand() if self.kept == "fp8" else self.expanded
        made = grouped_linear(self._grouped(rope.undo(o, positions)), weight).flatten(1)
        return Fp8Input.of(made) if quantises else made

    def _grouped(self, o: Tensor) -> Tensor:
        return o.flatten(1).unflatten(-1, (self.groups, -1))


def _load_powers_of_two(load: Callable[[nn.Parameter, Tensor], None], param: nn.Parameter, loaded: Tensor) -> None:
    """A weight loader of scales: the kernel's conversion is exact with powers of two only.

    Raises:
        ValueError: there are others.
    """
    if loaded.dtype == torch.float32 and not (torch.frexp(loaded).mantissa == 0.5).all():
        raise ValueError(f"scales of wo_a are no powers of two: {VARIABLE}=bf16 takes any")
    load(param, loaded)


def kernels(kept: str) -> list[Callable[[], object]]:
    """What compiles the kernels of a forward on Hopper, ahead of it."""
    if kept == "bf16":
        return []
    from dsv4_kernels.linear import fp8_weight_gpu as gpu

    tiles = dict.fromkeys(gpu.chosen(tokens) for tokens in range(1, most_tokens_in_fp8(kept) + 1))
    return [partial(gpu.compile, gpu.Configuration(tile, True, True), "sm_90a") for tile in tiles]
