"""Preparing a forward, eager or replayed, never waits for the device; tested without a GPU, by marked tensors.

Tensors that are on the GPU in a server are marked, and so are all tensors computed from them. A host read of a marked
tensor, a shape that depends on its values, or a synchronous copy fails the test. Planted waits are each noticed.
(On a GPU `torch.cuda.set_sync_debug_mode` tests the same: `test_metadata.py`.)
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache.harness import Engine, Sequences
from cache.host_waits import NoWaiting, OnDevice
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_dsv4.attention import metadata
from sglang_dsv4.attention.metadata import ForwardMetadata
from sglang_dsv4.cache import tail_memory
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.tail_options import TailSizes

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
VERIFY, DRAFT_EXTEND = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2
DRAFTS = 3
"""Tokens a request in a verify step and in a draft's extend step."""
GEOMETRY = PoolGeometry(
    ratios=(0, 4, 128), row_dim=16, rope_dim=4, index_dim=8, dtype=torch.float32, draft_tokens=DRAFTS
)
PADDED = 3


def marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`to_device`, which may copy; its result is marked as on the device."""

    def wrapper(*arguments: Any) -> Any:
        with torch._C.DisableTorchFunction():
            found = function(*arguments)
            if isinstance(found, Tensor):
                return found.as_subclass(OnDevice)
            return {name: tensor.as_subclass(OnDevice) for name, tensor in found.items()}

    return wrapper


class Prepared:
    """A backend with tails, whose device tensors are marked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = Engine(GEOMETRY, Sequences(GEOMETRY, 8), tails=TailSizes(device_slots=6, host_slots=2))
        self.backend = self.engine.backend
        self.backend.req_to_token = self.engine.req_to_token.as_subclass(OnDevice)
        self.backend.init_cuda_graph_state(max_bs=PADDED, max_num_tokens=PADDED * DRAFTS)
        self.lengths = torch.ones(PADDED, dtype=torch.int64).as_subclass(OnDevice)  # the runner's buffers
        self.slots = torch.zeros(PADDED, dtype=torch.int64).as_subclass(OnDevice)
        monkeypatch.setattr(metadata, "arrays_to_device", marked(metadata.arrays_to_device))
        monkeypatch.setattr(tail_memory, "to_device", marked(tail_memory.to_device))

    def batch(self, mode: ForwardMode, work: list[tuple[int, int]]) -> SimpleNamespace:
        batch = self.engine.batch(mode, work)
        for name in ("req_pool_indices", "seq_lens", "positions"):
            setattr(batch, name, getattr(batch, name).clone().as_subclass(OnDevice))
        return batch

    def done(self, work: list[tuple[int, int]]) -> None:
        for request, count in work:
            self.engine.length[request] += count

    def eager(self, mode: ForwardMode, work: list[tuple[int, int]]) -> NoWaiting:
        """Everything that runs before and between the layers, except the kernels."""
        batch, backend = self.batch(mode, work), self.backend
        here = backend.device
        with NoWaiting() as waiting:
            backend.device = SimpleNamespace(type="cuda")  # then it reads the lengths on the host
            try:
                backend.init_forward_metadata(batch)
            finally:
                backend.device = here
            for layer in GEOMETRY.layers():
                if mode is DECODE:  # a prefill's workspace is allocated in a layer
                    backend.window(layer)
                if GEOMETRY.layer_ratio(layer):
                    backend.groups(layer)
                    backend.compressor_storage(layer)
        self.done(work)
        return waiting

    def capture(self, mode: ForwardMode) -> SimpleNamespace:
        """Capture a graph of `PADDED` requests over the runner's buffers."""
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=PADDED,
            seq_lens=self.lengths,
            req_pool_indices=self.slots,
            spec_info=SimpleNamespace(draft_token_num=DRAFTS, num_tokens_per_req=DRAFTS),
        )
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        return batch

    def view(self, mode: ForwardMode, work: list[tuple[int, int]]) -> SimpleNamespace:
        """A replay: the runner fills the buffers."""
        batch, count = self.engine.batch(mode, work), len(work)
        self.lengths.fill_(1)
        self.slots.zero_()
        self.lengths[:count], self.slots[:count] = batch.seq_lens, batch.req_pool_indices
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=PADDED,
            seq_lens=self.lengths[:PADDED],
            req_pool_indices=self.slots[:PADDED],
            seq_lens_cpu=torch.tensor([*batch.seq_lens.tolist(), 1, 1])[:PADDED],
            req_pool_indices_cpu=batch.req_pool_indices_cpu,
            spec_info=batch.spec_info,
        )


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    return Prepared(monkeypatch)


def test_a_prefill_is_prepared_without_waiting(prepared: Prepared) -> None:
    """Chunks without a prefix that keep tails, and chunks that continue from them."""
    assert prepared.eager(EXTEND, [(0, 700), (1, 130)]).launched
    prepared.eager(EXTEND, [(0, 300), (2, 3)])


def test_a_decode_step_is_prepared_without_waiting(prepared: Prepared) -> None:
    """Across a page boundary, where a ring is copied into a tail."""
    prepared.eager(EXTEND, [(0, 255), (1, 100)])
    for _ in range(3):
        prepared.eager(DECODE, [(0, 1), (1, 1)])


@pytest.mark.parametrize("own_tensors", [False, True], ids=["view", "own tensors"])
@pytest.mark.parametrize("mode", [DECODE, VERIFY, DRAFT_EXTEND], ids=lambda mode: mode.name.lower())
def test_a_replay_launches_nothing_before_its_graph(prepared: Prepared, mode: ForwardMode, own_tensors: bool) -> None:
    """The graph reads the runner's buffers, also if the runner passes the batch's own tensors, as EAGLE's draft runner
    does where no padding is needed. (Copies of rings move the pool's bytes, which are not marked.)"""
    prepared.eager(EXTEND, [(0, 250), (1, 100)])
    captured = prepared.capture(mode)
    new = 1 if mode is DECODE else DRAFTS
    work = [(0, new), (1, new)]
    for step in range(8):
        view = prepared.view(mode, work)
        if own_tensors:
            view.seq_lens, view.req_pool_indices = view.seq_lens.clone(), view.req_pool_indices.clone()
        with NoWaiting() as waiting:
            prepared.backend.init_forward_metadata_out_graph(view)
            assert not waiting.launched, f"step {step}"
            prepared.backend.init_forward_metadata_in_graph(captured)
        assert_same(prepared.backend.metadata, eager_metadata(prepared, mode, work))
        prepared.done(work)


def eager_metadata(prepared: Prepared, mode: ForwardMode, work: list[tuple[int, int]]) -> ForwardMetadata:
    """Metadata of the same step, padded, computed from separate tensors."""
    batch = prepared.engine.batch(mode, work)
    padding = PADDED - len(work)
    batch.seq_lens = torch.cat((batch.seq_lens, torch.ones(padding, dtype=torch.int64)))
    batch.req_pool_indices = torch.cat((batch.req_pool_indices, torch.zeros(padding, dtype=torch.int64)))
    backend = prepared.backend
    return backend._uniform(backend._uniform_inputs(batch), backend._max_pages)


def assert_same(found: ForwardMetadata, expected: ForwardMetadata) -> None:
    for name in ("positions", "token_to_request", "page_table", "window_rows", "ring_rows"):
        assert torch.equal(getattr(found, name).as_subclass(Tensor), getattr(expected, name)), name
    for ratio, groups in expected.compress.items():
        for name in ("sources", "entry_positions", "slots", "state_rows"):
            mine = getattr(found.compress[ratio], name).as_subclass(Tensor)
            assert torch.equal(mine, getattr(groups, name)), (ratio, name)
        assert torch.equal(found.visible[ratio].as_subclass(Tensor), expected.visible[ratio]), ratio


PLANTED = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 0).all()),
    "int": lambda x: int(x.max()),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "nonzero": lambda x: torch.nonzero(x),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "assignment by a mask": lambda x: x.__setitem__(x > 0, 0),
    "repeats": lambda x: torch.repeat_interleave(torch.arange(len(x)), x),
    "tensor": lambda x: x + torch.tensor([1] * len(x), device=x.device),
    "as_tensor": lambda x: x + torch.as_tensor([1] * len(x)),
    "copy": lambda x: x.copy_(torch.zeros(len(x), dtype=x.dtype)),
    "iteration": lambda x: [int(n) for n in x],
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("mode", [EXTEND, DECODE], ids=["prefill", "decode"])
def test_planted_waits_are_noticed(
    prepared: Prepared, mode: ForwardMode, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits planted in the lookup of page numbers, in a prefill and in a decode step."""
    prepared.eager(EXTEND, [(0, 100)])
    name = "page_table_of" if mode is EXTEND else "step_mapping"
    original, place = (
        getattr(metadata, name),
        1 if mode is EXTEND else 0,
    )  # index of the argument with one number a request

    def planted(*arguments: Any, **options: Any) -> Any:
        PLANTED[fault](arguments[place])
        return original(*arguments, **options)

    monkeypatch.setattr(metadata, name, planted)
    with pytest.raises(AssertionError):
        prepared.eager(mode, [(0, 1)])
