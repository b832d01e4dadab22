"""Sums over the GPUs of one host by size: ours against NCCL, SGLang's all-reduce and a gather.

    python benchmarks/bench_all_reduce.py [--ranks 2] [--rows 1,16] [--dim 4096] [--sweep | --boundary] [--out FILE]

One process a GPU. Contenders, each with the parts [rows, dim] of one sublayer in bf16:

    ours           `dsv4_kernels.all_reduce`: stores into the other GPUs' memory, one hop, fp32 in rank order
    ours_T-MxC     (--sweep) as ours, with CTAs of T to M threads and at most C of them
    nccl           `torch.distributed.all_reduce`
    gather         under the deterministic flag without ours: all-gather, and the sum of the parts in rank order
    sglang         SGLang's `CustomAllReduceV2`, if it is installed and runs here (its error otherwise)

With --boundary the sum and the boundary to the next sublayer (`hc_boundary`, with FP8 codes) are timed, as a chain of
BOUNDARIES with weights of their own, so that they come from memory as in a model:

    fused          `hc_boundary_of_parts`, one launch
    ours           `all_reduce`, then `hc_boundary`
    nccl           NCCL's sum, then `hc_boundary`
    boundary       `hc_boundary` alone

First ours is compared bit by bit with the definition at every size, eagerly and in a graph; if a bit differs nothing is
timed. Then CALLS calls of a contender on inputs of their own are captured in a CUDA graph, and the graphs are replayed
in turns, after a barrier; a replay's time is that of the slowest rank. The table has medians in us a call. Ranks must
enqueue the same replays, so their number is fixed. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from lib.measuring import gpu_state
from lib.versions import versions
from torch import Tensor, distributed

from dsv4_kernels.all_reduce import all_reduce, peer_memory
from dsv4_kernels.host.mailboxes import FEWEST_THREADS, MOST_CHANNELS, MOST_THREADS, Mailboxes
from dsv4_kernels.hyper_connection import hc_boundary, hc_boundary_of_parts
from dsv4_kernels.hyper_connection.choice import most_tokens_of_parts
from dsv4_kernels.reference.batch_invariant import sum_in_order

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CALLS = 20
BOUNDARIES = 80
"""Boundaries of a graph; their weights, 1.5 MB each for V4-Flash, are more than L2 holds."""
REPLAYS = 30
WARM_REPLAYS = 5
MOST_BYTES = 16 << 20
MOST_BOUNDARY_ROWS = 256
SECONDS = 60.0
SWEEP = [(64, 512, 128), (256, 512, 128), (512, 512, 128), (128, 1024, 128), (128, 512, 64), (512, 1024, 32)]
Call = Callable[[Tensor], Tensor]


class Rank:
    """One process of the benchmark."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.ranks = rank, options.ranks
        self.device = torch.device("cuda", rank)
        self.cpu_group = distributed.new_group(backend="gloo")
        self.notes: dict[str, str] = {}
        self.boxes: dict[str, Mailboxes] = {}
        for few, many, channels in [(FEWEST_THREADS, MOST_THREADS, MOST_CHANNELS), *(SWEEP if options.sweep else ())]:
            name = "ours" if not self.boxes else f"ours_{few}-{many}x{channels}"
            self.boxes[name] = peer_memory.connect(
                distributed.group.WORLD,
                self.cpu_group,
                self.device,
                MOST_BYTES,
                SECONDS,
                threads=many,
                fewest_threads=few,
                channels=channels,
            )
            peer_memory.try_out(self.boxes[name], self.cpu_group, self.device)
        self.calls: dict[str, Call] = {
            **{name: lambda x, boxes=boxes: all_reduce(x, boxes) for name, boxes in self.boxes.items()},
            "nccl": self.nccl,
            "gather": self.gather,
        }
        self.sglang = self.sglang_sum() if not (options.without_sglang or options.boundary) else None
        if self.sglang is not None:
            self.calls["sglang"] = self.sglang.custom_all_reduce

    def nccl(self, x: Tensor) -> Tensor:
        """NCCL's sum, in place."""
        distributed.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Sum of gathered parts, as `sglang_dsv4.layers.rank_sum` adds them."""
        parts = x.new_empty(self.ranks, *x.shape)
        distributed.all_gather_into_tensor(parts.flatten(0, 1), x)
        return sum_in_order(parts)

    def sglang_sum(self) -> object | None:
        """SGLang's communicator, or None with the reason in `notes`."""
        try:
            from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

            made = CustomAllReduceV2(self.cpu_group, self.device)
            reason = "it is disabled here" if made.disabled else ""
            if not reason:
                made.custom_all_reduce(self.parts(1, 4096)[self.rank])  # compiles
                torch.cuda.synchronize()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        reasons = self.everybody(reason)
        if any(reasons):
            self.notes["sglang"] = next(filter(None, reasons))[:500]
            return None
        return made

    def everybody(self, value: object) -> list:
        """All ranks' values."""
        values: list = [None] * self.ranks
        distributed.all_gather_object(values, value, group=self.cpu_group)
        return values

    def parts(self, rows: int, dim: int) -> Tensor:
        """[ranks, rows, dim] bf16: all ranks' parts."""
        g = torch.Generator(self.device).manual_seed(rows)
        return torch.randn(self.ranks, rows, dim, generator=g, device=self.device).bfloat16()

    def wrong_bits(self, rows: int, dim: int) -> int:
        """Number of results of ours, of all variants, that differ from the definition in a bit."""
        parts = self.parts(rows, dim)
        part, want = parts[self.rank].contiguous(), sum_in_order(parts).view(torch.int16)
        wrong = 0
        for boxes in self.boxes.values():
            graph = torch.cuda.CUDAGraph()
            all_reduce(part, boxes)
            with torch.cuda.graph(graph):
                got = all_reduce(part, boxes)
            for _ in range(3):
                graph.replay()
                wrong += int((got.view(torch.int16) != want).sum())
                wrong += int((all_reduce(part, boxes).view(torch.int16) != want).sum())
        return sum(self.everybody(wrong))

    def times(self, rows: int, dim: int) -> dict[str, float | None]:
        """Microseconds a call, by contender; None where it does not sum parts of this size."""
        inputs = [self.parts(rows, dim)[self.rank] for _ in range(CALLS)]
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        for name, call in self.calls.items():
            if name == "sglang" and not self.sglang.should_custom_ar(inputs[0]):
                continue
            graphs[name] = self.captured(name, call, inputs)
        taken = self.timed(graphs, CALLS)
        return {name: taken.get(name) for name in self.calls}

    def timed(self, graphs: dict[str, torch.cuda.CUDAGraph], calls: int) -> dict[str, float]:
        """Microseconds a call of graphs of so many calls, replayed in turns."""
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        for n in range(WARM_REPLAYS + REPLAYS):
            for name, graph in graphs.items():
                torch.cuda.synchronize()
                distributed.barrier(self.cpu_group)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                if n >= WARM_REPLAYS:
                    samples[name].append(1e3 * begin.elapsed_time(end) / calls)
        of_ranks = self.everybody(samples)
        slowest = {name: map(max, zip(*(found[name] for found in of_ranks), strict=True)) for name in samples}
        return {name: round(statistics.median(values), 2) for name, values in slowest.items()}

    def captured(self, name: str, call: Call, inputs: list[Tensor]) -> torch.cuda.CUDAGraph:
        """A graph of one call for each input, after a warm-up."""
        for x in inputs[:2]:
            call(x.clone())
        torch.cuda.synchronize()
        distributed.barrier(self.cpu_group)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        registers = self.sglang.capture() if name == "sglang" else contextlib.nullcontext()
        with registers, torch.cuda.graph(graph, pool=pool):
            for x in inputs:
                call(x)
        return graph


CHAINS = ("fused", "ours", "nccl", "boundary")
State = tuple[Tensor, ...]
"""Streams, post and comb of the last boundary."""


class Boundaries:
    """Chains of boundaries, each after a sum over ranks, by contender."""

    def __init__(self, rank: Rank, rows: int, dim: int) -> None:
        self.rank, self.boxes = rank, rank.boxes["ours"]
        g = torch.Generator(rank.device).manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device=rank.device)

        self.parts = [rank.parts(rows, dim)[rank.rank] for _ in range(BOUNDARIES)]
        self.fn = normal(BOUNDARIES, 24, 4 * dim) / (4 * dim) ** 0.5
        self.base, self.scale, self.weight = normal(24), torch.ones(3, device=rank.device), 1 + 0.1 * normal(dim)
        self.begin = (normal(rows, 4, dim).bfloat16(), normal(rows, 4).sigmoid(), normal(rows, 4, 4).softmax(1))
        self.contenders = {name: getattr(self, name) for name in CHAINS}
        if rows > most_tokens_of_parts(self.boxes, dim, torch.bfloat16):
            del self.contenders["fused"]

    def after(self, n: int) -> tuple:
        """Arguments of boundary n after the state."""
        return self.fn[n], self.base, self.scale, self.weight, 1e-6, 1e-6, 20

    def fused(self, n: int, part: Tensor, state: State) -> State:
        """One launch."""
        return hc_boundary_of_parts(part, self.boxes, *state, *self.after(n), fp8=True)

    def ours(self, n: int, part: Tensor, state: State) -> State:
        """Our sum, then the boundary."""
        return self.boundary(n, all_reduce(part, self.boxes), state)

    def nccl(self, n: int, part: Tensor, state: State) -> State:
        """NCCL's sum, then the boundary."""
        return self.boundary(n, self.rank.nccl(part), state)

    def boundary(self, n: int, y: Tensor, state: State) -> State:
        """The boundary without a sum."""
        return hc_boundary(y, *state, *self.after(n), fp8=True)

    def chain(self, name: str, count: int = BOUNDARIES) -> State:
        """Results of the last boundary."""
        state, made = self.begin, ()
        for n in range(count):
            made = self.contenders[name](n, self.parts[n], state)
            state = (made[0], made[2], made[3])
        return made

    def wrong_bits(self) -> int:
        """Numbers of a chain's last results that differ between one launch and two."""
        if "fused" not in self.contenders:
            return 0
        wrong = 0
        for one, two in zip(self.chain("fused", 5), self.chain("ours", 5), strict=True):
            wrong += int((one.contiguous().view(torch.uint8) != two.contiguous().view(torch.uint8)).sum())
        return sum(self.rank.everybody(wrong))

    def times(self) -> dict[str, float | None]:
        """Microseconds a sublayer, by contender."""
        graphs = {}
        for name in self.contenders:
            self.chain(name, 2)
            torch.cuda.synchronize()
            distributed.barrier(self.rank.cpu_group)
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], pool=torch.cuda.graph_pool_handle()):
                self.chain(name)
        taken = self.rank.timed(graphs, BOUNDARIES)
        return {name: taken.get(name) for name in CHAINS}


def run_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    """One process: times all sizes; rank 0 prints the table and the result."""
    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=options.ranks, device_id=torch.device("cuda", rank)
    )
    made = Rank(rank, options)
    sizes = []
    for rows in options.rows:
        if rows * options.dim * 2 > MOST_BYTES or (options.boundary and rows > MOST_BOUNDARY_ROWS):
            continue
        boundaries = Boundaries(made, rows, options.dim) if options.boundary else None
        wrong = boundaries.wrong_bits() if boundaries else made.wrong_bits(rows, options.dim)
        if wrong:
            raise SystemExit(f"{wrong} bits differ from the definition at {rows} rows")
        times = boundaries.times() if boundaries else made.times(rows, options.dim)
        if rank == 0:
            if not sizes:
                print(f"{'rows':>5} {'KB':>7} " + " ".join(f"{name:>15}" for name in times))
            cells = " ".join(f"{'-' if us is None else us:>15}" for us in times.values())
            print(f"{rows:>5} {rows * options.dim // 512:>7} {cells}", flush=True)
        sizes.append({"rows": rows, "kilobytes": rows * options.dim * 2 / 1024, "us": times})
    late = made.everybody([boxes.late_ranks() for boxes in made.boxes.values()])
    if rank == 0:
        result = {
            "gpu": torch.cuda.get_device_name(),
            "ranks": options.ranks,
            "dim": options.dim,
            "calls_in_a_graph": BOUNDARIES if options.boundary else CALLS,
            "replays": REPLAYS,
            "bits": "as the definition, eagerly and in graphs",
            "late": any(map(any, late)),
            "sizes": sizes,
            "left_out": made.notes,
            "versions": versions() | {"nccl": ".".join(map(str, torch.cuda.nccl.version()))},
            "state": gpu_state(),
        }
        if options.out:
            Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result))
    distributed.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Start one process a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=list(ROWS))
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--boundary", action="store_true")
    parser.add_argument("--without-sglang", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args(arguments)
    if options.ranks < 2:
        raise SystemExit(f"a sum over ranks needs at least 2 GPUs; got {options.ranks}")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        torch.multiprocessing.spawn(run_rank, (options, store), options.ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
