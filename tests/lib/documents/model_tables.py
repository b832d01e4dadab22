"""Tables of the model of time, from `benchmarks/results/step_model.json`."""

from __future__ import annotations

from documents.results import load, markdown, whole

RANKS = (1, 4, 8)


def errors() -> str:
    """Errors of the model on H200s: a row for each kind of kernel."""
    document = load("step_model")
    rows = []
    for which, families in document["errors"].items():
        for name, found in families.items():
            worst = f"{found['worst']:.0%} ({found['worst_case']})"
            use = which.replace("_", " ")
            rows.append((name, use, str(found["cases"]), f"{found['mean']:.1%}", f"{found['bias']:.2f}", worst))
    for name, key in (("all that were held out", "held_out"), ("steps", "steps")):
        found = document[key]
        worst = f"{found['worst']:.0%} ({found['worst_case']})"
        rows.append((f"**{name}**", "", str(found["cases"]), f"{found['mean']:.1%}", f"{found['bias']:.2f}", worst))
    return markdown(("", "", "cases", "mean error", "predicted / measured", "worst"), rows)


def steps() -> str:
    """Predicted milliseconds of a forward on B200, and the sum of its launches' floors."""
    predictions = [row for row in load("step_model")["predictions"] if row["gpu"] == "B200"]
    kinds = sorted({(row["prefill"], row["tokens"]) for row in predictions})

    def cells(model: str, prefill: bool, tokens: int) -> list[str]:
        found = {
            row["ranks"]: f"{row['ms']:,.1f} ({row['floor_ms']:,.1f})"
            for row in predictions
            if (row["model"], row["prefill"], row["tokens"]) == (model, prefill, tokens)
        }
        return [found[ranks] for ranks in RANKS]

    rows = []
    for prefill, tokens in kinds:
        name = f"chunk of {whole(tokens)}" if prefill else f"{tokens} request{'s' * (tokens > 1)}"
        rows.append((name, *cells("flash", prefill, tokens), *cells("pro", prefill, tokens)))
    head = [f"{model}, {ranks} GPU{'s' * (ranks > 1)}" for model in ("Flash", "Pro") for ranks in RANKS]
    return markdown(("B200, ms", *head), rows)


def published() -> str:
    """Steps that others have published, and the model's."""
    document = load("step_model")
    rows = []
    for entry in document["published"]:
        count, _, gpu = entry["gpus"].rpartition(" x ")
        of_ours = [
            f"{row['ms']:.1f} ({row['ranks']})"
            for row in document["predictions"]
            if (row["gpu"], row["model"], row["tokens"], row["prefill"])
            == (gpu, entry["model"], entry["requests"], False)
            and (not count or row["ranks"] == int(count))
        ]
        theirs = " to ".join(f"{ms:.1f}" for ms in entry["ms"])
        rows.append(
            (
                entry["by"],
                f"{entry['model'].title()}, {entry['gpus']}",
                str(entry["requests"]),
                theirs,
                ", ".join(of_ours),
            )
        )
    return markdown(("", "", "requests", "published, ms", "modelled, ms (GPUs)"), rows)


def worst(key: str = "flash, 4 GPUs") -> str:
    """Launches of a decode step of 64 requests far above their floor."""
    rows = load("step_model")["worst_of_64_requests"][key]
    return markdown(
        ("launch", "us a step", "floor, us", "us / (floor, gaps, first loads)", "largest term"),
        (
            (
                row["launch"],
                whole(row["us"]),
                whole(row["floor_us"]),
                f"{row['over_reach']:.2f}",
                row["largest_term"],
            )
            for row in rows
        ),
    )


def few_heads() -> str:
    """Time of attention with a plan for few heads over today's, on a B200."""
    cases = load("step_model")["what_if"]["few_heads"]
    tokens = sorted({case["tokens"] for case in cases})
    kinds = list(dict.fromkeys((case["kind"], case["context"], case["heads"]) for case in cases))
    rows = []
    for kind, context, heads in kinds:
        found = {
            case["tokens"]: case["few_heads"]
            for case in cases
            if (case["kind"], case["context"], case["heads"]) == (kind, context, heads)
        }
        rows.append((f"{kind}, context {whole(context)}, {heads} heads", *(f"{found[n]:.2f}" for n in tokens)))
    return markdown(("tokens", *map(whole, tokens)), rows)


def tiles_of_products(tokens: int = 64) -> str:
    """FP8 products of V4-Flash on one of four B200s: the chosen work tiles and those of 128 rows."""
    cases = load("step_model")["what_if"]["tiles_of_products"]
    rows = []
    for case in cases:
        if (case["model"], case["gpus"], case["tokens"]) == ("flash", 4, tokens):
            times = (f"{case[key]:.1f}" for key in ("us", "of_128_rows_us"))
            rows.append((case["product"], f"{case['rows']} x {case['tile_tokens']}", str(case["ctas"]), *times))
    heads = ("", "rows x tokens", "CTAs", "us", "with tiles of 128 rows and all tokens")
    return markdown(heads, rows)


def clusters() -> str:
    """Products of bf16 operands on one of four B200s: tiles of clusters and of single CTAs."""
    cases = load("step_model")["what_if"]["clusters"]
    counts = sorted({case["tokens"] for case in cases})
    rows = []
    for name in dict.fromkeys(case["product"] for case in cases):
        found = {case["tokens"]: case for case in cases if case["product"] == name}
        rows.append((name, *(f"{found[n]['us']:.1f} ({found[n]['one_cta_us']:.1f})" for n in counts)))
    return markdown(("us, tokens", *map(whole, counts)), rows)


def own_rows() -> str:
    """A prefill chunk with rows sharded over the ranks, by GPUs and context."""
    rows = load("step_model")["what_if"]["own_rows"]
    return markdown(
        ("chunk that ends at", "GPUs", "`off`, ms", "`on`", "`attention`", "`off` / `attention`"),
        (
            (
                f"{row['context']:,}",
                f"{row['ranks']} x {row['gpu']}",
                f"{row['off_ms']:.0f}",
                f"{row['on_ms']:.0f}",
                f"{row['attention_ms']:.0f}",
                f"{row['off_ms'] / row['attention_ms']:.2f}",
            )
            for row in rows
        ),
    )


def boundaries() -> str:
    """Boundaries on a B200 by plan, with 15 and 16 clusters at once."""
    found = load("step_model")["what_if"]["boundaries"]
    plans = [name for name in found[0] if name not in ("dim", "tokens")]
    head = (f"{'Flash' if row['dim'] == 4096 else 'Pro'}, {row['tokens']}" for row in found)
    return markdown(("us, tokens", *head), ((plan, *(f"{row[plan]:.1f}" for row in found)) for plan in plans))
