"""Tables of the documents that are made from `benchmarks/results/*.json` and from `docs/server_flags.toml`.

A document holds each table between `<!-- table: NAME -->` and `<!-- end -->`. After a new measurement:

    python tests/lib/documents/result_tables.py --write

`tests/test_documents.py` fails when a table and its file differ. Ratios of time are ours / theirs; ratios of rates and
of "higher is better" tables are above 1 when ours is better, as the tables say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from documents import flag_tables, kernel_tables, model_tables, served_tables
from documents.results import ROOT

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


TABLES: dict[str, Callable[[], str]] = {
    "readme": lambda: served_tables.served(
        ("serve_ab_torch_2_14_h200", served_tables.SERVED), ("serve_ab_h200", served_tables.CHURN)
    ),
    "serve_ab": lambda: served_tables.served(
        ("serve_ab_torch_2_14_h200", served_tables.SERVED + served_tables.STEPS), ("serve_ab_h200", served_tables.CHURN)
    ),
    "serve_ab_torch_2_11": lambda: served_tables.served(
        ("serve_ab_h200", served_tables.SERVED + served_tables.CHURN + served_tables.STEPS)
    ),
    "four_gpus": lambda: served_tables.best_of_builtin("serve_ab_h200_x4"),
    "four_gpus_before": lambda: served_tables.best_of_builtin("serve_ab_variants_h200_x4", "ours+our_all_reduce"),
    "four_gpus_variants": lambda: served_tables.variants_of_ours("serve_ab_variants_h200_x4", "ours+our_all_reduce"),
    "two_gpus_whole": lambda: served_tables.best_of_builtin("serve_ab_h200_x2"),
    "two_gpus_variants": lambda: served_tables.variants_of_ours("serve_ab_h200_x2"),
    "two_gpus": lambda: served_tables.served(("serve_ab_h100_x2", served_tables.SERVED + served_tables.STEPS[:1])),
    "acceptance": served_tables.acceptance,
    "accepted": served_tables.accepted,
    "agents": served_tables.agents,
    "agents_simulation": served_tables.agents_simulation,
    "agreement": served_tables.agreement,
    "all_reduce": kernel_tables.all_reduce,
    "attention": kernel_tables.attention,
    "blackwell": kernel_tables.blackwell,
    "boundary_of_parts": kernel_tables.boundary_of_parts,
    "churn_sweep": served_tables.churn_sweep,
    "copies": served_tables.copies,
    "dependent_launch": kernel_tables.dependent_launch,
    "disaggregation": served_tables.disaggregation,
    "deterministic": served_tables.deterministic,
    "deterministic_price": served_tables.deterministic_price,
    "experts": kernel_tables.experts,
    "experts_floor": kernel_tables.experts_floor,
    "experts_means": kernel_tables.experts_means,
    "experts_prefill": kernel_tables.experts_prefill,
    "few_heads": kernel_tables.few_heads,
    "flags": flag_tables.every_flag,
    "grouped_linear": kernel_tables.grouped_linear,
    "indexer": kernel_tables.indexer,
    "linear_fp8": kernel_tables.linear_fp8,
    "prefix_simulation": served_tables.prefix_simulation,
    "quality": served_tables.quality,
    "questions": served_tables.questions,
    "quality_on_gpus": served_tables.quality_on_gpus,
    "ranks": served_tables.ranks,
    "sequence_parallel": served_tables.sequence_parallel,
    "speculation": served_tables.speculation,
    "serve_switches": served_tables.serve_switches,
    "step_switches": served_tables.step_switches,
    "step_model": model_tables.steps,
    "step_model_boundaries": model_tables.boundaries,
    "step_model_clusters": model_tables.clusters,
    "step_model_errors": model_tables.errors,
    "step_model_few_heads": model_tables.few_heads,
    "step_model_own_rows": model_tables.own_rows,
    "step_model_published": model_tables.published,
    "step_model_tiles_of_products": model_tables.tiles_of_products,
    "step_model_worst": model_tables.worst,
    "tiers": served_tables.tiers,
    "transfers": served_tables.transfers,
    "verify_epilogue": served_tables.verify_epilogue,
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
        for name, make in TABLES.items():
            try:
                print(f"{name}\n\n{make()}")
            except FileNotFoundError as error:
                print(f"{name}\n\nnot measured yet: {error.filename}\n")
        return 0
    for path in documents():
        text = path.read_text()
        if (new := written(text)) != text:
            path.write_text(new)
            print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
