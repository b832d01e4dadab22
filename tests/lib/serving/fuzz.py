"""Seeded random requests over all public routes of a server, made from its own OpenAPI document, many of them invalid.

A value follows its schema, or has another type, the limit of a type, or is empty; a field may be missing or unknown.
Requests are bounded in the tokens of an answer and in prompts at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import requests

LEFT_OUT = {
    "/abort_request": "ends the requests with known answers, as intended",
    "/pause_generation": "stops the server until it is told to continue",
    "/continue_generation": "belongs to the route above",
    "/slow_down": "slows every step down",
    "/release_memory_occupation": "frees the pools until the server is told to allocate them again",
    "/resume_memory_occupation": "belongs to the route above",
    "/update_weights_from_tensor": "pickles of a trainer; test_weight_updates has it",
    "/update_weights_from_ipc": "as the route above",
    "/init_weights_update_group": "waits for a trainer at an address",
    "/init_weights_send_group_for_remote_instance": "as the route above",
    "/send_weights_to_remote_instance": "as the route above",
    "/configure_logging": "writes requests to any folder",
    "/start_profile": "a profile slows down all later requests; test_request_guards has it",
    "/update_weights_from_disk": "loads 20 MB for each try; test_request_guards has it",
    "/set_internal_state": "changes the scheduler's limits, as intended",
    "/freeze_gc": "changes Python's garbage collector, as intended",
    "/flush_cache": "forgets the prefixes of the known answers; test_load has it",
    "/hicache/storage-backend/clear": "deletes stored prefixes of other tests",
}
"""Routes whose purpose is to end, pause or change the server."""

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
            options["json"] = _bounded(body)
        return route.method, path, options

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

    def _value(self, schema: dict[str, Any], depth: int) -> Any:
        pick = self._random
        if pick.random() < 0.12:
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
    for name in (*TOKENS, *COUNTS):
        if isinstance(made.get(name), int) and FEW < made[name] < 2**31:
            made[name] = FEW
    if "sampling_params" in made or "text" in made or "input_ids" in made:
        parameters = made.get("sampling_params")
        if isinstance(parameters, dict):
            parameters.setdefault("max_new_tokens", FEW)
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
