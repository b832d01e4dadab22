"""Tables of the documents that are made from `benchmarks/results/*.json`.

A document holds each table between `<!-- table: NAME -->` and `<!-- end -->`. After a new measurement:

    python tests/lib/documents/result_tables.py --write

`tests/test_documents.py` fails when a table and its file differ. Ratios of time are ours / theirs; ratios of rates and
of "higher is better" tables are above 1 when ours is better, as the tables say.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    """The content of `benchmarks/results/NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A markdown table with a final line break."""
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *(list(row) for row in rows)]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def whole(number: float) -> str:
    """`12,345`."""
    return f"{number:,.0f}"


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


# -- served ------------------------------------------------------------------------------------------------------------

CHURN_BEST = 36  # sessions of the best third of the churn sweep, in mean
SERVED = [
    ("decode, 1 request of 4.6K tokens, tok/s", "decode", 1, "tok_s"),
    ("decode, 16 requests, tok/s", "decode", 16, "tok_s"),
    ("decode, 64 requests, tok/s", "decode", 64, "tok_s"),
    ("decode, 128 requests, tok/s", "decode", 128, "tok_s"),
    ("prefill, eight prompts of 8K, tok/s", "prefill", 8, "tok_s"),
    ("prefill, one prompt of 64K, tok/s", "prefill_64k", 1, "tok_s"),
    ("32 conversations of four turns, tok/s", "multi_turn", 32, "tok_s"),
    ("32 conversations, median TTFT, ms", "multi_turn", 32, "ttft_p50"),
]
CHURN = [
    ("churn at equal KV memory, best third, tok/s", "churn", CHURN_BEST, "tok_s"),
    ("churn, median TTFT, ms", "churn", CHURN_BEST, "ttft_p50"),
]
STEPS = [
    ("kernel launches of a decode step, 1 request", "decode", 1, "launches_per_step"),
    ("GPU busy time of a decode step, 1 request, us", "decode", 1, "busy_us_per_step"),
    ("GPU busy time of a decode step, 64 requests, us", "decode", 64, "busy_us_per_step"),
    ("KV memory, all pools, bytes a token", "memory", 1, "kv_bytes_per_token"),
]


def _served(name: str, wanted: list[tuple[str, str, int, str]]) -> str:
    found = {(row["work"], row["requests"], row["metric"]): row for row in load(name)["rows"]}

    def rows() -> Iterator[list[str]]:
        for label, *key in wanted:
            row = found.get(tuple(key))
            if row is not None:
                yield [label, whole(row["ours"]), whole(row["builtin"]), f"{row['ratio']:.2f}"]

    return markdown(("", "ours", "built-in", "ratio"), rows())


def churn_sweep() -> str:
    """Sessions that come back: hit rate and tok/s of both servers, by number of sessions."""
    cells: dict[int, dict[str, Any]] = {}
    for row in load("serve_ab_h200")["rows"]:
        if row["work"] == "churn_sweep":
            cells.setdefault(row["requests"], {"prefix": row["prefix"]})[row["metric"]] = row

    def rows() -> Iterator[list[str]]:
        for sessions, metrics in cells.items():
            hits, rate = metrics["hit_rate"], metrics["tok_s"]
            shown = [f"{hits[who]:.0%}, {whole(rate[who])}" for who in ("ours", "builtin")]
            yield [str(sessions), whole(metrics["prefix"]), *shown]

    return markdown(("sessions", "tokens a session", "ours: hit rate, tok/s", "built-in"), rows())


def speculation() -> str:
    """Microseconds of steps with drafts, ours / built-in, and the tokens a step from which drafts pay."""
    result = load("speculation_h200")
    us = {(row["work"], row["requests"]): row for row in result["rows"]}
    pays = {(row["algorithm"], row["requests"]): row for row in result["pays"]}

    def cell(work: str, requests: int) -> str:
        row = us[work, requests]
        return f"{whole(row['ours_us'])} / {whole(row['builtin_us'])}"

    def rows() -> Iterator[list[str]]:
        for algorithm, label in (("eagle", "EAGLE"), ("dspark", "DSpark")):
            for requests in (1, 16, 64):
                works = ("decode_step", f"{algorithm}_verify", f"{algorithm}_draft", f"{algorithm}_step")
                when = pays[algorithm, requests]
                even = f"{when['ours']:.1f} / {when['builtin']:.1f}"
                yield [f"{label}, {requests}", *(cell(work, requests) for work in works), even]

    head = ("requests", "decode step", "verify", "draft", "whole step", "tokens a step from which it pays")
    return markdown(head, rows())


def verify_epilogue() -> str:
    """A whole DSpark step with the switch on and off, the shortest of each server's runs."""
    best = {(row["requests"], row["server"]): min(row["step_us"]) for row in load("verify_epilogue_h200")["rows"]}

    def rows() -> Iterator[list[str]]:
        for requests in (1, 16, 64):
            shown = (best.get((requests, server)) for server in ("on", "off", "builtin"))
            yield [str(requests), *("" if us is None else whole(us) for us in shown)]

    return markdown(("requests", "on, us", "off, us", "built-in, us"), rows())


def serve_switches() -> str:
    """Ratios of each variant to the default, the median over turns (least to most), by load and number of requests."""
    cells: dict[tuple[int, str, str], dict[int, str]] = {}
    for run, result in enumerate(load("serve_switches_h200")["runs"]):
        for row in result["ratios"]:
            shown = f"{row['ratio']:.2f}"
            if row["least"] < row["most"]:
                shown += f" ({row['least']:.2f} to {row['most']:.2f})"
            cells.setdefault((run, row["variant"], row["work"]), {})[row["requests"]] = shown
    counts = sorted({requests for row in cells.values() for requests in row})
    rows = (
        [f"{variant.replace('_', ' ')}, {work}", str(run + 1), *(row.get(count, "") for count in counts)]
        for (run, variant, work), row in cells.items()
    )
    return markdown(("requests", "run", *map(str, counts)), rows)


def step_switches() -> str:
    """Launches and busy time of a decode step by `wo_a`'s format and the side stream: the file's last run."""
    rows = load("step_switches_h200")["runs"][-1]["rows"]

    def name(switches: dict[str, str]) -> str:
        side = ", side stream" if switches.get("SGLANG_DSV4_SIDE_STREAM") == "on" else ""
        return f"`SGLANG_DSV4_WO_A={switches['SGLANG_DSV4_WO_A']}`{side}"

    shown = ([str(r["requests"]), name(r["switches"]), whole(r["launches"]), whole(r["busy_us"])] for r in rows)
    return markdown(("requests", "switches", "launches", "busy, us"), shown)


def sequence_parallel() -> str:
    """What clients saw, and a chunk's busy time, with sequence parallelism off and on."""
    found = {(row["work"], row["metric"]): row for row in load("sequence_parallel_h100_x2")["rows"]}
    wanted = [
        ("prefill, eight prompts of 8K, tok/s", "prefill", "tok_s"),
        ("prefill, one prompt of 64K, tok/s", "prefill_64k", "tok_s"),
        ("32 conversations, tok/s", "multi_turn", "tok_s"),
        ("32 conversations, median TTFT, ms", "multi_turn", "ttft_p50"),
        ("GPU busy time of a chunk of 8,192 tokens, us", "prefill_64k", "busy_us_per_step"),
    ]
    rows = ([label, *(whole(found[work, metric][key]) for key in ("off", "on"))] for label, work, metric in wanted)
    return markdown(("", "off", "on"), rows)


def tiers() -> str:
    """Milliseconds to the first token, by where the prefix was found."""
    ms = {row["work"]: row for row in load("tiers_h200")["rows"] if row["metric"] == "ms"}
    works = ("ttft_cold", "ttft_device", "ttft_host", "ttft_disk")
    rows = (
        [name, *(whole(ms[work][key]) for work in works)] for name, key in (("ours", "ours"), ("built-in", "builtin"))
    )
    return markdown(("TTFT, ms", "cold", "on the device", "in host memory", "in files"), rows)


def copies() -> str:
    """GB/s of page records, and of plain copies and plain files of the same size."""
    names = {
        "save_gb_s": "device to host memory",
        "load_gb_s": "host memory to device",
        "file_write_gb_s": "host memory to files",
        "file_read_gb_s": "files to host memory",
    }
    found = {row["metric"]: row for row in load("tiers_h200")["rows"] if row["work"] == "copies"}
    rows = (
        [label, f"{found[key]['ours']:.1f}", f"{found[key]['builtin']:.1f}", f"{found[key]['ratio']:.2f}"]
        for key, label in names.items()
    )
    return markdown(("50K tokens", "records, GB/s", "plain copy, GB/s", "ratio"), rows)


SCENARIOS = {
    "retention / 2": "16 prefixes of 4K tokens, again",
    "retention": "32 prefixes of 4K tokens, again",
    "alternation": "two 56K sessions in turns",
    "agent loop": "four agents, 30 turns each",
    "volatile tail": "last 0 to 1,500 tokens of 6K differ",
    "churn": "48 agents, more than fits",
}


def prefix_simulation() -> str:
    """Token-weighted hit rate (share of an infinite cache's reuse) of each policy on the same traces."""
    found = {(row["scenario"], row["policy"]): row for row in load("prefix_simulation")["results"]}
    policies = ("SGLang 0.5.23", "tails", "tails + host")

    def cell(scenario: str, policy: str) -> str:
        row = found[scenario, policy]
        return f"{row['hit_rate']:.1%} ({row['of_bound']:.0%})"

    rows = ([label, *(cell(scenario, policy) for policy in policies)] for scenario, label in SCENARIOS.items())
    return markdown(("", *policies), rows)


def deterministic() -> str:
    """Answers compared under the deterministic flag, and how many differed."""

    def rows() -> Iterator[list[str]]:
        for name, label in (
            ("exact_h100", "one H100"),
            ("exact_h100_x2", "two H100s, `--tp 2`"),
            ("exact_h200", "one H200"),
        ):
            result = load(name)
            # SGLang's own test counts distinct samples, which are not answers compared with a cold one.
            kinds = {kind: counts for kind, counts in result["by_kind"].items() if not kind.startswith("sglang")}
            seen = result["seen"]
            trace = sum(counts[0] for kind, counts in kinds.items() if kind.endswith("trace"))
            compared, differ = (sum(counts[i] for counts in kinds.values()) for i in (0, 1))
            numbers = (compared, differ, seen["hit device"], seen["hit host"], trace)
            yield [f"{label} (`benchmarks/results/{name}.json`)", *map(whole, numbers)]

    head = ("", "compared", "different", "device hits", "host hits", "of the random trace")
    return markdown(head, rows())


def deterministic_price() -> str:
    """tok/s under the flag over those of the default."""
    labels = {
        "decode": "decode, requests: {}",
        "prefill_8192": "prefill, eight prompts of 8K",
        "prefill_65536": "prefill, one of 64K",
    }
    rows = (
        [
            labels[row["work"]].format(row["requests"]),
            *(whole(row[key]) for key in ("default", "exact")),
            f"{row['ratio']:.2f}",
        ]
        for row in load("exact_h200")["rows"]
    )
    return markdown(("tok/s", "default", "under the flag", "ratio"), rows)


def agreement() -> str:
    """Mean and median |difference| of log-probabilities, for each pair of servers."""
    rows = load("agreement_h200")["rows"]
    shown = ([f"{r['one']} - {r['other']}", f"{r['mean']:.3f}", f"{r['median']:.3f}"] for r in rows)
    return markdown(("pair", "mean", "median"), shown)


# -- kernels -----------------------------------------------------------------------------------------------------------


def attention() -> str:
    """Geometric mean of our time over FlashMLA's, by heads, batch and kind of prefill."""
    cases = load("sparse_attention_h200")["cases"]
    batches = (1, 4, 16, 64, 128, 256)

    def mean(heads: int, matches: Callable[[str], bool]) -> str:
        ratios = [
            case["ours_us"] / case["flashmla_us"]
            for case in cases
            if f"-h{heads}-" in case["name"] and matches(case["name"])
        ]
        return f"{geometric_mean(ratios):.2f}"

    def row(heads: int) -> list[str]:
        decode = [
            mean(heads, lambda name, end=f"-b{b}": name.startswith("decode") and name.endswith(end)) for b in batches
        ]
        prefill = [
            mean(heads, lambda name, end=end: name.startswith("prefill") and name.endswith(end))
            for end in ("fp8", "bf16")
        ]
        return [f"{heads} heads", *decode, *prefill]

    head = ("decode at batch", *map(str, batches), "prefill, FP8 rows", "prefill, bf16 rows")
    return markdown(head, map(row, (64, 128)))


def few_heads() -> str:
    """16 heads over 64: ratio of times, and microseconds of 16."""
    found = {row["name"]: row for row in load("few_heads_h200")["few_heads"] if row["heads"] == 16}
    batches = (1, 4, 64, 128, 256)

    def cell(kind: str, batch: int) -> str:
        row = found[f"decode-{kind}-32k-h16-b{batch}"]
        return f"{row['ratio_to_64']:.2f} ({row['us']:.1f})"

    kinds = (("CSA 512", "csa512"), ("CSA 1024", "csa1024"), ("HCA", "hca"))
    return markdown(
        ("batch", *map(str, batches)), ([label, *(cell(kind, b) for b in batches)] for label, kind in kinds)
    )


EXPERT_TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096, 8192)
EXPERT_SHAPES = {
    "flash-uniform": "Flash, uniform",
    "flash-tp2-uniform": "Flash, uniform, one of two ranks",
    "pro-uniform": "Pro, uniform",
    "pro-tp2-uniform": "Pro, uniform, one of two ranks",
    "flash-zipf": "Flash, Zipf",
    "pro-zipf": "Pro, Zipf",
    "flash-six": "Flash, all at six experts",
    "pro-six": "Pro, all at six experts",
}


def experts() -> str:
    """Our time over Marlin's, by shape and tokens."""
    found = {case["name"]: case for case in load("experts_h200")["cases"]}

    def cell(shape: str, tokens: int) -> str:
        case = found[f"{shape}-t{tokens}"]
        return f"{case['ours_us'] / case['marlin_us']:.2f}"

    rows = ([label, *(cell(shape, tokens) for tokens in EXPERT_TOKENS)] for shape, label in EXPERT_SHAPES.items())
    return markdown(("tokens", *map(whole, EXPERT_TOKENS)), rows)


def experts_floor() -> str:
    """Share of the floor (the touched experts' weights read once) that our time reaches."""
    found = {case["name"]: case for case in load("experts_h200")["cases"]}
    tokens = EXPERT_TOKENS[:6]

    def cell(shape: str, count: int) -> str:
        case = found[f"{shape}-t{count}"]
        return f"{case['floor_us'] / case['ours_us']:.2f}"

    rows = ([label, *(cell(shape, count) for count in tokens)] for shape, label in EXPERT_SHAPES.items())
    return markdown(("tokens", *map(whole, tokens)), rows)


def experts_means() -> str:
    """The geometric means of `experts` that have goals."""
    summary = load("experts_h200")["summary"]
    keys = ("decode_1_4", "decode_16_256", "prefill", "largest")
    rows = (["ours / Marlin", *(f"{summary[key]:.2f}" for key in keys)], ["goal", "1.0", "0.85", "0.8", "1.0"])
    return markdown(("tokens", "1 and 4", "16 to 256", "1,024 to 8,192", "largest"), rows)


def experts_prefill() -> str:
    """Microseconds before and after wider work tiles, launches included."""
    cases = load("experts_prefill_h200")["cases"]
    labels = {
        "flash-uniform": "Flash, uniform",
        "flash-zipf": "Flash, Zipf",
        "pro-tp2-uniform": "Pro, uniform, one of two ranks",
    }
    found = {tuple(case["name"].rsplit("-t", 1)): case for case in cases}

    def cell(shape: str, tokens: int) -> str:
        case = found.get((shape, str(tokens)))
        if case is None:
            return ""
        return f"{whole(case['before_us'])} / {whole(case[case['chosen'] + '_us'])} ({case['ratio']:.2f})"

    sizes = (2048, 4096, 8192)
    rows = ([label, *(cell(shape, tokens) for tokens in sizes)] for shape, label in labels.items())
    return markdown(("tokens", *map(whole, sizes)), rows)


def linear_fp8() -> str:
    """Microseconds of the six FP8 products of a Flash layer."""
    summary = load("linear_fp8_h200")["summary"]
    keys = ("ours_us", "ours_early_us", "deepgemm_us", "floor_us")
    rows = ([name.removeprefix("flash-t"), *(f"{row[key]:.1f}" for key in keys)] for name, row in summary.items())
    head = ("tokens", "ours, one launch at a time", "ours, as served", "DeepGEMM", "weights read once")
    return markdown(head, rows)


def grouped_linear() -> str:
    """Microseconds of `wo_a` from FP8 weights / of three launches with a bf16 weight."""
    found = {case["name"]: case for case in load("grouped_linear_h200")["cases"]}
    tokens = (1, 4, 16, 32, 64, 128)

    def cell(shape: str, count: int) -> str:
        case = found[f"{shape}-t{count}"]
        return f"{case['ours_us']:.1f} / {case['today_us']:.1f}"

    shapes = (
        ("Flash, 8 output groups", "flash"),
        ("4 output groups a rank", "flash-tp2"),
        ("2 output groups a rank", "flash-tp4"),
        ("Pro, 16 output groups", "pro"),
    )
    return markdown(
        ("tokens", *map(str, tokens)), ([label, *(cell(shape, n) for n in tokens)] for label, shape in shapes)
    )


def dependent_launch() -> str:
    """Microseconds of the 430 row kernels of 43 layers in one graph."""
    rows = load("dependent_launch_h200")["rows"]
    shown = ([str(r["tokens"]), whole(r["us"]), whole(r["early_us"]), f"{r['early_us'] / r['us']:.2f}"] for r in rows)
    return markdown(("tokens", "one after the other, us", "dependent launch, us", "ratio"), shown)


def indexer() -> str:
    """Microseconds of index scores and top-k by either kernel."""
    rows = load("indexer_h200")["rows"]
    shown = (
        [f"{r['work']}, {whole(r['tokens'])} tokens", whole(r["context"]), whole(r["us"]), whole(r["prefill_us"])]
        for r in rows
    )
    return markdown(("", "context", "`mma.sync`, us", "`wgmma`, us"), shown)


def blackwell() -> str:
    """Lower bounds of the Blackwell attention kernel, cycles of one multiprocessor for one token, by unit."""
    units = ("floor", "fma", "alu", "issue", "sfu", "tmem", "shared", "operands", "port", "l2", "hbm")
    cycles = load("sparse_attention_sm100_static")["cycles"]
    rows = (
        [case, *(whole(row[unit]) for unit in units), f"{row['bound']:.2f}", f"{row['roofline']:.2f} {row['bound by']}"]
        for case, row in cycles.items()
    )
    return markdown(("one token", *units, "bound", "roofline"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "readme": lambda: _served("serve_ab_h200", SERVED + CHURN),
    "serve_ab": lambda: _served("serve_ab_h200", SERVED + CHURN + STEPS),
    "two_gpus": lambda: _served("serve_ab_h100_x2", SERVED + STEPS[:1]),
    "agreement": agreement,
    "attention": attention,
    "blackwell": blackwell,
    "churn_sweep": churn_sweep,
    "copies": copies,
    "dependent_launch": dependent_launch,
    "deterministic": deterministic,
    "deterministic_price": deterministic_price,
    "experts": experts,
    "experts_floor": experts_floor,
    "experts_means": experts_means,
    "experts_prefill": experts_prefill,
    "few_heads": few_heads,
    "grouped_linear": grouped_linear,
    "indexer": indexer,
    "linear_fp8": linear_fp8,
    "prefix_simulation": prefix_simulation,
    "sequence_parallel": sequence_parallel,
    "speculation": speculation,
    "serve_switches": serve_switches,
    "step_switches": step_switches,
    "tiers": tiers,
    "verify_epilogue": verify_epilogue,
}


def written(text: str) -> str:
    """`text` with the content of every table block made anew.

    Raises:
        KeyError: a block names no table.
    """
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[4], text)


def documents() -> list[Path]:
    """Every markdown document of the repository that may hold a table."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    """Print every table, or with `--write` put each into its documents."""
    if "--write" not in sys.argv[1:]:
        print("\n".join(f"{name}\n\n{make()}" for name, make in TABLES.items()))
        return 0
    for path in documents():
        text = path.read_text()
        if (new := written(text)) != text:
            path.write_text(new)
            print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
