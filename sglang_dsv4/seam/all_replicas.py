"""One answer of all replicas to a control request, in the process that answers clients.

Replicas (`--dp-size`) decide by themselves: one may have requests while another is idle. `all_groups` is the agreement
of ranks that share a model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from sglang_dsv4.seam.live import serves_deepseek_v4

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import FlushCacheReqOutput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


def replicas() -> int:
    """Number of replicas of this server; 1 for groups of attention data parallelism."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().dp_size


async def flush(
    original: Callable[..., Awaitable[FlushCacheReqOutput]], manager: TokenizerManager, timeout_s: float | None = None
) -> FlushCacheReqOutput:
    """The answer to `/flush_cache`: whether every replica has flushed its cache. SGLang returns the first answer."""
    if not serves_deepseek_v4() or replicas() == 1:
        return await original(manager, timeout_s)
    from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput

    manager.auto_create_handle_loop()
    results = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
    refused = [result for result in results if not result.success]
    if not refused:
        return results[0]
    message = (
        f"{len(refused)} of {len(results)} replicas (--dp-size) have requests and kept their caches, the others were "
        "flushed: ask again until it succeeds."
    )
    return FlushCacheReqOutput(success=False, message=message)
