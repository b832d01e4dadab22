"""The tail checkpoints as a component of SGLang's radix tree.

SGLang's tree keeps the compressed blocks (its FULL component: pages of 256 tokens, whose compressed entries follow
them). This component hangs checkpoint ids on node ends: a match may end only at a node which carries one, an insert
splits nodes at the positions of the request's checkpoints, a split leaves the id at the end it belongs to, and a node
that is evicted takes its checkpoint along. Ids are valid whichever tier holds the bytes, so for the tree there is one
tier; slots, copies and eviction of checkpoints are decided by `dsv4_radix_cache`.

With `tiers` a checkpoint outlives its node where host memory keeps the node's pages: it is *parked*, known by its
digest alone, until the pages come back, or go from host memory too.

It takes the component slot C128: the enum of component types is closed, and SGLang fills that slot on an NPU only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.unified_cache.cache_action import CacheAction, ComponentAction, FreeComponentDeviceSlot
from sglang.srt.mem_cache.unified_cache.components import ComponentType, EvictLayer
from sglang.srt.mem_cache.unified_cache.components.base import LRURefreshPhase, next_component_uuid

from dsv4_radix_cache.page_chain import PageChain
from dsv4_radix_cache.requests import Match, TailRequests
from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS
from sglang_dsv4.seam.bases import PassiveTreeComponent

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_dsv4.prefix.tiers import PrefixTiers

TAIL = ComponentType.C128
META_KEY = "prefix_cache"  # in a response's meta_info


def tail_receipt(req: Req) -> int | None:
    """What pins the checkpoint of the request's match: its part of the request's lock on the tree."""
    lock = getattr(req, "lock", None)
    return None if lock is None else lock.receipt.component_lock_uuids.get(TAIL)


class TailComponent(PassiveTreeComponent):
    """Checkpoint ids on node ends. `cache.tails` must be set before the tree is built."""

    component_type = TAIL

    def __init__(self, cache: UnifiedRadixCache, params: CacheInitParams) -> None:
        """`cache` carries the engine's `TailRequests` as `tails`."""
        super().__init__(cache, params)
        self.tails: TailRequests = cache.tails
        self._id_at: dict[int, int] = {}  # node id -> checkpoint id
        self._node_of: dict[int, int | None] = {}  # checkpoint id -> node id; None: parked
        self._by_digest: dict[bytes, int] = {}  # prefix -> checkpoint id
        self._digest_of: dict[int, bytes] = {}
        self._end_of: dict[int, bytes] = {}  # node id -> the prefix that it ends; with `tiers`
        self.inserting: Req | None = None  # the request whose insert is under way
        self.tiers: PrefixTiers | None = None

    def reset(self) -> None:
        """The tree was emptied: forget every checkpoint and request."""
        self.tails.reset()
        for table in (self._id_at, self._node_of, self._by_digest, self._digest_of, self._end_of):
            table.clear()
        self.inserting = None

    def checkpoints(self) -> dict[int, int]:
        """Checkpoint id -> node id, of those that are on nodes."""
        self.drop_lost()
        return {checkpoint_id: node_id for checkpoint_id, node_id in self._node_of.items() if node_id is not None}

    def drop_lost(self) -> None:
        """Take checkpoints off their nodes that the store has lost since the last call: before every use of the tree.

        They are lost while a forward is prepared; the nodes keep their blocks and can no longer end a match.
        """
        self._take_off(self.tails.take_lost())

    # Match

    def create_match_validator(self, match_device_only: bool = False) -> Callable[[UnifiedTreeNode], bool]:
        """A match ends at a node that carries a checkpoint, in whichever tier."""
        return lambda node: node.component_data[TAIL].value is not None

    def deepest(self, key: RadixKey, req: Req | None) -> tuple[int, int | None]:
        """Position and node of the deepest checkpoint on a page-aligned key; (0, None) if there is none."""
        self.drop_lost()
        if not self._by_digest:
            return 0, None
        digests = self.digests(key, req)
        for pages in range(len(digests), 0, -1):
            node_id = self._node_of.get(self._by_digest.get(digests[pages - 1]))
            if node_id is not None:
                return pages * FULL_PAGE_TOKENS, node_id
        return 0, None

    def digests(self, key: RadixKey, req: Req | None, pages: int | None = None) -> list[bytes]:
        """Digests of a key's pages, all of them or the first `pages`."""
        return self._chain(key, req).digests(key.token_ids, len(key) // FULL_PAGE_TOKENS if pages is None else pages)

    @staticmethod
    def _chain(key: RadixKey, req: Req | None) -> PageChain:
        """The request's digests, kept with it because a waiting request is matched again in every round."""
        namespace = (key.extra_key, key.cache_salt)
        chain: PageChain | None = getattr(req, "tail_chain", None)
        if chain is None or (chain.namespace, chain.overlap_tokens) != (namespace, int(key.is_bigram)):
            chain = PageChain(namespace, overlap_tokens=int(key.is_bigram))
            if req is not None:
                req.tail_chain = chain
        return chain

    def finalize_match_result_in_cache(self, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        """Note where the request's prefix ends, and how far its blocks would have reached; the last match counts."""
        req, key = params.req, params.key
        if self.tiers is not None:
            host_tokens = self.host_hit_tokens(key, req, result.device_prefix_len)
            result = self.tree_core.with_host_hit(result, host_tokens)
        if req is not None:
            tokens = len(key.token_ids)
            req.tail_match = Match(
                prompt_tokens=tokens,
                checkpoint_id=self._id_at.get(result.best_match_node),
                position=result.device_prefix_len,
                block_tokens=result.full_kv_hit_length,
                limit_tokens=tokens if key.limit is None else key.limit,
                salted=req.extra_key is not None or req.cache_salt is not None,
            )
        return result

    @staticmethod
    def note_load(req: Req, checkpoint_id: int, tokens: int, from_storage: int) -> None:
        """A request's host hit of `tokens` came, `from_storage` of them by way of the storage."""
        match: Match = req.tail_match
        position = match.position + tokens
        req.tail_match = replace(
            match,
            checkpoint_id=checkpoint_id,
            position=position,
            block_tokens=max(match.block_tokens, position),
            host_tokens=tokens - from_storage,
            storage_tokens=from_storage,
        )

    def checkpoint_at(self, node_id: int) -> int:
        """The checkpoint that a node carries."""
        return self._id_at[node_id]

    def host_hit_tokens(self, key: RadixKey, req: Req | None, device_tokens: int) -> int:
        """How much further than `device_tokens` host memory has a prefix of a key, up to its deepest checkpoint."""
        digests, begin = self.digests(key, req), device_tokens // FULL_PAGE_TOKENS
        for page in range(self.tiers.reach(digests, begin), begin, -1):
            if self.parked(digests[page - 1]) is not None:
                return (page - begin) * FULL_PAGE_TOKENS
        return 0

    def refresh_lru(self, phase: LRURefreshPhase, node: UnifiedTreeNode, root_node: UnifiedTreeNode) -> None:
        """Recency is the store's: a checkpoint is renewed when a request resumes from it, not when a probe passes."""

    # Insert

    def prepare_for_caching_req(
        self, req: Req, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """Remember whose insert this is, and tell the request how far it was served from the cache."""
        self.inserting = req
        if is_finished:
            self.tails.ended(*self._holder(req), token_ids_len)
        self.drop_lost()
        match: Match | None = getattr(req, "tail_match", None)
        if match is not None and match.report is not None:
            # SGLang copies these lists into the response's meta_info. A retracted request keeps its first account.
            req.customized_info = {META_KEY: [match.report.as_meta()], **(req.customized_info or {})}
        return None

    def commit_insert_component_data(
        self,
        node: UnifiedTreeNode,
        is_new_leaf: bool,
        params: InsertParams,
        result: InsertResult,
        cache_actions: list[CacheAction | ComponentAction],
    ) -> None:
        """Hang the request's checkpoints on the ends of the nodes that end at their positions, splitting where none
        does."""
        if self.inserting is None:
            return
        end = result.prefix_len + (len(node.key) if is_new_leaf else 0)
        slot, generation = self._holder(self.inserting)
        pending = self.tails.to_publish(slot, generation, end)
        if not pending:
            return
        digests = self._chain(params.key, self.inserting).digests(params.key.token_ids, end // FULL_PAGE_TOKENS)
        for position, checkpoint_id in pending:
            while end - len(node.key) >= position:
                end -= len(node.key)
                node = node.parent
            if end != position:
                cut = len(node.key) - (end - position)
                node, action = self.tree_core.split(node, cut)
                end = position
                if action is not None:
                    cache_actions.append(action)
            self._attach(node, checkpoint_id, digests[position // FULL_PAGE_TOKENS - 1])
            self.tails.published(slot, position)

    def cleanup_after_caching_req(
        self,
        req: Req,
        is_finished: bool,
        insert_result: InsertResult | None = None,
        insert_params: InsertParams | None = None,
    ) -> None:
        """A finished or retracted request gives back what it didn't publish; one that goes on needs no pin."""
        self.inserting = None
        if is_finished:
            self.tails.finished(*self._holder(req))
        else:
            self.tails.unpin(tail_receipt(req))
        self.cache.refresh_metrics()

    def _holder(self, req: Req) -> tuple[int, int]:
        """The request slot and its generation: what the ledger calls the request."""
        slot = req.kv.req_pool_idx
        return slot, int(self.cache.req_to_token_pool.req_generation[slot])

    def _attach(self, node: UnifiedTreeNode, checkpoint_id: int, digest: bytes) -> None:
        if node.id in self._id_at:  # an equal request was faster
            self.tails.store.release(checkpoint_id)
            return
        self.drop_parked(digest)
        root = self.tree_core.root_node
        above = node.parent
        while above is not root and above.id not in self._id_at:
            above = above.parent
        below: list[int] = []
        stack = list(node.children.values())
        while stack:
            descendant = stack.pop()
            found = self._id_at.get(descendant.id)
            if found is None:
                stack.extend(descendant.children.values())
            else:
                below.append(found)
        self._by_digest[digest], self._digest_of[checkpoint_id] = checkpoint_id, digest
        self._place(node, checkpoint_id)
        self._take_off(self.tails.store.publish(checkpoint_id, self._id_at.get(above.id), below))
        if self.tiers is not None and self.tiers.storage is not None:
            self.tiers.storage.tail_published(digest, checkpoint_id)

    def _place(self, node: UnifiedTreeNode, checkpoint_id: int) -> None:
        self._id_at[node.id], self._node_of[checkpoint_id] = checkpoint_id, node.id
        self.tree_core.set_component_device_value(node.id, TAIL, torch.tensor([checkpoint_id]))

    # Parked

    def parked(self, digest: bytes) -> int | None:
        """The checkpoint at the end of a prefix that is not in the tree."""
        checkpoint_id = self._by_digest.get(digest)
        return checkpoint_id if checkpoint_id is not None and self._node_of[checkpoint_id] is None else None

    def checkpoint_of(self, digest: bytes) -> int | None:
        """The checkpoint at the end of a prefix, on a node or parked."""
        return self._by_digest.get(digest)

    def drop_parked(self, digest: bytes) -> None:
        """Release a parked checkpoint: its pages are gone, or it is taken anew. No-op if there is none."""
        checkpoint_id = self.parked(digest)
        if checkpoint_id is not None:
            self._forget(checkpoint_id)
            self.tails.store.release(checkpoint_id)

    def park(self, digests: Sequence[bytes], checkpoint_id: int) -> None:
        """Take over a checkpoint, held by a request, at the end of a prefix that host memory has."""
        digest = digests[-1]
        assert digest not in self._by_digest, f"prefix {digest.hex()} has a checkpoint"
        before = next((self._by_digest[d] for d in reversed(digests[:-1]) if d in self._by_digest), None)
        self._by_digest[digest], self._digest_of[checkpoint_id] = checkpoint_id, digest
        self._node_of[checkpoint_id] = None
        self._take_off(self.tails.store.publish(checkpoint_id, before))

    def unpark(self, node_id: int, digests: Sequence[bytes], begin: int) -> None:
        """The tree has a prefix again: hang its checkpoints behind page `begin` on nodes.

        Args:
            node_id: the node that ends with the prefix.
            digests: of its pages.
            begin: pages of it that the tree had all along.
        """
        node, end = self.tree_core.node_by_id(node_id), len(digests)
        for page in range(len(digests), begin, -1):
            checkpoint_id = self.parked(digests[page - 1])
            if checkpoint_id is None:
                continue
            while end - len(node.key) // FULL_PAGE_TOKENS >= page:
                end -= len(node.key) // FULL_PAGE_TOKENS
                node = node.parent
            if end != page:
                node, action = self.tree_core.split(node, len(node.key) - (end - page) * FULL_PAGE_TOKENS)
                end = page
                assert action is None, f"a split of nodes that SGLang moves: {action}"
            self._place(node, checkpoint_id)

    # Split, lock

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """The id stands at the end of the old node, which is the end of `child`; the new inner end has none."""
        end = self._end_of.get(child.id)
        if end is not None:  # else it is being inserted: `note_ends`
            self._end_of[new_parent.id] = self.tiers.pages_to(end, len(child.key) // FULL_PAGE_TOKENS + 1)[0]

    def note_ends(self, node_id: int, digests: Sequence[bytes]) -> None:
        """The tree has a prefix now, which ends with this node: note where its new nodes end."""
        node, end = self.tree_core.node_by_id(node_id), len(digests)
        while end and node.id not in self._end_of:
            self._end_of[node.id] = digests[end - 1]
            end -= len(node.key) // FULL_PAGE_TOKENS
            node = node.parent

    def acquire_component_lock(
        self, node: UnifiedTreeNode, result: IncLockRefResult, lock_host: bool = False
    ) -> IncLockRefResult:
        """Pin the checkpoint of an admitted request until it is restored. It may still move between tiers."""
        self.drop_lost()
        checkpoint_id = self._id_at.get(node.id)
        if checkpoint_id is not None and not lock_host:
            receipt = next_component_uuid(TAIL)
            self.tails.pin(receipt, checkpoint_id)
            result.set_lock_uuid(TAIL, receipt)
        return result

    def release_component_lock(self, node: UnifiedTreeNode, params: DecLockRefParams, lock_host: bool = False) -> None:
        """Undo it, unless the restore already did."""
        if not lock_host:
            self.tails.unpin(params.component_lock_uuids.get(TAIL))

    # Evict

    def before_eviction(self, node: UnifiedTreeNode) -> None:
        """The tree is about to give up a node's pages."""
        end = self._end_of.pop(node.id, None)
        if end is not None:
            self.tiers.evicting(self.tiers.pages_to(end, len(node.key) // FULL_PAGE_TOKENS))

    def evict_component(
        self,
        node: UnifiedTreeNode,
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[CacheAction | ComponentAction],
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        """The node's blocks go, and its checkpoint with them. Counts as 0 tokens: blocks are counted once."""
        self.drop_lost()
        data = node.component_data[TAIL]
        if EvictLayer.DEVICE in target and data.value is not None:
            device_frees[TAIL].append(data.value)
            self.tree_core.component_evictable_size_[TAIL] -= len(data.value)
            data.value = None
        return 0, 0

    def apply_component_action(self, action: ComponentAction) -> None:
        """Release the checkpoints of evicted nodes, or park them."""
        assert isinstance(action, FreeComponentDeviceSlot), f"unexpected action {type(action).__name__}"
        for ids in action.indices:
            for checkpoint_id in ids.tolist():
                if self.tiers is not None and self._digest_of[checkpoint_id] in self.tiers.pages:
                    del self._id_at[self._node_of[checkpoint_id]]
                    self._node_of[checkpoint_id] = None
                else:
                    self._forget(checkpoint_id)
                    self.tails.store.release(checkpoint_id)

    def _take_off(self, lost: list[int]) -> None:
        for checkpoint_id in lost:
            node_id = self._forget(checkpoint_id)
            if node_id is not None:
                self.tree_core.take_off(node_id, self)

    def _forget(self, checkpoint_id: int) -> int | None:
        del self._by_digest[self._digest_of.pop(checkpoint_id)]
        node_id = self._node_of.pop(checkpoint_id)
        self._id_at.pop(node_id, None)
        return node_id

    def eviction_priority(self, is_leaf: bool) -> int:
        """The lowest: whatever goes from a node, its checkpoint goes along."""
        return 0
