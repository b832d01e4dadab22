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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lib.quality_figures import DOCUMENTS, FLOOR, SHORTEST, Row, ask, bound_of, row, scores_of, windows
from model.oracle import read_dequantised
from model.reference import FULL, OFF, Quant, Reference
from torch import Tensor


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
