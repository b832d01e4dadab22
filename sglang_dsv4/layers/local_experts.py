"""A rank's share of the routed experts, and where a checkpoint's matrices go in it; named as in SGLang's `FusedMoE`."""

from __future__ import annotations

from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import set_weight_attrs
from torch import Tensor, nn

from sglang_dsv4.model_config.config import Config
from sglang_dsv4.weights.updates.host_part import Part


class LocalExperts(nn.Module):
    """The `E / moe_ep_size` experts of a rank, with `I / moe_tp_size` intermediate channels each.

    Parameters are `[E_local, 2 * I_local, …]` for w1 and w3, w1's rows first, and `[E_local, d, …]` for w2; their last
    axis counts channels, or groups of channels. :meth:`add_parameter` declares one. Of the tensors of a checkpoint,
    `weight_loader` copies this rank's part into a parameter, `stage` into host memory.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        parallel = get_parallel()
        self.expert_ranks, self.channel_ranks = parallel.moe_ep_size, parallel.moe_tp_size
        self.num_local_experts = config.n_routed_experts // self.expert_ranks
        self.first_local_expert = parallel.moe_ep_rank * self.num_local_experts
        self.num_local_channels = config.moe_intermediate_size // self.channel_ranks
        self.channel_rank = parallel.moe_tp_rank

    def add_parameter(self, name: str, tensor: Tensor) -> None:
        """Register a tensor as a parameter that `weight_loader` fills."""
        parameter = nn.Parameter(tensor, requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": self.weight_loader})
        self.register_parameter(name, parameter)

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, name: str, shard_id: str, expert_id: int) -> None:
        """Copy this rank's part of one expert's tensor into a parameter.

        Args:
            param: one of the parameters.
            loaded: w1, w3 [I, …] or w2 [d, …], as it is stored.
            name: of the tensor in the checkpoint.
            shard_id: "w1", "w2" or "w3".
            expert_id: number of the expert among the experts of all ranks.
        """
        if (place := self._place(param, loaded, shard_id, expert_id)) is not None:
            local_expert, rows, part = place
            param.data[local_expert, rows].copy_(part)

    def stage(
        self, parts: dict[str, Part], param: nn.Parameter, loaded: Tensor, name: str, shard_id: str, expert_id: int
    ) -> None:
        """Copy this rank's part of one expert's tensor into host memory; arguments as for `weight_loader`.

        Args:
            parts: the parts of this module that a weight update has, by name; a part is added if it has none.
        """
        if (place := self._place(param, loaded, shard_id, expert_id)) is not None:
            local_expert, rows, part = place
            matrix = "w2" if shard_id == "w2" else "w13"
            key = f"{matrix}.{local_expert}"
            if key not in parts:
                parts[key] = self._new_part(param, matrix, local_expert)
            self._put(parts[key], param, rows, part)

    def _new_part(self, param: nn.Parameter, matrix: str, local_expert: int) -> Part:
        """Host memory for one matrix, "w13" or "w2", of one local expert; `param` is the first tensor of it."""
        raise NotImplementedError

    def _put(self, part: Part, param: nn.Parameter, rows: slice, values: Tensor) -> None:
        """Copy some rows of a parameter's values into a part of :meth:`_new_part`."""
        raise NotImplementedError

    def _place(
        self, param: nn.Parameter, loaded: Tensor, shard_id: str, expert_id: int
    ) -> tuple[int, slice, Tensor] | None:
        """The local expert, its parameter's rows and this rank's part of a tensor; None for another rank's expert."""
        local_expert = expert_id - self.first_local_expert
        if not 0 <= local_expert < self.num_local_experts:
            return None
        rows, width = param.shape[1:]
        if shard_id == "w2":
            return local_expert, slice(0, rows), loaded[:, self.channel_rank * width : (self.channel_rank + 1) * width]
        first, rows = 0 if shard_id == "w1" else rows // 2, rows // 2
        part = loaded[self.channel_rank * rows : (self.channel_rank + 1) * rows]
        return local_expert, slice(first, first + rows), part
