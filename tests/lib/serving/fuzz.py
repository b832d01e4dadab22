"""Seeded requests over all public routes of a server, made from its own OpenAPI document, many of them invalid.

`Fuzzer.request` draws a whole request: a value follows its schema, or has another type, the limit of a type, or is
empty; a field may be missing or unknown. `Fuzzer.wrong_fields` takes a valid request and puts a value of each kind into
each of its fields in turn, for one prompt and for a batch. Requests are bounded in the tokens of an answer and in
prompts at once.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import requests

from sglang_dsv4.requests.refused import fields

LEFT_OUT = {
    "/abort_request": "ends the requests with known answers, as intended",
    "/pause_generation": "stops the server until it is told to continue",
    "/continue_generation": "belongs to the route above",
    "/release_memory_occupation": "frees the pools until the server is told to allocate them again",
    "/resume_memory_occupation": "belongs to the route above",
    "/update_weights_from_tensor": "pickles of a trainer; test_weight_updates has it",
    "/update_weights_from_ipc": "as the route above",
    "/init_weights_update_group": "waits for a trainer at an address",
    "/init_weights_send_group_for_remote_instance": "as the route above",
    "/send_weights_to_remote_instance": "as the route above",
    "/configure_logging": "writes requests to any folder",
    "/update_weights_from_disk": "loads 20 MB for each try; test_request_guards has it",
    "/freeze_gc": "changes Python's garbage collector, as intended",
    "/flush_cache": "forgets the prefixes of the known answers; test_load has it",
    "/hicache/storage-backend/clear": "deletes stored prefixes of other tests",
}
"""Routes whose purpose is to end, pause or change the server."""

KINDS: dict[str, tuple[Any, ...]] = {
    "null": (None,),
    "boolean": (True, False),
    "integer": (0, 1, -1, 7, 2**31, 2**63),
    "fraction": (0.5, -1.5, 1e39),
    "text": ("", "a", "none", "\u0000", "x" * 3000),
    "empty-list": ([],),
    "empty-object": ({},),
    "list-of-one": ([1], ["a"], [True], [0.5], [None], [{}]),
    "list-of-two": ([1, 2], ["a", "b"], [True, False], [None, None], [{}, {}]),
    "nested-list": ([[1]], [[1], [2]], [["a"]], [[]]),
    "object": ({"a": 1}, {"type": "a"}, {"a": [1]}),
}
"""Values of every type that a field may be given in JSON; most are wrong for it."""
SHORT = {"max_new_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
VALID: dict[str, dict[str, dict[str, Any]]] = {
    "/generate": {
        "one": {"input_ids": [5, 6], "sampling_params": SHORT, "return_logprob": True},
        "batch": {"input_ids": [[5, 6], [7]], "sampling_params": SHORT, "return_logprob": True},
        "two-answers": {"text": "hello", "sampling_params": {**SHORT, "n": 2}},
        "stream": {"input_ids": [5, 6], "sampling_params": SHORT, "stream": True},
    },
    "/v1/completions": {
        "one": {"model": "tiny", "prompt": "hello", "max_tokens": 2},
        "batch": {"model": "tiny", "prompt": [[5, 6], [7]], "max_tokens": 2, "logprobs": 1},
    },
    "/v1/chat/completions": {"one": CHAT, "stream": {**CHAT, "stream": True, "logprobs": True, "n": 2}},
    "/v1/messages": {"one": CHAT},
    "/v1/responses": {"one": {"model": "tiny", "input": "hello", "max_output_tokens": 16}},
    "/api/chat": {"one": {**CHAT, "stream": False, "options": {"num_predict": 2}}},
    "/api/generate": {"one": {"model": "tiny", "prompt": "hello", "stream": False, "options": {"num_predict": 2}}},
    "/v1/score": {"one": {"model": "tiny", "query": "a", "items": ["b"], "label_token_ids": [5, 6]}},
    "/encode": {"one": {"input_ids": [5, 6]}, "batch": {"text": ["a", "b"]}},
    "/tokenize": {"one": {"model": "tiny", "prompt": "hello"}},
    "/detokenize": {"one": {"model": "tiny", "tokens": [5, 6]}},
}
"""Valid bodies, from which one field at a time is changed; other routes get the fields that their schemas require."""

SECOND_NAMES = ("/invocations", "/classify", "/v1/tokenize", "/v1/detokenize")
"""Routes whose bodies and functions are those of another route."""
INTEGERS = (0, 1, -1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, 2**63, 10**30)
NUMBERS = (0.0, 1.0, -1.0, 0.5, 1e-46, 1e38, 1e39, -1e39, 1e308)
TEXTS = ("", "a", "tiny", "\u0000", "é" * 50, "x" * 3000, "{", "(", "none", "auto", "../../etc", "5", "[1]")
TOKENS = ("max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
COUNTS = ("n", "best_of", "top_logprobs", "top_logprobs_num", "logprobs")
FEW = 4
DEPTH = 4
TIMEOUT_S = 600


@dataclass(frozen=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    schema: dict[str, Any] | None  # schema of a JSON body
    parameters: tuple[str, ...]  # names in the path or the query


class Fuzzer:
    """Makes requests; the same seed makes the same requests."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self._schemas = document["components"]["schemas"]
        self._random = random.Random(seed)
        self.routes = [
            Route(
                method.upper(),
                path,
                what.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema"),
                tuple(parameter["name"] for parameter in what.get("parameters", ())),
            )
            for path, methods in sorted(document["paths"].items())
            if path not in LEFT_OUT
            for method, what in sorted(methods.items())
        ]

    def request(self) -> tuple[str, str, dict[str, Any]]:
        """Return method, path and keyword arguments of `requests.request`."""
        pick = self._random
        likely = [route for route in self.routes if route.schema is not None]
        route = pick.choice(likely if pick.random() < 0.85 else self.routes)
        path, query = route.path, {}
        for name in route.parameters:
            value = pick.choice((*TEXTS[:9], *INTEGERS[:6]))
            if "{" + name in path:
                path = path.split("{")[0] + str(value).replace("\u0000", "0").replace("/", "") + path.split("}")[1]
            elif pick.random() < 0.5:
                query[name] = value
        options: dict[str, Any] = {"params": query} if query else {}
        if route.schema is not None:
            body = self._value(route.schema, DEPTH)
            if isinstance(body, dict):
                self._make_sense(body)
            options["json"] = self._limited(route.path, body)
        return route.method, path, options

    def wrong_fields(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Return requests as `request` does: each field of each route with a value of each kind, in a drawn order."""
        made = [
            (route.method, route.path, {"json": self._limited(route.path, body)})
            for route in self.routes
            if route.schema is not None and route.method != "PUT" and route.path not in SECOND_NAMES
            for body in self._changed(route, list(VALID.get(route.path, {"": self._required(route.schema)}).values()))
        ]
        self._random.shuffle(made)
        return made

    def _changed(self, route: Route, valid: list[dict[str, Any]]) -> Iterator[Any]:
        """Yield bodies with one changed field, for each field and kind of value; the last bodies are no objects."""
        pick = self._random
        for kind, values in KINDS.items():
            for name in self._resolved(route.schema).get("properties", {}):
                for body in valid if "list" in kind else [pick.choice(valid)]:
                    yield {**copy.deepcopy(body), name: pick.choice(values)}
            for name in (*fields.sampling_types(), *fields.SET_BY_SGLANG) if "sampling_params" in valid[0] else ():
                body = copy.deepcopy(pick.choice(valid))
                body["sampling_params"][name] = pick.choice(values)
                yield body
            yield pick.choice(values)

    def _required(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a body with the required fields of a schema, of their types."""
        schema = self._resolved(schema)
        properties = schema.get("properties", {})
        return {name: self._value(properties[name], DEPTH, strange=0.0) for name in schema.get("required", ())}

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the schema of an object that a reference or an alternative leads to."""
        if "$ref" in schema:
            return self._schemas[schema["$ref"].rsplit("/", 1)[1]]
        found = [self._resolved(one) for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, ())]
        return next((one for one in found if "properties" in one), schema)

    def _limited(self, path: str, body: Any) -> Any:
        """Return a body that makes no request run for minutes, and writes no profile."""
        if path == "/start_profile" and not isinstance(body, dict):
            body = {"num_steps": body}  # without a body, a profile begins
        body = _bounded(body)
        if path == "/start_profile" and isinstance(body.get("output_dir"), (str, type(None))):
            body["output_dir"] = "/proc/nope"
        return body

    def _make_sense(self, body: dict[str, Any]) -> None:
        """Often fill in valid fields that a route needs before it looks at the others."""
        pick = self._random
        if pick.random() < 0.3:
            return
        if "input_ids" in body or "text" in body:
            for name in ("text", "input_ids", "input_embeds"):
                body.pop(name, None)
            name = pick.choice(("text", "input_ids"))
            ids = [pick.randrange(3, 900) for _ in range(pick.choice((1, 3, 300)))]
            body[name] = "hello" if name == "text" else ids
            if not isinstance(body.get("sampling_params"), dict) or pick.random() < 0.5:
                body["sampling_params"] = {}
        if "messages" in body and pick.random() < 0.8:
            body["messages"] = [{"role": "user", "content": "hello"}]
        if "prompt" in body and pick.random() < 0.8:
            body["prompt"] = "hello"
        if "model" in body and pick.random() < 0.8:
            body["model"] = "tiny"
        for name in list(body):  # with fewer invalid fields, a route more often gets to one of them
            if name not in ("text", "input_ids", "sampling_params", "messages", "prompt", "model") and (
                pick.random() < 0.7
            ):
                del body[name]

    def _value(self, schema: dict[str, Any], depth: int, strange: float = 0.12) -> Any:
        pick = self._random
        if pick.random() < strange:
            return self._strange(depth)
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rsplit("/", 1)[1]]
        for several in ("anyOf", "oneOf", "allOf"):
            if schema.get(several):
                return self._value(pick.choice(schema[several]), depth)
        if "enum" in schema:
            return pick.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        if kind == "object" or "properties" in schema:
            return self._object(schema, depth)
        if kind == "array":
            items = schema.get("items", {})
            return [self._value(items, depth - 1) for _ in range(pick.choice((0, 1, 1, 2, 3)) if depth > 0 else 0)]
        plain = {"string": TEXTS, "integer": INTEGERS, "number": NUMBERS, "boolean": (True, False), "null": (None,)}
        return pick.choice(plain[kind]) if kind in plain else self._strange(depth)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        pick, made = self._random, {}
        required = set(schema.get("required", ()))
        for name, inner in schema.get("properties", {}).items():
            if pick.random() < (0.95 if name in required else 0.3 if depth > 0 else 0.0):
                made[name] = self._value(inner, depth - 1)
        if not schema.get("properties") and depth > 0:  # a free-form object: sampling fields among others
            for name in pick.sample(SAMPLING, pick.choice((0, 1, 2, 3))):
                made[name] = self._strange(depth - 1)
        if pick.random() < 0.05:
            made["nobody_knows"] = self._strange(0)
        return made

    def _strange(self, depth: int) -> Any:
        pick = self._random
        choices: tuple[Any, ...] = (None, True, pick.choice(INTEGERS), pick.choice(NUMBERS), pick.choice(TEXTS), [], {})
        if depth > 0:
            choices += ([self._strange(depth - 1)], {"a": self._strange(depth - 1)})
        return pick.choice(choices)


SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("min_new_tokens", "stop", "stop_token_ids", "stop_regex", "json_schema", "regex", "ebnf", "structural_tag"),
    *("n", "ignore_eos", "skip_special_tokens", "no_stop_trim", "logit_bias", "sampling_seed", "custom_params"),
    *("spaces_between_special_tokens", "stream_interval", "max_new_tokens"),
)


def _bounded(value: Any) -> Any:
    """Return a value that makes no valid request run for minutes: few tokens and few answers."""
    if isinstance(value, list):
        return [_bounded(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {name: _bounded(item) for name, item in value.items()}
    if isinstance(made.get("forward_sleep_time"), (int, float)) and 0 < made["forward_sleep_time"] <= 60:
        made["forward_sleep_time"] = 0
    for name in (*TOKENS, *COUNTS):
        if isinstance(made.get(name), int) and FEW < made[name] < 2**31:
            made[name] = FEW
    if "sampling_params" in made or "text" in made or "input_ids" in made:
        parameters = made.get("sampling_params")
        if isinstance(parameters, dict):
            if parameters.get("max_new_tokens") is None:
                parameters["max_new_tokens"] = FEW
        elif parameters is None:
            made["sampling_params"] = {"max_new_tokens": FEW}
    if "messages" in made or "prompt" in made or "input" in made:
        if made.get("max_tokens") is None:
            made["max_tokens"] = FEW
        made.setdefault("max_output_tokens", FEW)
        for name in ("max_completion_tokens", "max_output_tokens"):
            if name in made and made[name] is None:
                del made[name]
        if isinstance(made.get("options"), dict) or "prompt" in made:
            options = made.get("options")
            made["options"] = {**(options if isinstance(options, dict) else {}), "num_predict": FEW}
    return made


def send(url: str, method: str, path: str, options: dict[str, Any]) -> requests.Response:
    """Send one request and read its whole answer."""
    return requests.request(method, url + path, timeout=TIMEOUT_S, **options)
