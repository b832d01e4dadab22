"""A layer's compressors in one call, `compress_store`, against the ops that it replaces and the card's bandwidth.

    python benchmarks/bench_compressor.py [--cases REGEX] [--quick] [--impl sm90] [--out FILE.json]

Dimensions and row formats of the release: FP8 entries, FP4 indexer keys. A decoding batch appends one token to each
request; in that step all requests, a quarter of them, or the average share close a compression group. A chunk has 8,192
tokens of one request.

First the call's result is compared with the definition's: states bit for bit, stored rows in the Frobenius norm; a
result that is off by more than WRONG is not timed. Then the calls of each contender over all sets of inputs are
captured in a CUDA graph, and the graphs are replayed in turns. Sets have states and products of their own, together
more than the L2 cache, as layers have. "parts" are the public ops one after the other, as they run without this op.

    floor = bytes / copy bandwidth

`Inputs.bytes` counts the bytes that must move: every raw row of the batch is read once, rows of closing groups are read
from the state, and kept rows and entries are written. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from lib.measuring import Ceilings, interleaved, l2_bytes, measure_ceilings
from lib.versions import versions

from dsv4_kernels import registry
from dsv4_kernels.compressor import Compression, Groups, compress, compress_store
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.norm import rms_norm
from dsv4_kernels.quant import hadamard
from dsv4_kernels.rope import YarnScaling, apply_rope_in_place, rope_frequencies

WRONG = 0.02
"""FP4 keys decide this: a value between two codes may become either, a step of up to a third."""
SECONDS_PER_CASE = 0.3
MAX_SETS, MAX_SETS_OF_PARTS = 1024, 16
BATCHES = (1, 16, 64, 128)
CHUNK_TOKENS = 8192
RATIO = {"csa": 4, "hca": 128}
RING = {"csa": 8, "hca": 128}
DIMS = {"csa": (512, 128), "hca": (512,)}
FORMAT = {512: RowFormat.FP8, 128: RowFormat.INDEX_FP4}
Call = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A chunk of `tokens` tokens of one request, or `tokens` requests that append one token each, `closing` of which
    close a compression group."""

    name: str
    kind: str
    tokens: int
    closing: int | None  # None for a chunk

    @property
    def halves(self) -> int:
        """Number of parts of head_dim channels in a raw row."""
        return 2 if self.kind == "csa" else 1


def all_cases() -> list[Case]:
    """Return decoding batches and chunks, for both kinds of layer."""
    cases = []
    for kind, ratio in RATIO.items():
        for batch in BATCHES:
            named: dict[int, str] = {}
            for share, closing in {"all": batch, "quarter": batch // 4, "average": batch // ratio}.items():
                named.setdefault(max(1, closing), share)
            for closing, share in named.items():
                cases.append(Case(f"decode-{kind}-b{batch}-{share}", kind, batch, closing))
        cases.append(Case(f"prefill-{kind}-{CHUNK_TOKENS}", kind, CHUNK_TOKENS, None))
    return cases


@dataclass(frozen=True)
class Inputs:
    """Inputs of one call."""

    groups: Groups
    compressions: tuple[Compression, ...]

    def bytes(self, case: Case) -> int:
        """Return the bytes that must move."""
        closed = int((self.groups.sources >= 0).any(1).sum())
        kept = int((self.groups.state_rows >= 0).sum())
        total = 0
        for c in self.compressions:
            raw = 2 * c.kv.shape[1] * 4
            total += case.tokens * raw + kept * raw + closed * c.table.row_bytes + c.ape.nbytes
            if case.closing is not None:
                total += closed * (self.groups.sources.shape[1] - 1) * 2 * c.head_dim * 4
        return total


def number_of_sets(case: Case, cache_bytes: int) -> int:
    """Return the number of sets that together touch three times the cache."""
    touched = sum(case.halves * dim * 8 * 2 * case.tokens for dim in DIMS[case.kind])
    if case.closing is not None:
        touched += sum(case.closing * case.halves * RATIO[case.kind] * dim * 8 for dim in DIMS[case.kind])
    return min(MAX_SETS, max(3, -(-3 * cache_bytes // touched)))


def build(case: Case, sets: int, device: torch.device) -> list[Inputs]:
    """Return `sets` sets of inputs; the requests of all sets have slots of their own in one state."""
    ratio, ring, halves = RATIO[case.kind], RING[case.kind], case.halves
    requests = case.tokens if case.closing is not None else 1
    num_states, num_groups = sets * requests * ring, case.tokens if case.closing is not None else case.tokens // ratio
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    frequencies = rope_frequencies(64, 160000.0, YarnScaling(16, 65536, 32, 1)).to(device)
    shared = []
    for dim in DIMS[case.kind]:
        table = KVRows.allocate(sets * num_groups + 1, FORMAT[dim], dim, 64, torch.bfloat16, device, 0.0)
        state = normal(num_states, 2, halves * dim)
        shared.append((dim, normal(ratio, halves * dim), 1 + 0.3 * normal(dim), state, table))
    made = []
    for i in range(sets):
        groups = (
            _decode(case, i, num_states, device) if case.closing is not None else _chunk(case, i, num_states, device)
        )
        compressions = []
        for dim, ape, weight, state, table in shared:
            product = normal(case.tokens, 2 * halves * dim)
            kv, score = product.split(halves * dim, 1)
            options = {"hadamard": dim == 128, "values_of": FORMAT[dim]}
            compressions.append(Compression(kv, score, ape, state, weight, 1e-6, frequencies, table, **options))
        made.append(Inputs(groups, tuple(compressions)))
    return made


def _decode(case: Case, which: int, num_states: int, device: torch.device) -> Groups:
    """Return the groups of a decoding batch, in which the requests that close are spread evenly."""
    ratio, ring = RATIO[case.kind], RING[case.kind]
    request = torch.arange(case.tokens, device=device)
    closes = (request + 1) * case.closing // case.tokens > request * case.closing // case.tokens
    positions = torch.where(closes, 40 * ratio - 1, 40 * ratio)
    slots = which * case.tokens + request
    raw = positions[:, None] + torch.arange(1 - case.halves * ratio, 1, device=device)
    sources = slots[:, None] * ring + raw % ring
    sources[:, -1] = num_states + request
    return Groups(
        ratio,
        positions,
        torch.where(closes[:, None], sources, -1).int(),
        positions // ratio * ratio,
        1 + slots,
        slots * ring + positions % ring,
        tokens_per_request=1,
    )


def _chunk(case: Case, which: int, num_states: int, device: torch.device) -> Groups:
    """Return the groups of a request's first chunk."""
    ratio, ring, tokens = RATIO[case.kind], RING[case.kind], case.tokens
    positions = torch.arange(tokens, device=device)
    group = torch.arange(tokens // ratio, device=device)
    raw = group[:, None] * ratio + torch.arange((1 - case.halves) * ratio, ratio, device=device)
    kept = positions >= tokens - (case.halves - 1) * ratio
    sources = torch.where(raw < 0, -1, num_states + raw).int()
    slots = 1 + which * len(group) + group
    return Groups(
        ratio, positions, sources, group * ratio, slots, torch.where(kept, which * ring + positions % ring, -1)
    )


def ours(sets: list[Inputs], impl: str | None) -> list[Call]:
    """Return calls of the op."""

    def call(inputs: Inputs) -> Call:
        return lambda: compress_store(inputs.groups, inputs.compressions, torch.bfloat16, impl)

    return [call(inputs) for inputs in sets]


def parts(sets: list[Inputs]) -> list[Call]:
    """Return calls of the parts one after the other; entries of open groups are computed too and go to the null row."""

    def call(inputs: Inputs) -> Call:
        g = inputs.groups
        closes = (g.sources >= 0).any(1)
        slots, tokens = torch.where(closes, g.slots, 0), (g.state_rows >= 0).nonzero().squeeze(1)
        kept = g.state_rows[tokens]

        def run() -> None:
            for c in inputs.compressions:
                score = c.score + c.ape[g.positions % g.ratio]
                entries = compress(c.state, c.kv, score, g.sources, g.ratio, c.head_dim)
                entries = rms_norm(entries.bfloat16(), c.norm_weight, c.eps)
                entries = apply_rope_in_place(entries, g.entry_positions, c.frequencies)
                raw = torch.stack([c.kv, score], 1).index_select(0, tokens)
                c.state.index_copy_(0, kept, raw)
                c.table.scatter(slots, hadamard(entries) if c.hadamard else entries)

        return run

    return [call(inputs) for inputs in sets]


def relative_error(inputs: Inputs, impl: str | None) -> float:
    """Return the largest relative error of the stored rows over the compressions.

    Raises:
        AssertionError: a state differs from the definition's.
    """
    closed = (inputs.groups.sources >= 0).any(1)
    rows, results = inputs.groups.slots[closed], []
    for which in ("ref", impl):
        copies = [
            replace(c, state=c.state.clone(), table=replace(c.table, storage=torch.zeros_like(c.table.storage)))
            for c in inputs.compressions
        ]
        compress_store(inputs.groups, copies, torch.bfloat16, which)
        results.append(copies)
    error = 0.0
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected.state, found.state), "the state's raw rows differ from the definition's"
        wanted = expected.table.gather(rows).float()
        error = max(error, float((found.table.gather(rows).float() - wanted).norm() / wanted.norm()))
    return error


def run_case(case: Case, ceilings: Ceilings, impl: str | None, device: torch.device, seconds: float) -> dict:
    """Return one row of the result.

    Raises:
        AssertionError: our result is wrong.
    """
    sets = build(case, number_of_sets(case, l2_bytes(device)), device)
    error = relative_error(sets[0], impl)
    assert error <= WRONG, f"{case.name}: our rows are off by {error:.3g}; nothing is timed"
    contenders = {"ours": ours(sets, impl), "parts": parts(sets[:MAX_SETS_OF_PARTS])}
    times = interleaved(contenders, device, seconds)
    moved = sets[0].bytes(case)
    row = {"name": case.name, "sets": len(sets), "bytes": moved, "rel_err": float(f"{error:.3e}")}
    row["floor_us"] = round(1e6 * moved / ceilings.bytes_per_second, 3)
    for name, timing in times.items():
        row |= {f"{name}_us": round(timing.median_us, 3), f"{name}_spread": round(timing.spread, 4)}
    return row


def line(row: dict) -> str:
    """Return a row of the table."""
    return (
        f"{row['name']:28} {row['ours_us']:9.2f} {row['parts_us']:9.1f} {row['floor_us']:9.2f} "
        f"{row['floor_us'] / row['ours_us']:6.0%} {row['rel_err']:9.1e} {row['sets']:5}"
    )


def main(arguments: list[str] | None = None) -> dict:
    """Run the cases; print the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="only cases whose names match")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time a case")
    parser.add_argument("--impl", help="implementation by name; by default the registry's choice")
    parser.add_argument("--out", type=Path, help="a file for the JSON")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceilings = measure_ceilings(device)
    seconds = SECONDS_PER_CASE * (0.1 if options.quick else 1.0) if device.type == "cuda" else 0.0
    print(f"{'case':28} {'ours us':>9} {'parts us':>9} {'floor us':>9} {'of it':>6} {'error':>9} {'sets':>5}")
    rows = []
    for case in all_cases():
        if re.search(options.cases, case.name):
            rows.append(run_case(case, ceilings, options.impl, device, seconds))
            print(line(rows[-1]), flush=True)
    result = {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none",
        "versions": versions(),
        "impl": options.impl or registry.chosen("compress_store", device, torch.bfloat16).name,
        "bytes_per_second": round(ceilings.bytes_per_second),
        "cases": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
