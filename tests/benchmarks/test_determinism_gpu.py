"""The script that checks determinism on a GPU: what it parses from logs and SGLang's own test; a run on a CPU."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import determinism_gpu
import pytest
from lib.determinism_trace import Answer, Findings, References, Request, requests_of_a_trace
from serving.server import free_port

PREFIX = """\
Prompt 0 with prefix length 1: total samples: 12, Unique samples: 1
Prompt 1 with prefix length 511: total samples: 9, Unique samples: 2
"""


def test_sglangs_own_verdicts_are_read() -> None:
    assert determinism_gpu.unique_samples("single", "Total samples: 50, Unique samples: 1\n") == [1]
    assert determinism_gpu.unique_samples("prefix", PREFIX) == [1, 2]
    assert determinism_gpu.unique_samples("radix_cache", "✓✓✓ TEST PASSED - Radix cache is consistent! ✓✓✓") == [1]
    assert determinism_gpu.unique_samples("radix_cache", "✗✗✗ TEST FAILED - Radix cache produces") == [2]
    assert determinism_gpu.unique_samples("p_vs_d", "✅ Token match\n❌ Logprobs mismatch\n    Divergence") == [1, 2]
    assert all(determinism_gpu.unique_samples(mode, "Traceback ...") == [] for mode in determinism_gpu.MODES)


def test_requests_of_the_trace_have_the_proofs_references() -> None:
    """The proof's references cover a trace that sends each request once, and a trace of greedy requests only."""
    sizes = determinism_gpu.SMALL
    asked = requests_of_a_trace(sizes)
    assert requests_of_a_trace(determinism_gpu.once_each(sizes)) == asked
    assert set(requests_of_a_trace(replace(sizes, sampled=False))) == {r for r in asked if r.seed is None} != set(asked)


def test_retractions_are_counted() -> None:
    log = (
        "[..] Testing retraction. #retracted_reqs: 2, #new_tokens_gained: 9\nKV cache pool is full. Retract requests. "
    )
    assert determinism_gpu.retractions(log + "#retracted_reqs: 1, #new_tokens_gained: 256") == 3


def test_a_ratio_below_one_is_a_price() -> None:
    rows = determinism_gpu.rows_of(
        {("decode", 1): 200.0, ("prefill_8192", 8): 50.0}, {("decode", 1): 190.0, ("prefill_8192", 8): 60.0}
    )
    assert [(row["work"], row["requests"], row["ratio"]) for row in rows] == [
        ("decode", 1, 0.95),
        ("prefill_8192", 8, 1.2),
    ]


def test_a_model_that_says_the_same_to_all_is_refused() -> None:
    requests = [Request((i, i + 1), 1) for i in range(20)]
    determinism_gpu.refuse_mute_models({request: Answer(((7, -1.0 - i, ()),)) for i, request in enumerate(requests)})
    with pytest.raises(RuntimeError, match="20 requests got 2 different first tokens"):
        determinism_gpu.refuse_mute_models(
            {request: Answer(((7, -1.0 - i % 2, ()),)) for i, request in enumerate(requests)}
        )


class Servers:
    """Replaces servers and their answers."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[str, ...]] = []
        self.alone: list[bool] = []
        self.folder = folder
        (folder / "config.json").write_text('{"vocab_size": 512}')
        patch.setattr(determinism_gpu, "running", self.running)
        patch.setattr(determinism_gpu.determinism_trace, "prove", self.prove)
        patch.setattr(determinism_gpu, "speeds", lambda url, small: {("decode", 1): 100.0 - len(self.started)})
        said = subprocess.CompletedProcess([], 0, "Total samples: 3, Unique samples: 1\n✅ match\n", "")
        patch.setattr(determinism_gpu.subprocess, "run", lambda command, **_: said)

    @contextlib.contextmanager
    def running(
        self, contender: str, model: Path, flags: tuple[str, ...], port: int, log: Path, alone: bool
    ) -> Iterator[object]:
        assert contender == "ours"
        self.started.append(flags)
        self.alone.append(alone)
        log.write_text("#retracted_reqs: 2," if "SGLANG_TEST_RETRACT" in os.environ else "")
        yield SimpleNamespace(url="http://nowhere:1", log=log)

    def prove(self, url: str, sizes: object, known: References) -> Findings:
        known.setdefault(Request((5,), 1), Answer(((7, -0.5, ()),)))
        found = Findings()
        found.compare("trace", Request((5,), 1), known[Request((5,), 1)], Answer(((7, -0.5, ()),)))
        return found

    def run(self, *arguments: str) -> tuple[int, dict]:
        out = self.folder / "out.json"
        command = ["--model", str(self.folder), "--logs", str(self.folder), "--out", str(out), "--small", *arguments]
        return determinism_gpu.main(command), json.loads(out.read_text())


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    return Servers(tmp_path, monkeypatch)


def test_three_starts_do_all_but_speculation(servers: Servers) -> None:
    status, result = servers.run()
    flags = [determinism_gpu.FLAG in started for started in servers.started]
    assert status == 0 and flags == [True, True, False] and not result["not_run"]
    assert servers.alone == [False, True, True]
    assert result["by_kind"]["trace"] == result["by_kind"]["chunks trace"] == [1, 0]
    assert result["seen"]["retracted"] == 2
    assert result["sglang_test_deterministic"] == {"single": [1], "prefix": [1], "p_vs_d": [1]}
    assert result["rows"] == [
        {"work": "decode", "requests": 1, "default": 97.0, "deterministic": 98.0, "ratio": 98 / 97}
    ]
    chunks = [started[started.index("--chunked-prefill-size") + 1] for started in servers.started]
    assert chunks[0] != chunks[1] == chunks[2]


def test_what_is_cut_off_keeps_what_was_done(servers: Servers) -> None:
    """If time runs out or the script is ended, the file has the results of every work that was finished."""
    status, result = servers.run("--seconds", "0")
    assert status == 1 and result["not_run"] == ["chunks", "sglang", "price"] and result["compared"] == 1
    assert determinism_gpu.read_references(servers.folder / "out.references.json")
    status, result = servers.run("--resume", "--works", "chunks", "speculation")
    assert status == 0 and result["compared"] == 3 and len(servers.started) == 3
    assert "--speculative-algorithm" in servers.started[2] and not result["not_run"]


def test_a_mode_that_says_nothing_is_a_mismatch(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 300)

    monkeypatch.setattr(determinism_gpu.subprocess, "run", late)
    status, result = servers.run("--works", "sglang")
    assert status == 1 and result["by_kind"]["sglang single"] == [1, 1]
    assert "not done after" in (servers.folder / "test_deterministic_prefix.log").read_text()


@pytest.mark.slow
def test_the_whole_script_on_a_cpu(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, os.environ.get(name, "1" if name == "OMP_NUM_THREADS" else "passive"))
    out = tmp_path / "out.json"
    command = ["--model", str(checkpoint), "--small", "--requests", "30", "--port", str(free_port())]
    status = determinism_gpu.main([*command, "--logs", str(tmp_path), "--out", str(out), "--", "--sleep-on-idle"])
    result = json.loads(out.read_text())
    assert status == 0 and result["mismatches"] == 0, result["first_mismatches"]
    kinds = {"cold", "hit", "split", "continued", "batch", "trace"}
    assert result["compared"] > 60 and kinds | {f"chunks {kind}" for kind in kinds} <= set(result["by_kind"])
    assert result["seen"]["retracted"] > 0 and result["seen"]["hit host"] > 0
    assert result["sglang_test_deterministic"]["single"] == [1]
    assert set(result["sglang_test_deterministic"]["prefix"]) <= {0, 1}
    assert {row["work"] for row in result["rows"]} == {"decode", "prefill_600"}
    assert all(row["ratio"] == row["deterministic"] / row["default"] > 0 for row in result["rows"])
