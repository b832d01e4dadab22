"""The row kernels of some layers, each reading an earlier kernel's result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.hyper_connection import hc_boundary
from dsv4_kernels.indexer import index_query
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.moe import fused_swiglu, swiglu_fp8
from dsv4_kernels.norm import rms_norm_fp8
from dsv4_kernels.norm_rope_store import Destination, norm_rope_store
from dsv4_kernels.quant import fp8_quantise
from dsv4_kernels.rope import YarnScaling, apply_rope_in_place, rope_frequencies
from dsv4_kernels.router import route_topk_logits
from lib.row_kernel_works import DIM, EPS, EXPERTS, HIDDEN, LIMIT, Q_LORA, SCALE, TOP_K, normal

REPLAYS = 100
"""Replays of a graph whose kernels overlap: a kernel that reads too early is wrong only now and then."""


class Chain:
    """The row kernels of some layers, each reading an earlier kernel's result."""

    LAUNCHES = 10
    """Launches of a layer."""

    def __init__(self, tokens: int, layers: int, device: torch.device, impl: str) -> None:
        self.tokens, self.device, self.impl = tokens, device, impl
        torch.manual_seed(2)
        self.streams = normal(tokens, 4, HIDDEN, device=device)
        self.y = normal(tokens, HIDDEN, device=device)
        self.post, self.comb = torch.rand(tokens, 4, device=device), torch.rand(tokens, 4, 4, device=device) / 2
        # Every boundary reads its own fn, as in a model, so that fn comes from memory and not from L2.
        self.fn = torch.randn(2 * layers, 24, 4 * HIDDEN, device=device) / 128
        self.base, self.scale = torch.randn(24, device=device), torch.ones(3, device=device)
        self.weight = torch.ones(HIDDEN, device=device)
        self.positions = torch.arange(tokens, device=device) + 5000
        self.frequencies = rope_frequencies(64, 160000.0, YarnScaling(16, 65536, 32, 1)).to(device)
        self.head_weights, self.bias = torch.randn(tokens, 16, device=device), torch.randn(EXPERTS, device=device)
        table = KVRows.allocate(128 * tokens, RowFormat.FP8, DIM, 64, torch.bfloat16, device, 0.0)
        self.window = Destination(table, torch.arange(tokens, device=device) * 128 + 77)

    def __call__(self) -> list[Tensor]:
        """Run all layers; return everything that the last layer writes."""
        state = (self.y, self.streams, self.post, self.comb)
        made: list[Tensor] = []
        for layer in range(len(self.fn) // 2):
            state, made = self.layer(state, self.fn[2 * layer : 2 * layer + 2])
        return [*state, *made, self.window.table.storage]

    def layer(self, state: tuple[Tensor, ...], fn: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Run one layer. Takes and returns (y, streams, post, comb); also returns the layer's other results."""
        impl = self.impl
        streams, x, post, comb, *codes = self.boundary(state, fn[0])
        latent = rms_norm_fp8(x[:, :Q_LORA], self.weight[:Q_LORA], EPS, True, impl)
        query = index_query(
            *(x[:, :2048].view(-1, 16, 128), self.head_weights, self.positions, self.frequencies, 0.02, True, impl)
        )
        q = torch.empty(self.tokens, 8, DIM, dtype=x.dtype, device=x.device)
        kv, weight = x[:, Q_LORA : Q_LORA + DIM], self.weight[:DIM]
        norm_rope_store(
            *(x.view(-1, 8, DIM), kv, weight, self.positions, self.frequencies, EPS, [self.window]), out=q, impl=impl
        )
        apply_rope_in_place(q, self.positions, self.frequencies, True, impl)
        quantised = fp8_quantise(q.view(-1, HIDDEN), 128, True, impl)
        streams, x, post, comb, *more = self.boundary((q.view(-1, HIDDEN), streams, post, comb), fn[1])
        routed = route_topk_logits(x.view(torch.float32)[:, :EXPERTS], self.bias, TOP_K, SCALE, impl)
        shared = swiglu_fp8(x, LIMIT, True, impl)
        y = fused_swiglu(streams[:, :2].view(-1, 2 * HIDDEN), LIMIT, impl)
        return (y, streams, post, comb), [*codes, *more, *latent, *query, *quantised, *routed, *shared]

    def boundary(self, state: tuple[Tensor, ...], fn: Tensor) -> tuple[Tensor, ...]:
        """Run the boundary between two sublayers."""
        return hc_boundary(*state, fn, self.base, self.scale, self.weight, EPS, EPS, 20, fp8=True, impl=self.impl)


def launched(chain: Chain, early: bool) -> Callable[[], list[Tensor]]:
    """Return a call of the chain with dependent launch on or off."""

    def call() -> list[Tensor]:
        with dependent_launch.switched(early):
            return chain()

    return call


def check_chain(chain: Chain) -> None:
    """Check that replays of the graph with overlapping kernels have the bits of the kernels launched one by one.

    Raises:
        AssertionError: one of REPLAYS replays differs.
    """
    expected = [x.clone() for x in launched(chain, False)()]
    made = launched(chain, True)()
    if chain.device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = launched(chain, True)()
    for replay in range(REPLAYS if chain.device.type == "cuda" else 1):
        if chain.device.type == "cuda":
            for x in made[
                :-1
            ]:  # so that a result that is not written again shows; little of the window's table is written
                (x.view(torch.uint8) if x.dtype.itemsize == 1 else x).fill_(-1 if x.dtype.itemsize > 1 else 0xFF)
            graph.replay()
        wrong = [i for i, (a, b) in enumerate(zip(made, expected, strict=True)) if not same_bytes(a, b)]
        assert not wrong, f"results {wrong} of {len(made)} differ in replay {replay}; nothing is timed"


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bytes, whatever their dtypes."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
