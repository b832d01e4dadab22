"""Tables of measurements of servers, from `benchmarks/results/*.json`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from documents.results import load, markdown, whole

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

FULL_SIZE = [
    SERVED[0],
    ("decode, 4 requests, tok/s", "decode", 4, "tok_s"),
    *SERVED[1:],
    *((f"8K in, 1K out, {n} requests, tok/s a GPU", "8k_1k", n, "tok_s_a_gpu") for n in (1, 16, 64, 256)),
    ("DSpark, 5.45 tokens a step, 1 request: a step, ms", "decode_dspark_5.45", 1, "step_ms"),
    ("DSpark, 1 request: a token, ms", "8k_1k_dspark_5.45", 1, "tpot_p50"),
    *(
        (f"DSpark, 8K in, 1K out, {n} requests, tok/s a GPU", "8k_1k_dspark_5.45", n, "tok_s_a_gpu")
        for n in (1, 16, 64, 256)
    ),
]


def served(*parts: tuple[str, list[tuple[str, str, int, str]]]) -> str:
    """Both servers and their ratio: for each file, each (label, work, requests, metric) that it has."""

    def rows() -> Iterator[list[str]]:
        for name, wanted in parts:
            found = {(row["work"], row["requests"], row["metric"]): row for row in load(name)["rows"]}
            for label, *key in wanted:
                row = found.get(tuple(key))
                if row is not None:
                    yield [label, whole(row["ours"]), whole(row["builtin"]), f"{row['ratio']:.2f}"]

    return markdown(("", "ours", "built-in", "ratio"), rows())


def best_of_builtin(name: str, of_ours: str = "ours") -> str:
    """A contender of ours and, in each row, that of the built-in that is the best there, with its name."""
    found: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in load(name)["rows"]:
        if row["of_ours"] == of_ours and row["ratio"] is not None:
            found.setdefault((row["work"], row["requests"], row["metric"]), []).append(row)

    def rows() -> Iterator[list[str]]:
        for label, *key in FULL_SIZE:
            if tuple(key) in found:
                best = min(found[tuple(key)], key=lambda row: row["ratio"])
                figures = (
                    f"{best[who]:,.2f}" if best["ours"] < 100 else whole(best[who]) for who in ("ours", "builtin")
                )
                parts = best["contender"].removeprefix("builtin").removeprefix("+").replace("_", " ").replace("+", ", ")
                yield [label, *figures, parts, f"{best['ratio']:.2f}"]

    return markdown(("", "ours", "built-in", "its best", "ratio"), rows())


def variants_of_ours(name: str, base: str = "ours") -> str:
    """A contender of ours, and each other one over it: above 1 where the other one is better."""
    found: dict[tuple[str, int, str], dict[str, float]] = {}
    for row in load(name)["rows"]:
        found.setdefault((row["work"], row["requests"], row["metric"]), {})[row["of_ours"]] = row["ours"]
    names = list(dict.fromkeys(of for row in found.values() for of in row if of != base))

    def rows() -> Iterator[list[str]]:
        for label, work, requests, metric in FULL_SIZE:
            row = found.get((work, requests, metric), {})
            if base in row and len(row) > 1 and "tok_s" in metric:
                yield [
                    label,
                    whole(row[base]),
                    *(f"{row[of] / row[base]:.2f}" if of in row else "" for of in names),
                ]

    return markdown(("", "ours", *(of.removeprefix(f"{base}+").replace("_", " ") for of in names)), rows())


def churn_sweep() -> str:
    """Returning sessions: hit rate and tok/s of both servers, by number of sessions."""
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
    """Loads as clients saw them, and a chunk's busy time, with sequence parallelism off and on."""
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


AGENTS = {
    "start": "first request of a session",
    "grow": "one turn more",
    "moved": "one turn more, the last reminder taken away",
    "edit": "old tool results cleared",
    "subagent": "first request of a sub-agent",
    "compact": "history replaced by a summary",
    "all": "all",
}


def agents_simulation() -> str:
    """Hit rates of agents' sessions by kind of request, and those of an unbounded cache."""
    found = {(row["style"], row["server"], row["kind"]): row for row in load("agents_simulation")["rows"]}

    def share(style: str, server: str, kind: str, what: str = "hit") -> str:
        row = found[style, server, kind]
        return f"{row[what] / row['prompt']:.1%}"

    def rows() -> Iterator[list[str]]:
        for kind, label in AGENTS.items():
            builtin = (share(style, "builtin", kind) for style in ("system", "user"))
            ours = (share("system", "ours", kind), share("user", "ours", kind))
            shown = ours[0] if ours[0] == ours[1] else " / ".join(ours)
            yield [
                label,
                whole(found["user", "ours", kind]["requests"]),
                *builtin,
                shown,
                share("user", "ours", kind, "bound"),
            ]

    head = ("requests", "number", "built-in, system messages", "built-in, user's texts", "ours, either", "unbounded")
    return markdown(head, rows())


def agents() -> str:
    """Hit rates and medians of the time to the first token of agents' sessions on both servers, by kind of request."""
    styles = {"system": "system messages", "user": "user's texts"}
    found = {(row["style"], row["kind"], row["metric"]): row for row in load("agents_h200")["rows"]}

    def both(style: str, kind: str, metric: str, form: str) -> str:
        return " / ".join(format(found[style, kind, metric][name], form) for name in ("ours", "builtin"))

    def rows() -> Iterator[list[str]]:
        for kind, label in AGENTS.items():
            cells = (
                both(style, kind, *what) for style in styles for what in (("hit_rate", ".1%"), ("ttft_p50", ".0f"))
            )
            yield [label, whole(found["user", kind, "requests"]["ours"]), *cells]

    head = (f"{what}, {words}" for words in styles.values() for what in ("hit rate", "TTFT, ms"))
    return markdown(("requests, ours / built-in", "number", *head), rows())


CHOICES = {
    "one": "one cache of twice the size",
    "prefix": "two caches, rank by prefix",
    "in_turn": "two caches, in turn (SGLang's default)",
    "router": "two servers behind `sglang-router`",
    "router_of_ranks": "two ranks of a server, chosen by `sglang-router --dp-aware`",
}


def ranks() -> str:
    """Hit rates of conversations over two caches, by who chooses the rank, and how the requests were divided."""
    found = {(row["contender"], row["shared"]): row for row in load("ranks_cpu")["rows"]}
    shared = sorted({tokens for _, tokens in found})

    def rows() -> Iterator[list[str]]:
        for contender, label in CHOICES.items():
            own = [found[contender, tokens] for tokens in shared]
            yield [label, *(text for row in own for text in (f"{row['hit_rate']:.3f}", f"{row['busier']:.2f}"))]

    columns = (column for tokens in shared for column in (f"hits, {tokens:,} shared", "on the busier cache"))
    return markdown(("", *columns), rows())


def deterministic() -> str:
    """Answers compared under the deterministic flag, and how many differed."""

    def rows() -> Iterator[list[str]]:
        for name, label in (
            ("determinism_h100", "one H100"),
            ("determinism_h100_x2", "two H100s, `--tp 2`"),
            ("determinism_h200", "one H200"),
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
    """Ratio of tok/s under the flag to tok/s by default."""
    labels = {
        "decode": "decode, requests: {}",
        "prefill_8192": "prefill, eight prompts of 8K",
        "prefill_65536": "prefill, one of 64K",
    }
    rows = (
        [
            labels[row["work"]].format(row["requests"]),
            *(whole(row[key]) for key in ("default", "deterministic")),
            f"{row['ratio']:.2f}",
        ]
        for row in load("determinism_h200")["rows"]
    )
    return markdown(("tok/s", "default", "under the flag", "ratio"), rows)


def agreement() -> str:
    """Mean and median |difference| of log-probabilities, for each pair of servers."""
    rows = load("agreement_h200")["rows"]
    shown = ([f"{r['one']} - {r['other']}", f"{r['mean']:.3f}", f"{r['median']:.3f}"] for r in rows)
    return markdown(("pair", "mean", "median"), shown)


QUALITY_HEAD = ("", "perplexity", "KL of text", "of chats", "of answers", "bits of the first server")


def figures_of(row: dict[str, Any]) -> list[str]:
    """A row's name, perplexity, KL with its bound in thousandths of a nat, and share of equal bits."""
    kinds = (row[kind] for kind in ("text", "chat", "decode"))
    bits = "all" if row["same_bits"] == 1 else f"{row['same_bits']:.0%}"
    shown = (f"{1000 * one['kl']:.1f} / {1000 * one['bound']:.1f}" for one in kinds)
    return [row["name"], f"{row['text']['perplexity']:.2f}", *shown, bits]


def acceptance() -> str:
    """The verdict and the summary of each item; if two runs have an item, the later run's."""
    items = {item["name"]: item for run in load("acceptance_cpu")["runs"] for item in run["items"]}
    rows = ([f"`{name}`", item["verdict"], item["summary"]] for name, item in items.items())
    return markdown(("item", "verdict", "summary"), rows)


def questions() -> str:
    """Right answers of the trained checkpoint without drafts: of each kind of question, the run with most questions."""
    found: dict[str, tuple[int, int]] = {}
    for run in load("train_tiny_questions")["runs"]:
        if "tokens_a_verify_step" not in run:
            for question, right in run["right"].items():
                found[question] = max(found.get(question, (0, 0)), (run["count"], right))
    return markdown(("question", "right"), ([name, f"{n} of {count}"] for name, (count, n) in found.items()))


def accepted() -> str:
    """Tokens of a verify step, and the answers that were right, of servers with drafts."""
    runs = [run for run in load("train_tiny_questions")["runs"] if "tokens_a_verify_step" in run]
    rows = (
        [
            run["server"].partition(",")[0],
            f"{run['tokens_a_verify_step']:.2f}",
            f"{sum(run['right'].values())} of {run['count'] * len(run['right'])}",
        ]
        for run in runs
    )
    return markdown(("drafts", "tokens of a verify step", "right answers"), rows)


def quality() -> str:
    """The reference's perplexity; of each configuration on a CPU perplexity beside the reference's of the same tokens,
    agreement, and mean KL with its bound."""

    def rows() -> Iterator[list[str]]:
        reference, *configurations = load("quality_cpu")["rows"]
        yield [reference["name"], f"{reference['text']['perplexity']:.2f}", f"{reference['chat']['perplexity']:.3f}"]
        for row in configurations:
            exact = max((kl for kind, kl in row.get("fp32", {}).items() if kind != "bound"), default=None)
            text, chat = row["text"], row["chat"]
            name, _, *others = figures_of(row)
            yield [
                name,
                f"{text['perplexity']:.2f} / {text['reference_perplexity']:.2f}",
                f"{chat['perplexity']:.3f} / {chat['reference_perplexity']:.3f}",
                f"{100 * text['agreement']:.1f} / {100 * text['plain_agreement']:.1f}",
                *others,
                "" if exact is None else f"{exact:.0e}",
            ]

    head = ("", "perplexity of text", "of chats", "same token, %", *QUALITY_HEAD[2:], "KL in fp32")
    return markdown(head, (row + [""] * (len(head) - len(row)) for row in rows()))


def quality_on_gpus() -> str:
    """The same on an H200, which serves no fp32: ours, and ours beside the built-in on a checkpoint of 64 heads."""
    rows = [figures_of(row) for row in load("quality_h200")["rows"] if "decode" in row]
    for row in load("quality_64_heads_h200")["rows"]:
        if "decode" not in row:
            continue  # the reference
        name, *figures = figures_of(row)
        rows.append([f"{name}; 64 heads", *figures])
    return markdown(QUALITY_HEAD, rows)


def disaggregation() -> str:
    """A prefill and a decode server beside one server on both GPUs."""
    found = load("pd_h200_x2")["serve"]
    labels = {
        "tok_s": "chats, tok/s",
        "chat_ttft_p50": "a chat's first token, median, ms",
        "chat_itl_p50": "between a chat's tokens, median, ms",
        "chat_itl_p99": "the same, 99th percentile, ms",
        "long_ttft_p50": "first token after 16,384 tokens, median, ms",
    }

    def shown(value: float) -> str:
        return whole(value) if value >= 100 else f"{value:.1f}"

    rows = ([label, *(shown(found[who][metric]) for who in ("pd", "one"))] for metric, label in labels.items())
    return markdown(("", "prefill and decode server", "one server, `--tp 2`"), rows)


def transfers() -> str:
    """Rates of transfers beside a plain copy: over NVLink by NIXL, and over sockets on a CPU."""

    def rows() -> Iterator[list[str]]:
        for name, over in (("pd_h200_x2", "NIXL, NVLink"), ("pd_cpu", "sockets, CPU")):
            for row in load(name)["transfer"]:
                ms = 1e3 * row["bytes"] / row["gb_s"] / 1e9
                rates = (f"{row[rate]:.1f}" for rate in ("gb_s", "plain_gb_s"))
                counts = whole(row["tokens"]), row["pages"], whole(row["blocks"])
                yield [over, *counts, f"{ms:.1f}", *rates, f"{row['share']:.0%}"]

    head = ("over", "tokens", "pages", "blocks", "ms", "GB/s", "plain copy", "share")
    return markdown(head, rows())
