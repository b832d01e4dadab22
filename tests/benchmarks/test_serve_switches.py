"""The comparison of servers that differ in switches, without a GPU: its ratios."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest
import serve_switches
from lib import servers


def row(variant: str, turn: int, figure: float, work: str = "decode", requests: int = 1) -> dict[str, object]:
    return {"variant": variant, "work": work, "requests": requests, "turn": turn, "figure": figure}


def test_ratios_are_those_of_the_same_turn() -> None:
    """A machine that slows down between two turns slows both servers down: the ratio stays."""
    rows = [row("default", turn, figure) for turn, figure in enumerate((100.0, 50.0, 10.0))]
    rows += [row("other", turn, figure) for turn, figure in enumerate((110.0, 55.0, 12.0))]
    assert serve_switches.ratios(rows, "default") == [
        {"variant": "other", "work": "decode", "requests": 1, "ratio": 1.1, "least": 1.1, "most": 1.2}
    ]


def test_a_turn_without_a_baseline_is_left_out() -> None:
    rows = [row("default", 0, 100.0), row("other", 0, 90.0), row("other", 1, 50.0), row("third", 1, 1.0)]
    assert [found["ratio"] for found in serve_switches.ratios(rows, "default")] == [0.9]


def test_cells_of_a_turn() -> None:
    assert serve_switches.cells(["decode", "prefill"], [1, 16]) == [
        *(("decode", 1), ("decode", 16)),
        *(("prefill", 8), ("prefill", 1)),
    ]


def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Stand-in servers: the second answers twice as fast. Started once, measured in turns, stopped at the end."""
    folder, out, variants = tmp_path / "servers", tmp_path / "out.json", tmp_path / "variants.json"
    variants.write_text(json.dumps({"model": "m", "servers": {"default": {"contender": "ours"}, "other": {}}}))
    stopped = []

    def start_all(about: dict, where: Path, port: int) -> int:
        where.mkdir()
        listed = {name: {"url": f"http://{name}", "pid": 0} for name in about["servers"]}
        (where / servers.LIST).write_text(json.dumps(listed))
        return 0

    monkeypatch.setattr(servers, "start_all", start_all)
    monkeypatch.setattr(servers, "stop_all", stopped.append)
    monkeypatch.setattr(servers, "others_suspended", lambda folder, url: contextlib.nullcontext())
    monkeypatch.setattr(serve_switches, "measure", lambda url, *cell: 20.0 if "other" in url else 10.0)
    arguments = [str(variants), "--folder", str(folder), "--out", str(out), "--works", "decode", "--requests", "1"]
    monkeypatch.setattr(sys, "argv", ["serve_switches.py", *arguments])
    serve_switches.main()
    found = json.loads(out.read_text())
    assert [row["ratio"] for row in found["ratios"]] == [2.0] and len(found["rows"]) == 6
    assert stopped == [folder] and "other" in capsys.readouterr().out
