"""The tails on the nodes of SGLang's radix tree, as a component of that tree.

SGLang's tree keeps the compressed blocks (its FULL component: pages of 256 tokens, which determine the rows of their
compressed entries). This component attaches tail ids to node ends: a match may end only at a node with a tail, an
insert splits nodes at the positions of the request's tails, a split leaves the id at the end it belongs to, and a node
that is evicted gives up its tail. Ids are valid whichever tier holds the bytes, so the tree knows one tier; slots,
copies and eviction of tails are decided by `dsv4_radix_cache.tail_store`.

With a host tier a tail outlives its node if host memory keeps the node's pages: it is *detached*, found by its digest
alone, until the pages come back to the tree, or leave host memory too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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

from dsv4_radix_cache.ledger import Ledger, Match
from dsv4_radix_cache.pages import PAGE_TOKENS, whole_pages
from sglang_dsv4.prefix.host_tier import HostTier
from sglang_dsv4.prefix.request_state import TAIL, chain_of, match_of, set_match, show_report, tail_receipt
from sglang_dsv4.prefix.stored_prefix import stored_tokens
from sglang_dsv4.seam.bases import PassiveTreeComponent

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class TailNodes(PassiveTreeComponent):
    """Tail ids on node ends."""

    component_type = TAIL

    def __init__(
        self,
        cache: UnifiedRadixCache,
        params: CacheInitParams,
        *,
        ledger: Ledger,
        host: HostTier | None = None,
        on_attached: Callable[[bytes, int], None] = lambda digest, tail_id: None,
    ) -> None:
        """Start with a tree without tails.

        Args:
            cache: SGLang's cache, whose component this is.
            params: SGLang's.
            ledger: the engine's ledger, with its tail store.
            host: the host tier; None without `--enable-hierarchical-cache`.
            on_attached: called with (digest, tail id) of each tail that a request's insert attached to a node.
        """
        super().__init__(cache, params)
        self._ledger, self._host, self._on_attached = ledger, host, on_attached
        self._id_at: dict[int, int] = {}  # node id -> tail id
        self._node_of: dict[int, int | None] = {}  # tail id -> node id; None: detached
        self._by_digest: dict[bytes, int] = {}  # prefix -> tail id
        self._digest_of: dict[int, bytes] = {}
        self._end_of: dict[int, bytes] = {}  # node id -> the prefix that it ends; with a host tier
        self._inserting: Req | None = None

    def reset(self) -> None:
        """Forget every tail and request: the tree was emptied."""
        self._ledger.reset()
        for table in (self._id_at, self._node_of, self._by_digest, self._digest_of, self._end_of):
            table.clear()
        self._inserting = None

    @property
    def inserting(self) -> Req | None:
        """The request whose insert is under way."""
        return self._inserting

    def on_nodes(self) -> dict[int, int]:
        """Tail id -> node id, for the tails on nodes."""
        self.drop_evicted()
        return {tail_id: node_id for tail_id, node_id in self._node_of.items() if node_id is not None}

    def drop_evicted(self) -> None:
        """Remove the tails that the store has evicted since the last call from their nodes; call before using the tree.

        Tails are evicted while a forward is prepared; the nodes keep their blocks and can no longer end a match.
        """
        self._remove(self._ledger.pop_evicted())

    # Match

    def create_match_validator(self, match_device_only: bool = False) -> Callable[[UnifiedTreeNode], bool]:
        """A function that says whether a match may end at a node: whether the node has a tail, in any tier."""
        return lambda node: node.component_data[TAIL].value is not None

    def deepest(self, key: RadixKey, req: Req | None) -> tuple[int, int | None]:
        """Position and node of the deepest tail on a page-aligned key; (0, None) if there is none."""
        self.drop_evicted()
        if not self._by_digest:
            return 0, None
        digests = self.digests(key, req)
        for pages in range(len(digests), 0, -1):
            node_id = self._node_of.get(self._by_digest.get(digests[pages - 1]))
            if node_id is not None:
                return pages * PAGE_TOKENS, node_id
        return 0, None

    def digests(self, key: RadixKey, req: Req | None, pages: int | None = None) -> list[bytes]:
        """Digests of a key's first `pages` pages; of all its whole pages if None."""
        chain = chain_of(req, (key.extra_key, key.cache_salt), int(key.is_bigram))
        return chain.digests(key.token_ids, whole_pages(len(key)) if pages is None else pages)

    def finalize_match_result_in_cache(self, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        """The result with its host hit; notes where the request's prefix ends and how far its blocks extend.

        A later match of the request replaces this one.
        """
        req, key = params.req, params.key
        if self._host is not None:
            host_tokens = self.host_hit_tokens(key, req, result.device_prefix_len)
            result = self.tree_core.with_host_hit(result, host_tokens)
        if req is not None:
            tokens, last = len(key.token_ids), result.last_visited_node_id
            node = self.tree_core.root_node if last is None else self.tree_core.node_by_id(last)
            match = Match(
                prompt_tokens=tokens,
                tail_id=self._id_at.get(result.best_match_node),
                position=result.device_prefix_len,
                block_tokens=result.full_kv_hit_length,
                limit_tokens=tokens if key.limit is None else key.limit,
                salted=req.extra_key is not None or req.cache_salt is not None,
                stored=partial(stored_tokens, node, result.full_kv_hit_length, key),
            )
            set_match(req, match)
        return result

    def host_hit_tokens(self, key: RadixKey, req: Req | None, device_tokens: int) -> int:
        """Tokens beyond `device_tokens` that host memory has of a key's prefix, up to its deepest tail."""
        digests, begin = self.digests(key, req), whole_pages(device_tokens)
        for page in range(self._host.first_missing(digests, begin), begin, -1):
            if self.detached(digests[page - 1]) is not None:
                return (page - begin) * PAGE_TOKENS
        return 0

    def refresh_lru(self, phase: LRURefreshPhase, node: UnifiedTreeNode, root_node: UnifiedTreeNode) -> None:
        """Do nothing: the tail store renews a tail when a request resumes from it, not when a probe passes its node."""

    # Insert

    def prepare_for_caching_req(
        self, req: Req, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """Remember the inserting request, and show it how much of its prompt was reused."""
        self._inserting = req
        if is_finished:
            self._ledger.ended(*self._holder(req), token_ids_len)
        self.drop_evicted()
        show_report(req)
        return None

    def commit_insert_component_data(
        self,
        node: UnifiedTreeNode,
        is_new_leaf: bool,
        params: InsertParams,
        result: InsertResult,
        cache_actions: list[CacheAction | ComponentAction],
    ) -> None:
        """Attach the request's tails to the nodes that end at their positions, splitting nodes where none does."""
        if self._inserting is None:
            return
        end = result.prefix_len + (len(node.key) if is_new_leaf else 0)
        slot, generation = self._holder(self._inserting)
        pending = self._ledger.to_publish(slot, generation, end)
        if not pending:
            return
        digests = self.digests(params.key, self._inserting, whole_pages(end))
        for position, tail_id in pending:
            while end - len(node.key) >= position:
                end -= len(node.key)
                node = node.parent
            if end != position:
                cut = len(node.key) - (end - position)
                node, action = self.tree_core.split(node, cut)
                end = position
                if action is not None:
                    cache_actions.append(action)
            self._attach(node, tail_id, digests[whole_pages(position) - 1])
            self._ledger.published(slot, position)

    def cleanup_after_caching_req(
        self,
        req: Req,
        is_finished: bool,
        insert_result: InsertResult | None = None,
        insert_params: InsertParams | None = None,
    ) -> None:
        """Release the unpublished tails of a finished or retracted request; unpin the tail if the request goes on."""
        self._inserting = None
        if is_finished:
            self._ledger.finished(*self._holder(req))
        else:
            self._ledger.unpin(tail_receipt(req))
        self.cache.refresh_metrics()

    def _holder(self, req: Req) -> tuple[int, int]:
        """Request slot and generation, which name the request in the ledger."""
        slot = req.kv.req_pool_idx
        return slot, int(self.cache.req_to_token_pool.req_generation[slot])

    def _attach(self, node: UnifiedTreeNode, tail_id: int, digest: bytes) -> None:
        if node.id in self._id_at:  # another request with this prefix has attached its tail already
            self._ledger.store.release(tail_id)
            return
        self.drop_detached(digest)
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
        self._by_digest[digest], self._digest_of[tail_id] = tail_id, digest
        self._set_node(node, tail_id)
        self._remove(self._ledger.store.publish(tail_id, self._id_at.get(above.id), below))
        self._on_attached(digest, tail_id)

    def _set_node(self, node: UnifiedTreeNode, tail_id: int) -> None:
        self._id_at[node.id], self._node_of[tail_id] = tail_id, node.id
        self.tree_core.set_component_device_value(node.id, TAIL, torch.tensor([tail_id]))

    # Detached tails

    def tail_of(self, digest: bytes) -> int | None:
        """The tail at the end of a prefix, on a node or detached; None if there is none."""
        return self._by_digest.get(digest)

    def detached(self, digest: bytes) -> int | None:
        """The detached tail at the end of a prefix; None if there is none."""
        tail_id = self._by_digest.get(digest)
        return tail_id if tail_id is not None and self._node_of[tail_id] is None else None

    def drop_detached(self, digest: bytes) -> None:
        """Release the detached tail of a prefix, if there is one: its pages were freed, or it is written anew."""
        tail_id = self.detached(digest)
        if tail_id is not None:
            self._forget(tail_id)
            self._ledger.store.release(tail_id)

    def add_detached(self, digests: Sequence[bytes], tail_id: int) -> None:
        """Publish a tail, so far held like a request's, as the detached tail of a prefix in host memory."""
        digest = digests[-1]
        assert digest not in self._by_digest, f"prefix {digest.hex()} has a tail"
        before = next((self._by_digest[d] for d in reversed(digests[:-1]) if d in self._by_digest), None)
        self._by_digest[digest], self._digest_of[tail_id] = tail_id, digest
        self._node_of[tail_id] = None
        self._remove(self._ledger.store.publish(tail_id, before))

    def came_back(self, node_id: int, digests: Sequence[bytes], begin: int, req: Req, from_storage: int) -> None:
        """Attach the detached tails of a prefix that is in the tree again, and extend the request's match.

        Args:
            node_id: the node that ends with the prefix; its end has a detached tail.
            digests: of the prefix's pages.
            begin: number of its pages that the tree had all along; the others were host hits.
            req: the request.
            from_storage: number of these host hits that came from the storage backend.
        """
        self.note_ends(node_id, digests)
        node, end = self.tree_core.node_by_id(node_id), len(digests)
        for page in range(len(digests), begin, -1):
            tail_id = self.detached(digests[page - 1])
            if tail_id is None:
                continue
            while end - whole_pages(len(node.key)) >= page:
                end -= whole_pages(len(node.key))
                node = node.parent
            if end != page:
                node, action = self.tree_core.split(node, len(node.key) - (end - page) * PAGE_TOKENS)
                end = page
                assert action is None, f"a split of nodes that SGLang moves: {action}"
            self._set_node(node, tail_id)
        match, position = match_of(req), len(digests) * PAGE_TOKENS
        match = replace(
            match,
            tail_id=self._id_at[node_id],
            position=position,
            block_tokens=max(match.block_tokens, position),
            host_tokens=(len(digests) - begin - from_storage) * PAGE_TOKENS,
            storage_tokens=from_storage * PAGE_TOKENS,
        )
        set_match(req, match)

    # Split, lock

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """Leave the id at the end of the old node, which is the end of `child`; the new inner end has none."""
        end = self._end_of.get(child.id)
        if end is not None:  # else the node is being inserted, and `note_ends` follows
            self._end_of[new_parent.id] = self._host.last_pages(end, whole_pages(len(child.key)) + 1)[0]

    def note_ends(self, node_id: int, digests: Sequence[bytes]) -> None:
        """Note which prefix each new node of a path ends, given the path's last node and the digests of its pages."""
        node, end = self.tree_core.node_by_id(node_id), len(digests)
        while end and node.id not in self._end_of:
            self._end_of[node.id] = digests[end - 1]
            end -= whole_pages(len(node.key))
            node = node.parent

    def acquire_component_lock(
        self, node: UnifiedTreeNode, result: IncLockRefResult, lock_host: bool = False
    ) -> IncLockRefResult:
        """Pin the tail of an admitted request until it is restored. It may still move between tiers."""
        self.drop_evicted()
        tail_id = self._id_at.get(node.id)
        if tail_id is not None and not lock_host:
            receipt = next_component_uuid(TAIL)
            self._ledger.pin(receipt, tail_id)
            result.set_lock_uuid(TAIL, receipt)
        return result

    def release_component_lock(self, node: UnifiedTreeNode, params: DecLockRefParams, lock_host: bool = False) -> None:
        """Undo the pin, unless the restore already did."""
        if not lock_host:
            self._ledger.unpin(params.component_lock_uuids.get(TAIL))

    # Evict

    def before_eviction(self, node: UnifiedTreeNode) -> None:
        """Tell the host tier that the tree is about to give up a node's pages."""
        end = self._end_of.pop(node.id, None)
        if end is not None:
            self._host.leaving_tree(self._host.last_pages(end, whole_pages(len(node.key))))

    def evict_component(
        self,
        node: UnifiedTreeNode,
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[CacheAction | ComponentAction],
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        """Remove the tail of a node whose blocks are evicted; returns 0 tokens, as the FULL component counts them."""
        self.drop_evicted()
        data = node.component_data[TAIL]
        if EvictLayer.DEVICE in target and data.value is not None:
            device_frees[TAIL].append(data.value)
            self.tree_core.component_evictable_size_[TAIL] -= len(data.value)
            data.value = None
        return 0, 0

    def apply_component_action(self, action: ComponentAction) -> None:
        """Detach the tails of evicted nodes whose pages host memory has; release the others."""
        assert isinstance(action, FreeComponentDeviceSlot), f"unexpected action {type(action).__name__}"
        for ids in action.indices:
            for tail_id in ids.tolist():
                if self._host is not None and self._digest_of[tail_id] in self._host.pages:
                    del self._id_at[self._node_of[tail_id]]
                    self._node_of[tail_id] = None
                else:
                    self._forget(tail_id)
                    self._ledger.store.release(tail_id)

    def _remove(self, evicted: list[int]) -> None:
        for tail_id in evicted:
            node_id = self._forget(tail_id)
            if node_id is not None:
                self.tree_core.take_off(node_id, self)

    def _forget(self, tail_id: int) -> int | None:
        del self._by_digest[self._digest_of.pop(tail_id)]
        node_id = self._node_of.pop(tail_id)
        self._id_at.pop(node_id, None)
        return node_id

    def eviction_priority(self, is_leaf: bool) -> int:
        """0, the lowest: a node's tail is evicted together with any other component of the node."""
        return 0
