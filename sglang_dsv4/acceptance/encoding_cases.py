"""Conversations and the prompts that DeepSeek-V4's own encoder makes of them.

The prompts were rendered by deepseek-recipe 0.2.0, DeepSeek's reference encoder, and the efforts' texts compared with
encoding/encoding_dsv4.py of each release. They differ between releases in the text of a reasoning effort only. A test
renders them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_dsv4.acceptance.client import switch

ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
TOOLS_BLOCK = """

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{"name": "get_weather", "description": "The weather of a city.", "parameters": {"type": "object", "properties": \
{"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city", "days"]}}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Rome", "days": 3}'},
}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}


@dataclass(frozen=True)
class Case:
    """A conversation with its prompt.

    Attributes:
        name: for the report.
        turns: (role, text) or whole messages.
        prompt: the text, special tokens as they are spelled.
        thinking: whether the request asks for thinking.
        effort: the reasoning effort that the request names.
        later: the prompt of the releases of July and August, where it differs.
        fields: of the request besides.
    """

    name: str
    turns: tuple[tuple[str, str] | dict[str, Any], ...]
    prompt: str
    thinking: bool = False
    effort: str | None = None
    later: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The request's messages."""
        return [turn if isinstance(turn, dict) else {"role": turn[0], "content": turn[1]} for turn in self.turns]

    def body(self) -> dict[str, Any]:
        """The fields of a request besides model and messages."""
        body = {**switch(self.thinking), **self.fields}
        return body if self.effort is None else {**body, "reasoning_effort": self.effort}


HI = "<｜User｜>Hi there<｜Assistant｜>"
START = "<｜begin▁of▁sentence｜>"
CASES = (
    Case("one turn", (("user", "Hi there"),), f"{START}{HI}</think>"),
    Case(
        "system, several turns, other scripts",
        (("system", "You are brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Who — 谁? 🙂")),
        f"{START}You are brief.<｜User｜>Hi<｜Assistant｜></think>Hello.<｜end▁of▁sentence｜>"
        "<｜User｜>Who — 谁? 🙂<｜Assistant｜></think>",
    ),
    Case("thinking", (("user", "Hi there"),), f"{START}{HI}<think>", thinking=True),
    Case(
        "thinking, reasoning of an earlier turn dropped",
        (
            ("user", "Hi"),
            {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
            ("user", "Who?"),
        ),
        f"{START}<｜User｜>Hi<｜Assistant｜></think>Hello.<｜end▁of▁sentence｜><｜User｜>Who?<｜Assistant｜><think>",
        thinking=True,
    ),
    Case(
        "tools after a system message",
        (("system", "You are brief."), ("user", "Rain?")),
        f"{START}You are brief.{TOOLS_BLOCK}<｜User｜>Rain?<｜Assistant｜></think>",
        fields={"tools": [WEATHER]},
    ),
    Case(
        "a tool's result, reasoning kept",
        (
            ("user", "Rain?"),
            {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "17"},
        ),
        f"{START}{TOOLS_BLOCK}<｜User｜>Rain?<｜Assistant｜><think>I ask.</think>\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
        "<｜end▁of▁sentence｜><｜User｜><tool_result>17</tool_result><｜Assistant｜><think>",
        thinking=True,
        fields={"tools": [WEATHER]},
    ),
    Case(
        "a JSON schema",
        (("user", "Who?"),),
        f"{START}\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        '{"type": "object", "properties": {"age": {"type": "integer"}}}<｜User｜>Who?<｜Assistant｜></think>',
        fields={"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
    ),
    Case(
        "effort high",
        (("user", "Hi there"),),
        f"{START}{HI}<think>",
        thinking=True,
        effort="high",
        later=f"{START}{ABSOLUTE}{HI}<think>",
    ),
    Case(
        "effort max",
        (("user", "Hi there"),),
        f"{START}{ABSOLUTE}{HI}<think>",
        thinking=True,
        effort="max",
        later=f"{START}{BEYOND}{HI}<think>",
    ),
)
