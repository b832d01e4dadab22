"""The benchmark of joint launches, without a GPU: its comparison before any timing."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import bench_joint_launch as bench
import pytest
import torch
from ops.joint_cases import SMALL
from ops.row_kernels import emulated_row_kernel

from dsv4_kernels import registry
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host import joint_launch

CPU = torch.device("cpu")


@pytest.fixture
def in_the_emulator(compiled_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

    def once(contenders: dict, device: torch.device, seconds: float) -> dict:
        for calls in contenders.values():
            calls[0]()
        return {name: SimpleNamespace(median_us=9.0, spread=0.0) for name in contenders}

    monkeypatch.setattr(bench, "interleaved", once)
    monkeypatch.setattr(bench, "MOST_SETS", 1)
    monkeypatch.setattr(registry, "chosen", lambda op, device, dtype, impl: registry._implementation(op, impl))
    monkeypatch.setattr(registry, "_resolved", {})


@pytest.mark.slow
@pytest.mark.usefixtures("in_the_emulator")
def test_cases_are_compared_and_timed() -> None:
    with dependent_launch.switched(False), emulated_row_kernel("sm90"):  # weights are not declared constant here
        rows = bench.run("choice|gate", (2,), SMALL, "sm90", CPU)["rows"]
    assert [(row["name"], row["launches"]) for row in rows] == [("gate", 2), ("choice", 2), ("choice_by_id", 2)]
    assert all(row["separate_us"] == row["joint_us"] == 9.0 for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("in_the_emulator")
def test_other_bits_are_not_timed() -> None:
    """A joint launch that loses its last kernel."""
    launch = joint_launch._launch
    with (
        mock.patch.object(joint_launch, "_launch", lambda noted: launch(noted[:1])),
        emulated_row_kernel("sm90"),
        pytest.raises(AssertionError, match="choice of 2 tokens: other bits; nothing is timed"),
    ):
        bench.run("choice$", (2,), SMALL, "sm90", CPU)
