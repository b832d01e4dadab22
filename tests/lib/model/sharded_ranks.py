"""One rank of several over gloo, for `test_sequence_parallel.py`: python -m model.sharded_ranks WHAT RANK RANKS PORT …

Rows are computed with shards and without, in the same process, and compared. Prints RESULT and the comparisons' results
as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from model import recorded_prefills
from model.harness import Harness
from model.quantised_inputs import as_on_hopper
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.reference.batch_invariant import sum_in_order
from sglang_dsv4.layers import rank_sum, sequence_parallel
from sglang_dsv4.layers.all_heads import AllHeads
from sglang_dsv4.layers.sequence_parallel import ALL_ROWS, RowShards
from sglang_dsv4.models import deepseek_v4
from sglang_dsv4.models.deepseek_v4 import mean_of_streams

SPECULATION = dict(
    speculative_algorithm="EAGLE",
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=4,
)
WIDTH = 24


def tokens_of(ranks: int) -> list[int]:
    """Return numbers of tokens: none, fewer than ranks, as many, one more, and many more."""
    return [0, 1, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 64, 509]


def rows_of(rank: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return random [T, WIDTH], different on every rank; some are so large that their sum depends on the order."""
    rows = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(97 * rank + tokens))
    rows[:, ::3] *= 2.0 ** (9 * (rank - 1))
    return rows.to(dtype)


def module(rank: int, ranks: int, port: int) -> dict[str, bool]:
    """Check `RowShards` and `sum_over_ranks` alone."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    group = SimpleNamespace(device_group=dist.group.WORLD)
    parallel = SimpleNamespace(tp_size=ranks, tp_rank=rank)

    def all_reduce(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(x: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim)

    rank_sum.get_parallel = lambda: parallel
    rank_sum.get_tp_group = sequence_parallel.get_tp_group = lambda: group
    rank_sum.tensor_model_parallel_all_reduce, rank_sum.tensor_model_parallel_all_gather = all_reduce, all_gather
    found: dict[str, bool] = {}
    for tokens in tokens_of(ranks):
        rows = RowShards(tokens, ranks, rank)
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            whole = rows_of(0, tokens, torch.float32).mul(1000).to(dtype)
            shard = rows.take(whole)
            found[f"gather {tokens} {dtype}"] = (
                shard.shape == (rows.size, WIDTH)
                and not shard[len(whole[rows.own]) :].any()
                and torch.equal(rows.gather(shard), whole)
                and torch.equal(rows.gather(whole[rows.own]), whole)
                and torch.equal(rows.gather(whole[rows.own, None]), whole[:, None])
            )
        for dtype in (torch.float32, torch.bfloat16):
            part = rows_of(rank, tokens, dtype)
            for flag in (True, False):
                registry.require_batch_invariance(flag)
                shard = rank_sum.sum_over_ranks(part.clone(), rows)
                summed, expected = rows.gather(shard), rank_sum.sum_over_ranks(part.clone(), ALL_ROWS)
                # Without the flag gloo adds in rings; two parts have one possible sum.
                same = torch.equal if flag or ranks == 2 else _close(ranks, dtype)
                found[f"sum {tokens} {dtype} {flag}"] = shard.shape == (rows.size, WIDTH) and same(summed, expected)
    registry.require_batch_invariance()
    part = rows_of(rank, 64, torch.float32)
    with mock.patch.object(rank_sum, "sum_in_order", lambda parts: sum_in_order(parts.flip(0))):
        shard = rank_sum.sum_over_ranks(part, rows := RowShards(64, ranks, rank))
    same = torch.equal(rows.gather(shard), rank_sum.sum_over_ranks(part, ALL_ROWS))
    found["another order of the ranks is noticed"] = same == (ranks == 2)
    return found


def _close(ranks: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], bool]:
    return lambda a, b: torch.allclose(a.float(), b.float(), rtol=0, atol=ranks * torch.finfo(dtype).eps * 2**13)


def same(made: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all have the same bits."""
    return len(made) == len(expected) and all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


LENGTHS = (1, 2, 3, 64, 131, 300)


class Compared:
    """Forwards of one harness, with sharded rows and without; all ranks make the same calls."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.found = harness, {}
        self.tokens = torch.randint(10, 900, (1200,), generator=torch.Generator().manual_seed(1)).tolist()

    def both(self, forwards: Callable[[], list[Tensor]]) -> tuple[list[Tensor], list[Tensor], int]:
        """Return the forwards' results with shards and without, and how many of them were sharded."""
        chosen: list[RowShards] = []

        def counted(*arguments: object) -> RowShards:
            chosen.append(of_forward(*arguments))
            return chosen[-1]

        of_forward = sequence_parallel.of_forward
        with mock.patch.multiple(sequence_parallel, of_forward=counted, FEWEST_TOKENS=1):
            sharded = forwards()
        with mock.patch.object(sequence_parallel, "is_on", lambda: False):
            return sharded, forwards(), sum(not rows.is_whole for rows in chosen)

    def check(self, name: str, forwards: Callable[[], list[Tensor]], num_sharded: int) -> None:
        sharded, whole, count = self.both(forwards)
        assert all(torch.isfinite(x).all() for x in whole)
        self.found[name] = same(sharded, whole) and count == num_sharded

    def plant(self, mistake: str, *patches: AbstractContextManager) -> None:
        """Run two ranks' prompt of an odd length with a planted mistake in the shards."""
        with ExitStack() as planted:
            for patch in patches:
                planted.enter_context(patch)
            sharded, whole, _ = self.both(lambda: self.prompt(131))
        self.found[f"{mistake}: noticed"] = not same(sharded, whole)

    def prompt(self, length: int, chunk: int | None = None) -> list[Tensor]:
        """Return logits and the draft's inputs, of a prompt in chunks, a decode and a verify step."""
        request, made = self.harness.open(), []
        for begin in range(0, length, chunk or length):
            part = self.tokens[begin : min(begin + (chunk or length), length)]
            made += self.harness.step_with_streams([(request, part)])[0]
        made += self.harness.step_with_streams([(request, self.tokens[:1])], "decode")[0]
        made += self.harness.step_with_streams([(request, self.tokens[:4])], "verify")[0]
        self.harness.close(request)
        return made

    def batch(self) -> list[Tensor]:
        """Return logits of requests that join and leave, with prefixes, in batches of chunks and of single tokens."""
        prompts = [torch.tensor(self.tokens[i : i + n]) for i, n in enumerate((290, 130, 257, 31))]
        return self.harness.run_many(prompts, 67, [280, 125, 250, 24], [0, 1, 0, 3])


def model(
    rank: int, ranks: int, port: int, folder: str, dtype: str, algorithm: str, flag: str, switch: str
) -> dict[str, bool]:
    """Compare a whole model in the harness."""
    os.environ[sequence_parallel.VARIABLE] = switch
    drafts = {"EAGLE": SPECULATION, "DSPARK": {"speculative_algorithm": "DSPARK"}}[algorithm]
    options = {"enable_deterministic_inference": True} if flag == "flag" else {}
    harness = Harness(Path(folder), dtype, None, 4096, rank=rank, port=port, tp_size=ranks, **drafts, **options)
    assert registry.requires_batch_invariance() == bool(options)
    compared = Compared(harness)
    for length in LENGTHS:
        compared.check(f"prompt of {length}", lambda length=length: compared.prompt(length), 1)
    compared.check("chunks", lambda: compared.prompt(300, 77), 4)
    compared.check("batch", compared.batch, 5)
    compared.found["replayed graphs"] = replays_are_the_same(compared)
    plant_mistakes(compared)
    if dtype == "bfloat16":
        with pytest.MonkeyPatch.context() as patch:
            names = as_on_hopper(harness.model, patch)
            compared.check("codes of what is gathered", lambda: compared.prompt(131), 1)
        assert {name.split(".", 3)[-1] for name in names} > {"attn.wqkv_a", "attn.indexer.wq_b"}
    return compared.found


def replays_are_the_same(compared: Compared) -> bool:
    """Compare prefills in recorded graphs, whose rows are sharded and padded, with forwards of all rows."""
    harness = compared.harness

    def forwards() -> list[Tensor]:
        return [*compared.prompt(131), *compared.prompt(300, 77), *compared.batch()]

    with mock.patch.object(sequence_parallel, "is_on", lambda: False):
        whole = forwards()
    with mock.patch.object(sequence_parallel, "FEWEST_TOKENS", 1):
        with harness._active():
            recorded_prefills.record(harness.model, [80, 132, 160], with_streams=True)
        graphs = harness.model.prefill_graphs
        with mock.patch.object(graphs, "replay", wraps=graphs.replay) as replay:
            replayed = forwards()
    harness.model.prefill_graphs = None
    tokens = [len(call.args[1]) for call in replay.call_args_list]
    return same(replayed, whole) and {131, 77, 69} < set(tokens) and len(tokens) > 6


def plant_mistakes(compared: Compared) -> None:
    """Plant one mistake after another in the code that separates a rank's rows from the other ranks'."""
    cls, own, gather = RowShards, RowShards.own.fget, RowShards.gather
    backend, select = compared.harness.backend, compared.harness.backend.select

    def neighbour(rows: RowShards) -> slice:
        return own(replace(rows, index=(rows.index + 1) % rows.count))

    def begin(rows: RowShards) -> slice:
        return slice(0, rows.size) if not rows.is_whole else own(rows)

    compared.plant("rows of another rank", mock.patch.object(cls, "own", property(neighbour)))
    compared.plant("the first rows on every rank", mock.patch.object(cls, "own", property(begin)))
    compared.plant("padding in front", mock.patch.object(sequence_parallel, "_padded", _padded_in_front))
    compared.plant(
        "choice by the first rows' visible entries",
        mock.patch.object(backend, "select", lambda *a: select(*a[:4], slice(0, len(a[1])))),
    )

    def of_one_rank(is_one: Callable[[Tensor], bool]) -> Callable[[RowShards, Tensor], Tensor]:
        def gathered(rows: RowShards, x: Tensor) -> Tensor:
            if rows.is_whole or not is_one(x):
                return gather(rows, x)
            return torch.cat([sequence_parallel._padded(x, rows.size)] * rows.count)[: rows.tokens]

        return gathered

    if compared.harness.model.model.tapped_layers:
        means: list[int] = []

        def marked(streams: Tensor) -> Tensor:
            mean = mean_of_streams(streams)
            means.append(mean.data_ptr())
            return mean

        fault = of_one_rank(lambda x: x.data_ptr() in means)
        marks = mock.patch.object(deepseek_v4, "mean_of_streams", marked)
        compared.plant("taps of one rank", marks, mock.patch.object(cls, "gather", fault))
    else:
        width = compared.harness.model.model.hc_mult * compared.harness.hf_config["hidden_size"]
        fault = of_one_rank(lambda x: x.shape[-1] == width)
        compared.plant("streams of one rank", mock.patch.object(cls, "gather", fault))
    if layers := [module for module in compared.harness.model.modules() if isinstance(module, AllHeads)]:
        return plant_mistakes_of_attention(compared, layers)
    one = of_one_rank(lambda x: x.dtype == torch.int32)
    compared.plant("what one rank chose", mock.patch.object(cls, "gather", one))


def plant_mistakes_of_attention(compared: Compared, layers: list[AllHeads]) -> None:
    """Plant mistakes in the attention of a rank's own rows with all heads."""
    backend, attend, multiply = compared.harness.backend, compared.harness.backend.attend, AllHeads._multiply
    compared.plant(
        "the first rows' windows and entries",
        mock.patch.object(backend, "attend", lambda *a: attend(*a[:6], slice(0, len(a[1])))),
    )
    compared.plant("sinks of other heads", *(mock.patch.object(m, "sink", m.sink.flip(0)) for m in layers))
    compared.plant(
        "one rank's wo_b for all parts",
        mock.patch.object(AllHeads, "_multiply", lambda m, name, x, part: multiply(m, name, x, 0)),
    )
    compared.plant(
        "own heads' queries for all heads", *(mock.patch.object(m, "queries", _first_heads(m)) for m in layers)
    )


def _first_heads(layer: AllHeads) -> Callable[[Tensor], Tensor]:
    queries = layer.queries
    return lambda latent: torch.cat([queries(latent).chunk(layer.ranks, -1)[0]] * layer.ranks, -1)


def _padded_in_front(rows: Tensor, size: int) -> Tensor:
    return torch.cat([rows.new_zeros(size - len(rows), *rows.shape[1:]), rows])


def main() -> None:
    """Run the named check as this rank."""
    what, rank, ranks, port, *arguments = sys.argv[1:]
    rank, ranks = int(rank), int(ranks)
    found = {"module": module, "model": model}[what](rank, ranks, int(port), *arguments)
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
