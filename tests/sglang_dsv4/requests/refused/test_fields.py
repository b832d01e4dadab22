"""Every field of a request, as SGLang annotates it: types, lists for one prompt, lists of another length than a batch.

The cases are made from SGLang's classes, so that a field of a later SGLang is among them.
"""

from __future__ import annotations

import dataclasses
import random
import re
import types
import typing
from typing import Any, Literal

import pytest
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sglang_dsv4.requests.refused import fields, guards

STRANGE: tuple[Any, ...] = (
    *(True, False, 0, 1, -1, 7, 2**31, 2**63, 10**400, 0.0, 1.5, -1e308, float("nan"), float("inf")),
    *("", "a", "\ud800", "x" * 300, b"x", [], {}, [None], [True], [0], [5, 6], [1.5], ["a"], ["a", "b"], ["\ud800"]),
    *([[5], [6]], [[5, 6]], [[]], [[[0.5]]], [{}], [{}, {}], [{"n": 2}], {"a": 1}, {"n": 2}, {"n": None}, {"id": "s"}),
    *({5: 1.0}, {"is_normalized": True}, {"temperature": "x"}, {"stop": [1]}, {"enabled": True}, ("a",), object()),
)
"""Values of every JSON type, and some that only a Python caller can pass."""
ONE = {"input_ids": [5, 6]}
BATCH = {"input_ids": [[5], [6]]}


def sample(kinds: tuple[Any, ...]) -> Any:
    """Return a value of the first of these types."""
    kind = kinds[0]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return inner[0]
    if origin is list:
        return [sample(fields.alternatives(inner[0]))]
    if origin is dict or kind is dict:
        return {}
    if kind is PositionalEmbeds:
        return PositionalEmbeds(embeds=[torch.zeros(4)], positions=[0])
    if kind is torch.Tensor:
        return torch.zeros(1)
    return {bool: True, int: 1, float: 0.5, str: "a", types.NoneType: None}[kind]


def of_each_prompt(kind: type) -> list[str]:
    found = (name for name, field in fields.fields_of(kind).items() if field.each)
    return [name for name in found if name not in (*fields.NOT_CHECKED, *fields.PROMPTS)]


PER_PROMPT = [(kind, name) for kind in (GenerateReqInput, EmbeddingReqInput) for name in of_each_prompt(kind)]
ids = [f"{kind.__name__}-{name}" for kind, name in PER_PROMPT]


def test_the_fields_of_each_prompt_are_found() -> None:
    expected = {"rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "watermark"}
    expected |= {"token_ids_logprob", "lora_path", "extra_key", "cache_salt", "kv_hints", "custom_logit_processor"}
    assert expected <= set(of_each_prompt(GenerateReqInput))
    assert not {"stream", "priority", "session_params", "custom_labels"} & set(of_each_prompt(GenerateReqInput))


@pytest.mark.parametrize(("kind", "name"), PER_PROMPT, ids=ids)
def test_a_list_for_one_prompt_is_refused(kind: type, name: str) -> None:
    """`top_logprobs_num: [1]` ended the server."""
    field = fields.fields_of(kind)[name]
    fields.check(kind(**ONE, **{name: sample(field.one)}))
    with pytest.raises(ValueError, match=f"{name} is a list, and there is one prompt: expected"):
        fields.check(kind(**ONE, **{name: [sample(field.each)]}))


@pytest.mark.parametrize(("kind", "name"), PER_PROMPT, ids=ids)
def test_a_list_has_the_length_of_the_batch(kind: type, name: str) -> None:
    field = fields.fields_of(kind)[name]
    entry, one = sample(field.each), sample(field.one)
    fields.check(kind(**BATCH, **{name: [entry, entry]}))
    for length in (1, 3):
        with pytest.raises(ValueError, match=f"{name} has {length} entries for 2 prompts"):
            fields.check(kind(**BATCH, **{name: [entry] * length}))
    with pytest.raises(ValueError, match=re.escape(f"{name}[1] must be ")):
        fields.check(kind(**BATCH, **{name: [entry, object()]}))
    if name in fields.not_repeated(kind(**BATCH)):
        with pytest.raises(ValueError, match=f"{name} has one value for 2 prompts"):
            fields.check(kind(**BATCH, **{name: one}))
    else:
        fields.check(kind(**BATCH, **{name: one}))


ALL = [(kind, field.name) for kind in (GenerateReqInput, EmbeddingReqInput) for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(("kind", "name"), ALL, ids=[f"{kind.__name__}-{name}" for kind, name in ALL])
def test_a_value_of_another_type_is_refused_by_name(kind: type, name: str) -> None:
    if name in fields.NOT_CHECKED:
        pytest.skip("requests.refused.guards refuses it")
    with pytest.raises(ValueError, match=name):
        fields.check(kind(**{**ONE, name: object()}))


@pytest.mark.parametrize("name", fields.sampling_types())
def test_a_sampling_parameter_of_another_type_is_refused_by_name(name: str) -> None:
    for value in (object(), [object()], {"a": object()}):
        if name in ("custom_params", "watermark") and isinstance(value, dict):  # SGLang reads the object itself
            continue
        with pytest.raises(ValueError, match=f"{name} must be "):
            fields.check_sampling({name: value})
    fields.check_sampling({name: None})


@pytest.mark.parametrize("name", ["nobody_knows", *fields.SET_BY_SGLANG])
def test_other_sampling_parameters_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"sampling_params has no field '{name}'"):
        fields.check_sampling({name: None})


VALID = {
    "one": ONE,
    "text": {"text": "a"},
    "texts": {"text": ["a", "b"], "rid": "x", "sampling_params": [{}, {"n": 1}]},
    "long": {"input_ids": [5] * 100_000},
    "embeddings": {"input_embeds": [[0.5, 0.5]]},
    "batch-of-embeddings": {"input_embeds": [[[0.5]], [[0.5]]], "return_logprob": [True, False]},
    "prompt-of-a-session": {"input_ids": [], "session_params": {"id": "s", "offset": 3}},
    "answers": {**ONE, "sampling_params": {"n": 3, "stop": ["a"], "stop_token_ids": [1, None], "logit_bias": {5: 1}}},
    "logprobs-of-tokens": {**BATCH, "token_ids_logprob": [7, 8]},
    "logprobs-of-tokens-of-each": {**BATCH, "token_ids_logprob": [[7], [8, 9]]},
    "text-and-ids": {"text": "a", "input_ids": [5]},
}


@pytest.mark.parametrize("given", VALID.values(), ids=VALID)
def test_valid_requests_pass(given: dict[str, Any]) -> None:
    request = GenerateReqInput(**given)
    fields.check(request)
    request.normalize_batch_and_arguments()


INVALID = {
    "no-prompts": ({"text": []}, "text is empty: expected at least one prompt"),
    "no-ids": ({"input_ids": []}, "input_ids is empty"),
    "ids-of-two-kinds": ({"input_ids": [5, [6]]}, "input_ids is a list, and there is one prompt"),
    "ids-of-other-two-kinds": ({"input_ids": [[5], 6]}, re.escape("input_ids[1] must be a list of whole numbers")),
    "ids-of-one-of-two": ({"text": ["a", "b"], "input_ids": [5]}, "input_ids has one value for 2 prompts"),
    "half-a-character": ({"text": "\ud800"}, "text must be a text in Unicode"),
    "another-prompt-for-each-answer": ({"text": "a", **ONE, "sampling_params": {"n": 2}}, "text and input_ids can't"),
    "spans-and-answers": (
        {**ONE, "multi_item_delimiter_indices": [1], "sampling_params": {"n": 2}},
        "multi_item_delimiter_indices can't be given with n above 1",
    ),
    "a-session-of-none": ({**ONE, "session_params": {"name": "s"}}, "session_params has no field 'name'"),
    "a-session-by-number": ({**ONE, "session_params": {"id": 5}}, "id must be a text"),
}


@pytest.mark.parametrize(("given", "reason"), INVALID.values(), ids=INVALID)
def test_invalid_requests_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fields.check(GenerateReqInput(**given))


def test_a_count_of_null_is_the_default() -> None:
    """SGLang compared an `n` of None with 1: a 500. A `max_new_tokens` of None has a meaning: no limit."""
    one = GenerateReqInput(**ONE, sampling_params={"n": None, "max_new_tokens": None})
    fields.leave_out_null_counts(one)
    batch = GenerateReqInput(**BATCH, sampling_params=[{"n": None}, {}])
    fields.leave_out_null_counts(batch)
    assert one.sampling_params == {"max_new_tokens": None} and batch.sampling_params == [{}, {}]
    one.normalize_batch_and_arguments()
    batch.normalize_batch_and_arguments()


@pytest.mark.parametrize("kind", [GenerateReqInput, EmbeddingReqInput])
def test_what_passes_is_normalised(kind: type) -> None:
    """SGLang raises no other error than ValueError for a request that passes, and reads each prompt of a batch."""
    pick, passed = random.Random(1), 0
    refused = (*fields.NOT_CHECKED, *guards.MEDIA)
    names = [field.name for field in dataclasses.fields(kind) if field.name not in refused]
    prompts = ({"text": "a"}, {"text": ["a", "b"]}, ONE, BATCH, {"input_ids": [[5]]}, {"text": "a", **ONE})
    for _ in range(4000):
        given = {**pick.choice(prompts)}
        for name in pick.sample(names, pick.choice((0, 1, 1, 2, 3))):
            given[name] = pick.choice(STRANGE)
        request = kind(**given)
        try:
            fields.leave_out_null_counts(request)
            fields.check(request)
        except ValueError as error:
            assert str(error)
            continue
        try:
            request.normalize_batch_and_arguments()
        except ValueError:
            continue
        passed += 1
        if not request.is_single:
            for index in range(len(request.rid)):
                request[index]
    assert passed > 300
