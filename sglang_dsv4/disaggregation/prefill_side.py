"""Pages of a prefill server: complete, and in the form in which they travel, before they are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dsv4_radix_cache.pages import page_floor
from sglang_dsv4.cache.kv_pool import Dsv4KVPool
from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def send_prefix_early(original: Callable[..., None], scheduler: Scheduler, req: Req, allow_send: bool = True) -> None:
    """Send the pages of a reused prefix before the rest is computed, unless copies from host memory may still write
    them; then they are sent with the chunk.

    Over NIXL nothing is sent early with overlapped scheduling: SGLang's sender waits there for no forward, and the one
    before may still write the prefix.

    Around `maybe_send_cached_prefix_chunk`: SGLang knows the copies of its own controller only. Copies that wait are
    issued before the next forward. Copies that were issued are over at the end of the forward for which the sender
    waits; without overlapped scheduling it waits for no forward.
    """
    from sglang.srt.disaggregation.utils import TransferBackend

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if isinstance(pool, Dsv4KVPool) and pool.page_copies is not None:
        copies = pool.page_copies
        allow_send = allow_send and copies.idle and (scheduler.enable_overlap or not copies.on_gpu)
    if isinstance(pool, Dsv4KVPool) and scheduler.enable_overlap:
        allow_send = allow_send and scheduler.transfer_backend is not TransferBackend.NIXL
    original(scheduler, req, allow_send=allow_send)


def pack_pages(result: Any, runner: ModelRunner, forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> None:
    """After a forward over prompts: copy the HCA pages that it wrote into the form in which they travel.

    In the forward's stream, so the copy is over when the forward's results are on the host, and before they are sent.
    The pages' numbers are read on the device: the host does not wait for the forward.
    """
    pool, mode = runner.token_to_kv_pool, forward_batch.forward_mode
    if not isinstance(pool, Dsv4KVPool) or pool.packed_pages is None or not mode.is_extend_without_speculative():
        return
    begins, counts = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    if begins is None or counts is None:  # a warm-up, without requests
        return
    requests, token_slots = forward_batch.req_pool_indices_cpu.tolist(), runner.req_to_token_pool.req_to_token
    first_tokens = [
        token_slots[request, page_floor(begin) : begin + count : FULL_PAGE_TOKENS]
        for request, begin, count in zip(requests[: len(counts)], begins, counts, strict=True)
    ]
    pool.packed_pages.pack(torch.cat(first_tokens).long() // FULL_PAGE_TOKENS)
