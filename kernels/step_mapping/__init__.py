"""The slot mapping of a step in which every request appends the same number of tokens: decode, verify, draft.

All addresses that the layers of such a step need follow from two numbers per request, its first new position and its
request slot, and from SGLang's table of token slots. The mapping is integer arithmetic, the same for all layers: one
launch a step, with shapes that depend on (B, k, P) alone, so a CUDA graph can capture it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.registry import select
from dsv4_kernels.step_mapping.layout import GroupLayout, GroupMapping, StepLayout, StepMapping

__all__ = ["GroupLayout", "GroupMapping", "StepLayout", "StepMapping", "step_mapping"]


def step_mapping(
    first_positions: Tensor,
    req_slots: Tensor,
    req_to_token: Tensor,
    tokens_per_request: int,
    num_pages: int,
    request_slots: int,
    layout: StepLayout,
    impl: str | None = None,
) -> StepMapping:
    """The rows and pages that a step reads and writes.

    ::

        ring row of position p            slot * ring_rows + p % ring_rows     (`ring_row` of radix_cache/ring.py)
        raw compressor row of p           slot * S + p % S                     (the same)
        page of p                         req_to_token[slot, p // page_tokens * page_tokens] // page_tokens
        row of entry j of ratio r         page(j * r) * (page_tokens / r) + j % (page_tokens / r)
        token i of this step, as a source of a compression group     request_slots * S + i

    Args:
        first_positions: [B] int64, position of each request's first new token.
        req_slots: [B] int64 request slots; 0, the null slot, for padding requests, whose pages are page 0, the null
            page.
        req_to_token: [N, L] int32, the token slots of a request slot by position, in whole pages.
        tokens_per_request: k.
        num_pages: P, enough for position first + k - 1 of every request.
        request_slots: N', the number of request slots that the rings have.
        layout: dimensions.
        impl: implementation by name; None lets the registry choose.

    Raises:
        ValueError: shapes or dtypes that do not match, or more pages than the table has.
    """
    requests = first_positions.shape
    if len(requests) != 1 or req_slots.shape != requests or {first_positions.dtype, req_slots.dtype} != {torch.int64}:
        raise ValueError(
            f"step_mapping needs first_positions and req_slots [B] int64; got {tuple(requests)} "
            f"{first_positions.dtype} and {tuple(req_slots.shape)} {req_slots.dtype}"
        )
    if req_to_token.dim() != 2 or req_to_token.dtype != torch.int32 or req_to_token.stride(1) != 1:
        raise ValueError(
            f"step_mapping needs req_to_token [slots, context] int32 with contiguous rows; got "
            f"{tuple(req_to_token.shape)} {req_to_token.dtype}, strides {req_to_token.stride()}"
        )
    most = -(-req_to_token.shape[1] // layout.page_tokens)
    if tokens_per_request < 1 or not 1 <= num_pages <= most:
        raise ValueError(
            f"step_mapping: {tokens_per_request} tokens a request and {num_pages} pages; expected at least one token "
            f"and 1 to {most} pages"
        )
    function = select("step_mapping", first_positions.device, torch.bfloat16, impl)
    return function(first_positions, req_slots, req_to_token, tokens_per_request, num_pages, request_slots, layout)
