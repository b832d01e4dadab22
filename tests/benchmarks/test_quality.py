"""`benchmarks/quality.py` on a small random model in fp32: an independent implementation is within the bound, and each
planted fault beyond it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quality
import torch
from lib import quality_figures as figures
from model.oracle import FLASH_LIKE, QUANTISABLE, TransformersOracle, configuration, random_weights
from model.reference import OFF, Reference
from serving.logits_stand_in import Logits, served
from torch import Tensor

CONFIG = configuration(FLASH_LIKE, **QUANTISABLE)
WEIGHTS = random_weights(CONFIG, seed=6)
WINDOWS = list(torch.randint(2, CONFIG["vocab_size"], (2, 150), generator=torch.Generator().manual_seed(1)))


class RopeSign(Reference):
    def rope(self, x: Tensor, positions: Tensor, ratio: int, inverse: bool = False) -> Tensor:
        return super().rope(x, positions, ratio, not inverse)


class GroupLate(Reference):
    """An entry of a CSA layer is visible four tokens late."""

    def select(self, x: Tensor, qr: Tensor, prefix: str, visible: Tensor, trace: Any) -> Tensor:
        late = torch.cat([torch.zeros_like(visible[:4]), visible[:-4]])
        return super().select(x, qr, prefix, late, trace)


class IndexerOffByOne(Reference):
    def select(self, x: Tensor, qr: Tensor, prefix: str, visible: Tensor, trace: Any) -> Tensor:
        return super().select(x, qr, prefix, visible, trace).roll(1, dims=1) & visible


class StaleRow(Reference):
    """A row of the window, in every layer, is that of the token 128 positions before."""

    def quantise_kv(self, x: Tensor) -> Tensor:
        x = super().quantise_kv(x)
        return torch.cat([x[:140], x[12:13], x[141:]]) if len(x) == len(WINDOWS[0]) else x


def with_weights(end: str, change: Callable[[Tensor], Tensor]) -> Logits:
    changed = {name: change(value) if name.endswith(end) else value for name, value in WEIGHTS.items()}
    assert any(name.endswith(end) for name in WEIGHTS)
    return Reference(CONFIG, changed, OFF).logits


FAULTS: dict[str, Callable[[], Logits]] = {
    "rope sign": lambda: RopeSign(CONFIG, WEIGHTS, OFF).logits,
    "one group late": lambda: GroupLate(CONFIG, WEIGHTS, OFF).logits,
    "indexer off by one": lambda: IndexerOffByOne(CONFIG, WEIGHTS, OFF).logits,
    "stale row": lambda: StaleRow(CONFIG, WEIGHTS, OFF).logits,
    "window one short": lambda: Reference(
        {**CONFIG, "sliding_window": CONFIG["sliding_window"] - 1}, WEIGHTS, OFF
    ).logits,
    "wrong expert's scale": lambda: with_weights("layers.3.ffn.experts.1.w1.weight", lambda value: value * 2),
    "no sinks": lambda: with_weights("attn_sink", lambda value: torch.full_like(value, -30.0)),
}


def rows(logits: Logits) -> list[figures.Row]:
    with served(logits) as url:
        return quality.compared(CONFIG, WEIGHTS, WINDOWS, {"server": url}, OFF, torch.float32)


@pytest.mark.slow
def test_transformers_is_within_the_bound() -> None:
    oracle = TransformersOracle(CONFIG, WEIGHTS)
    reference, plain, server = rows(lambda ids: oracle.run(ids).logits)
    assert reference.kl == plain.kl == 0 and figures.bound_of(plain) == figures.FLOOR
    assert server.kl < 1e-8 and server.agreement > 0.99
    assert server.perplexity == pytest.approx(reference.perplexity, rel=1e-4)


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name == "stale row" else pytest.mark.slow) for name in FAULTS]
)
def test_a_planted_fault_is_beyond_the_bound(fault: str) -> None:
    _, plain, server = rows(FAULTS[fault]())
    assert server.kl > 10 * figures.bound_of(plain), server


def test_the_divergence_is_that_of_the_partition() -> None:
    """By hand: three tokens, of which the server reports two; and a uniform distribution has the vocabulary's size as
    perplexity."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]] * 2), torch.tensor([[0.4, 0.4, 0.2]] * 2)
    scores = figures.Scores(q[:1, 0].log(), torch.tensor([[0, 1]]), q[:1, :2].log())
    expected = 0.5 * torch.tensor(0.5 / 0.4).log() + 0.3 * torch.tensor(0.3 / 0.4).log()
    assert float(figures.divergence(p.log(), scores)[0]) == pytest.approx(float(expected), abs=1e-6)
    uniform = torch.full((3, 8), 1 / 8).log()
    window = torch.tensor([0, 1, 2])
    assert figures.row("", [uniform], [figures.scores_of(uniform, window)]).perplexity == pytest.approx(8)


@pytest.mark.slow
def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1 for a server whose logits are others. A text that is too short is refused."""
    config = json.loads((checkpoint / "config.json").read_text())
    weights = quality.read_dequantised(checkpoint)
    right = Reference(config, weights, quality.FULL).logits
    text = tmp_path / "text"
    text.write_text("the water and the people " * 60)
    arguments = [str(checkpoint), "--text", str(text), "--tokens", "128", "--windows", "2", "--dtype", "float32"]
    for logits, status in ((right, 0), (lambda ids: right(ids).roll(1, dims=-1), 1)):
        with served(logits) as url:
            out = tmp_path / "out.json"
            assert quality.main([*arguments, "--server", f"ours={url}", "--out", str(out)]) == status
            assert ("beyond the bound" in capsys.readouterr().out) == bool(status)
            assert [row["name"] for row in json.loads(out.read_text())["rows"]] == ["reference", "plain", "ours"]
    with pytest.raises(ValueError, match="windows of 4000 tokens need 8000 tokens, the text has"):
        figures.windows(checkpoint, [text], 4000, 2)
