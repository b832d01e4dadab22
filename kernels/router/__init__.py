"""Expert routing (DeepSeek-V4 specification, section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.registry import select


def route_topk(
    x: Tensor, gate_weight: Tensor, bias: Tensor, top_k: int, scale: float, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """The learned router.

    ::

        s = sqrt(softplus(x.float() @ gate_weight.float().T))
        experts = topk(s + bias)              # the bias selects only; of equal scores the lower expert id wins
        weights = s[experts] / (s[experts].sum() + 1e-20) * scale

    Args:
        x: [T, d] fp32 or bf16.
        gate_weight: [E, d], any floating dtype.
        bias: [E] fp32.
        top_k: experts of a token, 1 to E.
        scale: routed_scaling_factor.
        impl: implementation by name; None lets the registry choose.

    Returns:
        weights [T, top_k] fp32, experts [T, top_k] int32, by falling biased score.

    Raises:
        ValueError: shapes that do not match, or top_k out of range.
    """
    _check_gate("route_topk", x, gate_weight)
    _check_choice("route_topk", gate_weight.shape[0], bias, top_k)
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
        ValueError: shapes that do not match.
        IndexError: a token id outside the table.
    """
    _check_gate("route_hash", x, gate_weight)
    _check_table("route_hash", x, expert_table, token_ids)
    return select("route_hash", x.device, x.dtype, impl)(x, gate_weight, expert_table, token_ids, scale)


def route_topk_logits(
    logits: Tensor, bias: Tensor, top_k: int, scale: float, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """`route_topk` from given logits, `linear_fp32(x, gate_weight)`.

    Args:
        logits: [T, E] fp32.
        bias: [E] fp32.
        top_k: experts of a token, 1 to E.
        scale: routed_scaling_factor.
        impl: implementation by name; None lets the registry choose.

    Returns:
        weights [T, top_k] fp32, experts [T, top_k] int32, by falling biased score.

    Raises:
        ValueError: shapes that do not match, or top_k out of range.
    """
    _check_logits("route_topk_logits", logits)
    _check_choice("route_topk_logits", logits.shape[1], bias, top_k)
    return select("route_topk_logits", logits.device, logits.dtype, impl)(logits, bias, top_k, scale)


def route_hash_logits(
    logits: Tensor, expert_table: Tensor, token_ids: Tensor, scale: float, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """`route_hash` from given logits, `linear_fp32(x, gate_weight)`.

    The GPU kernel cannot reject a token id without a synchronisation: an id outside the table gets the experts of the
    nearest id inside. Ids are checked when a request arrives.

    Args:
        logits: [T, E] fp32.
        expert_table: [V, k] integer, V >= 1: a row of experts, each in [0, E), for each token id.
        token_ids: [T] integer, each in [0, V).
        scale: routed_scaling_factor.
        impl: implementation by name; None lets the registry choose.

    Returns:
        weights [T, k] fp32, experts [T, k] int32, in the table's order.

    Raises:
        ValueError: shapes that do not match.
        IndexError: a token id outside the table; not on a GPU.
    """
    _check_logits("route_hash_logits", logits)
    _check_table("route_hash_logits", logits, expert_table, token_ids)
    return select("route_hash_logits", logits.device, logits.dtype, impl)(logits, expert_table, token_ids, scale)


def _check_logits(name: str, logits: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"{name} needs logits [T, E] torch.float32; got {tuple(logits.shape)} {logits.dtype}")


def _check_choice(name: str, num_experts: int, bias: Tensor, top_k: int) -> None:
    if bias.shape != (num_experts,):
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}; expected ({num_experts},)")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"{name}: top_k is {top_k}; expected 1 to {num_experts}, the number of experts")


def _check_table(name: str, x: Tensor, expert_table: Tensor, token_ids: Tensor) -> None:
    if expert_table.dim() != 2 or not len(expert_table) or token_ids.shape != x.shape[:1]:
        raise ValueError(
            f"{name}: {len(x)} tokens need token_ids ({len(x)},) and expert_table [V, k]; got "
            f"{tuple(token_ids.shape)} and {tuple(expert_table.shape)}"
        )


def _check_gate(name: str, x: Tensor, gate_weight: Tensor) -> None:
    if x.dim() != 2 or gate_weight.dim() != 2 or x.shape[1] != gate_weight.shape[1]:
        raise ValueError(
            f"{name} needs x [T, d] and gate_weight [E, d]; got {tuple(x.shape)} and {tuple(gate_weight.shape)}"
        )
