"""The token at which a prompt leaves the stored prompts: exact, where a match of the tree ends at whole pages.

The token is looked up once a request, for people who look for the reason of a miss. The search begins at the node at
which the request's match ended: the tree is not walked again.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


def stored_tokens(node: UnifiedTreeNode, position: int, key: RadixKey) -> tuple[int, bool]:
    """The number of a prompt's tokens that the longest stored path begins with, and whether another token follows.

    Only paths of the prompt's own namespace count: the answer never says what another namespace holds. No other token
    follows if the path or the prompt ends there, or if no token is shared.

    Args:
        node: the last node that is on the prompt's path as a whole.
        position: tokens of the path up to its end.
        key: the prompt's, with its namespace; its limit is ignored.
    """
    prompt = key.token_ids
    while True:
        found, longest = None, 0
        for child in node.children.values():
            other = child.key
            if (other.extra_key, other.cache_salt) != (key.extra_key, key.cache_salt):
                continue
            theirs = other.token_ids
            if found is None or (
                longest < min(len(theirs), len(prompt) - position)
                and theirs[longest] == prompt[position + longest]
                and theirs[:longest] == prompt[position : position + longest]
            ):
                found, longest = child, common_tokens(theirs, prompt, position)
        if found is None:
            return position, False
        if longest < len(found.key.token_ids):  # with an MTP module these are a token more than the node's positions
            end = position + longest
            return end, 0 < end < len(prompt)
        node, position = found, position + len(found.key)


def common_tokens(theirs: array[int], prompt: array[int], begin: int) -> int:
    """The number of tokens that `theirs` and `prompt[begin:]` have in common from their first tokens on."""
    low, high = 0, min(len(theirs), len(prompt) - begin)
    if theirs[:high] == prompt[begin : begin + high]:
        return high
    while high - low > 1:  # the first `low` tokens are equal, the first `high` are not
        middle = (low + high) // 2
        if theirs[low:middle] == prompt[begin + low : begin + middle]:
            low = middle
        else:
            high = middle
    return low
