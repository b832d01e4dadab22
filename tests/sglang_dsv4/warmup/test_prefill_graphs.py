"""CUDA graphs of prefills, as far as a CPU can show them: a replay has the bits of a forward without graphs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from model import recorded_prefills
from model.harness import Harness

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.layers import sequence_parallel
from sglang_dsv4.layers.sequence_parallel import RowShards
from sglang_dsv4.warmup import prefill_graphs
from sglang_dsv4.warmup.cuda_graphs import default_prefill_sizes
from sglang_dsv4.warmup.prefill_graphs import PrefillGraphs


def test_two_sizes_an_octave() -> None:
    assert default_prefill_sizes(2048) == [256, 384, 512, 768, 1024, 1536, 2048]
    assert default_prefill_sizes(200) == [200]


def graphs_of(*numbers: int) -> PrefillGraphs:
    return PrefillGraphs(SimpleNamespace(embed=SimpleNamespace(weight=torch.empty(1))), numbers, False)


def test_a_batch_is_padded_by_a_third_of_its_tokens_at_most() -> None:
    graphs = graphs_of(96, 64, 128)
    found = {tokens: graphs.size_of(tokens) for tokens in (47, 48, 64, 65, 72, 96, 97, 128, 129)}
    assert found == {47: None, 48: 64, 64: 64, 65: None, 72: 96, 96: 96, 97: 128, 128: 128, 129: None}


def test_every_rank_has_a_token_of_a_padded_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_parallel, "of_forward", lambda mode, tokens: RowShards(tokens, 8, 7))
    graphs = graphs_of(128)
    assert graphs.size_of(112) is None and graphs.size_of(113) == 128
    assert RowShards(128, 8, 7).of_first(113).own == slice(112, 113)
    graphs = graphs_of(100)  # seven ranks have 13 rows, the last one 9
    assert graphs.size_of(91) is None and graphs.size_of(92) == 100


@pytest.mark.parametrize(
    ("backend", "capturable", "chunk", "given", "recorded"),
    [
        (None, True, 512, None, None),
        ("disabled", True, 512, None, None),
        ("breakable", True, 512, None, [256, 384, 512]),
        ("breakable", True, -1, None, default_prefill_sizes(8192)),
        ("breakable", True, 512, [512, 64], [64, 512]),
        ("breakable", False, 512, None, None),
    ],
)
def test_prefills_are_recorded_as_the_flags_say(
    backend: str | None,
    capturable: bool,
    chunk: int,
    given: list[int] | None,
    recorded: list[int] | None,
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with recording_server(harness, monkeypatch, backend, chunk, given, capturable) as record:
        graphs = record()
    assert (None if graphs is None else graphs.sizes) == recorded
    assert graphs is None or graphs.with_streams


@contextlib.contextmanager
def recording_server(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    backend: str | None,
    chunk: int = 512,
    given: list[int] | None = None,
    capturable: bool = True,
) -> Iterator[Callable[[], PrefillGraphs | None]]:
    """Yield a function that records a model's prefills, as a server with SGLang's resolved flags does."""
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups.cuda_graph_hook import generate_prefill_cuda_graph_batch_sizes
    from sglang.srt.platforms import current_platform

    by_default = generate_prefill_cuda_graph_batch_sizes(chunk)
    prefill = SimpleNamespace(bs=given or by_default, max_bs=chunk)
    config = SimpleNamespace(prefill=prefill)
    graph = SimpleNamespace(cuda_graph_config=config, cuda_graph_backend_prefill=backend)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(graph=graph))
    monkeypatch.setattr(type(current_platform), "capabilities", SimpleNamespace(graph_capture=capturable))
    monkeypatch.setattr(PrefillGraphs, "record", lambda graphs: None)
    runner = SimpleNamespace(model=harness.model, spec_algorithm=SimpleNamespace(is_eagle=lambda: True), gpu_id=0)

    def record() -> PrefillGraphs | None:
        prefill_graphs.record_prefills(runner)
        return harness.model.prefill_graphs

    with mock.patch.object(harness.model, "prefill_graphs", None), harness._active():
        yield record


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, PRESETS["tiny"])
    return Harness(folder, dtype="bfloat16")


Run = Callable[[], list[torch.Tensor]]


@pytest.fixture(scope="module")
def run(harness: Harness) -> Run:
    """Chunks of several requests, padded, of exactly a recorded number of tokens, and too small for graphs."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = harness.hf_config["vocab_size"]
    prompts = [torch.randint(3, vocabulary, (length,), generator=generator) for length in (291, 130, 57, 96, 5)]
    arguments = dict(chunk_tokens=48, decode_from=[280, 130, 57, 96, 3], start_at_step=[0, 1, 1, 4, 5])
    return lambda: harness.run_many(prompts, **arguments)


@pytest.fixture(scope="module")
def direct(run: Run) -> list[torch.Tensor]:
    return run()


@pytest.fixture
def graphs(harness: Harness) -> Iterator[PrefillGraphs]:
    with harness._active():
        recorded_prefills.record(harness.model, [48, 96, 160], with_streams=True)
    yield harness.model.prefill_graphs
    harness.model.prefill_graphs = None


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in itertools.zip_longest(one, other))


def test_replays_have_the_bits_of_forwards_without_graphs(
    run: Run, direct: list[torch.Tensor], graphs: PrefillGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(graphs, "replay", wraps=graphs.replay) as replay, caplog.at_level("INFO"):
        assert same(run(), direct)
    said = [record.args[0] for record in caplog.records if "first replay of the CUDA graphs" in record.msg]
    assert sorted(said) == [48, 96, 160]  # each size once
    tokens = [len(call.args[1]) for call in replay.call_args_list]
    assert {graphs.size_of(count) for count in tokens} == {48, 96, 160}
    assert 0 < len([count for count in tokens if graphs.size_of(count) == count]) < len(tokens)


def test_positions_of_an_earlier_batch_are_noticed(run: Run, direct: list[torch.Tensor], graphs: PrefillGraphs) -> None:
    """Planted: a replay does not copy the positions."""
    replay = graphs.replay

    def stale(input_ids: torch.Tensor, positions: torch.Tensor) -> object:
        return replay(input_ids, torch.zeros_like(positions))

    with mock.patch.object(graphs, "replay", stale):
        assert not same(run(), direct)


def test_rows_of_padding_that_are_not_written_are_noticed(run: Run, graphs: PrefillGraphs) -> None:
    """Planted: a break writes the batch's rows alone."""
    zero = torch.Tensor.zero_

    def of_ids(rows: torch.Tensor) -> torch.Tensor:
        return zero(rows) if rows.dtype == torch.int64 else rows

    with mock.patch.object(torch.Tensor, "zero_", of_ids), pytest.raises(AssertionError, match="leaves rows"):
        run()


def test_reading_the_batch_between_two_breaks_is_noticed(run: Run, graphs: PrefillGraphs) -> None:
    """Planted: a layer attends without a break."""
    from sglang_dsv4.layers import graph_breaks

    with mock.patch.object(graph_breaks, "has_breaks", lambda: False), pytest.raises(AssertionError, match="batch"):
        run()


class _Graph:
    """In place of SGLang's graph with breaks, which needs a GPU: a replay calls the function."""

    def __init__(self) -> None:
        self.segments: list[Callable[[], None]] = []

    def replay(self) -> None:
        for segment in self.segments:
            segment()


def test_nothing_borrows_the_memory_of_graphs_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang lends the pool's free memory to other work, and refuses while a graph is captured or replayed."""
    from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph
    from sglang.srt.model_executor.runner_utils import pool

    def borrow() -> None:
        with pool.graph_pool_user_scope("input logits"):
            pass

    def capture(graph: _Graph, *arguments: object, **options: object) -> contextlib.AbstractContextManager:
        graph.segments.append(borrow)
        return contextlib.nullcontext()

    monkeypatch.setattr(breakable_cuda_graph, "BreakableCUDAGraph", _Graph)
    monkeypatch.setattr(breakable_cuda_graph, "BreakableCUDAGraphCapture", capture)
    monkeypatch.setattr(pool, "graph_pool_borrow_enabled", lambda: True)
    monkeypatch.setattr(pool, "get_or_create_global_graph_memory_pool", lambda device: None)
    state = pool.GraphPoolBorrowState()
    monkeypatch.setattr(pool, "_get_graph_pool_borrow_state", lambda: state)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(prefill_graphs, "get_parallel", lambda: SimpleNamespace(tp_group=mock.Mock()))
    with pytest.raises(RuntimeError, match="live user 'CUDA graph'; cannot use it for 'input logits'"):
        prefill_graphs.recorded(borrow, None)
    replay = prefill_graphs.recorded(lambda: None, None)
    with pytest.raises(RuntimeError, match="live user 'CUDA graph'; cannot use it for 'input logits'"):
        replay()
    borrow()
