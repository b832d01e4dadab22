"""The boundary that sums its output over the ranks, in the emulator, whose GPUs share one memory.

Every result has the bits of `all_reduce` followed by `hc_boundary`. Under the schedules "late" and "random" every word
that a rank stores arrives by itself, in any order, and ranks run ahead of each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch
from ops.hyper_connection_cases import HC_EPS, ITERATIONS, NORM_EPS, inputs
from ops.ranks_in_emulator import Ranks, parts_of
from ops.row_kernels import ARCH
from torch import Tensor

from dsv4_kernels.host.mailboxes import CLUSTER, Mailboxes, Plan
from dsv4_kernels.reference.batch_invariant import sum_in_order

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.usefixtures("compiled_here")

DIM = 1024
"""128 channels a CTA: a warp."""
THREADS = 64
"""Threads of a block of the mailboxes: two pieces of a CTA lie side by side in a place."""
CHANNELS = 3 * CLUSTER
MOST_BYTES = 2 * CHANNELS * THREADS * 16
"""Two places a channel."""
SCHEDULES = ("eager", "late", "random")


class Boundary:
    """One call of the boundary on all ranks: `num_tokens` tokens in groups of `tokens`."""

    def __init__(
        self,
        kernel: str,
        ranks: int,
        num_tokens: int,
        tokens: int | None = None,
        parts: torch.dtype = torch.bfloat16,
        fp8: bool = False,
        dim: int = DIM,
    ) -> None:
        self.kernel, self.tokens, self.fp8 = kernel, tokens, fp8
        self.inputs = inputs(num_tokens, dim, seed=num_tokens)
        self.parts = parts_of((num_tokens, dim), ranks, num_tokens, parts)

    def run(self, y: Tensor, mailboxes: Mailboxes | None) -> tuple[Tensor, ...]:
        from dsv4_kernels.hyper_connection import gpu

        i = self.inputs
        arguments = (i.streams, (y, i.post, i.comb), (i.fn, i.base, i.scale), i.weight, NORM_EPS, HC_EPS, ITERATIONS)
        return gpu.run(self.kernel, "test", 24, *arguments, tokens=self.tokens, fp8=self.fp8, boxes=mailboxes)

    def __call__(self, rank: int, boxes: Mailboxes) -> tuple[Tensor, ...]:
        return self.run(self.parts[rank], boxes)

    def expected(self) -> tuple[Tensor, ...]:
        """Results of the boundary of the sum."""
        from ptx_emulator import Checks, emulated

        with emulated(checks=Checks.strict(), arch=ARCH[self.kernel]) as device:
            device.memory.constant(self.inputs.fn)
            return self.run(sum_in_order(torch.stack(self.parts)).bfloat16(), None)


@contextlib.contextmanager
def group(
    kernel: str, ranks: int, fns: Sequence[Tensor], schedule: str = "random", seed: int = 1, threads: int = THREADS
) -> Iterator[Ranks]:
    from ptx_emulator import Checks, emulated

    plan = Plan.of(ranks, MOST_BYTES, threads, 32, CHANNELS)
    with emulated(checks=Checks.strict(), arch=ARCH[kernel], schedule=schedule, seed=seed) as device:
        for fn in fns:
            device.memory.constant(fn)
        yield Ranks(device, plan, kernel)
    assert not [warning for report in device.reports for warning in report.warnings]


def check(expected: tuple[Tensor, ...], results: list[tuple[Tensor, ...] | None]) -> None:
    for of_rank in results:
        if of_rank is not None:
            assert all(
                torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
                for found, wanted in zip(of_rank, expected, strict=True)
            )


@pytest.mark.parametrize(
    ("kernel", "ranks", "num_tokens", "tokens", "parts", "fp8", "schedule"),
    [("sm90", 2, 3, 2, torch.bfloat16, True, "random")],
)
def test_the_bits_of_a_sum_and_a_boundary(
    kernel: str, ranks: int, num_tokens: int, tokens: int, parts: torch.dtype, fp8: bool, schedule: str
) -> None:
    boundary = Boundary(kernel, ranks, num_tokens, tokens, parts, fp8)
    expected = boundary.expected()
    with group(kernel, ranks, [boundary.inputs.fn], schedule) as made:
        for _ in range(2):
            for results in made.results([boundary] * 3):
                check(expected, results)
        assert made.is_empty()
