"""A step's slot mapping: the definition against arithmetic by hand, and the kernel, emulated, equal to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from ops.early_launches import launched_early
from ops.memory_layout import far_apart, use_in_place
from torch import Tensor

from dsv4_kernels.step_mapping import GroupLayout, StepLayout, StepMapping, ref, step_mapping

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
    tokens, first, slots = CASES[name]
    pages = -(-(max(first) + tokens) // PAGE) + 1
    dims = replace(layout(tokens), groups=(), blocks=True) if name == "blocks" else layout(tokens)
    return torch.tensor(first), torch.tensor(slots), table(7, pages), tokens, pages, 7, dims


def tensors(mapping: StepMapping) -> Iterator[tuple[str, Tensor]]:
    for name, value in mapping._asdict().items():
        if name != "groups":
            yield name, value
    for i, group in enumerate(mapping.groups):
        yield from ((f"group {i} {name}", value) for name, value in group._asdict().items())


@pytest.mark.parametrize("name", CASES)
def test_every_address_follows_from_its_position(name: str) -> None:
    """Every token's and every closed group's addresses, computed one by one."""
    first, slots, req_to_token, k, pages, num_slots, dims = inputs(name)
    found = step_mapping(*inputs(name))
    for b, (begin, slot) in enumerate(zip(first.tolist(), slots.tolist(), strict=True)):
        page = [int(req_to_token[slot, p * PAGE]) // PAGE if slot else 0 for p in range(pages)]
        assert found.page_table[b].tolist() == page
        for t in range(b * k, b * k + k):
            position = begin + t - b * k
            assert (int(found.positions[t]), int(found.token_to_request[t])) == (position, b)
            assert int(found.ring_rows[t]) == slot * dims.ring_rows + position % dims.ring_rows
            seen = range(begin - 128, begin + k) if dims.blocks else range(position - 127, position + 1)
            window = [slot * dims.ring_rows + p % dims.ring_rows if p >= 0 else -1 for p in seen]
            assert found.window_rows[t].tolist() == window
        for group, mapping in zip(dims.groups, found.groups, strict=True):
            ratio, per_request = group.ratio, -(-k // group.ratio)
            assert mapping.visible[b * k : b * k + k].tolist() == [(begin + i + 1) // ratio for i in range(k)]
            rows = [slot * group.state_rows + (begin + i) % group.state_rows for i in range(k)]
            assert mapping.state_rows[b * k : b * k + k].tolist() == rows
            for i in range(per_request):
                start, at = (begin // ratio + i) * ratio, b * per_request + i
                if start + ratio > begin + k:
                    assert set(mapping.sources[at].tolist()) == {-1} and int(mapping.slots[at]) == 0
                    continue
                entry, per_page = start // ratio, PAGE // ratio
                assert int(mapping.slots[at]) == page[start // PAGE] * per_page + entry % per_page
                assert int(mapping.positions[at]) == start
                raw = range(start - (group.overlap_groups - 1) * ratio, start + ratio)
                sources = [
                    -1 if p < 0
                    else slot * group.state_rows + p % group.state_rows if p < begin
                    else num_slots * group.state_rows + b * k + p - begin
                    for p in raw
                ]  # fmt: skip
                assert mapping.sources[at].tolist() == sources


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_says_the_same(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.step_mapping import gpu

    poisoned = torch.empty
    monkeypatch.setattr(gpu.torch, "empty", lambda *a, **k: poisoned(*a, **k).fill_(-77))
    expected = ref.step_mapping(*inputs(name))
    with emulated(checks=Checks.strict(), arch={"sm90": "sm_90a", "sm100": "sm_100a"}[arch]) as device:
        found = getattr(gpu, arch)(*inputs(name))
    assert len(device.reports) == 1 and not device.reports[0].warnings
    for (what, a), (_, b) in zip(tensors(expected), tensors(found), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), what


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_it_may_begin_early(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with launched_early():
        test_the_kernel_says_the_same("verify", arch, monkeypatch)


def test_the_kernel_finds_slots_beyond_32_bits() -> None:
    """SGLang's table has a row of the longest context for every request that may run; rows may be longer still."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from ptx_emulator import emulated

    from dsv4_kernels.step_mapping import gpu

    first, slots, req_to_token, *rest = inputs("verify")
    large = far_apart(req_to_token)
    expected = ref.step_mapping(first, slots, req_to_token, *rest)
    with emulated(arch="sm_90a") as device:
        use_in_place(device, large)
        found = gpu.sm90(first, slots, large, *rest)
    for (what, a), (_, b) in zip(tensors(expected), tensors(found), strict=True):
        assert torch.equal(a, b), what


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_says_the_same_on_a_gpu(name: str) -> None:
    first, slots, req_to_token, *rest = inputs(name)
    found = step_mapping(first.cuda(), slots.cuda(), req_to_token.cuda(), *rest)
    for (what, a), (_, b) in zip(tensors(ref.step_mapping(*inputs(name))), tensors(found), strict=True):
        assert torch.equal(a, b.cpu()), what


def test_what_does_not_fit_is_refused() -> None:
    first, slots, req_to_token, k, pages, num_slots, dims = inputs("one")
    with pytest.raises(ValueError, match=r"first_positions and req_slots \[B\] int64"):
        step_mapping(first.int(), slots, req_to_token, k, pages, num_slots, dims)
    with pytest.raises(ValueError, match="contiguous rows"):
        step_mapping(first, slots, req_to_token.T.contiguous().T, k, pages, num_slots, dims)
    with pytest.raises(ValueError, match="1 to 2 pages"):
        step_mapping(first, slots, req_to_token, k, pages + 1, num_slots, dims)
