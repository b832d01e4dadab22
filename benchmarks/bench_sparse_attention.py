"""The attention kernels against FlashMLA (and on Blackwell flashinfer's trtllm-gen), and against the card's limits.

    python benchmarks/bench_sparse_attention.py [--cases REGEX] [--quick] [--impl sm90] [--out FILE.json]
    python benchmarks/bench_sparse_attention.py --few-heads [...]       8 and 16 heads, beside 64
    python benchmarks/bench_sparse_attention.py --few-heads --alone --seconds 0.08 --minutes 0.9 \
        --cases '^decode-(csa|hca-32k).*-b(1|4|64|128|256)$'            the same within a minute, without FlashMLA
    python benchmarks/bench_sparse_attention.py --plot FILE.json        a picture of a result, FILE.png

Every case runs on the same inputs in the same process: ours by the public function with the kernel forced by name,
FlashMLA (the `flash_mla` module of sgl-flash-mla) called as SGLang calls it, its schedule made outside the timed part.
A chunk over FP8 rows is what the attention backend does: where `sparse_attention.unpacking` says so, its workspace and
its request's pages are unpacked first, in the timed part ("rows" of the result: "unpacked"; `--no-unpack` never does).
Beside it, as `flashmla_unpacked`, FlashMLA's sparse prefill, which SGLang calls for bf16 rows only, after the same
unpacking. FlashMLA takes 64 heads or 128; fewer are padded, as SGLang does, outside of the timed part.

With `--few-heads` our kernels for many heads are contenders, too (`many_heads`), and at the end ours for few heads is
compared with them and with the same case of 64 heads. `--alone` leaves FlashMLA and trtllm-gen out.

First each output is compared with fp64 on up to four tokens, in the Frobenius norm; a result that is off by more than
WRONG is not timed. Then each contender's calls over all sets of inputs (`attention_inputs`: cold L2) are captured in a
CUDA graph and the graphs are replayed in turns; the time is the median of a replay over its calls.

    floor = max(bytes / copy bandwidth, flops / matmul rate)

with `Inputs.bytes` and `Inputs.flops`, the bandwidth (read + written) of a kernel that negates 1 GiB and the
rate of a bf16 matrix product of 8,192 cubed, measured in the same run. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from attention_inputs import (
    SCALE,
    WINDOW,
    Case,
    Inputs,
    Pools,
    all_cases,
    build,
    checked_tokens,
    exact,
    few_heads_cases,
    number_of_sets,
    quick_cases,
    unpacked,
    unpacked_rows,
)
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host import compile_cache
from dsv4_kernels.kv_layout import PAGE_ROWS, ROW_BYTES, ROW_DIM, KVRows
from dsv4_kernels.sparse_attention import sparse_attention, unpacking
from dsv4_kernels.sparse_attention.problem import FEW_HEADS
from dsv4_kernels.sparse_attention.split import DECODE_SPLIT_KEYS
from dsv4_kernels.unpack import Pages, unpack_pages

WRONG = 0.02
LARGE_US = 25.0
"""Cases with a floor of at least so many microseconds are the large ones."""
FLASHMLA_HEADS = 64
"""At least."""
SECONDS_PER_CASE = 0.12
L2_BYTES_WITHOUT_GPU = 1 << 16
Call = Callable[[], Tensor]
"""Enqueues one call and returns its output [T, H, 512]."""


# ---- contenders: inputs of all sets -> one call for each


def ours(sets: list[Inputs], impl: str, split_keys: int | None) -> list[Call]:
    """The public function, with the kernel forced by name."""

    def call(inputs: Inputs) -> Call:
        arguments = inputs.arguments()
        return lambda: sparse_attention(**arguments, split_keys=split_keys, impl=impl)

    return [call(inputs) for inputs in sets]


def many_heads(sets: list[Inputs], impl: str, split_keys: int | None) -> list[Call]:
    """The same by Hopper's kernels for many heads, however few there are."""
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    def call(ordinary: Call) -> Call:
        def without_few_heads() -> Tensor:
            with mock.patch.object(sm90, "FEW_HEADS", 0):
                return ordinary()

        return without_few_heads

    return [call(ordinary) for ordinary in ours(sets, impl, split_keys)]


@dataclass(frozen=True)
class Chunk:
    """A set of inputs over bf16 rows, and what makes these of FP8 rows; both belong to the timed part."""

    inputs: Inputs
    fill: Callable[[], object]

    def after_filling(self, call: Call) -> Call:
        """Both as one call."""

        def both() -> Tensor:
            self.fill()
            return call()

        return both


def unpacked_chunks(sets: list[Inputs], case: Case, impl: str) -> list[Chunk]:
    """Of a case of FP8 rows. All use the same memory, as the layers of a forward do."""
    device = sets[0].q.device
    storage = torch.empty(unpacked_rows(case), ROW_DIM, dtype=torch.bfloat16, device=device)
    window_rows = torch.arange(case.tokens + WINDOW - 1, dtype=torch.int32, device=device)

    def chunk(inputs: Inputs) -> Chunk:
        def fill() -> None:
            parts = [Pages(inputs.window, window_rows, 1)]
            if inputs.pages is not None:
                parts.append(Pages(inputs.entries, inputs.pages, case.page_entries))
            unpack_pages(parts, storage, impl)

        return Chunk(unpacked(case, inputs, storage), fill)

    return [chunk(inputs) for inputs in sets]


def ours_unpacked(chunks: list[Chunk], impl: str) -> list[Call]:
    """The public functions, with the kernels forced by name."""
    calls = ours([chunk.inputs for chunk in chunks], impl, None)
    return [chunk.after_filling(call) for chunk, call in zip(chunks, calls, strict=True)]


def flashmla_unpacked(chunks: list[Chunk]) -> list[Call]:
    """Our unpacking, and FlashMLA's sparse prefill."""
    return [chunk.after_filling(_flashmla_prefill(chunk.inputs)) for chunk in chunks]


def flashmla(sets: list[Inputs], case: Case) -> list[Call]:
    """FlashMLA 1.0.0 as SGLang calls it: bf16 chunks by the sparse prefill, FP8 rows by the sparse decode."""
    if case.prefill and not case.fp8:
        return [_flashmla_prefill(inputs) for inputs in sets]
    import flash_mla

    schedule = flash_mla.get_mla_metadata()[0]  # filled by the first call; layers of a forward share one
    return [_flashmla_decode(inputs, schedule) for inputs in sets]


def padded_heads(inputs: Inputs) -> Inputs:
    """With zeros for the heads that FlashMLA wants."""
    missing = max(0, FLASHMLA_HEADS - inputs.q.shape[1])
    pad = torch.nn.functional.pad
    return replace(inputs, q=pad(inputs.q, (0, 0, 0, missing)), sink=pad(inputs.sink, (0, missing)))


def _flashmla_decode(inputs: Inputs, schedule: object) -> Call:
    import flash_mla

    heads, inputs = inputs.q.shape[1], padded_heads(inputs)
    T = inputs.q.shape[0]
    arguments = {
        "q": inputs.q[:, None],
        "k_cache": _flashmla_table(inputs.window),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": ROW_DIM,
        "tile_scheduler_metadata": schedule,
        "softmax_scale": SCALE,
        "is_fp8_kvcache": True,
        "indices": inputs.window_rows[:, None],
        "topk_length": torch.full((T,), inputs.window_rows.shape[1], dtype=torch.int32, device=inputs.q.device),
        "attn_sink": inputs.sink,
    }
    if inputs.entries is not None:
        arguments |= {
            "extra_k_cache": _flashmla_table(inputs.entries),
            "extra_indices_in_kvcache": padded(inputs.entry_list, 64)[:, None],
            "extra_topk_length": inputs.visible,
        }
    return lambda: flash_mla.flash_mla_with_kvcache(use_legacy=True, **arguments)[0][:, 0, :heads]


def _flashmla_table(rows: KVRows) -> Tensor:
    """[pages, 64, 1, 584] fp8 view of the same bytes; its pages are padded as ours are."""
    pages = rows.storage.view(torch.float8_e4m3fn)  # as_strided: of a single page other views forget the padding
    return pages.as_strided((len(pages), PAGE_ROWS, 1, ROW_BYTES), (pages.stride(0), ROW_BYTES, ROW_BYTES, 1))


def _flashmla_prefill(inputs: Inputs) -> Call:
    """One table: window and entries are neighbours in memory."""
    import flash_mla

    heads, inputs = inputs.q.shape[1], padded_heads(inputs)
    lists, lengths, storage = one_list(inputs)
    kv, q, sink = storage[:, None], inputs.q, inputs.sink
    return lambda: flash_mla.flash_mla_sparse_fwd(q, kv, lists, SCALE, ROW_DIM, sink, lengths, use_legacy=True)[0][
        :, :heads
    ]


def one_list(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Window and entries of a chunk of plain rows as one list over one table.

    Returns:
        lists [T, 1, n] int32 with n a multiple of 128 and -1 behind the end, lengths [T] int32, storage [N, 512].
    """
    window = inputs.window.storage
    lists, lengths = inputs.window_rows, torch.full_like(inputs.window_rows[:, 0], inputs.window_rows.shape[1])
    num_rows = inputs.window.num_rows
    if inputs.entries is not None:
        expected = window.data_ptr() + window.numel() * window.element_size()
        assert inputs.entries.storage.data_ptr() == expected, "entries must lie behind the window's rows"
        offset = torch.where(inputs.entry_list >= 0, inputs.entry_list + num_rows, -1)
        lists, lengths = torch.cat([lists, offset], 1), lengths + inputs.visible
        num_rows += inputs.entries.num_rows
    return padded(lists, 128)[:, None], lengths, window.as_strided((num_rows, ROW_DIM), (ROW_DIM, 1))


def padded(lists: Tensor, multiple: int) -> Tensor:
    """[T, n] -> [T, a multiple], int32, with -1 behind."""
    return torch.nn.functional.pad(lists, (0, -lists.shape[1] % multiple), value=-1).int().contiguous()


def trtllm_gen(sets: list[Inputs], case: Case) -> list[Call]:
    """flashinfer's kernel of SGLang's `--dsv4-attn-backend trtllm`: rows and queries in FP8 with one scale, 512 bytes.

    Decode only. Its rows are ours, dequantised and rounded to e4m3: other bytes and less exact.
    """
    from flashinfer.mla import trtllm_batch_decode_sparse_mla_dsv4

    window = _uniform_fp8(sets[0].window)
    entries = window if sets[0].entries is None else _uniform_fp8(sets[0].entries)
    workspace = torch.zeros(128 << 20, dtype=torch.int8, device=window.device)

    def call(inputs: Inputs) -> Call:
        lists = inputs.window_rows if inputs.entries is None else torch.cat([inputs.window_rows, inputs.entry_list], 1)
        lists = torch.nn.functional.pad(lists, (0, 0, 0, -len(lists) % 64), value=-1)  # it reads tables by 64 rows
        lengths = torch.full_like(inputs.window_rows[:, 0], inputs.window_rows.shape[1])
        arguments = {
            "query": inputs.q.to(torch.float8_e4m3fn)[:, None],
            "swa_kv_cache": window,
            "workspace_buffer": workspace,
            "sparse_indices": lists[: len(lengths)],
            "compressed_kv_cache": entries,
            "sparse_topk_lens": lengths if inputs.visible is None else lengths + inputs.visible,
            "seq_lens": torch.full_like(lengths, case.context),
            "bmm1_scale": SCALE,
            "bmm2_scale": 1.0,
            "sinks": inputs.sink,
            "kv_layout": "HND",
            "backend": "trtllm-gen",
        }
        return lambda: trtllm_batch_decode_sparse_mla_dsv4(**arguments).view(inputs.q.shape)

    return [call(inputs) for inputs in sets]


_uniform_pools: dict[int, Tensor] = {}


def _uniform_fp8(rows: KVRows) -> Tensor:
    """[pages, 1, 64, 512] e4m3 of a pool's values, made once."""
    key = rows.storage.data_ptr()
    if key not in _uniform_pools:
        made = torch.empty(rows.num_rows, ROW_DIM, dtype=torch.float8_e4m3fn, device=rows.device)
        for part in torch.arange(rows.num_rows, device=rows.device).split(1 << 18):
            made[part[0] : part[0] + len(part)] = rows.gather(part).to(torch.float8_e4m3fn)
        _uniform_pools[key] = made.view(-1, 1, PAGE_ROWS, ROW_DIM)
    return _uniform_pools[key]


# ---- measuring


@dataclass(frozen=True)
class Ceilings:
    """What this card does at best."""

    bytes_per_second: float
    flops_per_second: float

    def floor_us(self, inputs: Inputs) -> tuple[float, str]:
        """The least time of a call, and which of the two bounds it."""
        memory = 1e6 * inputs.bytes() / self.bytes_per_second
        compute = 1e6 * inputs.flops() / self.flops_per_second
        return (memory, "bytes") if memory >= compute else (compute, "flops")


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy bandwidth and matrix product rate."""
    size, n = (1 << 30, 8192) if device.type == "cuda" else (1 << 24, 256)
    origin = torch.randn(size // 4, device=device)
    copy = torch.empty_like(origin)
    a, b = torch.randn(2, n, n, device=device).bfloat16()
    product = torch.empty_like(a)
    # By a kernel: a graph copies by a memcpy node, 2.7 TB/s on an H200, where our attention over windows moved 3.1.
    calls = {"copy": [lambda: torch.neg(origin, out=copy)], "matmul": [lambda: torch.mm(a, b, out=product)]}
    times = interleaved(calls, device, 0.3 if device.type == "cuda" else 0.0)
    return Ceilings(2e6 * size / times["copy"].median_us, 2e6 * n**3 / times["matmul"].median_us)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    median_us: float
    spread: float
    """Difference of the quartiles over the median."""


def interleaved(contenders: dict[str, list[Call]], device: torch.device, seconds: float) -> dict[str, Timing]:
    """Replays of each contender's calls, in turns, for `seconds` in all and at least five times."""
    replays = {name: _prepared(calls, device) for name, calls in contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(next(iter(samples.values()))) < 5:
        for name, replay in replays.items():
            samples[name].append(_elapsed_us(replay, device) / len(contenders[name]))
    timings = {}
    for name, taken in samples.items():
        low, middle, high = statistics.quantiles(taken, n=4)
        timings[name] = Timing(middle, (high - low) / middle)
    return timings


def _prepared(calls: list[Call], device: torch.device) -> Callable[[], object]:
    """What runs all calls once; on a GPU one graph, its calls warmed up (compiled, scheduled) beforehand."""
    if device.type != "cuda":
        return lambda: [call() for call in calls]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _elapsed_us(replay: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        replay()
        return 1e6 * (time.perf_counter() - begin)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def relative_errors(outputs: dict[str, Tensor], inputs: Inputs) -> dict[str, float]:
    """|out - exact| / |exact| over the checked tokens, for each contender."""
    tokens = list(checked_tokens(inputs))
    expected = torch.stack([exact(inputs, token) for token in tokens])
    return {name: float((out[tokens].double() - expected).norm() / expected.norm()) for name, out in outputs.items()}


@dataclass(frozen=True)
class Options:
    """Of one run."""

    impl: str
    split_keys: int | None
    device: torch.device
    seconds: float
    opponents: tuple[str, ...]
    limit_seconds: float = math.inf
    """Of the whole run; cases that have not begun by then are left out, and named."""
    unpack: bool = True
    """Whether we unpack FP8 rows of a chunk where that pays."""


def run_case(case: Case, pools: Pools, ceilings: Ceilings, options: Options) -> dict[str, object]:
    """One row of the result.

    Raises:
        AssertionError: our output is wrong.
    """
    sets = build(case, pools, number_of_sets(case, l2_bytes(options.device)))
    chunks = unpacked_chunks(sets, case, options.impl) if case.prefill and case.fp8 else []
    unpacks = bool(chunks) and options.unpack and unpacking.helps(options.impl)
    unpacks = unpacks and unpacking.pays(unpacked_rows(case), sets[0].keys(), case.heads)
    split_keys = None if case.prefill else options.split_keys
    if unpacks:
        contenders = {"ours": ours_unpacked(chunks, options.impl)}
    else:
        contenders = {"ours": ours(sets, options.impl, split_keys)}
    outputs = {"ours": contenders["ours"][0]()}
    row: dict[str, object] = {"name": case.name, "rows": "unpacked" if unpacks else "as stored"}
    makers: dict[str, Callable[[], list[Call]]] = {
        "flashmla": lambda: flashmla(sets, case),
        "flashmla_unpacked": lambda: flashmla_unpacked(chunks),
        "many_heads": lambda: many_heads(sets, options.impl, split_keys),
        "trtllm": lambda: trtllm_gen(sets, case),
    }
    for name in options.opponents:
        if (name == "trtllm" and case.prefill) or (name == "flashmla_unpacked" and not chunks):
            continue
        if name == "many_heads" and case.heads > FEW_HEADS:
            continue  # that is ours
        try:
            calls = makers[name]()
            outputs[name] = calls[0]()
            contenders[name] = calls
        except Exception as error:  # an opponent that does not take this case is a fact about it
            row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
    errors = relative_errors(outputs, sets[0])
    outputs.clear()
    assert errors["ours"] <= WRONG, f"{case.name}: our output is off by {errors['ours']:.3g}; nothing is timed"
    floor, bound = ceilings.floor_us(sets[0])
    times = interleaved(contenders, options.device, options.seconds * len(contenders))
    row |= {"floor_us": round(floor, 3), "bound": bound, "sets": len(sets)}
    for name in dict.fromkeys(("ours", "flashmla", *options.opponents)):
        prefix = "" if name == "ours" else f"{name}_"
        row[f"{name}_us"] = round(times[name].median_us, 3) if name in times else None
        row[f"{prefix}rel_err"] = float(f"{errors[name]:.3e}") if name in errors else None
        row[f"{name}_spread"] = round(times[name].spread, 4) if name in times else None
    return row


def l2_bytes(device: torch.device) -> int:
    """Of the device's L2 cache."""
    if device.type != "cuda":
        return L2_BYTES_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).L2_cache_size


# ---- what is reported


def summary(rows: list[dict]) -> dict[str, object]:
    """Means over the cases; a ratio below 1 is in our favour."""
    compared = [row for row in rows if row.get("flashmla_us")]
    ratios = {row["name"]: row["ours_us"] / row["flashmla_us"] for row in compared}
    errors = [row["rel_err"] / row["flashmla_rel_err"] for row in compared if row["flashmla_rel_err"]]
    large = {row["name"]: row["floor_us"] / row["ours_us"] for row in rows if row["floor_us"] >= LARGE_US}
    of_part = {
        part: geometric_mean([ratio for name, ratio in ratios.items() if name.startswith(part)])
        for part in ("decode", "prefill")
    }
    against_unpacked = [row["ours_us"] / row["flashmla_unpacked_us"] for row in rows if row.get("flashmla_unpacked_us")]
    return {
        "cases": len(rows),
        "compared": len(compared),
        "geomean_ratio": geometric_mean(list(ratios.values())),
        "geomean_ratio_decode": of_part["decode"],
        "geomean_ratio_prefill": of_part["prefill"],
        "geomean_ratio_to_flashmla_unpacked": geometric_mean(against_unpacked),
        "worst_ratio": _extreme(max, ratios),
        "slower_than_flashmla": sum(ratio > 1 for ratio in ratios.values()),
        "large_cases": len(large),
        "least_share_of_floor_of_large": _extreme(min, large),
        "worst_error_ratio": round(max(errors), 3) if errors else None,
    }


def compare_few_heads(rows: list[dict]) -> list[dict[str, object]]:
    """Of every case with few heads: its time over that of 64 heads, and over that of the kernels for many."""
    by_name = {row["name"]: row for row in rows}
    compared = []
    for name, row in by_name.items():
        heads = int(re.search(r"-h(\d+)-", name)[1])
        of_64 = by_name.get(name.replace(f"-h{heads}-", "-h64-"))
        if of_64 and heads <= FEW_HEADS:
            us, many = row["ours_us"], row.get("many_heads_us")
            times = {"us": us, "us_of_64": of_64["ours_us"], "us_as_many": many}
            ratios = {"ratio_to_64": round(us / of_64["ours_us"], 3), "ratio_to_many": many and round(us / many, 3)}
            compared.append({"name": name, "heads": heads, **times, **ratios})
    return compared


def geometric_mean(values: list[float]) -> float | None:
    """None of nothing."""
    return round(math.exp(statistics.fmean(map(math.log, values))), 4) if values else None


def _extreme(choose: Callable, values: dict[str, float]) -> dict[str, object] | None:
    name = choose(values, key=values.get) if values else None
    return None if name is None else {"name": name, "value": round(values[name], 4)}


HEADER = (
    f"{'case':36} {'ours':>9} {'FlashMLA':>9} {'ratio':>6} {'floor':>9} {'of it':>6} {'by':>6} "
    f"{'error':>9} {'FlashMLA':>9}"
)


def line(row: dict) -> str:
    """A row of the table: microseconds, and errors against fp64."""

    def number(value: float | None, width: int, form: str) -> str:
        return f"{value:{width}{form}}" if value is not None else f"{'-':>{width}}"

    theirs = row.get("flashmla_us")
    text = (
        f"{row['name']:36} {number(row['ours_us'], 9, '.1f')} {number(theirs, 9, '.1f')} "
        f"{number(row['ours_us'] / theirs if theirs else None, 6, '.2f')} {number(row['floor_us'], 9, '.1f')} "
        f"{number(row['floor_us'] / row['ours_us'], 6, '.0%')} {row['bound']:>6} "
        f"{number(row['rel_err'], 9, '.1e')} {number(row.get('flashmla_rel_err'), 9, '.1e')}"
    )
    if row.get("rows") == "unpacked":
        text += "   unpacked"
    if row.get("flashmla_unpacked_us"):
        text += (
            f"   FlashMLA, unpacked: {row['flashmla_unpacked_us']:.1f} us, error {row['flashmla_unpacked_rel_err']:.1e}"
        )
    if row.get("many_heads_us"):
        text += f"   by the kernels for many heads {row['many_heads_us']:.1f} us"
    if row.get("trtllm_us"):
        text += f"   trtllm-gen {row['trtllm_us']:.1f} us, error {row['trtllm_rel_err']:.1e}"
    return text + "".join(f"\n    {key}: {row[key]}" for key in row if key.endswith("_error"))


def plot(result: dict, path: Path) -> None:
    """Share of the floor over the batch, one panel for each kind of layer and number of heads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    decode = [(re.fullmatch(r"decode-(\w+?)(?:-(\w+))?-h(\d+)-b(\d+)", row["name"]), row) for row in result["cases"]]
    decode = [(found.groups(), row) for found, row in decode if found]
    kinds = list(dict.fromkeys(groups[0] for groups, _ in decode))
    heads = sorted({int(groups[2]) for groups, _ in decode})
    figure, axes = pyplot.subplots(
        len(heads), len(kinds), figsize=(4 * len(kinds), 3.2 * len(heads)), sharey=True, squeeze=False
    )
    for (y, h), (x, kind) in ((a, b) for a in enumerate(heads) for b in enumerate(kinds)):
        axis, here = axes[y][x], [(g, row) for g, row in decode if g[0] == kind and int(g[2]) == h]
        for color, context in enumerate(dict.fromkeys(g[1] for g, _ in here)):
            rows = sorted((int(g[3]), row) for g, row in here if g[1] == context)
            for key, style in (("ours_us", "-o"), ("flashmla_us", "--x")):
                points = [(batch, row["floor_us"] / row[key]) for batch, row in rows if row.get(key)]
                if points:
                    label = f"{context or 'window'}, {'ours' if key == 'ours_us' else 'FlashMLA'}"
                    axis.plot(*zip(*points, strict=True), style, color=f"C{color}", label=label, markersize=4)
        axis.set(xscale="log", title=f"{kind}, {h} heads", xlabel="requests", ylim=(0, 1.05))
        axis.set_xticks(batches := sorted({int(g[3]) for g, _ in here}), [str(batch) for batch in batches])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    for row in axes:
        row[0].set_ylabel("floor / time")
    figure.suptitle(f"Sparse attention, decode, on {result['gpu']}: share of the floor")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def versions() -> dict[str, str | None]:
    """Of what takes part."""
    found: dict[str, str | None] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for package in ("nvidia-cutlass-dsl", "sgl-flash-mla", "flashinfer-python", "sglang-dsv4"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if found["nvidia-cutlass-dsl"] is None and "cutlass" in sys.modules:  # unpacked, not installed
        found["nvidia-cutlass-dsl"] = sys.modules["cutlass"].__version__
    return found


def gpu_state() -> dict[str, str] | None:
    """Clocks, power and driver as nvidia-smi gives them, and whether launches of ours begin early by default."""
    fields = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "temperature.gpu", "driver_version")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = dict(zip(fields, (part.strip() for part in answer.strip().split(",")), strict=False))
    return found | {dependent_launch.VARIABLE: "on" if dependent_launch.is_on() else "off"}


def heading(benchmark: str, device: torch.device) -> tuple[Ceilings, dict[str, object]]:
    """The card's limits, printed, and what a result of products begins with: what it is of, the card and its state,
    versions, and no case yet."""
    ceilings, gpu = measure_ceilings(device), torch.cuda.get_device_name(device)
    print(f"{gpu}: {ceilings.bytes_per_second / 1e12:.2f} TB/s, {ceilings.flops_per_second / 1e12:.0f} TFLOP/s in bf16")
    return ceilings, {
        "benchmark": benchmark,
        "gpu": gpu,
        "copy_tb_s": round(ceilings.bytes_per_second / 1e12, 3),
        "versions": versions(),
        "state": gpu_state(),
        "cases": [],
    }


def _clocks_at_work(device: torch.device) -> dict[str, str] | None:
    if device.type != "cuda":
        return None
    a = torch.randn(8192, 8192, device=device).bfloat16()
    for _ in range(600):  # a second of matrix products, which runs while nvidia-smi looks
        torch.mm(a, a)
    state = gpu_state()
    torch.cuda.synchronize()
    return state


def opponents_here(device: torch.device) -> tuple[str, ...]:
    """Which others can be imported and run on this device; what is left out is said."""
    if device.type != "cuda":
        return ()
    found = []
    modules = {"flashmla": "flash_mla", "flashmla_unpacked": "flash_mla", "trtllm": "flashinfer.mla"}
    for name, module in modules.items():
        if name == "trtllm" and torch.cuda.get_device_capability(device)[0] != 10:
            continue
        try:
            __import__(module)
            found.append(name)
        except ImportError as error:
            print(f"without {module}: {error}", file=sys.stderr)
    return tuple(found)


def run(
    cases: list[Case], options: Options, entry_bytes: int, query_bytes: int, show: Callable[[str], None]
) -> dict[str, object]:
    """All cases; the result as it is written to a file."""
    begin = time.perf_counter()
    ceilings = measure_ceilings(options.device)
    pools = Pools(options.device, entry_bytes, query_bytes)
    name = torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else "CPU"
    show(
        f"{name}: {ceilings.bytes_per_second / 1e12:.2f} TB/s, {ceilings.flops_per_second / 1e12:.0f} TFLOP/s in bf16; "
        f"pool of {pools.entries.num_rows:,} entries, ready in {time.perf_counter() - begin:.1f} s"
    )
    show(HEADER)
    rows, wrong, left_out = [], [], []
    for case in cases:
        if time.perf_counter() - begin > options.limit_seconds:
            left_out.append(case.name)
            continue
        try:
            rows.append(run_case(case, pools, ceilings, options))
            show(line(rows[-1]))
        except AssertionError as error:
            wrong.append(str(error))
            show(f"WRONG  {error}")
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()  # of the case's graphs
    if left_out:
        show(f"out of time; left out: {', '.join(left_out)}")
    return {
        "benchmark": "sparse_attention",
        "gpu": name,
        "clocks": _clocks_at_work(options.device),
        "versions": versions(),
        "impl": options.impl,
        "decode_split_keys": options.split_keys,
        "copy_bytes_per_second": round(ceilings.bytes_per_second),
        "bf16_flops_per_second": round(ceilings.flops_per_second),
        "entry_pool_rows": pools.entries.num_rows,
        "compile_seconds": [
            {"name": o.name, "source": o.source, "seconds": round(o.seconds, 2)} for o in compile_cache.origins()
        ],
        "seconds": round(time.perf_counter() - begin, 1),
        "summary": summary(rows),
        "few_heads": compare_few_heads(rows),
        "wrong": wrong,
        "left_out": left_out,
        "cases": rows,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="regular expression over the cases' names")
    parser.add_argument("--quick", action="store_true", help="about 50 cases instead of about 200")
    parser.add_argument("--few-heads", action="store_true", help="8, 16 and 64 heads; on Hopper by either kernel")
    parser.add_argument("--alone", action="store_true", help="nothing but our kernels")
    parser.add_argument("--impl", help="kernel by name; default: the registry's choice")
    parser.add_argument("--split-keys", type=int, default=DECODE_SPLIT_KEYS, help="of decode; 0: no split")
    parser.add_argument("--no-unpack", action="store_true", help="chunks read FP8 rows as they are")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pool-gib", type=float, default=8.0, help="bound of the pool of FP8 entries")
    parser.add_argument("--query-gib", type=float, default=1.5, help="bound of the queries of a case")
    parser.add_argument("--seconds", type=float, default=SECONDS_PER_CASE, help="of timing, for a case and contender")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no further case begins")
    parser.add_argument("--out", type=Path, help="JSON; the picture lies beside it")
    parser.add_argument("--plot", type=Path, metavar="FILE.json", help="only draw the picture of a result")
    return parser.parse_args()


def main() -> int:
    """Check, measure, print the table, the summary and one line of JSON; 1 if an output was wrong."""
    arguments = _arguments()
    if arguments.plot is not None:
        plot(json.loads(arguments.plot.read_text()), arguments.plot.with_suffix(".png"))
        return 0
    device = torch.device(arguments.device)
    impl = arguments.impl or registry.chosen("sparse_attention", device, torch.bfloat16).name
    options = Options(
        impl,
        arguments.split_keys or None,
        device,
        arguments.seconds,
        (() if arguments.alone else opponents_here(device))
        + (("many_heads",) if arguments.few_heads and impl == "sm90" else ()),
        60 * arguments.minutes,
        not arguments.no_unpack,
    )
    cases = few_heads_cases() if arguments.few_heads else quick_cases() if arguments.quick else all_cases()
    cases = [case for case in cases if re.search(arguments.cases, case.name)]
    gib = 1 << 30
    result = run(cases, options, int(arguments.pool_gib * gib), int(arguments.query_gib * gib), _print)
    for key, value in result["summary"].items():
        print(f"{key:32} {value}")
    for row in result["few_heads"]:
        print(f"{row['name']:36} {row['us']:8.1f} us, over 64 heads {row['ratio_to_64']:.2f}", end="")
        print(f", over the kernels for many {row['ratio_to_many']:.2f}" if row["ratio_to_many"] else "")
    text = json.dumps(result)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
        try:
            if result["cases"]:
                plot(result, arguments.out.with_suffix(".png"))
        except ImportError as error:
            print(f"no picture: {error}; draw it elsewhere with --plot", file=sys.stderr)
    print(text)
    return 1 if result["wrong"] else 0


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
