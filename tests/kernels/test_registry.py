"""Choice of an implementation by device and dtype, or by name; and its errors (test_ops.py: the table)."""

from __future__ import annotations

import logging

import pytest
import torch

from dsv4_kernels import ops, registry
from dsv4_kernels.linear import linear
from dsv4_kernels.norm import rms_norm

CPU = torch.device("cpu")


def doubled_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return 2 * x


@pytest.fixture
def doubling(own_registry: None) -> None:
    """A second implementation of rms_norm, preferred on fp32 only."""
    registry.register("rms_norm", "doubling", f"{__name__}:doubled_norm", lambda _, dtype: dtype == torch.float32, 5)


X = torch.ones(2, 4)


@pytest.mark.usefixtures("doubling")
def test_the_highest_priority_that_supports_the_dtype_is_taken() -> None:
    assert registry.available("rms_norm") == ("sm90", "sm100", "doubling", "ref")
    assert torch.equal(rms_norm(X, None, 0.0), 2 * X)
    assert torch.equal(rms_norm(X.bfloat16(), None, 0.0), X.bfloat16())


@pytest.mark.usefixtures("doubling")
def test_a_name_decides_over_priority() -> None:
    assert torch.equal(rms_norm(X, None, 0.0, impl="ref"), X)
    assert torch.equal(rms_norm(X, None, 0.0), 2 * X)


@pytest.mark.usefixtures("doubling")
def test_a_name_that_does_not_support_the_dtype_is_an_error_not_a_fallback() -> None:
    with pytest.raises(NotImplementedError, match=r"'doubling' of op 'rms_norm'.*'cpu'.*bfloat16.*doubling, ref"):
        rms_norm(X.bfloat16(), None, 0.0, impl="doubling")


def test_unsupported_dtype_and_device_say_what_exists() -> None:
    with pytest.raises(NotImplementedError, match=r"no op 'linear' for .*'cpu' with dtype torch.float64.*tiled, ref"):
        linear(X.double(), X.double())
    with pytest.raises(
        NotImplementedError, match=r"device 'meta' with dtype torch.float32; implementations.*: sm90, sm100, ref"
    ):
        rms_norm(X.to("meta"), None, 0.0)


def test_unknown_names_list_what_exists() -> None:
    with pytest.raises(KeyError, match=r"no op 'attention'; the ops are: .*linear.*sparse_attention"):
        registry.available("attention")
    with pytest.raises(KeyError, match=r"op 'linear' has no implementation 'cuda'; it has: tiled, ref"):
        linear(X, X, impl="cuda")


def test_bad_registrations() -> None:
    with pytest.raises(ValueError, match=r"expected 'package.module:attribute'"):
        registry.register("linear", "new", "dsv4_kernels.linear.ref", ops.any_device, 1)
    with pytest.raises(KeyError, match=r"no op 'new'; the ops are: "):
        registry.register("new", "ref", "a:b", ops.any_device, 1)
    with pytest.raises(ValueError, match=r"already has .* called 'ref' \(dsv4_kernels.linear.ref:linear\)"):
        registry.register("linear", "ref", "a:b", ops.any_device, 1)


@pytest.mark.usefixtures("doubling")
def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Registering `doubling` has cleared earlier choices."""
    with caplog.at_level(logging.INFO, logger="dsv4_kernels.registry"):
        for _ in range(3):
            rms_norm(X, None, 0.0)
            rms_norm(X, None, 0.0, impl="ref")
    assert [r.getMessage() for r in caplog.records] == [
        "op rms_norm on cpu, torch.float32: doubling",
        "op rms_norm on cpu, torch.float32: ref (named)",
    ]


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "sm90"), ((10, 0), "sm100"), ((8, 0), "ref")], ids=str)
def test_attention_follows_the_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str) -> None:
    """Compute capability and bf16 choose the kernel; naming another generation's kernel is an error, not a fallback."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda", 0)
    choice = registry.chosen("sparse_attention", cuda, torch.bfloat16)
    assert (choice.name, choice.graph_safe) == (expected, expected != "ref")
    assert registry.chosen("sparse_attention", cuda, torch.float32).name == "ref"
    assert registry.chosen("sparse_attention", CPU, torch.bfloat16).name == "ref"
    for other in {"sm90", "sm100"} - {expected}:
        with pytest.raises(NotImplementedError, match=f"'{other}' of op 'sparse_attention' does not support"):
            registry.chosen("sparse_attention", cuda, torch.bfloat16, other)


@pytest.mark.usefixtures("doubling")
def test_chosen_names_the_implementation_that_select_would_load() -> None:
    """`chosen` returns the implementation and whether a CUDA graph can capture it: the attention's reference reads
    lengths back."""
    assert registry.chosen("rms_norm", CPU, torch.float32).name == "doubling"
    assert registry.chosen("rms_norm", CPU, torch.bfloat16).name == "ref"
    assert registry.chosen("rms_norm", torch.device("cuda"), torch.bfloat16).graph_safe
    assert not registry.chosen("sparse_attention", torch.device("cuda"), torch.bfloat16, "ref").graph_safe
    assert registry.chosen("rms_norm", CPU, torch.float32, "ref").name == "ref"


@pytest.mark.usefixtures("own_registry")
def test_a_registered_implementation_promises_nothing_by_default() -> None:
    registry.register("rms_norm", "new", "a:b", ops.any_device, 1)
    row = registry.chosen("rms_norm", CPU, torch.float32)
    assert (row.name, row.graph_safe, row.batch_invariant) == ("new", False, False)
