"""A small HTTP server that answers what `sglang_dsv4.acceptance` asks, right or with one planted fault.

There is no model: it looks the answer up in the prompt. Its tokenizer cuts text into words, digits by threes and single
characters. A prefix of whole pages of one of the last twenty prompts with the same `cache_salt` counts as cached.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_dsv4.acceptance.calls import PLAIN_QUESTIONS
from sglang_dsv4.acceptance.encoding_cases import CASES, START
from sglang_dsv4.acceptance.official_vectors import VECTORS
from sglang_dsv4.acceptance.served import BOS, EOS, QUESTIONS, RELEASED_IDS, THINK_END
from sglang_dsv4.acceptance.structured import ASK

TOKEN = re.compile(r"<｜[^｜]*｜>|</?think>|｜DSML｜|\d{1,3}| ?[A-Za-z]+|.", re.S)
PAGE = 256
OFFICIAL = {vector.prompt: vector for vector in VECTORS}
PLAIN = {name: re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(text)) for name, text in PLAIN_QUESTIONS.items()}
"""Patterns of the everyday questions for calls, with a group for each argument."""


def cut(text: str) -> list[str]:
    return TOKEN.findall(text)


@dataclass
class StandIn:
    """The server's kind, and its fault.

    Attributes:
        fault: see the uses of `self.fault`; empty: none.
        path: the model's, which names the release.
        promise: whether it says that it runs with --enable-deterministic-inference.
        released: whether its tokenizer has the released ids.
        weak: whether it answers nothing that it is asked.
        lacks: routes that it does not have.
        longest: tokens of a prompt.
    """

    fault: str = ""
    path: str = "deepseek-ai/DeepSeek-V4-Flash"
    promise: bool = True
    released: bool = True
    weak: bool = False
    lacks: tuple[str, ...] = ()
    longest: int = 5000
    url: str = ""
    drafts: str | None = None
    architecture: str = "DeepseekV4ForCausalLM"
    ids: dict[str, int] = field(default_factory=dict)
    seen: list[tuple[str, list[int]]] = field(default_factory=list)
    running: int = 0
    asked: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.released:
            self.ids = dict(zip((BOS, EOS, THINK_END), RELEASED_IDS, strict=True))

    def tokenize(self, text: str) -> list[int]:
        with self.lock:
            return [self.ids.setdefault(token, 1000 + len(self.ids)) for token in cut(text)]

    def render(self, body: dict[str, Any], route: str) -> str:
        """The prompt of a request. The conversations of the check are known, with the efforts of April."""
        thinking = body.get("chat_template_kwargs", {}).get("thinking", False)
        for case in CASES:
            same = (case.messages, case.thinking, case.effort) == (
                body["messages"],
                thinking,
                body.get("reasoning_effort"),
            )
            if same and set(case.fields) == {"tools", "response_format"} & body.keys():
                text = case.prompt
                break
        else:
            turns = {"user": "<｜User｜>{}", "assistant": "<｜Assistant｜></think>{}" + EOS, "tool": "<｜User｜>{}"}
            text = START + "".join(turns[turn["role"]].format(turn["content"]) for turn in body["messages"])
            text += "<｜Assistant｜></think>"
        if self.fault == "encoding" or (self.fault == "encoding of the chat route" and route == "chat"):
            text = text.replace("<｜Assistant｜>", "\n\n<｜Assistant｜>")
        return text

    # ---- answers

    def look_up(self, body: dict[str, Any], prompt_tokens: int) -> tuple[str, list[dict[str, str]]]:
        """Return (text, calls)."""
        last = body["messages"][-1]
        ask = last["content"]
        if self.weak:
            return self.continued(body), []
        if last["role"] == "tool":
            return ("0" if self.fault == "result ignored" else f"It is {last['content']}."), []
        if found := re.search(r"The secret number of Anna is (\d+)\.", ask):
            number = found[1]
            if self.fault == "3 mod 4" and prompt_tokens % 4 == 3:
                number = number[:-1] + str((int(number[-1]) + 1) % 10)
            return f"The secret number of Anna is {number}.", []
        if found := re.match(r"Call the tool (\w+) with exactly these arguments: (.*)\. Then answer", ask, re.S):
            return self.call(found[1], found[2], body.get("stream", False))
        for name, pattern in PLAIN.items():
            if found := re.fullmatch(pattern, ask):
                values = {key: int(text) if text.isdigit() else text for key, text in found.groupdict().items()}
                return self.call(name, json.dumps(values), body.get("stream", False))
        if ask.startswith(ASK):
            return self.document(ask.removeprefix(ASK), body.get("stream", False)), []
        if ask in OFFICIAL:
            return "".join(OFFICIAL[ask].tokens), []
        return {question: answer for question, answer in QUESTIONS}.get(ask) or self.continued(body), []

    def call(self, name: str, arguments: str, streamed: bool) -> tuple[str, list[dict[str, str]]]:
        if self.fault == "call as text":
            return f'<｜DSML｜invoke name="{name}">', []
        if self.fault == "other arguments":
            arguments = re.sub(r"\d", "1", arguments) if re.search(r"[02-9]", arguments) else "{}"
        if self.fault == "damaged call" and streamed:
            arguments = arguments[:-1]
        if self.fault == "quotes not escaped":
            arguments = arguments.replace('\\"', '"')
        return "", [{"name": name, "arguments": arguments}]

    def document(self, text: str, streamed: bool) -> str:
        if self.fault == "invalid JSON" or (self.fault == "invalid JSON streamed" and streamed):
            return text[:-1]
        if self.fault == "endless JSON":
            return text[:-1] + " " * 300
        if self.fault == "no grammar":
            return "a word and another " * 100
        if self.fault == "JSON of another schema":
            return json.dumps({**json.loads(text), "more": 1})
        return re.sub(r"\d+", "1", text) if self.fault == "other values" else text

    def continued(self, body: dict[str, Any]) -> str:
        """Words that depend on the conversation."""
        digest = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()
        return "".join(f" w{'abcdefghijklmnopqrstuvwxyz'[byte % 26]}" for byte in digest[: body["max_tokens"]])

    def cached(self, ids: list[int], salt: str) -> int:
        with self.lock:
            before = [other for kept, other in self.seen[-20:] if kept == salt]
            self.seen.append((salt, ids))
        common = max((self.common(ids, other) for other in before), default=0)
        return min(common, len(ids) - 1) // PAGE * PAGE

    @staticmethod
    def common(one: list[int], other: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

    def logprobs(self, tokens: list[str], hit: bool, at_once: int) -> list[dict[str, Any]]:
        """Tokens with their log-probabilities; the planted difference is in the last one.

        "near": its log-probability, and a token that was as likely; "clear": a token that was much less likely.
        """
        rows = [{"token": token, "logprob": -0.25, "top_logprobs": []} for token in tokens]
        for row in rows:
            row["top_logprobs"] = [
                {"token": row["token"], "logprob": -0.25},
                {"token": " near", "logprob": -0.5},
                {"token": " clear", "logprob": -9.0},
            ]
        differs = hit if "hit" in self.fault else at_once > 1 if "batch" in self.fault else "drafts" in self.fault
        if differs and rows and self.fault.startswith(("near", "clear")):
            rows[-1]["token"] = f" {self.fault.split()[0]}"
        elif differs and rows and self.fault.startswith("bits"):
            rows[-1]["logprob"] -= 2**-20
        return rows


class Handler(BaseHTTPRequestHandler):
    """The routes."""

    what: StandIn

    def log_message(self, *_: object) -> None:
        return

    def send(self, status: int, body: Any, kind: str = "application/json") -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        what = self.what
        answers = {
            "/v1/models": {"data": [{"id": what.path, "max_model_len": 100_000}]},
            "/model_info": {"model_path": what.path, "architectures": [what.architecture]},
            "/server_info": {
                "version": "0.5.23",
                "enable_deterministic_inference": what.promise,
                "max_req_input_len": what.longest,
                "speculative_algorithm": what.drafts,
            },
            "/metrics": f'sglang:num_running_reqs{{a="b"}} {float(what.fault == "left running")}\n',
        }
        if self.path in what.lacks or self.path not in answers:
            return self.send(404, {"detail": "Not Found"})
        return self.send(200, answers[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in self.what.lacks:
            return self.send(404, {"detail": "Not Found"})
        if self.path == "/tokenize":
            text = body["prompt"] if "prompt" in body else self.what.render(body, "tokenize")
            return self.send(200, {"tokens": self.what.tokenize(text)})
        what = self.what
        with what.lock:
            what.running += 1
            what.asked += 1
            asked, what.most_at_once = what.asked, max(what.most_at_once, what.running)
        try:
            if "batch" in what.fault:
                time.sleep(0.05)
            if what.fault == "goes away" and asked > 3:  # after the three plain questions
                self.close_connection = True
                return None
            if what.fault == "errors" and asked % 7 == 0:
                answer = 500, {"error": "planted"}
            else:
                answer = self.chat(body, what.running)
        finally:  # before the answer, which lets the client send its next request
            with what.lock:
                what.running -= 1
        return self.send(*answer)

    def chat(self, body: dict[str, Any], at_once: int) -> tuple[Any, ...]:
        """Return the arguments of :meth:`send`."""
        what = self.what
        ids = what.tokenize(what.render(body, "chat"))
        if len(ids) > what.longest:
            return 400, {"message": f"{len(ids)} tokens exceed {what.longest}"}
        cached = what.cached(ids, body.get("cache_salt", "") if what.fault != "no salt" else "")
        text, calls = what.look_up(body, len(ids))
        official = OFFICIAL.get(body["messages"][0]["content"])
        tokens = cut(text) if official is None else list(official.tokens)
        if what.fault == "official token":
            tokens = [token.replace("gamma", "beta") for token in tokens]
        made = [{"id": f"call_{i}", "type": "function", "function": call} for i, call in enumerate(calls)]
        rows = what.logprobs(tokens[: body["max_tokens"]], cached > 0, at_once)
        choice = {
            "message": {"content": "".join(row["token"] for row in rows), "tool_calls": made},
            "finish_reason": "tool_calls" if made else "length" if len(rows) < len(tokens) else "stop",
            "meta_info": {"cached_tokens": cached},
        }
        if body.get("logprobs"):
            choice["logprobs"] = {"content": rows}
        if body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = ids
        counted = len(ids) if official is None else official.prompt_tokens + (what.fault == "one token more")
        usage = {"prompt_tokens": counted, "completion_tokens": len(rows)}
        if not body.get("stream"):
            return 200, {"choices": [choice], "usage": usage}
        return self.stream(choice, usage)

    def stream(self, choice: dict[str, Any], usage: dict[str, int]) -> tuple[Any, ...]:
        """Two pieces of text, a call in two pieces, then the end."""
        text, calls = choice["message"]["content"], choice["message"]["tool_calls"]
        deltas = [{"content": text[:3]}, {"content": text[3:]}]
        for i, call in enumerate(calls):
            first, rest = call["function"]["arguments"][:2], call["function"]["arguments"][2:]
            begin = {"name": call["function"]["name"], "arguments": first}
            deltas += [
                {"tool_calls": [{"index": i, "id": call["id"], "function": begin}]},
                {"tool_calls": [{"index": i, "function": {"arguments": rest}}]},
            ]
        chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        chunks += [
            {"choices": [{"delta": {}, "finish_reason": choice["finish_reason"]}]},
            {"choices": [], "usage": usage},
        ]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        end = "" if self.what.fault == "no end of stream" else "data: [DONE]\n\n"
        return 200, "".join(lines) + end, "text/event-stream"


@contextmanager
def serving(what: StandIn) -> Iterator[StandIn]:
    """Serve it on a free port while the context is open."""

    class Routes(Handler):
        pass

    Routes.what = what
    server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    what.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield what
    finally:
        server.shutdown()
        server.server_close()
