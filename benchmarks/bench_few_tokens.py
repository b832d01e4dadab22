"""Index scores, choice and attention of few tokens: kernels for few tokens against the kernels of large batches.

    python benchmarks/bench_few_tokens.py [--tokens 1,4,8,16] [--contexts 4600,32768] [--out FILE.json]

V4-Flash on one of four ranks: 64 index heads, 512 of the visible entries, 16 heads of attention, FP8 rows. Page tables
have room for 128K tokens, as a server's CUDA graphs. Rows:

    index       `index_topk`: the launches of scores and choice
    csa         attention over the window and 512 chosen entries
    hca         attention over the window and all entries of 128 tokens

Contenders: `many` (the kernels of large batches: `indexer.gpu.FEW_TOKENS` are 0, and no tile has its own CTA) and `few`
(what a call chooses). First their results are compared bit by bit; if they differ nothing is timed. A graph has CALLS
calls, which begin early and use one set of requests each, after a copy that leaves none of them in the L2 cache. Before
each call comes a norm of a small row, as in a layer: a launch that fills the GPU delays the early start of the next
one. Times are in microseconds, from the end of the norm to the end of the call, without the copy. The last line is the
result as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from lib.measuring import gpu_state, interleaved, l2_bytes
from lib.versions import versions
from torch import Tensor

from dsv4_kernels.indexer import gpu as indexer
from dsv4_kernels.indexer import index_topk
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.norm import rms_norm_fp8
from dsv4_kernels.quant import fp4_qdq
from dsv4_kernels.sparse_attention import sparse_attention
from dsv4_kernels.sparse_attention.sm90 import launch as sm90

INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 512
HEADS, DIM, WINDOW = 16, 512, 128
PAGE, MOST_PAGES = 256, 513
"""Tokens of a page, and pages of a table's row."""
CALLS = 48
SECONDS = 0.4


@contextlib.contextmanager
def kernels_of_many() -> Iterator[None]:
    """Inside, calls of few tokens use the kernels of large batches."""
    with (
        mock.patch.object(indexer, "FEW_TOKENS", dict.fromkeys(indexer.FEW_TOKENS, 0)),
        mock.patch.object(sm90, "_tiles_with_a_cta", lambda problem: 0),
    ):
        yield


@dataclass(frozen=True)
class Layer:
    """Requests of one call: their queries, rows and page tables."""

    index_q: Tensor
    head_weights: Tensor
    keys: KVRows
    q: Tensor
    window: KVRows
    window_rows: Tensor
    entries: KVRows
    entry_rows: Tensor
    table: Tensor
    request: Tensor
    visible: dict[str, Tensor]
    sink: Tensor

    def index(self) -> Tensor:
        """Return the chosen rows."""
        lists = (self.table, PAGE // 4, self.request, self.visible["csa"], TOP_K)
        return index_topk(self.index_q, self.head_weights, self.keys, *lists)

    def csa(self) -> Tensor:
        """Return the attention's result in a CSA layer."""
        lists = {"entry_indices": self.entry_rows, "visible": self.visible["chosen"]}
        return self.attention(lists)

    def hca(self) -> Tensor:
        """Return the attention's result in an HCA layer."""
        lists = {"page_table": self.table, "entries_per_page": PAGE // 128, "token_to_request": self.request}
        return self.attention({**lists, "visible": self.visible["hca"]})

    def attention(self, lists: dict[str, object]) -> Tensor:
        """Return the result of one call with these lists of entries."""
        return sparse_attention(
            self.q,
            self.window,
            self.window_rows,
            self.entries,
            sink=self.sink,
            scale=DIM**-0.5,
            split_keys=1152,
            impl="sm90",
            **lists,
        )


def layers_of(tokens: int, context: int, device: torch.device) -> list[Layer]:
    """Return CALLS layers of requests of their own."""
    pages = -(-context // PAGE)
    keys = KVRows.allocate(tokens * pages * (PAGE // 4), RowFormat.INDEX_FP4, INDEX_DIM, 0, torch.bfloat16, device)
    keys.scatter(torch.arange(keys.num_rows, device=device), torch.randn(keys.num_rows, INDEX_DIM, device=device))
    rows = KVRows.allocate(tokens * pages * (PAGE // 4), RowFormat.FP8, DIM, 64, torch.bfloat16, device, 0.0)
    rows.scatter(torch.arange(rows.num_rows, device=device), torch.randn(rows.num_rows, DIM, device=device).bfloat16())
    window = KVRows.allocate(tokens * WINDOW, RowFormat.FP8, DIM, 64, torch.bfloat16, device, 0.0)
    window.scatter(
        torch.arange(window.num_rows, device=device), torch.randn(window.num_rows, DIM, device=device).bfloat16()
    )
    return [layer_of(tokens, context, keys, rows, window, device) for _ in range(CALLS)]


def layer_of(tokens: int, context: int, keys: KVRows, rows: KVRows, window: KVRows, device: torch.device) -> Layer:
    """Return a layer with copies of the tables and random inputs."""

    def copied(table: KVRows) -> KVRows:
        return replace(table, storage=table.storage.clone())

    pages = -(-context // PAGE)
    table = torch.zeros(tokens, MOST_PAGES, dtype=torch.int32, device=device)
    table[:, :pages] = torch.randperm(tokens * pages, device=device).view(tokens, pages).int()
    request = torch.arange(tokens, dtype=torch.int32, device=device)
    visible = {
        kind: torch.full((tokens,), context // ratio, dtype=torch.int32, device=device)
        for kind, ratio in (("csa", 4), ("hca", 128))
    }
    visible["chosen"] = visible["csa"].clamp(max=TOP_K)
    chosen = torch.stack([torch.randperm(context // 4, device=device)[:TOP_K].sort().values for _ in range(tokens)])
    at = table.gather(1, chosen // (PAGE // 4)) * (PAGE // 4) + chosen % (PAGE // 4)
    return Layer(
        index_q=fp4_qdq(torch.randn(tokens, INDEX_HEADS, INDEX_DIM, device=device).bfloat16(), 32),
        head_weights=torch.randn(tokens, INDEX_HEADS, device=device),
        keys=copied(keys),
        q=torch.randn(tokens, HEADS, DIM, device=device).bfloat16(),
        window=copied(window),
        window_rows=(request[:, None] * WINDOW + torch.randperm(WINDOW, device=device)).int(),
        entries=copied(rows),
        entry_rows=at.int(),
        table=table,
        request=request,
        visible=visible,
        sink=torch.randn(HEADS, device=device),
    )


def in_many(call: Callable[[], Tensor]) -> Tensor:
    """Return the call's result by the kernels of large batches."""
    with kernels_of_many():
        return call()


def run(tokens: tuple[int, ...], contexts: tuple[int, ...], device: torch.device) -> dict:
    """Compare and measure; print row by row; return the result.

    Raises:
        AssertionError: two kernels give different bits.
    """
    origin = torch.zeros(l2_bytes(device), dtype=torch.uint8, device=device)
    copy = torch.empty_like(origin)

    def flush() -> Tensor:
        return torch.add(origin, 1, out=copy)

    latent, weight = torch.randn(16, 1024, device=device).bfloat16(), torch.ones(1024, device=device)
    rows = []
    print(f"{'op':6} {'tokens':>6} {'context':>8} {'many us':>9} {'few us':>9} {'ratio':>6}")
    for context in contexts:
        for count in tokens:
            layers = layers_of(count, context, device)
            for name in ("index", "csa", "hca"):
                calls = [getattr(layer, name) for layer in layers]
                for call in calls[:4]:
                    expected, found = in_many(call), call()
                    assert torch.equal(expected.view(torch.int16), found.view(torch.int16)), f"{name}: other bits"

                def norm(count: int = count) -> object:
                    return rms_norm_fp8(latent[:count], weight, 1e-6, True, None)

                many = [lambda call=call: in_many(call) for call in calls]
                contenders = {
                    "norm": [flush, *[norm] * CALLS],
                    "many": [flush, *itertools.chain(*((norm, call) for call in many))],
                    "few": [flush, *itertools.chain(*((norm, call) for call in calls))],
                }
                times = interleaved(contenders, device, SECONDS)
                graph_us = {name: times[name].median_us * len(calls) for name, calls in contenders.items()}
                us = {contender: (graph_us[contender] - graph_us["norm"]) / CALLS for contender in ("many", "few")}
                spread = max(timing.spread for timing in times.values())
                row = {"op": name, "tokens": count, "context": context, "spread": round(spread, 4)}
                rows.append(row | {f"{contender}_us": round(value, 2) for contender, value in us.items()})
                ratio = us["few"] / us["many"]
                print(f"{name:6} {count:6} {context:8} {us['many']:9.2f} {us['few']:9.2f} {ratio:6.2f}", flush=True)
    clusters = sm90.num_clusters(device)
    return {
        "benchmark": "few_tokens",
        "gpu": torch.cuda.get_device_name(device),
        "versions": versions(),
        "state": gpu_state(),
        "clusters": clusters,
        "rows": rows,
    }


def main() -> None:
    """Print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,4,8,16")
    parser.add_argument("--contexts", default="4600,32768")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tokens, contexts = (tuple(map(int, text.split(","))) for text in (options.tokens, options.contexts))
    result = run(tokens, contexts, torch.device("cuda"))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
