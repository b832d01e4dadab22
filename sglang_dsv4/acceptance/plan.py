"""How much is asked of the server: the numbers of requests, full and quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_dsv4.acceptance.client import Server

ALL_LENGTHS = ((256, 384), (8192, 8320))
"""Ranges in which a needle is asked for at every length: every one modulo 128, within and beyond CSA's top-k."""


@dataclass(frozen=True)
class Plan:
    """The numbers of requests of the checks.

    Attributes:
        every_length: ranges of prompt lengths, in tokens, in which each length gets a needle.
        boundaries: powers of two around which lengths get a needle, 2**n for n in this range.
        around: lengths below and above a boundary.
        longest: prompt tokens of the longest needle; None: what the server takes.
        plain_calls: tool calls that an everyday question asks for.
        calls: tool calls whose arguments break parsers.
        documents: JSON answers.
        conversations: prompts that are asked cold and after a hit.
        batch: prompts that are asked alone and together.
        answer_tokens: tokens of an answer that is compared bit by bit.
        encodings_by_chat: encoding cases that are also sent to the chat route (names of `encoding_cases.CASES`); None:
            all.
        hours: of the stability run; 0: none.
        seed: of all that is drawn.
        without_drafts: a server of the same weights without drafts.
    """

    every_length: tuple[tuple[int, int], ...] = ALL_LENGTHS
    boundaries: range = range(7, 31)
    around: int = 4
    longest: int | None = None
    plain_calls: int = 100
    calls: int = 100
    documents: int = 100
    conversations: int = 24
    batch: int = 32
    answer_tokens: int = 32
    encodings_by_chat: frozenset[str] | None = None
    hours: float = 0
    seed: int = 0
    without_drafts: Server | None = None


QUICK = Plan(
    every_length=(),
    boundaries=range(7, 13),
    around=2,
    plain_calls=8,
    calls=8,
    documents=12,
    conversations=3,
    batch=6,
    answer_tokens=8,
    encodings_by_chat=frozenset({"one turn", "system, several turns, other scripts"}),
)
