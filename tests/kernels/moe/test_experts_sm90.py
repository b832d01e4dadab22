"""Hopper's experts (MXFP4 weights as e4m3 in registers, e4m3 activations, wgmma), emulated, against their definition.

Regimes: one token and many; experts with none, with a few slots and with several work tiles; every width of a tile,
full and not; K of one step and of more steps than there are stages; experts of other ranks; more work tiles than CTAs;
clamped and zero gates. The layout of the weights is in test_experts_sm90_weights.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.early_launches import launched_early
from ops.experts_cases import LIMIT, Case
from ops.hopper_experts import CASES, PAIRED, WIDE_PAIRS, arranged, emulated_experts, listed_widths, shape_names, shapes
from ops.memory_layout import strided
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels import moe
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.moe import Mxfp4Experts, ref, workspace
from dsv4_kernels.moe.sm90 import weights as arrangement

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

SLOW = {
    "wide-tiles": Case(300, chosen=2, experts=3, multiprocessors=5),
    "six-of-many": Case(9, chosen=6, experts=12, d=512, channels=384, multiprocessors=132),
    "only-other-ranks": Case(4, experts=2, offset=5, all_experts=5),
    "wide-and-deep": Case(33, chosen=2, experts=2, d=2048, channels=1280, multiprocessors=5),
}


def launched(case: Case, shape: str = "narrow", **options: object) -> tuple[Tensor, Any]:
    """(result of the kernels, emulated device)."""
    from dsv4_kernels.moe.sm90 import launch

    x, weights, ids, _ = case.inputs()
    x, packed = strided(x, 1, 24), arranged(case.experts, case.d, case.channels)
    launch.hardware_multiprocessors.cache_clear()
    try:
        with emulated_experts(multiprocessors=case.multiprocessors, **options) as device:
            out = launch.experts_forward(x, weights, ids, packed, LIMIT, case.offset, shape=shapes()[shape])
    finally:
        launch.hardware_multiprocessors.cache_clear()
    assert len(device.reports) == 6 and not any(report.warnings for report in device.reports)
    return out, device


def products_of(device: Any) -> list[Any]:
    """The emulator's reports of both products."""
    return [device.reports[2], device.reports[4]]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, shape) for name in CASES for shape in ("narrow", "wide")),
        *((name, "paired") for name in PAIRED),
        *((name, "wide") for name in WIDE_PAIRS),
        *(pytest.param(name, shape, marks=pytest.mark.slow) for name in SLOW for shape in shape_names()),
    ],
)
def test_the_sum_is_the_definition_s(name: str, shape: str) -> None:
    """The results agree up to one rounding to bf16 a row, and rare flips of an activation code."""
    from ptx_emulator import Checks

    case = (CASES | PAIRED | WIDE_PAIRS | SLOW)[name]
    x, weights, ids, packed = case.inputs()
    expected = ref.mxfp4_experts_forward(x, weights, ids, packed, LIMIT, case.offset)
    out, device = launched(case, shape, schedule="late", checks=Checks.strict())
    assert out.dtype == torch.float32 and out.shape == expected.shape
    assert (out - expected).norm() <= 2.0**-9 * expected.norm()
    most = case.multiprocessors * shapes()[shape].ctas_per_sm
    assert all(report.grid[0] <= most for report in products_of(device))
    if name in PAIRED | WIDE_PAIRS:
        room, widths = shapes()[shape].room, listed_widths(case, shape)
        assert max(widths) > room >= min(widths) or (case.one_expert and max(widths) > room)
    if name == "only-other-ranks":
        assert not out.any()


def test_it_may_begin_early() -> None:
    with launched_early():
        test_the_sum_is_the_definition_s("few", "narrow")


SCHEDULES = [
    (name, schedule, seed)
    for name in ("few", "several-tiles-of-one-expert", "k-longer-than-the-stages")
    for schedule in ("late", "random", "random_warps")
    for seed in (1, 2)
]
QUICK = [("few", "random", 1), ("k-longer-than-the-stages", "random_warps", 1)]


@pytest.mark.parametrize(
    ("name", "schedule", "seed"),
    [pytest.param(*point, marks=() if point in QUICK else pytest.mark.slow) for point in SCHEDULES],
)
def test_bits_do_not_depend_on_the_schedule(name: str, schedule: str, seed: int) -> None:
    """The result depends neither on the schedule nor on the slot that a (token, expert) pair gets under it."""
    from ptx_emulator import Checks

    expected, _ = launched(CASES[name], schedule="eager")
    out, _ = launched(CASES[name], schedule=schedule, seed=seed, checks=Checks.strict())
    assert same_bits(out, expected)


@pytest.mark.parametrize("shape", shape_names())
def test_a_token_s_bits_do_not_depend_on_its_batch(shape: str) -> None:
    """A token has the same bits in tiles of every compiled width, in all shapes, and on other multiprocessors.

    One expert gets all tokens, so that the number of tokens is the width of its tile.
    """
    from dsv4_kernels.moe.sm90 import launch

    most = shapes()["wide"].slots
    case = Case(most, chosen=1, experts=2, channels=256, one_expert=True, multiprocessors=3)
    expected = of_many_tokens()
    x, weights, ids, _ = case.inputs()
    packed = arranged(case.experts, case.d, case.channels)
    for width in shapes()[shape].widths:
        launch.hardware_multiprocessors.cache_clear()
        rows = slice(most - width, most)
        with emulated_experts(multiprocessors=1):
            out = launch.experts_forward(x[rows], weights[rows], ids[rows], packed, LIMIT, shape=shapes()[shape])
        assert listed_widths(replace(case, tokens=width, multiprocessors=1), shape) == [width]
        assert same_bits(out, expected[rows]), width
    launch.hardware_multiprocessors.cache_clear()


@functools.cache
def of_many_tokens() -> Tensor:
    """Return the result of as many tokens of one expert as the widest tile holds, computed in tiles of 32."""
    most = shapes()["wide"].slots
    case = Case(most, chosen=1, experts=2, channels=256, one_expert=True, multiprocessors=3)
    return launched(case, "narrow")[0]


def test_a_token_s_bits_are_its_own_in_a_mixed_batch() -> None:
    """A token has the same bits among tokens of other experts, in tiles whose steps use one stage or two."""
    case = PAIRED["pairs-between-singles"]
    expected, _ = launched(case, "wide")
    assert same_bits(launched(case, "narrow")[0], expected) and same_bits(launched(case, "paired")[0], expected)
    from dsv4_kernels.moe.sm90 import launch

    x, weights, ids, _ = case.inputs()
    packed = arranged(case.experts, case.d, case.channels)
    for rows in (slice(7, 8), slice(20, 34)):
        launch.hardware_multiprocessors.cache_clear()
        with emulated_experts(multiprocessors=5):
            out = launch.experts_forward(x[rows], weights[rows], ids[rows], packed, LIMIT)
        assert same_bits(out, expected[rows])
    launch.hardware_multiprocessors.cache_clear()


def test_zeros_and_clamps() -> None:
    """A token of zeros gives zeros; gates and ups of thousands are clamped, not infinite."""
    from dsv4_kernels.moe.sm90 import launch

    case = CASES["few"]
    x, weights, ids, packed = case.inputs()
    out, _ = launched(case)
    assert not out[0].any()
    large = (x.float() * 2.0**12).bfloat16()
    with emulated_experts(multiprocessors=4):
        out = launch.experts_forward(large, weights, ids, packed.for_hopper(), LIMIT)
    expected = ref.mxfp4_experts_forward(large, weights, ids, packed, LIMIT, 0)
    assert out.isfinite().all() and (out - expected).norm() <= 2.0**-9 * expected.norm()


def test_the_shared_expert_is_added_as_a_layer_would() -> None:
    from dsv4_kernels.moe.sm90 import launch

    case = CASES["few"]
    x, weights, ids, packed = case.inputs()
    shared = strided(torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).bfloat16(), 1, 40)
    plain, _ = launched(case)
    with emulated_experts(multiprocessors=4):
        arguments = (x, weights, ids, packed.for_hopper(), LIMIT, 0)
        alone = launch.experts_forward(*arguments, torch.bfloat16)
        both = launch.experts_forward(*arguments, torch.bfloat16, shared)
        in_fp32 = launch.experts_forward(*arguments, torch.float32, shared)
        none = launch.experts_forward(x[:0], weights[:0], ids[:0], packed.for_hopper(), LIMIT)
    assert same_bits(alone, plain.bfloat16())
    assert same_bits(both, alone + shared)
    assert same_bits(in_fp32, plain + shared.float())
    assert none.shape == (0, case.d) and none.dtype == torch.float32


def test_ids_and_weights_of_other_dtypes_and_strides() -> None:
    """Expert ids in int64 and routing weights in fp64, both with gaps: the same bits."""
    from dsv4_kernels.moe.sm90 import launch

    case = CASES["few"]
    x, weights, ids, _ = case.inputs()
    packed = arranged(case.experts, case.d, case.channels)
    with emulated_experts(multiprocessors=4):
        expected = launch.experts_forward(x, weights, ids, packed, LIMIT)
        found = launch.experts_forward(x, strided(weights.double(), 0, 3), strided(ids.long(), 1, 2), packed, LIMIT)
    assert same_bits(found, expected)


def test_sizes_follow_from_shapes() -> None:
    from dsv4_kernels.moe.sm90 import launch

    assert [workspace.most_groups(pairs, 256) for pairs in (6, 24, 1536, 49152)] == [6, 24, 416, 6368]
    shape = shapes()
    chosen = {tokens: launch.shape_for(tokens, 6, 256, 8) for tokens in (1, 2, 32, 33, 2389, 2390, 8192)}
    names = {tokens: name for tokens, found in chosen.items() for name, of_name in shape.items() if found is of_name}
    assert list(names.values()) == ["few", "narrow", "narrow", "paired", "paired", "wide", "wide"]
    # The bytes that a call allocates, and `workspace_bytes`.
    allocated = 0

    def empty(*size: object, **options: Any) -> Tensor:
        nonlocal allocated
        made = original(*size, **options)
        allocated += made.nbytes
        return made

    original = torch.empty
    case = CASES["few"]
    x, weights, ids, packed = case.inputs()
    hopper = packed.for_hopper()
    with emulated_experts(multiprocessors=4), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        out = launch.experts_forward(x, weights, ids, hopper, LIMIT, shape=shape["narrow"])
    said = workspace.workspace_bytes(case.tokens, case.chosen, case.experts, case.d, case.channels)
    # Codes of h reuse the memory of x's codes.
    assert said <= allocated - out.nbytes <= said + 8 * workspace.most_groups(10, 3) * case.channels * 33 // 32 + 8


# ---- the work list


LISTS = {
    "uniform": (13, 2, 5, 0, 5),
    "other-ranks": (30, 3, 4, 2, 9),
    "none-here": (6, 2, 3, 8, 8),
    "one-pair": (1, 1, 4, 0, 4),
    "long-runs": (200, 2, 2, 0, 2),
    "many-experts": (40, 6, 200, 30, 300),
    "cluster": (3400, 5, 4, 1, 6),
}
"""(tokens, experts of a token, experts of the rank, the first of them, experts of all ranks)."""


LISTED_AS = [("narrow", 0), ("wide", 0), ("paired", 3), ("paired", 10**9)]


def test_a_list_is_a_cluster_s_whose_ctas_have_different_numbers_of_rounds() -> None:
    from dsv4_kernels.moe import work_list

    tokens, chosen, *_ = LISTS["cluster"]
    of_all = work_list.CLUSTER * work_list.THREADS * work_list.AT_ONCE[work_list.CLUSTER]
    assert tokens * chosen > max(of_all, work_list.MOST_OF_ONE_CTA)
    assert tokens * chosen % of_all


@pytest.mark.parametrize(
    ("case", "shape", "least", "schedule"),
    [
        pytest.param(case, *listed_as, "random", id=f"{name}-{'-'.join(map(str, listed_as))}")
        for name, case in LISTS.items()
        for listed_as in (LISTED_AS if name != "cluster" else LISTED_AS[1:2])
    ]
    + [
        pytest.param(LISTS["cluster"], "wide", 0, schedule, id=f"cluster-{schedule}", marks=pytest.mark.slow)
        for schedule in ("eager", "late", "random_warps")
    ],
)
def test_the_work_list_covers_every_slot_once(case: tuple[int, ...], shape: str, least: int, schedule: str) -> None:
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.moe.sm90 import launch
    from dsv4_kernels.moe.workspace import GROUP

    tokens, chosen, held, offset, of_all = case
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(tokens, of_all, generator=generator).topk(chosen).indices.int()
    weights = torch.rand(tokens, chosen, generator=generator)
    with emulated(arch="sm_90a", multiprocessors=8, schedule=schedule, seed=5, checks=Checks.strict()):
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


# ---- errors, and the choice of the implementation


def test_errors_say_what_is_expected() -> None:
    from dsv4_kernels.moe.sm90 import launch

    x, weights, ids, packed = CASES["few"].inputs()
    with pytest.raises(ValueError, match=r"needs arranged weights; call Mxfp4Experts\.for_hopper"):
        launch.mxfp4_experts_forward(x, weights, ids, packed, LIMIT, 0)
    hopper = packed.for_hopper()
    with pytest.raises(ValueError, match=r"x is \(5, 128\); expected \[T, 256\]"):
        moe.mxfp4_experts_forward(x[:, :128], weights, ids, hopper, LIMIT)
    with pytest.raises(ValueError, match=r"x must be torch\.bfloat16"):
        launch.experts_forward(x.float(), weights, ids, hopper, LIMIT)
    with pytest.raises(ValueError, match="multiples of 128 rows"):
        arrangement.arrange(packed.w2[:, :100], packed.w2_scale[:, :100], gate_up=False)
    with pytest.raises(ValueError, match="at least 256"):
        arrangement.arrange(packed.w2, packed.w2_scale, gate_up=False, in_place=True)
    damaged = packed.w2_scale.clone()
    damaged.view(torch.uint8)[0, 5, 1] = 255
    with pytest.raises(ValueError, match="scale is NaN"):
        replace(packed, w2_scale=damaged).for_hopper()


def test_it_is_chosen_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The implementation refuses weights that are not arranged for it; the registry cannot see that."""
    from dsv4_kernels import registry

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    hopper = torch.device("cuda")
    assert registry.chosen("mxfp4_experts_forward", hopper, torch.bfloat16).name == "ref"
    assert registry.chosen("mxfp4_experts_forward", hopper, torch.bfloat16, "sm90").name == "sm90"


def test_nothing_waits_for_the_device(request: pytest.FixtureRequest) -> None:
    from dsv4_kernels.moe.sm90 import launch

    x = torch.zeros(4, 256, dtype=torch.bfloat16)
    packed = arranged(3, 256, 128)  # arranging reads values, once for each checkpoint
    request.getfixturevalue("nothing_waits")
    with emulated_experts(multiprocessors=2):
        launch.experts_forward(x, torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int32), packed, LIMIT)


# ---- the kernels themselves


def test_pairs_are_taken_where_multiprocessors_stay_busy() -> None:
    """Pairs need at least as many tiles as multiprocessors, and an even number of K steps in both products."""
    from dsv4_kernels.moe.sm90 import launch

    packed = arranged(2, 512, 256)  # four row tiles in both products
    assert [launch.least_paired_tiles(packed, n) for n in (1, 4, 5, 132)] == [1, 1, 2, 33]
    assert launch.least_paired_tiles(arranged(2, 256, 128), 1) > 10**9
    crowd = Case(40, chosen=1, experts=2, d=512, channels=256, one_expert=True)
    assert listed_widths(replace(crowd, multiprocessors=4)) == [40]
    assert listed_widths(replace(crowd, multiprocessors=5)) == [24, 16]
    assert listed_widths(replace(crowd, d=384, multiprocessors=4)) == [24, 16]


@pytest.mark.parametrize("shape", shape_names())
def test_no_configuration_spills(shape: str) -> None:
    from lib.cubin import resources
    from ptx_emulator import emulated

    from dsv4_kernels.moe.sm90 import launch
    from dsv4_kernels.moe.sm90.plan import CONSUMER_WARPS, Plan, Product

    chosen = shapes()[shape]
    with emulated(arch="sm_90a"):
        for product in Product:
            found = resources(launch.compile(Plan(product, chosen)).__cubin__)
            assert found["stack_bytes"] == 0
            of_warp = -(-found["registers"] // 8) * 8 * 32
            assert of_warp * (chosen.threads // 32) * chosen.ctas_per_sm <= 65_536
            if chosen.registers is not None:
                of_consumer, of_producer = chosen.registers
                assert CONSUMER_WARPS * 32 * of_consumer + 128 * of_producer <= 65_536
            assert chosen.ctas_per_sm * (Plan(product, chosen).smem_bytes + 2048) <= 228 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["narrow", "paired", "wide"])
@pytest.mark.parametrize("product", [0, 1], ids=["gate-up", "down"])
def test_deleted_synchronisation_is_noticed(product: int, shape: str) -> None:
    """Every deletion is noticed, except those explained in emulator/results/mutation_reasons.json."""
    from ptx_emulator import Checks

    case = replace(CASES["k-longer-than-the-stages"], tokens=2, channels=384)
    pairs = {"paired": PAIRED["pairs-between-singles"], "wide": WIDE_PAIRS["singles-between-wide-pairs"]}
    if shape in pairs:  # tiles whose steps use two stages, and tiles whose steps use one
        case = replace(pairs[shape], d=1280, channels=1280)
        widths, room = listed_widths(case, shape), shapes()[shape].room
        assert max(widths) > room >= min(widths)
    _, device = launched(case, shape, checks=Checks.strict(), record=True)
    name = f"experts_sm90_{('gate_up', 'down')[product]}" + ("" if shape == "narrow" else f"_{shape}")
    rates = delete_synchronisation(name, device, 2 + 2 * product)
    assert rates and set(rates.values()) == {1}, rates


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 64, 300, 4096])
def test_a_hopper_gpu_makes_the_sum(tokens: int) -> None:
    """Flash's shapes with fewer experts: a token has the same bits alone, in a batch and in a replayed graph."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU (sm_90a)")
    case = Case(tokens, chosen=6, experts=16, d=4096, channels=2048)
    x, weights, ids, packed = case.inputs()
    x, weights, ids = x.cuda(), weights.cuda(), ids.cuda()
    packed = Mxfp4Experts(*(matrix.cuda() for matrix in (packed.w13, packed.w13_scale, packed.w2, packed.w2_scale)))
    hopper = packed.for_hopper()

    def run(rows: slice) -> Tensor:
        return moe.mxfp4_experts_forward(x[rows], weights[rows], ids[rows], hopper, LIMIT, impl="sm90")

    with dependent_launch.switched(False):
        out = run(slice(None))
    few = slice(0, min(tokens, 64))
    expected = moe.mxfp4_experts_forward(x[few], weights[few], ids[few], packed, LIMIT, impl="ref")
    assert (out[few] - expected).norm() <= 2.0**-7 * expected.norm()
    assert same_bits(run(slice(tokens - 1, tokens)), out[-1:])
    from dsv4_kernels.moe.sm90 import launch

    for shape in (shapes()[name] for name in shape_names()):
        assert same_bits(launch.experts_forward(x, weights, ids, hopper, LIMIT, shape=shape), out)
    with dependent_launch.switched(True):
        for _ in range(20):  # a read before its wait is only sometimes wrong
            assert same_bits(launch.experts_forward(x, weights, ids, hopper, LIMIT), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with dependent_launch.switched(False):
            in_turns = run(slice(None))
        with dependent_launch.switched(True):
            overlapping = launch.experts_forward(x, weights, ids, hopper, LIMIT)
    graph.replay()
    assert same_bits(in_turns, out) and same_bits(overlapping, out)
