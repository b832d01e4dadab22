"""Batches of tokens that score and choose entries, and the indexer's kernels in the emulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest import mock

import torch
from ops.memory_layout import BEYOND_BYTES, sparse, strided
from ops.row_kernels import emulated_row_kernel
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.quant import fp4_qdq

ALL_KERNELS = ("sm90", "sm100, many", "sm90, prefill", "sm100, prefill")
"""Kernels for few tokens, for many and for prefills; of the first two, which both architectures have, each on one."""


PAGE = 64


PAGE_GAP_BYTES = 48
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    keys: KVRows
    page_table: Tensor
    request: Tensor
    visible: Tensor
    q: Tensor
    head_weights: Tensor

    @staticmethod
    def of(lengths: tuple[int, ...], tokens: list[tuple[int, int]], heads: int = 64) -> Case:
        """Requests with shuffled pages; every row outside [0, lengths[b]) of a request is NaN.

        `tokens` are pairs of a request and the number of entries that the token sees.
        """
        generator = torch.Generator().manual_seed(sum(lengths) + heads)
        pages = -(-max(lengths) // PAGE) + 1
        rows = PAGE * (len(lengths) * pages + 3)
        keys = KVRows.allocate(rows, RowFormat.INDEX_FP4, 128, 0, BF16, "cpu", float("nan"))
        keys = replace(keys, storage=strided(keys.storage, 0, PAGE_GAP_BYTES))
        order = torch.randperm(len(lengths) * pages, generator=generator).view(len(lengths), pages) + 2
        for request, length in enumerate(lengths):
            places = (order[request, :, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
            keys.scatter(places, torch.randn(length, 128, generator=generator) * 2.0 ** (request - 1))
        table = torch.full((len(lengths), pages + 5), -1, dtype=torch.int32)
        for request, length in enumerate(lengths):  # a page after the last one is -1, before the table of keys
            table[request, : -(-length // PAGE)] = order[request, : -(-length // PAGE)]
        request, visible = torch.tensor(tokens, dtype=torch.int32).T.contiguous().unbind(0)
        q = fp4_qdq(torch.randn(len(tokens), heads, 128, generator=generator).to(BF16), 32)
        apart = torch.cat([q, q], 1)[:, :heads]
        weights = torch.randn(len(tokens), heads + 3, generator=generator)[:, :heads]
        return Case(keys, table[:, :pages], request, visible, apart, weights)

    def run(
        self,
        kernel: str,
        top_k: int,
        row_pages: Tensor | None = None,
        schedule: str = "late",
        ends: tuple[int, int] | None = None,
    ) -> tuple:
        """Rows and score buffers of an implementation; "sm90, prefill" is sm90 with `prefill`, "sm90, many" sm90 with
        the kernels for many tokens. ends: CTAs that run."""
        from dsv4_kernels.indexer import gpu

        buffers, (name, _, option) = [], kernel.partition(", ")
        few_tokens = dict.fromkeys(gpu.FEW_TOKENS, 0) if option == "many" else gpu.FEW_TOKENS
        in_place = [self.keys.storage, self.q, self.head_weights, self.page_table, self.request, self.visible]
        with (
            mock.patch.object(gpu, "FEW_TOKENS", few_tokens),
            emulated_row_kernel(name, schedule, in_place=in_place, ends=ends),
        ):
            empty = torch.empty

            def remembered(*shape: int, **how: object) -> Tensor:
                made = empty(*shape, **how)
                buffers.extend([made] if how["dtype"] == torch.float32 else [])
                return made

            torch.empty = remembered
            rows = getattr(gpu, name)(
                self.q,
                self.head_weights,
                self.keys,
                self.page_table,
                PAGE,
                self.request,
                self.visible,
                top_k,
                self.page_table if row_pages is None else row_pages,
                option == "prefill",
            )
        return rows, buffers

    def spread(self) -> Case:
        """The same case over a table whose bytes exceed 32 bits: all pages but the first are far apart."""
        storage = self.keys.storage
        step = -(-BEYOND_BYTES // ((len(storage) - 1) * storage.stride(0)))
        pages = (len(storage) - 1) * step + 1
        large = sparse((pages, storage.shape[1]), storage.stride(), storage.dtype)
        large[::step] = storage
        keys = replace(self.keys, storage=large, num_rows=pages * PAGE)
        table = torch.full((self.page_table.shape[0], self.page_table.shape[1] + 5), -1, dtype=torch.int32)
        table[:, :-5] = self.page_table * step
        return replace(self, keys=keys, page_table=table[:, :-5])

    def exact_scores(self, token: int) -> tuple[Tensor, Tensor]:
        """Scores in float64, and the sums of the summands' magnitudes."""
        entry = torch.arange(int(self.visible[token]))
        rows = self.page_table[int(self.request[token])][entry // PAGE].long() * PAGE + entry % PAGE
        key, q = self.keys.gather(rows).double(), self.q[token].double()
        weights = self.head_weights[token].double()
        return ((key @ q.T).relu() * weights).sum(1), ((key.abs() @ q.abs().T) * weights.abs()).sum(1)


MIXED = Case.of((300, 40, 129), [(0, 300), (0, 64), (1, 17), (2, 129), (0, 65), (1, 0), (2, 128), (0, 299)])


def inexact() -> Case:
    """Queries with all of bf16's bits, and keys with blocks whose scales differ by 2^12."""
    case = Case.of((300, 200), [(0, 300), (1, 200), (0, 299)])
    generator = torch.Generator().manual_seed(8)
    apart = torch.tensor([1.0, 2.0**12, 2.0**-12, 1.0]).repeat_interleave(32)
    rows = case.keys.num_rows
    case.keys.scatter(torch.arange(rows), torch.randn(rows, 128, generator=generator) * apart)
    return replace(case, q=torch.randn(case.q.shape, generator=generator).to(BF16))


def at_the_ends() -> Case:
    """Keys of zeros, and with blocks near the smallest and the largest scale."""
    case = Case.of((200,), [(0, 200), (0, 130)])
    rows = case.keys.num_rows
    apart = torch.tensor([2.0**-120, 2.0**-20, 2.0**100, 1.0]).repeat_interleave(32)
    keys = torch.randn(rows, 128, generator=torch.Generator().manual_seed(9)) * apart
    keys[::2] *= torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat_interleave(32)  # only small ones
    keys[::5] = 0
    case.keys.scatter(torch.arange(rows), keys)
    return case
