"""A cached answer equals the cold answer, bit for bit, while everything that is not restored is NaN.

The reference path is invariant to chunking and batch composition (fixed tiles, canonical key order), so the comparison
is `torch.equal` on the logits of every computed position. A fault planted in each restored part must break it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from prefix.cold import REMAINDERS, assert_equals_cold, some
from prefix.served import ServedEngine
from selection.marks import with_slow_marks
from torch import Tensor

from dsv4_kernels.kv_layout import RowFormat
from dsv4_radix_cache.moves import TailRestore
from dsv4_radix_cache.ring import ring_row

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@pytest.fixture(
    scope="module",
    params=[pytest.param("bfloat16", marks=pytest.mark.slow), "fp8_e4m3"],
    ids=["plain-rows", "fp8-rows"],
)
def row_format(request: pytest.FixtureRequest) -> str:
    """The row format, with head_dim 512, for which both formats exist."""
    return request.param


@contextmanager
def engine_of(folder: Path, row_format: str, tokens: int) -> Iterator[ServedEngine]:
    """An engine with three device slots: most tails are on the host."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_DSV4_TAIL_SLOTS", "3")
        environment.setenv("SGLANG_DSV4_TAIL_HOST_SLOTS", "12")
        yield ServedEngine(folder, dtype="bfloat16", kv_cache_dtype=row_format, max_total_tokens=tokens)


@pytest.fixture(scope="module")
def engine(folder: Path, row_format: str) -> Iterator[ServedEngine]:
    with engine_of(folder, row_format, 4096) as engine:
        yield engine


@pytest.fixture(scope="module")
def small_engine(folder: Path, row_format: str) -> Iterator[ServedEngine]:
    """An engine of eight pages, which few tokens fill."""
    with engine_of(folder, row_format, 2048) as engine:
        yield engine


def cold(engine: ServedEngine, prompt: list[int], output: list[int]) -> Tensor:
    engine.flush()
    hit, logits = engine.serve(prompt, output)
    assert hit == 0 and logits.isfinite().all()
    engine.flush()
    return logits


@pytest.mark.parametrize("remainder", with_slow_marks(REMAINDERS.values(), quick=[0, 255]), ids=REMAINDERS)
def test_a_hit_equals_a_miss(engine: ServedEngine, remainder: int) -> None:
    """A shared prefix of 512 + remainder tokens, another end, and decoding over a page boundary."""
    prefix, output = some(1, 512 + remainder), some(2, 8)
    prompt = prefix + some(3, -(len(prefix) + 5) % 256)
    expected = cold(engine, prompt, output)
    engine.serve(prefix, some(4, 5))
    hit, logits = engine.serve(prompt, output)
    assert hit == 512
    assert_equals_cold(logits, expected, hit)


def test_going_on_from_what_was_decoded(engine: ServedEngine) -> None:
    """The tail that decoding saved from the ring, not a tail of a prefill."""
    prompt, output = some(5, 500), some(6, 20)
    full = [*prompt, *output, *some(7, 30)]
    expected = cold(engine, full, [])
    engine.serve(prompt, output)
    hit, logits = engine.serve(full)
    assert hit == 512
    assert_equals_cold(logits, expected, hit)


def test_going_on_from_what_replayed_graphs_decoded(engine: ServedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, but the backend is prepared with the view of the batch that SGLang's runner makes for a replay."""
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner

    runner, backend = engine.harness.runner, engine.harness.backend
    forward, replays = runner.forward, []

    def replayed(batch: ForwardBatch, **others: object) -> object:
        if batch.forward_mode.is_decode():
            batch_fields = ("input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu")
            buffers = SimpleNamespace(mamba_track_indices=None, **{name: getattr(batch, name) for name in batch_fields})
            view = decode_cuda_graph_runner.build_replay_fb_view(
                forward_batch=batch,
                buffers=buffers,
                bs=1,
                raw_bs=1,
                num_tokens=1,
                global_num_tokens_cpu=None,
                seq_len_fill_value=backend.get_cuda_graph_seq_len_fill_value(),
                capture_forward_mode=batch.forward_mode,
                is_encoder_decoder=False,
            )
            backend.init_forward_metadata_out_graph(view)
            backend.init_forward_metadata_in_graph(view)
            batch.mark_forward_metadata_ready()
            replays.append(view)
        return forward(batch, **others)

    prompt, output = some(55, 500), some(56, 20)
    full = [*prompt, *output, *some(57, 30)]
    expected = cold(engine, full, [])
    backend.init_cuda_graph_state(max_bs=1, max_num_tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", replayed)
        patch.setattr(backend, "init_forward_metadata", not_in_decode(backend.init_forward_metadata))
        engine.serve(prompt, output)
    assert len(replays) == len(output) and not any(hasattr(view, "rids") for view in replays)
    hit, logits = engine.serve(full)
    assert hit == 512
    assert_equals_cold(logits, expected, hit)


def not_in_decode(init_forward_metadata: Callable[[ForwardBatch], None]) -> Callable[[ForwardBatch], None]:
    def checked(batch: ForwardBatch) -> None:
        assert not batch.forward_mode.is_decode(), "an eager decode"
        init_forward_metadata(batch)

    return checked


def test_after_a_split(engine: ServedEngine) -> None:
    """A learned branch point inside a stored stretch: the third request with that prefix starts at it."""
    prefix = some(8, 700)
    prompt = prefix + some(9, 60)
    expected = cold(engine, prompt, [])
    engine.serve(prefix + some(10, 600))
    assert engine.serve(prefix + some(11, 50))[0] == 0
    hit, logits = engine.serve(prompt)
    assert hit == 512
    assert_equals_cold(logits, expected, hit)


def test_after_a_round_trip_through_the_host(engine: ServedEngine) -> None:
    """Three device slots: other tails displace this one to the host, from where it is restored and promoted."""
    prompt = some(12, 600)
    expected = cold(engine, prompt, some(13, 3))
    engine.serve(prompt)
    for seed in range(20, 24):
        engine.serve(some(seed, 300))
    before = engine.ledger.store.counters.hits_host
    hit, logits = engine.serve(prompt, some(13, 3))
    assert hit == 512 and engine.ledger.store.counters.hits_host == before + 1
    assert_equals_cold(logits, expected, hit)


def test_from_the_host_without_promotion(engine: ServedEngine) -> None:
    """Running requests hold every device slot: the tail is restored through the transit slot."""
    prompt = some(14, 600)
    expected = cold(engine, prompt, [])
    engine.serve(prompt)
    with engine.active():
        holding = [engine.start(some(seed, 250)) for seed in (30, 31, 32)]
        for running in holding:
            engine.decode(running, some(33, 12))
    assert engine.ledger.store.device.in_use == 3
    before = engine.ledger.store.counters.promotions
    hit, logits = engine.serve(prompt)
    assert hit == 512 and engine.ledger.store.counters.promotions == before
    assert_equals_cold(logits, expected, hit)
    with engine.active():
        for running in holding:
            engine.finish(running)


@pytest.mark.slow
def test_under_eviction_pressure(small_engine: ServedEngine) -> None:
    """Requests of twice the pool: every remaining hit is bitwise equal. There are slots for all their tails."""
    engine = small_engine
    prompts = [some(40 + i, 650 + 50 * i) for i in range(4)]
    expected = [cold(engine, prompt, []) for prompt in prompts]
    hits, lost = [], engine.ledger.store.counters.lost
    for step, i in enumerate((0, 1, 0, 2, 3, 1, 2, 2)):
        hit, logits = engine.serve(prompts[i])
        hits.append(hit)
        assert_equals_cold(logits, expected[i], hit)
        engine.serve(some(100 + step, 350))
    assert [bool(hit) for hit in hits] == [False, False, True, False, False, False, False, True], hits
    assert engine.ledger.store.counters.lost == lost, "what was missed was missed because its pages were evicted"


def one_row(pool: object, layer: int, name: str, row: int) -> Tensor:
    return getattr(pool, name)(layer)[row]


def break_window_row(engine: ServedEngine, slot: int, restore: TailRestore) -> None:
    """Replace the oldest row that a query reads, in one layer."""
    g, rows = engine.pool.geometry, engine.pool.window(engine.pool.geometry.layers()[-1])
    row = ring_row(slot, restore.position - 127, g.ring_rows)
    rows.copy_rows(torch.tensor([row]), rows, torch.tensor([row + 1]))


def break_layer(engine: ServedEngine, slot: int, restore: TailRestore) -> None:
    """Reverse one layer's ring, as if it held another request's rows."""
    g, rows = engine.pool.geometry, engine.pool.window(0)
    first = slot * g.ring_rows
    places = torch.arange(first, first + g.ring_rows)
    rows.copy_rows(places, rows, places.flip(0))


def break_half_row(name: str, part: int) -> Callable[[ServedEngine, int, TailRestore], None]:
    def fault(engine: ServedEngine, slot: int, restore: TailRestore) -> None:
        g = engine.pool.geometry
        row = ring_row(slot, restore.position - 1, g.state_rows(4))
        half = one_row(engine.pool, g.layers(4)[0], name, row)[part]
        dim = half.shape[0] // 2
        half[:dim] = -3 * half[:dim] + 1

    return fault


FAULTS = {
    "one-window-row": break_window_row,
    "one-layer": break_layer,
    "half-row-kv": break_half_row("compressor_state", 0),
    "half-row-score": break_half_row("compressor_state", 1),
    "indexer-half-row-kv": break_half_row("indexer_state", 0),
    "indexer-half-row-score": break_half_row("indexer_state", 1),
}


@pytest.fixture(scope="module")
def unbroken(engine: ServedEngine) -> Tensor:
    return cold(engine, some(50, 600) + some(52, 200), some(51, 2))


@pytest.mark.parametrize("fault", [*FAULTS, "nothing-restored", "another-position"])
def test_a_planted_fault_is_seen(
    engine: ServedEngine, unbroken: Tensor, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Each restored part matters, and NaN in a part that is left out shows. Both row formats have the same parts."""
    if engine.pool.geometry.row_format is RowFormat.FP8 and fault not in ("one-window-row", "nothing-restored"):
        pytest.skip("half rows are fp32 in either format: tested with plain rows")
    prefix, output = some(50, 600), some(51, 2)
    prompt, expected = prefix + some(52, 200), unbroken
    engine.serve(prefix)
    storage = engine.pool.tail_memory
    restore_right = storage.restore

    def restore_wrong(slot: int, restore: TailRestore) -> None:
        if fault == "nothing-restored":
            return
        if fault == "another-position":
            store = engine.ledger.store
            other = next(i for i in store.ids() if store[i].position == 256)
            restore_right(slot, TailRestore(256, *store.source(other)))
            return
        restore_right(slot, restore)
        FAULTS[fault](engine, slot, restore)

    if fault == "another-position":
        engine.serve(prefix[:300])
    monkeypatch.setattr(storage, "restore", restore_wrong)
    hit, logits = engine.serve(prompt, output)
    assert hit == 512
    assert not torch.equal(logits, expected[hit:])
    engine.flush()
