"""Blackwell's experts (MXFP4 weights, e4m3 activations, block-scaled tcgen05), emulated, against their definition.

Regimes: one token and many; experts with none, with a few and with several tiles of slots; every width of a tile; K of
one step and of more steps than there are stages; experts of other ranks; weights and activations whose scales differ
from block to block by 2^8; clamped and zero gates.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.early_launches import launched_early
from ops.experts_cases import LIMIT, Case, emulated_on, packed_experts, packed_nvfp4_experts
from ops.memory_layout import strided
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels import moe
from dsv4_kernels.moe import Mxfp4Experts, ref
from dsv4_kernels.number_formats import dequantise_fp4_weight

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


CASES = {
    "few": Case(5),
    "one-token": Case(1, chosen=3),
    "several-tiles-of-one-expert": Case(40, chosen=1, one_expert=True, channels=256, multiprocessors=3),
    "k-longer-than-the-stages": Case(3, d=1280, channels=256, experts=2, multiprocessors=2),
    "pairs": Case(54, channels=256, multiprocessors=3),
    "other-ranks": Case(12, chosen=3, experts=2, offset=3, all_experts=7),
}
SLOW = {
    "pairs-of-wide-tiles": Case(100, experts=3, channels=256),
    "a-pair-in-the-second-product-only": Case(150, chosen=2, experts=3),
    "six-of-many": Case(9, chosen=6, experts=12, d=512, channels=384, multiprocessors=148),
    "only-other-ranks": Case(4, experts=2, offset=5, all_experts=5),
    "wide-and-deep": Case(33, chosen=2, experts=2, d=2048, channels=1280, multiprocessors=5),
}


PRODUCTS = slice(1, 3)
"""Launches of a call that are products; the others are the work list and the sum. Tokens are quantised by the op
`fp8_quantise`, which its reference computes on a CPU."""


def launched(
    case: Case, *, tokens: int | None = None, pairs: bool | None = None, **options: object
) -> tuple[Tensor, Any]:
    """(result of the kernels, emulated device), in tiles of `tokens` slots by pairs of CTAs or by single CTAs."""
    from dsv4_kernels.moe.sm100 import launch

    x, weights, ids, packed = case.inputs()
    x = strided(x, 1, 24)
    with emulated_on(case.multiprocessors, **options) as device:
        arguments = (x, weights, ids, packed.tiled(), LIMIT, case.offset)
        out = launch.experts_forward(*arguments, tokens=tokens, pairs=pairs)
    assert len(device.reports) == 4 and not any(report.warnings for report in device.reports)
    assert all(report.grid[0] <= case.multiprocessors for report in device.reports[PRODUCTS])
    return out, device


def assert_right(case: Case, **options: object) -> None:
    """Compares both products with fp64 of the dequantised numbers, each from the kernel's own input."""
    from dsv4_kernels.moe.sm100 import launch

    x, weights, ids, packed = case.inputs()
    tiled = packed.tiled()
    with emulated_on(case.multiprocessors, **options) as device:
        work = launch.plan_work(weights, ids, tiled, case.offset)
        hidden = launch.hidden_rows(launch.quantise(x, tiled), tiled, work, LIMIT)
        rows = launch.output_rows(hidden, tiled, work)
    assert not any(report.warnings for report in device.reports)
    slots = 8 * int(work.listed.totals[1])
    hidden, scales = hidden.codes[:slots], hidden.scales[:slots]
    padding = work.listed.source[:slots] < 0
    assert not hidden[padding].view(torch.uint8).any() and not rows[:slots][padding].any()
    stored = hidden.double() * scales.double().repeat_interleave(128, 1)
    for token, choice in ((t, c) for t in range(case.tokens) for c in range(case.chosen)):
        expert, slot = int(ids[token, choice]) - case.offset, int(work.listed.slot_of_pair[token, choice])
        assert (slot >= 0) == (0 <= expert < packed.num_experts)
        if slot < 0:
            continue
        w13, w2 = (
            dequantise_fp4_weight(codes[expert], scale[expert], torch.float64)
            for codes, scale in ((packed.w13, packed.w13_scale), (packed.w2, packed.w2_scale))
        )
        rounded_x = moe.ref.fp8_quantise(x[token : token + 1], 128, False)
        exact_x = (rounded_x[0].double() * rounded_x[1].double().repeat_interleave(128, 1))[0]
        gate, up = (w13 @ exact_x).bfloat16().float().chunk(2)
        wanted = (weights[token, choice] * ref.swiglu(gate, up, LIMIT)).bfloat16()[None]
        codes, wanted_scales = moe.ref.fp8_quantise(wanted, 128, False)
        assert torch.equal(wanted_scales[0], scales[slot])
        # A sum in another order may round to a neighbouring bf16, and so to a neighbouring code.
        steps = (ordered(codes[0]) - ordered(hidden[slot])).abs()
        assert steps.max() <= 1 and (steps > 0).double().mean() <= 0.01, (token, choice, steps.max())
        exact = w2 @ stored[slot]
        bound = 2.0**-8 * exact.abs() + case.channels * 2.0**-23 * (w2.abs() @ stored[slot].abs())
        assert ((rows[slot].double() - exact).abs() <= bound).all(), (token, choice)


def ordered(codes: Tensor) -> Tensor:
    """e4m3 codes as integers in the order of their values."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits > 127, 128 - bits, bits)


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW if name != "only-other-ranks")]
)
def test_both_products_are_right(name: str) -> None:
    from ptx_emulator import Checks

    assert_right((CASES | SLOW)[name], schedule="late", checks=Checks.strict())


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_sum_is_the_definition_s(name: str) -> None:
    """The results agree up to one rounding to bf16 a row, and rare flips of an activation code."""
    case = (CASES | SLOW)[name]
    x, weights, ids, packed = case.inputs()
    expected = ref.mxfp4_experts_forward(x, weights, ids, packed, LIMIT, case.offset)
    out, _ = launched(case)
    assert out.dtype == torch.float32 and out.shape == expected.shape
    assert (out - expected).norm() <= 2.0**-9 * expected.norm()
    if name == "only-other-ranks":
        assert not out.any()


def test_it_may_begin_early() -> None:
    with launched_early():
        test_the_sum_is_the_definition_s("few")


SCHEDULES = [
    (name, schedule, seed)
    for name in ("few", "several-tiles-of-one-expert", "k-longer-than-the-stages", "pairs")
    for schedule in ("late", "random", "random_warps")
    for seed in (1, 2)
]
QUICK = [
    ("few", "random", 1),
    ("k-longer-than-the-stages", "random_warps", 1),
    ("few", "late", 1),
    ("pairs", "random_warps", 1),
]


@pytest.mark.parametrize(
    ("name", "schedule", "seed"),
    [pytest.param(*point, marks=() if point in QUICK else pytest.mark.slow) for point in SCHEDULES],
)
def test_bits_do_not_depend_on_the_schedule(name: str, schedule: str, seed: int) -> None:
    from ptx_emulator import Checks

    expected, _ = launched(CASES[name], schedule="eager")
    out, _ = launched(CASES[name], schedule=schedule, seed=seed, checks=Checks.strict())
    assert same_bits(out, expected)


def test_a_token_s_bits_do_not_depend_on_its_batch() -> None:
    """A token has the same bits alone in tiles of 16, among 54 tokens in tiles of 64 by pairs of CTAs, in tiles of 32,
    and on other multiprocessors."""
    from dsv4_kernels.moe.sm100 import launch

    case = CASES["pairs"]
    x, weights, ids, packed = case.inputs()
    out, _ = launched(case)
    assert launch.tokens_of_a_tile(*ids.shape, case.experts) == 64
    assert ids.flatten().long().bincount().max() > 32  # the second CTA of a pair has codes of slots
    for rows, width in ((slice(7, 8), None), (slice(20, 26), None), (slice(0, 40), 16), (slice(0, 40), 32)):
        with emulated_on(1):
            part = (x[rows], weights[rows], ids[rows], packed.tiled(), LIMIT)
            alone = launch.experts_forward(*part, tokens=width)
        assert same_bits(alone, out[rows]), width


def test_the_width_of_a_tile_follows_from_sizes() -> None:
    from dsv4_kernels.moe.sm100 import launch

    found = {tokens: launch.tokens_of_a_tile(tokens, 6, 256) for tokens in (1, 16, 64, 341, 342, 682, 683, 1366, 8192)}
    assert list(found.values()) == [16, 16, 16, 16, 32, 32, 64, 96, 96]
    assert launch.tokens_of_a_tile(8, 6, 2) == 16  # no expert has more slots than the call has tokens


def test_pairs_of_ctas_follow_from_sizes() -> None:
    """Many slots, and a partner for each tile of 128 rows."""
    from dsv4_kernels.moe.sm100 import launch
    from dsv4_kernels.moe.sm100.plan import Plan, Product

    mxfp4, nvfp4 = packed_experts(1, 128, 128), packed_nvfp4_experts(1, 256, 256)
    ids, found = torch.zeros(8, 1, dtype=torch.int32), {}
    with emulated_on(1):
        for packed in (mxfp4, nvfp4):
            for tokens in launch.WIDTHS:
                work = launch.plan_work(torch.ones(8, 1), ids, packed, tokens=tokens)
                plans = [launch.plan_of(Product.DOWN, rows, packed, work) for rows in (128, 256, 384, 2048)]
                found[len(found)] = [plan.ctas for plan in plans]
    assert all(plan in launch.PLANS for plan in plans)
    alone, pairs = [1, 1, 1, 1], [1, 2, 1, 2]
    assert list(found.values()) == [alone, alone, pairs, pairs, alone, alone, alone, pairs]
    with pytest.raises(ValueError, match="tokens of a tile is 48; expected a multiple of 32 from 32 to 96"):
        Plan(Product.DOWN, 48, ctas=2)
    with pytest.raises(ValueError, match="CTAs of a product is 4; expected 1 or 2"):
        Plan(Product.DOWN, 64, ctas=4)


def test_the_shared_expert_is_added_as_a_layer_would() -> None:
    """In both dtypes; and codes of tokens that the caller has, with scales in columns, give the same bits."""
    from dsv4_kernels.moe.sm100 import launch

    case = CASES["few"]
    x, weights, ids, packed = case.inputs()
    tiled = packed.tiled()
    shared = strided(torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).bfloat16(), 1, 40)
    plain, _ = launched(case)
    codes, scales = moe.ref.fp8_quantise(x, 128, True)
    with emulated_on(4):
        alone = launch.experts_forward(x, weights, ids, tiled, LIMIT, 0, torch.bfloat16)
        both = launch.experts_forward(x, weights.double(), ids.long(), tiled, LIMIT, 0, torch.bfloat16, shared)
        in_fp32 = launch.experts_forward(x, weights, ids, tiled, LIMIT, 0, torch.float32, shared)
        work = launch.plan_work(weights, ids, tiled)
        given = launch.multiply_all(x, work, tiled, LIMIT, (strided(codes, 0, 64), scales))
        of_given = launch.sum_products(given, work, torch.float32, None)
        none = launch.experts_forward(x[:0], weights[:0], ids[:0], tiled, LIMIT)
        with pytest.raises(ValueError, match=r"codes of tokens must be \[T, 256\] with contiguous channels"):
            launch.multiply_all(x, work, tiled, LIMIT, (codes[:, :128], scales))
    assert same_bits(alone, plain.bfloat16())
    assert same_bits(both, alone + shared)
    assert same_bits(in_fp32, plain + shared.float())
    assert same_bits(of_given, plain)
    assert none.shape == (0, case.d) and none.dtype == torch.float32


def test_zeros_and_clamps() -> None:
    """A token of zeros gives zeros; gates and ups of thousands are clamped, not infinite."""
    case = CASES["few"]
    x, weights, ids, packed = case.inputs()
    out, _ = launched(case)
    assert not out[0].any()
    from dsv4_kernels.moe.sm100 import launch

    large = (x.float() * 2.0**12).bfloat16()
    with emulated_on(4):
        out = launch.mxfp4_experts_forward(large, weights, ids, packed.tiled(), LIMIT, 0)
    expected = ref.mxfp4_experts_forward(large, weights, ids, packed, LIMIT, 0)
    assert out.isfinite().all() and (out - expected).norm() <= 2.0**-9 * expected.norm()


# ---- the work list, and the layout of scales


@pytest.mark.parametrize("width", [16, 96])
def test_the_work_list_is_hopper_s(width: int) -> None:
    """One kernel lists the slots on both generations; test_experts_sm90.py tests it."""
    from dsv4_kernels.moe.work_list import list_work

    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(130, 7, generator=generator).topk(3).indices.int()
    weights = torch.rand(130, 3, generator=generator)
    found = []
    for arch in ("sm_90a", "sm_100a"):
        with emulated_on(4, arch=arch, schedule="eager"):
            listed = list_work(weights, ids, 4, 2, width, arch)
        tiles, groups = listed.totals.tolist()
        found.append((listed.slot_of_pair, listed.source[: 8 * groups], listed.tiles[:tiles, :5]))
        assert int(listed.tiles[:tiles, 2].max()) <= width // 8
    assert all(map(torch.equal, *found))


def test_scales_in_tiles_lie_where_the_tensor_core_looks() -> None:
    scale = torch.randint(0, 255, (2, 256, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plain = packed_experts(2, 256, 128)
    packed = replace(plain, w13_scale=scale.view(torch.float8_e8m0fnu))
    tiles = packed.tiled().w13_scale
    assert tiles.shape == (2, 2, 2, 512)
    for row, block in ((0, 0), (31, 3), (32, 4), (255, 7), (133, 6)):
        byte = 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4
        assert torch.equal(tiles[:, row // 128, block // 4, byte], scale[:, row, block])
    assert same_bits(packed.tiled().in_rows().w13_scale, packed.w13_scale)
    assert packed.tiled().tiled() is not packed and packed.in_rows() is packed


# ---- errors, and the choice of the implementation


def test_errors_say_what_is_expected() -> None:
    from dsv4_kernels.moe.sm100 import launch
    from dsv4_kernels.moe.sm100.plan import Plan, Product

    x, weights, ids, packed = CASES["few"].inputs()
    with pytest.raises(ValueError, match=r"needs scales in tiles; call Mxfp4Experts\.tiled"):
        launch.mxfp4_experts_forward(x, weights, ids, packed, LIMIT, 0)
    with pytest.raises(ValueError, match=r"x is \(5, 128\); expected \[T, 256\]"):
        moe.mxfp4_experts_forward(x[:, :128], weights, ids, packed, LIMIT)
    with pytest.raises(ValueError, match=r"needs weights and experts \[5, k\]"):
        moe.mxfp4_experts_forward(x, weights[:2], ids, packed, LIMIT)
    with pytest.raises(ValueError, match="swiglu_limit is 0"):
        moe.mxfp4_experts_forward(x, weights, ids, packed, 0)
    with pytest.raises(ValueError, match="multiples of 128"):
        replace(packed, w2_scale=packed.w2_scale[:, :100]).tiled()
    with pytest.raises(ValueError, match="multiple of 16 from 16 to 96"):
        Plan(Product.DOWN, 128)


def test_it_is_chosen_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_kernels import registry

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    blackwell = torch.device("cuda")
    assert registry.chosen("mxfp4_experts_forward", blackwell, torch.bfloat16).name == "ref"
    assert registry.chosen("mxfp4_experts_forward", blackwell, torch.bfloat16, "sm100").name == "sm100"


def test_nothing_waits_for_the_device(request: pytest.FixtureRequest) -> None:
    from dsv4_kernels.moe.sm100 import launch

    x, packed = torch.zeros(4, 256, dtype=torch.bfloat16), packed_experts(3, 256, 128).tiled()
    request.getfixturevalue("nothing_waits")
    with emulated_on(2):
        launch.experts_forward(x, torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int32), packed, LIMIT)


# ---- the kernel itself


def test_no_configuration_spills() -> None:
    """The cubins' resources match the record, and the table of bounds belongs to this kernel."""
    from lib.experts_sm100_static import RESULTS, resources_of
    from ptx_emulator import emulated

    from dsv4_kernels.moe.sm100.launch import PLANS

    recorded = json.loads(RESULTS.read_text())["resources"]
    assert recorded.keys() == {str(plan) for plan in PLANS}
    with emulated():
        for plan in PLANS[::5]:  # both numbers and products, alone and in pairs
            found = resources_of(plan)
            assert found["stack_bytes"] == 0, str(plan)
            for what in ("registers", "dynamic_smem_bytes", "stages", "tmem_columns"):
                assert found[what] == recorded[str(plan)][what], (str(plan), what)


ARITHMETIC = {"add.rn.f32", "cvt.rzi.s32.f32", "min.NaN.f32", "mul.rn.f32", "rcp.approx.f32"}


@pytest.mark.parametrize(
    ("name", "product", "known"),
    [
        ("few", "tcgen05.mma kind::mxf8f6f4 cta_group::1 SS KK m128 n16 k32", False),  # N of 64 to 192 is known
        ("pairs", "tcgen05.mma kind::mxf8f6f4 cta_group::2 SS KK m256 n64 k32", True),
    ],
    ids=["alone", "pair"],
)
def test_forms_are_those_of_known_right_kernels(name: str, product: str, known: bool) -> None:
    from ptx_emulator.campaigns.form_coverage import foreign_forms, forms_of, uncovered

    _, device = launched(CASES[name], record=True)
    for recording in device.recordings[PRODUCTS]:
        forms = forms_of(recording)
        assert [form for form in forms if form.startswith("tcgen05.mma kind")] == [product]
        missing = set(uncovered(forms, foreign_forms()))
        # The rest is arithmetic, which test_alu.py compares with NumPy.
        assert missing <= ARITHMETIC | (set() if known else {product})


@pytest.mark.slow
@pytest.mark.usefixtures("in_turns")
@pytest.mark.parametrize("product", [0, 1], ids=["gate-up", "down"])
@pytest.mark.parametrize("pairs", [False, True], ids=["alone", "pair"])
def test_deleted_synchronisation_is_noticed(product: int, pairs: bool) -> None:
    """Every deletion is noticed, except those explained in emulator/results/mutation_reasons.json."""
    from ptx_emulator import Checks

    case = replace(CASES["k-longer-than-the-stages"], tokens=2, channels=512 if pairs else 384)
    _, device = launched(case, tokens=32 if pairs else None, pairs=pairs, checks=Checks.strict(), record=True)
    name = f"experts_sm100_{'pair_' * pairs}{('gate_up', 'down')[product]}"
    rates = delete_synchronisation(name, device, PRODUCTS.start + product)
    assert rates and set(rates.values()) == {1}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 64, 300, 4096])
def test_a_blackwell_gpu_makes_the_sum(tokens: int) -> None:
    """Flash's shapes with fewer experts: a token has the same bits alone, in a batch and in a replayed graph."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("needs a Blackwell GPU of data centres (sm_100a)")
    case = Case(tokens, chosen=6, experts=16, d=4096, channels=2048)
    x, weights, ids, packed = case.inputs()
    x, weights, ids = x.cuda(), weights.cuda(), ids.cuda()
    packed = Mxfp4Experts(*(matrix.cuda() for matrix in (packed.w13, packed.w13_scale, packed.w2, packed.w2_scale)))
    tiled = packed.tiled()

    def run(rows: slice) -> Tensor:
        return moe.mxfp4_experts_forward(x[rows], weights[rows], ids[rows], tiled, LIMIT, impl="sm100")

    out = run(slice(None))
    few = slice(0, min(tokens, 64))
    expected = moe.mxfp4_experts_forward(x[few], weights[few], ids[few], packed, LIMIT, impl="ref")
    assert (out[few] - expected).norm() <= 2.0**-8 * expected.norm()
    assert same_bits(run(slice(tokens - 1, tokens)), out[-1:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run(slice(None))
    graph.replay()
    assert same_bits(again, out)
