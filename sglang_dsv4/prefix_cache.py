"""SGLang's prefix cache for DeepSeek-V4: its own radix tree, with reuse switched off.

A prefix in the tree has its compressed entries, but neither the 128 window rows nor the compressor rows at its end, and
a hit without them would be wrong. Until the tree keeps those too, requests share nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_dsv4.compat import UnifiedRadixCache, create_unified_radix_cache

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)


class Dsv4PrefixCache(UnifiedRadixCache):
    """SGLang's radix tree over FULL pages; matches nothing and keeps nothing."""


def create_prefix_cache(ctx: TreeCacheBuildContext) -> Dsv4PrefixCache:
    """Factory for SGLang's radix cache registry, name "dsv4".

    Raises:
        ValueError: the hierarchical cache was asked for.
    """
    if ctx.enable_hierarchical_cache:
        raise ValueError("sglang-dsv4 does not support --enable-hierarchical-cache")
    ctx.params.disable = True
    logger.info("Prefix reuse is off: every request is computed from its first token.")
    return create_unified_radix_cache(ctx, cache_class=Dsv4PrefixCache)
