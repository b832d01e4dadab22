"""The script that proves exactness on a GPU: what it reads of logs and of SGLang's own test, and all of it on a CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import exact_gpu
import pytest
from serving.server import free_port

PREFIX = """\
Prompt 0 with prefix length 1: total samples: 12, Unique samples: 1
Prompt 1 with prefix length 511: total samples: 9, Unique samples: 2
"""


def test_sglangs_own_verdicts_are_read() -> None:
    assert exact_gpu.unique_samples("single", "Total samples: 50, Unique samples: 1\n") == [1]
    assert exact_gpu.unique_samples("prefix", PREFIX) == [1, 2]
    assert exact_gpu.unique_samples("radix_cache", "✓✓✓ TEST PASSED - Radix cache is consistent! ✓✓✓") == [1]
    assert exact_gpu.unique_samples("radix_cache", "✗✗✗ TEST FAILED - Radix cache produces") == [2]
    assert exact_gpu.unique_samples("p_vs_d", "✅ Token match\n❌ Logprobs mismatch\n    Divergence") == [1, 2]
    assert all(exact_gpu.unique_samples(mode, "Traceback ...") == [] for mode in exact_gpu.MODES)


def test_retractions_are_counted() -> None:
    log = (
        "[..] Testing retraction. #retracted_reqs: 2, #new_tokens_gained: 9\nKV cache pool is full. Retract requests. "
    )
    assert exact_gpu.retractions(log + "#retracted_reqs: 1, #new_tokens_gained: 256") == 3


def test_a_ratio_below_one_is_a_price() -> None:
    rows = exact_gpu.rows_of(
        {("decode", 1): 200.0, ("prefill_8192", 8): 50.0}, {("decode", 1): 190.0, ("prefill_8192", 8): 60.0}
    )
    assert [(row["work"], row["requests"], row["ratio"]) for row in rows] == [
        ("decode", 1, 0.95),
        ("prefill_8192", 8, 1.2),
    ]


@pytest.mark.slow
def test_the_whole_script_on_a_cpu(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, os.environ.get(name, "1" if name == "OMP_NUM_THREADS" else "passive"))
    out = tmp_path / "out.json"
    command = ["--model", str(checkpoint), "--small", "--requests", "30", "--port", str(free_port())]
    status = exact_gpu.main([*command, "--logs", str(tmp_path), "--out", str(out), "--", "--sleep-on-idle"])
    result = json.loads(out.read_text())
    assert status == 0 and result["mismatches"] == 0, result["first_mismatches"]
    assert result["compared"] > 60 and {"cold", "hit", "split", "continued", "batch", "trace"} <= set(result["by_kind"])
    assert result["seen"]["retracted"] > 0 and result["seen"]["hit host"] > 0
    assert result["sglang_test_deterministic"]["single"] == [1]
    assert set(result["sglang_test_deterministic"]["prefix"]) <= {0, 1}
    assert {row["work"] for row in result["rows"]} == {"decode", "prefill_600"}
    assert all(row["ratio"] == row["exact"] / row["default"] > 0 for row in result["rows"])
