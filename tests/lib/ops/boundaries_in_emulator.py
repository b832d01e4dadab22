"""Calls of `hc_boundary_of_parts` on all ranks of a group whose ranks are emulated GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from ops.hyper_connection_cases import HC_EPS, ITERATIONS, NORM_EPS, Inputs, inputs
from ops.ranks_in_emulator import Ranks, parts_of
from ops.row_kernels import ARCH
from torch import Tensor

from dsv4_kernels.host.expert_rows import ExpertRows, summed
from dsv4_kernels.host.mailboxes import CLUSTER, Mailboxes, Plan
from dsv4_kernels.reference.batch_invariant import sum_in_order

DIM = 1024
"""128 channels a CTA: a warp."""
THREADS = 64
"""Threads of a block of the mailboxes: two pieces of a CTA lie side by side in a place."""
CHANNELS = 3 * CLUSTER
MOST_BYTES = 4 * CHANNELS * THREADS * 16
"""Bytes of a sum that fills four places a channel: eight tokens in fp32 have eight pieces."""


@dataclass(frozen=True)
class Boundary:
    """One call on all ranks: `num_tokens` tokens in groups of `tokens`, or as `choice.chosen` says."""

    kernel: str
    ranks: int
    num_tokens: int
    tokens: int | None
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    dim: int = DIM
    seed: int = 0
    parts: list[Tensor | ExpertRows] = field(default_factory=list)
    """[rank] of the rank; random if none are given."""

    def __post_init__(self) -> None:
        if not self.parts:
            self.parts.extend(
                parts_of((self.num_tokens, self.dim), self.ranks, self.num_tokens + self.seed, self.dtype)
            )

    @property
    def inputs(self) -> Inputs:
        return _inputs(self.num_tokens, self.dim)

    def with_parts(self, parts: list[Tensor] | list[ExpertRows]) -> Boundary:
        return replace(self, parts=parts)

    def sum(self) -> Tensor:
        """The sum of all parts in their dtype."""
        return sum_in_order(torch.stack([summed(part) for part in self.parts]))

    def __call__(self, rank: int, boxes: Mailboxes) -> tuple[Tensor, ...]:
        return self.run(self.parts[rank], boxes)

    def run(self, y: Tensor | ExpertRows, boxes: Mailboxes | None) -> tuple[Tensor, ...]:
        """Results of one rank; of the boundary without ranks, if there are no mailboxes."""
        from dsv4_kernels.hyper_connection import gpu

        i = self.inputs
        arguments = (i.streams, (y, i.post, i.comb), (i.fn, i.base, i.scale), i.weight, NORM_EPS, HC_EPS, ITERATIONS)
        return gpu.run(self.kernel, "test", 24, *arguments, self.tokens, fp8=self.fp8, boxes=boxes)

    def of_the_sum(self) -> tuple[Tensor, ...]:
        """Results of `hc_boundary` of the sum, from an emulator of its own."""
        from ptx_emulator import Checks, emulated

        with emulated(checks=Checks.strict(), arch=ARCH[self.kernel]) as device:
            device.memory.constant(self.inputs.fn)
            return self.run(self.sum().bfloat16(), None)


_made: dict[tuple[int, int], Inputs] = {}


def _inputs(num_tokens: int, dim: int) -> Inputs:
    """The same tensors for the same sizes, so that the emulator knows which are constant."""
    if (num_tokens, dim) not in _made:
        _made[num_tokens, dim] = inputs(num_tokens, dim, seed=num_tokens)
    return _made[num_tokens, dim]


@contextlib.contextmanager
def group(
    kernel: str, ranks: int, *calls: Boundary, schedule: str = "random", seed: int = 1, threads: int = THREADS
) -> Iterator[Ranks]:
    """Yield the ranks of a group that makes these calls; warnings fail."""
    from ptx_emulator import Checks, emulated

    plan = Plan.of(ranks, MOST_BYTES, threads, 32, CHANNELS)
    with emulated(checks=Checks.strict(), arch=ARCH[kernel], schedule=schedule, seed=seed) as device:
        for fn in {id(call.inputs.fn): call.inputs.fn for call in calls}.values():
            device.memory.constant(fn)
        yield Ranks(device, plan, kernel)
    assert not [warning for report in device.reports for warning in report.warnings]


def check(expected: tuple[Tensor, ...], results: Sequence[tuple[Tensor, ...] | None]) -> None:
    """Check that all results have the same bits."""
    for of_rank in results:
        assert of_rank is not None
        for found, wanted in zip(of_rank, expected, strict=True):
            assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def check_schedules(on: str, ranks: int, call: Boundary) -> None:
    """Check that three calls in a row have the bits of the boundary of the sum on every rank, in two schedules."""
    expected = call.of_the_sum()
    for schedule in ("late", "random"):
        with group(on, ranks, call, schedule=schedule) as made:
            for results in made.results([call] * 3):
                check(expected, results)
            assert made.is_empty()
