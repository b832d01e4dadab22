"""How ranks share a model, and which sizes of a model a number of ranks can share."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dsv4.model_config.config import WEIGHT_BLOCK, Config


@dataclass(frozen=True)
class Topology:
    """Ranks in groups with requests of their own.

    Attributes:
        ranks: all of them, `--tp-size`. They share the shared expert, and the routed experts.
        groups: `--attn-dp-size`. The ranks of a group share the attention.
        expert_ranks: `--ep-size`, the parts into which the routed experts are divided; ranks with the same part share
            its experts' channels.
        exchanges_rows: whether experts' rows are exchanged (`SGLANG_DSV4_EXPERT_ROWS`); then each rank has the whole
            shared expert.
    """

    ranks: int
    groups: int = 1
    expert_ranks: int = 1
    exchanges_rows: bool = False

    @property
    def group_size(self) -> int:
        """Ranks that share a request's attention."""
        return self.ranks // self.groups

    def problem(self, config: Config) -> str | None:
        """The part of the model that these ranks can't share, and numbers that can; None if they share all of it."""
        if self.exchanges_rows and not self.ranks == self.groups == self.expert_ranks:
            return (
                "SGLANG_DSV4_EXPERT_ROWS=exchange has the bits of one GPU, so a rank must compute whole attention and "
                f"whole experts: use --attn-dp-size {self.ranks} (got {self.groups}) and --ep-size {self.ranks} "
                f"(got {self.expert_ranks}), or unset the variable"
            )
        if config.o_groups % self.group_size:
            return (
                f"the attention's {config.o_groups} output groups can't be shared by {self.group_size} ranks: choose "
                f"--tp-size and --attn-dp-size so that their ratio divides {config.o_groups}"
            )
        if config.n_routed_experts % self.expert_ranks:
            return (
                f"{config.n_routed_experts} experts can't be divided by --ep-size {self.expert_ranks}: use a divisor "
                "of both the experts and --tp-size"
            )
        if self.exchanges_rows:
            return None  # no expert is sharded
        # A shard's channels must be whole blocks of the weight's scales. Routed experts have the same channels, and at
        # most as many ranks share them.
        block = WEIGHT_BLOCK if config.quantised_checkpoint or config.activation_block else 1
        channels = config.moe_intermediate_size
        if channels % (self.ranks * block):
            blocks = f" in blocks of {block}" if block > 1 else ""
            return (
                f"the shared expert's {channels} channels{blocks} can't be shared by --tp-size {self.ranks}: use a "
                f"divisor of {channels // block}"
            )
        return None
