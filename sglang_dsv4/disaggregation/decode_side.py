"""A decode server: which prefill servers it accepts, the pages that arrive, and requests that give up their pages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dsv4.cache.kv_pool import Dsv4KVPool
from sglang_dsv4.cache.request_copy import pages_of
from sglang_dsv4.cache.transfer import differences

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest, DecodeTransferQueue

logger = logging.getLogger(__name__)

THEIRS, OURS = "prefill server has kv_layout=", ", but decode server has kv_layout="
"""SGLang's words around the layout of another server."""


def refuse_other_prefills(
    original: Callable[..., Any], queue: DecodePreallocQueue, addr_to_reqs: dict[str, list[DecodeRequest]]
) -> tuple[dict[str, list[DecodeRequest]], list[DecodeRequest]]:
    """End the requests of a prefill server whose pools differ from ours, with an error that lists the differences.

    Requests of other prefill servers go on. Around `_ensure_prefill_info`, which raises for such a server, so that the
    decode server would end.

    Returns:
        Requests by address of a prefill server that is known now, and requests that wait.
    """
    ready, waiting = {}, []
    for address, requests in addr_to_reqs.items():
        try:
            its_ready, its_waiting = original(queue, {address: requests})
        except RuntimeError as error:
            reason = f"The prefill server at {address} can't serve this decode server. {explain(str(error))}"
            logger.error("%s", reason)
            for request in requests:
                if request.kv_receiver is None:  # it has failed already
                    continue
                request.kv_receiver.abort()
                queue.kv_manager.record_failure(request.req.bootstrap_room, reason)
            continue
        ready |= its_ready
        waiting += its_waiting
    return ready, waiting


def explain(error: str) -> str:
    """SGLang's error about another layout, reduced to what differs; any other error as it is."""
    _, found, layouts = error.partition(THEIRS)
    theirs, _, ours = layouts.partition(OURS)
    ours = ours.partition(". Both servers")[0]
    if not (found and ours):
        return error
    return (
        f"Their pools differ ({'; '.join(differences(theirs, ours))}). Start both servers with the same version, "
        "checkpoint, --kv-cache-dtype, --dtype and speculative flags."
    )


def wait_for_forwards(queue: DecodePreallocQueue, *args: Any, **kwargs: Any) -> None:
    """Before a request's slot and pages are told to its prefill server: wait for the forwards under way.

    The request that had them before may have ended while one more step of it was launched, which writes a row into
    them. The prefill server's writes do not wait for this server's streams.
    """
    scheduler = queue.scheduler
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if isinstance(pool, Dsv4KVPool) and scheduler.enable_overlap and str(pool.device).startswith("cuda"):
        scheduler.forward_stream.synchronize()


def unpack_pages(result: Any, queue: DecodeTransferQueue, decode_req: DecodeRequest) -> None:
    """After the commit of a transfer: copy the request's HCA pages to the entries, where they had to be packed.

    All tokens but the newest have arrived. That is the prompt, and the answer so far of a request that a pause has
    retracted: the prefill server computes both again.
    """
    pool, req = queue.scheduler.token_to_kv_pool_allocator.get_kvcache(), decode_req.req
    if not isinstance(pool, Dsv4KVPool) or pool.packed_pages is None:
        return
    arrived = len(req.origin_input_ids) + max(len(req.output_ids) - 1, 0)
    slots = queue.scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, req.kv.cache_protected_len : arrived]
    pool.packed_pages.unpack(pages_of(slots))


def free_tokens(original: Callable[..., int], queue: DecodePreallocQueue) -> int:
    """Free tokens of the pool, for a decode server that reuses prefixes.

    Around `_radix_full_available`, which asks the allocator of a DeepSeek-V4 pool for the free tokens of two pools;
    ours has one.
    """
    allocator = queue.token_to_kv_pool_allocator
    if isinstance(allocator.get_kvcache(), Dsv4KVPool):
        return allocator.available_size()
    return original(queue)


def keep_bytes(original: Callable[..., bool], token_to_kv_pool_allocator: Any) -> bool:
    """Whether a retracted request is computed again by the prefill server: not with our pools, which copy its bytes.

    Around `dsv4_needs_rebootstrap`.
    """
    if isinstance(token_to_kv_pool_allocator.get_kvcache(), Dsv4KVPool):
        return False
    return original(token_to_kv_pool_allocator)
