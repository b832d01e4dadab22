"""Perplexity and KL divergence of running servers against a dense reference in fp32, given the checkpoint.

    PYTHONPATH=tests/lib python benchmarks/quality.py CHECKPOINT --server ours=http://127.0.0.1:30000 \\
        --server builtin=http://127.0.0.1:30001 [--text FILE …] [--tokens 1024] [--windows 4] [--dtype bfloat16] \\
        [--quantisers full|off] [--out FILE.json]

The reference (`tests/lib/model/reference.py`) is the specification's equations over a whole sequence, without a cache,
with the release's quantisers. It holds all weights in fp32 on the CPU: for small checkpoints. Servers give the
log-probabilities of a prompt's tokens and of the likeliest `TOP` ones at each position (SGLang's /generate).

    KL           sum over the server's likeliest tokens and the rest of p log(p / q), p the reference's, q the server's:
                 a lower bound of the divergence over the whole vocabulary, mean and 99th percentile over positions
    perplexity   exp of the mean negative log-probability of the text's tokens
    agreement    share of positions at which server and reference prefer the same token

The bound is derived: the row "plain" is the same reference with activations in the server's dtype, as PyTorch computes
it. A server's mean KL may be twice that, and `FLOOR` more. Exit status 1 if one is beyond.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from model.oracle import read_dequantised
from model.reference import FULL, OFF, Quant, Reference
from torch import Tensor

TOP = 64
"""Tokens of which a server gives the log-probability at each position."""
FLOOR = 1e-5
"""Nats of KL for rounding where the plain computation has none, as a server in fp32."""
SMALL_REST, ROUNDING = 1e-3, 1e-7
"""Probability of all other tokens below which it is left out, and the rounding of a sum of fp32 probabilities."""
SHORTEST = 128
"""Tokens of the shortest window: one group of an HCA layer."""
DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"


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


def compared(
    config: dict[str, Any],
    weights: dict[str, Tensor],
    texts: Sequence[Tensor],
    servers: dict[str, str],
    quant: Quant,
    dtype: torch.dtype,
) -> list[Row]:
    """The figures of the reference, of the plain computation, and of each server (name -> URL).

    Raises:
        OSError, ValueError: as :func:`ask`.
    """
    exact = [Reference(config, weights, quant).logits(window).log_softmax(-1) for window in texts]
    plain = [Reference(config, weights, quant, dtype).logits(window).log_softmax(-1) for window in texts]
    rows = [
        row("reference", exact, [scores_of(*pair) for pair in zip(exact, texts, strict=True)]),
        row("plain", exact, [scores_of(*pair) for pair in zip(plain, texts, strict=True)]),
    ]
    return rows + [row(name, exact, [ask(url, window)[0] for window in texts]) for name, url in servers.items()]


def named_url(text: str) -> tuple[str, str]:
    """NAME=URL of the command line."""
    name, _, url = text.partition("=")
    if not name or not url.startswith("http") or name in ("reference", "plain"):
        raise argparse.ArgumentTypeError(f"expected NAME=http://host:port, got {text!r}")
    return name, url.rstrip("/")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table and one line of JSON; returns 1 if a server is beyond the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--server", type=named_url, action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--text", type=Path, nargs="+", default=sorted(DOCUMENTS.glob("*.md")))
    parser.add_argument("--tokens", type=int, default=1024, help=f"of a window, at least {SHORTEST}")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the servers")
    parser.add_argument("--quantisers", choices=("full", "off"), default="full", help="of the reference")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.tokens < SHORTEST or chosen.windows < 1:
        parser.error(f"expected --tokens of at least {SHORTEST} and --windows of at least 1")
    config = json.loads((chosen.checkpoint / "config.json").read_text())
    texts = windows(chosen.checkpoint, chosen.text, chosen.tokens, chosen.windows)
    quant = FULL if chosen.quantisers == "full" else OFF
    dtype = getattr(torch, chosen.dtype)
    rows = compared(config, read_dequantised(chosen.checkpoint), texts, dict(chosen.server), quant, dtype)
    bound = bound_of(rows[1])
    width = max(len(one.name) for one in rows)
    print(f"{'':{width}} {'perplexity':>11} {'KL':>10} {'KL, p99':>10} {'agreement':>10}")
    for one in rows:
        beyond = "  beyond the bound" if one.kl > bound else ""
        print(
            f"{one.name:{width}} {one.perplexity:>11.4f} {one.kl:>10.2e} {one.kl_p99:>10.2e} "
            f"{one.agreement:>10.2%}{beyond}"
        )
    print(f"bound of the mean KL: {bound:.2e} (twice plain {chosen.dtype}, and {FLOOR:g})")
    result = {
        "checkpoint": str(chosen.checkpoint),
        "tokens": chosen.tokens,
        "windows": chosen.windows,
        "dtype": chosen.dtype,
        "quantisers": chosen.quantisers,
        "bound": bound,
        "rows": [vars(one) for one in rows],
    }
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(any(one.kl > bound for one in rows[2:]))


if __name__ == "__main__":
    sys.exit(main())
