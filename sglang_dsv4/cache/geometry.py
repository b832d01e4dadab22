"""Dimensions of the caches: layer ratios, row sizes and ring lengths, in one frozen dataclass.

Three address spaces (DeepSeek-V4 specification, sections 3.3, 3.4 and 3.6):

* `position`: the index of a token in its sequence.
* `full_slot`: the token's index in SGLang's address space of 256-token pages. Entry j of ratio r, which covers
  positions [j*r, (j+1)*r), is in row `full_slot(j*r) // r` of its layer's entry pool.
* `dsv4_radix_cache.ring.ring_row`: the row of a request slot and position in a ring. Rings hold the rows that only the
  running request needs: the sliding window, and the raw rows of the compressors' open compression groups.

This module does not import SGLang and allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_kernels.kv_layout import ROPE_DIM, ROW_DIM, RowFormat
from sglang_dsv4.cache.draft_rollback import state_ring_rows, window_ring_rows
from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS, HCA_RATIO, SWA_RATIO, WINDOW_TOKENS, LayerKind

RATIOS = tuple(kind.ratio for kind in LayerKind)
FP4_INDEX_DIM = 128
"""Channels of the release's indexer keys; `index_row_bytes_fp4` itself accepts any multiple of 32."""


def overlap_groups(ratio: int) -> int:
    """Compression groups of raw rows that one entry of a CSA or HCA layer is made of (section 3.4)."""
    return LayerKind(ratio).groups


@dataclass(frozen=True)
class PoolGeometry:
    """Dimensions of every pool of one worker.

    Attributes:
        ratios: compression ratio of each layer held here, 0 (SWA), 4 (CSA) or 128 (HCA).
        first_layer: model layer id of `ratios[0]`.
        row_dim, rope_dim: channels of a window row or entry, and the number of its last channels that are rotated.
        index_dim: channels of an indexer key (CSA layers only).
        window_tokens: rows of the sliding window that a query reads, its own included.
        draft_tokens: tokens that one speculative step writes for a request; 0 without speculation.
        draft_layers: SWA layers of the draft model; the target's plan counts their rings.
        row_format, index_format: byte format of window rows and entries, and of indexer keys.
        dtype: dtype of plain rows (the model's).
        transfers: whether the pool sends pages to another server, or receives them (`transfer`).
    """

    ratios: tuple[int, ...]
    first_layer: int = 0
    row_dim: int = 512
    rope_dim: int = 64
    index_dim: int = 128
    window_tokens: int = WINDOW_TOKENS
    draft_tokens: int = 0
    draft_layers: int = 0
    row_format: RowFormat = RowFormat.PLAIN
    index_format: RowFormat = RowFormat.PLAIN
    dtype: torch.dtype = torch.bfloat16
    transfers: bool = False

    def __post_init__(self) -> None:
        """Refuse dimensions that the pools cannot hold."""
        unknown = sorted(set(self.ratios) - set(RATIOS))
        if unknown:
            raise ValueError(f"compress_ratios: expected values from {RATIOS}, found {unknown}")
        if self.row_format is RowFormat.FP8 and (self.row_dim, self.rope_dim) != (ROW_DIM, ROPE_DIM):
            raise ValueError(
                f"the fp8 row format holds rows of {ROW_DIM} channels with {ROPE_DIM} rotated; this model has "
                f"head_dim={self.row_dim}, qk_rope_head_dim={self.rope_dim}: use --kv-cache-dtype auto or bfloat16"
            )
        if self.index_format is RowFormat.INDEX_FP4 and self.index_dim != FP4_INDEX_DIM:
            raise ValueError(f"fp4 indexer keys have {FP4_INDEX_DIM} channels; this model has {self.index_dim}")
        if self.ring_rows > FULL_PAGE_TOKENS or any(self.state_rows(r) > FULL_PAGE_TOKENS for r in self.compressed):
            raise ValueError(
                f"{self.draft_tokens} draft tokens a step need rings of more than {FULL_PAGE_TOKENS} rows "
                f"(window {self.window_tokens}); use at most {FULL_PAGE_TOKENS - self.window_tokens + 1} draft tokens"
            )

    @property
    def compressed(self) -> tuple[int, ...]:
        """The ratios above 0 that occur, ascending."""
        return tuple(sorted(set(self.ratios) - {SWA_RATIO}))

    @property
    def ring_rows(self) -> int:
        """Window rows per request and layer (`draft_rollback`)."""
        return window_ring_rows(self.window_tokens, self.draft_tokens)

    def state_rows(self, ratio: int) -> int:
        """Raw compressor rows per request and layer (`draft_rollback`)."""
        return state_ring_rows(overlap_groups(ratio), ratio, self.draft_tokens)

    def state_dim(self, ratio: int, *, indexer: bool) -> int:
        """Channels of one raw compressor row: `coff * D` (section 3.4)."""
        return overlap_groups(ratio) * (self.index_dim if indexer else self.row_dim)

    def layer_ratio(self, layer_id: int) -> int:
        """Ratio of a model layer.

        Raises:
            KeyError: this worker does not hold the layer.
        """
        index = layer_id - self.first_layer
        if not 0 <= index < len(self.ratios):
            raise KeyError(
                f"layer {layer_id} is not held here; the worker has {len(self.ratios)} layers from {self.first_layer}"
            )
        return self.ratios[index]

    @property
    def packs_pages(self) -> bool:
        """Whether the HCA entries of a page are packed for transfers: in a byte format they are two runs of bytes."""
        return self.transfers and HCA_RATIO in self.ratios and self.row_format is not RowFormat.PLAIN

    def layers(self, *ratios: int) -> tuple[int, ...]:
        """Model layer ids that have one of `ratios` (all layers if none is named)."""
        return tuple(self.first_layer + i for i, r in enumerate(self.ratios) if not ratios or r in ratios)


def entries_per_page(ratio: int) -> int:
    """Entries of one 256-token page: 64 for CSA, 2 for HCA."""
    return FULL_PAGE_TOKENS // ratio
