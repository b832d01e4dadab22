"""Requests that SGLang 0.5.23 answers with a crash, a 500, not at all, or as if a field were not there: they get a 400.

`fields` compares every field with its type and with the number of prompts, `token_ids` checks token ids,
`sampling_numbers` the numbers of sampling, `administration` calls that act after their answer; `failures` ends a
request that fails in spite of these checks. This module checks all other requests. A row of the table can go when
SGLang checks the request itself.

===============================  ============================================  =========================================
request                          what SGLang does                              where
===============================  ============================================  =========================================
invalid token ids for            500: the tokenizer has no such id             OpenAIServingDetokenize
`/detokenize`
`n` of millions                  copies of the prompt until memory is full     GenerateReqInput._handle_parallel_*
empty `input_embeds`             500: its first row is read                    GenerateReqInput._determine_batch_size
`input_embeds` that are ragged,  the scheduler ends: no tensor can be made of  ScheduleBatch.prepare_for_extend,
of another width, or overflow    them, or no product, or the result is NaN     ForwardBatch
images, audio, video             ignored: the model takes text only; 500 for   TokenizerManager._tokenize_one_request,
                                 a batch with an empty list of them            GenerateReqInput.__getitem__
`custom_labels` that the         the process that answers clients ends         TokenizerManager.collect_metrics
metrics do not have
a `rid` of SGLang's own          a busy scheduler drops it                     Scheduler.process_input_requests
an invalid `stop_regex`          500                                           SamplingParams.normalize
a grammar and `min_new_tokens`   500: every token is forbidden                 BatchedMinNewTokensPenalizer
a grammar that no text fulfils   500 after its first token                     XGrammarGrammarBackend._from_context
a grammar that is long, or has   it is compiled for minutes, or the scheduler  XGrammarGrammarBackend
many levels or a long pattern    ends: the compiler's stack overflows
`best_of`, `suffix`              ignored                                       OpenAIServingCompletion
===============================  ============================================  =========================================
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang_dsv4.requests.refused import fields, stop_patterns
from sglang_dsv4.seam.live import live_parts, serves_deepseek_v4

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from sglang.srt.entrypoints.openai.protocol import CompletionRequest
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_hidden_size = 0  # hidden size of the DeepSeek-V4 model that this process serves; 0 for none

INT32_MAX = 2**31 - 1
GRAMMARS = {"json_schema": 2**18, "regex": 2**15, "ebnf": 2**15, "structural_tag": 2**18}
"""The grammars of a request, and the most characters of each: the time of a compilation grows with their square."""
IN_JSON = ("json_schema", "structural_tag")
MOST_LEVELS = 128
"""Most levels of a JSON grammar: XGrammar compiles a chain of 1,000 for minutes."""
LONGEST_TEXT = 2**14
"""Most characters of a text in a JSON grammar: XGrammar's stack overflows at a pattern of 100,000 nested brackets."""
MOST_ANSWERS = 1024
"""Most answers to one prompt: far more than are decoded at once, few enough to be held in memory."""
MEDIA = {
    **{"image_data": "images", "audio_data": "audio", "video_data": "video", "modalities": "images"},
    **{"mm_hashes": "images", "mm_content_hashes": "images"},
}
HEALTH_CHECK = "HEALTH_CHECK"
OF_HEALTH_CHECK = re.compile(f"{HEALTH_CHECK}_[0-9a-f]{{32}}")
"""The ids of SGLang's own requests. A busy scheduler drops them without an answer."""
LARGEST_EMBEDDING = 1e16
"""Largest absolute value of an embedding, so that the sum of squares of four streams of 7,168 channels is finite in
fp32."""


# ------------------------------------------------------------------------------ the process that answers clients


def check_request(request: GenerateReqInput | EmbeddingReqInput, *args: object, **kwargs: object) -> None:
    """Check a request before SGLang's ``normalize_batch_and_arguments``.

    Raises:
        ValueError: it can't be served; SGLang answers 400.
    """
    if not serves_deepseek_v4():
        return
    fields.leave_out_null_counts(request)
    for field, name in MEDIA.items():
        if _has_any(getattr(request, field, None)):
            raise ValueError(f"{field} was given: DeepSeek-V4 takes text only, no {name}. Leave it out.")
    # SGLang reads entry `i` of an empty list of media, too.
    vars(request).update({field: None for field in MEDIA if hasattr(request, field)})
    if request.input_embeds is not None and not len(request.input_embeds):
        raise ValueError("input_embeds is empty: expected [tokens][hidden size], at least one token.")
    fields.check(request)
    params = request.sampling_params
    for one in params if isinstance(params, list) else [params or {}]:
        count = one.get("n")
        if count is not None and not 1 <= count <= MOST_ANSWERS:
            raise ValueError(f"n must be a whole number from 1 to {MOST_ANSWERS}, got {count!r}.")
    for rid in request.rid if isinstance(request.rid, list) else [request.rid]:
        if rid is not None and rid.startswith(HEALTH_CHECK) and not OF_HEALTH_CHECK.fullmatch(rid):
            raise ValueError(f"rid {rid!r} begins with {HEALTH_CHECK}, as those of the server's own requests do.")
    if labels := getattr(request, "custom_labels", None):
        _check_labels(labels)


def _has_any(media: object) -> bool:
    return any(map(_has_any, media)) if isinstance(media, list) else media is not None


def _check_labels(labels: dict[str, str]) -> None:
    from sglang.srt.runtime_context import get_observability

    allowed = get_observability().tokenizer_metrics_allowed_custom_labels or ()
    unknown = sorted(set(labels) - set(allowed))
    if get_observability().enable_metrics and unknown:
        raise ValueError(
            f"custom_labels has {', '.join(map(repr, unknown))}; this server's metrics have "
            f"{', '.join(allowed) or 'no custom labels'} (--tokenizer-metrics-allowed-custom-labels)."
        )


def check_text_parameters(params: SamplingParams, *args: object, **kwargs: object) -> None:
    """Check regular expressions and grammars, before ``SamplingParams.normalize``.

    Raises:
        ValueError: an invalid `stop_regex`, or a grammar that is too long or that `min_new_tokens` contradicts.
    """
    if not serves_deepseek_v4():
        return
    patterns = params.stop_regex or []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        stop_patterns.check(pattern)
    for name, longest in GRAMMARS.items():
        length = len(getattr(params, name) or "")
        if length > longest:
            raise ValueError(f"{name} has {length:,} characters: at most {longest:,} are compiled. Shorten it.")
        if length and name in IN_JSON:
            _check_json(name, getattr(params, name))
    grammar = next((name for name in GRAMMARS if getattr(params, name)), None)
    if grammar is not None and isinstance(params.min_new_tokens, int) and params.min_new_tokens > 0:
        raise ValueError(
            f"min_new_tokens is {params.min_new_tokens} with {grammar}, which may allow less. Leave one of them out."
        )


def _check_json(name: str, text: str) -> None:
    """Check the levels and the texts of a grammar in JSON. Text that is no JSON passes: SGLang says what is wrong."""
    try:
        nodes = [json.loads(text)]
    except ValueError:
        return
    except RecursionError:
        nodes, levels = [], MOST_LEVELS + 1
    else:
        levels = 0
    while nodes and levels <= MOST_LEVELS:
        levels += 1
        texts = [key for node in nodes if isinstance(node, dict) for key in node]
        longest = max((len(node) for node in (*texts, *nodes) if isinstance(node, str)), default=0)
        if longest > LONGEST_TEXT:
            raise ValueError(f"{name} has a text of {longest:,} characters: at most {LONGEST_TEXT:,} are compiled.")
        nodes = [
            child
            for node in nodes
            for child in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
        ]
    if levels > MOST_LEVELS:
        raise ValueError(f"{name} has more than {MOST_LEVELS} levels. Name its parts in $defs and refer to them.")


def check_completion(error: str | None, serving: Any, request: CompletionRequest) -> str | None:
    """The reason for a 400 to ``/v1/completions``; None keeps `error`, SGLang's own.

    SGLang accepts these fields and answers as if they had not been given. Runs after
    ``OpenAIServingCompletion._validate_request``.
    """
    if error is not None or not serves_deepseek_v4():
        return None
    if request.best_of is not None and request.best_of != request.n:
        return (
            f"best_of is {request.best_of} and n is {request.n}: this server returns every answer that it draws, so "
            "both must be equal. Leave best_of out."
        )
    if request.suffix and serving.template_manager.completion_template_name is None:
        return "suffix was given: this server has no template for text between a prompt and a suffix. Leave it out."
    return None


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


def note_hidden_size(result: None, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler.__init__``: note the width of embeddings."""
    global _hidden_size
    if live_parts() is not None:
        _hidden_size = scheduler.model_config.hidden_size


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
