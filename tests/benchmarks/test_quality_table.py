"""`benchmarks/quality_table.py`: the flags of its servers, what it judges, and its command with a server's stand-in.

Its results are checked against its bounds; `tests/serving/test_quality.py` measures them again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quality_table
import torch
from lib import quality_measuring as measuring
from lib.quality_configurations import COLD, ON_A_CPU, ON_GPUS, PREFIX_TOKENS, Configuration
from lib.quality_figures import Scores
from model.oracle import read_dequantised
from model.reference import FULL, Reference
from serving.logits_stand_in import served
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ROOT / "trained"


def test_every_flag_is_sglangs() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    for one in (*ON_A_CPU, *ON_GPUS):
        parsed = parser.parse_args(["--model-path", "x", *one.server_flags()])
        assert parsed.dtype == one.dtype and one.ranks in (1, parsed.tp_size), one.name
    assert len({one.name for one in (*ON_A_CPU, *ON_GPUS)}) == len(ON_A_CPU) + len(ON_GPUS)
    assert not any(one.pair for one in ON_GPUS)  # `quality_table.from_command` starts one server


def test_results_are_within_their_bounds() -> None:
    result = json.loads((ROOT / "benchmarks/results/quality_cpu.json").read_text())
    reference, *rows = result["rows"]
    assert reference["name"] == measuring.REFERENCE and [row["name"] for row in rows] == [one.name for one in ON_A_CPU]
    for kind in ("text", "chat"):
        assert reference[kind]["perplexity"] == rows[0][kind]["reference_perplexity"]
        assert all("plain_moved" in row[kind] for row in rows)
    assert not [line for row in result["rows"] for line in measuring.problems(row)]


WITHIN = {"kl": 1e-3, "bound": 2e-3, "to_trained": 2e-3}
OF_40 = {**WITHIN, "reference_perplexity": 40.0, "plain_moved": 0.1}


def measured(**changed: Any) -> dict[str, Any]:
    """Return a row of the table in which everything is within its bound, but for what is `changed`."""
    figures = dict.fromkeys(("text", "chat", "decode"), WITHIN)
    fp32 = {"text": 1e-12, "bound": measuring.FP32_BOUND}
    row = {"name": "x", "contender": "ours", "same_bits": 1.0, "same_bits_promised": True, "fp32": fp32, **figures}
    return {**row, **changed}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"decode": {"kl": 3e-3, "bound": 2e-3}}, "KL of decode 3.00e-03, bound 2.00e-03"),
        ({"chat": {"kl": float("nan"), "bound": 2e-3}}, "KL of chat nan"),
        ({"fp32": {"text": 6e-9, "bound": 5e-9}}, "in fp32 without quantisers: KL of text 6.00e-09"),
        ({"same_bits": 0.999}, "99.90% of the tokens have the promised bits"),
        (
            {"text": {**WITHIN, "agreement": 0.7, "plain_agreement": 0.9, "positions": 10_000}},
            "30.00% of text have another likeliest token, at most 21.29%",
        ),
        (
            {"text": {**OF_40, "perplexity": 40.8, "positions": 1000}},
            "perplexity of text 40.80, the reference's 40.00: +0.020 nats, at most 0.015",
        ),
        (
            {"chat": {**OF_40, "perplexity": 39.2, "positions": 1000}},
            "perplexity of chat 39.20, the reference's 40.00: -0.020 nats, at most 0.015",
        ),
    ],
    ids=["KL", "NaN", "fp32", "bits", "agreement", "a larger perplexity", "a smaller perplexity"],
)
def test_a_figure_beyond_its_bound_is_named(changed: dict[str, Any], problem: str) -> None:
    assert not measuring.problems(measured())
    (found,) = measuring.problems(measured(**changed))
    assert problem in found


def test_perplexity_may_differ_by_chance() -> None:
    """The mean over few tokens varies more."""
    text = {**OF_40, "perplexity": 40.8}
    assert not measuring.problems(measured(text=text | {"positions": 100}))
    assert measuring.problems(measured(text=text | {"positions": 1000}))


def test_agreement_may_differ_by_chance() -> None:
    """Both counts have a deviation; none of few positions is no share of 0."""
    many = {**WITHIN, "agreement": 0.8, "plain_agreement": 0.9, "positions": 10_000}
    assert not measuring.problems(measured(text=many))
    half = {**WITHIN, "agreement": 0.5, "plain_agreement": 1.0}
    assert not measuring.problems(measured(decode=half | {"positions": 2}))
    assert measuring.problems(measured(decode=half | {"positions": 96}))


def test_ours_must_not_be_further_from_the_trained_model_than_the_builtin() -> None:
    builtin = measured(contender="builtin+marlin")
    assert not quality_table.beside_the_builtin([measured(), builtin])
    far = measured(text={"to_trained": 3e-3}, name="far")
    assert quality_table.beside_the_builtin([measured(), far, builtin]) == [
        "far: KL of text to the trained model 3.00e-03, built-in 2.00e-03"
    ]
    assert not quality_table.beside_the_builtin([far])


def test_tables_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are in the order of the configurations; a table of other inputs is refused."""

    def file(name: str, inputs: str, *rows: dict[str, Any]) -> str:
        (tmp_path / name).write_text(json.dumps({"inputs": inputs, "rows": rows}))
        return str(tmp_path / name)

    first, second = measured(name="ours"), measured(name="ours, EAGLE")
    far = measured(
        name="built-in, EAGLE", contender="builtin+marlin", text={"kl": 3e-3, "bound": 2e-3, "to_trained": 1}
    )
    parts = [file("a", "x", first, far), file("b", "x", measured(name="ours", same_bits=0.0), second)]
    out = tmp_path / "out"
    assert quality_table.main(["trained", "--merge", *parts, "--out", str(out)]) == 1
    assert json.loads(out.read_text()) == {"inputs": "x", "rows": [first, second, far]}
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "configurations": 3,
        "beyond": ["built-in, EAGLE: KL of text 3.00e-03, bound 2.00e-03"],
    }
    with pytest.raises(SystemExit):
        quality_table.main(["trained", "--merge", *parts, file("c", "y", second)])
    assert "differ in inputs" in capsys.readouterr().err


def test_bits_are_compared_by_position() -> None:
    """A server that was asked from a later position on is compared with the same positions of the first one."""

    def asked(own: list[float], tokens: list[int], start: int) -> dict[str, measuring.Asked]:
        nothing = torch.empty(len(own), 0)
        scores = Scores(torch.tensor(own), nothing.long(), nothing)
        return {"text": measuring.Asked([scores], [torch.tensor(tokens)], [start])}

    first = asked([-1.0, -2.0, -3.0, -4.0], [5, 6, 7, 8, 9], 0)
    assert measuring.same_bits(first, first) == 1
    assert measuring.same_bits(asked([-3.0, -4.0], [5, 6, 7, 8, 9], 2), first) == 1
    assert measuring.same_bits(asked([-3.0, -4.1], [5, 6, 7, 8, 9], 2), first) == 0.5
    assert measuring.same_bits(asked([-3.0, -4.0], [5, 6, 7, 8, 1], 2), first) == 0.5


@pytest.mark.parametrize(
    ("tokens", "pages"), [(256, {"host": 256}), (512, {"device": 512}), (0, None)], ids=["few", "elsewhere", "none"]
)
def test_a_prefix_must_be_found_where_it_is_wanted(tokens: int, pages: dict[str, int] | None) -> None:
    measuring.require_hit("host", {"cached_tokens": 512, "prefix_cache": [{"pages_from": {"host": 512}}]})
    info = {"cached_tokens": tokens, "prefix_cache": [{"pages_from": pages}]}
    with pytest.raises(measuring.NoHitError, match="a prefix of 512 tokens should come from host"):
        measuring.require_hit("host", info)


@cache
def logits_of(tokens: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    config = json.loads((TRAINED / "config.json").read_text())
    padded = torch.tensor([*tokens, *[0] * max(0, 128 - len(tokens))])
    return Reference(config, read_dequantised(TRAINED), FULL, dtype).logits(padded)[: len(tokens)]


@pytest.mark.slow
@pytest.mark.parametrize("better", ["ours", "builtin"])
def test_the_command_of_a_gpu(
    better: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers are stand-ins: one computes the trained model in fp32, the other in bf16."""
    for name, value in (("TEXT_TOKENS", 640), ("DECODED", 2)):
        monkeypatch.setattr(measuring, name, value)
    few = measuring.inputs(TRAINED, text_windows=1, conversations=1, prompts=(121,))
    monkeypatch.setattr(quality_table, "inputs", lambda _: few)
    started = []

    @contextmanager
    def stand_in(one: Configuration, checkpoint: Path, folder: Path) -> Iterator[SimpleNamespace]:
        assert (checkpoint / "config.json").exists() and folder.is_dir()
        started.append((one.contender, one.environment(folder).get("SGLANG_DSV4_QAT")))
        dtype = torch.float32 if one.contender.startswith(better) else torch.bfloat16
        cached = PREFIX_TOKENS if one.prefix != COLD else 0
        with served(lambda tokens: logits_of(tuple(tokens.tolist()), dtype), cached) as url:
            yield SimpleNamespace(url=url)

    monkeypatch.setattr(measuring, "lay_out", lambda *_: None)  # it waits for files
    out = tmp_path / "out.json"
    arguments = [str(TRAINED), "--gpus", "2", "--folder", str(tmp_path / "logs"), "--out", str(out)]
    arguments += ["--only", "ours", "built-in, Marlin"]
    status = quality_table.main(arguments, stand_in)
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    wanted = [one.name for one in ON_GPUS if one.ranks <= 2 and ("ours" in one.name or "Marlin" in one.name)]
    assert (
        list(rows) == [measuring.REFERENCE, *wanted]
        and ("builtin+marlin", None) in started
        and ("ours", "full") in started
    )
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["configurations"] == len(wanted)
    beside = [line for line in last["beyond"] if "built-in" in line]
    assert bool(beside) == (better == "builtin") and status == int(bool(last["beyond"]))
    expected = 0 if better == "ours" else rows["ours"]["text"]["plain"]
    assert rows["ours"]["text"]["kl"] == pytest.approx(expected)
    text = rows[measuring.REFERENCE]["text"]
    assert text["perplexity"] == rows["ours"]["text"]["reference_perplexity"] and text["positions"] == 639
    is_exact = rows["ours"]["text"]["perplexity"] == pytest.approx(text["perplexity"], rel=1e-6)
    assert is_exact == (better == "ours")
    (by_token,) = rows["ours"]["decode"]["by_token"].items()
    assert by_token[0] == "121" and len(by_token[1].split()) == 2
    with pytest.raises(SystemExit):
        quality_table.main([str(TRAINED), "--only", "no such"], stand_in)
