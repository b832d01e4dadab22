"""The launches of the experts on Hopper (sm_90a): work list, quantiser, first product, quantiser, second product, sum.
The products of few tokens quantise their input themselves.

Sizes of all buffers follow from shapes, and the host never waits for the device: CUDA graphs can capture a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from cutlass import Int32
from torch import Tensor

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host.addresses import address
from dsv4_kernels.host.arch import ARCHITECTURES, H200_MULTIPROCESSORS, hardware_multiprocessors
from dsv4_kernels.host.expert_rows import ExpertRows
from dsv4_kernels.host.launch import MOST_CTAS_IN_Y, current_stream, load_launcher
from dsv4_kernels.host.strides import check_codes, check_rows, stride_bytes
from dsv4_kernels.model_shapes import ModelShapes
from dsv4_kernels.moe import sums, work_list
from dsv4_kernels.moe.sm90 import few_kernel, rows
from dsv4_kernels.moe.sm90.kernel import launch
from dsv4_kernels.moe.sm90.plan import (
    FEW,
    NARROW,
    PAIRED,
    WIDE,
    Arguments,
    FewPlan,
    Plan,
    Product,
    Shape,
    few_ctas,
    few_plan,
)
from dsv4_kernels.moe.sm90.weights import STEP, TILE_ROWS, HopperExperts, HopperMatrix
from dsv4_kernels.moe.work_list import NEVER, Listed
from dsv4_kernels.moe.workspace import EARLY_TOKENS, GROUP, most_groups

ARCH = ARCHITECTURES["sm90"]
FEW_TILES = H200_MULTIPROCESSORS
"""Work tiles of a token's first product by NARROW below which FEW is chosen. With 48 (V4-Flash on four ranks) the
experts of a token take 22.7 us by FEW and 27.4 by NARROW, those of four tokens 55.9 and 42.0
(`benchmarks/results/experts_few_h200.json`)."""
PAIRED_SLOTS = 56
"""Mean slots of an expert up to which decode's shapes are chosen: with 48 slots they take 0.8 of WIDE's time, with 64
more than WIDE (`benchmarks/results/experts_prefill_h200.json`)."""


def shape_for(tokens: int, chosen: int, num_experts: int, row_tiles: int) -> Shape:
    """The shape of work tiles for a call, from sizes alone. All shapes give the same bits.

    Args:
        tokens: tokens of the call, which is also the most slots of an expert.
        chosen: experts of a token.
        num_experts: experts of this rank.
        row_tiles: work tiles of TILE_ROWS rows of an expert's first product.
    """
    if tokens * chosen > PAIRED_SLOTS * num_experts:
        return WIDE
    if tokens == 1 and chosen * row_tiles < FEW_TILES:
        return FEW
    return NARROW if tokens <= NARROW.slots else PAIRED


def least_paired_tiles(packed: HopperExperts, multiprocessors: int) -> int:
    """The fewest work tiles of up to 64 slots with which such wide tiles are used.

    It is the number that gives every multiprocessor a work tile; with fewer, narrower tiles keep more multiprocessors
    busy. If a product has an odd number of steps, a tile could begin at an odd stage, so wide tiles are never used.
    """
    if any(matrix.codes.shape[2] % 2 for matrix in (packed.w13, packed.w2)):
        return NEVER
    return -(-multiprocessors // min(matrix.codes.shape[1] for matrix in (packed.w13, packed.w2)))


def compile(plan: Plan | FewPlan, arch: str = ARCH) -> Callable[..., None]:
    """The launcher of a product: (arguments, CTAs, stream)."""
    if isinstance(plan, FewPlan):
        return load_launcher(
            f"experts_sm90_few_{plan.product.name.lower()}", plan, arch, few_kernel.launch, Arguments, Int32, plan
        )
    return load_launcher("experts_sm90", plan, arch, launch, Arguments, Int32, plan)


def list_work(
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    offset: int,
    shape: Shape,
    least_paired: int = NEVER,
) -> Listed:
    """The slots and work tiles of a call.

    Args:
        weights: [T, k] fp32, contiguous.
        experts: [T, k] int32, contiguous, among all experts.
        num_experts: experts of this rank; the first has id `offset`.
        offset: id of this rank's first expert.
        shape: shape of the products' work tiles.
        least_paired: for a paired shape, see `least_paired_tiles`.
    """
    paired = (shape.slots, least_paired) if shape.paired else None
    return work_list.list_work(weights, experts, num_experts, offset, shape.room, ARCH, paired)


def quantise(x: Tensor, listed: Listed, *, chooses: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales) of all slots in the order of the stages (rows.py).

    Args:
        x: bf16, rows of tokens [T, K] or of slots [slots, K].
        listed: the slots.
        chooses: whether the rows of x are tokens.
    """
    slots, k = listed.groups * GROUP, x.shape[1]
    codes = torch.empty(slots * k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(slots * (k // STEP), dtype=torch.float32, device=x.device)
    arguments = rows.QuantiseArguments(
        x=x.data_ptr(),
        x_row_bytes=stride_bytes(x, 0),
        source=listed.source.data_ptr(),
        group_tile=listed.group_tile.data_ptr(),
        tiles=listed.tiles.data_ptr(),
        totals=listed.totals.data_ptr(),
        steps=k // STEP,
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
    )
    launcher = rows.compile_quantise(chooses, ARCH)
    launcher(arguments, Int32(listed.groups), current_stream(x.device))
    return codes, scales


def multiply(
    plan: Plan | FewPlan,
    listed: Listed,
    codes: Tensor,
    scales: Tensor | None,
    weights: HopperMatrix,
    limit: float = 0.0,
) -> Tensor:
    """One product of all slots: bf16 [slots, I] or [slots, d]; rows of empty slots are undefined.

    Args:
        plan: the product, and the shape with which `listed` was made.
        listed: the slots.
        codes, scales: the result of `quantise`; if the plan gathers, [T, K] float8_e4m3fn and [T, K / 128] fp32; if it
            quantises, bf16 [T, K] for GATE_UP or [slots, K] for DOWN, and None.
        weights: of all experts of the rank.
        limit: swiglu_limit, for GATE_UP.
    """
    _, row_tiles, steps, _ = weights.codes.shape
    columns = row_tiles * TILE_ROWS // (2 if plan.product is Product.GATE_UP else 1)
    out = torch.empty(listed.groups * GROUP, columns, dtype=torch.bfloat16, device=codes.device)
    few = isinstance(plan, FewPlan)
    has_scale_strides = scales is not None and (few or plan.gathers)
    arguments = Arguments(
        codes=weights.codes.data_ptr(),
        shifts=weights.shifts.data_ptr(),
        shift_expert_bytes=stride_bytes(weights.shifts, 0),
        factors=weights.factors.data_ptr(),
        factor_expert_bytes=stride_bytes(weights.factors, 0),
        tokens=codes.data_ptr(),
        token_scales=address(scales),
        token_row_bytes=stride_bytes(codes, 0) if few or plan.gathers else 0,
        scale_row_bytes=stride_bytes(scales, 0) if has_scale_strides else 0,
        scale_step_bytes=stride_bytes(scales, 1) if has_scale_strides else 0,
        source=listed.source.data_ptr(),
        tiles=listed.tiles.data_ptr(),
        num_tiles=listed.totals.data_ptr(),
        row_tiles=row_tiles,
        steps=steps,
        routing=listed.routing.data_ptr(),
        limit=limit,
        out=out.data_ptr(),
    )
    multiprocessors, tiles = hardware_multiprocessors(codes.device), listed.groups * row_tiles
    if few:
        ctas = few_ctas(plan, 2 * tiles, multiprocessors)
    else:
        ctas = min(plan.shape.ctas_per_sm * multiprocessors, tiles)
    compile(plan)(arguments, Int32(ctas), current_stream(codes.device))
    return out


def sum_rows(
    slot_rows: Tensor,
    experts: Tensor,
    listed: Listed,
    dtype: torch.dtype,
    shared: Tensor | None,
    reads_ahead: bool = False,
) -> Tensor:
    """`sums.sum_rows` on Hopper."""
    return sums.sum_rows(slot_rows, experts, listed.slot_of_pair, dtype, shared, ARCH, reads_ahead)


class Work(NamedTuple):
    """The work of a call: the result of `plan_work`."""

    experts: Tensor  # [T, k] int32
    listed: Listed
    shape: Shape
    overlaps: bool
    """Whether launches begin early."""


def plan_work(
    weights: Tensor,
    experts: Tensor,
    packed: HopperExperts,
    expert_offset: int = 0,
    shape: Shape | None = None,
    overlaps: bool | None = None,
) -> Work:
    """The slots and work tiles of the routed experts of this rank, for one token at least.

    Args:
        weights: [T, k] fp32.
        experts: [T, k] integer, among all experts.
        packed: weights of this rank.
        expert_offset: id of the rank's first expert.
        shape: shape of the work tiles; None chooses by the numbers of tokens and experts. The bits are the same.
        overlaps: whether launches begin early; None decides by the tokens and `dependent_launch.is_on`.

    Raises:
        ValueError: there are more experts than the work list supports, or more tokens than a grid of the quantiser
            takes.
    """
    groups = most_groups(experts.numel(), packed.num_experts)
    if groups > MOST_CTAS_IN_Y:
        raise ValueError(
            f"mxfp4_experts_forward on sm90: {len(experts)} tokens of {experts.shape[1]} experts may need {groups} "
            f"groups of {GROUP} slots; a grid has at most {MOST_CTAS_IN_Y}. Lower --chunked-prefill-size"
        )
    weights, experts = weights.float().contiguous(), experts.int().contiguous()
    shape = shape or shape_for(*experts.shape, packed.num_experts, packed.w13.codes.shape[1])
    least_paired = least_paired_tiles(packed, hardware_multiprocessors(experts.device))
    if overlaps is None:
        overlaps = dependent_launch.is_on() and len(experts) <= EARLY_TOKENS
    with dependent_launch.switched(overlaps):
        listed = list_work(weights, experts, packed.num_experts, expert_offset, shape, least_paired)
    return Work(experts, listed, shape, overlaps)


def multiply_all(
    x: Tensor,
    work: Work,
    packed: HopperExperts,
    swiglu_limit: float,
    quantised: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The weighted output of every slot of `work`: bf16 [slots, d]; rows of empty slots are undefined.

    Args:
        x: [T, d] bf16.
        work: the result of `plan_work`.
        packed: weights of this rank.
        swiglu_limit: clamp of gate and up.
        quantised: `fp8_quantise(x, 128)`, scales of any strides; used if the work has NARROW's or FEW's shape.

    Raises:
        ValueError: rows of x, or of its codes, cannot be read 16 bytes at a time.
    """
    check_rows("mxfp4_experts_forward: x", x, packed.hidden_size)
    listed, shape = work.listed, work.shape
    gathers = quantised is not None and shape in (FEW, NARROW)
    if gathers:
        check_codes("mxfp4_experts_forward on sm90: codes of tokens", quantised[0], packed.hidden_size)
    with dependent_launch.switched(work.overlaps):
        if shape is FEW:
            of_tokens = quantised if gathers else (x, None)
            gate_up, down = few_plans(packed.hidden_size, gathers)
            hidden = multiply(gate_up, listed, *of_tokens, packed.w13, swiglu_limit)
            return multiply(down, listed, hidden, None, packed.w2)
        of_tokens = quantised if gathers else quantise(x, listed, chooses=True)
        hidden = multiply(Plan(Product.GATE_UP, shape, gathers), listed, *of_tokens, packed.w13, swiglu_limit)
        return multiply(Plan(Product.DOWN, shape), listed, *quantise(hidden, listed, chooses=False), packed.w2)


def few_plans(hidden_size: int, gathers: bool) -> tuple[FewPlan, FewPlan]:
    """The plans of both products for few tokens, from d and whether codes of tokens are gathered."""
    return few_plan(Product.GATE_UP, hidden_size // STEP, quantises=not gathers), few_plan(Product.DOWN)


def reads_ahead(work: Work) -> bool:
    """Whether the sum may read its lists before the launch before has ended.

    The products of few tokens call `begin`, as does a product of the shared expert after them.
    """
    return work.shape is FEW


def sum_products(slot_rows: Tensor, work: Work, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
    """The sum over the experts of each token: [T, d] in `dtype`.

    Args:
        slot_rows: the result of `multiply_all`.
        work: the result of `plan_work`.
        dtype: fp32 or bf16.
        shared: [T, d] bf16, output of the shared expert, added to the sum; for a bf16 result, to the rounded sum.

    Raises:
        ValueError: rows of `shared` cannot be read 16 bytes at a time.
    """
    with dependent_launch.switched(work.overlaps):
        return sum_rows(slot_rows, work.experts, work.listed, dtype, shared, reads_ahead=reads_ahead(work))


def rows_to_sum(slot_rows: Tensor, work: Work, dtype: torch.dtype, shared: Tensor) -> ExpertRows:
    """The rows that `sum_products` sums, for a boundary that sums them; arguments as for `sum_products`."""
    total = partial(sum_products, slot_rows, work, dtype, shared)
    return ExpertRows(slot_rows, work.experts, work.listed.slot_of_pair, shared, dtype, total, reads_ahead(work))


def experts_forward(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    packed: HopperExperts,
    swiglu_limit: float,
    expert_offset: int = 0,
    dtype: torch.dtype = torch.float32,
    shared: Tensor | None = None,
    shape: Shape | None = None,
    overlaps: bool | None = None,
    quantised: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The weighted sum over the routed experts of this rank: [T, d] in `dtype`.

    Args and errors: as for `plan_work`, `multiply_all` and `sum_products`.
    """
    if not x.shape[0]:
        return x.new_empty(x.shape, dtype=dtype)
    check_rows("mxfp4_experts_forward: x", x, packed.hidden_size)
    work = plan_work(weights, experts, packed, expert_offset, shape, overlaps)
    return sum_products(multiply_all(x, work, packed, swiglu_limit, quantised), work, dtype, shared)


def mxfp4_experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, packed: HopperExperts, swiglu_limit: float, expert_offset: int
) -> Tensor:
    """`dsv4_kernels.moe.mxfp4_experts_forward` on Hopper: x bf16, d and I multiples of 128.

    Raises:
        ValueError: the weights have not been arranged by `Mxfp4Experts.for_hopper`.
    """
    if not isinstance(packed, HopperExperts):
        raise ValueError("mxfp4_experts_forward on sm90 needs arranged weights; call Mxfp4Experts.for_hopper() at load")
    return experts_forward(x, weights, experts, packed, swiglu_limit, expert_offset)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of all kernels of `experts_forward`, for launches that begin early and for those that do not."""
    summed = sums.Sum(model.experts_per_token, fp32=model.experts_sum_fp32, adds_shared=True)
    of_any_call: list[Callable[[], object]] = [
        *(partial(compile, Plan(product, shape), arch) for shape in (PAIRED, WIDE) for product in Product),
        *(partial(rows.compile_quantise, chooses, arch) for chooses in (True, False)),
        partial(sums.compile, summed, arch),
        *work_list.compile_jobs(arch),
    ]
    plans: list[Plan | FewPlan] = [Plan(product, NARROW) for product in Product]
    plans += few_plans(model.hidden_size, gathers=False)
    if model.joins_launches and model.quantises_inputs:
        plans += [Plan(Product.GATE_UP, NARROW, gathers=True), few_plans(model.hidden_size, gathers=True)[0]]
    of_few_tokens: list[Callable[[], object]] = [partial(compile, plan, arch) for plan in plans]
    of_few_tokens.append(partial(sums.compile, replace(summed, reads_ahead=True), arch))
    # Calls of more than EARLY_TOKENS tokens launch nothing early.
    early = dict.fromkeys((dependent_launch.is_on(), False))
    return [
        *of_few_tokens,
        *(partial(dependent_launch.compiled, job, on) for on in early for job in of_any_call),
    ]
