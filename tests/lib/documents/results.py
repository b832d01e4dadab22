"""Result files, and markdown tables of their numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    """The content of `benchmarks/results/NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A markdown table with a final line break."""
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *(list(row) for row in rows)]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def whole(number: float) -> str:
    """`12,345`."""
    return f"{number:,.0f}"


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))
