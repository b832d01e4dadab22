"""Base classes between SGLang's classes and ours, which use private methods and attributes of SGLang 0.5.23.

Our classes call and override public methods of these bases instead; `tests/test_layering.py` finds private names of
SGLang in other modules.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.attention.verify_mask import TreeMaskMode, VerifyMask, tree_mask_numel
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.components import EvictLayer, TreeComponent

from sglang_dsv4.seam.compat import BatchedPenalizer, DeepSeekV4TokenToKVPool, UnifiedRadixCache, UnifiedTreeCore

if TYPE_CHECKING:
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.cache_action import CacheAction, ComponentAction
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode


class SnapshotAttentionBackend(AttentionBackend):
    """An attention backend whose metadata holds copies of everything that it reads from SGLang's tables."""

    def __init__(self) -> None:
        super().__init__()
        self.describe_drafts(0, 1, "cpu")

    def describe_drafts(self, requests: int, draft_tokens: int, device: torch.device | str) -> None:
        """Allocate the mask into which SGLang writes the tree of drafts, for the requests of the largest CUDA graph.

        Chains of drafts need no mask, so it has SGLang's smallest kind; the default kind covers the whole context.
        """
        cells = tree_mask_numel(TreeMaskMode.QLEN_ONLY, requests, draft_tokens, 0)
        buffer = torch.zeros(cells, dtype=torch.bool, device=device)
        self._verify_mask = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs=requests, is_read=False)

    @property
    def verify_mask(self) -> VerifyMask:
        """The mask into which SGLang writes the tree of drafts."""
        return self._verify_mask

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """The point after which SGLang may write its tables; its draft-extend runner allows none inside a graph."""
        return SharedReadEnds.POST_REPLAY if fm.is_draft_extend_v2() else super().shared_read_ends(fm)

    def _snapshot_prefill_shared_reads(self, forward_batch: ForwardBatch, *, num_qo_tokens: int) -> SharedReadEnds:
        return SharedReadEnds.PRE_REPLAY


class ModelBuiltConfig(QuantizationConfig):
    """A quantisation config that the model builds, not one that a checkpoint names."""

    @staticmethod
    def get_config_filenames() -> list[str]:
        """An empty list: no file is read."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelBuiltConfig:
        """Not supported: the model builds the config.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{cls.__name__} is built by the model, not from a checkpoint")


class LogitsProcessorWithHead(LogitsProcessor):
    """SGLang's logits processor; the product by the head, and the gathering of a group's logits, are a subclass's."""

    def lm_head_logits(self, hidden_states: torch.Tensor, lm_head: ParallelLMHead) -> torch.Tensor:
        """The logits [T, vocabulary of this rank] of `hidden_states [T, d]`."""
        raise NotImplementedError

    def _compute_lm_head(
        self,
        hidden_states: torch.Tensor,
        lm_head: ParallelLMHead,
        embedding_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self.lm_head_logits(hidden_states, lm_head)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [T, V] of this rank's rows, from the parts [T, V / ranks] of the ranks that have these rows."""
        raise NotImplementedError

    def _gather_attn_tp_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return self.gather_logits(logits)


class RingWindowKVPool(DeepSeekV4TokenToKVPool):
    """A subclass of SGLang's DeepSeek-V4 pool that allocates nothing and has no paged sliding window.

    With `needs_paged_swa_allocator` False SGLang uses its plain paged allocator over FULL tokens, and a radix tree of
    FULL pages. The constructor of `DeepSeekV4TokenToKVPool`, which would allocate paged pools, is not called.
    """

    def __init__(self, request_slots: int, window_tokens: int, ratios: tuple[int, ...], **sizes: Any) -> None:
        """Set the attributes that SGLang reads; `sizes` are `KVCache`'s, `ratios` the compression ratios above 0."""
        KVCache.__init__(self, **sizes)
        # SGLang's DSV4 code reads these to decide which allocator owns the sliding window.
        self.needs_paged_swa_allocator = False
        self.request_window = None
        self.swa_kv_pool = None
        self.swa_req_ring_size = None
        self.full_to_swa_index_mapping = None
        self.swa_valid_from = None
        self._unified_kv = False
        self._unified_kv_fp8 = False
        self.num_req_slots = request_slots
        self.sliding_window = window_tokens
        self.present_ratios = ratios


class OpenTreeCore(UnifiedTreeCore):
    """SGLang's Python tree core, with public methods for tree components and for another walk."""

    def match_page_aligned(self, key: RadixKey, params: MatchPrefixParams) -> MatchResult:
        """The match of a page-aligned key that is not empty; a subclass may override the walk."""
        return super()._match_prefix_helper(key, params)

    def _match_prefix_helper(self, key: RadixKey, params: MatchPrefixParams) -> MatchResult:
        return self.match_page_aligned(key, params)

    def split(
        self, child: UnifiedTreeNode, length: int
    ) -> tuple[UnifiedTreeNode, CacheAction | ComponentAction | None]:
        """The new parent of a node that is split `length` tokens after its start, and the action left to the cache."""
        return self._split_node(child.key, child, length)

    def match_result(
        self,
        params: MatchPrefixParams,
        *,
        node: UnifiedTreeNode,
        matched_tokens: int,
        block_tokens: int,
        last_visited: UnifiedTreeNode,
        action: CacheAction | ComponentAction | None,
    ) -> MatchResult:
        """SGLang's result for a walk over tokens on the device.

        Args:
            node: the node at which the match ends, `matched_tokens` from the root.
            block_tokens: number of the key's tokens whose blocks are stored.
            last_visited: the last node of the walk.
            action: the action of a split; None if no node was split.
        """
        return self._match_post_processor(
            params,
            [range(matched_tokens)],  # only its length is read
            node,
            node,
            1,
            block_tokens,
            action,
            last_visited_node_id=None if last_visited is self.root_node else last_visited.id,
            device_validators=tuple(part.create_match_validator(match_device_only=True) for part in self.components),
        )

    @staticmethod
    def with_host_hit(result: MatchResult, tokens: int) -> MatchResult:
        """The match, extended by `tokens` tokens that are in host memory."""
        return result._replace(host_hit_length=tokens)

    def before_eviction(self, node: UnifiedTreeNode) -> None:
        """Called before the tree frees the node's FULL slots, whose bytes are still valid."""

    def _evict_component_and_detach_lru(
        self,
        node: UnifiedTreeNode,
        comp: TreeComponent,
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[CacheAction | ComponentAction],
        target: EvictLayer = EvictLayer.DEVICE,
        tracker: dict[ComponentType, int] | None = None,
    ) -> tuple[int, int]:
        if comp.component_type == BASE_COMPONENT_TYPE and EvictLayer.DEVICE in target and not node.evicted:
            self.before_eviction(node)
        return super()._evict_component_and_detach_lru(
            node, comp, device_frees, host_frees, cache_actions, target, tracker
        )

    def take_off(self, node_id: int, component: TreeComponent) -> None:
        """Remove a component's value from a node, which keeps its blocks."""
        self._evict_component_and_detach_lru(
            self.node_by_id(node_id), component, defaultdict(list), defaultdict(list), cache_actions=[]
        )


class RankedRadixCache(UnifiedRadixCache):
    """SGLang's radix cache, with a reduction over its ranks."""

    def least_of_ranks(self, values: list[int]) -> list[int]:
        """The least of each value over the ranks that keep equal trees; each of these ranks must call it."""
        agreed = torch.tensor(values, dtype=torch.int64)
        self._all_reduce_attn_groups(agreed, torch.distributed.ReduceOp.MIN)
        return agreed.tolist()


class RowPenaliser(BatchedPenalizer):
    """Base of our penalisers: the state is tensors with one row a request.

    SGLang makes a penaliser for each batch, filters and merges it with the batch, and prepares it if a request of the
    batch needs it.
    """

    rows: dict[str, torch.Tensor]  # [B, ...] each; none before it is prepared

    def is_needed_by(self, req: Req) -> bool:
        """Whether the penaliser does anything for this request."""
        raise NotImplementedError

    def rows_of(self, reqs: list[Req], device: str) -> dict[str, torch.Tensor]:
        """The tensors [B, ...] of requests that have no answer yet."""
        raise NotImplementedError

    def count(self, tokens: torch.Tensor) -> None:
        """Count the next token of every request: tokens [B] int64."""
        raise NotImplementedError

    def penalise(self, logits: torch.Tensor) -> None:
        """Apply the penalty of each request's next token to `logits [B, V]`, in place."""
        raise NotImplementedError

    def _is_required(self) -> bool:
        return any(self.is_needed_by(req) for req in self.orchestrator.reqs())

    def _prepare(self) -> None:
        self.rows = self.rows_of(self.orchestrator.reqs(), self.orchestrator.device)

    def _cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        self.count(output_ids)

    def _apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.penalise(logits)
        return logits

    def _filter(self, keep_indices: torch.Tensor) -> None:
        self.rows = {name: rows[keep_indices] for name, rows in self.rows.items()}

    def _merge(self, their: RowPenaliser) -> None:
        self.rows = {name: torch.cat([rows, their.rows[name]]) for name, rows in self.rows.items()}

    def _teardown(self) -> None:
        self.rows = {}


class PassiveTreeComponent(TreeComponent):
    """A tree component whose values SGLang does not evict, and which pins nothing for sessions."""

    def _evict_device_start(self, request_cnt: int) -> None:
        return None

    def _evict_device_next_node(
        self,
        tracker: dict[ComponentType, int],
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[CacheAction | ComponentAction],
    ) -> None:
        return None

    def _evict_device_end(self) -> None:
        return None

    def _dec_session_coverage(self, session_id: str, leaf: UnifiedTreeNode) -> None:
        return None

    def _advance_session_coverage(
        self, session_id: str, leaf: UnifiedTreeNode, old_ancestor: UnifiedTreeNode | None
    ) -> None:
        return None

    def _recede_session_coverage(
        self, session_id: str, leaf: UnifiedTreeNode, fallback: UnifiedTreeNode | None
    ) -> None:
        return None
