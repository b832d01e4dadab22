"""Tool calls in SGLang's answers, read by :mod:`sglang_dsv4.requests.tool_calls.dsml`, the same on every route.

SGLang 0.5.23 gives answers to deepseek-recipe, whose parser streams a call while the model writes it, and reports a
damaged or unfinished call as a call. Here deepseek-recipe only splits reasoning from content, and `dsml` reads the
calls. The chat, Responses and Anthropic routes make their parsers in one class, which is hooked.

A client gets the calls at the end of the answer, after all text, so that streamed and whole answers are equal. With
`SGLANG_DSV4_TOOL_CALLS=refuse` a call that needs a repair stays text. With `--enable-metrics`:

    sglang_dsv4:tool_calls_total{outcome}        calls: as written, repaired, refused
    sglang_dsv4:tool_call_faults_total{fault}    deviations of repaired and refused calls, by name
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_dsv4 import env
from sglang_dsv4.requests.tool_calls.dsml import MARK, MARKER, Reader
from sglang_dsv4.seam import live
from sglang_dsv4.seam.install import set_attribute
from sglang_dsv4.seam.rows.clients import PROCESSOR

if TYPE_CHECKING:
    from prometheus_client import Counter
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.parser.deepseek_recipe_output import DeepSeekRecipeOutputParser

logger = logging.getLogger(__name__)

SWITCH = "SGLANG_DSV4_TOOL_CALLS"
MODEL = "DeepSeek-V4-Pro"
"""SGLang's name for every model of DeepSeek-V4's chat encoding; V4.1's has another."""
MOST_BYTES = 4
"""Most tokens of one character: its bytes in UTF-8."""
WRITTEN, REPAIRED, REFUSED = "as written", "repaired", "refused"


@dataclass(frozen=True)
class Request:
    """A request for whose answer a parser is being made."""

    recipe: Any  # SGLang's DeepSeekRecipe
    schemas: Mapping[str, Any]  # JSON schema of the parameters of each tool
    has_calls: bool = False  # whether the answer may have calls


_request: ContextVar[Request | None] = ContextVar("request", default=None)
_metrics: Metrics | None = None


def repairs() -> bool:
    """Whether calls with only one possible meaning are repaired; the launcher checks it before it starts a server.

    Raises:
        ValueError: the switch has an unknown value.
    """
    return env.choice(SWITCH) != "refuse"


# ------------------------------------------------------------------------------ a parser of SGLang's is made


def in_chat(original: Callable[..., Any], adapter: Any, request: Any) -> Any:
    """SGLang's parser of a chat request's answer; runs around `_new_output_parser`."""
    of_messages = (getattr(message, "tools", None) or () for message in request.messages)
    with _reading(adapter, [*(request.tools or ()), *(tool for tools in of_messages for tool in tools)]):
        return original(adapter, request)


def in_responses(original: Callable[..., Any], adapter: Any, request: Any, *args: Any) -> Any:
    """SGLang's parser of the answer to a request of the Responses API; runs around `_new_responses_parser`."""
    with _reading(adapter, request.tools or ()):
        return original(adapter, request, *args)


def in_text(original: Callable[..., Any], adapter: Any, text: str, tools: list[Any]) -> Any:
    """Text and calls of `/parse_function_call`; runs around `parse_function_call_text`."""
    with _reading(adapter, tools or ()):
        return original(adapter, text, tools)


@contextmanager
def _reading(adapter: Any, tools: Iterable[Any]) -> Iterator[None]:
    """Context in which new parsers read calls of these tools; other models' encodings are left to SGLang's parser."""
    recipe = adapter.deepseek_recipe
    token = _request.set(Request(recipe, schemas_of(tools)) if recipe.model == MODEL else None)
    try:
        yield
    finally:
        _request.reset(token)


def schemas_of(tools: Iterable[Any]) -> dict[str, Any]:
    """The schema of each tool's parameters, by the tool's name.

    Args:
        tools: SGLang's `Tool` or `ResponseTool` objects. A custom tool of the Responses API has one string, `input`.
    """
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.entrypoints.openai.responses_adapters import custom_tool_parameters

    functions = [tool.function if isinstance(tool, Tool) else tool for tool in tools]
    return {
        function.name: custom_tool_parameters() if getattr(function, "type", "") == "custom" else function.parameters
        for function in functions
        if function.name
    }


def make_parser(
    original: Callable[..., None], parser: Any, recipe: Any, *, parse_tool_calls: bool, **options: Any
) -> None:
    """Make SGLang's parser, which leaves tool calls to `dsml`; runs around its `__init__`.

    With `parse_json_output` deepseek-recipe replaces all text around a JSON answer by blanks, calls included. So it is
    off where calls are read.
    """
    request = _request.get()
    if request is None:
        return original(parser, recipe, parse_tool_calls=parse_tool_calls, **options)
    if parse_tool_calls:
        options["parse_json_output"] = False
    original(parser, recipe, parse_tool_calls=False, **options)
    _request.set(replace(request, has_calls=parse_tool_calls))  # until `_reading` ends
    set_attribute(parser, PROCESSOR)


def read_calls(processor: Any, parser: DeepSeekRecipeOutputParser) -> AnswerProcessor:
    """The value of a parser's `_processor`: deepseek-recipe's processor, wrapped so that calls are read in its text."""
    request = _request.get()
    if not request.has_calls:
        return AnswerProcessor(processor, None, None)
    readers = Reader(request.schemas, repairs(), reasoning=True), Reader(request.schemas, repairs())
    return AnswerProcessor(processor, request.recipe.hf_tokenizer.token_to_id(MARKER), readers)


# ------------------------------------------------------------------------------ the parser is used


class AnswerProcessor:
    """Reasoning, content and calls of an answer: deepseek-recipe's processor splits the text, `dsml` reads the calls.

    It has those methods of a `StreamProcessor` that SGLang calls. It passes tokens on in parts, for two reasons:

    * In deepseek-recipe's text the marker's token looks like the same letters, and only the token belongs to a call. So
      each marker is passed alone.
    * deepseek-recipe holds back a part that ends inside a character, and drops it if the answer ends there: a whole
      answer was empty if the token limit cut an emoji. So the last tokens are passed one by one.
    """

    def __init__(self, processor: Any, marker: int | None, readers: tuple[Reader, Reader] | None) -> None:
        """Begin an answer.

        Args:
            processor: deepseek-recipe's, which was told to parse no calls.
            marker: id of the marker's token; None if the tokenizer has none.
            readers: of the reasoning and the content; None if calls are not read.
        """
        self._processor, self._marker, self._readers = processor, marker, readers
        self._has_content = self._ended = False
        self._is_whole = False  # whether the model ended the answer

    @property
    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self._processor.finished

    def push(self, chunk: Any) -> list[Any]:
        """Reasoning, content and calls after a further chunk of deepseek-recipe's."""
        if chunk.kind != "tokens":
            from deepseek_recipe import InferenceFinishReason

            self._is_whole = chunk.finish_reason == InferenceFinishReason.Stop
            return self._read(self._processor.push(chunk), marked=False)
        answers, part, last = [], [], len(chunk.token_ids) - MOST_BYTES
        for index, token in enumerate(chunk.token_ids):
            if token == self._marker:
                answers += self._push(part, marked=False) + self._push([token], marked=True)
                part = []
            else:
                part.append(token)
                if index >= last:
                    answers += self._push(part, marked=False)
                    part = []
        return answers

    def finish(self) -> list[Any]:
        """The rest, after an answer without a reason for its end."""
        return self._read(self._processor.finish(), marked=False)

    def _push(self, token_ids: list[int], marked: bool) -> list[Any]:
        if not token_ids or self.finished:
            return []
        from deepseek_recipe import InferenceChunk

        return self._read(self._processor.push(InferenceChunk.tokens(token_ids)), marked)

    def _read(self, answers: list[Any], marked: bool) -> list[Any]:
        if self._readers is None:
            return answers
        read = [self._step(answer, marked, *self._readers) for answer in answers]
        if self.finished and not self._ended:
            self._ended = True
            read.append(self._end(*self._readers))
        return read

    def _step(self, answer: Any, marked: bool, in_reasoning: Reader, in_content: Reader) -> Any:
        """deepseek-recipe's answer without text that may belong to a call; the answer itself if it has none."""
        read = json.loads(answer.to_json())
        delta = read["choices"][0]["delta"]
        written = reasoning, content = delta.get("reasoning_content") or "", delta.get("content") or ""
        if marked:
            reasoning, content = (MARK.join(text.rsplit(MARKER, 1)) for text in written)
        reasoning = in_reasoning.feed(reasoning)
        if content and not self._has_content:
            self._has_content = True
            reasoning += in_reasoning.revoke()
        content = in_content.feed(content)
        if (reasoning, content) == written:
            return answer
        delta |= {"reasoning_content": reasoning, "content": content}
        return Answer(read)

    def _end(self, in_reasoning: Reader, in_content: Reader) -> Answer:
        """The text that was held back, and all calls."""
        reasoning = ""
        if not self._has_content:  # a call in reasoning is a draft unless the model ended the answer with it
            reasoning = in_reasoning.finish() if self._is_whole else in_reasoning.revoke()
        delta = {"reasoning_content": reasoning, "content": in_content.finish()}
        reader = in_content if self._has_content else in_reasoning
        calls = [{"name": call.name, "arguments": call.arguments} for call in reader.calls]
        delta["tool_calls"] = [{"index": index, "function": call} for index, call in enumerate(calls)]
        count(reader)
        return Answer({"choices": [{"delta": delta, "finish_reason": "stop"}]})


class Answer(NamedTuple):
    """A step of an answer, with the method of deepseek-recipe's chunks that SGLang uses."""

    content: dict[str, Any]

    def to_json(self) -> str:
        """The chunk of a chat completion."""
        return json.dumps(self.content)


# ------------------------------------------------------------------------------ counts of repaired and refused calls


class Metrics:
    """Counts of the calls in this process's answers, on SGLang's `/metrics`."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        """Declare the metrics. Make it after SGLang has set prometheus_client's multi-process folder.

        Args:
            labels: SGLang's, of this process.
        """
        from prometheus_client import Counter

        self._labels = labels
        names = list(labels)
        self._calls = Counter("sglang_dsv4:tool_calls", "Tool calls that the model wrote.", [*names, "outcome"])
        self._faults = Counter("sglang_dsv4:tool_call_faults", "Deviations from the format.", [*names, "fault"])
        for outcome in (WRITTEN, REPAIRED, REFUSED):
            self._of(self._calls, outcome=outcome)  # shown from the start, as 0

    def _of(self, counter: Counter, **labels: str) -> Counter:
        return counter.labels(**self._labels, **labels)

    def add(self, outcome: str, faults: Iterable[str]) -> None:
        """Count a call."""
        self._of(self._calls, outcome=outcome).inc()
        for fault in faults:
            self._of(self._faults, fault=fault).inc()


def start(result: None, manager: TokenizerManager, *args: Any, **kwargs: Any) -> None:
    """Declare the metrics, if the server has any; runs after `TokenizerManager.__init__`."""
    global _metrics
    if manager.enable_metrics and live.serves_deepseek_v4():
        _metrics = Metrics(manager.metrics_collector.labels)


def count(reader: Reader) -> None:
    """Count the calls of an answer, and log the names of faults."""
    outcomes = [(REPAIRED if call.repairs else WRITTEN, call.repairs) for call in reader.calls]
    if reader.refused:
        outcomes.append((REFUSED, frozenset({reader.refused})))
    for outcome, faults in outcomes:
        names = [fault.value for fault in faults]
        if names:
            logger.info("A tool call is %s: %s", outcome, ", ".join(names))
        if _metrics is not None:
            _metrics.add(outcome, names)
