"""Ranks of `all_reduce` and `hc_boundary_of_parts` as processes, one a GPU: scenarios of `test_all_reduce_gpu.py`.

python -c "from ops import ranks_on_gpus; ranks_on_gpus.main('sizes', 2)"      with tests/lib on the path
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from ops.hyper_connection_cases import HC_EPS, ITERATIONS, NORM_EPS, expert_rows, inputs, moved
from torch import Tensor, distributed

from dsv4_kernels.all_reduce import all_reduce, peer_memory
from dsv4_kernels.host.expert_rows import ExpertRows
from dsv4_kernels.host.mailboxes import Mailboxes
from dsv4_kernels.hyper_connection import choice, hc_boundary, hc_boundary_of_parts
from dsv4_kernels.reference.batch_invariant import sum_in_order

DIM = 4096
MOST_ROWS = 300
ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 128, 129, 255, 256, MOST_ROWS)
REPLAYS = 10_000
JITTERS = 1_000
BOUNDARY_TOKENS = (1, 2, 4, 5, 8, 16, 17, 33, 64, 65, 100, 128)
SECONDS = 60.0
SHORT_SECONDS = 2.0


class Rank:
    """One rank of a scenario."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.device = torch.device("cuda", rank)
        self.cpu_group = distributed.group.WORLD

    def connect(self) -> Mailboxes:
        return peer_memory.connect(self.cpu_group, self.cpu_group, self.device, MOST_ROWS * DIM * 4, SECONDS)

    def meet(self) -> None:
        torch.cuda.synchronize()
        distributed.barrier(self.cpu_group)

    def parts(self, rows: int, seed: int, dtype: torch.dtype = torch.bfloat16, dim: int = DIM) -> Tensor:
        """[ranks, rows, dim] the parts of all ranks; another order of adding gives other bits."""
        g = torch.Generator(self.device).manual_seed(seed)
        shape = (self.ranks, rows, dim)
        scale = torch.logspace(-3, 3, 31, device=self.device)[torch.randint(31, shape, generator=g, device=self.device)]
        parts = (torch.randn(shape, generator=g, device=self.device) * scale).to(dtype)
        if self.ranks > 2:  # the first two cancel
            parts[0, ..., ::3] *= 256
            parts[1, ..., ::3] = -parts[0, ..., ::3]
        return parts


def with_limit(boxes: Mailboxes, seconds: float) -> Mailboxes:
    return replace(boxes, time_limit=int(seconds * 1e9))


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.view(kind), b.view(kind))


def sizes(rank: Rank) -> None:
    """Every size and dtype: the bits of the definition; a row has its bits alone and among others."""
    boxes = rank.connect()
    for dtype in (torch.bfloat16, torch.float32):
        all_parts = rank.parts(MOST_ROWS, 1, dtype)
        whole = sum_in_order(all_parts)
        for rows in (*ROWS, *range(1, 70)):
            for first in {0, (MOST_ROWS - rows) // 2}:
                part = all_parts[rank.rank, first : first + rows].contiguous()
                assert same_bits(all_reduce(part, boxes), whole[first : first + rows]), (dtype, rows)
    assert all_reduce(all_parts[rank.rank, :0].contiguous(), boxes).shape == (0, DIM)
    too_many = torch.zeros(boxes.most_bytes // 16 + 1, 8, dtype=torch.bfloat16, device=rank.device)
    with contextlib.suppress(ValueError):
        all_reduce(too_many, boxes)
        raise AssertionError("more bytes than the mailboxes hold were accepted")


def ends_of_the_format(rank: Rank) -> None:
    """NaN of every pattern, infinities, zeros of both signs and subnormals arrive as they are."""
    boxes = rank.connect()
    every = torch.arange(2**16, device=rank.device).to(torch.int32).to(torch.int16).view(torch.bfloat16).view(16, DIM)
    for other in (0, 1, 2**15 - 1):
        parts = torch.stack([every] + [every.roll(other * r + 1, 1) for r in range(1, rank.ranks)])
        got, want = all_reduce(parts[rank.rank].contiguous(), boxes), sum_in_order(parts)
        assert torch.equal(got.isnan(), want.isnan())
        assert same_bits(got.nan_to_num(7), want.nan_to_num(7))
    assert boxes.late_ranks() == []


def graphs(rank: Rank) -> None:
    """A graph with sums of five sizes is replayed, each time with other numbers; eager sums of other sizes between."""
    boxes = rank.connect()
    base = {rows: rank.parts(rows, rows) for rows in (1, 3, 16, 64, MOST_ROWS)}
    replay = torch.zeros((), device=rank.device)
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)

    def step() -> None:
        replay.add_(1)
        for parts in base.values():
            now = parts + (replay * torch.arange(1, rank.ranks + 1, device=rank.device)).view(-1, 1, 1).bfloat16()
            got, want = all_reduce(now[rank.rank], boxes), sum_in_order(now)
            wrong.add_((got.view(torch.int16) != want.view(torch.int16)).sum())

    step()
    rank.meet()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream):
            step()
        for n in range(REPLAYS):
            graph.replay()
            if n % 1000 == 999:
                eager = rank.parts(5 + n // 1000, n)
                wrong.add_((all_reduce(eager[rank.rank].contiguous(), boxes) != sum_in_order(eager)).sum())
    torch.cuda.synchronize()
    assert int(replay) == REPLAYS + 1 and int(wrong) == 0, f"{int(wrong)} numbers differ"
    assert boxes.late_ranks() == []


def jitter(rank: Rank) -> None:
    """Each rank waits at random times; other kernels run on a second stream."""
    boxes = rank.connect()
    parts = rank.parts(64, 5)
    g = torch.Generator().manual_seed(rank.rank)
    side, x = torch.cuda.Stream(), torch.randn(2048, 2048, device=rank.device)
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    for n in range(JITTERS):
        rows = 1 + n * 7 % 64
        torch.cuda._sleep(int(torch.randint(200_000, (), generator=g)))
        if n % 5 == rank.rank:
            with torch.cuda.stream(side):
                x = x @ x / 50
        now = parts[:, :rows] + n
        wrong.add_((all_reduce(now[rank.rank].contiguous(), boxes) != sum_in_order(now)).sum())
    torch.cuda.synchronize()
    assert int(wrong) == 0 and boxes.late_ranks() == []


def late_rank(rank: Rank) -> None:
    """A rank that comes seconds later, but in time."""
    boxes = rank.connect()
    parts = rank.parts(16, 6)
    all_reduce(parts[rank.rank].contiguous(), boxes)
    rank.meet()
    if rank.rank == rank.ranks - 1:
        time.sleep(3)
    begin = time.monotonic()
    assert same_bits(all_reduce(parts[rank.rank].contiguous(), boxes), sum_in_order(parts))
    torch.cuda.synchronize()
    assert rank.rank == rank.ranks - 1 or time.monotonic() - begin > 2
    assert boxes.late_ranks() == []


def absent_rank(rank: Rank) -> None:
    """The other ranks give up after the limit, name the rank, return NaN, and wait only once."""
    boxes = rank.connect()
    part = rank.parts(16, 7)[rank.rank].contiguous()
    all_reduce(part, boxes)  # compiles, on one rank sooner than on another
    boxes = with_limit(boxes, SHORT_SECONDS)
    rank.meet()
    absent = rank.ranks - 1
    if rank.rank != absent:
        begin = time.monotonic()
        assert all_reduce(part, boxes).isnan().all()
        torch.cuda.synchronize()
        assert SHORT_SECONDS < time.monotonic() - begin < SHORT_SECONDS + 5
        assert absent in boxes.late_ranks()
        begin = time.monotonic()
        for _ in range(10):
            assert all_reduce(part, boxes).isnan().all()
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 1
    rank.meet()


def other_host(rank: Rank) -> None:
    """If one rank cannot map another one's memory, all ranks get the reason."""
    last = rank.rank == rank.ranks - 1
    host = mock.patch.object(peer_memory, "_host", lambda: f"host {last}")
    with host, contextlib.suppress(peer_memory.CannotConnectError):
        rank.connect()
        raise AssertionError("memory of another host was mapped")


class Boundary:
    """A boundary whose results are compared with those of `hc_boundary` on the sum of all parts."""

    rows: ExpertRows | None = None
    """Rows of experts whose sum is this rank's part."""

    def __init__(
        self, rank: Rank, boxes: Mailboxes, tokens: int, parts: torch.dtype, fp8: bool, dim: int = DIM
    ) -> None:
        i = inputs(tokens, dim, seed=tokens).to(str(rank.device))
        self.rank, self.boxes, self.fp8 = rank.rank, boxes, fp8
        self.before = (i.streams, i.post, i.comb)
        self.after = (i.fn, i.base, i.scale, i.weight, NORM_EPS, HC_EPS, ITERATIONS)
        self.parts = rank.parts(tokens, tokens, parts, dim)

    def with_experts(self) -> Boundary:
        """The boundary of parts that are sums over six experts."""
        tokens, dim = self.parts.shape[1:]
        rows = [expert_rows(tokens, dim, self.parts.dtype, seed, chosen=6) for seed in range(len(self.parts))]
        self.parts = torch.stack([of_rank.total() for of_rank in rows]).to(self.parts.device)
        self.rows = moved(rows[self.rank], str(self.parts.device))
        return self

    def wrong(self, parts: Tensor | None = None) -> Tensor:
        """How many results' numbers differ in a bit, int64 on the GPU."""
        parts = self.parts if parts is None else parts
        y = sum_in_order(parts).bfloat16()
        part = parts[self.rank] if self.rows is None else self.rows
        found = hc_boundary_of_parts(part, self.boxes, *self.before, *self.after, fp8=self.fp8)
        wanted = hc_boundary(y, *self.before, *self.after, fp8=self.fp8)
        return torch.stack([(a != b).sum() for a, b in zip(map(bits, found), map(bits, wanted), strict=True)]).sum()


def bits(x: Tensor) -> Tensor:
    """The numbers' bits as integers."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def boundary_sizes(rank: Rank) -> None:
    """Numbers of tokens with groups of every size, parts in both dtypes: the bits of the sum and `hc_boundary`."""
    boxes = rank.connect()
    for parts in (torch.bfloat16, torch.float32):
        most = choice.most_tokens_of_parts(boxes, DIM, parts)
        assert most >= 32, most
        for tokens in BOUNDARY_TOKENS:
            if tokens <= most:
                boundary = Boundary(rank, boxes, tokens, parts, fp8=True)
                for _ in range(3):
                    assert int(boundary.wrong()) == 0, (parts, tokens)
    assert boxes.late_ranks() == []


def boundary_of_experts(rank: Rank) -> None:
    """Parts that are sums over experts, in both dtypes: the bits of the sums and `hc_boundary`."""
    boxes = rank.connect()
    for parts in (torch.bfloat16, torch.float32):
        for tokens in (1, 4, 5, 16, 17, 33, 64):
            if tokens <= choice.most_tokens_of_parts(boxes, DIM, parts):
                boundary = Boundary(rank, boxes, tokens, parts, fp8=True).with_experts()
                for _ in range(3):
                    assert int(boundary.wrong()) == 0, (parts, tokens)
    assert boxes.late_ranks() == []


def boundary_of_pro(rank: Rank) -> None:
    """The width of V4-Pro, where a group of eight tokens takes two places of a mailbox, without codes."""
    boxes = rank.connect()
    most = choice.most_tokens_of_parts(boxes, 7168, torch.bfloat16)
    assert most >= 32, most
    for tokens in (1, 3, 5, 17, 32, 64, 128):
        if tokens <= most:
            boundary = Boundary(rank, boxes, tokens, torch.bfloat16, fp8=False, dim=7168)
            for _ in range(3):
                assert int(boundary.wrong()) == 0, tokens
    assert boxes.late_ranks() == []


def boundary_graphs(rank: Rank) -> None:
    """A graph of boundaries and sums in turns, on the same mailboxes: thousands of replays, each with other numbers."""
    boxes = rank.connect()
    most = min(64, choice.most_tokens_of_parts(boxes, DIM, torch.bfloat16))
    boundaries = [Boundary(rank, boxes, tokens, torch.bfloat16, tokens != 3) for tokens in (1, 16, 3, most, 4)]
    steps = torch.arange(1, rank.ranks + 1, device=rank.device).view(-1, 1, 1)
    replay = torch.zeros((), device=rank.device)
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)

    def step() -> None:
        replay.add_(1)
        for boundary in boundaries:
            now = boundary.parts + (replay * steps).bfloat16()
            wrong.add_(boundary.wrong(now))
            wrong.add_((all_reduce(now[rank.rank], boxes).view(torch.int16) != bits(sum_in_order(now))).sum())
            wrong.add_(boundary.wrong(now))

    step()
    rank.meet()
    assert int(wrong) == 0, "eager"
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream):
            step()
        for n in range(REPLAYS // 2):
            graph.replay()
            if n % 500 == 499:
                wrong.add_(boundaries[n // 500 % len(boundaries)].wrong())
    torch.cuda.synchronize()
    assert int(replay) == REPLAYS // 2 + 1 and int(wrong) == 0, f"{int(wrong)} numbers differ"
    assert boxes.late_ranks() == []


def boundary_jitter(rank: Rank) -> None:
    """Each rank waits at random times between boundaries and sums; other kernels run on a second stream."""
    boxes = rank.connect()
    boundaries = [Boundary(rank, boxes, tokens, torch.bfloat16, True) for tokens in (1, 16, 32)]
    g = torch.Generator().manual_seed(rank.rank)
    side, x = torch.cuda.Stream(), torch.randn(2048, 2048, device=rank.device)
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    for n in range(JITTERS):
        torch.cuda._sleep(int(torch.randint(200_000, (), generator=g)))
        if n % 5 == rank.rank:
            with torch.cuda.stream(side):
                x = x @ x / 50
        boundary = boundaries[n % 3]
        wrong.add_(boundary.wrong(boundary.parts + n))
        if n % 4 == 0:
            now = boundary.parts - n
            wrong.add_((all_reduce(now[rank.rank], boxes) != sum_in_order(now)).sum())
    torch.cuda.synchronize()
    assert int(wrong) == 0 and boxes.late_ranks() == []


def boundary_absent_rank(rank: Rank) -> None:
    """A boundary gives up after the limit, names the rank, returns NaN, and waits only once."""
    boxes = rank.connect()
    boundary = Boundary(rank, boxes, 5, torch.bfloat16, True)
    assert int(boundary.wrong()) == 0
    boxes = with_limit(boxes, SHORT_SECONDS)
    rank.meet()
    absent, given = rank.ranks - 1, (*boundary.before, *boundary.after)
    if rank.rank != absent:
        for limit in (SHORT_SECONDS + 5, 1):
            begin = time.monotonic()
            streams = hc_boundary_of_parts(boundary.parts[rank.rank], boxes, *given, fp8=True)[0]
            assert streams.isnan().all()
            assert time.monotonic() - begin < limit
            assert boxes.late_ranks() == [absent]
    rank.meet()


SCENARIOS: dict[str, Callable[[Rank], None]] = {
    f.__name__: f
    for f in (
        sizes,
        ends_of_the_format,
        graphs,
        jitter,
        late_rank,
        absent_rank,
        other_host,
        boundary_sizes,
        boundary_of_experts,
        boundary_of_pro,
        boundary_graphs,
        boundary_jitter,
        boundary_absent_rank,
    )
}


@contextlib.contextmanager
def group(rank: int, ranks: int, store: str) -> Iterator[None]:
    """A process group over gloo, and this rank's GPU as the current device."""
    torch.cuda.set_device(rank)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def run_rank(rank: int, ranks: int, store: str, scenario: str) -> None:
    """One process of a scenario."""
    with group(rank, ranks, store):
        SCENARIOS[scenario](Rank(rank, ranks))


def main(scenario: str, ranks: int) -> None:
    """Run a scenario; the last word printed is "done"."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (ranks, str(Path(folder) / "store"), scenario), ranks)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
