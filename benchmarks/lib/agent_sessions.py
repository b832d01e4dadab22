"""Chat requests as agent programs send them: the whole conversation each turn, built from a seed.

A session begins with its program's front, the system message and the tools, which all sessions of this program share. A
turn adds an answer with a tool call, the call's result, or a user's question now and then; each request ends with a
reminder. The answers are written here, not by the model, so every server gets the same prompts. Kinds of requests:

    start      the first of a session: the front is stored, if another session has sent it
    grow       the last request and one more turn
    moved      the same, but the last request's reminder is gone: a state that the program sends anew each time
    edit       the same, but old tool results were cleared
    subagent   the first of a sub-agent, which shares the front; its further requests are `grow`
    compact    the front and a summary of everything before
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.cpu.random_tokenizer import WORDS

KINDS = ("start", "grow", "moved", "edit", "subagent", "compact")
ALL = "all"
"""All kinds together, in results."""
STYLES = ("system", "user")
"""Reminders as system messages at the end, and as texts of the user's turn."""
FRONT_WORDS, TOOLS, TOOL_WORDS = 3000, 18, 220
TASK_WORDS, ANSWER_WORDS, REMINDER_WORDS, SUMMARY_WORDS = 400, 60, 120, 900
RESULT_WORDS = (150, 3000)
PROGRAMS = 2
NEW_TOKENS = 16
SEED = 71
SHARE_MOVED, QUESTION_EVERY, SUBAGENT_TURNS, TURNS_AFTER_SUMMARY = 0.25, 4, 3, 3
CLEARED = "[the result of this call was cleared]"

Message = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """The parts that the sessions of one agent program share."""

    system: str
    tools: tuple[Message, ...]


@dataclass(frozen=True)
class Request:
    """One request to the chat route."""

    kind: str
    messages: list[Message]
    tools: tuple[Message, ...]


class Writer:
    """Texts of random words, each of which is one token of a random checkpoint's tokenizer."""

    def __init__(self, seed: str, scale: float) -> None:
        """Make a writer: `scale` multiplies all lengths."""
        self.rng, self.scale = random.Random(seed), scale

    def text(self, words: int) -> str:
        """Return about `words * scale` random words."""
        return " ".join(self.rng.choices(WORDS, k=max(1, round(words * self.scale))))

    def result(self) -> str:
        """Return a tool's result: mostly short, sometimes a file."""
        least, most = RESULT_WORDS
        return self.text(round(least * (most / least) ** self.rng.random()))


def program(number: int, seed: int, scale: float = 1.0) -> Program:
    """Return one of several programs."""
    writer = Writer(f"program {number} {seed}", scale)
    tools = []
    for i in range(tools_of(scale)):
        schema = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}
        about = {"name": f"tool_{i}", "description": writer.text(TOOL_WORDS), "parameters": schema}
        tools.append({"type": "function", "function": about})
    return Program(f"You are agent {number}. {writer.text(FRONT_WORDS)}", tuple(tools))


def tools_of(scale: float) -> int:
    """Return a program's number of tools, at least two."""
    return max(2, round(TOOLS * scale))


def session(of: Program, number: int, seed: int, turns: int, style: str, scale: float = 1.0) -> Iterator[Request]:
    """Yield a session's requests, and between them those of two sub-agents.

    Args:
        of: its program.
        number, seed: name the session.
        turns: requests of the main conversation, at least 8.
        style: one of `STYLES`.
        scale: multiplies all lengths of texts.
    """
    writer = Writer(f"session {number} {seed}", scale)
    system = {"role": "system", "content": of.system}
    history = [system, {"role": "user", "content": f"Session {number}. {writer.text(TASK_WORDS)}"}]
    edit, compact, spawn = turns // 2, turns - TURNS_AFTER_SUMMARY, (turns // 3, 2 * turns // 3)
    fleeting = False
    for turn in range(turns):
        kind = "moved" if fleeting else "grow" if turn else "start"
        if turn:
            history += _turn(writer, turn, asks=turn % QUESTION_EVERY == 0)
        if turn == edit:
            kind, history = "edit", _cleared(history)
        if turn == compact:
            kind, history = "compact", [system, {"role": "user", "content": writer.text(SUMMARY_WORDS)}]
        reminder = _reminder(writer, style)
        yield Request(kind, [*history, reminder], of.tools)
        fleeting = writer.rng.random() < SHARE_MOVED
        if not fleeting:
            history.append(reminder)
        if turn in spawn:
            yield from _subagent(of, writer, style)


def _subagent(of: Program, writer: Writer, style: str) -> Iterator[Request]:
    history = [
        {"role": "system", "content": of.system},
        {"role": "user", "content": writer.text(TASK_WORDS)},
    ]
    for turn in range(SUBAGENT_TURNS):
        history += _turn(writer, turn, asks=False) if turn else []
        history.append(_reminder(writer, style))
        yield Request("grow" if turn else "subagent", list(history), of.tools)


def _turn(writer: Writer, number: int, asks: bool) -> list[Message]:
    answer = writer.text(ANSWER_WORDS)
    if asks:
        return [{"role": "assistant", "content": answer}, {"role": "user", "content": writer.text(ANSWER_WORDS)}]
    arguments = json.dumps({"path": writer.text(3), "lines": writer.rng.randrange(1000)})
    function = {"name": f"tool_{writer.rng.randrange(tools_of(writer.scale))}", "arguments": arguments}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": answer, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": writer.result()},
    ]


def _cleared(history: list[Message]) -> list[Message]:
    """The history without the contents of the older half of its tool results."""
    results = [i for i, message in enumerate(history) if message["role"] == "tool"]
    old = set(results[: len(results) // 2])
    return [{**message, "content": CLEARED} if i in old else message for i, message in enumerate(history)]


def _reminder(writer: Writer, style: str) -> Message:
    return {"role": style, "content": f"<system-reminder>\n{writer.text(REMINDER_WORDS)}\n</system-reminder>"}


@dataclass(frozen=True)
class Load:
    """The sessions of a run."""

    sessions: int
    turns: int
    at_once: int
    scale: float = 1.0

    def requests(self, style: str, seed: int, sessions: int | None = None) -> list[Iterator[Request]]:
        """Return each session's requests; the programs have the same number of sessions."""
        programs = [program(i, seed, self.scale) for i in range(PROGRAMS)]
        return [
            session(programs[i % PROGRAMS], i, seed, self.turns, style, self.scale)
            for i in range(self.sessions if sessions is None else sessions)
        ]
