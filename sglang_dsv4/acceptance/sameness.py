"""Items `hits`, `batch` and `drafts`: an answer is the same after a prefix hit, among other requests, without drafts.

Where the server promises the same bits, tokens and log-probabilities must be equal. Elsewhere rounding may differ, and
an answer may change where two tokens were about equally likely. With trained weights an answer must not change where
one was clearly likelier: there the item is red without a promise, too.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.acceptance.client import Answer, Refused, Server
from sglang_dsv4.acceptance.needles import WORDS
from sglang_dsv4.acceptance.plan import Plan
from sglang_dsv4.acceptance.report import Result, green, not_judged, red
from sglang_dsv4.acceptance.served import Served, Weights

HITS, BATCH, DRAFTS = "hits", "batch", "drafts"
CLEAR = 1.0
"""Difference of log-probabilities that is not put down to rounding: one token was e times as likely. A convention:
nothing promises a bound on what rounding does."""
SHORTEST_WORDS, LONGEST_WORDS = 280, 2400
"""Filler words of a prompt: from a little more than a page of 256 tokens on, since no hit is shorter than a page."""


@dataclass(frozen=True)
class Difference:
    """Two answers to the same prompt that differ.

    Attributes:
        where: which two, for the report.
        text: how they differ.
        clear: whether another token was taken although the first answer's was likelier by `CLEAR` or more, or a
            token's log-probability moved by as much.
    """

    where: str
    text: str
    clear: bool


def difference(where: str, one: Answer, other: Answer) -> Difference | None:
    """The difference of two answers; None if texts, calls, tokens and log-probabilities are equal."""
    pairs = list(zip(one.tokens, other.tokens, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a.text != b.text), len(pairs))
    off = max((abs(a.logprob - b.logprob) for a, b in pairs[:at]), default=0.0)
    said = [f"log-probabilities of equal tokens differ by up to {off:.2g}"] if off else []
    gap = 0.0
    if at < len(pairs):
        a, b = pairs[at]
        top = dict(a.top)
        gap = a.logprob - top.get(b.text, min(top.values(), default=a.logprob))
        said.append(f"token {at} is {a.text!r}, then {b.text!r}, which was less likely by {gap:.2f}")
    elif (one.text, one.calls, len(one.tokens)) != (other.text, other.calls, len(other.tokens)):
        said.append(f"{one.text[:60]!r}, then {other.text[:60]!r}")
    return Difference(where, "; ".join(said), max(off, gap) >= CLEAR) if said else None


def filler(words: int, draw: random.Random) -> str:
    """A text of that many common words."""
    return " ".join(draw.choices(WORDS, k=words))


def _ask(server: Server, messages: list[dict[str, Any]], plan: Plan, **options: Any) -> Answer:
    """A greedy answer of exactly `answer_tokens` tokens with log-probabilities, if the server gives them."""
    wanted = {"max_tokens": plan.answer_tokens, "ignore_eos": True, "logprobs": True, "top_logprobs": 5}
    return server.chat(messages, **wanted, **options)


def _judged(
    name: str, summary: str, served: Served, differences: list[Difference], compared: int, notes: list[str]
) -> Result:
    findings = [f"{one.where}: {one.text}" for one in differences] + notes
    figures = {"compared": compared, "different": len(differences), "clear": sum(one.clear for one in differences)}
    if not compared:
        return not_judged(name, summary, notes, **figures)
    if not differences:
        return green(name, f"{compared} answers equal, {summary}", findings, **figures)
    text = f"{len(differences)} of {compared} answers differ, {summary}"
    if served.promise is not None:
        return red(name, f"{text}, although {served.promise} promises the same bits", findings, **figures)
    if figures["clear"] and served.weights is not Weights.RANDOM:
        return red(name, f"{text}, {figures['clear']} of them by more than rounding explains", findings, **figures)
    why = "random weights" if served.weights is Weights.RANDOM else "all of them where rounding may decide"
    return not_judged(name, f"{text}, {why}, and the server does not promise the same bits", findings, **figures)


# ---- after a hit


def check_hits(server: Server, served: Served, plan: Plan) -> list[Result]:
    """The item `hits`: conversations cold, repeated, and continued after a hit.

    Cold prompts begin with a word of this run. A continued conversation is asked cold under a `cache_salt` of its own,
    where the server reports that this kept it from the cache.
    """
    run = secrets.token_hex(4)
    pairs: list[Pair] = []
    for index in range(plan.conversations):  # one after another: a batch must not be what makes them differ
        try:
            pairs += _conversation(server, plan, index, run)
        except Refused as error:
            return [red(HITS, f"conversation {index} was refused: {error}")]
    compared = [pair for pair in pairs if not pair.left_out]
    counts = [f"{sum(pair.kind == kind for pair in compared)} {kind}" for kind in ("repeated", "continued")]
    found = [pair.difference for pair in compared if pair.difference is not None]
    notes = sorted({f"{pair.kind} conversations not compared: {pair.left_out}" for pair in pairs if pair.left_out})
    summary = f"{' and '.join(counts)} conversations" if compared else "no hit took place that the server reports"
    return [_judged(HITS, summary, served, found, len(compared), notes)]


@dataclass(frozen=True)
class Pair:
    """A prompt's answer after a hit and its cold one: their difference, or why they were not compared."""

    kind: str
    difference: Difference | None = None
    left_out: str = ""


def _conversation(server: Server, plan: Plan, index: int, run: str) -> list[Pair]:
    """A prompt repeated, then continued.

    Raises:
        Refused
    """
    draw = random.Random(f"{plan.seed} {index}")
    span = LONGEST_WORDS - SHORTEST_WORDS
    words = SHORTEST_WORDS + span * index // max(plan.conversations, 24) + draw.randrange(4)
    messages = [{"role": "user", "content": f"{run}-{index} {filler(words, draw)} Go on."}]
    cold = _ask(server, messages, plan)
    repeated = _ask(server, messages, plan)
    messages += [{"role": "assistant", "content": cold.text}, {"role": "user", "content": "And then?"}]
    continued = _ask(server, messages, plan)
    salted = _ask(server, messages, plan, cache_salt=f"{run}-{index}")
    name = f"conversation {index}"
    return [_pair("repeated", name, cold, repeated), _pair("continued", name, salted, continued)]


def _pair(kind: str, name: str, cold: Answer, hit: Answer) -> Pair:
    if hit.cached_tokens is None:
        return Pair(kind, left_out="the server does not report cached tokens (SGLang: --enable-cache-report)")
    if not hit.cached_tokens:
        return Pair(kind, left_out="they hit nothing")
    if cold.cached_tokens:
        return Pair(kind, left_out="their prompt was in the cache before, and `cache_salt` did not keep it out")
    where = f"{name} of {hit.prompt_tokens} tokens, {kind}, {hit.cached_tokens} cached"
    return Pair(kind, difference(where, cold, hit))


# ---- in a batch


def check_batch(server: Server, served: Served, plan: Plan) -> list[Result]:
    """The item `batch`: prompts of many lengths one after another, then all at once.

    Both times a prompt is cold: it has a `cache_salt` for each, and begins with a word of this run.
    """
    if server.concurrency == 1:
        return [not_judged(BATCH, "--concurrency 1 sends no two requests at a time")]
    run, draw = secrets.token_hex(4), random.Random(f"{plan.seed} batch")
    prompts = []
    for index in range(plan.batch):
        words = 3 + 37 * index % 331 + (1000 if index % 8 == 7 else 0)
        prompts.append([{"role": "user", "content": f"{run}-{index} {filler(words, draw)} Go on."}])

    def ask(messages: list[dict[str, Any]], salt: str) -> Answer:
        return _ask(server, messages, plan, cache_salt=f"{run} {salt}")

    try:
        alone = [ask(one, "alone") for one in prompts]
        together = server.together(lambda one: ask(one, "together"), prompts)
    except Refused as error:
        return [red(BATCH, f"a request was refused: {error}")]
    cached = sum(bool(answer.cached_tokens) for answer in together)
    notes = [f"{cached} prompts were cached the second time: `cache_salt` did not keep them out"] if cached else []
    summary = f"alone and {min(server.concurrency, plan.batch)} at a time"
    return [_judged(BATCH, summary, served, _differences(alone, together), len(prompts), notes)]


def _differences(one: list[Answer], other: list[Answer]) -> list[Difference]:
    pairs = enumerate(zip(one, other, strict=True))
    found = [difference(f"prompt {i} of {a.prompt_tokens} tokens", a, b) for i, (a, b) in pairs]
    return [this for this in found if this is not None]


# ---- without drafts


def check_drafts(server: Server, served: Served, plan: Plan) -> list[Result]:
    """The item `drafts`: answers of this server and of one without drafts, if one is given."""
    other = plan.without_drafts
    if other is None:
        why = "the server has no drafts, or does not report them"
        if served.drafts is not None:
            why = f"drafts ({served.drafts}) can't be switched off for a request: start a server of the same weights "
            why += "without drafts and give its URL by --without-drafts"
        return [not_judged(DRAFTS, why)]
    draw = random.Random(f"{plan.seed} drafts")
    prompts = [
        [{"role": "user", "content": f"{filler(5 + 41 * index % 701, draw)} Go on."}] for index in range(plan.batch)
    ]
    try:
        with_drafts = server.together(lambda one: _ask(server, one, plan), prompts)
        without = other.together(lambda one: _ask(other, one, plan), prompts)
    except Refused as error:
        return [red(DRAFTS, f"a request was refused: {error}")]
    notes = [] if served.drafts else [f"{server.url} does not report that it has drafts"]
    found = _differences(without, with_drafts)
    return [_judged(DRAFTS, f"{served.drafts or 'drafts'} and none", served, found, len(prompts), notes)]
