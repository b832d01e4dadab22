"""Switches in the environment."""

from __future__ import annotations

import os
from typing import TypeVar

Default = TypeVar("Default", str, None)


def one_of(variable: str, values: tuple[str, ...], default: Default) -> str | Default:
    """What a variable says, in lower case; `default` where it is not set.

    Raises:
        ValueError: it says something else than one of these values.
    """
    value = os.environ.get(variable)
    if value is None:
        return default
    value = value.strip().lower()
    if value not in values:
        raise ValueError(f"{variable} must be {' or '.join(map(repr, values))}, got {value!r}")
    return value
