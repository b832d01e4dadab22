"""Quality of every configuration that is offered: servers of the trained checkpoint against the reference in fp32.

    PYTHONPATH=tests/lib:benchmarks python benchmarks/quality_table.py trained --out benchmarks/results/quality_cpu.json

starts the servers of `lib.quality_configurations.ON_A_CPU` one after the other (`--only TEXT …`: those whose name has
TEXT; `--add`: into the file, in place of rows of the same names). On a host with GPUs:

    PYTHONPATH=benchmarks python -m train_tiny.widen trained WIDE
    PYTHONPATH=tests/lib:benchmarks python benchmarks/quality_table.py WIDE --gpus 1 --out quality_h200.json

starts those of `ON_GPUS` that fit into the number of GPUs: ours and SGLang's built-in on the same checkpoint. Parts of
the table that were measured side by side are joined by `--merge FILE …`.

Inputs: windows of this repository's licence, which was not trained on; conversations of the training's tasks with
other numbers and names (`train_tiny.tasks`), teacher-forced; and prompts of a text that are continued greedily, so that
decode and verify steps are judged, too: the reference computes the distribution after every token that the server
answered. A configuration with a prefix reuses the first two pages of each window; the rest is judged.

Two references (`tests/lib/model/reference.py`), both in fp32. KL is measured against the one with the configuration's
own quantisers; "to the trained model" against the one with all quantisers, the function that was trained. A mean KL may
be twice that of the reference with activations in bf16 (`quality_figures.bound_of`): the server rounds as often as
PyTorch does there, at other places. In fp32 without quantisers log-probabilities may differ by `TOLERANCE`, as
everywhere in this project, which is a KL of at most half its square. The first row is the reference's own perplexity; a
row of texts and conversations has the reference's perplexity of the same tokens beside its own, with a bound of the
distance (`quality_measuring.furthest_perplexity`). Exit status 1 if a configuration is beyond a
bound, lacks bits that it promises, or is further from the trained model than the built-in.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lib.quality_configurations import ON_A_CPU, ON_GPUS, Configuration
from lib.quality_figures import TOP
from lib.quality_measuring import (
    JUDGED,
    REFERENCE,
    TEXT_TOKENS,
    NoHitError,
    Start,
    Table,
    forked,
    inputs,
    problems,
)
from lib.servers import DidNotComeUpError, running
from lib.versions import versions


def beside_the_builtin(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Kinds in which our mean KL to the trained model is larger than that of every configuration of the built-in."""
    found = []
    for kind in JUDGED:
        theirs = [one[kind]["to_trained"] for one in rows if one["contender"].startswith("builtin")]
        found += [
            f"{one['name']}: KL of {kind} to the trained model {one[kind]['to_trained']:.2e}, "
            f"built-in {min(theirs):.2e}"
            for one in rows
            if theirs and one["contender"].startswith("ours") and one[kind]["to_trained"] > min(theirs)
        ]
    return found


def from_command(port: int) -> Start:
    """A function that starts the server of a configuration on a port, by the command that users run."""

    def start(configuration: Configuration, checkpoint: Path, folder: Path) -> AbstractContextManager[Any]:
        server = configuration.contender.partition("+")[0]
        flags, env = configuration.server_flags(), configuration.environment(folder)
        return running(server, checkpoint, flags, port, folder / "log", env=env)

    return start


def shown(measured: dict[str, Any]) -> str:
    """A row for people."""
    kinds = " ".join(f"{measured[k]['kl']:.2e}/{measured[k]['bound']:.1e}" for k in JUDGED)
    exact = max((kl for kind, kl in measured.get("fp32", {}).items() if kind != "bound"), default=None)
    fp32 = "" if exact is None else f"{exact:.1e}"
    return f"{measured['name']:38} {measured['text']['perplexity']:8.2f} {kinds} {measured['same_bits']:8.2%} {fp32}"


def parser() -> argparse.ArgumentParser:
    """The command line of the module's docstring."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("checkpoint", type=Path)
    found.add_argument("--gpus", type=int, default=0, help="GPUs of this host; 0: the configurations of a CPU")
    found.add_argument("--only", nargs="+", metavar="TEXT", help="configurations whose name has one of the texts")
    found.add_argument("--add", action="store_true", help="to the rows of OUT")
    found.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="measure nothing: join the rows of files")
    found.add_argument("--port", type=int, default=31_700, help="of servers on GPUs")
    found.add_argument("--folder", type=Path, help="for logs; by default a temporary one")
    found.add_argument("--out", type=Path)
    return found


def configurations(gpus: int, only: Sequence[str] | None) -> list[Configuration]:
    """The configurations whose names have one of the texts, and the first of all: bits are compared with its bits.

    Raises:
        ValueError: no name has one of the texts.
    """
    offered = [one for one in (ON_GPUS if gpus else ON_A_CPU) if one.ranks <= max(1, gpus)]
    wanted = [one for one in offered if not only or any(text in one.name for text in only)]
    if not wanted:
        raise ValueError(f"no configuration has {only}; there are: {', '.join(one.name for one in offered)}")
    return wanted if wanted[0] is offered[0] else [offered[0], *wanted]


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reference and the rows in the order of the configurations; no name is both of a CPU's and of GPUs'."""
    order = {name: number for number, name in enumerate((REFERENCE, *(one.name for one in (*ON_A_CPU, *ON_GPUS))))}
    return sorted(rows, key=lambda row: order.get(row["name"], len(order)))


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """The rows of all files in one result; of rows with the same name, the first file's.

    Raises:
        ValueError: the files were measured with other inputs or versions.
    """
    results = [json.loads(file.read_text()) for file in files]
    for file, result in zip(files, results, strict=True):
        other = [key for key, value in result.items() if key != "rows" and value != results[0][key]]
        if other:
            raise ValueError(f"{file} and {files[0]} differ in {', '.join(other)}")
    rows = {row["name"]: row for result in reversed(results) for row in result["rows"]}
    return {**results[0], "rows": in_order(rows.values())}


def main(arguments: Sequence[str] | None = None, start: Start | None = None) -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    chosen = parser().parse_args(arguments)
    if chosen.merge:
        try:
            result = merged(chosen.merge)
        except ValueError as error:
            parser().error(str(error))
        if chosen.out is not None:
            chosen.out.write_text(json.dumps(result, indent=1) + "\n")
        return told(result["rows"], [line for row in result["rows"] for line in problems(row)])
    try:
        wanted = configurations(chosen.gpus, chosen.only)
    except ValueError as error:
        parser().error(str(error))
    given, rows = inputs(chosen.checkpoint), {}
    if chosen.add and chosen.out and chosen.out.exists():
        before = json.loads(chosen.out.read_text())
        if before["inputs"] != given.digest():
            parser().error(f"{chosen.out} was measured with other inputs: measure all rows again, without --add")
        rows = {one["name"]: one for one in before["rows"]}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        start = start or (from_command(chosen.port) if chosen.gpus else forked)
        table = Table(chosen.checkpoint, folder, start, given)
        rows[REFERENCE] = of_reference = table.of_reference()
        print(
            f"{'':38} perplexity, KL/bound of text, chat, decode; same bits; KL in fp32 without quantisers", flush=True
        )
        print(f"{REFERENCE:38} {of_reference['text']['perplexity']:8.2f}", flush=True)
        for one in wanted:
            try:
                rows[one.name] = measured = table.measure(one)
            except (DidNotComeUpError, NoHitError, OSError) as error:
                failed.append(f"{one.name}: {error}")
                print(f"{one.name}: {error}", flush=True)
                continue
            failed += problems(measured)
            print(shown(measured), flush=True)
            result = {
                "checkpoint": chosen.checkpoint.name,
                "inputs": given.digest(),
                "text_tokens": TEXT_TOKENS,
                "top": TOP,
                "versions": versions(),
                "rows": in_order(rows.values()),
            }
            if chosen.out is not None:
                chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    return told(list(rows.values()), failed)


def told(rows: Sequence[dict[str, Any]], failed: Sequence[str]) -> int:
    """Print each figure beyond its bound or the built-in's; returns the exit status: 1 if there is any."""
    beyond = [*failed, *beside_the_builtin(rows)]
    print("\n".join(f"beyond: {line}" for line in beyond) or "all within their bounds")
    judged = sum(row["contender"] != "reference" for row in rows)
    print(json.dumps({"configurations": judged, "beyond": beyond}))
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
