"""The benchmark of the row kernels on a CPU, with references instead of kernels: its inputs, bytes and arithmetic."""

from __future__ import annotations

import bench_row_kernels
import pytest
import torch
from bench_row_kernels import distance, line, number_of_sets, run, run_chain
from lib import row_kernel_chain
from lib.row_kernel_chain import Chain, check_chain
from lib.row_kernel_works import WORKS

CPU = torch.device("cpu")


def test_every_row_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_row_kernels, "MOST_SETS", 2)
    result = run(CPU, "ref", "", [1, 3], with_ref=False)
    assert [(row["name"], row["tokens"]) for row in result["rows"]] == [(name, n) for name in WORKS for n in (1, 3)]
    for row in result["rows"]:
        assert row["us"] > 0 and row["rel_err"] == 0 and row["floor_us"] > 0 and row["name"] in line(row)


def test_bytes() -> None:
    """Two tokens, read once and written once."""
    per_token = {
        "norm_rope_store": 2 * 64 * 1024 + 1024 + 584 + 16,
        "inverse_rope": 2 * 64 * 128 + 8,
        "route_topk": 256 * 4 + 6 * 8,
        "swiglu": 3 * 4096,
        "swiglu_fp8": 2 * 4096 + 2048 + 64,
        "fp8_quantise": 3 * 4096 + 128,
    }
    for name, expected in per_token.items():
        assert WORKS[name](2, CPU).bytes == 2 * expected, name


def test_a_chunk_writes_three_places() -> None:
    chunk = WORKS["norm_rope_store"](1024, CPU)
    written = (1024 + 2 * 128) * 584 + 3 * 8 * 1024
    assert chunk.bytes == 1024 * (2 * 64 * 1024 + 1024 + 8) + written
    assert [len(x) for x in chunk.call("ref")] == [1024, 1024, 128, 128]


@pytest.mark.usefixtures("own_registry")
def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_kernels import registry

    def zeros(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return torch.zeros_like(x)

    monkeypatch.setattr(bench_row_kernels, "zeros", zeros, raising=False)
    registry.register("rms_norm", "zeros", "bench_row_kernels:zeros", lambda device, dtype: True, -1)
    with pytest.raises(AssertionError, match="rms_norm_1024 of 2 tokens is off by 1; nothing is timed"):
        distance("rms_norm_1024", 2, CPU, "zeros")


def test_sets_exceed_the_cache_twice() -> None:
    assert number_of_sets(1 << 20, CPU) == 2 and number_of_sets(1, CPU) == bench_row_kernels.MOST_SETS
    assert number_of_sets(bench_row_kernels.MOST_SET_BYTES + 1, CPU) == 1


def test_a_chain_is_timed_both_ways() -> None:
    """Every launch depends on the boundary before it, so none may be left out."""
    result = run_chain(CPU, "ref", [1], 1)
    (row,) = result["rows"]
    assert (row["tokens"], row["launches"]) == (1, Chain.LAUNCHES) and row["us"] > 0 and row["early_us"] > 0


def test_a_chain_that_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that begin early and read a result that is not written yet."""
    from dsv4_kernels.device import dependent_launch

    def late(*arguments: object) -> tuple[torch.Tensor, ...]:
        codes, scales = row_kernel_chain.rms_norm_fp8(*arguments)
        return codes, scales + dependent_launch.is_on()

    chain = Chain(1, 1, CPU, "ref")
    check_chain(chain)
    monkeypatch.setattr(row_kernel_chain, "swiglu_fp8", lambda x, *rest: late(x[:, :2048], None, 1e-6, *rest[1:]))
    with pytest.raises(AssertionError, match=r"differ in replay 0; nothing is timed"):
        check_chain(chain)
