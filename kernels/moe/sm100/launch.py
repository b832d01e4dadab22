"""The launches of the experts on Blackwell (sm_100a): work list, quantiser, first product, second product, sum.

Sizes of all buffers follow from shapes, and the host never waits for the device: CUDA graphs can capture a call. The
first product quantises h itself, so there is one quantiser, and none if the caller has quantised tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from cutlass import Int32
from torch import Tensor

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host.arch import architecture, hardware_multiprocessors
from dsv4_kernels.host.expert_rows import ExpertRows
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import check_codes, check_rows, stride_bytes
from dsv4_kernels.model_shapes import ModelShapes
from dsv4_kernels.moe import sums, work_list
from dsv4_kernels.moe.sm100 import nvfp4
from dsv4_kernels.moe.sm100.kernel import launch
from dsv4_kernels.moe.sm100.plan import TILE_ROWS, Arguments, Numbers, Plan, Product
from dsv4_kernels.moe.weights import Mxfp4Experts, Nvfp4Experts
from dsv4_kernels.moe.work_list import Listed
from dsv4_kernels.moe.workspace import EARLY_TOKENS, GROUP
from dsv4_kernels.registry import select

STEP = 128
"""Channels that share a scale of MXFP4's activations."""
WIDTHS = (16, 32, 64, 96)
"""Slots of a work tile: the N of an instruction."""
PAIR_TOKENS = {Numbers.MXFP8_MXFP4: 64, Numbers.NVFP4: 96}
"""Slots of a work tile from which a pair of CTAs computes it.

With fewer slots the largest bound is that of the weights from memory, which a pair leaves as it is. With 64, padded
codes take longer at the port of shared memory. Packed codes do not; but an expert with several tiles reads memory for
the first only, and its tiles have 96 slots (`benchmarks/results/experts_sm100_static.json`).
"""

PLANS = tuple(
    Plan(product, tokens, numbers, ctas)
    for numbers in Numbers
    for product in Product
    for tokens in WIDTHS
    for ctas in ((1, 2) if tokens >= PAIR_TOKENS[numbers] else (1,))
)
"""The plans of all calls."""

Packed = Mxfp4Experts | Nvfp4Experts


class Rows(NamedTuple):
    """Quantised rows of tokens or slots."""

    codes: Tensor  # e4m3 [rows, K], or e2m1 uint8 [rows, K / 2]; channels are contiguous
    scales: Tensor  # fp32 powers of two [rows, K / 128] of any strides, or e4m3 [rows, K / 16], channels contiguous


class Work(NamedTuple):
    """The work of a call: the result of `plan_work`."""

    experts: Tensor  # [T, k] int32
    listed: Listed
    tokens: int
    """Slots of a work tile at most."""
    pairs: bool
    """Whether products with an even number of tiles of rows use pairs of CTAs."""
    overlaps: bool
    """Whether launches begin early."""


def numbers_of(packed: Packed) -> Numbers:
    """The number formats of the products with these weights."""
    return Numbers.NVFP4 if isinstance(packed, Nvfp4Experts) else Numbers.MXFP8_MXFP4


def tokens_of_a_tile(tokens: int, chosen: int, num_experts: int) -> int:
    """The slots of a work tile, of WIDTHS: as many as two times an expert's mean, or as all tokens of the call.

    An expert with more slots than a tile reads its weights once for each of its tiles. All widths give the same bits.
    """
    wanted = min(tokens, -(-2 * tokens * chosen // num_experts))
    return next((width for width in WIDTHS if wanted <= width), WIDTHS[-1])


def compile(plan: Plan, arch: str) -> Callable[..., None]:
    """The launcher of a plan: (arguments, CTAs, stream)."""
    return load_launcher("experts_sm100", plan, arch, launch, Arguments, Int32, plan)


def plan_work(
    weights: Tensor,
    experts: Tensor,
    packed: Packed,
    expert_offset: int = 0,
    tokens: int | None = None,
    overlaps: bool | None = None,
    pairs: bool | None = None,
) -> Work:
    """The slots and work tiles of the routed experts of this rank, for one token at least.

    Args:
        weights: [T, k] fp32.
        experts: [T, k] integer, among all experts.
        packed: weights of this rank.
        expert_offset: id of the rank's first expert.
        tokens: slots of a work tile; None chooses by the numbers of tokens and experts. The bits are the same.
        overlaps: whether launches begin early; None decides by the tokens and `dependent_launch.is_on`.
        pairs: whether pairs of CTAs compute products with an even number of tiles of rows; None decides by the slots of
            a work tile. The bits are the same.

    Raises:
        ValueError: there are more experts than the work list supports.
    """
    weights, experts = weights.float().contiguous(), experts.int().contiguous()
    tokens = tokens or tokens_of_a_tile(*experts.shape, packed.num_experts)
    if overlaps is None:
        overlaps = dependent_launch.is_on() and len(experts) <= EARLY_TOKENS
    with dependent_launch.switched(overlaps):
        arch = architecture("sm100", experts.device)
        listed = work_list.list_work(weights, experts, packed.num_experts, expert_offset, tokens, arch)
    pairs = tokens >= PAIR_TOKENS[numbers_of(packed)] if pairs is None else pairs
    return Work(experts, listed, tokens, pairs, overlaps)


def plan_of(product: Product, rows: int, packed: Packed, work: Work) -> Plan:
    """The plan of a product with `rows` output rows: one CTA, or a pair if it has two tiles of rows for each pair."""
    ctas = 2 if work.pairs and rows % (2 * TILE_ROWS) == 0 else 1
    return Plan(product, work.tokens, numbers_of(packed), ctas)


def multiply(
    plan: Plan,
    listed: Listed,
    x: Rows,
    weight: Tensor,
    weight_scale: Tensor,
    out: Rows | Tensor,
    limit: float = 0.0,
    factors: Tensor | None = None,
    hidden_factor: Tensor | None = None,
) -> None:
    """Launches one product, which writes a row for each slot of the list, slots that pad a group included.

    Args:
        plan: the product, and at least the slots of a tile with which `listed` was made.
        listed: the slots.
        x: rows of tokens for GATE_UP, of slots for DOWN.
        weight: int8 or uint8 [E, rows, K / 2].
        weight_scale: uint8 [E, rows / 128, K / 128 (NVFP4: K / 64), 512].
        out: h of all slots, contiguous, or bf16 [slots, d] for DOWN.
        limit: swiglu_limit, for GATE_UP.
        factors: NVFP4: fp32 [E, 2], see `Arguments`.
        hidden_factor: NVFP4, GATE_UP: fp32 [], the scale of h.
    """
    experts, rows, half = weight.shape
    row_tiles = rows // plan.matrices // TILE_ROWS
    codes, scales = x
    of_step = 1 if plan.numbers is Numbers.MXFP8_MXFP4 else plan.step // nvfp4.NVFP4_BLOCK
    arguments = Arguments(
        weights=weight.data_ptr(),
        weight_scales=weight_scale.data_ptr(),
        weight_rows=experts * rows,
        rows=rows,
        k=2 * half,
        x=codes.data_ptr(),
        x_row_bytes=stride_bytes(codes, 0),
        x_scales=scales.data_ptr(),
        scale_row_bytes=stride_bytes(scales, 0),
        scale_step_bytes=of_step * stride_bytes(scales, 1),
        source=listed.source.data_ptr(),
        routing=listed.routing.data_ptr(),
        limit=limit,
        tiles=listed.tiles.data_ptr(),
        num_tiles=listed.totals.data_ptr(),
        row_tiles=row_tiles,
        out=out.codes.data_ptr() if isinstance(out, Rows) else out.data_ptr(),
        out_scales=out.scales.data_ptr() if isinstance(out, Rows) else 0,
        factors=0 if factors is None else factors.data_ptr(),
        hidden_factor=0 if hidden_factor is None else hidden_factor.data_ptr(),
    )
    resident = hardware_multiprocessors(codes.device) // plan.ctas * plan.ctas  # whole pairs
    num_ctas = min(resident, listed.groups * row_tiles)
    compile(plan, architecture("sm100", codes.device))(arguments, Int32(num_ctas), current_stream(codes.device))


def quantise(x: Tensor, packed: Packed) -> Rows:
    """Tokens as the first product takes them.

    Args:
        x: [T, d] bf16.
        packed: the weights.
    """
    if isinstance(packed, Nvfp4Experts):
        return Rows(*nvfp4.quantise(x, packed.w13_input, architecture("sm100", x.device)))
    return Rows(*select("fp8_quantise", x.device, x.dtype)(x, STEP, False))


def hidden_rows(x: Rows, packed: Packed, work: Work, limit: float) -> Rows:
    """h of every slot, quantised; rows of slots after the last group are undefined.

    Args:
        x: tokens, see `quantise`.
        packed: the weights.
        work: the result of `plan_work`.
        limit: swiglu_limit.
    """
    slots, channels, device = work.listed.groups * GROUP, packed.channels, x.codes.device
    if isinstance(packed, Nvfp4Experts):
        hidden = Rows(
            torch.empty(slots, channels // 2, dtype=torch.uint8, device=device),
            torch.empty(slots, channels // nvfp4.NVFP4_BLOCK, dtype=torch.float8_e4m3fn, device=device),
        )
        factors, hidden_factor = packed.gate_up_factors, packed.w2_input
    else:
        hidden = Rows(
            torch.empty(slots, channels, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(slots, channels // STEP, dtype=torch.float32, device=device),
        )
        factors = hidden_factor = None
    plan = plan_of(Product.GATE_UP, channels, packed, work)
    multiply(plan, work.listed, x, packed.w13, packed.w13_scale, hidden, limit, factors, hidden_factor)
    return hidden


def output_rows(hidden: Rows, packed: Packed, work: Work) -> Tensor:
    """w2 h of every slot: bf16 [slots, d]; rows of slots after the last group are undefined."""
    rows = torch.empty(len(hidden.codes), packed.hidden_size, dtype=torch.bfloat16, device=hidden.codes.device)
    factors = packed.down_factors if isinstance(packed, Nvfp4Experts) else None
    plan = plan_of(Product.DOWN, packed.hidden_size, packed, work)
    multiply(plan, work.listed, hidden, packed.w2, packed.w2_scale, rows, factors=factors)
    return rows


def multiply_all(
    x: Tensor, work: Work, packed: Packed, swiglu_limit: float, quantised: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The weighted output of every slot of `work`: bf16 [slots, d]; rows of slots after the last are undefined.

    Args:
        x: [T, d] bf16.
        work: the result of `plan_work`.
        packed: weights of this rank.
        swiglu_limit: clamp of gate and up.
        quantised: MXFP4: `fp8_quantise(x, 128)`, scales of any strides, which saves a launch.

    Raises:
        ValueError: rows of x, or of its codes, cannot be read 16 bytes at a time.
    """
    check_rows("mxfp4_experts_forward: x", x, packed.hidden_size)
    with dependent_launch.switched(work.overlaps):
        if quantised is None or isinstance(packed, Nvfp4Experts):
            rows = quantise(x, packed)
        else:
            rows = Rows(*quantised)
            check_codes("mxfp4_experts_forward on sm100: codes of tokens", rows.codes, packed.hidden_size)
        return output_rows(hidden_rows(rows, packed, work, swiglu_limit), packed, work)


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
        arch = architecture("sm100", slot_rows.device)
        return sums.sum_rows(slot_rows, work.experts, work.listed.slot_of_pair, dtype, shared, arch)


def rows_to_sum(slot_rows: Tensor, work: Work, dtype: torch.dtype, shared: Tensor) -> ExpertRows:
    """The rows that `sum_products` sums, for a boundary that sums them; arguments as for `sum_products`."""
    total = partial(sum_products, slot_rows, work, dtype, shared)
    return ExpertRows(slot_rows, work.experts, work.listed.slot_of_pair, shared, dtype, total)


def check_packed(name: str, packed: Packed, of_type: type, multiple: int) -> None:
    """Refuses weights that the kernels can't read.

    Raises:
        ValueError: they have not been arranged by `tiled`, or d or I is not a multiple of `multiple`.
    """
    if not isinstance(packed, of_type) or not packed.in_tiles:
        raise ValueError(f"{name} on sm100 needs scales in tiles; call {of_type.__name__}.tiled() once at load")
    if packed.hidden_size % multiple or packed.channels % multiple:
        raise ValueError(
            f"{name} on sm100: d is {packed.hidden_size}, I {packed.channels}; expected multiples of {multiple}"
        )


def experts_forward(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    packed: Packed,
    swiglu_limit: float,
    expert_offset: int = 0,
    dtype: torch.dtype = torch.float32,
    shared: Tensor | None = None,
    tokens: int | None = None,
    overlaps: bool | None = None,
    pairs: bool | None = None,
) -> Tensor:
    """The weighted sum over the routed experts of this rank: [T, d] in `dtype`.

    Args and errors: as for `plan_work`, `multiply_all` and `sum_products`.
    """
    if not x.shape[0]:
        return x.new_empty(x.shape, dtype=dtype)
    work = plan_work(weights, experts, packed, expert_offset, tokens, overlaps, pairs)
    return sum_products(multiply_all(x, work, packed, swiglu_limit), work, dtype, shared)


def mxfp4_experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, packed: Mxfp4Experts, swiglu_limit: float, expert_offset: int
) -> Tensor:
    """`dsv4_kernels.moe.mxfp4_experts_forward` on Blackwell: x bf16, d and I multiples of 128, scales in tiles.

    Raises:
        ValueError: the scales have not been arranged by `Mxfp4Experts.tiled`, or d or I is no multiple of 128.
    """
    check_packed("mxfp4_experts_forward", packed, Mxfp4Experts, STEP)
    return experts_forward(x, weights, experts, packed, swiglu_limit, expert_offset)


def nvfp4_experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, packed: Nvfp4Experts, swiglu_limit: float, expert_offset: int
) -> Tensor:
    """`dsv4_kernels.moe.nvfp4_experts_forward` on Blackwell: x bf16, d and I multiples of 256, scales in tiles.

    Raises:
        ValueError: the scales have not been arranged by `Nvfp4Experts.tiled`, or d or I is no multiple of 256.
    """
    check_packed("nvfp4_experts_forward", packed, Nvfp4Experts, 2 * STEP)
    return experts_forward(x, weights, experts, packed, swiglu_limit, expert_offset)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of all kernels of `experts_forward` with MXFP4 weights, for launches that begin early and for those
    that do not."""
    return _jobs(model, arch, Numbers.MXFP8_MXFP4)


def nvfp4_compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs as `compile_jobs`, with NVFP4 weights."""
    return _jobs(model, arch, Numbers.NVFP4)


def _jobs(model: ModelShapes, arch: str, numbers: Numbers) -> list[Callable[[], object]]:
    summed = sums.Sum(model.experts_per_token, fp32=model.experts_sum_fp32, adds_shared=True)
    jobs: list[Callable[[], object]] = [
        *(partial(compile, plan, arch) for plan in PLANS if plan.numbers is numbers),
        partial(sums.compile, summed, arch),
        *work_list.compile_jobs(arch),
    ]
    if numbers is Numbers.NVFP4:
        jobs.append(partial(nvfp4.compile, arch))
    # Calls of more than EARLY_TOKENS tokens launch nothing early.
    early = dict.fromkeys((dependent_launch.is_on(), False))
    return [partial(dependent_launch.compiled, job, on) for on in early for job in jobs]
