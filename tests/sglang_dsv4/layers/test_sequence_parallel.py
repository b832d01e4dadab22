"""A forward's rows sharded over ranks give the bits of ranks that all compute all rows (`sharded_ranks`, over gloo)."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from torch import nn

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.layers import data_parallel, sequence_parallel
from sglang_dsv4.layers.linear import Fp8Input
from sglang_dsv4.layers.sequence_parallel import ALL_ROWS, FEWEST_TOKENS, RowShards
from sglang_dsv4.models.deepseek_v4 import DeepseekV4ForCausalLM
from sglang_dsv4.seam.default_arguments import cores_of_ranks

TESTS = Path(__file__).resolve().parents[2]


def in_ranks(what: str, ranks: int, *arguments: object) -> None:
    """Run `sharded_ranks` on all ranks; fail unless every comparison holds on every rank."""
    from serving.server import free_port

    cores = cores_of_ranks(ranks, sorted(os.sched_getaffinity(0)))
    env = os.environ | {"PYTHONPATH": str(TESTS / "lib"), "SGLANG_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": "1"}
    command, others = [sys.executable, "-m", "model.sharded_ranks", what], [ranks, free_port(), *arguments]
    started = [
        subprocess.Popen(
            [*command, str(rank), *map(str, others)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        for rank, process in enumerate(started):
            out, errors = process.communicate(timeout=300)
            assert "RESULT" in out, f"rank {rank}: {errors[-3000:]}"
            found = json.loads(out.split("RESULT ")[1].splitlines()[0])
            assert len(found) > 10 and not (failed := [name for name, right in found.items() if not right]), failed
    finally:
        for process in started:
            process.kill()


@pytest.mark.slow  # ranks are processes
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_and_sums(ranks: int) -> None:
    in_ranks("module", ranks)


@pytest.mark.slow  # ranks are processes
@pytest.mark.parametrize(
    ("switch", "ranks", "preset", "dtype", "algorithm", "flag"),
    [
        pytest.param("on", 2, "tiny", "bfloat16", "EAGLE", "none", id="2-mtp"),
        pytest.param("on", 2, "flash-0731", "float32", "DSPARK", "flag", id="2-dspark-flag"),
        pytest.param("on", 4, "tiny", "float32", "EAGLE", "flag", id="4-mtp-flag"),
        pytest.param("attention", 2, "tiny", "bfloat16", "EAGLE", "none", id="attention-2-mtp"),
        pytest.param("attention", 2, "flash-0731", "float32", "DSPARK", "flag", id="attention-2-dspark-flag"),
        pytest.param("attention", 4, "tiny", "float32", "EAGLE", "flag", id="attention-4-mtp-flag"),
    ],
)
def test_models(switch: str, ranks: int, preset: str, dtype: str, algorithm: str, flag: str, tmp_path: Path) -> None:
    """Prompts, chunks, batches, then decode and verify steps; a draft's inputs; planted mistakes, which must fail."""
    groups = {"o_groups": 4, "moe_intermediate_size": 512} if ranks == 4 else {}
    write_checkpoint(tmp_path / "model", dataclasses.replace(PRESETS[preset], index_topk=16, **groups))
    in_ranks("model", ranks, tmp_path / "model", dtype, algorithm, flag, switch)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_parallel, "get_parallel", lambda: SimpleNamespace(tp_size=2, tp_rank=1))
    monkeypatch.setattr(sequence_parallel, "is_on", lambda: True)


def test_prefills_of_many_tokens_are_sharded(second_of_two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        assert sequence_parallel.of_forward(mode, FEWEST_TOKENS) == RowShards(FEWEST_TOKENS, 2, 1)
        for tokens in (0, 1, FEWEST_TOKENS - 1):
            assert sequence_parallel.of_forward(mode, tokens) is ALL_ROWS
    monkeypatch.setattr(sequence_parallel, "is_on", lambda: False)
    assert sequence_parallel.of_forward(ForwardMode.EXTEND, 8192) is ALL_ROWS
    monkeypatch.setattr(sequence_parallel, "is_on", lambda: True)
    monkeypatch.setattr(sequence_parallel, "get_parallel", lambda: SimpleNamespace(tp_size=1, tp_rank=0))
    assert sequence_parallel.of_forward(ForwardMode.EXTEND, 8192) is ALL_ROWS


def test_forwards_that_cuda_graphs_capture_are_not_sharded(second_of_two: None) -> None:
    """Verify steps of many requests with many drafts are not sharded either."""
    of_graphs = [mode for mode in ForwardMode if mode.is_cuda_graph() and not mode.is_dllm_extend()]
    for mode in (*of_graphs, ForwardMode.DRAFT_EXTEND_V2):
        assert sequence_parallel.of_forward(mode, 8192) is ALL_ROWS


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("on", True), ("attention", True), ("off", False), (None, False)):
        if value is None:
            monkeypatch.delenv(sequence_parallel.VARIABLE)
        else:
            monkeypatch.setenv(sequence_parallel.VARIABLE, value)
        assert sequence_parallel.is_on.__wrapped__() is expected
    monkeypatch.setenv(sequence_parallel.VARIABLE, "2")
    with pytest.raises(ValueError, match="SGLANG_DSV4_SEQUENCE_PARALLEL must be 'on' or 'off' or 'attention'"):
        sequence_parallel.is_on.__wrapped__()


@pytest.mark.parametrize("mode", list(CaptureHiddenMode))
def test_streams_are_gathered_only_if_they_are_read(mode: CaptureHiddenMode, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[torch.Tensor] = []

    class Rows(RowShards):
        def gather(self, rows: torch.Tensor) -> torch.Tensor:
            gathered.append(rows)
            return rows.repeat(2, 1)

    streams, row, given = torch.randn(3, 8), torch.randn(6, 2), {}
    model = DeepseekV4ForCausalLM.__new__(DeepseekV4ForCausalLM)
    nn.Module.__init__(model)
    model.model, model.lm_head = Mock(return_value=(row, streams, []), tapped_layers=()), None
    model.stage = SimpleNamespace(is_first=True, is_last=True)
    model.logits_processor = lambda *arguments, **for_draft: given.update(for_draft)
    monkeypatch.setattr(sequence_parallel, "of_forward", lambda mode, tokens: Rows(tokens, 2, 0))
    monkeypatch.setattr(data_parallel, "is_on", lambda: False)
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, capture_hidden_mode=mode)
    model(torch.zeros(6), torch.zeros(6), batch)
    if mode is CaptureHiddenMode.NULL:
        assert not gathered and not given
    else:
        assert len(gathered) == 1 and torch.equal(given["hidden_states_before_norm"], streams.repeat(2, 1))


@pytest.mark.parametrize("tokens", [slice(0, 5), slice(5, 10), slice(6, 7), slice(10, 10), slice(None)], ids=str)
def test_some_tokens_of_a_quantised_input(tokens: slice) -> None:
    """Equal to quantising these tokens alone: columns of scales begin at multiples of 16 bytes."""
    x = torch.randn(10, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    taken, expected = Fp8Input.of(x).of_tokens(tokens), Fp8Input.of(x[tokens])
    assert torch.equal(taken.codes.float(), expected.codes.float()) and torch.equal(taken.scales, expected.scales)
    assert taken.scales.stride() == expected.scales.stride() and taken.codes.is_contiguous()
