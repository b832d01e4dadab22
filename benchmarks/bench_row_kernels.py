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
from dsv4_kernels.kv_layout import ROW_BYTES, KVRows, RowFormat
from dsv4_kernels.moe import fused_swiglu, swiglu_fp8
from dsv4_kernels.norm import rms_norm, rms_norm_fp8
from dsv4_kernels.norm_rope_store import Destination, norm_rope_store
from dsv4_kernels.quant import fp8_quantise
from dsv4_kernels.rope import YarnScaling, apply_rope_in_place, rope_frequencies
from dsv4_kernels.router import route_hash_logits, route_topk_logits

TOKENS = (1, 16, 64, 128, 1024, 8192)
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
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "impl": impl,
        "versions": versions(),
        "state": gpu_state() if device.type == "cuda" else None,
        "copy_bytes_per_second": bandwidth,
        "rows": rows,
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="a regular expression of names of rows")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--impl", help="by name; default: the kernel for this GPU")
    parser.add_argument("--ref", action="store_true", help="time the references too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    impl = options.impl or registry.chosen("norm_rope_store", device, torch.bfloat16).name
    tokens = [int(count) for count in options.tokens.split(",")]
    result = run(device, impl, options.ops, tokens, options.ref)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
