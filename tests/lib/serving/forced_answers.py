"""SGLang's handlers of the OpenAI and Anthropic routes in the test's process, over an engine that answers with tokens
which the test chose. The hooks of `requests` are installed around them, as the plugin installs them."""

from __future__ import annotations

import asyncio
import json
import pkgutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from sglang_dsv4.seam import install, live
from sglang_dsv4.seam.hooks import HOOKS, Kind, Process

IN_REGISTRY = (Kind.BEFORE, Kind.AFTER, Kind.AROUND, Kind.REPLACE)


@contextmanager
def hooked(*modules: str) -> Iterator[None]:
    """Install the launcher's hooks of some modules of `sglang_dsv4.requests`, as for a DeepSeek-V4; their targets have
    no other hooks meanwhile."""
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "_answers_clients", bool(modules))
        for hook in HOOKS:
            module = hook.function.split(":")[0].rpartition(".")[2]
            if (
                hook.process is Process.LAUNCHER
                and hook.kind in IN_REGISTRY
                and module in ("output_parser", "responses")
            ):
                owner, _, attribute = hook.target.rpartition(".")
                function = getattr(pkgutil.resolve_name(owner), attribute)
                while hasattr(function, "__wrapped__"):  # where a plugin was loaded in this process
                    function = function.__wrapped__
                if module in modules:
                    function = _wrap_fn(function, install.ours(hook), HookType[hook.kind.name])
                patch.setattr(pkgutil.resolve_name(owner), attribute, function)
        yield


@dataclass
class Given:
    """An answer as a client receives it."""

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments
    finish: str = ""  # in the words of chat, or a status of the Responses API


class ForcedEngine:
    """SGLang's tokenizer manager as the handlers see it: answers every request with the tokens of a script.

    Attributes:
        answer: token ids of the next answer, in the pieces in which they are streamed.
        finish_reason: of the next answer.
        requests: SGLang's requests so far.
    """

    def __init__(self, tokenizer: Any, hf_config: Any, reasoning_parser: str | None) -> None:
        self.tokenizer, self.model_path, self.served_model_name = tokenizer, "tiny", "tiny"
        self.model_config = SimpleNamespace(
            hf_config=hf_config, is_multimodal=False, context_len=4096, get_default_sampling_params=dict
        )
        self.server_args, self.num_reserved_tokens = None, 0
        self.request_logger = SimpleNamespace(log_requests=False)
        self._parsers = {"tool_call_parser": "deepseekv4", "reasoning_parser": reasoning_parser}
        self.answer: list[list[int]] = []
        self.finish_reason: dict[str, Any] = {}
        self.requests: list[Any] = []

    def config_value(self, name: str) -> Any:
        return self._parsers[name]

    def create_abort_task(self, request: Any) -> None:
        return None

    async def generate_request(self, request: Any, raw_request: Any = None) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        pieces = self.answer if request.stream else [[token for piece in self.answer for token in piece]]
        so_far: list[int] = []
        for index, piece in enumerate(pieces):
            so_far = [*so_far, *piece]
            last = index == len(pieces) - 1
            meta = {"id": "x", "prompt_tokens": 1, "completion_tokens": len(so_far), "cached_tokens": 0}
            meta |= {
                "reasoning_tokens": 0,
                "weight_version": "x",
                "finish_reason": dict(self.finish_reason) if last else None,
            }
            yield {"text": self.tokenizer.decode(so_far), "output_ids": so_far, "meta_info": meta, "index": 0}


class Routes:
    """Chat, Responses and Anthropic routes over a :class:`ForcedEngine`."""

    def __init__(self, checkpoint: Path, reasoning_parser: str | None = "deepseek-v4") -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
        from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
        from sglang.srt.parser.template_manager import TemplateManager
        from sglang.srt.runtime_context import create_context
        from sglang.srt.server_args import ServerArgs

        arguments = ServerArgs(model_path=str(checkpoint), log_level="warning")
        self._context = create_context(arguments, role="tokenizer")
        with self._active():
            config = ModelConfig.from_server_args(arguments).hf_config
            self.engine = ForcedEngine(AutoTokenizer.from_pretrained(checkpoint), config, reasoning_parser)
            self.chat = OpenAIServingChat(self.engine, TemplateManager())
            self.responses = OpenAIServingResponses(self.engine, TemplateManager())
            self.anthropic = AnthropicServing(self.chat)

    @contextmanager
    def _active(self) -> Iterator[None]:
        from sglang.srt.runtime_context import use_context

        with use_context(self._context):
            yield

    def say(
        self, *texts: str, sizes: Sequence[int] = (), finish: str = "stop", matched: int | str | None = None
    ) -> None:
        """Set the next answer.

        Args:
            texts: its parts; each is split into tokens alone, so that a marker in two parts is spelled by letters.
            sizes: numbers of tokens of its pieces when it is streamed; the rest is the last piece.
            finish, matched: SGLang's reason for its end.
        """
        encode = self.engine.tokenizer.encode
        ids = [token for text in texts for token in encode(text, add_special_tokens=False)]
        self.say_ids(ids, sizes, finish, matched)

    def say_ids(
        self, ids: list[int], sizes: Sequence[int], finish: str = "stop", matched: int | str | None = None
    ) -> None:
        """Set the next answer's token ids; arguments as in :meth:`say`."""
        pieces, begin = [], 0
        for size in sizes:
            pieces.append(ids[begin : begin + size])
            begin += size
        self.engine.answer = [piece for piece in (*pieces, ids[begin:]) if piece] or [[]]
        self.engine.finish_reason = {"type": finish, "matched": matched}

    def ask(self, route: str, stream: bool, schemas: dict[str, Any], **fields: Any) -> Given:
        """Return what a client is given on a route.

        Args:
            route: "chat", "responses" or "anthropic".
            stream: whether the answer is streamed.
            schemas: of each tool's parameters.
            fields: further fields of the request.
        """
        return getattr(self, f"_{route}")(stream, schemas, fields)

    def _chat(self, stream: bool, tools: dict[str, Any], fields: dict[str, Any]) -> Given:
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        offered = [{"type": "function", "function": {"name": name, "parameters": tools[name]}} for name in tools]
        fields = {"messages": TURN, "tools": offered} | fields
        request = ChatCompletionRequest(model="tiny", stream=stream, **fields)
        answer = self._run(self.chat.handle_request, request)
        given = Given()
        if stream:
            choices = [choice for event in events(answer) for choice in event["choices"]]
        else:
            choices = [choice | {"delta": choice["message"]} for choice in answer.model_dump()["choices"]]
        for choice in choices:
            delta = choice["delta"]
            given.reasoning += delta.get("reasoning_content") or ""
            given.text += delta.get("content") or ""
            given.finish = choice["finish_reason"] or given.finish
            for call in delta.get("tool_calls") or ():
                assert call["index"] == len(given.calls)  # no call comes in parts
                given.calls.append((call["function"]["name"], call["function"]["arguments"]))
        return given

    def _responses(self, stream: bool, tools: dict[str, Any], fields: dict[str, Any]) -> Given:
        from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

        offered = [{"type": "function", "name": name, "parameters": tools[name]} for name in tools]
        request = ResponsesRequest(model="tiny", input="hi", stream=stream, **{"tools": offered} | fields)
        answer = self._run(self.responses.create_responses, request)
        sent = events(answer) if stream else []
        answer = sent[-1]["response"] if stream else answer.model_dump()
        given = Given(finish=answer["status"])
        for item in answer["output"]:
            if item["type"] in ("function_call", "custom_tool_call"):
                given.calls.append((item["name"], item.get("arguments", item.get("input"))))
            elif item["type"] == "reasoning":
                given.reasoning += item["content"][0]["text"]
            else:
                assert not given.calls  # all text is before the calls
                given.text += item["content"][0]["text"]
        deltas = [event["delta"] for event in sent if event["type"] == "response.output_text.delta"]
        assert not stream or "".join(deltas) == given.text
        return given

    def _anthropic(self, stream: bool, tools: dict[str, Any], fields: dict[str, Any]) -> Given:
        from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest

        offered = [{"name": name, "input_schema": tools[name]} for name in tools]
        fields = {"max_tokens": 500} | fields
        request = AnthropicMessagesRequest(model="tiny", messages=TURN, tools=offered, stream=stream, **fields)
        answer = self._run(self.anthropic.handle_messages, request)
        given = Given()
        if not stream:
            answer = json.loads(answer.body)
            for block in answer["content"]:
                given.reasoning += block.get("thinking", "")
                given.text += block.get("text", "")
                if block["type"] == "tool_use":
                    given.calls.append((block["name"], json.dumps(block["input"])))
            return replace(given, finish=answer["stop_reason"])
        for event in events(answer):
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                given.calls.append((event["content_block"]["name"], ""))
            if event["type"] == "content_block_delta":
                delta = event["delta"]
                given.reasoning += delta.get("thinking", "")
                given.text += delta.get("text", "")
                if delta["type"] == "input_json_delta":
                    given.calls[-1] = (given.calls[-1][0], given.calls[-1][1] + delta["partial_json"])
            if event["type"] == "message_delta":
                given.finish = event["delta"]["stop_reason"]
        # A whole answer has objects in place of JSON texts.
        return replace(given, calls=[(name, json.dumps(json.loads(arguments))) for name, arguments in given.calls])

    def _run(self, handler: Any, request: Any) -> Any:
        async def call() -> Any:
            answer = await handler(request, None)
            if hasattr(answer, "__aiter__"):
                return [event async for event in answer]
            if hasattr(answer, "body_iterator"):
                return [event async for event in answer.body_iterator]
            return answer

        with self._active():
            return asyncio.run(call())


TURN = [{"role": "user", "content": "hi"}]


def events(stream: list[str]) -> list[dict[str, Any]]:
    """Return the objects of a stream of server-sent events."""
    datas = [line[6:] for event in stream for line in event.splitlines() if line.startswith("data: ")]
    return [json.loads(data) for data in datas if data != "[DONE]"]
