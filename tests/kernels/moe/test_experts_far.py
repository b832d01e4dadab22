"""Experts whose weights, slots and tokens lie beyond 32 bits, emulated, against the same call with small tensors.

A full-size model has more than 2**31 bytes of codes. Here matrices are small and numbers large instead: a product reads
the numbers of experts and slots from the work list and does not know how many there are, so it runs a few work tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from ops.experts_cases import LIMIT, Case, emulated_on, packed_experts, packed_nvfp4_experts
from ops.hopper_experts import reading_ahead
from ops.memory_layout import far_apart, last_of_many, sparse
from ops.number_formats import same_bits
from ops.row_kernels import ARCH, LARGE_RESULT_BYTES, results_of
from torch import Tensor

from dsv4_kernels.moe import Mxfp4Experts, Nvfp4Experts
from dsv4_kernels.moe.sm90.weights import HopperExperts, HopperMatrix
from dsv4_kernels.moe.workspace import TileField
from dsv4_kernels.number_formats import encode_nvfp4
from dsv4_kernels.quant import fp8_quantise

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

BEYOND = 1 << 32
CASE = Case(5)  # three experts of 256 x 256 and 256 x 128


@contextmanager
def emulated(name: str, *in_place: Tensor) -> Iterator[Any]:
    """Enter an emulated device of the generation "sm90" or "sm100"; large results are in memory that is not copied."""
    from ptx_emulator import Checks

    with emulated_on(4, arch=ARCH[name], checks=Checks.strict()) as device, pytest.MonkeyPatch.context() as patch:
        use_large_ones_in_place(device, *in_place)
        patch.setattr(torch, "empty", results_of(device))
        yield device
    assert device.reports and not any(report.warnings for report in device.reports)


def use_large_ones_in_place(device: Any, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.untyped_storage().nbytes() >= LARGE_RESULT_BYTES:
            device.memory.use_in_place(tensor)


def spread(experts: Tensor, numbers: Tensor, stride: int | None = None) -> Tensor:
    """The same matrices as experts `numbers` of a tensor with so many experts; `stride` elements apart if given."""
    strides = (experts[0].numel() if stride is None else stride, *experts[0].contiguous().stride())
    many = sparse((int(numbers[-1]) + 1, *experts.shape[1:]), strides, experts.dtype)
    for number, expert in zip(numbers.tolist(), experts, strict=True):
        many[number] = expert
    assert many.untyped_storage().nbytes() > BEYOND
    return many


# ---- Hopper


def hopper_products(listed: Any, x: Tensor, experts: HopperExperts, few: bool = False) -> Tensor:
    """Output rows of all slots."""
    from dsv4_kernels.moe.sm90 import launch
    from dsv4_kernels.moe.sm90.plan import NARROW, Plan, Product

    if few:
        gate_up, down = launch.few_plans(x.shape[1], gathers=True)
        codes = fp8_quantise(x, 128, column_major=True)
        hidden = launch.multiply(gate_up, listed, *codes, experts.w13, LIMIT)
        return launch.multiply(down, listed, hidden, None, experts.w2)
    quantised = launch.quantise(x, listed, chooses=True)
    hidden = launch.multiply(Plan(Product.GATE_UP, NARROW), listed, *quantised, experts.w13, LIMIT)
    quantised = launch.quantise(hidden, listed, chooses=False)
    return launch.multiply(Plan(Product.DOWN, NARROW), listed, *quantised, experts.w2)


@pytest.mark.parametrize("few", [False, True], ids=["narrow", "few"])
def test_hopper_s_weights_beyond_32_bits(few: bool) -> None:
    """Codes, shifts and factors of experts that are 2**32 bytes and more apart."""
    from dsv4_kernels.moe.sm90 import launch
    from dsv4_kernels.moe.sm90.plan import NARROW

    x, weights, ids, packed = CASE.inputs()
    near, numbers = packed.for_hopper(), torch.tensor([0, 1 << 18, (1 << 19) + 5])

    def far(matrix: HopperMatrix) -> HopperMatrix:
        shifts, factors = spread(matrix.shifts, numbers, 1 << 14), spread(matrix.factors, numbers, 1 << 13)
        return HopperMatrix(spread(matrix.codes, numbers), shifts, factors, 0)

    spaced = HopperExperts(far(near.w13), far(near.w2))
    with emulated("sm90", *spaced.w13[:3], *spaced.w2[:3]) as device, reading_ahead(device):
        listed = launch.list_work(weights, ids, CASE.experts, 0, NARROW)
        expected = hopper_products(listed, x, near)
        of_tiles = listed.tiles[: int(listed.totals[0]), TileField.EXPERT]
        of_tiles.copy_(numbers[of_tiles.long()])
        found = hopper_products(listed, x, spaced, few)
    slots = listed.slot_of_pair.long()
    assert same_bits(found[slots], expected[slots]) and expected[slots].any()


def moved(listed: Any, before: int) -> Any:
    """The same work list after `before` groups of slots that no work tile uses."""
    from dsv4_kernels.moe.work_list import Listed

    tiles, groups = listed.totals.tolist()
    moved_tiles = listed.tiles.clone()
    moved_tiles[:tiles, TileField.FIRST_GROUP] += before
    return Listed(
        slot_of_pair=listed.slot_of_pair + 8 * before,
        source=last_of_many(listed.source[: 8 * groups], 8 * (before + groups)),
        routing=last_of_many(listed.routing[: 8 * groups], 8 * (before + groups)),
        group_tile=last_of_many(listed.group_tile[:groups], before + groups),
        tiles=moved_tiles,
        totals=torch.tensor([tiles, before + groups], dtype=torch.int32),
    )


def test_hopper_s_slots_beyond_32_bits() -> None:
    """Codes of slots, h, output rows and routing weights of the last slots of many."""
    from dsv4_kernels.moe.sm90 import launch
    from dsv4_kernels.moe.sm90.plan import NARROW, Plan, Product

    x, weights, ids, packed = CASE.inputs()
    experts, before = packed.for_hopper(), 1 << 22
    with emulated("sm90") as device:
        listed = launch.list_work(weights, ids, CASE.experts, 0, NARROW)
        slots = 8 * int(listed.totals[1])
        far = moved(listed, before)
        use_large_ones_in_place(device, *far)
        rows = []
        for its, behind in ((listed, 0), (far, 8 * before)):

            def quantised(rows: Tensor, chooses: bool, behind: int = behind) -> list[Tensor]:
                """Codes and scales of the first slots, moved after so many other slots."""
                made = launch.quantise(rows, listed, chooses=chooses)
                parts = [part[: slots * len(part) // (8 * listed.groups)] for part in made]
                if behind:
                    parts = [last_of_many(part, len(part) // slots * (behind + slots)) for part in parts]
                    use_large_ones_in_place(device, *parts)
                return parts

            hidden = launch.multiply(Plan(Product.GATE_UP, NARROW), its, *quantised(x, True), experts.w13, LIMIT)
            used = hidden[behind : behind + slots]
            of_hidden = quantised(torch.nn.functional.pad(used, (0, 0, 0, 8 * listed.groups - slots)), False)
            rows.append(launch.multiply(Plan(Product.DOWN, NARROW), its, *of_hidden, experts.w2))
            assert not behind or min(hidden.nbytes, rows[-1].nbytes) > BEYOND
        expected = launch.sum_rows(rows[0], ids, listed, torch.float32, None)
        found = launch.sum_rows(rows[1], ids, far, torch.float32, None)
    assert same_bits(found, expected) and found.any()


@pytest.mark.parametrize("chooses", [True, False], ids=["tokens", "slots"])
def test_hopper_s_quantised_rows_beyond_32_bits(chooses: bool) -> None:
    """A case has as many groups of slots as a grid takes, with so many channels that codes have 2**32 bytes; of the
    CTAs, one a step and group, only those of the last groups run."""
    from dsv4_kernels.moe.sm90 import launch

    _, weights, ids, _ = CASE.inputs()
    k = 8448
    with emulated("sm90") as device:
        listed = launch.list_work(weights, ids, CASE.experts, 0, launch.NARROW)
        groups = int(listed.totals[1])
        rows = torch.randn(
            len(ids) if chooses else 8 * groups, k, generator=torch.Generator().manual_seed(0)
        ).bfloat16()
        near = rows if chooses else torch.nn.functional.pad(rows, (0, 0, 0, 8 * (listed.groups - groups)))
        expected = launch.quantise(near, listed, chooses=chooses)
        far = moved(listed, 65_535 - groups)
        if not chooses:
            rows = last_of_many(rows, 8 * 65_535)
        use_large_ones_in_place(device, rows, *far)
        device.options = replace(device.options, ends=(0, groups * k // 128))
        found = launch.quantise(rows, far, chooses=chooses)
    assert found[0].nbytes > BEYOND
    for a, b in zip(found, expected, strict=True):
        count = len(b) // listed.groups * groups
        assert same_bits(a[-count:].contiguous(), b[:count].contiguous())


def test_more_groups_than_a_grid_takes_are_refused() -> None:
    from dsv4_kernels.moe.sm90 import launch

    many = torch.zeros(1, 1).expand(60_000, 10)
    x, experts = torch.zeros(1, 256).bfloat16().expand(60_000, 256), packed_experts(3, 256, 128).for_hopper()
    with pytest.raises(ValueError, match=r"75002 groups of 8 slots; a grid has at most 65535.*--chunked-prefill-size"):
        launch.experts_forward(x, many, many.int(), experts, LIMIT)


def test_hopper_s_tokens_beyond_32_bits() -> None:
    """Rows of x and of the shared expert far apart; then sums of the last tokens of many, in both dtypes."""
    from dsv4_kernels.moe.sm90 import launch

    x, weights, ids, packed = CASE.inputs()
    experts, shared = packed.for_hopper(), x.flip(0)
    far = far_apart(x), far_apart(shared)
    count = (1 << 23) + len(x)
    many = last_of_many(shared, count)
    with emulated("sm90", *far, many) as device, reading_ahead(device):
        for dtype in (torch.float32, torch.bfloat16):
            expected = launch.experts_forward(x, weights, ids, experts, LIMIT, 0, dtype, shared)
            apart = launch.experts_forward(far[0], weights, ids, experts, LIMIT, 0, dtype, far[1])
            assert same_bits(apart, expected)
        codes, scales = fp8_quantise(x, 128, column_major=True)
        gathered = far_apart(codes.view(torch.uint8), 16).view(codes.dtype), far_apart(scales)
        use_large_ones_in_place(device, *gathered)
        assert same_bits(
            launch.experts_forward(x, weights, ids, experts, LIMIT, quantised=gathered),
            launch.experts_forward(x, weights, ids, experts, LIMIT, quantised=(codes, scales)),
        )
        listed = launch.list_work(weights, ids, CASE.experts, 0, launch.NARROW)
        rows = hopper_products(listed, x, experts)
        pairs = last_of_many(ids, count), listed._replace(slot_of_pair=last_of_many(listed.slot_of_pair, count))
        use_large_ones_in_place(device, pairs[0], *pairs[1])
        device.options = replace(device.options, ends=(0, 2))  # four tokens a CTA
        for dtype in (torch.bfloat16, torch.float32):
            found = launch.sum_rows(rows, *pairs, dtype, many)
            wanted = launch.sum_rows(rows, ids, listed, dtype, shared)
            assert found.nbytes > BEYOND and same_bits(found[-len(x) :], wanted)


# ---- Blackwell


def blackwell_products(packed: Mxfp4Experts | Nvfp4Experts, work: Any, x: Any) -> list[Tensor]:
    """h, its scales, and output rows of all slots."""
    from dsv4_kernels.moe.sm100 import launch

    hidden = launch.hidden_rows(x, packed, work, LIMIT)
    return [*hidden, launch.output_rows(hidden, packed, work)]


def far_experts(packed: Any, numbers: Tensor) -> Any:
    """The same experts with these numbers; scales in tiles."""
    far = {name: spread(getattr(packed, name), numbers) for name in ("w13", "w13_scale", "w2", "w2_scale")}
    for name in ("w13_global", "w2_global"):
        if hasattr(packed, name):
            values = getattr(packed, name)
            far[name] = torch.zeros(int(numbers[-1]) + 1, *values.shape[1:]).index_copy_(0, numbers, values)
    return replace(packed, **far)


@pytest.mark.parametrize("numbers", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("what", ["weights", "slots", "tokens"])
def test_blackwell_s_tensors_beyond_32_bits(numbers: str, what: str) -> None:
    """Codes and scales of experts that lie far apart; h, its scales, output rows, sources and routing weights of the
    last slots of many; codes and scales of the last tokens of many."""
    from dsv4_kernels.moe.sm100 import launch

    is_nvfp4 = numbers == "nvfp4"
    case = Case(5, d=512, channels=256) if is_nvfp4 else CASE
    x, weights, ids, _ = case.inputs()
    packed = (packed_nvfp4_experts if is_nvfp4 else packed_experts)(case.experts, case.d, case.channels).tiled()
    x = launch.Rows(*(encode_nvfp4(x, packed.w13_input) if is_nvfp4 else fp8_quantise(x)))
    with emulated("sm100"):
        work = launch.plan_work(weights, ids, packed)
        expected = blackwell_products(packed, work, x)
    tiles, groups = work.listed.totals.tolist()
    slots, listed = 8 * groups, work.listed
    of_tiles = listed.tiles[:tiles]
    if what == "weights":
        last = (1 << 20 if is_nvfp4 else 1 << 22) + 5
        of_experts = torch.tensor([0, last // 2, last])
        packed = far_experts(packed, of_experts)
        of_tiles[:, TileField.EXPERT] = of_experts[of_tiles[:, TileField.EXPERT].long()].int()
    elif what == "slots":
        before = (1 << 30) // 8
        work = work._replace(listed=moved(listed, before))
    else:
        count = (1 << 29) + len(x.codes)  # codes of 128 bytes or more, scales of four bytes or more for 128 channels
        x = launch.Rows(last_of_many(x.codes, count), last_of_many(x.scales, count))
        listed.source[listed.source >= 0] += 1 << 29
    matrices = (packed.w13, packed.w13_scale, packed.w2, packed.w2_scale)
    with emulated("sm100", *matrices, *work.listed, *x):
        found = blackwell_products(packed, work, x)
    first = 8 * before if what == "slots" else 0
    for a, b in zip(found, expected, strict=True):
        assert what != "slots" or a.nbytes > BEYOND
        assert same_bits(a[first : first + slots].contiguous(), b[:slots].contiguous())


def test_tokens_in_nvfp4_beyond_32_bits() -> None:
    """Rows of x far apart; then codes of the last tokens of many, of whose CTAs only the last run."""
    from dsv4_kernels.moe.sm100 import nvfp4

    x = torch.randn(5, 8192, generator=torch.Generator().manual_seed(0)).bfloat16()
    factor, count = torch.tensor(0.01), (1 << 20) + len(x)
    expected, far, many = encode_nvfp4(x, factor), far_apart(x), last_of_many(x, count)
    with emulated("sm100", far, many) as device:
        apart = nvfp4.quantise(far, factor, ARCH["sm100"])
        device.options = replace(device.options, ends=(0, len(x) * 8192 // 16 // nvfp4.THREADS))
        last = nvfp4.quantise(many, factor, ARCH["sm100"])
    assert last[0].nbytes >= BEYOND
    for a, b, wanted in zip(apart, last, expected, strict=True):
        assert same_bits(a, wanted) and same_bits(b[-len(x) :].contiguous(), wanted)
