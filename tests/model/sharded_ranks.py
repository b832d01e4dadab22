"""One rank of several over gloo, for `test_row_shards.py`: python -m model.sharded_ranks WHAT RANK RANKS PORT [FOLDER].

Rows are computed with shards and without, in the same process, and compared. Prints RESULT and, as JSON, what each
comparison found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from model.harness import Harness
from torch import Tensor

from dsv4_kernels import registry
from sglang_dsv4.layers import rank_sum, row_shards
from sglang_dsv4.layers.row_shards import ALL_ROWS, RowShards

WIDTH = 24


def tokens_of(ranks: int) -> list[int]:
    """None, fewer than ranks, as many, one more, and more than that."""
    return [0, 1, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 64, 509]


def rows_of(rank: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """Random [T, WIDTH], other ones on every rank; some so large that their sum depends on the order."""
    rows = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(97 * rank + tokens))
    rows[:, ::3] *= 2.0 ** (9 * (rank - 1))
    return rows.to(dtype)


def module(rank: int, ranks: int, port: int) -> dict[str, bool]:
    """`RowShards` and `sum_over_ranks` by themselves."""
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
    rank_sum.get_tp_group = row_shards.get_tp_group = lambda: group
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
                # Without the flag gloo adds in rings; two parts have one sum.
                same = torch.equal if flag or ranks == 2 else _close(ranks, dtype)
                found[f"sum {tokens} {dtype} {flag}"] = shard.shape == (rows.size, WIDTH) and same(summed, expected)
    return found


def _close(ranks: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], bool]:
    return lambda a, b: torch.allclose(a.float(), b.float(), rtol=0, atol=ranks * torch.finfo(dtype).eps * 2**13)


LENGTHS = (1, 2, 3, 64, 131, 300)


class Compared:
    """Forwards of one harness, with rows in shards and not; all ranks make the same calls."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.found = harness, {}
        self.tokens = torch.randint(10, 900, (1200,), generator=torch.Generator().manual_seed(1)).tolist()

    def both(self, forwards: Callable[[], list[Tensor]]) -> tuple[list[Tensor], list[Tensor], int]:
        """What the forwards give with shards and without, and how many of them were sharded."""
        chosen: list[RowShards] = []

        def counted(*arguments: object) -> RowShards:
            chosen.append(of_forward(*arguments))
            return chosen[-1]

        of_forward = row_shards.of_forward
        with mock.patch.object(row_shards, "of_forward", counted), mock.patch.object(row_shards, "FEWEST_TOKENS", 1):
            sharded = forwards()
        return sharded, forwards(), sum(not rows.is_whole for rows in chosen)

    def check(self, name: str, forwards: Callable[[], list[Tensor]], num_sharded: int) -> None:
        sharded, whole, count = self.both(forwards)
        assert all(torch.isfinite(x).all() for x in whole)
        same = len(sharded) == len(whole) and all(torch.equal(a, b) for a, b in zip(sharded, whole, strict=True))
        self.found[name] = same and count == num_sharded

    def prompt(self, length: int, chunk: int | None = None) -> list[Tensor]:
        """Logits and what a draft reads, of a prompt in chunks, a decode and a verify step."""
        request, made = self.harness.open(), []
        for begin in range(0, length, chunk or length):
            part = self.tokens[begin : min(begin + (chunk or length), length)]
            made += self.harness.step_with_streams([(request, part)])[0]
        made += self.harness.step_with_streams([(request, self.tokens[:1])], "decode")[0]
        made += self.harness.step_with_streams([(request, self.tokens[:4])], "verify")[0]
        self.harness.close(request)
        return made

    def batch(self) -> list[Tensor]:
        """Requests that join and leave, with prefixes, in batches of chunks and of single tokens."""
        prompts = [torch.tensor(self.tokens[i : i + n]) for i, n in enumerate((290, 130, 257, 31))]
        return self.harness.run_many(prompts, 67, [280, 125, 250, 24], [0, 1, 0, 3])


def model(rank: int, ranks: int, port: int, folder: str, algorithm: str, flag: str) -> dict[str, bool]:
    """A whole model, behind the harness."""
    drafts = {"EAGLE": SPECULATION, "DSPARK": {"speculative_algorithm": "DSPARK"}}[algorithm]
    options = {"enable_deterministic_inference": True} if flag == "flag" else {}
    harness = Harness(Path(folder), rank=rank, port=port, tp_size=ranks, max_total_tokens=4096, **drafts, **options)
    assert registry.requires_batch_invariance() == bool(options)
    compared = Compared(harness)
    for length in LENGTHS:
        compared.check(f"prompt of {length}", lambda length=length: compared.prompt(length), 1)
    compared.check("chunks", lambda: compared.prompt(300, 77), 4)
    compared.check("batch", compared.batch, 5)
    return compared.found


SPECULATION = dict(
    speculative_algorithm="EAGLE",
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=4,
)


def main() -> None:
    """As said above."""
    what, rank, ranks, port, *arguments = sys.argv[1:]
    rank, ranks = int(rank), int(ranks)
    found = {"module": module, "model": model}[what](rank, ranks, int(port), *arguments)
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
