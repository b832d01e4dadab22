"""The tables of server flags in docs/coming_from_sglang.md, made from `docs/server_flags.toml`."""

from __future__ import annotations

import shlex

from documents import server_flags
from documents.results import markdown
from documents.server_flags import Flag, Row

from sglang_dsv4.seam import refused_flags

MOST_VALUES = 4
"""A longer list of values is shown as "any other value" if it is the longest of its flag."""


def every_flag() -> str:
    """One table for each section of the file, with its title."""
    return "\n".join(
        f"### {title}\n\n" + markdown(("arguments", "here", "reason"), map(cells, rows_by_reason(rows)))
        for title, rows in server_flags.sections().items()
    )


def rows_by_reason(rows: tuple[Row, ...]) -> list[tuple[str, str, str]]:
    """Arguments, answer and reason of each row; a row whose refusals have several reasons is divided."""
    shown = []
    for row in rows:
        by_reason: dict[str, list[str]] = {}
        for alternatives in row.flags:
            by_reason.setdefault(reason(row, alternatives[0]), []).append(argument(alternatives))
        for field in row.fields:
            by_reason.setdefault(row.why, []).append(f"`{field}`")
        shown += [(", ".join(names), answer(row), why) for why, names in by_reason.items()]
    return shown


def cells(row: tuple[str, str, str]) -> tuple[str, ...]:
    """The row, with no character that ends a cell."""
    return tuple(cell.replace("|", "\\|") for cell in row)


def answer(row: Row) -> str:
    """The row's answer in words."""
    where = {"gpu": " on a GPU", "cpu": " on a CPU"}.get(row.where, "")
    return f"replaced by `{row.by}`" if row.answer == "replaced" else row.answer + where


def reason(row: Row, flag: Flag) -> str:
    """The row's reason; for a refusal of ours, the reason that the server prints."""
    if row.answer != "refused" or row.why:
        return row.why
    refusals = refused_flags.ON_A_CPU if row.where == "cpu" else (*refused_flags.REFUSALS, *refused_flags.AS_GIVEN)
    whys = [refusal.why for refusal in refusals if refusal.flag == flag.name]
    return whys[0].removesuffix("; leave it out") if whys else ""


def argument(alternatives: tuple[Flag, ...]) -> str:
    """The flag's name, with values where other rows answer for other values."""
    name = alternatives[0].name
    others = [values for row in server_flags.rows() for values in row.flags if values[0].name == name]
    if len(others) == 1:
        return f"`{name}`"
    longest = max(others, key=len)
    if any(flag.values == server_flags.OTHERS for flag in alternatives) or (
        len(longest) > MOST_VALUES and alternatives is longest
    ):
        return f"`{name}` with any other value"
    values = [" ".join(map(shlex.quote, flag.values)) for flag in alternatives]
    return f"`{f'{name} {values[0]}'.rstrip()}`" + "".join(f", `{value}`" for value in values[1:])
