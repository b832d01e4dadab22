"""The boundary that sums its output over the ranks, in the emulator, whose GPUs share one memory.

Every result has the bits of `all_reduce` followed by `hc_boundary`. Under the schedules "late" and "random" every word
that a rank stores arrives by itself, in any order, and ranks run ahead of each other.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ops.boundaries_in_emulator import DIM, MOST_BYTES, Boundary, check, group
from ops.early_launches import a_missing_wait_is_noticed, launched_early
from ops.hyper_connection_cases import check_boundary
from ops.memory_layout import far_apart, use_in_place
from ops.ranks_in_emulator import Call, parts_of
from torch import Tensor

from dsv4_kernels.all_reduce import gpu as all_reduce_gpu
from dsv4_kernels.host.mailboxes import CLUSTER, Mailboxes, Plan
from dsv4_kernels.reference.batch_invariant import sum_in_order

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.usefixtures("compiled_here")

SCHEDULES = ("eager", "late", "random")


def pairs(seed: int = 0) -> Boundary:
    """Three tokens in groups of two: two clusters, one of them with a place that no token has."""
    return Boundary("sm90", 2, 3, 2, seed=seed)


def test_the_sum_is_written_back() -> None:
    """Calls on the same mailboxes, with words as late as possible: right results, and the bits of a call in which one
    rank's part is the sum of all."""
    call, other = pairs(0), pairs(1)
    of_sum = call.with_parts([call.sum(), torch.zeros_like(call.sum())])
    with group("sm90", 2, call, schedule="late") as made:
        first, between, again, expected = made.results([call, other, call, of_sum])
        assert made.is_empty()
    check(expected[0], [*first, *again, expected[1]])
    check(between[0], [between[1]])
    check_boundary(first[0], call.inputs._replace(y=call.sum()))
    check_boundary(between[0], other.inputs._replace(y=other.sum()))


def test_runs_are_awaited_one_after_the_other() -> None:
    """Three tokens in a group of four, whose threads have two runs of channels: the words of the second run, which were
    asked for while the first was written back, may arrive later. Four calls, so that a rank may be a call ahead."""
    call, other = (Boundary("sm90", 2, 3, 4, seed=seed) for seed in (1, 2))
    with group("sm90", 2, call, schedule="late") as made:
        first, between, again, *_ = made.results([call, other, call, other])
        assert made.is_empty()
    check(first[0], [first[1], *again])
    check(between[0], [between[1]])
    check_boundary(first[0], call.inputs._replace(y=call.sum()))


def test_an_absent_rank_is_named_and_late_ranks_are_not() -> None:
    """After the limit the streams are NaN, and the next call waits only a moment; a rank that is late in time is
    waited for."""
    call = pairs()
    with group("sm90", 2, call, schedule="eager") as made:
        ((of_0, of_1),) = made.results([call], late=[1])
        check(of_0, [of_1])
        for _ in range(2):
            ((results, nothing),) = made.results([call], absent=[1])
            assert nothing is None and results[0].isnan().all()
        assert [boxes.late_ranks() for boxes in made.boxes] == [[1], []]
        assert [int(boxes.failed) for boxes in made.boxes] == [1, 0]


def test_it_may_begin_early() -> None:
    """Only fn is read before the wait, by a bulk copy, and nothing is sent; the part's rows lie 2**32 bytes apart."""
    call = Boundary("sm90", 2, 4, 2)
    far = call.with_parts([far_apart(part) for part in call.parts])
    with launched_early(), group("sm90", 2, call, schedule="eager") as made:
        use_in_place(made.device, *far.parts)
        near, apart = made.results([call, far])
    check(near[0], [near[1], *apart])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("kernel", "ranks", "num_tokens", "tokens", "parts", "fp8"),
    [
        ("sm90", 2, 1, 1, torch.bfloat16, True),
        ("sm90", 2, 2, 1, torch.float32, False),
        ("sm90", 2, 3, 2, torch.float32, True),
        ("sm90", 4, 3, 2, torch.bfloat16, True),
        ("sm90", 4, 5, 4, torch.bfloat16, False),
        ("sm90", 3, 7, 4, torch.float32, False),
        ("sm90", 2, 17, 8, torch.bfloat16, True),
        ("sm90", 2, 17, 8, torch.float32, False),
        ("sm100", 2, 3, 2, torch.bfloat16, True),
        ("sm100", 4, 1, 1, torch.bfloat16, True),
        ("sm100", 2, 5, None, torch.bfloat16, True),
        ("sm100", 2, 9, None, torch.float32, False),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_the_bits_of_two_launches(
    kernel: str, ranks: int, num_tokens: int, tokens: int | None, parts: torch.dtype, fp8: bool, schedule: str
) -> None:
    """Groups of every size, full and not, in one and two places of a channel: the bits of `hc_boundary` of the sum.

    Without a size the plan is the one that the GPU's number of clusters allows.
    """
    call = Boundary(kernel, ranks, num_tokens, tokens, parts, fp8)
    expected = call.of_the_sum()
    with group(kernel, ranks, call, schedule=schedule) as made:
        for _ in range(2):
            for results in made.results([call] * 3):
                check(expected, results)
        assert made.is_empty()


def mixed(ranks: int, seed: int) -> tuple[list[Call], list[tuple[Tensor, ...]]]:
    """Boundaries with groups of all sizes and sums of other sizes, in random turns, and the results of each."""
    g = torch.Generator().manual_seed(seed)
    calls: list[Call] = []
    expected: list[tuple[Tensor, ...]] = []
    for n in torch.randint(0, 6, (6,), generator=g).tolist():
        if n < 4:
            tokens = (1, 2, 4, 8)[n]
            call = Boundary("sm90", ranks, int(torch.randint(1, 2 * tokens + 1, (), generator=g)), tokens, seed=seed)
            calls.append(call)
            expected.append(call.of_the_sum())
        else:
            parts = parts_of((int(torch.randint(1, 30, (), generator=g)), 64), ranks, seed + n)
            calls.append(lambda rank, boxes, parts=parts: (all_reduce_gpu.sm90(parts[rank], boxes),))
            expected.append((sum_in_order(torch.stack(parts)),))
    return calls, expected


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["late", "random"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_boundaries_and_sums_in_turns(ranks: int, schedule: str) -> None:
    """Both kinds of launch, of all sizes, on the same mailboxes; ranks run ahead of each other, some come late."""
    for seed in range(6 // ranks):
        calls, expected = mixed(ranks, 10 * ranks + seed)
        with group(
            "sm90", ranks, *(call for call in calls if isinstance(call, Boundary)), schedule=schedule, seed=seed
        ) as made:
            for late in ([], [seed % ranks], [ranks - 1]):
                for results, wanted in zip(made.results(calls, late=late), expected, strict=True):
                    check(wanted, results)
            assert made.is_empty()


def test_every_pattern_of_a_part_arrives() -> None:
    """Parts of EMPTY words, infinities and NaN: NaN and infinities where the sum has them; no rank waits for ever."""
    call = Boundary("sm90", 2, 3, 2)
    parts = [part.clone() for part in call.parts]
    parts[0].view(torch.int16)[1] = -1
    parts[0][2, ::7], parts[1][2, ::7] = math.inf, 1.0
    call, sums = call.with_parts(parts), call.with_parts([call.with_parts(parts).sum(), torch.zeros_like(parts[0])])
    with group("sm90", 2, call, schedule="eager") as made:
        (of_0, of_1), (expected, _) = made.results([call, sums])
        assert made.is_empty()
    for found in (of_0, of_1):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.float().nan_to_num(7), b.float().nan_to_num(7))
    assert expected[0][1].isnan().all() and not expected[0][0].isnan().any()


@pytest.mark.slow
def test_rows_of_a_part_may_lie_apart() -> None:
    call = Boundary("sm90", 2, 3, 2)
    around = [torch.full((3, DIM + 16), math.nan, dtype=torch.bfloat16) for _ in range(2)]
    for view, part in zip(around, call.parts, strict=True):
        view[:, :DIM] = part
    apart = call.with_parts([view[:, :DIM] for view in around])
    with group("sm90", 2, call) as made:
        near, far = made.results([call, apart])
    check(near[0], [near[1], *far])


@pytest.mark.slow
def test_a_missing_wait_is_noticed() -> None:
    call = pairs()
    with a_missing_wait_is_noticed(), group("sm90", 2, call) as made:
        made.results([call])


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "ranks", "fp32"), [(4096, 8, False), (4096, 4, True), (7168, 8, False)])
def test_the_models_widths(dim: int, ranks: int, fp32: bool) -> None:
    """Right results in two ranks, and no more registers and shared memory than the plans without ranks may use."""
    from lib.cubin import resources
    from ptx_emulator import emulated

    from dsv4_kernels.hyper_connection import choice, gpu
    from dsv4_kernels.hyper_connection.plan import REGISTERS

    parts = torch.float32 if fp32 else torch.bfloat16
    boxes = Plan.of(ranks, 2 << 20)
    for num_tokens, tokens in ((1, 1), (5, 2), (17, 4), (65, 8)):
        plan = choice.with_parts(choice.chosen(num_tokens, dim, 24, True, False, True), boxes, 16, num_tokens, parts)
        assert plan is not None and plan.tokens == tokens
        with emulated(arch="sm_90a"):
            numbers = resources(gpu.compile(plan, "sm_90a").__cubin__)
        warps = -(-plan.ctas * plan.cta_threads // 32 // 4)
        assert numbers["stack_bytes"] <= 112 and numbers["registers"] * warps * 32 <= REGISTERS // 4, (plan, numbers)
    call = Boundary("sm90", 2, 2, 2, parts, True, dim=dim)
    expected = call.of_the_sum()
    with group("sm90", 2, call, threads=512) as made:
        for results in made.results([call, replace(call, tokens=None)]):
            check(expected, results)


def test_which_calls_fit() -> None:
    """A launch needs a channel for each CTA, clusters that run at once, and places for its pieces."""
    from dsv4_kernels.hyper_connection import choice

    def most(
        boxes: Plan,
        clusters: int = 16,
        dim: int = 4096,
        parts: torch.dtype = torch.bfloat16,
        name: str | None = None,
    ) -> int:
        empty = torch.zeros(1, dtype=torch.int32)
        made = Mailboxes(None, 0, boxes, (), empty, empty, empty, 1, clusters)
        return choice.most_tokens_of_parts(made, dim, parts, name)

    boxes = Plan.of(4, 2 << 20)
    assert (boxes.channels, boxes.places) == (128, 2)
    assert most(boxes) == most(boxes, 17) == 128
    # A multiprocessor has two CTAs with more than 16 tokens of V4-Flash's width, and one with V4-Pro's.
    assert [most(boxes, clusters) for clusters in (15, 8, 7, 4, 3, 1, 0)] == [128, 128, 14, 8, 3, 1, 0]
    assert [most(boxes, clusters, 7168) for clusters in (15, 8, 7, 4, 3, 0)] == [60, 32, 14, 8, 3, 0]
    assert most(boxes, parts=torch.float32) == most(boxes, dim=7168) == 128
    assert most(boxes, dim=7168, parts=torch.float32) == 64  # eight pieces of a thread need four places
    assert most(Plan.of(8, 1 << 20), dim=7168) == 64
    assert most(Plan.of(4, 1 << 16)) == most(Plan.of(4, 2 << 20, channels=32)) == 8
    # On Blackwell groups grow until all clusters run at once; then multiprocessors have two CTAs of V4-Flash's width.
    assert [most(boxes, clusters, name="sm100") for clusters in (18, 15, 8, 7, 0)] == [128, 128, 128, 112, 0]
    assert [most(boxes, clusters, 7168, name="sm100") for clusters in (18, 15, 8, 7, 0)] == [128, 120, 64, 56, 0]
    assert most(boxes, dim=1000) == most(boxes, dim=9216) == most(Plan.of(4, 2 << 20, 64, 32)) == 0


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_is_compiled_ahead(arch: str, fp32: bool) -> None:
    """The plan of every call of up to the most tokens, for parts in each dtype, on a GPU that runs any number of
    clusters, and no other."""
    from dsv4_kernels.hyper_connection import choice, gpu

    shapes = {"hidden_size": 4096, "quantises_inputs": True, "experts_sum_fp32": fp32, "peer_sum_ranks": 4}
    shapes["leaves_expert_rows"] = False
    model = SimpleNamespace(**shapes, peer_boundary_tokens=64)
    compiled = {job.args for job in gpu.parts_compile_jobs(model, arch)}
    called = {
        (choice.with_parts(plan, Plan.of(4, 2 << 20), clusters, tokens, parts), arch)
        for tokens in range(1, 65)
        for clusters in ((16,) if arch == "sm_90a" else range(4, 20))
        for plan in [choice.chosen(tokens, 4096, 24, True, False, True, None if arch == "sm_90a" else clusters)]
        for parts in (torch.bfloat16, *([torch.float32] if fp32 else []))
    }
    assert compiled == called and len(called) == (3 if arch == "sm_90a" else 5) * (1 + fp32)
    assert not gpu.parts_compile_jobs(SimpleNamespace(**shapes, peer_boundary_tokens=0), arch)


def test_what_is_refused() -> None:
    from dsv4_kernels.hyper_connection import gpu, hc_boundary_of_parts

    call, empty = Boundary("sm90", 2, 3, 2), torch.zeros(1, dtype=torch.int32)
    boxes = Mailboxes(None, 0, Plan.of(2, 4096), (0, 0), empty, empty, empty, 1, 16)
    i = call.inputs
    with pytest.raises(ValueError, match=r"3 tokens in groups of 1; these mailboxes and GPUs take at most 0 tokens"):
        gpu.sm90_hc_boundary_of_parts(call.parts[0], boxes, *i.boundary()[1:])
    with pytest.raises(ValueError, match=r"need y \(3, 1024\) torch.bfloat16 or torch.float32, post"):
        hc_boundary_of_parts(call.parts[0].half(), boxes, *i.boundary()[1:])
    boxes = Mailboxes(None, 0, Plan.of(2, 1 << 20), (0, 0), empty, empty, empty, 1, 16)
    with pytest.raises(ValueError, match=r"take y in torch.bfloat16 or torch.float32, with contiguous rows"):
        gpu.sm90_hc_boundary_of_parts(torch.zeros(3, 2048).bfloat16()[:, ::2], boxes, *i.boundary()[1:])


@pytest.mark.parametrize("plan", [Plan.of(2, 2 << 20), Plan.of(8, 1 << 20), Plan.of(2, MOST_BYTES, 64, 32, 24)])
def test_no_two_pieces_share_a_place(plan: Plan) -> None:
    """The pieces of a CTA's threads lie in its channel, apart from each other and from those of other senders."""
    from dsv4_kernels.hyper_connection import choice, gpu

    for dim in (1024, 4096, 7168):
        for tokens in (1, 2, 4, 8):
            for parts in (torch.bfloat16, torch.float32):
                made = choice.with_parts(gpu.Plan(tokens, dim, 24, True), plan, 16, tokens, parts)
                if made is None:
                    continue
                size = made.piece_words * 4
                assert made.pieces * size * made.threads == tokens * dim // CLUSTER * (4 if made.fp32_parts else 2)
                args = SimpleNamespace(peers=SimpleNamespace(place_bytes=plan.place_bytes))
                begins = {
                    gpu.HyperConnection(made).place_of_piece(args, thread * size, piece, sender)
                    for thread in (0, 1, made.threads - 1)
                    for piece in range(made.pieces)
                    for sender in range(plan.ranks)
                }
                assert len(begins) == 3 * made.pieces * plan.ranks
                ordered = sorted(begins)
                assert all(b - a >= size for a, b in itertools.pairwise(ordered))
                assert ordered[-1] + size <= plan.channel_bytes and made.places <= plan.places
