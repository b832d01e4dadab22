"""Tails around a decode step: the same whether the step runs eagerly or as a replayed CUDA graph.

A replay gets the view of the batch that SGLang's decode runner builds, padded, without request ids; the additions of
this project's hook are made here too.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache.harness import Engine, Sequences
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from torch import Tensor

from dsv4_radix_cache.moves import TailWrite
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.tail_options import TailSizes, least_of_ranks
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, HCA_RATIO, SWA_RATIO
from sglang_dsv4.prefix.pool_setup import new_ledger
from sglang_dsv4.prefix.restore_and_save import carry_request_slots, carry_request_slots_to_replay

EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
DRAFTS, PADDED = 4, 5
GEOMETRY = PoolGeometry(
    ratios=(SWA_RATIO, CSA_RATIO, HCA_RATIO), row_dim=16, rope_dim=4, index_dim=8, dtype=torch.float32
)
SPECULATIVE = dataclasses.replace(GEOMETRY, draft_tokens=DRAFTS)


def view_of(batch: SimpleNamespace) -> Any:
    """SGLang's view of a batch for a graph of `PADDED` requests, from buffers filled as its runner fills them."""
    bs, k = batch.batch_size, batch.positions.shape[0] // batch.batch_size
    padding = PADDED - bs

    def padded(values: Tensor, fill: int, per_request: int = 1) -> Tensor:
        return torch.cat([values, values.new_full((padding * per_request,), fill)])

    batch.seq_lens_sum = int(batch.seq_lens.sum())
    for field in ("out_cache_loc_virtual", "kv_loc_plan", "kv_loc_cols", "max_seq_len_host", "max_seq_len_override"):
        setattr(batch, field, None)
    batch.lora_ids, batch.can_run_decode_cuda_graph = None, True
    buffers = SimpleNamespace(
        input_ids=torch.zeros(PADDED * k, dtype=torch.int64),
        positions=padded(batch.positions, 0, k),
        req_pool_indices=padded(batch.req_pool_indices, 0),
        seq_lens=padded(batch.seq_lens, 1),
        seq_lens_cpu=padded(batch.seq_lens, 1),
        mamba_track_indices=None,
    )
    view = build_replay_fb_view(
        forward_batch=batch,
        buffers=buffers,
        bs=PADDED,
        raw_bs=bs,
        num_tokens=PADDED * k,
        global_num_tokens_cpu=None,
        seq_len_fill_value=1,
        capture_forward_mode=batch.forward_mode,
        is_encoder_decoder=False,
    )
    return carry_request_slots_to_replay(view, forward_batch=batch)


class Recorded:
    """An engine with tails, and every ring that was saved: request slot, position, bytes."""

    def __init__(self, geometry: PoolGeometry, sequences: Sequences, replayed: bool, lagging: bool = False) -> None:
        self.engine = Engine(geometry, sequences, tails=TailSizes(device_slots=6, host_slots=2))
        self.replayed, self.lagging = replayed, lagging
        self.saved: list[tuple[int, int, list[Tensor]]] = []
        backend, storage = self.engine.backend, self.engine.pool.tail_memory
        backend.init_cuda_graph_state(max_bs=PADDED, max_num_tokens=PADDED * DRAFTS)
        save_rings = storage.save_rings

        def recorded(slot: int, write: TailWrite) -> None:
            save_rings(slot, write)
            parts = [part[:, write.device_slot].clone() for part in storage.device.parts()]
            self.saved.append((slot, write.position, parts))

        storage.save_rings = recorded

    def prepare(self, mode: ForwardMode, work: list[tuple[int, int]]) -> None:
        """Prepare the backend as SGLang does before the layers run."""
        backend, batch = self.engine.backend, self.engine.batch(mode, work)
        if self.lagging:
            batch.seq_lens_cpu = None
        if self.replayed:
            view = view_of(batch)
            assert not hasattr(view, "rids")
            backend.init_forward_metadata_out_graph(view)
            backend.init_forward_metadata_in_graph(view)
        else:
            backend.init_forward_metadata(batch)

    def step(self, mode: ForwardMode, work: list[tuple[int, int]], accept: list[int] | None = None) -> None:
        engine, k = self.engine, work[0][1]
        self.prepare(mode, work)
        tokens = [(request, engine.length[request] + i) for request, n in work for i in range(n)]
        padding = (PADDED - len(work)) * k if self.replayed else 0
        for layer in engine.geometry.layers():
            engine.layer(layer, tokens, padding)
        for i, (request, n) in enumerate(work):
            engine.length[request] += n if accept is None else accept[i]


@pytest.mark.parametrize("mode", [DECODE, VERIFY], ids=["decode", "verify"])
def test_a_replay_saves_what_an_eager_step_saves(mode: ForwardMode) -> None:
    """Requests that fill pages at different steps, one of them in a slot that another request had before."""
    geometry = GEOMETRY if mode is DECODE else SPECULATIVE
    sequences, saved = Sequences(geometry, 640), []
    accepted = itertools.cycle([1, 4, 2, 3, 1, 1, 4])
    steps = [[1, 1] if mode is DECODE else [next(accepted), next(accepted)] for _ in range(130)]
    for replayed in (False, True):
        run = Recorded(geometry, sequences, replayed)
        run.engine.forward(EXTEND, [(2, 300)])
        slot = run.engine.slot[2]
        run.engine.release(2)  # the next request gets its slot
        run.engine.forward(EXTEND, [(0, 250), (1, 215)])
        assert slot in (run.engine.slot[0], run.engine.slot[1])
        for accept in steps[: 130 if mode is DECODE else 100]:
            run.step(mode, [(0, accept[0] if mode is DECODE else DRAFTS), (1, 1 if mode is DECODE else DRAFTS)], accept)
        saved.append(run.saved)
    eager, replay = saved
    assert {position for _, position, _ in eager} >= {256} and len(eager) >= 2
    assert [(slot, position) for slot, position, _ in replay] == [(slot, position) for slot, position, _ in eager]
    for (_, _, ours), (_, _, theirs) in zip(replay, eager, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
def test_lengths_that_the_host_learns_later(replayed: bool) -> None:
    """The same pages are saved, a step later, with the same bytes, and no page of a slot's former request."""
    sequences, saved = Sequences(SPECULATIVE, 640), []
    accepted = itertools.cycle([1, 4, 2, 3, 1, 1, 4])
    steps = [[next(accepted), next(accepted)] for _ in range(60)]
    for lagging in (False, True):
        run = Recorded(SPECULATIVE, sequences, replayed, lagging)
        run.engine.forward(EXTEND, [(2, 300)])
        run.step(VERIFY, [(2, DRAFTS)], [4])
        slot = run.engine.slot[2]
        run.engine.release(2)
        run.engine.forward(EXTEND, [(0, 250), (1, 215)])
        assert slot in (run.engine.slot[0], run.engine.slot[1])
        for number, accept in enumerate(steps):
            run.step(VERIFY, [(0, DRAFTS), (1, DRAFTS)], accept)
            if number == 20:  # a prefill in between loses no knowledge of a step
                run.engine.forward(EXTEND, [(3, 5)])
        saved.append(run.saved)
    known, lagging = saved
    assert [position for _, position, _ in known] == [256, 256]
    assert [(slot, position) for slot, position, _ in lagging] == [(slot, position) for slot, position, _ in known]
    for (_, _, ours), (_, _, theirs) in zip(lagging, known, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_graph_may_take_over_in_the_middle() -> None:
    """Some steps eager, some replayed, if a batch size has no graph: steps are not counted, so none is missed."""
    sequences = Sequences(GEOMETRY, 300)
    run = Recorded(GEOMETRY, sequences, replayed=False)
    run.engine.forward(EXTEND, [(0, 250)])
    for i in range(10):
        run.replayed = i % 3 == 0
        run.step(DECODE, [(0, 1)])
    assert [(slot, position) for slot, position, _ in run.saved] == [(run.engine.slot[0], 256)]


def test_capture_and_a_second_preparation_change_nothing() -> None:
    """Graphs are captured with requests that do not exist; SGLang may prepare a step's metadata twice."""
    run = Recorded(GEOMETRY, Sequences(GEOMETRY, 300), replayed=True)
    run.engine.forward(EXTEND, [(0, 256)])
    view = view_of(run.engine.batch(DECODE, [(0, 1)]))
    run.engine.backend.init_forward_metadata_out_graph(view, in_capture=True)
    assert run.saved == []
    before = run.engine.pool.ledger.store.counters.reserved
    for _ in range(2):
        run.prepare(DECODE, [(0, 1)])
    assert run.engine.pool.ledger.store.counters.reserved == before  # the prefill has saved the prompt's last page
    run.engine.length[0] = 512
    for _ in range(2):
        run.prepare(DECODE, [(0, 1)])
    assert [position for _, position, _ in run.saved] == [512]


def test_padding_and_warm_up_batches_save_nothing() -> None:
    """The null slot may have any length: a warm-up at 256 tokens is no request's page."""
    run = Recorded(GEOMETRY, Sequences(GEOMETRY, 8), replayed=False)
    tails = run.engine.pool.ledger
    for mode in (EXTEND, DECODE):
        batch = run.engine.batch(mode, [(0, 1)])
        batch.req_pool_indices = batch.req_pool_indices_cpu = torch.zeros(1, dtype=torch.int64)
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor([257])
        run.engine.backend.init_forward_metadata(batch)
        batch.req_pool_indices_cpu = None
        run.engine.backend.init_forward_metadata(batch)
    assert len(tails) == 0 and run.saved == []


@pytest.mark.parametrize("mode", [EXTEND, DECODE, VERIFY, ForwardMode.IDLE], ids=lambda mode: mode.name.lower())
def test_every_batch_carries_its_request_slots(mode: ForwardMode) -> None:
    """SGLang keeps them for a prefill only; a prefill's matches go to the ledger too."""
    engine = Engine(GEOMETRY, Sequences(GEOMETRY, 8), tails=TailSizes(2, 0))
    slots = torch.tensor([3, 1])
    batch = SimpleNamespace(reqs=[SimpleNamespace(tail_match=None)] * 2, req_pool_indices_cpu=slots)
    made = SimpleNamespace(forward_mode=mode, req_pool_indices_cpu=None)
    assert carry_request_slots(made, object, batch, engine.runner) is made
    assert made.req_pool_indices_cpu is slots
    assert len(engine.pool.ledger) == (2 if mode is EXTEND else 0)
    plain = Engine(GEOMETRY, Sequences(GEOMETRY, 8))
    untouched = SimpleNamespace(forward_mode=mode, req_pool_indices_cpu=None)
    assert carry_request_slots(untouched, object, batch, plain.runner).req_pool_indices_cpu is None


RANK = """
import sys, torch.distributed as dist
from sglang_dsv4.cache.tail_options import least_of_ranks
rank, count, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
print("least", least_of_ranks(count, dist.group.WORLD), least_of_ranks(5 + rank, dist.group.WORLD))
"""


def test_ranks_of_hosts_with_unequal_memory_agree(tmp_path: Path) -> None:
    """Over gloo, like SGLang's CPU group of a tensor-parallel group. Trees with unequal slots would diverge."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(count), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank, count in enumerate((90, 40))
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert ["least 40 5" in text for text in printed] == [True, True], printed
    assert least_of_ranks(7, None) == 7


@pytest.mark.slow
def test_errors_are_raised_in_tests_and_counted_elsewhere() -> None:
    """Raised in this process (`strict_bookkeeping`); a fresh process counts, and raises with the session's plugin."""
    assert new_ledger(GEOMETRY, TailSizes(2, 0)).strict
    program = (
        "from sglang.srt.plugins import load_plugins; {}\n"
        "from dsv4_radix_cache.ledger import Ledger\n"
        "from dsv4_radix_cache.placement import Placement\n"
        "from dsv4_radix_cache.tail_store import TailStore\n"
        "print('strict', Ledger(TailStore(1, 0), Placement(), 128, 8).strict)"
    )
    for load, strict in (("", False), ("load_plugins()", True)):
        command = [sys.executable, "-c", program.format(load)]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        assert f"strict {strict}" in printed
