"""Steps of a few requests, for the tests of `step_mapping`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dsv4_kernels.step_mapping import GroupLayout, StepLayout, StepMapping

PAGE = 256


def layout(tokens: int) -> StepLayout:
    """Flash's layout, with rings for `tokens` tokens a step."""

    def rows(needed: int) -> int:
        return 1 << (needed - 1).bit_length()

    groups = (GroupLayout(4, 2, rows(6 + tokens)), GroupLayout(128, 1, rows(126 + tokens)))
    return StepLayout(PAGE, 128, rows(127 + tokens), groups)


def table(slots: int, pages: int, seed: int = 0) -> Tensor:
    """SGLang's table of token slots: random pages, the token slots of a page consecutive."""
    numbers = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(seed)).view(slots, pages) + 1
    return (numbers[:, :, None] * PAGE + torch.arange(PAGE)).view(slots, -1).int()


CASES = {
    "one": (1, [0], [1]),
    "page_edges": (1, [255, 256, 511, 3, 4, 127], [3, 1, 5, 2, 4, 6]),
    "null_slots": (1, [700, 0, 0], [4, 0, 0]),
    "verify": (5, [0, 1, 124, 127, 250, 509], [1, 2, 3, 4, 5, 6]),
    "verify_many": (130, [0, 126, 300], [2, 0, 1]),
    "verify_with_padding": (6, [0, 1, 0, 0], [6, 1, 0, 0]),
    "many_pages": (2, [70_000, 66_000, 131_071], [2, 6, 1]),
    "blocks": (5, [1, 2, 127, 128, 129, 254, 0, 0], [3, 1, 5, 2, 4, 6, 0, 0]),
}
"""Tokens a request, first positions, request slots. "blocks" are a DSpark draft's, which has rings only. A request of
"many_pages" has more pages than a CTA has threads."""


def inputs(name: str) -> tuple[Tensor, Tensor, Tensor, int, int, int, StepLayout]:
    """The arguments of `step_mapping`."""
    tokens, first, slots = CASES[name]
    pages = -(-(max(first) + tokens) // PAGE) + 1
    dims = replace(layout(tokens), groups=(), blocks=True) if name == "blocks" else layout(tokens)
    return torch.tensor(first), torch.tensor(slots), table(7, pages), tokens, pages, 7, dims


def tensors(mapping: StepMapping) -> Iterator[tuple[str, Tensor]]:
    """The names and values of all results."""
    for name, value in mapping._asdict().items():
        if name != "groups":
            yield name, value
    for i, group in enumerate(mapping.groups):
        yield from ((f"group {i} {name}", value) for name, value in group._asdict().items())
