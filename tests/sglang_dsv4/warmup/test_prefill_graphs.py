"""CUDA graphs of prefills, as far as a CPU can show them: a replay has the bits of a forward without graphs."""

from __future__ import annotations

import itertools

import pytest
import torch
from model import recorded_prefills
from model.harness import Harness

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.warmup.prefill_graphs import sizes


def test_two_sizes_an_octave() -> None:
    assert sizes(2048) == [256, 384, 512, 768, 1024, 1536, 2048]
    assert sizes(200) == [200]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, PRESETS["tiny"])
    return Harness(folder, dtype="bfloat16")


def test_replays_have_the_bits_of_forwards_without_graphs(harness: Harness) -> None:
    """Chunks of several requests, padded, of exactly a recorded number of tokens, and too small for graphs."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = harness.hf_config["vocab_size"]
    prompts = [torch.randint(3, vocabulary, (length,), generator=generator) for length in (291, 130, 57, 96, 5)]
    arguments = dict(chunk_tokens=48, decode_from=[280, 130, 57, 96, 3], start_at_step=[0, 1, 1, 4, 5])
    direct = harness.run_many(prompts, **arguments)
    with harness._active():
        recorded_prefills.record(harness.model, [48, 96, 160], with_streams=True)
    graphs = harness.model.prefill_graphs
    replayed, replay = [], graphs.replay

    def counted(input_ids: torch.Tensor, positions: torch.Tensor) -> object:
        replayed.append((len(positions), graphs.size_of(len(positions))))
        return replay(input_ids, positions)

    graphs.replay = counted
    try:
        found = harness.run_many(prompts, **arguments)
    finally:
        harness.model.prefill_graphs = None
    assert any(tokens < size for tokens, size in replayed) and any(tokens == size for tokens, size in replayed)
    assert {size for _, size in replayed} == {48, 96, 160}, replayed
    for one, other in itertools.zip_longest(direct, found):
        assert torch.equal(one, other)
