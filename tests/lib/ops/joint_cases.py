"""The joint launches of a layer, with inputs for tests: small for the emulator, Flash's sizes for a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from ops.compressor_cases import Setting, forward
from ops.compressor_store_cases import FP4, FP8, UNIFORM, uniform_requests
from ops.fp8_products import operands
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels.compressor import compress_store
from dsv4_kernels.host import joint_launch
from dsv4_kernels.indexer import index_query
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.linear import linear_fp8, linear_fp32
from dsv4_kernels.moe import fused_swiglu, swiglu_fp8
from dsv4_kernels.norm_rope_store import Destination, norm_rope_store
from dsv4_kernels.rope import rope_frequencies
from dsv4_kernels.router import route_hash_logits, route_topk_logits


class Sizes(NamedTuple):
    """Dimensions of a layer."""

    hidden: int
    latents: int  # rows of wqkv_a
    q_lora: int
    queries: int  # rows of wq_b
    index_queries: int  # rows of the indexer's wq_b
    projected: int  # rows of the matrices of compressors and indexer
    experts: int
    channels: int  # of the shared expert
    heads: int
    index_heads: int


SMALL = Sizes(512, 88, 256, 200, 72, 40, 40, 192, 3, 5)
FLASH_TP4 = Sizes(4096, 1536, 1024, 8192, 8192, 2624, 256, 512, 16, 64)

Call = Callable[[], Sequence[Tensor]]


@dataclass
class Case:
    """Calls of one joint launch, and the memory that they write besides their results."""

    calls: list[Call]
    written: list[Tensor]
    weights: list[Tensor]
    """Operands that no kernel writes, which may be read before the kernel before has ended."""

    def separately(self) -> list[Tensor]:
        """The results and the written memory, each call with a launch of its own."""
        made = [result for call in self.calls for result in call()]
        return [*made, *self.written]

    def jointly(self) -> list[Tensor]:
        """The same, by one launch."""
        with joint_launch.joined():
            made = [result for call in self.calls for result in call()]
        return [*made, *self.written]


def normal(*shape: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def fp8(sizes: tuple[int, int, int], seed: int, kernel: str, device: torch.device) -> tuple[Call, list[Tensor]]:
    """An FP8 product of (tokens, rows, channels), and its weights."""
    o = [x.to(device) for x in operands(*sizes, seed=seed)]
    return lambda: [linear_fp8(*o, impl=kernel)], o[2:]


def bf16(tokens: int, rows: int, channels: int, kernel: str, device: torch.device) -> tuple[Call, list[Tensor]]:
    """A product in fp32 of bf16 operands, and its weight."""
    x, weight = (normal(n, channels, seed=n, device=device).bfloat16() for n in (tokens, rows))
    return lambda: [linear_fp32(x, weight, impl=kernel)], [weight]


def latents(s: Sizes, tokens: int, kernel: str, device: torch.device) -> Case:
    first, a = fp8((tokens, s.latents, s.hidden), 1, kernel, device)
    second, b = bf16(tokens, s.projected, s.hidden, kernel, device)
    return Case([first, second], [], [*a, *b])


def queries(s: Sizes, tokens: int, kernel: str, device: torch.device) -> Case:
    (first, a), (second, b) = (
        fp8((tokens, rows, s.q_lora), seed, kernel, device) for seed, rows in enumerate((s.queries, s.index_queries), 2)
    )
    return Case([first, second], [], [*a, *b])


def gate(s: Sizes, tokens: int, kernel: str, device: torch.device) -> Case:
    first, a = bf16(tokens, s.experts, s.hidden, kernel, device)
    second, b = fp8((tokens, 2 * s.channels, s.hidden), 4, kernel, device)
    return Case([first, second], [], [*a, *b])


def rows(kind: str, s: Sizes, tokens: int, kernel: str, device: torch.device) -> Case:
    """norm_rope_store, compress_store and, in a CSA layer, index_query, of requests that append a few tokens each."""
    _, k, ring = UNIFORM[kind]
    setting = Setting(kind.partition("_")[0], ring, formats=(FP8, FP4), hadamard=True)
    requests = uniform_requests(setting.ratio, k)[-max(1, tokens // k) :]
    f = forward(setting, requests, tokens_per_request=k)
    moved = [on(c, device) for c in f.compressions]
    groups = on(f.groups, device)
    positions = groups.positions
    count = len(positions)
    q = normal(count, s.heads, 512, seed=5, device=device).bfloat16()
    kv = normal(count, 512, seed=6, device=device).bfloat16()
    weight, frequencies = normal(512, seed=7, device=device), rope_frequencies(64, 160000.0, None).to(device)
    table = KVRows.allocate(count + 3, RowFormat.FP8, 512, 64, torch.bfloat16, device, 0.0)
    destination = Destination(table, torch.arange(count, device=device) + 2)
    calls: list[Call] = [
        lambda: [norm_rope_store(q, kv, weight, positions, frequencies, 1e-6, [destination], impl=kernel)],
        lambda: compress_store(groups, moved, torch.bfloat16, impl=kernel) or [],
    ]
    written = [table.storage, *(tensor for c in moved for tensor in (c.state, c.table.storage))]
    if setting.kind == "csa":
        index_q = normal(count, s.index_heads, 128, seed=8, device=device).bfloat16()
        head_weights = normal(count, s.index_heads, seed=9, device=device)
        calls.append(lambda: index_query(index_q, head_weights, positions, frequencies, 0.01, True, impl=kernel))
    return Case(calls, written, [])


def on(value: object, device: torch.device) -> object:
    """A dataclass with its tensors, and those of its table, on a device."""
    changes = {
        name: field.to(device) if isinstance(field, Tensor) else replace(field, storage=field.storage.to(device))
        for name, field in vars(value).items()
        if isinstance(field, Tensor | KVRows)
    }
    return replace(value, **changes)


def choice(hashed: bool, s: Sizes, tokens: int, kernel: str, device: torch.device) -> Case:
    logits = normal(tokens, s.experts, seed=10, device=device)
    gate_up = normal(tokens, 2 * s.channels, seed=11, device=device).bfloat16()
    ids = torch.arange(tokens, device=device) * 3
    table = (ids[:, None] * torch.arange(1, 7, device=device)).int() % s.experts
    bias = normal(s.experts, seed=12, device=device)

    def routed() -> Sequence[Tensor]:
        if hashed:
            return route_hash_logits(logits, table, ids // 3, 1.5, impl=kernel)
        return route_topk_logits(logits, bias, 6, 1.5, impl=kernel)

    def activated() -> Sequence[Tensor]:
        if kernel == "sm90":
            return swiglu_fp8(gate_up, 10.0, True, impl=kernel)
        return [fused_swiglu(gate_up, 10.0, impl=kernel)]

    return Case([routed, activated], [], [])


PRODUCTS = {"latents": latents, "queries": queries, "gate": gate}
"""Joint launches with FP8 products, which are Hopper's."""


def case_of(name: str, s: Sizes, tokens: int, kernel: str, device: torch.device) -> Case:
    """One of NAMES, with inputs of its own."""
    if name in PRODUCTS:
        return PRODUCTS[name](s, tokens, kernel, device)
    if name in UNIFORM:
        return rows(name, s, tokens, kernel, device)
    return choice(name == "choice_by_id", s, tokens, kernel, device)


NAMES = (*PRODUCTS, "csa_1", "csa_3", "hca_1", "hca_3", "choice", "choice_by_id")


@contextlib.contextmanager
def emulated_joint(kernel: str, case: Case, multiprocessors: int = 132, schedule: str = "late") -> Iterator[object]:
    """Run kernels in the emulator, with all checks on; yields the device."""
    from ptx_emulator import Checks, emulated

    arch = {"sm90": "sm_90a", "sm100": "sm_100a"}[kernel]
    with emulated(arch=arch, checks=Checks.strict(), multiprocessors=multiprocessors, schedule=schedule) as device:
        for constant in case.weights:
            device.memory.constant(constant)
        yield device
    assert device.reports and not [warning for report in device.reports for warning in report.warnings]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(a, b), f"result {i}"
