"""The indexer's choice of entries in a prefill chunk and in decode: the decode kernel against the prefill kernel.

    python benchmarks/bench_indexer.py [--out FILE.json]

Flash's sizes: 64 index heads of 128 channels, 512 of the visible entries, FP4 keys. A chunk is the last 8,192 tokens of
a context; in decode 64 requests have that context. First the rows of both kernels are compared (they may differ where
scores differ in their last bit only; `differ` is the share of such rows). Times are medians of CUDA events, the kernels
alternating; `products` is the rate of the scores' products over the card's dense bf16 rate. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from lib.measuring import gpu_state
from lib.versions import versions
from torch import Tensor

from dsv4_kernels.indexer import index_topk
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.quant import fp4_qdq

HEADS, DIM, TOP_K, RATIO, PAGE = 64, 128, 512, 4, 64
CHUNK, DECODING = 8192, 64
CONTEXTS = (8192, 32_768, 65_536, 131_072)
DENSE_BF16 = 989e12
REPEATS = 7


@dataclass(frozen=True)
class Inputs:
    """Inputs of one call."""

    q: Tensor
    head_weights: Tensor
    keys: KVRows
    page_table: Tensor
    request: Tensor
    visible: Tensor

    @staticmethod
    def of(positions: Tensor, requests: int, context: int, device: torch.device) -> Inputs:
        """Return inputs for tokens at these positions; token i belongs to request i * requests // tokens."""
        tokens, pages = len(positions), context // RATIO // PAGE
        keys = KVRows.allocate(requests * pages * PAGE, RowFormat.INDEX_FP4, DIM, 0, torch.bfloat16, device)
        for request in range(requests):
            rows = torch.arange(pages * PAGE, device=device) + request * pages * PAGE
            keys.scatter(rows, torch.randn(len(rows), DIM, device=device))
        table = torch.randperm(requests * pages, device=device).view(requests, pages).int()
        q = fp4_qdq(torch.randn(tokens, HEADS, DIM, device=device).bfloat16(), 32)
        request = (torch.arange(tokens, device=device) * requests // tokens).int()
        weights = torch.randn(tokens, HEADS, device=device)
        return Inputs(q, weights, keys, table, request, ((positions.to(device) + 1) // RATIO).int())

    def call(self, prefill: bool) -> Tensor:
        """Return the rows of the chosen entries."""
        lists = (self.page_table, PAGE, self.request, self.visible, TOP_K)
        return index_topk(self.q, self.head_weights, self.keys, *lists, prefill=prefill)


def in_turns(calls: list[Callable[[], object]]) -> list[float]:
    """Return the median microseconds of each call; calls alternate."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, found in zip(calls, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            found.append(1e3 * begin.elapsed_time(end))
    return [statistics.median(found) for found in times]


def main() -> None:
    """Compare, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, rows = torch.device("cuda"), []
    for context in CONTEXTS:
        for work, positions, requests in (
            ("prefill", torch.arange(context - CHUNK, context), 1),
            ("decode", torch.full((DECODING,), context - 1), DECODING),
        ):
            inputs = Inputs.of(positions, requests, context, device)
            alone, together = inputs.call(False), inputs.call(True)
            differ = float((alone != together).any(1).float().mean())
            few, many = in_turns([lambda i=inputs: i.call(False), lambda i=inputs: i.call(True)])
            products = 2 * HEADS * DIM * float(inputs.visible.double().sum())
            share = products / (1e-6 * many) / DENSE_BF16
            row = {"work": work, "context": context, "tokens": len(positions), "us": few, "prefill_us": many}
            rows.append({**row, "ratio": many / few, "products": share, "differ": differ})
            print(f"{work:8} {context:8,} {few:10.0f} us {many:10.0f} us {many / few:6.2f} {share:6.1%} {differ:8.2%}")
    text = json.dumps({"gpu": gpu_state(), "versions": versions(), "rows": rows})
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
