"""`docs/server_flags.toml` as rows: what each server argument of SGLang does with this package.

The file says what its keys mean.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[3] / "docs" / "server_flags.toml"
NO_EFFECT = "no effect"
OTHERS = ("*",)
"""Stands for all values that no other row names."""
ANSWERS = ("works", NO_EFFECT, "replaced", "refused")
KEYS = {"flags", "fields", "is", "why", "with", "where", "test", "set", "by", "reads"}


def fill(words: Iterable[str], placeholders: Mapping[str, object]) -> list[str]:
    """The words with values for their placeholders, `{model}` and the like."""
    filled = list(words)
    for name, value in placeholders.items():
        filled = [word.replace("{" + name + "}", str(value)) for word in filled]
    return filled


@dataclass(frozen=True)
class Flag:
    """One flag with one value, or a switch."""

    name: str  # --schedule-policy
    values: tuple[str, ...]  # ("lpm",): words of a command line, with placeholders

    @property
    def text(self) -> str:
        """The flag as on a command line."""
        return " ".join((self.name, *map(shlex.quote, self.values)))

    def words(self, **placeholders: object) -> list[str]:
        """The words of the command line; `{model}` and the like are filled in."""
        return [self.name, *fill(self.values, placeholders)]


@dataclass(frozen=True)
class Row:
    """An answer and the flags that it is for, one tuple of alternative values for each flag."""

    flags: tuple[tuple[Flag, ...], ...]
    answer: str  # of ANSWERS
    fields: tuple[str, ...] = ()  # of ServerArgs, without a flag
    why: str = ""
    context: str = ""  # other flags of the command line, the key `with`
    where: str = ""
    test: str = ""
    set: str = ""
    by: str = ""
    reads: tuple[str, ...] | None = None

    @property
    def all(self) -> tuple[Flag, ...]:
        """Every flag with every value that the file lists."""
        return tuple(flag for alternatives in self.flags for flag in alternatives if flag.values != OTHERS)

    def words(self, **placeholders: object) -> list[str]:
        """The words of the other flags, filled in."""
        return fill(shlex.split(self.context), placeholders)


def alternatives(text: str) -> tuple[Flag, ...]:
    """A flag as the file writes it -> the flag with each of its values."""
    name, *values = shlex.split(text)
    if len(values) == 1 and "|" in values[0] and "'" not in text:
        return tuple(Flag(name, (value,)) for value in values[0].split("|"))
    return (Flag(name, tuple(values)),)


def row_of(entry: dict[str, Any]) -> Row:
    """A table of the file as a row.

    Raises:
        ValueError: an unknown key or answer.
    """
    if not entry.keys() <= KEYS or entry.get("is") not in ANSWERS:
        raise ValueError(f"{FILE}: expected keys {sorted(KEYS)} and one of {ANSWERS} for `is`, got {entry}")
    reads = entry.get("reads")
    return Row(
        tuple(alternatives(text) for text in entry.get("flags", ())),
        entry["is"],
        tuple(entry.get("fields", ())),
        entry.get("why", ""),
        entry.get("with", ""),
        entry.get("where", ""),
        entry.get("test", ""),
        entry.get("set", NO_EFFECT if entry["is"] == NO_EFFECT and "flags" in entry else ""),
        entry.get("by", ""),
        None if reads is None else tuple(reads),
    )


@cache
def contents() -> dict[str, Any]:
    """The file as TOML."""
    return tomllib.loads(FILE.read_text())


@cache
def sections() -> dict[str, tuple[Row, ...]]:
    """Title -> rows of a section, in the file's order."""
    return {section["title"]: tuple(map(row_of, section["row"])) for section in contents()["section"]}


@cache
def rows() -> tuple[Row, ...]:
    """The rows in the file's order."""
    return tuple(row for section in sections().values() for row in section)


def unused() -> tuple[str, ...]:
    """Globs of SGLang's files, below sglang/srt, that do not run in a server of this package."""
    return tuple(contents()["unused"])


def sets() -> dict[str, tuple[Row, ...]]:
    """The sets of flags that servers are tried with -> their rows."""
    names = dict.fromkeys(row.set for row in rows() if row.set)
    return {name: tuple(row for row in rows() if row.set == name) for name in names}


def command_lines() -> dict[str, list[str]]:
    """Name of a server -> its flags: a server for each alternative of each set, one for all flags without effect."""
    lines = {}
    for name, of_set in sets().items():
        count = 1 if name == NO_EFFECT else max(len(values) for row in of_set for values in row.flags)
        contexts = dict.fromkeys(row.context for row in of_set)
        for index in range(count):
            words = [word for context in contexts for word in shlex.split(context)]
            chosen = (values[index % len(values)] for row in of_set for values in row.flags)
            lines[f"{name} {index}" if count > 1 else name] = [
                *words,
                *(word for flag in chosen for word in flag.words()),
            ]
    return lines
