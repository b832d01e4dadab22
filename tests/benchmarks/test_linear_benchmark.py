"""The benchmark of FP8 products without a GPU: its comparison with fp64, and its summary of times."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import bench_linear
import pytest
import torch

from dsv4_kernels.host import compile_cache


def row(name: str, ours: float, theirs: float | None) -> dict:
    made = {"name": name, "ours_us": ours, "ours_early_us": ours - 1, "floor_us": ours / 2}
    return made if theirs is None else made | {"deepgemm_us": theirs}


def test_a_layer_is_the_sum_of_its_products() -> None:
    """A layer's sum needs all of its products, with both contenders."""
    rows = [row(bench_linear.Case("flash", layer, 16).name, 2.0, 4.0) for layer in bench_linear.LAYERS["flash"]]
    rows += [row(bench_linear.Case("flash", "wq_b", 4).name, 2.0, 4.0)]
    rows += [
        row(bench_linear.Case("flash-tp2", layer, 16).name, 2.0, None) for layer in bench_linear.LAYERS["flash-tp2"]
    ]
    whole = {"ours_us": 12.0, "ours_early_us": 6.0, "deepgemm_us": 24.0, "floor_us": 6.0}
    assert bench_linear.summary(rows) == {"flash-t16": whole}


def another_bit(i: bench_linear.Inputs) -> torch.Tensor:
    """Return our product with the last bit of one number flipped."""
    out = bench_linear.ours(i)
    out.view(torch.int16)[3, 5] ^= 1
    return out


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with two plans of a sweep in the emulator; without DeepGEMM the row has no entry for its bits."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from ptx_emulator import emulated

    from dsv4_kernels.linear import fp8

    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    monkeypatch.setattr(compile_cache, "_in_memory", {})
    times = lambda calls, device, seconds: {name: SimpleNamespace(median_us=9.0, spread=0.0) for name in calls}  # noqa: E731
    monkeypatch.setattr(bench_linear, "interleaved", times)
    monkeypatch.setattr(bench_linear, "number_of_sets", lambda case, device: 1)
    monkeypatch.setitem(bench_linear.LAYERS["flash"], "small", (96, 512))
    monkeypatch.setattr(bench_linear, "linear_fp8", lambda *operands, impl: fp8.sm90(*operands))
    case, cpu = bench_linear.Case("flash", "small", 20), torch.device("cpu")
    made = functools.cache(bench_linear.inputs)
    monkeypatch.setattr(bench_linear, "inputs", made)
    plans = list(bench_linear.plans(case, True, cpu))
    assert len(plans) == len(set(plans)) > 50 and list(bench_linear.plans(case, False, cpu)) == plans[:1]
    with emulated(arch="sm_90a") as device:
        i = made(case, 0, cpu)
        device.memory.constant(i.weight)
        device.memory.constant(i.weight_scale)
        of_launch = {"ours": bench_linear.in_turns, "ours_early": bench_linear.early}
        contenders = {name: functools.partial(of, bench_linear.ours) for name, of in of_launch.items()}
        contenders |= {f"plan {at}": functools.partial(bench_linear.ours_by, plans[at]) for at in (1, 40)}
        found = bench_linear.run_case(case, contenders | {"deepgemm": bench_linear.deepgemm}, cpu, 4e12)
        assert (
            found["rel_err"] < bench_linear.WRONG
            and "bits" not in found
            and "ModuleNotFound" in found["deepgemm_error"]
        )
        assert bench_linear.line(found).count("9.00") == 3
        contenders["plan 1"] = lambda i: bench_linear.ours(i) * 1.02
        with pytest.raises(AssertionError, match=r"plan 1 is off by .* nothing is timed"):
            bench_linear.run_case(case, contenders, cpu, 4e12)
        contenders["plan 1"] = another_bit
        with pytest.raises(AssertionError, match="plan 1 has other bits"):
            bench_linear.run_case(case, contenders, cpu, 4e12)
