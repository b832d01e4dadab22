"""The work list of Hopper's experts: every slot once, in tiles of the call's shape; the estimate of their number."""

from __future__ import annotations

import pytest
import torch
from ops.experts_cases import Case
from ops.hopper_experts import CASES, PAIRED, arranged, listed_widths, shape_names, shapes

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

LISTS = {
    "uniform": (13, 2, 5, 0, 5),
    "other-ranks": (30, 3, 4, 2, 9),
    "none-here": (6, 2, 3, 8, 8),
    "one-pair": (1, 1, 4, 0, 4),
    "long-runs": (200, 2, 2, 0, 2),
    "many-experts": (40, 6, 200, 30, 300),
    "more-than-a-round": (1700, 5, 4, 1, 6),
}
"""(tokens, experts of a token, experts of the rank, the first of them, experts of all ranks)."""


LISTED_AS = [("narrow", 0), ("wide", 0), ("paired", 3), ("paired", 10**9)]


def test_a_list_has_more_pairs_than_a_round() -> None:
    from dsv4_kernels.moe.sm90 import work_list

    tokens, chosen, *_ = LISTS["more-than-a-round"]
    assert tokens * chosen > work_list.THREADS * work_list.AT_ONCE
    assert tokens * chosen % (work_list.THREADS * work_list.AT_ONCE)


@pytest.mark.parametrize(
    ("case", "shape", "least"),
    [
        pytest.param(case, *listed_as, id=f"{name}-{'-'.join(map(str, listed_as))}")
        for name, case in LISTS.items()
        for listed_as in (LISTED_AS if name != "more-than-a-round" else LISTED_AS[1:2])
    ],
)
def test_the_work_list_covers_every_slot_once(case: tuple[int, ...], shape: str, least: int) -> None:
    from ptx_emulator import emulated

    from dsv4_kernels.moe.sm90 import launch
    from dsv4_kernels.moe.sm90.plan import GROUP

    tokens, chosen, held, offset, of_all = case
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(tokens, of_all, generator=generator).topk(chosen).indices.int()
    weights = torch.rand(tokens, chosen, generator=generator)
    with emulated(arch="sm_90a", multiprocessors=4, schedule="random", seed=5):
        listed = launch.list_work(weights, ids, held, offset, shapes()[shape], least)
    num_tiles, num_groups = listed.totals.tolist()
    groups = [-(-int((ids == offset + expert).sum()) // GROUP) for expert in range(held)]
    assert num_groups == sum(groups) <= listed.groups
    chosen_shape = shapes()[shape]
    paired = sum(-(-n * GROUP // chosen_shape.slots) for n in groups)
    room = chosen_shape.slots if paired >= least else chosen_shape.room
    assert num_tiles == sum(-(-n * GROUP // room) for n in groups)
    following, covered = 0, 0
    for tile in range(num_tiles):
        expert, first, width, run_first, run_tiles = listed.tiles[tile, :5].tolist()
        assert first == following and 0 < width <= room // GROUP
        assert (listed.group_tile[first : first + width] == tile).all()
        assert run_first <= tile < run_first + run_tiles
        assert (listed.tiles[run_first : run_first + run_tiles, 0] == expert).all()
        following += width
        slots = torch.arange(first * GROUP, (first + width) * GROUP)
        assert (listed.routing[slots[listed.source[slots] < 0]] == 0).all()
        slots = slots[listed.source[slots] >= 0]
        tokens_of = listed.source[slots].long()
        of_expert = ids[tokens_of] == expert + offset
        assert (of_expert.sum(1) == 1).all()
        assert torch.equal(listed.routing[slots], weights[tokens_of][of_expert])
        assert torch.equal(listed.slot_of_pair[tokens_of][of_expert].long(), slots)
        covered += len(slots)
    assert following == num_groups
    here = (ids >= offset) & (ids < offset + held)
    assert covered == int(here.sum())
    assert (listed.slot_of_pair[~here] < 0).all()


@pytest.mark.parametrize("shape", shape_names())
def test_the_estimate_counts_what_is_listed(shape: str) -> None:
    from lib import experts_sm90_static as static

    for case in (*PAIRED.values(), CASES["several-tiles-of-one-expert"], Case(300, chosen=2, experts=3, d=512)):
        slots = torch.bincount(case.inputs()[2].flatten(), minlength=case.experts).tolist()
        packed = arranged(case.experts, case.d, case.channels)
        from dsv4_kernels.moe.sm90 import launch

        found = static.widths(slots, shapes()[shape], launch.least_paired_tiles(packed, case.multiprocessors))
        assert [width for of_expert in found for width in of_expert] == listed_widths(case, shape)


def test_the_estimate_is_near_what_was_measured() -> None:
    """Estimates for an H200 with all tokens at six experts are near the measured times; paired tiles pay for them."""
    from lib import experts_sm90_static as static
    from lib.experts_inputs import MODELS

    measured, model = static.measured_us(), MODELS["flash"]
    for tokens in (16, 64, 128, 256, 1024):
        slots = [tokens] * 6 + [0] * (model.experts - 6)
        by_shape = {name: static.estimate(slots, model, shapes()[name]).us for name in ("narrow", "paired")}
        for shape, least in (("narrow", 0.94), ("paired", 0.88)):
            assert least < by_shape[shape] / measured[f"flash-six-t{tokens}", shape] < 1.05
        assert by_shape["paired"] <= by_shape["narrow"] * (0.85 if tokens > 32 else 1.0)
