"""One call of each row kernel at V4-Flash's sizes, with its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import ROW_BYTES, KVRows, RowFormat
from dsv4_kernels.moe import fused_swiglu, swiglu_fp8
from dsv4_kernels.norm import rms_norm, rms_norm_fp8
from dsv4_kernels.norm_rope_store import Destination, norm_rope_store
from dsv4_kernels.quant import fp8_quantise
from dsv4_kernels.rope import YarnScaling, apply_rope_in_place, rope_frequencies
from dsv4_kernels.router import route_hash_logits, route_topk_logits

PREFILL_TOKENS = 1024
"""Number of tokens from which a chunk also writes its workspace and one tail of 128 rows."""
EPS, LIMIT, SCALE = 1e-6, 10.0, 1.5
HIDDEN, HEADS, DIM, Q_LORA, EXPERTS, TOP_K, CHANNELS, VOCABULARY = 4096, 64, 512, 1024, 256, 6, 2048, 129280
Call = Callable[[str | None], Sequence[Tensor]]
"""Runs the implementation of that name and returns its results."""


@dataclass(frozen=True)
class Work:
    """One op on one set of inputs."""

    op: str
    bytes: int
    """Bytes to read once and to write once."""
    call: Call


def normal(*shape: int, device: torch.device) -> Tensor:
    """Return bf16 noise."""
    return torch.randn(shape, device=device).bfloat16()


def norm_rope_store_work(tokens: int, device: torch.device, heads: int = HEADS) -> Work:
    """q in place, window rows into an FP8 ring; in prefill also into the workspace and a tail."""
    q, kv = normal(tokens, heads, DIM, device=device), normal(tokens, DIM, device=device)
    weight, positions = torch.ones(DIM, device=device), torch.arange(tokens, device=device) + 5000
    frequencies = rope_frequencies(64, 160000.0, YarnScaling(16, 65536, 32, 1)).to(device)

    def destination(rows: Tensor) -> Destination:
        table = KVRows.allocate(int(rows.max()) + 1, RowFormat.FP8, DIM, 64, torch.bfloat16, device, 0.0)
        return Destination(table, rows)

    every = torch.arange(tokens, device=device)
    last = torch.where(every >= tokens - 128, every % 128, -1)
    lists = [every, last, last] if tokens >= PREFILL_TOKENS else [every * 128 + 77]
    destinations = [destination(rows) for rows in lists]

    def call(impl: str | None) -> list[Tensor]:
        norm_rope_store(q, kv, weight, positions, frequencies, EPS, destinations, out=q, impl=impl)
        return [q, *(table.gather(rows[rows >= 0]) for table, rows in destinations)] if not capturing() else [q]

    written = sum(int((rows >= 0).sum()) * ROW_BYTES + 8 * tokens for rows in lists)
    return Work("norm_rope_store", 4 * q.numel() + 2 * kv.numel() + 8 * tokens + written, call)


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def inverse_rope_work(tokens: int, device: torch.device) -> Work:
    """Inverse RoPE of the attention's output, in place."""
    o, positions = normal(tokens, HEADS, DIM, device=device), torch.arange(tokens, device=device) + 5000
    frequencies = rope_frequencies(64, 10000.0, None).to(device)
    moved = 2 * 2 * tokens * HEADS * 64 + 8 * tokens

    def call(impl: str | None) -> list[Tensor]:
        return [apply_rope_in_place(o, positions, frequencies, True, impl)]

    return Work("apply_rope_in_place", moved, call)


def rms_norm_work(tokens: int, device: torch.device, dim: int = Q_LORA) -> Work:
    """RMSNorm of q's latent, or of a hidden row."""
    x, weight = normal(tokens, dim, device=device), torch.ones(dim, device=device)
    return Work("rms_norm", 4 * x.numel() + 4 * dim, lambda impl: [rms_norm(x, weight, EPS, impl)])


def rms_norm_fp8_work(tokens: int, device: torch.device) -> Work:
    """RMSNorm of q's latent with quantised output."""
    x, weight = normal(tokens, Q_LORA, device=device), torch.ones(Q_LORA, device=device)
    moved = 3 * x.numel() + 4 * x.numel() // 128 + 4 * Q_LORA
    return Work("rms_norm_fp8", moved, lambda impl: values(*rms_norm_fp8(x, weight, EPS, True, impl)))


def topk_work(tokens: int, device: torch.device) -> Work:
    """The learned router, given its logits."""
    logits, bias = torch.randn(tokens, EXPERTS, device=device), torch.randn(EXPERTS, device=device) * 0.1
    moved = 4 * logits.numel() + 8 * tokens * TOP_K
    return Work("route_topk_logits", moved, lambda impl: route_topk_logits(logits, bias, TOP_K, SCALE, impl)[:1])


def hash_work(tokens: int, device: torch.device) -> Work:
    """The router by token id, given its logits."""
    logits = torch.randn(tokens, EXPERTS, device=device)
    table = torch.randint(0, EXPERTS, (VOCABULARY, TOP_K), dtype=torch.int32, device=device)
    ids = torch.randint(0, VOCABULARY, (tokens,), device=device)
    moved = tokens * (8 + TOP_K * (4 + 4 + 8))
    return Work("route_hash_logits", moved, lambda impl: route_hash_logits(logits, table, ids, SCALE, impl)[:1])


def swiglu_work(tokens: int, device: torch.device) -> Work:
    """SwiGLU of the shared expert in bf16."""
    gate_up = normal(tokens, 2 * CHANNELS, device=device)
    return Work("fused_swiglu", 6 * tokens * CHANNELS, lambda impl: [fused_swiglu(gate_up, LIMIT, impl)])


def swiglu_fp8_work(tokens: int, device: torch.device) -> Work:
    """SwiGLU of the shared expert with quantised output."""
    gate_up = normal(tokens, 2 * CHANNELS, device=device)
    moved = 5 * tokens * CHANNELS + 4 * tokens * CHANNELS // 128
    return Work("swiglu_fp8", moved, lambda impl: values(*swiglu_fp8(gate_up, LIMIT, True, impl)))


def quantise_work(tokens: int, device: torch.device) -> Work:
    """Quantisation of a layer's input."""
    x = normal(tokens, HIDDEN, device=device)
    moved = 3 * x.numel() + 4 * x.numel() // 128
    return Work("fp8_quantise", moved, lambda impl: values(*fp8_quantise(x, 128, True, impl)))


def values(codes: Tensor, scales: Tensor) -> list[Tensor]:
    """Return the results to compare; nothing is launched while a graph is captured."""
    return [codes] if capturing() else [codes.float(), scales]


WORKS: dict[str, Callable[[int, torch.device], Work]] = {
    "norm_rope_store": norm_rope_store_work,
    "norm_rope_store_16_heads": lambda tokens, device: norm_rope_store_work(tokens, device, 16),
    "inverse_rope": inverse_rope_work,
    "rms_norm_1024": rms_norm_work,
    "rms_norm_4096": lambda tokens, device: rms_norm_work(tokens, device, HIDDEN),
    "rms_norm_fp8": rms_norm_fp8_work,
    "route_topk": topk_work,
    "route_hash": hash_work,
    "swiglu": swiglu_work,
    "swiglu_fp8": swiglu_fp8_work,
    "fp8_quantise": quantise_work,
}
