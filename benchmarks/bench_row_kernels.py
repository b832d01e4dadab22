"""The kernels that work on rows, between the products of a layer, against the card's copy bandwidth.

    python benchmarks/bench_row_kernels.py [--ops REGEX] [--tokens 1,64,8192] [--impl sm90] [--ref] [--out FILE.json]

Flash's sizes: hidden 4096, 64 heads of 512 (and 16, a rank of four), q_lora 1024, 256 experts of which 6, 2048
intermediate channels. Each op first runs once beside its reference (WRONG is the largest relative distance, in the
Frobenius norm). Then its calls over several sets of inputs are captured in a CUDA graph, and the time is the median of
a replay over its calls: launch to launch, as in a captured decode step. Sets take turns until they are twice the L2
cache, or MOST_SETS of them: below that (few tokens) inputs come from L2, as in a forward, where a product has just
written them.

    floor = bytes / copy bandwidth        read once and written once; the bandwidth measured in the same run

`--ref` also times the reference, the chain of PyTorch kernels. The last line is the result as JSON.

    python benchmarks/bench_row_kernels.py --chain [--tokens 1,4,16,64] [--layers 43] [--out FILE.json]

times what launching so many small kernels costs: all layers' boundaries and row kernels in one CUDA graph, each reading
what one before has written, and the same with every launch allowed to begin while the one before ends
(`device.dependent_launch`). Before that, replays of the second must have the bits of the first's kernels one by
one, REPLAYS times. Products and attention are left out: in a step they lie between these.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_sparse_attention import gpu_state, interleaved, l2_bytes, measure_ceilings, versions
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.hyper_connection import hc_boundary
from dsv4_kernels.indexer import index_query
from dsv4_kernels.kv_layout import ROW_BYTES, KVRows, RowFormat
from dsv4_kernels.moe import fused_swiglu, swiglu_fp8
from dsv4_kernels.norm import rms_norm, rms_norm_fp8
from dsv4_kernels.norm_rope_store import Destination, norm_rope_store
from dsv4_kernels.quant import fp8_quantise
from dsv4_kernels.rope import YarnScaling, apply_rope_in_place, rope_frequencies
from dsv4_kernels.router import route_hash_logits, route_topk_logits

TOKENS = (1, 16, 64, 128, 1024, 8192)
CHAIN_TOKENS = (1, 4, 16, 64)
LAYERS = 43
REPLAYS = 100
"""Of a graph whose kernels overlap, compared: one that reads too early is wrong now and then."""
PREFILL_TOKENS = 1024
"""From so many tokens on a chunk also writes its workspace, and one checkpoint of 128 rows."""
MOST_SETS = 200
MOST_SET_BYTES = 8 << 30
SECONDS_PER_CASE = 0.1
WRONG = 0.01
EPS, LIMIT, SCALE = 1e-6, 10.0, 1.5
HIDDEN, HEADS, DIM, Q_LORA, EXPERTS, TOP_K, CHANNELS, VOCABULARY = 4096, 64, 512, 1024, 256, 6, 2048, 129280

Call = Callable[[str | None], Sequence[Tensor]]
"""Runs one implementation and returns what it made."""


@dataclass(frozen=True)
class Work:
    """One op on one set of inputs."""

    op: str
    bytes: int
    """Read once and written once."""
    call: Call


def normal(*shape: int, device: torch.device) -> Tensor:
    """bf16 noise."""
    return torch.randn(shape, device=device).bfloat16()


def norm_rope_store_work(tokens: int, device: torch.device, heads: int = HEADS) -> Work:
    """q in place, window rows into an FP8 ring, in prefill also into the workspace and a checkpoint."""
    q, kv = normal(tokens, heads, DIM, device=device), normal(tokens, DIM, device=device)
    weight, positions = torch.ones(DIM, device=device), torch.arange(tokens, device=device) + 5000
    frequencies = rope_frequencies(64, 160000.0, YarnScaling(16, 65536, 32, 1)).to(device)

    def destination(rows: Tensor) -> Destination:
        table = KVRows.allocate(int(rows.max()) + 1, RowFormat.FP8, DIM, 64, torch.bfloat16, device, 0.0)
        return Destination(table, rows)

    every = torch.arange(tokens, device=device)
    last = torch.where(every >= tokens - 128, every % 128, -1)
    lists = [every, last, last] if tokens >= PREFILL_TOKENS else [every * 128 + 77]
    destinations = [destination(rows) for rows in lists]

    def call(impl: str | None) -> list[Tensor]:
        norm_rope_store(q, kv, weight, positions, frequencies, EPS, destinations, out=q, impl=impl)
        return [q, *(table.gather(rows[rows >= 0]) for table, rows in destinations)] if not capturing() else [q]

    written = sum(int((rows >= 0).sum()) * ROW_BYTES + 8 * tokens for rows in lists)
    return Work("norm_rope_store", 4 * q.numel() + 2 * kv.numel() + 8 * tokens + written, call)


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def inverse_rope_work(tokens: int, device: torch.device) -> Work:
    """The attention's output, in place."""
    o, positions = normal(tokens, HEADS, DIM, device=device), torch.arange(tokens, device=device) + 5000
    frequencies = rope_frequencies(64, 10000.0, None).to(device)
    moved = 2 * 2 * tokens * HEADS * 64 + 8 * tokens

    def call(impl: str | None) -> list[Tensor]:
        return [apply_rope_in_place(o, positions, frequencies, True, impl)]

    return Work("apply_rope_in_place", moved, call)


def rms_norm_work(tokens: int, device: torch.device, dim: int = Q_LORA) -> Work:
    """Of q's latent, or of a token."""
    x, weight = normal(tokens, dim, device=device), torch.ones(dim, device=device)
    return Work("rms_norm", 4 * x.numel() + 4 * dim, lambda impl: [rms_norm(x, weight, EPS, impl)])


def rms_norm_fp8_work(tokens: int, device: torch.device) -> Work:
    """Of q's latent, quantised."""
    x, weight = normal(tokens, Q_LORA, device=device), torch.ones(Q_LORA, device=device)
    moved = 3 * x.numel() + 4 * x.numel() // 128 + 4 * Q_LORA
    return Work("rms_norm_fp8", moved, lambda impl: values(*rms_norm_fp8(x, weight, EPS, True, impl)))


def topk_work(tokens: int, device: torch.device) -> Work:
    """The learned router behind its product."""
    logits, bias = torch.randn(tokens, EXPERTS, device=device), torch.randn(EXPERTS, device=device) * 0.1
    moved = 4 * logits.numel() + 8 * tokens * TOP_K
    return Work("route_topk_logits", moved, lambda impl: route_topk_logits(logits, bias, TOP_K, SCALE, impl)[:1])


def hash_work(tokens: int, device: torch.device) -> Work:
    """The router by token id behind its product."""
    logits = torch.randn(tokens, EXPERTS, device=device)
    table = torch.randint(0, EXPERTS, (VOCABULARY, TOP_K), dtype=torch.int32, device=device)
    ids = torch.randint(0, VOCABULARY, (tokens,), device=device)
    moved = tokens * (8 + TOP_K * (4 + 4 + 8))
    return Work("route_hash_logits", moved, lambda impl: route_hash_logits(logits, table, ids, SCALE, impl)[:1])


def swiglu_work(tokens: int, device: torch.device) -> Work:
    """Of the shared expert, in bf16."""
    gate_up = normal(tokens, 2 * CHANNELS, device=device)
    return Work("fused_swiglu", 6 * tokens * CHANNELS, lambda impl: [fused_swiglu(gate_up, LIMIT, impl)])


def swiglu_fp8_work(tokens: int, device: torch.device) -> Work:
    """Of the shared expert, quantised."""
    gate_up = normal(tokens, 2 * CHANNELS, device=device)
    moved = 5 * tokens * CHANNELS + 4 * tokens * CHANNELS // 128
    return Work("swiglu_fp8", moved, lambda impl: values(*swiglu_fp8(gate_up, LIMIT, True, impl)))


def quantise_work(tokens: int, device: torch.device) -> Work:
    """Of a layer's input."""
    x = normal(tokens, HIDDEN, device=device)
    moved = 3 * x.numel() + 4 * x.numel() // 128
    return Work("fp8_quantise", moved, lambda impl: values(*fp8_quantise(x, 128, True, impl)))


def values(codes: Tensor, scales: Tensor) -> list[Tensor]:
    """What is compared; nothing is launched in a capture."""
    return [codes] if capturing() else [codes.float(), scales]


WORKS: dict[str, Callable[[int, torch.device], Work]] = {
    "norm_rope_store": norm_rope_store_work,
    "norm_rope_store_16_heads": lambda tokens, device: norm_rope_store_work(tokens, device, 16),
    "inverse_rope": inverse_rope_work,
    "rms_norm_1024": rms_norm_work,
    "rms_norm_4096": lambda tokens, device: rms_norm_work(tokens, device, HIDDEN),
    "rms_norm_fp8": rms_norm_fp8_work,
    "route_topk": topk_work,
    "route_hash": hash_work,
    "swiglu": swiglu_work,
    "swiglu_fp8": swiglu_fp8_work,
    "fp8_quantise": quantise_work,
}


def distance(name: str, tokens: int, device: torch.device, impl: str) -> float:
    """Largest relative distance of an implementation's results from the reference's, on the same inputs.

    Raises:
        AssertionError: it is more than WRONG.
    """
    made = []
    for which in (impl, "ref"):
        torch.manual_seed(1)
        made.append([x.clone() for x in WORKS[name](tokens, device).call(which)])
    found = max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)) for a, b in zip(*made, strict=True)
    )
    assert found <= WRONG, f"{name} of {tokens} tokens is off by {found:.3g}; nothing is timed"
    return found


def number_of_sets(bytes_a_set: int, device: torch.device) -> int:
    """Twice the L2 cache, within MOST_SETS and MOST_SET_BYTES."""
    wanted = -(-2 * l2_bytes(device) // bytes_a_set) + 1
    return max(1, min(wanted, MOST_SETS, MOST_SET_BYTES // bytes_a_set))


def run_case(name: str, tokens: int, device: torch.device, impl: str, bandwidth: float, with_ref: bool) -> dict:
    """One row of the result."""
    error = distance(name, tokens, device, impl)
    first = WORKS[name](tokens, device)
    sets = [first] + [WORKS[name](tokens, device) for _ in range(number_of_sets(first.bytes, device) - 1)]

    def calls(which: str) -> list[Callable[[], object]]:
        return [lambda work=work: work.call(which) for work in sets]

    contenders = {"ours": calls(impl)}
    # What reads a list back cannot be captured.
    if with_ref and registry.chosen(first.op, device, torch.bfloat16, "ref").graph_safe:
        contenders["ref"] = calls("ref")
    times = interleaved(contenders, device, SECONDS_PER_CASE * len(contenders) if device.type == "cuda" else 0.0)
    return {
        "name": name,
        "tokens": tokens,
        "us": round(times["ours"].median_us, 3),
        "spread": round(times["ours"].spread, 4),
        "ref_us": round(times["ref"].median_us, 3) if "ref" in times else None,
        "bytes": first.bytes,
        "floor_us": round(1e6 * first.bytes / bandwidth, 3),
        "sets": len(sets),
        "rel_err": float(f"{error:.3e}"),
    }


class Chain:
    """The small kernels of some layers, each reading what one before it has written."""

    LAUNCHES = 10
    """Of a layer."""

    def __init__(self, tokens: int, layers: int, device: torch.device, impl: str) -> None:
        self.tokens, self.device, self.impl = tokens, device, impl
        torch.manual_seed(2)
        self.streams = normal(tokens, 4, HIDDEN, device=device)
        self.y = normal(tokens, HIDDEN, device=device)
        self.post, self.comb = torch.rand(tokens, 4, device=device), torch.rand(tokens, 4, 4, device=device) / 2
        # Every boundary reads a weight of its own, as in a model, which all of them together read from memory.
        self.fn = torch.randn(2 * layers, 24, 4 * HIDDEN, device=device) / 128
        self.base, self.scale = torch.randn(24, device=device), torch.ones(3, device=device)
        self.weight = torch.ones(HIDDEN, device=device)
        self.positions = torch.arange(tokens, device=device) + 5000
        self.frequencies = rope_frequencies(64, 160000.0, YarnScaling(16, 65536, 32, 1)).to(device)
        self.head_weights, self.bias = torch.randn(tokens, 16, device=device), torch.randn(EXPERTS, device=device)
        table = KVRows.allocate(128 * tokens, RowFormat.FP8, DIM, 64, torch.bfloat16, device, 0.0)
        self.window = Destination(table, torch.arange(tokens, device=device) * 128 + 77)

    def __call__(self) -> list[Tensor]:
        """Everything that the last layer has made."""
        state = (self.y, self.streams, self.post, self.comb)
        made: list[Tensor] = []
        for layer in range(len(self.fn) // 2):
            state, made = self.layer(state, self.fn[2 * layer : 2 * layer + 2])
        return [*state, *made, self.window.table.storage]

    def layer(self, state: tuple[Tensor, ...], fn: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """One layer, from (y, streams, post, comb) to the same."""
        impl = self.impl
        streams, x, post, comb, *codes = self.boundary(state, fn[0])
        latent = rms_norm_fp8(x[:, :Q_LORA], self.weight[:Q_LORA], EPS, True, impl)
        query = index_query(
            *(x[:, :2048].view(-1, 16, 128), self.head_weights, self.positions, self.frequencies, 0.02, True, impl)
        )
        q = torch.empty(self.tokens, 8, DIM, dtype=x.dtype, device=x.device)
        kv, weight = x[:, Q_LORA : Q_LORA + DIM], self.weight[:DIM]
        norm_rope_store(
            *(x.view(-1, 8, DIM), kv, weight, self.positions, self.frequencies, EPS, [self.window]), out=q, impl=impl
        )
        apply_rope_in_place(q, self.positions, self.frequencies, True, impl)
        quantised = fp8_quantise(q.view(-1, HIDDEN), 128, True, impl)
        streams, x, post, comb, *more = self.boundary((q.view(-1, HIDDEN), streams, post, comb), fn[1])
        routed = route_topk_logits(x.view(torch.float32)[:, :EXPERTS], self.bias, TOP_K, SCALE, impl)
        shared = swiglu_fp8(x, LIMIT, True, impl)
        y = fused_swiglu(streams[:, :2].view(-1, 2 * HIDDEN), LIMIT, impl)
        return (y, streams, post, comb), [*codes, *more, *latent, *query, *quantised, *routed, *shared]

    def boundary(self, state: tuple[Tensor, ...], fn: Tensor) -> tuple[Tensor, ...]:
        """Between two sublayers."""
        return hc_boundary(*state, fn, self.base, self.scale, self.weight, EPS, EPS, 20, True, self.impl)


def launched(chain: Chain, early: bool) -> Callable[[], list[Tensor]]:
    """The chain, whose launches may begin early or not."""

    def call() -> list[Tensor]:
        with dependent_launch.switched(early):
            return chain()

    return call


def check_chain(chain: Chain) -> None:
    """Replays of the graph whose kernels overlap have the bits of the kernels one by one.

    Raises:
        AssertionError: one of REPLAYS has not.
    """
    expected = [x.clone() for x in launched(chain, False)()]
    made = launched(chain, True)()
    if chain.device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = launched(chain, True)()
    for replay in range(REPLAYS if chain.device.type == "cuda" else 1):
        if chain.device.type == "cuda":
            for x in made[:-1]:  # what is not written again shows; of the window's table little is
                (x.view(torch.uint8) if x.dtype.itemsize == 1 else x).fill_(-1 if x.dtype.itemsize > 1 else 0xFF)
            graph.replay()
        wrong = [i for i, (a, b) in enumerate(zip(made, expected, strict=True)) if not same_bytes(a, b)]
        assert not wrong, f"results {wrong} of {len(made)} differ in replay {replay}; nothing is timed"


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whatever they stand for."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def run_chain(device: torch.device, impl: str, tokens: Sequence[int], layers: int) -> dict:
    """The result; prints it row by row."""
    print(f"{'tokens':>6} {'launches':>9} {'us':>9} {'each':>7} {'early us':>9} {'each':>7} {'ratio':>7}")
    rows = []
    for count in tokens:
        chain = Chain(count, layers, device, impl)
        check_chain(chain)
        contenders = {"after": [launched(chain, False)], "early": [launched(chain, True)]}
        times = interleaved(contenders, device, 1.0 if device.type == "cuda" else 0.0)
        after, early, launches = times["after"].median_us, times["early"].median_us, layers * Chain.LAUNCHES
        rows.append(
            {"tokens": count, "launches": launches, "us": round(after, 2), "early_us": round(early, 2)}
            | {"spread": round(times["after"].spread, 4), "early_spread": round(times["early"].spread, 4)}
        )
        each = f"{after / launches:7.2f} {early:9.1f} {early / launches:7.2f} {early / after:7.3f}"
        print(f"{count:6} {launches:9} {after:9.1f} {each}", flush=True)
    return about(device, impl) | {"layers": layers, "rows": rows}


def about(device: torch.device, impl: str) -> dict:
    """Where it was measured."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "none",
        "impl": impl,
        "versions": versions(),
        "state": gpu_state() if on_gpu else None,
    }


def line(row: dict) -> str:
    """A row of the table."""
    reference = f"{row['ref_us']:10.1f}" if row["ref_us"] else f"{'-':>10}"
    share = row["floor_us"] / row["us"]
    return (
        f"{row['name']:26} {row['tokens']:6} {row['us']:9.2f} {row['floor_us']:9.2f} {share:6.0%} {reference} "
        f"{row['rel_err']:9.1e}"
    )


def run(device: torch.device, impl: str, ops: str, tokens: Sequence[int], with_ref: bool) -> dict:
    """The result; prints it row by row."""
    bandwidth = measure_ceilings(device).bytes_per_second
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    print(f"{'op':26} {'tokens':>6} {'us':>9} {'floor':>9} {'of it':>6} {'ref us':>10} {'error':>9}")
    rows = []
    for name in WORKS:
        if re.search(ops, name):
            for count in tokens:
                rows.append(run_case(name, count, device, impl, bandwidth, with_ref))
                print(line(rows[-1]), flush=True)
    return about(device, impl) | {"copy_bytes_per_second": bandwidth, "rows": rows}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="a regular expression of names of rows")
    parser.add_argument("--tokens", help="of a call, separated by commas")
    parser.add_argument("--impl", help="by name; default: the kernel for this GPU")
    parser.add_argument("--ref", action="store_true", help="time the references too")
    parser.add_argument("--chain", action="store_true", help="many launches one after the other, and early ones")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the chain")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    impl = options.impl or registry.chosen("norm_rope_store", device, torch.bfloat16).name
    tokens: Sequence[int] = CHAIN_TOKENS if options.chain else TOKENS
    if options.tokens:
        tokens = [int(count) for count in options.tokens.split(",")]
    if options.chain:
        result = run_chain(device, impl, tokens, options.layers)
    else:
        result = run(device, impl, options.ops, tokens, options.ref)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
