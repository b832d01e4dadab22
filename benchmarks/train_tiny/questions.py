"""Ask a server the questions that the small model was trained for, with numbers and texts that it has not seen.

    python -m sglang_dsv4.cpu.quickstart --model-path CHECKPOINT --port 30000        # or any server
    PYTHONPATH=benchmarks python -m train_tiny.questions http://127.0.0.1:30000 [--count 20] [--lengths 1000 4000 8000]

Prints a table and, last, one line of JSON. Texts to search in are this repository's documents, which were not trained
on. Everything is asked greedily.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train_tiny import tasks, words
from train_tiny.chat import Chat, Frame

SEED = "questions"  # not a seed of training, which are "<seed> <rank> <step>"
DOCUMENTS = Path(__file__).parents[2] / "docs"
NO_FRAME = Frame("", "", "")


class Server:
    """The chat route of a server."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.model = self._get("/v1/models")["data"][0]["id"]

    def _get(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)

    def ask(self, text: str, tokens: int = 80, **fields: object) -> dict[str, Any]:
        """The message that answers a user's text, and the number of prompt tokens under "prompt_tokens"."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0}
        reply = self._get("/v1/chat/completions", body | {"max_tokens": tokens} | fields)
        return reply["choices"][0]["message"] | {"prompt_tokens": reply["usage"]["prompt_tokens"]}

    def tokens_a_verify_step(self) -> float | None:
        """Mean over all requests since the start; None if the server has no drafts, or is not an SGLang server."""
        try:
            (state, *_) = self._get("/server_info")["internal_states"]
        except (OSError, KeyError):
            return None
        return state.get("avg_spec_accept_length")


def said(message: dict[str, Any]) -> str:
    """The text of an answer."""
    return (message.get("content") or "").strip()


def sums(server: Server, rng: random.Random, thinking: bool = False) -> tuple[bool, str]:
    """A sum of two numbers of two digits."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    fields = {"chat_template_kwargs": {"thinking": True}, "tokens": 160} if thinking else {}
    answer = said(server.ask(f"What is {a} + {b}?", **fields))
    return answer == f"{a} + {b} = {a + b}.", f"{a} + {b}: {answer!r}"


def first_turn(make: Callable[[random.Random, Chat], None], rng: random.Random) -> tuple[str, str]:
    """The question and the answer of a task of one turn."""
    chat = Chat(NO_FRAME)
    make(rng, chat)
    return chat.turns[0][1], chat.turns[1][1].split("</think>", 1)[1]


def turn(make: Callable[[random.Random, Chat], None]) -> Callable[[Server, random.Random], tuple[bool, str]]:
    """The question of a task, whose answer must be the task's word for word."""

    def question(server: Server, rng: random.Random) -> tuple[bool, str]:
        text, expected = first_turn(make, rng)
        answer = said(server.ask(text, tokens=160))
        return answer == expected.strip(), f"{text[:60]!r}: {answer[:80]!r}; expected {expected[:80]!r}"

    return question


def needle(server: Server, rng: random.Random, tokens: int) -> tuple[bool, str]:
    """A line hidden at any place of a text of about `tokens` tokens."""
    text = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))
    size = int(tokens * 2.9)  # this model's tokenizer has about 2.9 characters a token
    begin = rng.randrange(max(1, len(text) - size))
    lines = text[begin : begin + size].split("\n")
    while len("\n".join(lines)) < size:
        lines += text[: size - len("\n".join(lines))].split("\n")
    of, value = rng.choice(words.NAMES), tasks.digits(rng, 5)
    lines.insert(rng.randrange(len(lines) + 1), f"The secret number of {of} is {value}.")
    message = server.ask("\n".join(lines) + f"\n\nWhat is the secret number of {of}?", tokens=24)
    return value in said(message), f"{message['prompt_tokens']} tokens, {of} {value}: {said(message)[:60]!r}"


def json_values(server: Server, rng: random.Random, grammar: bool) -> tuple[bool, str]:
    """A JSON object of values that the question names; with `grammar` the server enforces the schema."""
    keys = rng.sample(list(tasks.FIELDS), rng.randint(1, 4))
    values = {key: tasks.FIELDS[key][1](rng) for key in keys}
    shown = ", ".join(tasks.FIELDS[key][2].format(json.dumps(values[key]).strip('"')) for key in keys)
    schema = {"type": "object", "properties": {key: tasks.FIELDS[key][0] for key in keys}, "required": keys}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "v", "schema": schema}}}
    text = f"Give me a JSON object: {shown}."
    answer = said(
        server.ask(text if grammar else f"{text} The keys are {', '.join(keys)}.", **(fields if grammar else {}))
    )
    try:
        return json.loads(answer) == values, f"{values}: {answer!r}"
    except ValueError:
        return False, f"{values}: {answer!r}"


def tool(server: Server, rng: random.Random) -> tuple[bool, str]:
    """A question that one of two tools answers: the call must be parsed, with its name and arguments."""
    offered = rng.sample(tasks.TOOLS, 2)
    schemas = []
    for name, description, kinds, _, _ in offered:
        parameters = {"type": "object", "properties": kinds, "required": list(kinds)}
        function = {"name": name, "description": description, "parameters": parameters}
        schemas.append({"type": "function", "function": function})
    name, _, kinds, questions, _ = rng.choice(offered)
    arguments = {key: tasks.ARGUMENTS[key](rng) for key in kinds}
    message = server.ask(rng.choice(questions).format(**arguments), tokens=120, tools=schemas)
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return calls == [(name, arguments)], f"{name} {arguments}: {calls or said(message)[:60]!r}"


def main() -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    parser = argparse.ArgumentParser(description="Ask a server the questions that the small model was trained for.")
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=20, help="questions of a kind")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1000, 4000, 8000], help="tokens around a needle")
    parser.add_argument("--wrong", type=int, default=2, help="wrong answers to show of a kind")
    arguments = parser.parse_args()
    server = Server(arguments.url)
    kinds: dict[str, Callable[[Server, random.Random], tuple[bool, str]]] = {
        "sum of two-digit numbers": sums,
        "the same, thinking": lambda s, r: sums(s, r, thinking=True),
        "copying": turn(tasks.copying),
        "facts and small talk": turn(tasks.fact),
        "a fact of the question's text": turn(tasks.person_question),
        "JSON": lambda s, r: json_values(s, r, False),
        "JSON to a schema": lambda s, r: json_values(s, r, True),
        "tool call": tool,
    }
    kinds |= {f"needle in {n} tokens": lambda s, r, n=n: needle(s, r, n) for n in arguments.lengths}
    found = {}
    for kind, question in kinds.items():
        rng = random.Random(f"{SEED} {kind}")
        results = [question(server, rng) for _ in range(arguments.count)]
        found[kind] = sum(right for right, _ in results)
        print(f"{kind:32s} {found[kind]:4d} of {arguments.count}", flush=True)
        for _, shown in [result for result in results if not result[0]][: arguments.wrong]:
            print(f"    wrong: {shown}")
    accepted = server.tokens_a_verify_step()
    if accepted is not None:
        print(f"with drafts: {accepted:.2f} tokens a verify step since the server's start")
    print(json.dumps({"count": arguments.count, "right": found, "tokens_a_verify_step": accepted}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
