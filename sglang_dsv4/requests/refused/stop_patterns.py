"""A limit on the time in which a request's `stop_regex` is searched for.

SGLang 0.5.23 searches the end of the answer after every step, in the scheduler's loop, with Python's `re`, which has no
limit: a pattern such as `(a+)+$` can search for years, and no other request is served meanwhile. Here the same search
is made by the package `regex`, whose patterns are those of `re`, for at most `SECONDS`. A request whose search takes
longer ends with a 400.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import regex

from sglang_dsv4.seam.hooks import EXPRESSIONS
from sglang_dsv4.seam.install import attribute_set
from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

SECONDS = 0.1
"""A search of 100,000 characters for a pattern without nested repetitions takes some milliseconds."""


REASON_AGAINST_STAGES = (
    "stop_regex is not supported with --pp-size above 1: each stage would end the search for it by its own clock. "
    "Use stop strings."
)


class SearchTimeoutError(Exception):
    """A search took longer than `SECONDS`."""


class TimedExpressions:
    """The module `re` as SGLang's scheduler uses it, with a limit on the time of a search."""

    error = re.error

    @staticmethod
    def search(pattern: str, text: str) -> Any:
        """The first match, or None.

        Raises:
            SearchTimeoutError: the search took longer than `SECONDS`.
        """
        try:
            return regex.search(pattern, text, timeout=SECONDS)
        except TimeoutError:
            raise SearchTimeoutError(pattern) from None


def check(pattern: str) -> None:
    """Compile a pattern for both modules.

    Raises:
        ValueError: one of them cannot read it.
    """
    for compiler in (re.compile, regex.compile):
        try:
            compiler(pattern)
        except (re.error, regex.error, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(f"stop_regex {pattern!r} is not a regular expression: {error}.") from error


def timed(before: Any, module: object) -> type[TimedExpressions]:
    """The stand-in for `re` in SGLang's module while it looks for the end of an answer."""
    return TimedExpressions


def check_within_limit(original: Callable[..., bool], req: Req, *args: Any, **kwargs: Any) -> bool:
    """Whether a stop string or pattern ends the answer; around ``Req._check_str_based_finish``."""
    from sglang.srt.managers import schedule_batch

    if live_parts() is None or not req.sampling_params.stop_regex_strs:
        return original(req, *args, **kwargs)
    try:
        with attribute_set(schedule_batch, EXPRESSIONS):
            return original(req, *args, **kwargs)
    except SearchTimeoutError as error:
        reason = (
            f"The search for stop_regex {str(error)!r} took longer than {SECONDS} s on {len(req.output_ids)} tokens. "
            "Send a pattern in which a repetition holds no other repetition, and few repetitions follow each other."
        )
        req.finished_reason = schedule_batch.FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST, "BadRequestError")
        return True
