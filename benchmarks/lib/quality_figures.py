"""Figures of a server's log-probabilities against a reference's: perplexity, KL divergence, agreement, and a bound.

`quality.py` says what they mean.
"""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOP = 64
"""Tokens of which a server gives the log-probability at each position."""
FLOOR = 1e-5
"""Nats of KL for rounding where the plain computation has none, as a server in fp32."""
SMALL_REST, ROUNDING = 1e-3, 1e-7
"""Probability of all other tokens below which it is left out, and the rounding of a sum of fp32 probabilities."""
SHORTEST = 128
"""Tokens of the shortest window: one group of an HCA layer."""
DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"
FIXED_TEXT = (Path(__file__).resolve().parents[2] / "LICENSE",)
"""A text on which the trained checkpoint was not trained, and which does not change, as the documents do: figures of
different commits have the same inputs."""


@dataclass(frozen=True)
class Scores:
    """Log-probabilities at the positions that predict tokens 1.. of a window.

    Attributes:
        own: [tokens - 1] fp32, of the text's next token.
        top_ids: [tokens - 1, TOP] int64, the likeliest tokens.
        top: [tokens - 1, TOP] fp32, theirs.
    """

    own: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(frozen=True)
class Row:
    """The figures of a server, over all windows; nats."""

    name: str
    perplexity: float
    kl: float
    kl_p99: float
    agreement: float


def scores_of(logprobs: Tensor, window: Tensor) -> Scores:
    """A computation's scores.

    Args:
        logprobs: [tokens, vocab] fp32 at every position.
        window: [tokens] int64.
    """
    before = logprobs[:-1]
    top = before.topk(min(TOP, before.shape[-1]))
    return Scores(before.gather(1, window[1:, None])[:, 0], top.indices, top.values)


def divergence(reference: Tensor, scores: Scores) -> Tensor:
    """KL of each position, [tokens - 1] fp64, over the scores' tokens and the rest.

    Where the rest is less likely than `SMALL_REST` in both, it is left out and the others are normalised: the
    difference of 1 and a sum of fp32 probabilities is mostly rounding there.

    Args:
        reference: [tokens, vocab] fp32 log-probabilities.
        scores: a server's.
    """
    p = reference[:-1].double().gather(1, scores.top_ids)
    q = scores.top.double()
    # Fp32 log-probabilities of all tokens may add up to more than 1.
    p_rest, q_rest = ((1 - part.exp().sum(1)).clamp(min=ROUNDING) for part in (p, q))
    with_rest = (p.exp() * (p - q)).sum(1) + p_rest * (p_rest / q_rest).log()
    p, q = p.log_softmax(1), q.log_softmax(1)
    without_rest = (p.exp() * (p - q)).sum(1)
    return torch.where(torch.maximum(p_rest, q_rest) < SMALL_REST, without_rest, with_rest).clamp(min=0)


def row(name: str, references: Sequence[Tensor], scores: Sequence[Scores]) -> Row:
    """The figures of a computation over all windows."""
    kl = torch.cat([divergence(one, score) for one, score in zip(references, scores, strict=True)])
    own = torch.cat([score.own for score in scores]).double()
    same = [one[:-1].argmax(1) == score.top_ids[:, 0] for one, score in zip(references, scores, strict=True)]
    return Row(
        name,
        perplexity=math.exp(-own.mean()),
        kl=float(kl.mean()),
        kl_p99=float(kl.quantile(0.99)),
        agreement=float(torch.cat(same).double().mean()),
    )


def bound_of(plain: Row) -> float:
    """The largest mean KL that a server may have."""
    return 2 * plain.kl + FLOOR


def generate(url: str, tokens: Sequence[int], new: int, start: int | None = None, **body: object) -> dict[str, Any]:
    """A server's greedy answer of `new` tokens, with log-probabilities (SGLang's /generate).

    Args:
        url: of the server.
        tokens: the prompt.
        new: tokens of the answer; an end token does not end it.
        start: first position from which the prompt's log-probabilities are wanted; None: of no position.
        body: further fields of the request.

    Raises:
        OSError: no server answers, or it refuses the request.
    """
    body |= {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": -1 if start is None else start,
        "top_logprobs_num": TOP,
    }
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/generate", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=900) as response:
        return json.load(response)


def ask(url: str, window: Tensor, start: int = 0) -> tuple[Scores, dict[str, Any]]:
    """A server's scores of a window, or of its part that follows position `start`; and the answer's `meta_info`.

    Raises:
        OSError: as :func:`generate`.
        ValueError: the answer lacks the log-probabilities.
    """
    info = generate(url, window.tolist(), 1, start)["meta_info"]
    own, top = info.get("input_token_logprobs"), info.get("input_top_logprobs")
    expected = len(window) - start
    if not own or not top or len(own) != expected or len(top) != expected:
        raise ValueError(
            f"{url}/generate: expected log-probabilities of {expected} prompt tokens, got {len(own or ())}"
        )
    return scores_from(own[1:], top[1:]), info


def scores_from(own: Sequence[Sequence[Any]], top: Sequence[Sequence[Sequence[Any]]]) -> Scores:
    """Scores from SGLang's lists: of each token [log-probability, id, …], and of the likeliest tokens there."""
    return Scores(
        torch.tensor([entry[0] for entry in own]),
        torch.tensor([[entry[1] for entry in entries] for entries in top]),
        torch.tensor([[entry[0] for entry in entries] for entries in top]),
    )


def windows(checkpoint: Path, texts: Sequence[Path], tokens: int, count: int) -> list[Tensor]:
    """`count` windows of `tokens` ids, spread over the texts.

    Raises:
        ValueError: the texts are too short.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = "\n\n".join(path.read_text() for path in texts)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) < tokens * count:
        raise ValueError(f"{count} windows of {tokens} tokens need {tokens * count} tokens, the text has {len(ids)}")
    step = len(ids) // count
    return [torch.tensor(ids[step * i : step * i + tokens]) for i in range(count)]
