"""The benchmark of the product with an FP8 weight, without a GPU: its comparisons before any timing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import bench_grouped_linear as bench
import pytest
import torch
from ops.order_of_summation import as_from_fp8
from ops.row_kernels import emulated_row_kernel
from selection.marks import with_slow_marks

from dsv4_kernels import registry

CPU = torch.device("cpu")


@pytest.fixture
def on_hopper(compiled_here: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops use Hopper's kernels in the emulator, except for cuBLAS's product, which is PyTorch's.

    The batch-invariant product gets the channels in the order of the FP8 kernel's instructions, because the emulator's
    sums depend on the order within an instruction.
    """
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

    def chosen(op: str, device: torch.device, dtype: torch.dtype, impl: str | None) -> registry.Implementation:
        return registry._implementation(op, impl or ("cublas" if op == "grouped_linear" else "sm90"))

    grouped_linear = bench.grouped_linear

    def in_its_order(x: torch.Tensor, weight: torch.Tensor, impl: str | None = None) -> torch.Tensor:
        return grouped_linear(as_from_fp8(x), as_from_fp8(weight), impl) if impl else grouped_linear(x, weight)

    monkeypatch.setattr(bench, "grouped_linear", in_its_order)
    times = lambda calls, device, seconds: {name: SimpleNamespace(median_us=9.0, spread=0.0) for name in calls}  # noqa: E731
    monkeypatch.setattr(bench, "interleaved", times)
    monkeypatch.setattr(bench, "ROWS", 128)
    monkeypatch.setattr(bench, "CHANNELS", 512)
    with mock.patch.object(registry, "chosen", chosen), mock.patch.object(registry, "_resolved", {}):
        yield


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("tokens", with_slow_marks([3, 64], quick=[3]))
def test_every_contender_is_run_and_compared(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with all variants; a wrong variant is not timed."""
    sets = [bench.weights(2, seed, CPU) for seed in range(2)]
    buffer = torch.empty_like(sets[0][2])
    arguments = "flash-t3", sets, buffer, tokens, CPU, 4e12, True
    with emulated_row_kernel("sm90"):
        row = bench.run_case(*arguments)
        by_tile = [name for name in row if name.startswith("ours_by_") and name.endswith("_us")]
        assert len(by_tile) == (4 if tokens == 3 else 5)
        assert row["rel_err"] < 0.004 and row["floor_us"] > 0 and ("expanded_us" in row) == (tokens == 64)
        assert "9.00" in bench.line(row)
        calls = bench.contenders(tokens, buffer, False)
        i = bench.with_tokens(sets[1], tokens, CPU)
        for name in (
            "today",
            "invariant",
            "expanded",
        ):  # each is a whole layer, and differs by cuBLAS's order of summation only
            if name in calls:
                i.x.normal_()
                ours, theirs = calls["ours"](i), calls[name](i)
                values = [codes.float() * scales.repeat_interleave(128, 1) for codes, scales in (ours, theirs)]
                assert (values[0] - values[1]).norm() <= 0.01 * values[1].norm(), name
        wrong = bench.grouped_linear_fp8_weight
        monkeypatch.setattr(bench, "grouped_linear_fp8_weight", lambda *a, **k: wrong(*a[:2], a[2] * 2, *a[3:], **k))
        with pytest.raises(AssertionError, match="the product's bits differ"):
            bench.run_case(*arguments)
