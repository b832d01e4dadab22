"""The experts' benchmark without a GPU: its comparison with fp64, and its summary of times."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import bench_experts
import pytest
import torch

RESULTS = Path(bench_experts.__file__).parent / "results" / "experts_h200.json"


def test_the_summary_is_that_of_the_recorded_run() -> None:
    recorded = json.loads(RESULTS.read_text())
    assert bench_experts.summary(recorded["cases"]) == recorded["summary"]


def test_a_variant_is_compared_by_kind_of_case() -> None:
    rows = [
        {"name": "flash-six-t64", "ours_us": 50.0, "marlin_us": 100.0, "floor_us": 20.0, "ours_by_narrow_us": 80.0},
        {"name": "flash-six-t128", "ours_us": 100.0, "floor_us": 20.0, "ours_by_narrow_us": 120.0},
        {"name": "flash-six-t1", "ours_us": 40.0, "floor_us": 20.0, "ours_by_narrow_us": 40.0},
    ]
    found = bench_experts.summary(rows)
    assert found["decode_16_256"] == found["largest"] == 0.5 and "decode_1_4" not in found
    assert found["floor_share_64_128"] == round(math.sqrt(0.4 * 0.2), 3)
    assert found["narrow_over_ours_decode_16_256"] == round(math.sqrt(1.6 * 1.2), 3)
    assert found["narrow_over_ours_decode_1_4"] == 1.0


@pytest.mark.slow
def test_every_variant_is_held_against_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a sweep in the emulator; a wrong variant is not timed."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from ptx_emulator import emulated

    from dsv4_kernels.host import compile_cache

    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    times = lambda calls, device, seconds: {name: SimpleNamespace(median_us=9.0, spread=0.0) for name in calls}  # noqa: E731
    monkeypatch.setattr(bench_experts, "interleaved", times)
    cpu, model = torch.device("cpu"), bench_experts.Model(8, 512, 256)
    packed = bench_experts.random_experts(model, cpu)
    with emulated(arch="sm_90a", multiprocessors=4):
        variants = bench_experts.ours(packed, True)
        assert len(variants) == 9
        contenders = {
            name: variants[name] for name in ("ours", "ours_by_narrow")
        }  # other variants only take longer to compile
        arguments = model, packed, contenders, 40, "six", cpu, 4e12
        row = bench_experts.run_case("flash-six-t40", *arguments)
        errors = {row[key] for key in row if key.endswith("release_rel_err")}
        assert len(errors) == 1 and errors.pop() < 0.005  # all have the same bits
        assert bench_experts.line(row).count("9.0") == len(contenders)
        contenders["ours_by_few_codes"] = contenders["ours_by_few"] = variants["ours_by_few"]
        assert not {key for key in bench_experts.run_case("flash-six-t40", *arguments) if "few" in key}  # 40 tokens
        right = contenders["ours_by_narrow"]
        contenders["ours_by_narrow"] = lambda i: right(i) * 1.02
        with pytest.raises(AssertionError, match=r"ours_by_narrow is off by .* nothing is timed"):
            bench_experts.run_case("flash-six-t40", *arguments)
