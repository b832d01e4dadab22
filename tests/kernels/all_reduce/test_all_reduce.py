"""Sums over ranks in the emulator, whose GPUs share one memory: bits, order of arrival, epochs, late and absent ranks.

Under the schedules "late" and "random" every word that a rank stores arrives by itself, in any order, and ranks run
ahead of each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from ops.early_launches import a_missing_wait_is_noticed, launched_early
from ops.number_formats import same_bits
from ops.ranks_in_emulator import Ranks, parts_of
from ops.row_kernels import ARCH, KERNELS
from torch import Tensor

from dsv4_kernels.all_reduce import all_reduce, gpu
from dsv4_kernels.host.mailboxes import BUFFERS, MOST_CHANNELS, MOST_RANKS, VECTOR_BYTES, Mailboxes, Plan
from dsv4_kernels.reference.batch_invariant import sum_in_order

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.usefixtures("compiled_here")

THREADS, FEWEST_THREADS = 64, 32
DIM = 64
"""8 vectors a row: 4 rows are a block of 32 threads, 8 rows one of 64."""
CHANNELS = 2
MOST_ROWS = 40
"""5 blocks of 64 threads: one channel has three places, the other two."""
SCHEDULES = ("eager", "late", "random")


@contextlib.contextmanager
def group(kernel: str, ranks: int, schedule: str = "random", seed: int = 1) -> Iterator[Ranks]:
    from ptx_emulator import Checks, emulated

    plan = Plan.of(ranks, MOST_ROWS * DIM * 2, THREADS, FEWEST_THREADS, CHANNELS)
    with emulated(checks=Checks.strict(), arch=ARCH[kernel], schedule=schedule, seed=seed) as device:
        yield Ranks(device, plan, kernel)
    assert not [warning for report in device.reports for warning in report.warnings]


def check(calls: list[list[Tensor]], results: list[list[Tensor | None]]) -> None:
    for parts, result in zip(calls, results, strict=True):
        expected = sum_in_order(torch.stack(parts))
        assert all(same_bits(of_rank, expected) for of_rank in result if of_rank is not None)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("kernel", "ranks"), [("sm90", 2), ("sm90", 3), ("sm100", 2)])
def test_sums_of_changing_sizes(kernel: str, ranks: int, schedule: str) -> None:
    """Every rank gets the bits of the definition, call after call: a row, a block of either size, a vector more, all
    places of both channels. Channels that a call does not use stay a buffer behind."""
    calls = [parts_of((rows, DIM), ranks, seed) for seed, rows in enumerate((1, 9, MOST_ROWS, 8, 1, 1, 17, 33))]
    with group(kernel, ranks, schedule) as made:
        for _ in range(2):
            check(calls, made.sums(calls))
        assert made.is_empty()


def test_a_rank_may_be_ahead_or_late() -> None:
    """One rank starts a call when all others wait for it; they may be one call ahead of it, and no further."""
    calls = [parts_of((rows, DIM), 3, rows) for rows in (9, 1, 12, 9)]
    for seed in range(3):
        with group("sm90", 3, seed=seed) as made:
            check(calls, made.sums(calls, late=[seed]))
            assert made.is_empty()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_many_interleavings(ranks: int) -> None:
    """Random sizes, orders of arrival and late ranks; mailboxes are used again from group to group of calls."""
    g = torch.Generator().manual_seed(ranks)
    for seed in range(16 // ranks):
        schedule = SCHEDULES[1 + seed % 2]
        with group("sm90", ranks, schedule, seed) as made:
            for turn in range(3):
                sizes = torch.randint(1, MOST_ROWS + 1, (5,), generator=g).tolist()
                calls = [parts_of((rows, DIM), ranks, seed + turn) for rows in sizes]
                late = torch.nonzero(torch.rand(ranks, generator=g) < 0.3).flatten().tolist()
                check(calls, made.sums(calls, late=late))
            assert made.is_empty()


@pytest.mark.parametrize("kernel", KERNELS)
def test_parts_in_fp32(kernel: str) -> None:
    calls = [parts_of((rows, DIM), 3, rows, torch.float32) for rows in (3, 20)]
    with group(kernel, 3) as made:
        check(calls, made.sums(calls))


def test_a_row_has_its_bits_in_any_batch() -> None:
    parts = parts_of((MOST_ROWS, DIM), 3, 5)
    with group("sm90", 3) as made:
        ((whole, *_),) = made.sums([parts])
        for first, rows in ((0, 1), (7, 1), (9, 20), (MOST_ROWS - 1, 1)):
            ((few, *_),) = made.sums([[part[first : first + rows].contiguous() for part in parts]])
            assert same_bits(few, whole[first : first + rows])


def test_every_pattern_of_a_part_arrives() -> None:
    """NaN of all patterns, the one that means "empty" included, infinities, zeros of both signs, subnormals."""
    every = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    empty = torch.full((64,), -1, dtype=torch.int16).view(torch.bfloat16)
    chosen = torch.cat([every[::37], every[-64:], empty, every[2**15 - 64 : 2**15 + 64], every[:64]])
    parts = [chosen[: chosen.numel() // 8 * 8].roll(5 * rank) for rank in range(2)]
    with group("sm90", 2) as made:
        (results,) = made.sums([parts])
        assert made.is_empty()
    expected = sum_in_order(torch.stack(parts))
    for result in results:
        assert torch.equal(result.isnan(), expected.isnan())
        assert same_bits(result.nan_to_num(7), expected.nan_to_num(7))
    fp32 = [part.view(torch.float32) for part in parts]
    with group("sm90", 2) as made:
        (results,) = made.sums([fp32])
    for result in results:
        assert torch.equal(result.isnan(), sum_in_order(torch.stack(fp32)).isnan())


def test_an_absent_rank_is_named() -> None:
    """The other ranks return NaN for everything that the absent rank did not send, and wait for it once only."""
    calls = [parts_of((rows, DIM), 3, rows) for rows in (9, 3)]
    with group("sm90", 3) as made:
        check(calls, made.sums(calls))
        for _ in range(2):
            ((of_0, absent, of_2), *_) = made.sums(calls, absent=[1])
            assert absent is None and of_0.isnan().all() and of_2.isnan().all()
        assert [boxes.late_ranks() for boxes in made.boxes] == [[1], [], [1]]
        assert [int(boxes.failed) for boxes in made.boxes] == [1, 0, 1]


def test_a_failed_group_stays_failed() -> None:
    """A rank that comes back finds that the others wait only a moment: no rank hangs, and no rank gets numbers."""
    parts = parts_of((9, DIM), 2, 1)
    with group("sm90", 2) as made:
        made.sums([parts], absent=[1])
        made.boxes[0] = replace(made.boxes[0], time_limit=10**15)
        ((of_0, _),) = made.sums([parts], absent=[1])
        assert of_0.isnan().all()


def test_a_call_of_no_rows_launches_nothing() -> None:
    part = torch.zeros(0, DIM, dtype=torch.bfloat16)
    with group("sm90", 2) as made:
        assert made.sums([[part, part]])[0][0].shape == (0, DIM)
        assert not made.device.reports


def test_may_begin_early() -> None:
    calls = [parts_of((rows, DIM), 2, rows) for rows in (9, 3)]
    with launched_early(), group("sm90", 2) as made:
        check(calls, made.sums(calls))
    with a_missing_wait_is_noticed(), group("sm90", 2) as made:
        made.sums(calls)


def test_what_is_refused() -> None:
    boxes = Mailboxes(None, 0, Plan.of(2, 64), (0, 0), *(torch.zeros(2, dtype=torch.int32),) * 3, 1, 16)
    for part in (torch.zeros(4, 8, dtype=torch.float16), torch.zeros(8, 4, dtype=torch.bfloat16).T):
        with pytest.raises(ValueError, match="expected contiguous bf16 or fp32"):
            all_reduce(part, boxes)
    for rows, dim in ((3, 4), (513, 8)):
        with pytest.raises(
            ValueError, match=f"a part of {rows * dim * 2} bytes; expected a multiple of 16 and at most"
        ):
            gpu.sm90(torch.zeros(rows, dim, dtype=torch.bfloat16), boxes)
    for arguments in ((1, 16), (9, 16), (2, 0), (2, 16, 64, 64, 0), (2, 16, 64, 64, 129)):
        with pytest.raises(ValueError, match="expected 2 to 8 ranks"):
            Plan.of(*arguments)
    with pytest.raises(ValueError, match="need mailboxes of"):
        Plan.of(8, 1 << 27)


@pytest.mark.parametrize("ranks", [2, MOST_RANKS])
@pytest.mark.parametrize("most_bytes", [1, 4096, 70_000, 3 << 20])
def test_no_two_vectors_share_a_place(ranks: int, most_bytes: int) -> None:
    """In launches of all sizes a place belongs to one channel, and lies in the mailbox."""
    plan = Plan.of(ranks, most_bytes)
    assert plan.most_bytes >= most_bytes and plan.channels <= MOST_CHANNELS
    assert plan.mailbox_bytes == BUFFERS * plan.channels * plan.places * ranks * plan.threads * VECTOR_BYTES
    most = plan.most_bytes // VECTOR_BYTES
    steps = {n * plan.channels * threads for threads in (1, 128, 256, 512) for n in range(1, plan.places + 1)}
    for vectors in {min(most, max(1, step + more)) for step in steps for more in (-1, 0, 1)} | {most}:
        ctas, threads = plan.launch(vectors)
        assert plan.fewest_threads <= threads <= plan.threads and 1 <= ctas <= plan.channels
        blocks = -(-vectors // threads)
        places = {(block % ctas, block // ctas) for block in range(blocks)}
        assert len(places) == blocks and max(place for _, place in places) < plan.places
        assert blocks == ctas or threads == plan.threads  # more than one block a CTA only if all threads have work
