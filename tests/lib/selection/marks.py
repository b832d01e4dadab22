"""The cases of a parametrised test that run in `make test`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def with_slow_marks(values: Iterable, quick: Collection) -> list:
    """Parameters of cases; all that are not in `quick` are slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]
