"""Item `needles`: a number hidden in the prompt, at chosen prompt lengths.

State that a server loses or misplaces shows at some lengths only: compression groups have 4 and 128 tokens, pages and
windows 128 and 256. So the lengths cover every residue modulo 4 on both sides of each power of two, and every residue
modulo 128 in two ranges. A prompt's length is the one that the server reports; filler words of one token each bring it
to the wanted one.

Wrong answers are compared between residues (Fisher's exact test): a weak model answers wrong at any length, a server
that loses a group at particular ones.
"""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_dsv4.acceptance.client import Refused, Server
from sglang_dsv4.acceptance.plan import Plan
from sglang_dsv4.acceptance.report import Result, green, not_judged, red
from sglang_dsv4.acceptance.served import TOO_WEAK, Served, Weights

NAME = "needles"
WORDS = (
    "the of and to in is that it for was on are as with his they at be this have from one had by word but not what "
    "all were we when your can said there use an each which she do how their if will up other about out many then "
    "them these so some her would make like him into time has look two more write go see way could people my than "
    "first water been call who its now find long down day did get come made may part"
).split()
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ROUNDS = 3
"""Attempts to reach a length."""
ALL_RESIDUES_UP_TO = 65_536
"""Around longer boundaries only the lengths from it on, one for each residue modulo 4, because of their cost."""
SIGNIFICANT = 0.001
"""A dependence on the residue is reported if chance alone makes one as clear this often."""
MOST_WRONG = 0.01
"""The share of wrong answers that released weights may give."""


@dataclass(frozen=True)
class Needle:
    """An answer: the prompt's tokens, the hidden number, and the digits that were said."""

    length: int
    number: str
    said: str

    @property
    def right(self) -> bool:
        """Whether the number was said."""
        return self.said == self.number

    def __str__(self) -> str:
        where = f"{self.length:,} tokens ({self.length % 4} mod 4, {self.length % 128} mod 128)"
        return f"{where}: expected {self.number}, got {self.said or 'no number'}"


def lengths(plan: Plan, longest: int) -> list[int]:
    """The wanted prompt lengths, in tokens, up to the longest."""
    found: set[int] = set()
    for begin, end in plan.every_length:
        found.update(range(begin, end))
    for power in plan.boundaries:
        boundary = 2**power
        if boundary <= ALL_RESIDUES_UP_TO:
            found.update(range(boundary - plan.around, boundary + max(plan.around, 2)))
        else:
            found.update(range(boundary, boundary + 4))
    inside = {length for length in found if length <= longest}
    if inside != found and plan.every_length:
        inside.update(range(longest - 3, longest + 1))
    return sorted(inside)


def prompt(number: str, before: Iterable[str], after: Iterable[str]) -> str:
    """The user's turn, with the number between filler words."""
    return (
        f"Read this text and answer the question at its end.\n{''.join(before)} The secret number of Anna is {number}."
        f"{''.join(after)}\n\nWhat is the secret number of Anna?"
    )


class Asker:
    """Asks for needles; learns how many tokens a prompt has besides its filler."""

    def __init__(self, server: Server, seed: int) -> None:
        """Choose filler words that are one token each, as far as the server tells."""
        self.server, self.seed = server, seed
        self.words = [f" {word}" for word in WORDS if self._is_one_token(f" {word}")] or [" the"]
        self.overhead = self._tokens(0)

    def _is_one_token(self, word: str) -> bool:
        try:
            return len(self.server.tokenize({"prompt": word, "add_special_tokens": False})) == 1
        except Refused:
            return True

    def _tokens(self, words: int) -> int:
        """Prompt tokens with a number of filler words."""
        text = prompt("482917", self.words[:1] * words, ())
        count = self.server.chat(text, max_tokens=1).prompt_tokens
        if count is None:
            raise Refused("/v1/chat/completions", 200, "no usage.prompt_tokens, so that no length is known")
        return count

    def ask(self, length: int, attempt: int) -> Needle | Refused:
        """Return the answer to a prompt of about that length, or the server's refusal."""
        draw = random.Random(f"{self.seed} {length} {attempt}")
        number = str(draw.randrange(100_000, 1_000_000))
        filler = draw.choices(self.words, k=length - self.overhead)
        at = round(draw.choice(DEPTHS) * len(filler))
        try:
            answer = self.server.chat(prompt(number, filler[:at], filler[at:]), max_tokens=32)
        except Refused as error:
            return error
        said = re.search(r"\d[\d ,]*", answer.text)
        digits = re.sub(r"\D", "", said[0]) if said else ""
        return Needle(answer.prompt_tokens or 0, number, digits)

    def learn(self, asked: list[tuple[int, Needle]]) -> None:
        """Correct the overhead by the lengths that the server reported: the median difference."""
        errors = sorted(needle.length - length for length, needle in asked)
        if errors:
            self.overhead += errors[len(errors) // 2]


def answers(server: Server, plan: Plan, longest: int) -> tuple[list[Needle], set[int], dict[int, str]]:
    """Return (the answers, the lengths that were not reached, the server's refusals by wanted length)."""
    asker = Asker(server, plan.seed)
    wanted = lengths(plan, longest)
    missing = {length for length in wanted if length >= asker.overhead}
    too_short = set(wanted) - missing
    found: list[Needle] = []
    refused: dict[int, str] = {}
    for attempt in range(ROUNDS):
        todo = sorted(missing - set(refused))
        results = list(zip(todo, server.together(lambda length, n=attempt: asker.ask(length, n), todo), strict=True))
        asked = [(length, result) for length, result in results if isinstance(result, Needle)]
        refused |= {length: str(result) for length, result in results if isinstance(result, Refused)}
        found += [needle for _, needle in asked]
        missing -= {needle.length for needle in found}
        asker.learn(asked)
    return found, (missing | too_short) - set(refused), refused


def check(server: Server, served: Served, plan: Plan) -> list[Result]:
    """The item: red if numbers are wrong, or wrong at particular lengths; how strictly depends on the weights."""
    if served.weights is Weights.RANDOM:
        return [not_judged(NAME, "random weights")]
    limits = [limit for limit in (served.longest, plan.longest) if limit]
    if not limits:
        return [not_judged(NAME, "the server does not report the longest prompt; give it by --longest")]
    found, unreached, refused = answers(server, plan, min(limits))
    return [judged(found, unreached, refused, served.weights)]


def judged(found: list[Needle], unreached: set[int], refused: dict[int, str], weights: Weights) -> Result:
    """The item's result for these answers; `refused` as of :func:`answers`.

    Refusals of prompts that are longer than every answered one are the server's limit, and no fault.
    """
    wrong = [needle for needle in found if not needle.right]
    patterns = [*dependence(found, 4), *dependence(found, 128)]
    longest = max((needle.length for needle in found), default=0)
    failed = [f"refused, {length:,} tokens: {text}" for length, text in sorted(refused.items()) if length < longest]
    summary = f"{len(found) - len(wrong)} of {len(found)} numbers right, prompts of up to {longest:,} tokens"
    findings = [*patterns, *failed, *map(str, wrong)]
    if beyond := sorted(length for length in refused if length > longest):
        findings.append(f"refused from {beyond[0]:,} tokens on: {refused[beyond[0]]}")
    if unreached:
        some = ", ".join(map(str, sorted(unreached)[:8]))
        findings.append(f"{len(unreached)} lengths were not reached: {some}{' …' if len(unreached) > 8 else ''}")
    figures = {
        "asked": len(found),
        "wrong": [{"length": one.length, "expected": one.number, "got": one.said} for one in wrong],
        "residues_mod_4": len({needle.length % 4 for needle in found}),
        "residues_mod_128": len({needle.length % 128 for needle in found}),
        "longest": longest,
    }
    if not found:
        return not_judged(NAME, "no needle was answered", findings, **figures)
    if patterns or failed or (weights.released and len(wrong) > MOST_WRONG * len(found)):
        return red(NAME, summary, findings, **figures)
    if not weights.released and len(wrong) > TOO_WEAK * len(found):
        summary += ": too many are wrong to tell the model's faults from the server's"
        return not_judged(NAME, summary, findings, **figures)
    return green(NAME, summary, findings, **figures)


def dependence(found: list[Needle], modulus: int) -> list[str]:
    """Residues of the length at which more answers are wrong than chance explains, one line each."""
    wrong = sum(not needle.right for needle in found)
    groups: dict[int, list[Needle]] = defaultdict(list)
    for needle in found:
        groups[needle.length % modulus].append(needle)
    lines = []
    for residue, group in sorted(groups.items()):
        here = sum(not needle.right for needle in group)
        if here and chance_of(here, len(group), wrong, len(found)) < SIGNIFICANT / modulus:
            lines.append(
                f"lengths {residue} mod {modulus}: {here} of {len(group)} wrong; others {wrong - here} of "
                f"{len(found) - len(group)}"
            )
    return lines


def chance_of(wrong_here: int, here: int, wrong: int, total: int) -> float:
    """The probability that `wrong` wrong answers among `total` fall into these `here` at least `wrong_here` times."""
    ways = (math.comb(here, k) * math.comb(total - here, wrong - k) for k in range(wrong_here, min(here, wrong) + 1))
    return sum(ways) / math.comb(total, wrong)
