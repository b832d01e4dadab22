"""A served model that computes attention twice: the file, and that the server continues with the kernel's result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model.served import Served

from dsv4_kernels import ops, registry
from dsv4_kernels.sparse_attention import ref
from sglang_dsv4.attention import comparison as attention_comparison

ERROR = 2.0**-10


def off_by_a_little(*arguments: object, **options: object) -> torch.Tensor:
    return ref.sparse_attention(*arguments, **options) * (1 + ERROR)


def test_distances_of_every_layer_and_token(serve: Callable[..., Served], tmp_path: Path) -> None:
    """A kernel that is wrong by a factor: the output projection is linear, so the sublayer is wrong by as much."""
    served, file = serve("flash-like"), tmp_path / "distances"
    harness, tokens = served.harness, served.corpus[0][:40]
    plain = harness.run(tokens, decode_from=37)
    loader = f"{__name__}:off_by_a_little"
    off = registry.Implementation("off", loader, ops.any_device, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._table["sparse_attention"], "off", off)
        patch.setattr(registry, "_resolved", {})
        kernels = harness.run(tokens, decode_from=37)
        end = attention_comparison.install(harness.backend, harness.model, file)
        try:
            compared = harness.run(tokens, decode_from=37)
        finally:
            end()
    assert torch.equal(compared, kernels) and not torch.equal(kernels, plain)
    assert torch.equal(harness.run(tokens, decode_from=37), plain)  # the comparison is removed completely

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    layers = len(harness.model.model.layers)
    assert [line["mode"] for line in lines] == ["prefill"] * layers + ["decode"] * 3 * layers
    assert [line["layer"] for line in lines] == list(range(layers)) * 4
    assert {line["kind"] for line in lines} == {"SWA", "CSA", "HCA"}
    for line in lines:
        assert len(line["attended"]) == len(line["sublayer"]) == (37 if line["mode"] == "prefill" else 1)
        for distance in line["attended"] + line["sublayer"]:
            assert distance == pytest.approx(ERROR, rel=1e-2)


def test_the_plugin_installs_it(serve: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the reference is compared with itself."""
    monkeypatch.setenv(attention_comparison.FILE_VARIABLE, str(tmp_path / "distances"))
    served = serve("flash-like", server_args={"random_seed": 7})  # a model that no other test has built
    served.harness.run(served.corpus[0][:5])
    lines = [json.loads(line) for line in (tmp_path / "distances").read_text().splitlines()]
    assert len(lines) == len(served.harness.model.model.layers)
    assert all(line["attended"] == line["sublayer"] == [0.0] * 5 for line in lines)


def test_equal_results_have_no_distance() -> None:
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    assert attention_comparison.relative_distances(x, x) == [0.0, 0.0, 0.0]
    assert attention_comparison.relative_distances(x + torch.tensor([[0.0], [0.0], [1.0]]), x)[2] == pytest.approx(
        2**0.5 / 5, rel=1e-3
    )


def test_the_file_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_comparison.file_of_rank(0) is None
    monkeypatch.setenv(attention_comparison.FILE_VARIABLE, "somewhere")
    assert attention_comparison.file_of_rank(0) == Path("somewhere")
    assert attention_comparison.file_of_rank(2) == Path("somewhere.2")
