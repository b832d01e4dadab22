"""The environment switches of the kernels, and the one parser of all switches (`sglang_dsv4.env` uses it too).

Standard library only: the CPU shims read a switch at the start of every Python process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple


class Switch(NamedTuple):
    """An environment variable that this project reads. Unset and empty mean the default."""

    name: str
    values: tuple[str, ...]  # accepted words, in lower case; empty: any text
    default: str  # as documents state it; `text`, `choice` and `number` return None
    meaning: str
    form: str = ""  # meaning of the text, if `values` is empty

    def text(self) -> str | None:
        """The variable's text without surrounding blanks; None if it is unset or empty."""
        return os.environ.get(self.name, "").strip() or None

    def choice(self) -> str | None:
        """The word of `values` that the variable holds, in lower case; None if it is unset or empty.

        Raises:
            ValueError: it holds another word.
        """
        text = self.text()
        word = None if text is None else text.lower()
        if word is not None and word not in self.values:
            raise ValueError(f"{self.name} must be {' or '.join(map(repr, self.values))}, got {text!r}")
        return word

    def number(self) -> int | None:
        """The number that the variable holds; None if it is unset or empty.

        Raises:
            ValueError: it holds no number of at least 0.
        """
        text = self.text()
        if text is not None and not text.isdigit():
            raise ValueError(f"{self.name} must be a number of at least 0, got {text!r}")
        return None if text is None else int(text)


DEPENDENT_LAUNCH = Switch(
    "DSV4_DEPENDENT_LAUNCH",
    ("on", "off"),
    "on",
    "programmatic dependent launch: a kernel is launched while the one before it in the stream still runs, and waits "
    "for its end",
)
KERNEL_CACHE = Switch(
    "DSV4_KERNEL_CACHE",
    (),
    "`~/.cache/sglang-dsv4/kernels`",
    "where compiled kernels are kept",
    form="a folder, or `off` for none",
)
SWITCHES = (DEPENDENT_LAUNCH, KERNEL_CACHE)


def table(switches: Iterable[Switch]) -> str:
    """A Markdown table of switches: variable, values, default, meaning."""
    lines = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    for switch in switches:
        values = ", ".join(f"`{value}`" for value in switch.values) or switch.form
        cells = (f"`{switch.name}`", values.replace("|", "\\|"), switch.default, switch.meaning)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
