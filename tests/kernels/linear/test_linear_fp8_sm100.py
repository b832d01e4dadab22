"""The FP8 product on Blackwell (block-scaled tcgen05), emulated: against float64; a token has the same bits for every
number of tokens, index, plan and schedule.

Regimes: every plan, its tokens filled and not; weights of less and more than a tile, and tiles of fewer rows than a
scale has; K of one block, of blocks that do not fill the last stage, and of more blocks than the ring has; more work
tiles than CTAs; different scales for all blocks and tokens; tensors with gaps, filled with NaN; rows far apart.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.early_launches import launched_early
from ops.experts_cases import emulated_on
from ops.fp8_products import E4M3, Operands, assert_products, with_gaps
from ops.fp8_products import operands as any_operands
from ops.memory_layout import far_apart, last_of_many, sparse, use_in_place
from ops.number_formats import same_bits
from ops.row_kernels import poisoned
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.linear import linear_fp8


@pytest.fixture(autouse=True)
def cutlass(compiled_here: None) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


@pytest.fixture(autouse=True)
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for results is filled with NaN."""
    monkeypatch.setattr(torch, "empty", poisoned)


def operands(tokens: int, rows: int, channels: int, seed: int = 0) -> Operands:
    """Operands whose scales are powers of two."""
    codes, scales, weight, weight_scale = any_operands(tokens, rows, channels, seed)
    return codes, scales, weight, weight_scale / 1.25


Tile = tuple[int, int]
"""Rows and tokens of a work tile."""
NARROW, WIDE = (32, 16), (128, 16)
TILES = (
    *((32, tokens) for tokens in (16, 32, 64)),
    *((64, tokens) for tokens in (16, 32, 64, 128)),
    *((128, tokens) for tokens in (16, 32, 64, 128, 192)),
)


def planned(tile: Tile) -> Any:
    """The plan of a work tile."""
    from dsv4_kernels.linear.fp8_tcgen05_plan import Plan

    return Plan(tokens=tile[1], rows=tile[0])


def product(
    o: Operands, tile: Tile | None = None, multiprocessors: int = 4, in_place: tuple[Tensor, ...] = (), **options: Any
) -> tuple[Tensor, Any]:
    """The kernel's result, with all checks of the emulator on, and the emulated device. Weights are constant memory."""
    from ptx_emulator import Checks

    from dsv4_kernels.linear.fp8_blackwell import sm100

    options = {"schedule": "late", "checks": Checks.strict(), **options}
    with emulated_on(multiprocessors, **options) as device:
        use_in_place(device, *in_place)
        for constant in o[2:]:
            device.memory.constant(constant)
        out = sm100(*o, plan=tile and planned(tile))
    assert len(device.reports) == 1 and not device.reports[0].warnings
    assert device.reports[0].grid[0] <= multiprocessors
    return out, device


# Tokens, N, K, work tile or None for the chosen one, multiprocessors.
CASES = {
    "one-token": (1, 256, 384, None, 8),
    "filled": (16, 128, 128, WIDE, 1),
    "k-longer-than-the-stages": (11, 136, 1280, WIDE, 1),
    "persistent": (9, 520, 256, WIDE, 2),
    "last-tile-of-one-row": (12, 129, 256, WIDE, 3),
    "tokens-in-three-tiles": (33, 264, 256, WIDE, 2),
    "narrow-last-tile-of-one-row": (3, 161, 768, NARROW, 2),
    "narrow-filled": (16, 64, 512, NARROW, 1),
    "narrow-k-longer-than-the-stages": (11, 40, 4480, NARROW, 1),
    "narrow-tokens-in-three-tiles": (33, 72, 128, NARROW, 4),
}
SLOW = {
    "of-32": (17, 136, 384, (128, 32), 2),
    "of-64": (40, 129, 256, (128, 64), 3),
    "wide": (128, 264, 384, (128, 128), 3),
    "two-scale-tiles": (190, 256, 256, None, 2),
    "two-wide-tiles": (200, 128, 256, (128, 192), 1),
    "many": (400, 384, 640, None, 5),
    "narrow-of-32": (50, 72, 2944, (32, 32), 2),
    "narrow-of-64": (65, 40, 2304, (32, 64), 1),
    "half": (17, 200, 2688, (64, 16), 3),
    "half-of-32": (17, 129, 2176, (64, 32), 1),
    "half-of-64": (64, 136, 1664, (64, 64), 2),
    "half-of-128": (130, 136, 1152, (64, 128), 3),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_it_multiplies(name: str) -> None:
    """Operands with gaps. NaN in the gaps must not enter the result, and no part of the result is missing."""
    tokens, rows, channels, tile, multiprocessors = (CASES | SLOW)[name]
    o = operands(tokens, rows, channels)
    out, _ = product(with_gaps(o), tile, multiprocessors)
    assert_products(out, o)


def test_it_may_begin_early() -> None:
    with launched_early(read_ahead={"linear_fp8_sm100": ["UTMALDG"]}):
        test_it_multiplies("persistent")


def test_weights_are_read_ahead_and_nothing_else() -> None:
    """Weights of the first work tile's stages, before the wait: the emulator demands constant memory. Scales of the
    weight are not read ahead. A launch that begins early has the same bits."""
    from ptx_emulator import EmulationError

    from dsv4_kernels.linear.fp8_blackwell import sm100

    o = operands(11, 40, 4480, seed=6)
    expected, _ = product(o, WIDE, 1)
    with dependent_launch.switched(True):
        with emulated_on(1, schedule="random") as device:
            device.memory.constant(o[2])
            assert same_bits(sm100(*o, plan=planned(NARROW)), expected)
        with pytest.raises(EmulationError, match="grid_dependency"), emulated_on(1):
            sm100(*o, plan=planned(NARROW))


def test_a_token_has_its_bits_at_every_number_of_tokens() -> None:
    """Alone, first or last, in a tile of other rows, beside tokens of NaN and of infinite scales; more tiles below."""
    codes, scales, weight, weight_scale = operands(32, 136, 640, seed=1)
    whole, _ = product((codes, scales, weight, weight_scale), WIDE)
    for order in ([5], [31, 0], list(range(20, 28)), list(range(31, 10, -1))):
        part = codes[order], scales[order], weight, weight_scale
        assert same_bits(product(part, NARROW)[0], whole[order]), order
    spoilt = codes.clone(), scales.clone(), weight, weight_scale
    spoilt[0][1:7], spoilt[1][7:12], spoilt[0][20:] = torch.tensor(float("nan")).to(E4M3), float("inf"), 448.0
    kept = [0, *range(12, 20)]
    assert same_bits(product(spoilt, NARROW)[0][kept], whole[kept])


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_token_has_its_bits_in_every_tile(tile: Tile) -> None:
    """K of more blocks than a stage, whose last stage is not full in some tiles."""
    codes, scales, weight, weight_scale = operands(tile[1], 168, 896, seed=1)
    whole, _ = product((codes, scales, weight, weight_scale), tile)
    part = codes[tile[1] - 7 :], scales[tile[1] - 7 :], weight, weight_scale
    assert same_bits(product(part, WIDE)[0], whole[tile[1] - 7 :])


@pytest.mark.parametrize("schedule", ["random", "random_warps"])
def test_bits_do_not_depend_on_the_schedule(schedule: str) -> None:
    o = operands(13, 136, 1280, seed=2)
    expected, _ = product(o, WIDE, schedule="eager")
    for seed, multiprocessors in ((1, 1), (2, 3)):
        for tile in (WIDE, NARROW):
            assert same_bits(product(o, tile, multiprocessors, schedule=schedule, seed=seed)[0], expected)


def test_rows_beyond_32_bits() -> None:
    """Rows of codes, of both scales and of the weight at distances whose bytes exceed 32 bits; output rows of the last
    tokens of many, of whose CTAs only the last run."""
    o = operands(4, 640, 256, seed=4)
    expected, _ = product(o, WIDE)
    codes, scales, weight, weight_scale = o
    places = [
        (far_apart(codes.view(torch.uint8), 16).view(E4M3), scales, weight, weight_scale),
        (codes, far_apart(scales), weight, weight_scale),
        (codes, far_apart(scales.T.contiguous().repeat(2, 1)).T[:, :2], weight, weight_scale),
        (codes, scales, far_apart(weight.view(torch.uint8), 16).view(E4M3), weight_scale),
        (codes, scales, weight, far_apart(weight_scale)),
    ]
    for far in places:
        assert same_bits(product(far, WIDE, in_place=far)[0], expected)


def test_output_rows_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    o = operands(16, 1024, 128, seed=4)
    expected, _ = product(o, WIDE)
    count = 1 << 21
    many = last_of_many(o[0].view(torch.uint8), count).view(E4M3), last_of_many(o[1], count), o[2], o[3]
    result = sparse((count, 1024), (1024, 1), torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **options: result)
        found, _ = product(many, WIDE, count // 16 * 8, in_place=(*many, result), ends=(0, 8))
    assert found.nbytes >= 1 << 32 and same_bits(found[-16:], expected)


def test_zeros_and_numbers_at_the_ends() -> None:
    """No token, tokens of zeros, scales at the ends of fp32's normal powers, sums beyond bf16's range."""
    codes, scales, weight, weight_scale = operands(4, 136, 256, seed=5)
    from dsv4_kernels.linear.fp8_blackwell import sm100

    assert sm100(codes[:0], scales[:0], weight, weight_scale).shape == (0, 136)
    codes[0] = 0.0
    scales[1], scales[2] = 2.0**-126, 2.0**110
    weight_scale[:] = 2.0**-10
    o = codes, scales, weight, weight_scale
    out, _ = product(o, NARROW)
    assert not out[0].any()
    assert_products(out[2:], (codes[2:], scales[2:], weight, weight_scale))
    assert out.isfinite().all()
    weight_scale[:] = 16.0
    assert product(o, NARROW)[0][2].isinf().any()


@pytest.mark.parametrize(
    ("sizes", "change", "message"),
    [
        ((2, 8, 200), {}, "K in multiples of 128; got 200"),
        ((2, 8, 256), {0: torch.zeros(256, 2).to(E4M3).T}, "codes must have contiguous channels"),
        ((2, 8, 256), {2: torch.zeros(8, 260).to(E4M3)[:, :256]}, "weight must have .* rows at multiples of 16 bytes"),
        ((2, 8, 256), {3: torch.zeros(2, 2).T}, "weight_scale must have contiguous rows"),
    ],
)
def test_what_the_kernel_refuses(sizes: tuple[int, int, int], change: dict[int, Tensor], message: str) -> None:
    from dsv4_kernels.linear.fp8_blackwell import sm100
    from dsv4_kernels.linear.fp8_tcgen05_plan import Plan

    o = [change.get(at, tensor) for at, tensor in enumerate(operands(*sizes))]
    with pytest.raises(ValueError, match=message):
        sm100(*o)
    with pytest.raises(ValueError, match=r"tokens of a tile is 96; expected one of \(16, 32"):
        Plan(96)
    with pytest.raises(ValueError, match=r"rows of a tile is 16; expected one of \(32, 64, 128\)"):
        Plan(16, 16)
    with pytest.raises(ValueError, match=r"rows of a tile is 32; .* at least 64 for 128 tokens"):
        Plan(128, 32)


def test_a_narrow_weight_has_small_tiles() -> None:
    """With few rows a tile is small, as long as every multiprocessor has one; with many rows or tokens it is large."""
    from dsv4_kernels.linear.fp8_blackwell import compile_jobs
    from dsv4_kernels.linear.fp8_tcgen05_plan import num_tiles, plan_for, plans

    wanted = {
        (1, 1536): (32, 16), (16, 1536): (32, 16), (64, 1536): (32, 32), (128, 1536): (32, 64), (64, 4096): (32, 64),
        (1, 8192): (64, 16), (64, 8192): (64, 64), (65, 8192): (64, 128), (16, 32768): (128, 16),
        (64, 32768): (128, 64), (193, 32768): (128, 128), (8192, 32768): (128, 192), (8192, 1536): (128, 192),
    }  # fmt: skip
    found = {call: plan_for(*call, 148) for call in wanted}
    assert {call: (plan.rows, plan.tokens) for call, plan in found.items()} == wanted
    assert [(plan.rows, plan.tokens) for plan in plans()] == list(TILES)
    assert all(num_tiles(plan, *call) <= 148 for call, plan in found.items() if call[1] < 10_000 and call[0] < 200)
    assert len(compile_jobs(None, "sm_100a")) == len(TILES)


def test_operands_of_an_instruction_lie_within_a_stage() -> None:
    """The left operand has 128 rows whatever the tile's: those behind the tile's must belong to the same stage."""
    from dsv4_kernels.linear import fp8_tcgen05_plan

    for plan in map(planned, TILES):
        end = (plan.blocks - 1) * plan.weight_bytes + fp8_tcgen05_plan.LANES * fp8_tcgen05_plan.BLOCK
        scales = (1 + plan.token_scale_tiles) * plan.blocks * fp8_tcgen05_plan.SCALE_TILE_BYTES
        assert end <= plan.scales_offset + scales <= plan.stage_bytes and plan.ahead < plan.stages, plan


def test_it_is_chosen_on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert registry.chosen("linear_fp8", torch.device("cuda", 0), torch.bfloat16).name == "sm100"


@pytest.mark.parametrize(
    "tile", [NARROW, *(pytest.param(tile, marks=pytest.mark.slow) for tile in TILES if tile != NARROW)], ids=str
)
def test_registers_and_shared_memory(tile: Tile) -> None:
    from lib.cubin import resources
    from ptx_emulator import emulated

    from dsv4_kernels.linear.fp8_blackwell import compile
    from dsv4_kernels.linear.fp8_tcgen05_plan import MAX_SMEM, ROOM

    plan = planned(tile)
    with emulated():
        found = resources(compile(plan, "sm_100a").__cubin__)
    assert found["stack_bytes"] == 0 and found["registers"] <= 96, found
    assert plan.smem_bytes <= MAX_SMEM - ROOM and plan.stages >= 4 and plan.tmem_columns <= 512


def test_forms_are_those_of_known_right_kernels() -> None:
    from ptx_emulator.campaigns.form_coverage import foreign_forms, forms_of, uncovered

    _, device = product(operands(3, 136, 256), NARROW, record=True)
    missing = set(uncovered(forms_of(device.recordings[0]), foreign_forms()))
    # N of 64 to 192 is known to be right.
    assert {form for form in missing if "tcgen05" in form} <= {
        "tcgen05.mma kind::mxf8f6f4 cta_group::1 SS KK m128 n16 k32"
    }, missing


@pytest.mark.slow
@pytest.mark.usefixtures("in_turns")
@pytest.mark.parametrize(
    ("name", "tile", "rows", "channels"),
    [("linear_fp8_sm100", WIDE, 264, 1280), ("linear_fp8_sm100_narrow", NARROW, 72, 4480)],
)
def test_deleted_synchronisation_is_noticed(name: str, tile: Tile, rows: int, channels: int) -> None:
    """Every deletion is noticed, except those explained in emulator/results/mutation_reasons.json."""
    _, device = product(operands(2, rows, channels), tile, 1, record=True)
    rates = delete_synchronisation(name, device)
    assert rates and set(rates.values()) == {1}, rates


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 64, 200, 4096])
@pytest.mark.parametrize(("rows", "channels"), [(32768, 1024), (1536, 4096)], ids=["wq_b", "wqkv_a"])
def test_a_blackwell_gpu_multiplies(rows: int, channels: int, tokens: int) -> None:
    """Layers of V4-Flash: against the definition; a token's bits alone, in the largest tiles, and in a replayed
    graph."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("needs a Blackwell GPU of data centres (sm_100a)")
    from dsv4_kernels.linear.fp8_blackwell import sm100

    codes, scales, weight, weight_scale = (part.cuda() for part in operands(tokens, rows, channels))
    out = linear_fp8(codes, scales, weight, weight_scale, impl="sm100")
    few = slice(0, min(tokens, 64))
    wanted = linear_fp8(codes[few], scales[few], weight, weight_scale, impl="ref")
    assert (out[few].double() - wanted.double()).norm() <= 2.0**-7 * wanted.double().norm()
    alone = linear_fp8(codes[-1:], scales[-1:], weight, weight_scale, impl="sm100")
    assert same_bits(alone, out[-1:])
    assert same_bits(sm100(codes, scales, weight, weight_scale, planned((128, 192))), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = linear_fp8(codes, scales, weight, weight_scale, impl="sm100")
    graph.replay()
    assert same_bits(again, out)
