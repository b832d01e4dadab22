"""The attention kernels against FlashMLA (and on Blackwell flashinfer's trtllm-gen), and against the card's limits.

    python benchmarks/bench_sparse_attention.py [--cases REGEX] [--quick] [--impl sm90] [--out FILE.json]
    python benchmarks/bench_sparse_attention.py --few-heads [...]       8 and 16 heads, and 64
    python benchmarks/bench_sparse_attention.py --few-heads --alone --seconds 0.08 --minutes 0.9 \
        --cases '^decode-(csa|hca-32k).*-b(1|4|64|128|256)$'            the same within a minute, without FlashMLA
    python benchmarks/bench_sparse_attention.py --plot FILE.json        a picture of a result, FILE.png

Every case runs on the same inputs in the same process: ours by the public function with the kernel forced by name,
FlashMLA (the `flash_mla` module of sgl-flash-mla) called as SGLang calls it, its schedule made outside the timed part.
A chunk over FP8 rows runs as in the attention backend: where `sparse_attention.unpacking` says so, its workspace and
its request's pages are unpacked first, in the timed part ("rows" of the result: "unpacked"; `--no-unpack` never does).
`flashmla_unpacked` is FlashMLA's sparse prefill, which SGLang calls for bf16 rows only, after the same unpacking.
FlashMLA takes 64 heads or 128; fewer are padded, as SGLang does, outside of the timed part.

With `--few-heads` our kernels for many heads are contenders, too (`many_heads`), and at the end ours for few heads is
compared with them and with the same case of 64 heads. `--alone` leaves FlashMLA and trtllm-gen out.

First each output is compared with fp64 on up to four tokens, in the Frobenius norm; a result that is off by more than
WRONG is not timed. Then each contender's calls over all sets of inputs (`lib.attention_inputs`: cold L2) are captured
in a CUDA graph and the graphs are replayed in turns; the time is the median of a replay over its calls.

    floor = max(bytes / copy bandwidth, flops / matmul rate)

with `Inputs.bytes` and `Inputs.flops`, the bandwidth (read + written) of a kernel that negates 1 GiB and the rate of a
bf16 matrix product of 8,192 cubed, measured in the same run. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from lib.attention_contenders import (
    flashmla,
    flashmla_unpacked,
    many_heads,
    ours,
    ours_unpacked,
    trtllm_gen,
    unpacked_chunks,
)
from lib.attention_inputs import (
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
    unpacked_rows,
)
from lib.measuring import Call, Ceilings, geometric_mean, gpu_state, interleaved, l2_bytes, measure_ceilings
from lib.versions import versions
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.host import compile_cache
from dsv4_kernels.sparse_attention import unpacking
from dsv4_kernels.sparse_attention.problem import FEW_HEADS
from dsv4_kernels.sparse_attention.split import DECODE_SPLIT_KEYS

WRONG = 0.02
LARGE_US = 25.0
"""Cases with a floor of at least this many microseconds count as large."""
SECONDS_PER_CASE = 0.12


# ---- measuring


def relative_errors(outputs: dict[str, Tensor], inputs: Inputs) -> dict[str, float]:
    """Return |out - exact| / |exact| over the checked tokens, for each contender."""
    tokens = list(checked_tokens(inputs))
    expected = torch.stack([exact(inputs, token) for token in tokens])
    return {name: float((out[tokens].double() - expected).norm() / expected.norm()) for name, out in outputs.items()}


@dataclass(frozen=True)
class Options:
    """Options of one run."""

    impl: str
    split_keys: int | None
    device: torch.device
    seconds: float
    opponents: tuple[str, ...]
    limit_seconds: float = math.inf
    """Limit of the whole run; cases that have not begun by then are left out and named."""
    unpack: bool = True
    """Whether our contender unpacks FP8 rows of a chunk where that pays."""


def run_case(case: Case, pools: Pools, ceilings: Ceilings, options: Options) -> dict[str, object]:
    """Return one row of the result.

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
            continue  # that contender is ours
        try:
            calls = makers[name]()
            outputs[name] = calls[0]()
            contenders[name] = calls
        except Exception as error:  # an opponent that does not support the case is reported
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


# ---- the report


def summary(rows: list[dict]) -> dict[str, object]:
    """Return means over the cases; a ratio below 1 is in our favour."""
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
    """Return, for every case with few heads, its time over that of 64 heads and over that of the kernels for many
    heads."""
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


def _extreme(choose: Callable, values: dict[str, float]) -> dict[str, object] | None:
    name = choose(values, key=values.get) if values else None
    return None if name is None else {"name": name, "value": round(values[name], 4)}


HEADER = (
    f"{'case':36} {'ours':>9} {'FlashMLA':>9} {'ratio':>6} {'floor':>9} {'of it':>6} {'by':>6} "
    f"{'error':>9} {'FlashMLA':>9}"
)


def line(row: dict) -> str:
    """Return a row of the table: microseconds, and errors against fp64."""

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
    """Draw the share of the floor over the batch, one panel for each kind of layer and number of heads."""
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


def _clocks_at_work(device: torch.device) -> dict[str, str] | None:
    if device.type != "cuda":
        return None
    a = torch.randn(8192, 8192, device=device).bfloat16()
    for _ in range(600):  # a second of matrix products, during which nvidia-smi reads the clocks
        torch.mm(a, a)
    state = gpu_state()
    torch.cuda.synchronize()
    return state


def opponents_here(device: torch.device) -> tuple[str, ...]:
    """Return the opponents that can be imported and run on this device; print the others."""
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
    """Run all cases; return the result as it is written to a file."""
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
            torch.cuda.empty_cache()  # frees the case's graphs
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
    parser.add_argument("--minutes", type=float, default=8.0, help="no case begins after so many minutes")
    parser.add_argument("--out", type=Path, help="JSON; the picture has the same name with .png")
    parser.add_argument("--plot", type=Path, metavar="FILE.json", help="only draw the picture of a result")
    return parser.parse_args()


def main() -> int:
    """Check, measure, print the table, the summary and one line of JSON; return 1 if an output was wrong."""
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
