"""SGLang's Python tree core, with a shortcut to the deepest tail of a prompt.

SGLang walks from the root and compares tokens node by node, for every waiting request in every round. A match can only
end at a tail, and tails are found by the digest of their prefix, so the walk starts at the deepest tail. It continues
below it, because the tree also knows how far the blocks extend: the position where the request leaves them is a branch
point to be learned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dsv4.seam.bases import OpenTreeCore

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.components import TreeComponent
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_dsv4.prefix.tail_nodes import TailNodes


class Dsv4TreeCore(OpenTreeCore):
    """The tree of a `Dsv4PrefixCache`. Every node has its pages: pages that leave the device leave the tree."""

    def __init__(
        self, params: CacheInitParams, components: dict[ComponentType, TreeComponent], nodes: TailNodes
    ) -> None:
        """`nodes` is the component among `components` that carries the tails."""
        self._nodes = nodes
        super().__init__(params, components)

    def before_eviction(self, node: UnifiedTreeNode) -> None:
        """Let the host tier save the node's pages."""
        self._nodes.before_eviction(node)

    def match_page_aligned(self, key: RadixKey, params: MatchPrefixParams) -> MatchResult:
        """The match of a page-aligned key, which ends at its deepest tail; splits a node inside which it diverges."""
        position, node = self._nodes.deepest(key, params.req)
        node = self.root_node if node is None else self.node_by_id(node)
        best, best_position, action = node, position, None
        validators = [part.create_match_validator(match_device_only=True) for part in self.components]
        while position < len(key):
            child = node.children.get(key.child_key_at(position, self.page_size))
            if child is None:
                break
            length = child.key.match_at(key, position, page_size=self.page_size)
            whole = length == len(child.key)
            if whole:
                node = child
            else:
                node, action = self.split(child, length)
            position += length
            if all([valid(node) for valid in validators]):
                best, best_position = node, position
            if not whole:
                break
        return self.match_result(
            params,
            node=best,
            matched_tokens=best_position,
            block_tokens=position,
            last_visited=node,
            action=action,
        )
