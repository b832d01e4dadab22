"""Definition of a step's slot mapping, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import entry_rows
from dsv4_kernels.step_mapping.layout import GroupLayout, GroupMapping, StepLayout, StepMapping


def step_mapping(
    first_positions: Tensor,
    req_slots: Tensor,
    req_to_token: Tensor,
    tokens_per_request: int,
    num_pages: int,
    request_slots: int,
    layout: StepLayout,
) -> StepMapping:
    """See `dsv4_kernels.step_mapping.step_mapping`."""
    device, k, width, ring = req_slots.device, tokens_per_request, layout.window_tokens, layout.ring_rows
    tokens = torch.arange(req_slots.shape[0] * k, device=device)
    owner = tokens // k
    positions = first_positions[owner] + tokens % k
    pages = req_to_token[:, :: layout.page_tokens][:, :num_pages].index_select(0, req_slots) // layout.page_tokens
    page_table = pages.masked_fill((req_slots == 0)[:, None], 0).int()
    if layout.blocks:
        seen = first_positions[owner, None] + torch.arange(-width, k, device=device)
    else:
        seen = positions[:, None] + torch.arange(1 - width, 1, device=device)
    window_rows = (req_slots[owner, None] * ring + seen % ring).masked_fill(seen < 0, -1)
    groups = tuple(
        _group_mapping(group, first_positions, req_slots, positions, owner, page_table, k, request_slots, layout)
        for group in layout.groups
    )
    ring_rows = req_slots[owner] * ring + positions % ring
    return StepMapping(positions, owner.int(), page_table, window_rows.int(), ring_rows, groups)


def _group_mapping(
    group: GroupLayout,
    first_positions: Tensor,
    req_slots: Tensor,
    positions: Tensor,
    owner: Tensor,
    page_table: Tensor,
    k: int,
    request_slots: int,
    layout: StepLayout,
) -> GroupMapping:
    device, ratio, overlap, rows = req_slots.device, group.ratio, group.overlap_groups, group.state_rows
    per_request = -(-k // ratio)  # k consecutive tokens close at most this many compression groups
    items = torch.arange(req_slots.shape[0] * per_request, device=device)
    of_request = items // per_request
    first = first_positions[of_request]
    group_positions = (first // ratio + items % per_request) * ratio
    closes = group_positions + ratio <= first + k
    raw = group_positions[:, None] + torch.arange((1 - overlap) * ratio, ratio, device=device)
    in_state = req_slots[of_request, None] * rows + raw % rows
    in_step = request_slots * rows + (of_request * k - first)[:, None] + raw
    sources = torch.where(raw < first[:, None], in_state, in_step)
    sources = sources.masked_fill((raw < 0) | ~closes[:, None], -1)
    in_table = group_positions.clamp(max=page_table.shape[1] * layout.page_tokens - 1)  # changes open groups only
    slots = entry_rows(page_table, of_request, in_table // ratio, layout.page_tokens // ratio)
    return GroupMapping(
        sources=sources.int(),
        slots=torch.where(closes, slots, 0),
        positions=group_positions,
        state_rows=req_slots[owner] * rows + positions % rows,
        visible=((positions + 1) // ratio).int(),
    )
