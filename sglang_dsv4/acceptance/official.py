"""Item `official`: greedy continuations of the hosted V4-Flash, token by token.

The answers are in `official_vectors`. They were captured at temperature 0, where the API reports 0 for the chosen
token's log-probability and -9999 for all others: they bound no log-probability of a server. The item judges tokens and
prompt lengths, and reports what the server thinks of the official tokens.
"""

from __future__ import annotations

import math

from sglang_dsv4.acceptance.client import Refused, Server
from sglang_dsv4.acceptance.official_vectors import VECTORS, Vector
from sglang_dsv4.acceptance.plan import Plan
from sglang_dsv4.acceptance.report import Result, green, not_judged, red
from sglang_dsv4.acceptance.served import Served, Weights

NAME = "official"
NEAR = math.log(2)
"""An official token that is not the server's, but at least half as likely, may be rounding's doing."""
MOST_NEAR = 1
"""Continuations that may leave the official one at such a token."""


def check(server: Server, served: Served, plan: Plan) -> list[Result]:
    """The item: red if the server's greedy answers are others; judged with the weights of April's V4-Flash only."""
    if served.weights is not Weights.FLASH_APRIL:
        return [
            not_judged(
                NAME,
                f"the continuations are of V4-Flash of April 2026, the weights are {served.weights.value} "
                f"({served.why}); --weights flash-april if they are these",
            )
        ]
    faults, near, figures = [], [], []
    for vector in VECTORS:
        try:
            answer = server.chat(vector.prompt, max_tokens=vector.max_tokens, logprobs=True, top_logprobs=20)
        except Refused as error:
            faults.append(f"{vector.name}: {error}")
            continue
        if answer.prompt_tokens not in (None, vector.prompt_tokens):
            faults.append(f"{vector.name}: {answer.prompt_tokens} prompt tokens, officially {vector.prompt_tokens}")
        said = [token.text for token in answer.tokens]
        if not said:
            if answer.text.strip() != "".join(vector.tokens).strip():
                faults.append(f"{vector.name}: {answer.text!r}, officially {''.join(vector.tokens)!r}")
            continue
        equal = next((i for i, token in enumerate(vector.tokens) if said[i : i + 1] != [token]), len(vector.tokens))
        logprobs = [token.logprob for token in answer.tokens[:equal]]
        figures.append({"name": vector.name, "equal": equal, "of": len(vector.tokens), "logprobs": logprobs})
        if equal < len(vector.tokens):
            gap, text = _departure(vector, equal, answer.tokens[equal : equal + 1])
            (near if gap <= NEAR else faults).append(f"{vector.name}: {text}")
    tokens = sum(row["equal"] for row in figures)
    means = [value for row in figures for value in row["logprobs"]]
    mean = sum(means) / len(means) if means else 0.0
    summary = f"{tokens} of {sum(len(one.tokens) for one in VECTORS)} official tokens"
    summary += f", mean log-probability {mean:.3f}" if means else ", log-probabilities not reported"
    made = red if faults or len(near) > MOST_NEAR else green
    return [made(NAME, summary, faults + near, continuations=figures, mean_logprob=mean)]


def _departure(vector: Vector, index: int, tokens: tuple) -> tuple[float, str]:
    """How much likelier the server's token is than the official one (infinite if it is not among the 20), in words."""
    official = vector.tokens[index]
    if not tokens:
        return math.inf, f"ends before token {index}, {official!r}"
    (token,) = tokens
    top = dict(token.top)
    gap = token.logprob - top[official] if official in top else math.inf
    how = f"likelier by {gap:.2f}" if math.isfinite(gap) else "and the official one is not among its 20 likeliest"
    return gap, f"token {index} is {token.text!r}, {how}, officially {official!r}"
