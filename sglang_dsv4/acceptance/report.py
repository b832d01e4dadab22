"""The report: for each item green, red, or why it can't be judged; a page for people, and one line of JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

WIDTH = 110
SERVER = "server"
"""The item of what is served, which every report has."""
SHOWN = 6
"""Findings of an item that are printed; the JSON has all."""


class Verdict(Enum):
    """An item's result."""

    GREEN = "green"
    RED = "red"
    NOT_JUDGED = "can't be judged"


@dataclass(frozen=True)
class Result:
    """An item with its verdict.

    Attributes:
        name: as `--only` takes it, or that and a part of it.
        verdict: see :class:`Verdict`.
        summary: one sentence: what was found, or why nothing can be judged.
        findings: one line each, those that made it red first.
        figures: numbers for the JSON.
    """

    name: str
    verdict: Verdict
    summary: str
    findings: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)


def green(name: str, summary: str, findings: Iterable[str] = (), **figures: Any) -> Result:
    """A result that is green."""
    return Result(name, Verdict.GREEN, summary, tuple(findings), figures)


def red(name: str, summary: str, findings: Iterable[str] = (), **figures: Any) -> Result:
    """A result that is red."""
    return Result(name, Verdict.RED, summary, tuple(findings), figures)


def not_judged(name: str, summary: str, findings: Iterable[str] = (), **figures: Any) -> Result:
    """A result that can't be judged; the summary gives the reason."""
    return Result(name, Verdict.NOT_JUDGED, summary, tuple(findings), figures)


def status(results: Iterable[Result]) -> int:
    """The exit status: 1 if an item is red, 3 if no item but `server` could be judged, else 0."""
    results = list(results)
    if any(result.verdict is Verdict.RED for result in results):
        return 1
    return 0 if any(result.verdict is Verdict.GREEN and result.name != SERVER for result in results) else 3


def page(results: Iterable[Result]) -> str:
    """The report for people, and a count at its end."""
    results = list(results)
    width = max((len(result.name) for result in results), default=0)
    lines: list[str] = []
    for result in results:
        head = f"{result.verdict.value.upper():15} {result.name:{width}}  "
        lines += textwrap.wrap(head + result.summary, WIDTH, subsequent_indent=" " * len(head), break_on_hyphens=False)
        for finding in result.findings[:SHOWN]:
            lines += textwrap.wrap(finding, WIDTH - 18, initial_indent=" " * 18, subsequent_indent=" " * 20)
        if len(result.findings) > SHOWN:
            lines.append(" " * 18 + f"and {len(result.findings) - SHOWN} more (in the JSON)")
    counts = ", ".join(f"{sum(one.verdict is verdict for one in results)} {verdict.value}" for verdict in Verdict)
    return "\n".join([*lines, "", f"{len(results)} items: {counts}"])


def as_json(results: Iterable[Result], **about: Any) -> str:
    """The report as one line of JSON: `about` and the items, with all findings."""
    results = list(results)
    items = [
        {
            "name": one.name,
            "verdict": one.verdict.value,
            "summary": one.summary,
            "findings": one.findings,
            **one.figures,
        }
        for one in results
    ]
    return json.dumps({**about, "status": status(results), "items": items}, ensure_ascii=False)
