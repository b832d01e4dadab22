"""Type checks of a request's fields: each has a value of its type, or for a batch a list with one value a prompt.

The types are SGLang's own annotations of ``GenerateReqInput``, ``EmbeddingReqInput`` and ``SamplingParams``. SGLang's
HTTP routes check some of them only: they accept a list of one entry for a single prompt, lists of another length than
the batch, and any object as `sampling_params`; an ``Engine``'s caller can pass anything. SGLang 0.5.23 then compares a
list with a number, in the scheduler or in the process that answers clients, and the server ends.

A field annotated with both `X` and `List[X]` is a field of each prompt: `X` for one prompt; for a batch `X`, which
SGLang repeats, or a list. So the fields that a later SGLang adds are checked as well.
"""

from __future__ import annotations

import functools
import math
import numbers
import reprlib
import types
import typing
from array import array
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

PROMPTS = ("text", "input_ids", "input_embeds")
NOT_CHECKED = ("image_data", "video_data", "audio_data")
"""Fields that `requests.refused.guards` refuses."""
NOT_REPEATED = (*PROMPTS, "lora_id", "multi_item_delimiter_indices", "token_indices_to_pool", "decision_layout")
"""Fields of each prompt that SGLang does not repeat for a batch: it reads entry `i` of any value."""
NOT_REPEATED_IN_EMBEDDINGS = (*NOT_REPEATED, "rid", "embed_overrides")
SET_BY_SGLANG = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")
"""Fields of SamplingParams that SGLang computes. A request with `is_normalized` would skip its checks."""
INT64 = range(-(2**63), 2**63)
SEQUENCES = (list, tuple, array)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


class Field(NamedTuple):
    """The types of one field. Every field may also be None."""

    one: tuple[Any, ...]  # types of one prompt's value
    each: tuple[Any, ...]  # types of an entry of a batch's list; empty for a field without such a list

    @classmethod
    def of(cls, found: tuple[Any, ...]) -> Field:
        """The field that may have each of these types."""
        of_batch = {kind: alternatives(*typing.get_args(kind)) for kind in found if typing.get_origin(kind) is list}
        of_batch = {kind: entry for kind, entry in of_batch.items() if {*entry} - {types.NoneType} <= {*found}}
        one = (kind for kind in found if kind not in of_batch and kind is not types.NoneType)
        return cls(tuple(one), tuple(dict.fromkeys(kind for entry in of_batch.values() for kind in entry)))


def check(request: GenerateReqInput | EmbeddingReqInput) -> None:
    """Check the types of all fields; only a batch may have lists, of its length.

    Raises:
        ValueError: names the field, the expected type and the value; SGLang answers 400.
    """
    prompts = number_of_prompts(request)
    for name, field in fields_of(type(request)).items():
        value = getattr(request, name)
        if value is not None and name not in NOT_CHECKED:
            _check_field(name, value, field, prompts, repeated=name not in not_repeated(request))
    parameters = request.sampling_params or {}
    for each in parameters if isinstance(parameters, list) else [parameters]:
        check_sampling(each)
        if (each.get("n") or 1) > 1:
            _refuse_several_answers(request)
    if session := getattr(request, "session_params", None):
        _check_object("session_params", session, session_types())


def leave_out_null_counts(request: GenerateReqInput | EmbeddingReqInput) -> None:
    """Remove an `n` of None: it means SGLang's default, but SGLang compares it with 1 before it sets the default."""
    given = request.sampling_params
    if isinstance(given, dict):
        request.sampling_params = _without_null_count(given)
    elif isinstance(given, list):
        request.sampling_params = [_without_null_count(one) if isinstance(one, dict) else one for one in given]


def _without_null_count(given: dict[str, Any]) -> dict[str, Any]:
    if "n" in given and given["n"] is None:
        return {name: value for name, value in given.items() if name != "n"}
    return given


def _check_field(name: str, value: object, field: Field, prompts: int | None, *, repeated: bool) -> None:
    is_list = field.each and isinstance(value, list)
    if fits(value, field.one):
        if prompts is not None and not repeated:
            raise ValueError(f"{name} has one value for {prompts} prompts: give a list with one for each.")
    elif not is_list:
        raise ValueError(f"{name} must be {describe(field.one)}, got {_short.repr(value)}.")
    elif prompts is None:
        raise ValueError(
            f"{name} is a list, and there is one prompt: expected {describe(field.one)}, got {_short.repr(value)}."
        )
    elif len(value) != prompts:
        raise ValueError(f"{name} has {len(value)} entries for {prompts} prompts: one for each.")
    else:
        for index, entry in enumerate(value):
            if not fits(entry, field.each):
                raise ValueError(f"{name}[{index}] must be {describe(field.each)}, got {_short.repr(entry)}.")


def number_of_prompts(request: GenerateReqInput | EmbeddingReqInput) -> int | None:
    """The number of prompts of a batch; None for a single prompt, not a batch of one. The rule is SGLang's.

    Raises:
        ValueError: the list of prompts is empty.
    """
    for name in PROMPTS:
        prompts = getattr(request, name)
        if prompts is None:
            continue
        if not isinstance(prompts, SEQUENCES):
            return None
        if not len(prompts):
            if name == "input_ids" and getattr(request, "session_params", None):  # the session's history is the prompt
                return None
            raise ValueError(f"{name} is empty: expected at least one {'prompt' if name == 'text' else 'token'}.")
        first = prompts[0]
        if name == "input_ids" and not isinstance(first, SEQUENCES):
            return None
        if name == "input_embeds" and isinstance(first, SEQUENCES) and len(first) and isinstance(first[0], float):
            return None
        return len(prompts)
    return None


def check_sampling(parameters: dict[str, Any]) -> None:
    """Check the names and types of one prompt's sampling parameters.

    Raises:
        ValueError: an unknown name, a field that SGLang computes, or a value of another type.
    """
    _check_object("sampling_params", parameters, sampling_types())


def _check_object(name: str, given: dict[str, Any], known: dict[str, tuple[Any, ...]]) -> None:
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"{name} has no field {_short.repr(key)}; its fields are {', '.join(sorted(known))}.")
        if value is not None and not fits(value, known[key]):
            raise ValueError(f"{key} must be {describe(known[key])}, got {_short.repr(value)}.")


def _refuse_several_answers(request: GenerateReqInput | EmbeddingReqInput) -> None:
    given = [name for name in not_repeated(request) if getattr(request, name, None) is not None]
    extra = [name for name in given if name not in PROMPTS and name != "rid"]
    if extra or len([name for name in given if name in PROMPTS]) > 1:
        raise ValueError(f"{' and '.join(extra or given)} can't be given with n above 1: SGLang does not repeat them.")


def not_repeated(request: object) -> tuple[str, ...]:
    """The names of the fields that need a list if the request is a batch."""
    return NOT_REPEATED_IN_EMBEDDINGS if type(request).__name__ == "EmbeddingReqInput" else NOT_REPEATED


# ------------------------------------------------------------------------------ types


@functools.cache
def declared() -> dict[str, Any]:
    """The types of fields that SGLang annotates with `Any`, or with fewer types than its code accepts."""
    from sglang.srt.managers.embed_types import PositionalEmbeds
    from torch import Tensor

    anything = dict[str, Any]
    return {
        "watermark": anything | list[anything | None],
        "logit_bias": dict[str | int, float],
        "custom_params": anything,
        "stop_token_ids": list[int | None],
        # of Python callers only: JSON can't hold their tensors
        "positional_embed_overrides": PositionalEmbeds | list[PositionalEmbeds | None],
        "embed_overrides": list[Tensor] | list[list[Tensor] | None],
    }


@functools.cache
def types_of(kind: type) -> dict[str, tuple[Any, ...]]:
    """The types of each field of a dataclass or of a msgspec Struct of SGLang."""
    made = {}
    for name, annotation in typing.get_type_hints(kind).items():
        found = alternatives(annotation)
        if name in declared():
            found = tuple(dict.fromkeys((*alternatives(declared()[name]), *(one for one in found if one is not Any))))
        made[name] = found
    return made


@functools.cache
def fields_of(kind: type) -> dict[str, Field]:
    """The fields of a request, by name."""
    return {name: Field.of(found) for name, found in types_of(kind).items()}


@functools.cache
def sampling_types() -> dict[str, tuple[Any, ...]]:
    """The types of the fields of `sampling_params` that a caller may give."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    return {name: kinds for name, kinds in types_of(SamplingParams).items() if name not in SET_BY_SGLANG}


@functools.cache
def session_types() -> dict[str, tuple[Any, ...]]:
    """The types of the fields of `session_params`."""
    from sglang.srt.managers.io_struct import SessionParams

    return types_of(SessionParams)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, without repetitions; another type alone."""
    if typing.get_origin(annotation) not in (Union, types.UnionType):
        return (annotation,)
    return tuple(dict.fromkeys(kind for member in typing.get_args(annotation) for kind in alternatives(member)))


def fits(value: object, kinds: tuple[Any, ...]) -> bool:
    """Whether a value is of one of several types, its entries included."""
    return any(_fits_one(value, kind) for kind in kinds)


def _fits_one(value: object, kind: Any) -> bool:
    plain = _PLAIN.get(kind)
    if plain is not None:
        return plain(value)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return any(type(value) is type(allowed) and value == allowed for allowed in inner)
    if origin is dict and inner:
        keys, entries = map(alternatives, inner)
        return isinstance(value, dict) and all(fits(key, keys) and fits(value[key], entries) for key in value)
    if origin in (list, set):
        if not isinstance(value, SEQUENCES if origin is list else (*SEQUENCES, set, frozenset)):
            return False
        if inner[0] in _IN_C:
            return _fits_in_c(value, _IN_C[inner[0]])
        return all(fits(entry, alternatives(inner[0])) for entry in value)
    return isinstance(value, origin or kind)


_IN_C = {int: "q", float: "d"}
"""Type codes of arrays: a prompt of a million tokens is compared in C."""


def _fits_in_c(value: Any, code: str) -> bool:
    try:
        array(code, value)
    except (TypeError, OverflowError):
        return False
    return True


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or (type(value) is int and value in (0, 1))


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value in INT64


def _is_float(value: object) -> bool:
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the largest double
        return False


def _is_text(value: object) -> bool:
    """Whether a value is text that UTF-8 can encode; JSON has escapes for halves of a character, "\\ud800"."""
    try:
        return isinstance(value, str) and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:
        return False


_PLAIN = {
    bool: _is_bool,
    int: _is_int,
    float: _is_float,
    str: _is_text,
    dict: lambda value: isinstance(value, dict),
    Any: lambda value: True,
    types.NoneType: lambda value: value is None,
}
_WORDS = {
    bool: ("true or false", "booleans"),
    int: ("a whole number of 64 bits", "whole numbers of 64 bits"),
    float: ("a finite number", "finite numbers"),
    str: ("a text in Unicode", "texts in Unicode"),
    dict: ("an object", "objects"),
    Any: ("any value", "values"),
    types.NoneType: ("null", "nulls"),
}


def describe(kinds: tuple[Any, ...], *, several: bool = False) -> str:
    """The types in words, for an error message."""
    words = []
    for kind in kinds if len(kinds) == 1 else (kind for kind in kinds if kind is not types.NoneType):
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if origin is Literal:
            words.append(" or ".join(map(repr, inner)))
        elif origin in (list, set):
            entries = describe(alternatives(inner[0]), several=True)
            words.append(f"lists of {entries}" if several else f"a list of {entries}")
        elif origin is dict and inner and inner[1] is not Any:
            entries = describe(alternatives(inner[1]), several=True)
            words.append(f"objects of {entries}" if several else f"an object of {entries}")
        else:
            known = dict if origin is dict else kind
            words.append(_WORDS[known][several] if known in _WORDS else known.__name__)
    return " or ".join(dict.fromkeys(words))
