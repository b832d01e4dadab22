"""Scratch memory of launches that divide keys, and its sharing. The CPU stands in for CUDA (torch_as_cuda.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from dsv4_kernels.sparse_attention import scratch
from dsv4_kernels.sparse_attention.scratch import NUM_COUNTERS, Scratch

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def cuda() -> Iterator[Callable[[int, bool], None]]:
    """`cuda(stream, capturing)` sets the stream and capture state of the following calls; no scratch exists before."""
    from ptx_emulator.dsl.torch_as_cuda import torch_as_cuda

    with torch_as_cuda(), pytest.MonkeyPatch.context() as patch:

        def enter(stream: int, capturing: bool) -> None:
            patch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=stream))
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

        patch.setattr(scratch, "_by_stream", {})
        patch.setattr(scratch, "_graph_counters", {})
        enter(0, False)
        yield enter


def test_a_stream_keeps_its_own(cuda: Callable[[int, bool], None]) -> None:
    first = Scratch.on(DEVICE, 100)
    assert first.slots.numel() == 100 and first.counters.numel() == NUM_COUNTERS and not first.counters.any()
    assert Scratch.on(DEVICE, 60) is first
    cuda(1, False)
    other = Scratch.on(DEVICE, 60)
    assert other.slots is not first.slots and other.counters is not first.counters


def test_a_larger_call_gets_more_slots_and_the_same_counters() -> None:
    small, large = Scratch.on(DEVICE, 100), Scratch.on(DEVICE, 1000)
    assert large.slots.numel() == 1000 and large.counters is small.counters
    assert Scratch.on(DEVICE, 100) is large


def test_a_graph_needs_a_call_before(cuda: Callable[[int, bool], None]) -> None:
    """Counters allocated during the capture would belong to the graph, which would zero them."""
    cuda(0, True)
    with pytest.raises(RuntimeError, match=r"captured with split_keys, .* on cuda:0 before; make the same call once"):
        Scratch.on(DEVICE, 100)
    cuda(0, False)
    Scratch.on(DEVICE, 100)
    cuda(0, True)
    Scratch.on(DEVICE, 100)


def test_a_graph_does_not_get_to_keep_the_row_of_zeros(cuda: Callable[[int, bool], None]) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.sparse_attention.sm100.launch import zero_row

    zero_row.cache_clear()
    cuda(0, True)
    with pytest.raises(RuntimeError, match="has not run on cuda:0 before; make the same call once"):
        zero_row(DEVICE)
    cuda(0, False)
    row = zero_row(DEVICE)
    cuda(0, True)
    assert zero_row(DEVICE) is row and not row.any()
    zero_row.cache_clear()


def test_graphs_share_counters_that_no_eager_call_uses_or_replaces(cuda: Callable[[int, bool], None]) -> None:
    eager = Scratch.on(DEVICE, 100)
    cuda(1, True)
    captured = Scratch.on(DEVICE, 100)
    assert captured.counters is not eager.counters and captured.slots is not eager.slots
    cuda(0, False)
    Scratch.on(DEVICE, 1 << 20)
    cuda(2, True)
    again = Scratch.on(DEVICE, 1 << 20)
    assert again.counters is captured.counters and again.slots is not captured.slots
