"""The attention's weights of all heads on every rank, with which a rank attends for its own rows of a prefill.

Where heads are sharded, every rank reads the window rows and entries of every token, so that attention takes nearly as
long on four ranks as on one. Where rows are sharded and a rank has all heads, it reads what its own tokens need, and no
sum over the ranks follows. Few tokens keep the sharded heads: their time is that of the weights, which would grow.

Every rank gathers the weights from the shards of all ranks once they are loaded, and when an update has exchanged them.
A rank of four has 5.8 GB more of V4-Flash, of which wo_a in bf16 is half.

Bits are those of sharded heads: each product has the same channels in the same order, and the output is the sum of the
ranks' parts in the order of the ranks, each rounded as `rank_sum` transfers it.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.distributed.utils import all_gather_single
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from dsv4_kernels.reference.batch_invariant import sum_in_order
from sglang_dsv4.layers.after_loading import AfterLoading
from sglang_dsv4.layers.grouped_projection import GroupedProjection
from sglang_dsv4.layers.linear import Fp8Input
from sglang_dsv4.layers.rope import Rotation
from sglang_dsv4.model_config.config import WEIGHT_BLOCK, ConfigError


class AllHeads(nn.Module):
    """The products of an attention sublayer that have heads, with the heads of all ranks.

    Args:
        wq_b, wo_b: SGLang's linear layers with this rank's heads.
        wo_a: with this rank's output groups.
        sink: [local heads] fp32.
        quantises: whether the inputs of wq_b and wo_b are quantised by our kernels.

    Attributes:
        sink: [heads] fp32, of all ranks.
    """

    def __init__(
        self, wq_b: nn.Module, wo_a: GroupedProjection, wo_b: nn.Module, sink: nn.Parameter, quantises: bool
    ) -> None:
        super().__init__()
        self.ranks, self.quantises = get_parallel().tp_size, quantises
        # In a dictionary, not as attributes: the modules belong to the sublayer, and are loaded there.
        self._own = {"wq_b": wq_b, "wo_a": wo_a, "wo_b": wo_b, "sink": sink}
        self._layers: dict[str, list[_Layer]] = {}
        self.quant_method = AfterLoading(self.gather, derives=False, gathers=True)

    def gather(self) -> None:
        """Gather the weights from the ranks' shards; all ranks call it, after every load.

        Raises:
            ConfigError: the scales of a weight are not those of the checkpoint, in rows of blocks.
        """
        for name, parts in (("wq_b", 1), ("wo_b", self.ranks)):
            layer, tensors = self._own[name], {}
            _require_scales_by_rows(name, layer)
            for kind, shard in layer.named_parameters():
                self._gather(f"{name}_{kind}", shard.data)
                tensors[kind] = getattr(self, f"{name}_{kind}").chunk(parts)
            self._layers[name] = [
                _Layer(layer, {kind: of_parts[part] for kind, of_parts in tensors.items()}) for part in range(parts)
            ]
        self._gather("wo_a", self._own["wo_a"].in_model_dtype())
        self._gather("sink", self._own["sink"].data)
        if self.quantises:  # compiles DeepGEMM's kernels of the shape now, and not in the first long prompt
            weight = self.wq_b_weight
            self.queries(Fp8Input.of(torch.zeros(1, weight.shape[1], dtype=torch.bfloat16, device=weight.device)))

    def _gather(self, name: str, shard: Tensor) -> None:
        if not hasattr(self, name):
            self.register_buffer(name, shard.new_empty(self.ranks * shard.shape[0], *shard.shape[1:]), persistent=False)
        # As bytes: libraries of collectives do not know FP8.
        whole, shard = (t.contiguous().view(torch.uint8) for t in (getattr(self, name), shard))
        all_gather_single(whole, shard, group=get_tp_group().device_group)

    def queries(self, latent: Tensor | Fp8Input) -> Tensor:
        """wq_b of all heads: [T, heads * head_dim], from the normed query latent [T, q_lora_rank]."""
        return self._multiply("wq_b", latent, 0)

    def project(self, o: Tensor, positions: Tensor, rope: Rotation) -> Tensor:
        """The sublayer's output [T, d], summed over the parts of all ranks' heads.

        Args:
            o: [T, heads, head_dim], the attention's result. It may be overwritten.
            positions: [T] int64.
            rope: of the layer.
        """
        middle = self._own["wo_a"].multiply(o, positions, rope, self.wo_a)
        inputs = [Fp8Input.of(x) if self.quantises else x for x in middle.chunk(self.ranks, -1)]
        return sum_in_order([self._multiply("wo_b", x, rank) for rank, x in enumerate(inputs)])

    def _multiply(self, name: str, x: Tensor | Fp8Input, part: int) -> Tensor:
        """The product of a linear layer's method, with a part of the gathered weight."""
        return self._own[name].quant_method.apply(self._layers[name][part], x)


class _Layer:
    """A linear layer as its quantisation method reads it, with other tensors in place of its parameters.

    Raises:
        AttributeError: the method needs a tensor that is derived from this rank's shard. One that it can do without
            is not there for it.
    """

    def __init__(self, layer: nn.Module, tensors: dict[str, Tensor]) -> None:
        vars(self).update(tensors, layer=layer)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the layer
        value = getattr(self.layer, name)
        if isinstance(value, Tensor):
            raise AttributeError(f"{name} is of this rank's heads: expected a method that reads parameters alone")
        return value


def _require_scales_by_rows(name: str, layer: nn.Module) -> None:
    """Refuse a weight whose scales SGLang has rearranged: gathered shards of them are not the scales of the whole.

    Raises:
        ConfigError: names the layer.
    """
    weight = layer.weight
    expected = tuple(-(-size // WEIGHT_BLOCK) for size in weight.shape)
    for kind, scale in layer.named_parameters():
        if scale is not weight and (tuple(scale.shape) != expected or scale.dtype != torch.float32):
            raise ConfigError(
                "SGLANG_DSV4_SEQUENCE_PARALLEL",
                "attention",
                f"on or off here: {kind} of {name} is {tuple(scale.shape)} {scale.dtype}, not {expected} float32, "
                "which SGLang's product for this GPU needs (SGLANG_DSV4_FP8_LINEAR=ours keeps the checkpoint's scales)",
            )
