"""Checks of requests that need no server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dsv4.requests.chat import reasoning_effort
from sglang_dsv4.requests.refused import guards
from sglang_dsv4.seam import live


@pytest.fixture(autouse=True)
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_answers_clients", True)


@pytest.mark.parametrize("kind", [GenerateReqInput, EmbeddingReqInput])
@pytest.mark.parametrize("name", guards.MEDIA)
def test_media_of_nothing_are_left_out(kind: type, name: str) -> None:
    """SGLang read the first prompt's entry of an empty list: a 500."""
    for nothing in ([], [None, None]):
        if not hasattr(kind, name):
            continue
        request = kind(text=["a", "b"], **{name: nothing})
        guards.check_request(request)
        request.normalize_batch_and_arguments()
        request[0], request[1]
    with pytest.raises(ValueError, match=f"{name} was given"):
        guards.check_request(GenerateReqInput(text="a", **{name: ["x"]}))


def test_another_models_requests_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of a request for another model were refused, too."""
    monkeypatch.setattr(live, "_answers_clients", False)
    monkeypatch.setattr(live, "_live", None)
    guards.check_request(GenerateReqInput(text="a", image_data="x.png", rid=["a"]))
    guards.check_text_parameters(SamplingParams(regex="a" * 2**16, min_new_tokens=5))
    assert guards.check_completion(None, None, SimpleNamespace(best_of=0, n=1, suffix="x")) is None


def test_the_servers_own_ids_are_refused() -> None:
    """SGLang's busy scheduler drops a request with such an id, and its client waits for ever."""
    for rid in ("HEALTH_CHECK_x", ["a", "HEALTH_CHECK"]):
        with pytest.raises(ValueError, match="begins with HEALTH_CHECK"):
            guards.check_request(GenerateReqInput(text="a" if isinstance(rid, str) else ["a", "b"], rid=rid))
    guards.check_request(GenerateReqInput(input_ids=[0], rid=f"HEALTH_CHECK_{'0a' * 16}"))


@pytest.mark.parametrize("metrics", [True, False])
def test_labels_that_the_metrics_do_not_have_are_refused(metrics: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's metrics raised at an unknown label while an output was handled, which ended the server."""
    config = SimpleNamespace(enable_metrics=metrics, tokenizer_metrics_allowed_custom_labels=["team"])
    monkeypatch.setattr("sglang.srt.runtime_context.get_observability", lambda: config)
    guards.check_request(GenerateReqInput(text="a", custom_labels={"team": "x"}))
    unknown = GenerateReqInput(text="a", custom_labels={"team": "x", "who": "y"})
    if metrics:
        with pytest.raises(ValueError, match="custom_labels has 'who'; this server's metrics have team"):
            guards.check_request(unknown)
    else:
        guards.check_request(unknown)


@pytest.mark.parametrize(("name", "longest"), guards.GRAMMARS.items())
def test_a_long_grammar_is_refused(name: str, longest: int) -> None:
    guards.check_text_parameters(SamplingParams(**{name: "a" * longest}))  # no JSON, which SGLang reports
    with pytest.raises(ValueError, match=f"{name} has {longest + 1:,} characters: at most {longest:,}"):
        guards.check_text_parameters(SamplingParams(**{name: "a" * (longest + 1)}))


def nested(levels: int) -> str:
    return '{"items":' * (levels - 1) + "{}" + "}" * (levels - 1)


@pytest.mark.parametrize("name", guards.IN_JSON)
def test_a_grammar_of_many_levels_or_with_a_long_text_is_refused(name: str) -> None:
    """A pattern of 100,000 brackets ended the scheduler with a segmentation fault."""
    longest = guards.LONGEST_TEXT
    for text in (nested(guards.MOST_LEVELS), "{", json.dumps([["a" * longest], {"b" * longest: 1}]), "5", '"a"'):
        guards.check_text_parameters(SamplingParams(**{name: text}))
    for levels in (guards.MOST_LEVELS + 1, 20_000):
        with pytest.raises(ValueError, match=f"{name} has more than 128 levels"):
            guards.check_text_parameters(SamplingParams(**{name: nested(levels)}))
    for long in ({"pattern": "a" * (longest + 1)}, {"a" * (longest + 1): {}}, [[["a" * (longest + 1)]]]):
        with pytest.raises(ValueError, match=f"{name} has a text of 16,385 characters: at most 16,384"):
            guards.check_text_parameters(SamplingParams(**{name: json.dumps(long)}))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"best_of": 0}, "best_of is 0"),
        ({"best_of": 2, "n": 3}, "best_of is 2 and n is 3"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "n": 2}, None),
        ({"suffix": ""}, None),
        ({}, None),
    ],
)
def test_fields_that_sglang_ignores_are_refused(fields: dict[str, Any], named: str | None) -> None:
    serving = SimpleNamespace(template_manager=SimpleNamespace(completion_template_name=None))
    request = SimpleNamespace(**{"n": 1, "best_of": None, "suffix": None, **fields})
    reason = guards.check_completion(None, serving, request)
    assert reason is None if named is None else named in reason
    assert guards.check_completion("too long", serving, request) is None  # SGLang's own reason stays
    serving.template_manager.completion_template_name = "deepseek_coder"
    assert guards.check_completion(None, serving, SimpleNamespace(n=1, best_of=None, suffix="x")) is None


@pytest.mark.parametrize("thinking", [True, False])
def test_an_effort_that_the_model_does_not_have_is_refused(thinking: bool) -> None:
    """Without thinking SGLang's renderer ignores an unknown effort, and the client can't notice."""
    recipe = SimpleNamespace(model="DeepSeek-V4-Pro")
    for effort in ("ultra", "foo", ""):
        with pytest.raises(ValueError, match="reasoning_effort must be one of none, minimal, low, medium, high"):
            reasoning_effort.render(lambda *_, **__: [], recipe, {"thinking": thinking, "reasoning_effort": effort})
    other = SimpleNamespace(model="DeepSeek-V4.1-Flash")
    assert reasoning_effort.render(lambda *_, **__: [5], other, {"reasoning_effort": "ultra"}) == [5]
    for effort in reasoning_effort.EFFORTS:
        assert reasoning_effort.render(lambda *_, **__: [5], recipe, {"reasoning_effort": effort}) == [5]


@pytest.mark.parametrize("error", [RuntimeError("too many levels"), ValueError("no such tier")], ids=["other", "named"])
def test_a_body_that_the_renderer_can_not_read_is_refused(error: Exception) -> None:
    """A `response_format` of 200 levels got a 500."""

    def encode(*_: object, **__: object) -> list[int]:
        raise error

    with pytest.raises(ValueError, match=str(error)):
        reasoning_effort.render(encode, SimpleNamespace(model="DeepSeek-V4-Pro"), {"thinking": False})
