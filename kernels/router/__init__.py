"""Expert routing (DeepSeek-V4 specification, section 5)."""

from __future__ import annotations

from torch import Tensor

from dsv4_kernels.registry import select


def route_topk(
    x: Tensor, gate_weight: Tensor, bias: Tensor, top_k: int, scale: float, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """The learned router.

    ::

        s = sqrt(softplus(x.float() @ gate_weight.float().T))
        experts = topk(s + bias)              # the bias selects only; of equals the lower expert id wins
        weights = s[experts] / s[experts].sum() * scale

    Args:
        x: [T, d] fp32 or bf16.
        gate_weight: [E, d], any floating dtype.
        bias: [E] fp32.
        top_k: experts a token, 1 to E.
        scale: routed_scaling_factor.
        impl: implementation by name; None lets the registry choose.

    Returns:
        weights [T, top_k] fp32, experts [T, top_k] int32, by falling biased score.

    Raises:
        ValueError: shapes that do not fit each other, or top_k out of range.
    """
    _check_gate("route_topk", x, gate_weight)
    num_experts = gate_weight.shape[0]
    if bias.shape != (num_experts,):
        raise ValueError(f"route_topk: bias has shape {tuple(bias.shape)}; expected ({num_experts},)")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"route_topk: top_k is {top_k}; expected 1 to {num_experts}, the number of experts")
    return select("route_topk", x.device, x.dtype, impl)(x, gate_weight, bias, top_k, scale)


def route_hash(
    x: Tensor, gate_weight: Tensor, expert_table: Tensor, token_ids: Tensor, scale: float, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """The router of the first layers: the token id chooses the experts, the gate only weights them.

    `experts = expert_table[token_ids]`; weights as in `route_topk`.

    Args:
        x: [T, d] fp32 or bf16.
        gate_weight: [E, d], any floating dtype.
        expert_table: [V, k] integer, a row of experts for each token id.
        token_ids: [T] integer, each in [0, V).
        scale: routed_scaling_factor.
        impl: implementation by name; None lets the registry choose.

    Returns:
        weights [T, k] fp32, experts [T, k] int32, in the table's order.

    Raises:
        ValueError: shapes that do not fit each other.
        IndexError: a token id outside the table.
    """
    _check_gate("route_hash", x, gate_weight)
    if expert_table.dim() != 2 or token_ids.shape != x.shape[:1]:
        raise ValueError(
            f"route_hash: x {tuple(x.shape)} needs token_ids ({x.shape[0]},) and expert_table [V, k]; got "
            f"{tuple(token_ids.shape)} and {tuple(expert_table.shape)}"
        )
    return select("route_hash", x.device, x.dtype, impl)(x, gate_weight, expert_table, token_ids, scale)


def _check_gate(name: str, x: Tensor, gate_weight: Tensor) -> None:
    if x.dim() != 2 or gate_weight.dim() != 2 or x.shape[1] != gate_weight.shape[1]:
        raise ValueError(
            f"{name} needs x [T, d] and gate_weight [E, d]; got {tuple(x.shape)} and {tuple(gate_weight.shape)}"
        )
