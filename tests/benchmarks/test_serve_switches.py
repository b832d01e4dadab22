"""The comparison of servers that differ in switches, without a GPU: its ratios."""

from __future__ import annotations

import serve_switches


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
