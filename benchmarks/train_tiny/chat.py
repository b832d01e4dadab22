"""The release's chat format as runs of text with loss weights; test_train_tiny.py compares it with deepseek-recipe."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
PROMPT_WEIGHT = 0.1
"""Loss weight of the tokens of prompts; answers have 1 unless a task says more."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """The fixed texts of a prompt, which `corpus.py` takes from deepseek-recipe."""

    tools_head: str
    tools_tail: str
    schema_head: str


@dataclasses.dataclass
class Chat:
    """A conversation; `runs` renders it as the server renders the same messages."""

    frame: Frame
    system: str = ""
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    schema: dict[str, Any] | None = None
    thinking: bool = False
    turns: list[tuple[str, str, float]] = dataclasses.field(default_factory=list)

    def user(self, text: str) -> Chat:
        """Add a message of the user."""
        self.turns.append(("user", text, PROMPT_WEIGHT))
        return self

    def results(self, *texts: str) -> Chat:
        """Add the results of the last turn's calls."""
        return self.user("\n\n".join(f"<tool_result>{text}</tool_result>" for text in texts))

    def answer(
        self,
        text: str,
        reasoning: str | None = None,
        calls: tuple[tuple[str, dict[str, Any]], ...] = (),
        weight: float = 1.0,
    ) -> Chat:
        """Add an answer; with `thinking` the reasoning of the last answer is shown, others only beside tools."""
        if calls:
            text += "\n\n" + rendered_calls(calls)
        self.turns.append(("assistant", f"{reasoning or ''}</think>{text}", weight))
        return self

    def runs(self) -> list[tuple[str, float]]:
        """(text, loss weight of its tokens), cut at special tokens."""
        head = self.system
        if self.tools:
            schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.tools)
            head += self.frame.tools_head + schemas + self.frame.tools_tail
        if self.schema is not None:
            head += self.frame.schema_head + json.dumps(self.schema, ensure_ascii=False)
        found = [(BOS + head, PROMPT_WEIGHT)]
        last = len(self.turns) - 1
        for at, (role, text, weight) in enumerate(self.turns):
            if role == "user":
                found.append((USER + text + ASSISTANT, PROMPT_WEIGHT))
            elif self.thinking and (self.tools or at == last):
                found += [("<think>", 0.0), (text + EOS, weight)]
            else:
                found += [("</think>", 0.0), (text.split("</think>", 1)[1] + EOS, weight)]
        return found


def rendered_calls(calls: tuple[tuple[str, dict[str, Any]], ...]) -> str:
    """Tool calls (name, arguments) in DSML."""
    lines = ["<｜DSML｜tool_calls>"]
    for name, arguments in calls:
        lines.append(f'<｜DSML｜invoke name="{name}">')
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value, ensure_ascii=False)
            flag = "true" if is_text else "false"
            lines.append(f'<｜DSML｜parameter name="{key}" string="{flag}">{shown}</｜DSML｜parameter>')
        lines.append("</｜DSML｜invoke>")
    return "\n".join([*lines, "</｜DSML｜tool_calls>"])
