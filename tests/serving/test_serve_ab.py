"""The comparison of two servers: what it reads from their logs, and how it sums up. The servers need a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import serve_ab
from serve_ab import Row

from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config

LOG = """\
[2026-11-23 15:45:32] Load weight end. elapsed=0.63 s, type=DeepseekV4ForCausalLM, quant=fp8, avail mem=115.69 GB, mem
[2026-11-23 15:45:33] Memory pool end. avail mem=34.12 GB
[2026-11-23 15:45:38] max_total_num_tokens=110144000, chunked_prefill_size=8192, available_gpu_mem=28.82 GB
"""


def test_kv_memory_is_what_the_pools_took(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    size, tokens = serve_ab.Server("builtin", "http://nowhere", log, 0.0).kv_memory()
    assert (size / 2**30, tokens) == (pytest.approx(81.57), 110_144_000)


def test_above_one_is_better_for_ours() -> None:
    assert Row("decode", 1, "tok_s", ours=3.0, builtin=2.0).ratio == 1.5
    assert Row("decode", 1, "ttft_p50", ours=3.0, builtin=2.0).ratio == pytest.approx(2 / 3)
    assert Row("memory", 1, "kv_bytes_per_token", ours=0.0, builtin=2.0).ratio is None


def test_the_best_third_is_chosen_by_speed() -> None:
    """Of six numbers of sessions two, of each length; their other metrics with them."""
    rows = []
    for length in serve_ab.CHURN:
        for i in range(6):
            rows.append(Row(f"churn_{length}", 10 + i, "tok_s", ours=1.0 + i, builtin=1.0))
            rows.append(Row(f"churn_{length}", 10 + i, "hit_rate", ours=0.1 * i, builtin=0.1))
    best = {row.metric: row for row in serve_ab.best_third_of(rows)}
    assert best["tok_s"].ours == 5.5 and best["hit_rate"].ours == pytest.approx(0.45)
    assert {row.work for row in best.values()} == {"churn"}


def test_ours_gets_as_many_tokens_as_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(PRESETS["flash"])))
    flags = ("--max-running-requests", "8")
    small, large = (serve_ab.tokens_that_fit(tmp_path, size, flags) for size in (2**30, 2**31))
    assert 0 < small < large and small % 256 == large % 256 == 0
