"""Facts on a server: the model, whose weights they are, the longest prompt, and whether it promises the same bits.

The weights decide how strictly an item is judged. A release must answer right, so that a wrong answer is the server's
fault. Other trained weights may answer wrong for reasons of their own, and random ones say nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang_dsv4.acceptance.client import Refused, Server
from sglang_dsv4.acceptance.report import SERVER, Result, green, red

BOS, EOS, THINK_END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "</think>"
RELEASED_IDS = [0, 1, 128822]
"""Ids of these three in the released tokenizer (specification, section 8)."""
TOO_WEAK = 0.1
"""The share of wrong answers above which trained weights that are no release say nothing on the server."""
QUESTIONS = (
    ("What is 17 + 25?", "42"),
    ("What is the capital of France?", "paris"),
    ("Repeat this: river apple water", "river apple water"),
)
"""Plain questions, and the words that a right answer to each has. They do not prescribe the form of the answer, because
a small model would not understand such an instruction."""


class Weights(Enum):
    """The weights that a server serves, as `--weights` names them."""

    FLASH_APRIL = "flash-april"
    FLASH_0731 = "flash-0731"
    PRO_APRIL = "pro-april"
    PRO_0813 = "pro-0813"
    RELEASE = "release"  # one of these, unknown which
    OTHER = "other"  # trained
    RANDOM = "random"

    @property
    def released(self) -> bool:
        """Whether these are weights that DeepSeek has released."""
        return self not in (Weights.OTHER, Weights.RANDOM)


class WrongModel(Exception):
    """The server does not serve DeepSeek-V4, or not under the name that was given."""


@dataclass(frozen=True)
class Served:
    """Facts on a server.

    Attributes:
        model: the name that requests give.
        weights: whose weights these are.
        why: how `weights` is known.
        longest: tokens of the longest prompt; None if the server does not say.
        promise: why a request's bits must not depend on other requests or on the cache; None if nothing promises it.
        drafts: the speculative algorithm; None if there is none, or if the server does not say.
        engine: for the report.
    """

    model: str
    weights: Weights
    why: str
    longest: int | None
    promise: str | None
    drafts: str | None
    engine: str


def look(server: Server, model: str | None, weights: str) -> tuple[Served, Result]:
    """The facts on a server, and the item `server`; `server.model` is set.

    Args:
        server: the server.
        model: the name to ask for; None: the first that the server lists.
        weights: a value of :class:`Weights`, or "auto".

    Raises:
        Unreachable: no server answers.
        Refused: the server has no /v1/models, or answers no chat.
        WrongModel: it serves another model.
    """
    listed = _models(server)
    names = [entry["id"] for entry in listed]
    if model is not None and model not in names:
        raise WrongModel(f"{server.url} serves {', '.join(names)}, not {model}")
    server.model = model or names[0]
    entry = listed[names.index(server.model)]
    about, arguments = _optional(server, "/model_info"), _optional(server, "/server_info")
    path = str(about.get("model_path") or entry.get("root") or server.model)
    _require_v4(server, path, about)
    found, why = (Weights(weights), "--weights") if weights != "auto" else _weights(server, path, arguments)
    served = Served(
        model=server.model,
        weights=found,
        why=why,
        longest=_longest(entry, arguments),
        promise=_promise(arguments),
        drafts=arguments.get("speculative_algorithm"),
        engine=f"SGLang {arguments['version']}" if "version" in arguments else "an engine without /server_info",
    )
    return served, _item(server, served)


def _models(server: Server) -> list[dict[str, Any]]:
    body = server.get("/v1/models")
    listed = body.get("data") if isinstance(body, dict) else None
    if not listed or not all(isinstance(entry, dict) and isinstance(entry.get("id"), str) for entry in listed):
        raise Refused("/v1/models", 200, f"expected a list of models as `data`, got {str(body)[:200]}")
    return listed


def _optional(server: Server, path: str) -> dict[str, Any]:
    """A route's JSON; empty if the server lacks the route."""
    try:
        body = server.get(path)
    except Refused:
        return {}
    return body if isinstance(body, dict) else {}


def _require_v4(server: Server, path: str, about: dict[str, Any]) -> None:
    """Refuse a server that says that it serves another architecture; by the name only if it says nothing else."""
    kinds = [*(about.get("architectures") or ()), about.get("model_type") or ""]
    text = " ".join(map(str, kinds)).strip() or path
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    v41 = "deepseekv41" in plain
    if v41 or (kinds != [""] and "deepseekv4" not in plain):
        raise WrongModel(f"{server.url} serves {text} ({path}); these checks are for DeepSeek-V4")


def _weights(server: Server, path: str, arguments: dict[str, Any]) -> tuple[Weights, str]:
    if arguments.get("load_format") == "dummy":
        return Weights.RANDOM, "--load-format dummy"
    if _has_released_tokenizer(server, path):
        return _release_of(path)
    right = sum(_is_right(server, *question) for question in QUESTIONS)
    if right:
        return Weights.OTHER, f"not the released tokenizer; {right} of {len(QUESTIONS)} plain questions answered"
    return Weights.RANDOM, f"not the released tokenizer, and none of {len(QUESTIONS)} plain questions answered"


def _has_released_tokenizer(server: Server, path: str) -> bool:
    """Whether the tokenizer is the release's; without the route, whether the model has a release's name."""
    try:
        return server.tokenize({"prompt": BOS + EOS + THINK_END, "add_special_tokens": False}) == RELEASED_IDS
    except Refused:
        return "v4-flash" in path.lower() or "v4-pro" in path.lower()


def _release_of(path: str) -> tuple[Weights, str]:
    name = path.lower().rstrip("/")
    if "-base" in name:
        return Weights.OTHER, f"a base model, by the name {path}"
    for part, later, by_date, april in (
        ("flash", "0731", Weights.FLASH_0731, Weights.FLASH_APRIL),
        ("pro", "0813", Weights.PRO_0813, Weights.PRO_APRIL),
    ):
        if re.search(rf"v4-{part}\b", name):
            return (by_date if later in name else april), f"the released tokenizer, and the name {path}"
    return Weights.RELEASE, f"the released tokenizer; the name {path} does not say which release (--weights does)"


def _is_right(server: Server, question: str, answer: str) -> bool:
    return re.search(rf"\b{answer}\b", server.chat(question, max_tokens=32).text.lower()) is not None


def _longest(entry: dict[str, Any], arguments: dict[str, Any]) -> int | None:
    """Prompt tokens that leave room for a short answer."""
    limits = [entry.get("max_model_len"), arguments.get("max_req_input_len")]
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(known) - 64 if known else None


def _promise(arguments: dict[str, Any]) -> str | None:
    if arguments.get("enable_deterministic_inference"):
        return "--enable-deterministic-inference"
    if arguments.get("device") == "cpu" and (arguments.get("tp_size") or 1) <= 2:
        return "a CPU server of sglang-dsv4"  # no other engine serves the model on a CPU (docs/determinism.md)
    return None


def _item(server: Server, served: Served) -> Result:
    """The item `server`: it answers; a release answers a plain question."""
    facts = {
        "model": served.model,
        "weights": served.weights.value,
        "longest_prompt": served.longest,
        "promise": served.promise,
        "drafts": served.drafts,
        "engine": served.engine,
    }
    findings = [
        f"weights: {served.weights.value} ({served.why})",
        f"prompts of up to {served.longest:,} tokens" if served.longest else "the longest prompt is not reported",
        f"the same bits are promised by {served.promise}" if served.promise else "the same bits are not promised",
        f"drafts: {served.drafts}" if served.drafts else "drafts: none, or not reported",
    ]
    summary = f"{served.model} on {served.engine}"
    if not served.weights.released:
        server.chat("Hello", max_tokens=1)
        return green(SERVER, summary, findings, **facts)
    wrong = [question for question in QUESTIONS if not _is_right(server, *question)]
    if wrong:
        said = [f"{question!r} was not answered with {answer!r}" for question, answer in wrong]
        return red(SERVER, f"{summary}: released weights answer plain questions wrong", said + findings, **facts)
    return green(SERVER, summary, findings, **facts)
