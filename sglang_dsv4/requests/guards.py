"""Requests that SGLang 0.5.23 answers with a crash, a 500, or not at all: they get a 400 with the reason.

`checks` has token ids and the numbers of sampling; this module has all other requests. A row of the table can go when
SGLang checks the request itself.

===============================  ============================================  =========================================
request                          what SGLang does                              where
===============================  ============================================  =========================================
a control request that fails     the scheduler ends: profiler, recorder of     Scheduler.process_input_requests
                                 experts, weights of another model
a request for tokens that fails  the scheduler ends                            Scheduler.handle_generate_request
before it is queued
`positional_embed_overrides`     the scheduler ends: JSON can't hold their     Scheduler.process_input_requests
in JSON                          objects
weights that do not fit, where   half of them are loaded, and its rollback     ModelRunner's WeightUpdater
SGLang's layers keep them in a   reads the same files again
layout of their own
`stop_profile` without a start   500                                           TokenizerControlMixin._execute_profile
`num_steps` below 1              profiles without end                          ProfilerManager._init_profile
names that do not exist (a       500: a ValueError that no route expects       http_server
parser, a section of a report)
invalid token ids for            500: the tokenizer has no such id             OpenAIServingDetokenize
`/detokenize`
fewer or more `sampling_params`  500: index out of range                       GenerateReqInput._normalize_*
than prompts
`n` of millions                  copies of the prompt until memory is full     GenerateReqInput._handle_parallel_*
empty `input_embeds`             500: its first row is read                    GenerateReqInput._determine_batch_size
`input_embeds` that are ragged,  the scheduler ends: no tensor can be made of  ScheduleBatch.prepare_for_extend,
of another width, or overflow    them, or no product, or the result is NaN     ForwardBatch
images, audio, video             ignored: the model takes text only            TokenizerManager._tokenize_one_request
an invalid `stop_regex`          500                                           SamplingParams.normalize
a grammar and `min_new_tokens`   500: every token is forbidden                 BatchedMinNewTokensPenalizer
a grammar that no text fulfils   500 after its first token                     XGrammarGrammarBackend._from_context
===============================  ============================================  =========================================
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang_dsv4.seam.hooks import DISPATCHER
from sglang_dsv4.seam.install import set_attribute
from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_hidden_size = 0  # hidden size of the DeepSeek-V4 model that this process serves; 0 for none

FAILED = "sglang_dsv4: failed: "
"""Prefix of the `rid` in the answer to a control request whose handler raised; the reason follows it."""
INT32_MAX = 2**31 - 1
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
MOST_ANSWERS = 1024
"""Most answers to one prompt: far more than are decoded at once, few enough to be held in memory."""
MEDIA = {"image_data": "images", "audio_data": "audio", "video_data": "video"}
LARGEST_EMBEDDING = 1e16
"""Largest absolute value of an embedding, so that the sum of squares of four streams of 7,168 channels is finite in
fp32."""


# ------------------------------------------------------------------------------ the process that answers clients


def check_generate_request(request: GenerateReqInput, *args: object, **kwargs: object) -> None:
    """Check a generate request, before ``GenerateReqInput.normalize_batch_and_arguments``.

    Raises:
        ValueError: it can't be served; SGLang answers 400.
    """
    for field, name in MEDIA.items():
        if _has_any(getattr(request, field)):
            raise ValueError(f"{field} was given: DeepSeek-V4 takes text only, no {name}. Leave it out.")
    if request.input_embeds is not None and not len(request.input_embeds):
        raise ValueError("input_embeds is empty: expected [tokens][hidden size], at least one token.")
    overrides = request.positional_embed_overrides
    if overrides is not None and any(type(item).__name__ != "PositionalEmbeds" for item in _flat([overrides]) if item):
        raise ValueError("positional_embed_overrides cannot be given in JSON. Leave it out.")
    params = request.sampling_params
    for one in params if isinstance(params, list) else [params or {}]:
        count = one.get("n")
        if count is not None and (type(count) is not int or not 1 <= count <= MOST_ANSWERS):
            raise ValueError(f"n must be a whole number from 1 to {MOST_ANSWERS}, got {count!r}.")
    if isinstance(params, list):
        prompts = next(p for p in (request.text, request.input_ids, request.input_embeds, [""]) if p is not None)
        if isinstance(prompts, str) or not len(prompts) or _is_single(prompts):
            raise ValueError("sampling_params is a list, and there is one prompt: expected a single object.")
        if len(params) != len(prompts):
            raise ValueError(f"sampling_params has {len(params)} entries for {len(prompts)} prompts: one for each.")


def _has_any(media: object) -> bool:
    return any(map(_has_any, media)) if isinstance(media, list) else media is not None


def _is_single(prompts: list) -> bool:
    """Whether token ids or embeddings belong to one prompt and not to a list of prompts."""
    first = prompts[0]
    if isinstance(first, str):
        return False
    return not isinstance(first, list) or (len(first) > 0 and isinstance(first[0], float))


def check_text_parameters(params: SamplingParams, *args: object, **kwargs: object) -> None:
    """Check regular expressions and grammars, before ``SamplingParams.normalize``.

    Raises:
        ValueError: an invalid `stop_regex`, or a grammar that `min_new_tokens` contradicts.
    """
    patterns = params.stop_regex or []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(f"stop_regex {pattern!r} is not a regular expression: {error}.") from error
    grammar = next((name for name in GRAMMARS if getattr(params, name)), None)
    if grammar is not None and isinstance(params.min_new_tokens, int) and params.min_new_tokens > 0:
        raise ValueError(
            f"min_new_tokens is {params.min_new_tokens} with {grammar}, which may allow less. Leave one of them out."
        )


async def raise_failures(
    original: Callable[[Any, Any], Awaitable[list]], communicator: object, request: object
) -> list:
    """The scheduler's answers to a control request; a request that failed in the scheduler gets a 400.

    Runs around ``FanOutCommunicator.__call__``.

    Raises:
        HTTPException: 400, with the reason.
    """
    from fastapi import HTTPException

    steps = getattr(request, "num_steps", None)
    if steps is not None and steps < 1:
        raise HTTPException(400, f"num_steps must be at least 1, got {steps}.")
    answers = await original(communicator, request)
    for answer in answers:
        reason = getattr(answer, "rid", None)
        if isinstance(reason, str) and reason.startswith(FAILED):
            raise HTTPException(400, reason.removeprefix(FAILED))
        if type(answer).__name__ == "ProfileReqOutput" and not answer.success:
            raise HTTPException(400, answer.message)
    return answers


def answer_value_errors(result: None, *args: object, **kwargs: object) -> None:
    """Answer 400 to a ValueError that no route catches; runs after ``TokenizerManager.__init__``."""
    if (app := http_app()) is not None:
        app.add_exception_handler(ValueError, _bad_request)


def http_app() -> Any:
    """SGLang's FastAPI application; None in an Engine without HTTP."""
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    return None if server is None else server.app


async def _bad_request(request: object, error: Exception) -> object:
    from fastapi.responses import JSONResponse

    logger.warning("%s is answered with 400: %s", request.url.path, error, exc_info=error)
    return JSONResponse({"error": {"message": str(error)}}, 400)


async def check_tokens_to_decode(
    original: Callable[..., Awaitable[object]], serving: Any, adapted: object, request: Any, *args: object
) -> object:
    """SGLang's answer to ``/detokenize``, or an error answer for invalid token ids."""
    for token in _flat(request.tokens):
        if isinstance(token, int) and not 0 <= token <= INT32_MAX:
            return serving.create_error_response(f"{token} is no token id: expected 0 to {INT32_MAX}.")
    return await original(serving, adapted, request, *args)


def _flat(ids: object) -> Iterator[object]:
    for item in ids if isinstance(ids, list) else ():
        yield from _flat(item) if isinstance(item, list) else (item,)


# ------------------------------------------------------------------------------ the scheduler


class GuardedRequests:
    """A scheduler's dispatcher that answers a request with the reason if its handler raises."""

    def __init__(self, dispatcher: Callable[[Any], Any], answer: Callable[[Any, Any], None]) -> None:
        """Guard a dispatcher.

        Args:
            dispatcher: SGLang's; request -> its answer, or None.
            answer: sends an answer to the client of a request.
        """
        self._dispatcher, self._answer = dispatcher, answer

    def __call__(self, request: Any) -> Any:
        """The answer of SGLang's dispatcher, or an answer with the error."""
        if type(request).__name__.startswith("BatchTokenized"):  # SGLang's handler does the same
            for one in request:
                self._send(self(one), one)
            return None
        try:
            return self._dispatcher(request)
        except Exception as error:
            logger.exception("%s failed; the server goes on", type(request).__name__)
            return failure_of(request, error)

    def _send(self, answer: Any, request: Any) -> None:
        if answer is not None:
            self._answer(answer, request)

    def __getattr__(self, name: str) -> Any:
        """An attribute of SGLang's dispatcher, to which SGLang adds handlers."""
        return getattr(self._dispatcher, name)


def start(result: None, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler.__init__``: note the width of embeddings, and guard the dispatcher."""
    global _hidden_size
    if live_parts() is not None:
        _hidden_size = scheduler.model_config.hidden_size
        set_attribute(scheduler, DISPATCHER)


def guard(dispatcher: Callable[[Any], Any], scheduler: Scheduler) -> GuardedRequests:
    """The value of ``Scheduler._request_dispatcher``: SGLang's dispatcher, guarded."""
    return GuardedRequests(dispatcher, scheduler.send_control_output)


def failure_of(request: object, error: Exception) -> object | None:
    """An answer of the type that the request expects, with only the error in it; None if it expects no answer."""
    import msgspec
    from sglang.srt.managers import io_struct

    name = type(request).__name__
    if name.startswith("Tokenized"):
        reason = {"type": "abort", "status_code": 400, "message": f"{type(error).__name__}: {error}"}
        return io_struct.AbortReq(rid=request.rid, finished_reason=reason)
    answer_type = getattr(io_struct, re.sub(r"(Req)(Input)?$", r"\1Output", name), None)
    if answer_type is None or answer_type is type(request):
        return None
    reason = f"{type(error).__name__}: {error}"
    values: dict[str, object] = {"rid": FAILED + reason}
    for field in msgspec.structs.fields(answer_type):
        kind = getattr(field.type, "__origin__", field.type)
        if "message" in field.name:
            values[field.name] = reason
        elif field.required:
            values[field.name] = kind() if kind in (bool, int, float, str, list, dict) else None
    return answer_type(**values)


def keep_weights(
    original: Callable[..., tuple[bool, str]], updater: Any, model_path: str, *args: Any, **kwargs: Any
) -> tuple[bool, str]:
    """Load new weights; if that fails, load the old ones again. Runs around ``update_weights_from_disk``.

    Returns:
        Whether `model_path` was loaded, and the error if it was not.

    Raises:
        SystemExit: neither could be loaded, so the model holds tensors of both and must not answer.
    """
    config, before = updater.model_config, updater.model_config.model_path
    try:
        loaded, message = original(updater, model_path, *args, **kwargs)
        if loaded or "Rolling back" not in message:  # else tensors may have been written
            config.model_path = model_path if loaded else before
            return loaded, message
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    logger.error("The weights of %s could not be loaded, those of %s are loaded again: %s", model_path, before, message)
    config.model_path = before
    try:
        restored, why = original(updater, before, "auto")
    except Exception as error:
        restored, why = False, f"{type(error).__name__}: {error}"
    if not restored:
        raise SystemExit(
            f"The weights of {model_path} could not be loaded ({message}), nor those of {before} again ({why}): the "
            "model holds some of both. Start the server again."
        )
    return False, f"{message} The weights of {before} were loaded again."


def check_input_embeds(req: Req) -> str | None:
    """The reason for a 400, or None. Refused embeddings are set to zeros, since SGLang still runs a refused request."""
    hidden_size = _hidden_size
    if req.input_embeds is None or not hidden_size:
        return None
    widths = {len(row) for row in req.input_embeds}
    if widths != {hidden_size}:
        found = f"rows of {', '.join(map(str, sorted(widths)))} numbers"
    else:
        largest = max(max(abs(value) for value in row) for row in req.input_embeds)
        if largest <= LARGEST_EMBEDDING:  # False for NaN
            return None
        found = f"a number of {largest}"
    req.input_embeds = [[0.0] * hidden_size for _ in req.input_embeds]
    return (
        f"input_embeds must be [tokens][{hidden_size}], no number beyond {LARGEST_EMBEDDING:g} in absolute value; "
        f"got {found}."
    )


def refuse_empty_grammar(grammar: BaseGrammarObject, *args: object, **kwargs: object) -> BaseGrammarObject:
    """The grammar, or SGLang's object for an invalid grammar if no text fulfils it.

    Two such grammars are `{"$ref": "#"}` and `root ::= root`. Runs after ``XGrammarGrammarBackend._from_context``.
    """
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    mask = grammar.allocate_vocab_mask(grammar.vocab_size, 1, "cpu")
    grammar.matcher.fill_next_token_bitmask(mask)
    if mask.any():
        return grammar
    return InvalidGrammarObject("no text fulfils this grammar")
