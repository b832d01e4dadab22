"""RoPE of the layers: it rotates queries, window rows, entries and indexer keys, and the attention's result back."""

from __future__ import annotations

from torch import Tensor, nn

from dsv4_kernels.rope import apply_rope_in_place
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import LayerKind


class Rotation(nn.Module):
    """Partial RoPE of one kind of layer: the last `qk_rope_head_dim` channels of a row (specification, section 3.2)."""

    def __init__(self, config: Config, kind: LayerKind) -> None:
        super().__init__()
        self.register_buffer("frequencies", config.rope(kind).frequencies(), persistent=False)

    def undo(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x [T, ..., D]`, rotated back in place."""
        return apply_rope_in_place(x, positions, self.frequencies, inverse=True)
