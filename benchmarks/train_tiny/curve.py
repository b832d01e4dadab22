"""Draw the log of a training of the model or of its draft; needs matplotlib.

PYTHONPATH=benchmarks python -m train_tiny.curve benchmarks/results/train_tiny.json benchmarks/results/train_tiny.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

LONGEST = 8192
"""Longest rows, in tokens, whose steps are drawn. Longer rows have another mixture of texts and tasks."""
PANELS = (
    ("nats a token", ("main", "mtp", "draft", "valid")),
    ("share", ("exact", "mtp_right", "accepted", "same")),
)


def draw(log: dict[str, Any], file: Path) -> None:
    """Draw losses and shares of right tokens over the tokens that were trained on.

    A validation has no number of tokens in the log; it is drawn at that of the row before. In the log of a draft
    "valid" is the mean number of accepted proposals, which is not drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points: dict[str, list[tuple[float, float]]] = {}
    tokens = 0
    is_draft = any("draft" in row for row in log["rows"])
    for row in log["rows"]:
        tokens = row.get("tokens", tokens)
        if row.get("length", 0) <= LONGEST and tokens:
            for name, value in row.items():
                points.setdefault(name, []).append((tokens / 1e6, value))
    if is_draft:
        del points["valid"]
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(10, 3.4))
    for axis, (label, names) in zip(axes, PANELS, strict=True):
        for name in names:
            if name in points:
                axis.plot(*zip(*points[name], strict=True), "o" if name == "valid" else "-", label=name, markersize=3)
        axis.set(xlabel="million tokens", ylabel=label)
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def main() -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draw the log of a training.")
    parser.add_argument("log", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.log.read_text()), arguments.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
