"""Rows of a comparison of served models: one figure of ours and of a contender of SGLang's built-in. Table, picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LESS_IS_BETTER = "ttft itl tpot bytes launches busy span step_ms recomputed distance silence ready".split()
"""Words in the names of metrics of which less is better."""
SWEEP = "churn_sweep"
BUILTIN = "builtin"
OURS = "ours"
NOT_UP = "not_up"
"""Folder, among kept figures, of the reasons of contenders that did not come up."""

Key = tuple[str, int, str] | tuple[str, int, str, int]
"""Work, requests, metric, and the prefix of a churn sweep."""
Figures = dict[Key, float]


@dataclass(frozen=True)
class Row:
    """One figure of both servers."""

    work: str
    requests: int
    metric: str
    ours: float
    builtin: float
    prefix: int | None = None
    """In the churn sweep, the tokens that a session begins with; `requests` are the sessions."""
    contender: str = BUILTIN
    """The built-in's contender that `builtin` is of."""
    of_ours: str = OURS
    """The contender of ours that `ours` is of."""

    @classmethod
    def of(cls, key: Key, ours: float, builtin: float, contender: str = BUILTIN, of_ours: str = OURS) -> Row:
        """Return the row of a figure that both servers have."""
        work, requests, metric, *prefix = key
        return cls(work, requests, metric, ours, builtin, *prefix, contender=contender, of_ours=of_ours)

    @property
    def ratio(self) -> float | None:
        """Above 1 where ours is better; None where the divisor is 0."""
        less = any(word in self.metric for word in LESS_IS_BETTER)
        a, b = (self.builtin, self.ours) if less else (self.ours, self.builtin)
        return a / b if b else None


def is_builtin(name: str) -> bool:
    """Return whether a contender is of the built-in."""
    return name.split("+")[0] == BUILTIN


def rows_of(figures: Mapping[str, Figures]) -> list[Row]:
    """Return a row for each figure that a contender of ours and a contender of the built-in have, pair by pair."""
    ours, others = ([name for name in figures if is_builtin(name) == wanted] for wanted in (False, True))
    return [
        Row.of(key, figures[mine][key], value, other, mine)
        for mine in ours
        for other in others
        for key, value in figures[other].items()
        if key in figures[mine]
    ]


def best_third_of(rows: Sequence[Row]) -> list[Row]:
    """For either prefix of the churn sweep, take the third of the numbers of sessions with the best tok/s against the
    built-in. Return the mean of both prefixes' rows as work "churn", for each pair of contenders."""
    found = []
    for mine, other in dict.fromkeys((row.of_ours, row.contender) for row in rows if row.work == SWEEP):
        of_pair = [row for row in rows if (row.work, row.of_ours, row.contender) == (SWEEP, mine, other)]
        chosen: dict[str, list[Row]] = {}
        for prefix in dict.fromkeys(row.prefix for row in of_pair):
            sweep = [row for row in of_pair if row.prefix == prefix]
            speeds = sorted((r for r in sweep if r.metric == "tok_s"), key=lambda r: -(r.ratio or 0))
            best = {row.requests for row in speeds[: max(1, len(speeds) // 3)]}
            for row in sweep:
                if row.requests in best:
                    chosen.setdefault(row.metric, []).append(row)
        found += [
            Row("churn", round(statistics.mean(r.requests for r in same)), metric,
                ours=statistics.mean(r.ours for r in same), builtin=statistics.mean(r.builtin for r in same),
                contender=other, of_ours=mine)
            for metric, same in chosen.items()
        ]  # fmt: skip
    return found


@dataclass(frozen=True)
class Kept:
    """Figures of one stage of a contender, with the settings of its server."""

    contender: str
    stage: str
    flags: Sequence[str]
    env: Mapping[str, str]
    figures: Figures


def keep_figures(folder: Path | None, kept: Kept) -> None:
    """Write a contender's figures; without a folder do nothing."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = [[*key, value] for key, value in kept.figures.items()]
        (folder / f"{kept.contender}.{kept.stage}.json").write_text(json.dumps({**vars(kept), "figures": rows}))


def keep_reason(folder: Path | None, name: str, reason: str) -> None:
    """Write why a contender did not come up; without a folder do nothing."""
    if folder is not None:
        (folder / NOT_UP).mkdir(parents=True, exist_ok=True)
        (folder / NOT_UP / f"{name}.txt").write_text(reason)


def read_reasons(folder: Path | None) -> dict[str, str]:
    """Return the kept reasons by contender."""
    found = sorted((folder / NOT_UP).glob("*.txt")) if folder is not None else ()
    return {path.stem: path.read_text() for path in found}


def read_figures(folder: Path | None) -> Iterator[Kept]:
    """Yield the contents of all files in the folder."""
    for path in sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else ():
        kept = json.loads(path.read_text())
        yield Kept(**{**kept, "figures": {tuple(key): value for *key, value in kept["figures"]}})


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table."""
    lines = [
        f"{'work':22}{'requests':>9}  {'metric':20}{'ours':>14}{'built-in':>14}{'ratio':>8}  contenders of either side"
    ]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        work = label(row.work, row.prefix)
        figures = f"{row.ours:14,.4g}{row.builtin:14,.4g}{ratio:>8}"
        lines.append(f"{work:22}{row.requests:9}  {row.metric:20}{figures}  {row.of_ours}, {row.contender}")
    return "\n".join(lines)


def label(work: str, prefix: int | None = None) -> str:
    """Return a work's name for tables, with its prefix in the churn sweep."""
    return work if prefix is None else f"{work} {prefix}"


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw hit rate and tok/s over the number of sessions, and decode tok/s over requests: the first pair of
    contenders."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if (row.of_ours, row.contender) == (rows[0].of_ours, rows[0].contender)]
    prefixes = sorted({row.prefix for row in rows if row.prefix is not None}, reverse=True)
    panels = [("decode", None, "tok_s")] + [
        (SWEEP, prefix, metric) for prefix in prefixes for metric in ("hit_rate", "tok_s")
    ]
    panels = [p for p in panels if any((row.work, row.prefix, row.metric) == p for row in rows)]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.4), squeeze=False)
    for axis, (work, prefix, metric) in zip(axes[0], panels, strict=True):
        found = sorted(
            (r for r in rows if (r.work, r.prefix, r.metric) == (work, prefix, metric)), key=lambda r: r.requests
        )
        for name, style in (("ours", "o-"), ("builtin", "s--")):
            axis.plot([r.requests for r in found], [getattr(r, name) for r in found], style, label=name)
        title = f"{work}: {metric}" if prefix is None else f"prefixes of {prefix:,}: {metric}"
        axis.set(title=title, xlabel="requests" if prefix is None else "sessions")
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def as_json(row: Row) -> dict:
    """Return the row for the file, with a prefix where it has one."""
    fields = {**vars(row), "ratio": row.ratio}
    return {name: value for name, value in fields.items() if name != "prefix" or value is not None}
