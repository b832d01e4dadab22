"""Check whether a server computes DeepSeek-V4, and print a report and one line of JSON.

python -m sglang_dsv4.acceptance http://127.0.0.1:30000            all items but the stability run
python -m sglang_dsv4.acceptance URL --quick                       a few requests an item
python -m sglang_dsv4.acceptance URL --only needles hits           these items
python -m sglang_dsv4.acceptance URL --hours 1                     with a stability run
python -m sglang_dsv4.acceptance URL --without-drafts URL          and compare with a server without drafts

Exit status: 0 if no item is red, 1 if one is, 2 if nothing could be checked, 3 if no item but `server` could be judged.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_dsv4.acceptance import (
    calls,
    encoding,
    needles,
    official,
    public_benchmarks,
    report,
    sameness,
    served,
    stability,
    structured,
)
from sglang_dsv4.acceptance.client import Refused, Server, Unreachable
from sglang_dsv4.acceptance.plan import QUICK, Plan
from sglang_dsv4.acceptance.report import Result, not_judged, red

CHECKS: dict[str, Callable[[Server, served.Served, Plan], list[Result]]] = {
    encoding.NAME: encoding.check,
    official.NAME: official.check,
    needles.NAME: needles.check,
    calls.NAME: calls.check,
    structured.NAME: structured.check,
    sameness.HITS: sameness.check_hits,
    sameness.BATCH: sameness.check_batch,
    sameness.DRAFTS: sameness.check_drafts,
    stability.NAME: stability.check,
}


def number(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    """A converter for argparse: a finite number of at least `least`."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least) - 1
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least:g}, got {text!r}")
        return value

    return convert


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m sglang_dsv4.acceptance", description=__doc__.splitlines()[0])
    made.add_argument("url", help="the server, for example http://127.0.0.1:30000")
    made.add_argument("--model", help="the model's name, if the server has several")
    made.add_argument(
        "--weights", choices=["auto", *(one.value for one in served.Weights)], default="auto", help="whose weights"
    )
    made.add_argument("--quick", action="store_true", help="a few requests an item")
    made.add_argument("--only", nargs="+", choices=CHECKS, metavar="ITEM", help=f"of {', '.join(CHECKS)}")
    made.add_argument("--longest", type=number(int, 64), help="prompt tokens of the longest needle")
    made.add_argument("--concurrency", type=number(int, 1), default=8, help="requests at a time")
    made.add_argument("--timeout", type=number(float, 1), default=600, help="seconds that an answer may take")
    made.add_argument("--hours", type=number(float, 0), default=0, help="of the stability run")
    made.add_argument("--without-drafts", metavar="URL", help="a server of the same weights without drafts")
    made.add_argument("--seed", type=number(int, 0), help="of what is drawn; another one each time unless given")
    made.add_argument("--api-key-file", type=Path, help="a file with the key of the server")
    return made


def plan_of(chosen: argparse.Namespace, without_drafts: Server | None) -> Plan:
    """How much is asked for."""
    seed = secrets.randbelow(2**31) if chosen.seed is None else chosen.seed
    return dataclasses.replace(
        QUICK if chosen.quick else Plan(),
        longest=chosen.longest,
        hours=chosen.hours,
        seed=seed,
        without_drafts=without_drafts,
    )


def run(server: Server, facts: served.Served, plan: Plan, only: Sequence[str]) -> list[Result]:
    """The results of the checks, up to Ctrl-C. A server that is gone, or a response of another form, is red."""
    results: list[Result] = []
    for name, check in CHECKS.items():
        if name in only:
            print(f"{name} …", file=sys.stderr, flush=True)
            try:
                results += check(server, facts, plan)
            except (Refused, Unreachable) as error:
                results.append(red(name, str(error)))
            except KeyboardInterrupt:
                return [*results, not_judged(name, "interrupted; later items were not begun")]
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit status."""
    chosen = parser().parse_args(arguments)
    try:
        key = chosen.api_key_file.read_text().strip() if chosen.api_key_file else None
        server = Server(chosen.url, key, chosen.timeout, chosen.concurrency)
        facts, first = served.look(server, chosen.model, chosen.weights)
        other = None
        if chosen.without_drafts:
            other = Server(chosen.without_drafts, key, chosen.timeout, chosen.concurrency)
            served.look(other, None, facts.weights.value)
    except Refused as error:
        hint = ": an OpenAI-compatible server has this route" if error.no_route else ""
        print(f"{error}{hint}", file=sys.stderr)
        return 2
    except (OSError, ValueError, served.WrongModel) as error:
        print(error, file=sys.stderr)
        return 2
    plan = plan_of(chosen, other)
    results = [first, *run(server, facts, plan, chosen.only or list(CHECKS))]
    print(f"{server.url}: {facts.model}\n\n{report.page(results)}\n")
    about = {"url": server.url, "seed": plan.seed, "quick": chosen.quick}
    if not chosen.only:
        print(public_benchmarks.page(server.url, facts.model, facts.weights) + "\n")
        about["public_benchmarks"] = public_benchmarks.as_json(server.url, facts.model, facts.weights)
    print(report.as_json(results, **about))
    return report.status(results)


if __name__ == "__main__":
    sys.exit(main())
