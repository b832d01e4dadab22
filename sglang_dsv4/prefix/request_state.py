"""The attributes that prefix reuse keeps on SGLang's request and batch objects. No other module assigns to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from dsv4_radix_cache.ledger import Match
from dsv4_radix_cache.page_chain import PageChain

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

TAIL = ComponentType.C128
"""The component slot of the tails: the enum of component types is closed, and SGLang fills this slot on an NPU only."""
META_KEY = "prefix_cache"  # in a response's meta_info


def match_of(req: Req | None) -> Match | None:
    """The request's last prefix match; None before its first one."""
    return getattr(req, "tail_match", None)


def set_match(req: Req, match: Match) -> None:
    """Keep a prefix match with its request."""
    req.tail_match = match


def chain_of(req: Req | None, namespace: tuple[Any, ...], overlap_tokens: int) -> PageChain:
    """The request's page digests, kept with it because a waiting request is matched again in every scheduler round.

    A new chain if the request has none for this namespace; without a request, a chain for this call only.
    """
    chain: PageChain | None = getattr(req, "tail_chain", None)
    if chain is None or (chain.namespace, chain.overlap_tokens) != (namespace, overlap_tokens):
        chain = PageChain(namespace, overlap_tokens)
        if req is not None:
            req.tail_chain = chain
    return chain


def tail_receipt(req: Req) -> int | None:
    """The receipt of the pin on the tail of the request's match, from the request's lock on the tree."""
    lock = getattr(req, "lock", None)
    return None if lock is None else lock.receipt.component_lock_uuids.get(TAIL)


def show_report(req: Req) -> None:
    """Put the account of the request's prompt into its response's meta_info, if there is one.

    SGLang copies the lists of `customized_info` into meta_info. A retracted request keeps its first account.
    """
    match = match_of(req)
    if match is not None and match.report is not None:
        req.customized_info = {META_KEY: [match.report.as_meta()], **(req.customized_info or {})}


def set_request_slots(batch: ForwardBatch, slots: torch.Tensor) -> None:
    """Give a batch, or a graph's view of one, its request slots on the host: [B] int64."""
    batch.req_pool_indices_cpu = slots
