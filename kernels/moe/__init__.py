"""Experts: clamped SwiGLU, the sum over routed experts (DeepSeek-V4 specification, section 5)."""

from __future__ import annotations

from torch import Tensor

from dsv4_kernels.moe.weights import Mxfp4Experts, Nvfp4Experts
from dsv4_kernels.registry import select


def swiglu(gate: Tensor, up: Tensor, limit: float, impl: str | None = None) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` in fp32: the gate is clamped from above only.

    Args:
        gate: [..., I] fp32 or bf16.
        up: [..., I], same shape.
        limit: swiglu_limit, positive.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [..., I] fp32.

    Raises:
        ValueError: shapes differ, or limit is not positive.
    """
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape")
    _check_limit("swiglu", limit)
    return select("swiglu", gate.device, gate.dtype, impl)(gate, up, limit)


def fused_swiglu(gate_up: Tensor, limit: float, impl: str | None = None) -> Tensor:
    """`swiglu` of the two halves of one product's output, rounded to its dtype.

    Args:
        gate_up: [T, 2I] fp32 or bf16, the gate first.
        limit: swiglu_limit, positive.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, I] in gate_up's dtype.

    Raises:
        ValueError: gate_up is not [T, 2I], or limit is not positive.
    """
    _check_halves("fused_swiglu", gate_up)
    _check_limit("fused_swiglu", limit)
    return select("fused_swiglu", gate_up.device, gate_up.dtype, impl)(gate_up, limit)


def swiglu_fp8(
    gate_up: Tensor, limit: float, column_major: bool = False, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """`fp8_quantise(fused_swiglu(gate_up, limit), 128, column_major)`: the input of an FP8 product.

    Args:
        gate_up: [T, 2I] fp32 or bf16, the gate first.
        limit: swiglu_limit, positive.
        column_major: layout of the scales, as in `dsv4_kernels.quant.fp8_quantise`.
        impl: implementation by name; None lets the registry choose.

    Returns:
        codes [T, I] float8_e4m3fn, scales [T, ceil(I / 128)] fp32 powers of two.

    Raises:
        ValueError: gate_up is not [T, 2I], or limit is not positive.
    """
    _check_halves("swiglu_fp8", gate_up)
    _check_limit("swiglu_fp8", limit)
    return select("swiglu_fp8", gate_up.device, gate_up.dtype, impl)(gate_up, limit, column_major)


def experts_forward(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w13: Tensor,
    w2: Tensor,
    swiglu_limit: float,
    act_qdq_block: int | None = None,
    expert_offset: int = 0,
    impl: str | None = None,
) -> Tensor:
    """The weighted sum of this rank's routed experts.

    ::

        h = weight * swiglu(linear(x, w13[e]).chunk(2))      # the release multiplies by weight before it quantises h
        y = Σ_e linear(h.to(x.dtype), w2[e]).float()         # by rising expert id

    Args:
        x: [T, d] fp32 or bf16.
        weights: [T, k] fp32.
        experts: [T, k] integer, ids among all experts.
        w13: [E, 2I, d] in x's dtype, the rows of w1 (gate) first, then w3 (up).
        w2: [E, d, I] in x's dtype.
        swiglu_limit: clamp of gate and up.
        act_qdq_block: block of the FP8 rounding of both products' inputs, or None for none.
        expert_offset: id of the expert w13[0]; ids outside [offset, offset + E) belong to other ranks and add nothing.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, d] fp32.

    Raises:
        ValueError: shapes that do not fit each other, or swiglu_limit is not positive.
    """
    _check_plain("experts_forward", x, weights, experts, w13, w2)
    _check_limit("experts_forward", swiglu_limit)
    function = select("experts_forward", x.device, x.dtype, impl)
    return function(x, weights, experts, w13, w2, swiglu_limit, act_qdq_block, expert_offset)


def expert_rows(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w13: Tensor,
    w2: Tensor,
    swiglu_limit: float,
    act_qdq_block: int | None = None,
    expert_offset: int = 0,
    impl: str | None = None,
) -> Tensor:
    """The rows that `experts_forward` adds: [T, k, d] in x's dtype, zeros for experts of other ranks.

    `sum_expert_rows` of the rows of all ranks has the bits of `experts_forward` on one rank.

    Args and errors: as for `experts_forward`.
    """
    _check_plain("expert_rows", x, weights, experts, w13, w2)
    _check_limit("expert_rows", swiglu_limit)
    function = select("expert_rows", x.device, x.dtype, impl)
    return function(x, weights, experts, w13, w2, swiglu_limit, act_qdq_block, expert_offset)


def sum_expert_rows(rows: Tensor, row_of_pair: Tensor, experts: Tensor, impl: str | None = None) -> Tensor:
    """Each token's sum of its experts' rows in fp32, by rising expert id.

    ::

        y[t] = Σ_i rows[row_of_pair[t, i]].float()      # i by rising experts[t, i]; equal ids in the order of i

    Args:
        rows: [R, d] fp32 or bf16.
        row_of_pair: [T, k] integer, in [0, R).
        experts: [T, k] integer, ids among all experts.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, d] fp32.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    if rows.dim() != 2 or row_of_pair.dim() != 2 or row_of_pair.shape != experts.shape:
        raise ValueError(
            f"sum_expert_rows needs rows [R, d], row_of_pair [T, k] and experts [T, k]; got {tuple(rows.shape)}, "
            f"{tuple(row_of_pair.shape)}, {tuple(experts.shape)}"
        )
    return select("sum_expert_rows", rows.device, rows.dtype, impl)(rows, row_of_pair, experts)


def mxfp4_experts_forward(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    packed: Mxfp4Experts,
    swiglu_limit: float,
    expert_offset: int = 0,
    impl: str | None = None,
) -> Tensor:
    """`experts_forward` with the checkpoint's MXFP4 weights and FP8 inputs, as in the release.

    ::

        h = weight * swiglu(linear(fp8_qdq(x, 128), w13[e]).chunk(2))
        y = Σ_e linear(fp8_qdq(h.to(x.dtype), 128), w2[e]).float()      # by rising expert id

    Args:
        x: [T, d] fp32 or bf16.
        weights: [T, k] fp32.
        experts: [T, k] integer, ids among all experts.
        packed: weights of this rank; "sm100" requires `packed.tiled()`.
        swiglu_limit: clamp of gate and up.
        expert_offset: id of the first expert of `packed`; ids outside [offset, offset + E) add nothing.
        impl: implementation by name; None lets the registry choose. "sm100" is Blackwell's block-scaled kernel, which
            has run in the emulator only and must be named.

    Returns:
        [T, d] fp32.

    Raises:
        ValueError: shapes that do not fit each other, or swiglu_limit is not positive.
    """
    _check_packed("mxfp4_experts_forward", x, weights, experts, packed)
    _check_limit("mxfp4_experts_forward", swiglu_limit)
    function = select("mxfp4_experts_forward", x.device, x.dtype, impl)
    return function(x, weights, experts, packed, swiglu_limit, expert_offset)


def nvfp4_experts_forward(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    packed: Nvfp4Experts,
    swiglu_limit: float,
    expert_offset: int = 0,
    impl: str | None = None,
) -> Tensor:
    """The weighted sum of the routed experts of an NVFP4 checkpoint, with inputs in NVFP4 by its `input_scale`.

    ::

        h = weight * swiglu(linear(nvfp4_qdq(x, w13_input), w13[e]).to(x.dtype).chunk(2))
        y = Σ_e linear(nvfp4_qdq(h.to(x.dtype), w2_input), w2[e]).to(x.dtype).float()      # by rising expert id

    where `nvfp4_qdq` encodes by `dsv4_kernels.number_formats.encode_nvfp4` and decodes.

    Args:
        x: [T, d] fp32 or bf16.
        weights: [T, k] fp32.
        experts: [T, k] integer, ids among all experts.
        packed: weights of this rank: as stored for "ref", `packed.tiled()` for "sm100".
        swiglu_limit: clamp of gate and up.
        expert_offset: as in `mxfp4_experts_forward`.
        impl: implementation by name. "sm100" has run in the emulator only and must be named.

    Returns:
        [T, d] fp32.

    Raises:
        ValueError: shapes that do not fit each other, or swiglu_limit is not positive.
    """
    _check_packed("nvfp4_experts_forward", x, weights, experts, packed)
    _check_limit("nvfp4_experts_forward", swiglu_limit)
    function = select("nvfp4_experts_forward", x.device, x.dtype, impl)
    return function(x, weights, experts, packed, swiglu_limit, expert_offset)


def _check_plain(name: str, x: Tensor, weights: Tensor, experts: Tensor, w13: Tensor, w2: Tensor) -> None:
    fits = w13.dim() == w2.dim() == 3 and w13.shape == (w2.shape[0], 2 * w2.shape[2], w2.shape[1])
    if not fits or x.shape[1:] != w13.shape[2:]:
        raise ValueError(
            f"{name} needs x [T, d], w13 [E, 2I, d] and w2 [E, d, I]; got {tuple(x.shape)}, "
            f"{tuple(w13.shape)}, {tuple(w2.shape)}"
        )
    _check_chosen(name, x, weights, experts)


def _check_packed(name: str, x: Tensor, weights: Tensor, experts: Tensor, packed: Mxfp4Experts | Nvfp4Experts) -> None:
    if x.dim() != 2 or x.shape[1] != packed.hidden_size:
        raise ValueError(f"{name}: x is {tuple(x.shape)}; expected [T, {packed.hidden_size}]")
    _check_chosen(name, x, weights, experts)


def _check_chosen(name: str, x: Tensor, weights: Tensor, experts: Tensor) -> None:
    if weights.shape != experts.shape or weights.dim() != 2 or weights.shape[0] != x.shape[0]:
        raise ValueError(
            f"{name}: x {tuple(x.shape)} needs weights and experts [{x.shape[0]}, k]; got "
            f"{tuple(weights.shape)} and {tuple(experts.shape)}"
        )


def _check_halves(name: str, gate_up: Tensor) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"{name} needs gate_up [T, 2I]; got {tuple(gate_up.shape)}")


def _check_limit(name: str, limit: float) -> None:
    if not limit > 0:
        raise ValueError(f"{name}: swiglu_limit is {limit}; expected a positive number (infinity for no clamp)")
