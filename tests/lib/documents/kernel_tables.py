"""Tables of measurements of kernels, from `benchmarks/results/*.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from documents.results import geometric_mean, load, markdown, whole


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
    """The floor (the touched experts' weights read once) over our time."""
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


def _sums(result: str, contenders: dict[str, str]) -> str:
    """Microseconds of each contender by bytes of a part, on two and on four GPUs."""
    sizes = {ranks: {at["kilobytes"]: at for at in load(f"{result}_h200_x{ranks}")["sizes"]} for ranks in (2, 4)}

    def cell(size: float, ranks: int, contender: str) -> str:
        at = sizes[ranks].get(size)
        return f"{at['us'][contender]:.1f}" if at else ""

    def rows() -> Iterator[list[str]]:
        for size in sorted(sizes[2] | sizes[4]):
            tokens = (sizes[2] | sizes[4])[size]["rows"]
            yield [whole(tokens), whole(size), *(cell(size, ranks, name) for ranks in (2, 4) for name in contenders)]

    head = (f"{label}, {ranks} GPUs" for ranks in (2, 4) for label in contenders.values())
    return markdown(("tokens", "KB", *head), rows())


def all_reduce() -> str:
    """Microseconds of a sum over ranks."""
    return _sums("all_reduce", {"ours": "ours", "nccl": "NCCL", "gather": "gather and sum"})


def boundary_of_parts() -> str:
    """Microseconds of a sum over ranks and the boundary to the next sublayer."""
    return _sums("boundary", {"fused": "one launch", "ours": "two launches", "nccl": "NCCL, boundary"})


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
