"""Mutation test of a kernel: does the emulator notice that a synchronisation instruction is missing?

A launch of a right kernel is recorded once. Then each synchronisation instruction that the launch executed is deleted,
one at a time, and the launch is replayed under seven schedules. A mutant is caught when the emulator raises an error,
when the memory after the launch differs, or when there is a new warning.

    PYTHONPATH=tests/emulator python -m ptx_emulator.campaigns.mutation RECORDING.npz [--case NAME] [--write]
        [--only CLASSES] [--sample N] [--checks strict|KIND,KIND]

It prints the full record (every deletion that was not caught, with its reason) and, with --write, replaces the case's
summary in results/mutation.json. A wait that never had to wait under any of the seven schedules is no mutant: deleting
it changes nothing that these runs could show. A person writes the reason of each deletion that is not caught into
results/mutation_reasons.json: {case: {PTX text, or "PTX text #n of m": reason}}; "#n of m" is the n-th of the
kernel's m instructions with this text (a line number would move with any change of the kernel). A reason begins with
"redundant" or with "blind spot"; the catch rate of a class leaves the redundant deletions out.

At the end all deletions that were not caught are made together. If the result is still not caught, none of these
instructions stands in for another: instructions whose deletion is caught provide the same order.
"""

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ptx_emulator import Checks, EmulationError, Options, Program, Recording, UnknownInstruction, program_of
from ptx_emulator.campaigns import summaries

SCHEDULES: list[tuple[str, int]] = [
    ("eager", 0),
    ("late", 1),
    ("random", 1),
    ("random_warps", 1),
    ("late", 2),
    ("random", 2),
    ("random_warps", 2),
]

CLASSES: dict[str, str] = {
    "mma": r"tcgen05\.mma\b",
    "tcgen05.cp": r"tcgen05\.cp\b",
    "tma": r"cp\.(reduce\.)?async\.bulk\.(tensor|shared|global)",
    "cp.async": r"cp\.async\.(ca|cg|mbarrier)",
    "commit": r"tcgen05\.commit\b",
    "mbarrier.arrive": r"mbarrier\.(arrive|expect_tx|complete_tx)",
    "mbarrier wait": r"mbarrier\.(try|test)_wait",
    "bar.sync": r"(bar|barrier)\.(cta\.)?(sync|arrive|red)",
    "bar.warp.sync": r"bar\.warp\.sync",
    "cluster barrier": r"barrier\.cluster",
    "fence": r"(fence|membar)\b",
    "tcgen05.fence": r"tcgen05\.fence",
    "tcgen05.wait": r"tcgen05\.wait",
    "bulk group": r"cp\.async\.(bulk\.)?(commit_group|wait_group|wait_all)",
}

# A mutant may loop for ever; it is stopped after this many times the instructions of the right launch.
RUNAWAY_FACTOR = 30
NOT_ANALYSED = "not analysed"
REDUNDANT = "redundant"
USUAL = Checks()


@dataclass(frozen=True)
class Site:
    """One instruction that a mutant deletes."""

    class_name: str
    line: int
    opcode: str
    text: str
    place: str = ""  # "n of m": the n-th of the kernel's m instructions with this text


@dataclass
class Outcome:
    """Whether the deletion of one instruction was noticed, and how."""

    site: Site
    caught_by: str = ""  # the kind of the error, "wrong result", or "" for not caught
    schedule: str = ""
    message: str = ""


@dataclass
class Result:
    """The outcomes of one kernel's mutation test."""

    case: str
    checks: Checks
    outcomes: list[Outcome] = field(default_factory=list)
    possible: dict[str, int] = field(default_factory=dict)  # class -> mutants before sampling
    never_waited: int = 0
    together: Outcome | None = None  # all deletions that are not caught, made at once
    cpu_seconds: float = 0.0

    def missed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.caught_by]

    def by_class(self, reasons: dict[str, str]) -> dict[str, tuple[int, int, int]]:
        """class -> (caught, redundant, all)."""
        total = Counter(outcome.site.class_name for outcome in self.outcomes)
        missed = Counter(outcome.site.class_name for outcome in self.missed())
        redundant = Counter(
            outcome.site.class_name
            for outcome in self.missed()
            if reason_of(outcome.site, reasons).startswith(REDUNDANT)
        )
        return {name: (total[name] - missed[name], redundant[name], total[name]) for name in CLASSES if total[name]}


def rate(caught: int, redundant: int, total: int) -> float:
    """The share of the deletions that are caught, without the redundant ones."""
    return caught / (total - redundant) if total > redundant else 1.0


def without(ptx: str, *sites: Site) -> str:
    """The PTX without these instructions; line numbers are unchanged. A deleted wait succeeds at once."""
    for site in sites:
        ptx = _without_one(ptx, site)
    return ptx


def _without_one(ptx: str, site: Site) -> str:
    start = 0
    for _ in range(site.line - 1):
        start = ptx.index("\n", start) + 1
    found = re.compile(rf"(?<![\w.:]){re.escape(site.opcode)}(?![\w.:])([^;]*);").search(ptx, start)
    assert found, f"line {site.line} has no {site.opcode}"
    guard = re.compile(r"@!?[%\w]+\s+$").search(ptx, start, found.start())
    first = guard.start() if guard else found.start()
    kept = re.sub(r"[^\n]", "", ptx[first : found.end()])
    if "_wait" in site.opcode and "mbarrier" in site.opcode:
        predicate = found[1].split(",")[0].strip()
        kept = f"{guard[0] if guard else ''}mov.pred {predicate}, -1;" + kept
    return ptx[:first] + kept + ptx[found.end() :]


def _without_count(warning: str) -> str:
    return re.sub(r", \d+ times", "", warning)


class MutationTest:
    """One recorded launch, and the lines that its unchanged replays executed or waited at."""

    def __init__(self, recording: Recording, checks: Checks = USUAL) -> None:
        self.recording = recording
        self.checks = checks
        self.executed: Counter[int] = Counter()
        self.blocked: Counter[int] = Counter()
        self.warnings: set[str] = set()
        instructions = 0
        for schedule, seed in SCHEDULES:
            report, memory = recording.replay(Options(schedule=schedule, seed=seed, checks=checks))
            assert memory == recording.results, f"the right kernel differs under {schedule} {seed}"
            self.executed.update(report.executed_lines)
            self.blocked.update(report.blocked_lines)
            self.warnings.update(map(_without_count, report.warnings))
            instructions = max(instructions, report.instructions)
        self.limit = RUNAWAY_FACTOR * instructions

    def sites(self) -> Iterator[Site]:
        """The synchronisation instructions that the replays executed; `waited` tells which waits ever blocked."""
        kernel = program_of(self.recording.ptx).kernel(self.recording.kernel)
        seen: set[tuple[int, str]] = set()
        texts = [" ".join(instruction.text.split()) for instruction in kernel.instructions]
        counts, found = Counter(texts), Counter[str]()
        for instruction, text in zip(kernel.instructions, texts, strict=True):
            found[text] += 1
            key = (instruction.line, instruction.opcode)
            if key in seen or not self.executed[instruction.line]:
                continue
            seen.add(key)
            for name, pattern in CLASSES.items():
                if re.match(pattern, instruction.opcode):
                    place = f"{found[text]} of {counts[text]}"
                    yield Site(name, instruction.line, instruction.opcode, text, place)
                    break

    def waited(self, site: Site) -> bool:
        return site.class_name != "mbarrier wait" or bool(self.blocked[site.line])

    def run(self, site: Site) -> Outcome:
        return self.run_without([site])

    def run_without(self, sites: list[Site]) -> Outcome:
        """The outcome of all these deletions together; its site is the first of them."""
        site = sites[0]
        ptx = Program.from_ptx(without(self.recording.ptx, *sites))
        for schedule, seed in SCHEDULES:
            options = Options(schedule=schedule, seed=seed, checks=self.checks, max_instructions=self.limit)
            try:
                report, memory = self.recording.replay(options, ptx)
            except EmulationError as error:
                kind = error.kind.name
                return Outcome(site, kind, f"{schedule} {seed}", str(error).splitlines()[0])
            except UnknownInstruction as error:
                raise AssertionError(f"the mutant of line {site.line} is not PTX") from error
            if memory != self.recording.results:
                return Outcome(site, "wrong result", f"{schedule} {seed}")
            new = set(map(_without_count, report.warnings)) - self.warnings
            if new:
                return Outcome(site, "new warning", f"{schedule} {seed}", min(new))
        return Outcome(site)


def run(
    case: str,
    recording: Recording,
    only: tuple[str, ...] = (),
    sample: int | None = None,
    checks: Checks = USUAL,
) -> Result:
    """The mutation test of a recorded launch. sample: at most this many mutants a class, chosen by a fixed seed."""
    start = time.process_time()
    test, result = MutationTest(recording, checks), Result(case, checks)
    by_class: dict[str, list[Site]] = {}
    for site in test.sites():
        if only and site.class_name not in only:
            continue
        if not test.waited(site):
            result.never_waited += 1
            continue
        by_class.setdefault(site.class_name, []).append(site)
    for name, sites in by_class.items():
        result.possible[name] = len(sites)
        if sample is not None and len(sites) > sample:
            sites = random.Random(0).sample(sites, sample)
        for site in sites:
            outcome = test.run(site)
            result.outcomes.append(outcome)
            how = outcome.caught_by or "NOT CAUGHT"
            print(f"{name} line {site.line}: {how}", file=sys.stderr, flush=True)
    if result.missed():
        result.together = test.run_without([outcome.site for outcome in result.missed()])
    result.cpu_seconds = time.process_time() - start
    return result


def summary(result: Result, reasons: dict[str, str]) -> dict[str, Any]:
    """The entry of results/mutation.json. Its classes hold [caught, redundant, mutants, possible mutants]."""
    strict = result.checks == Checks.strict()
    named = [f for f in fields(Checks) if getattr(result.checks, f.name) != f.default]
    return {
        "checks": "strict" if strict else ",".join(f.name for f in named),
        "waits that never waited": result.never_waited,
        "classes": {name: [*counts, result.possible[name]] for name, counts in result.by_class(reasons).items()},
        "caught by": dict(Counter(outcome.caught_by for outcome in result.outcomes if outcome.caught_by)),
        "not caught": [[outcome.site.class_name, outcome.site.text] for outcome in result.missed()],
        "all of them deleted at once": result.together.caught_by or "not caught" if result.together else None,
    }


def unexplained(result: Result, reasons: dict[str, str]) -> list[Site]:
    """The deletions that were neither caught nor given a reason."""
    return [outcome.site for outcome in result.missed() if reason_of(outcome.site, reasons) == NOT_ANALYSED]


def reasons_for(case: str) -> dict[str, str]:
    """PTX text, or "PTX text #n of m" -> why the deletion of this instruction is not caught."""
    return summaries.read("mutation_reasons").get(case, {})


def reason_of(site: Site, reasons: dict[str, str]) -> str:
    """The reason for this instruction among those of its text, else for its text, else NOT_ANALYSED."""
    return reasons.get(f"{site.text} #{site.place}") or reasons.get(site.text, NOT_ANALYSED)


def redundant_of(text: str, count: int, reasons: dict[str, str]) -> int:
    """How many of `count` uncaught deletions of this text have a reason that calls them redundant.

    A reason for the text without a place covers all of them; else every deletion needs a reason for its place.
    """
    if text in reasons:
        return count * reasons[text].startswith(REDUNDANT)
    by_place = [reason for key, reason in reasons.items() if key.startswith(f"{text} #")]
    assert len(by_place) == count, f"{count} deletions of {text!r} are not caught, {len(by_place)} have reasons"
    return sum(reason.startswith(REDUNDANT) for reason in by_place)


def readable(result: Result, reasons: dict[str, str]) -> str:
    """The full record as Markdown."""
    lines = [
        f"# Mutation test: {result.case}",
        "",
        "| class | mutants | caught | redundant | rate | possible |",
        "|---|---|---|---|---|---|",
    ]
    for name, (caught, redundant, total) in result.by_class(reasons).items():
        percent = f"{100 * rate(caught, redundant, total):.0f} %" if total > redundant else "-"
        cells = (name, total, caught, redundant, percent, result.possible[name])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    document = summary(result, reasons)
    lines += [
        "",
        f"The rate leaves out redundant instructions. Checks in addition to the usual: {document['checks'] or 'none'}.",
        f"{result.never_waited} waits never had to wait and are no mutants.",
        f"Caught by: {document['caught by']}. {result.cpu_seconds:.1f} s of CPU.",
        "",
        *(["Not caught:", ""] if result.missed() else ["All are caught."]),
    ]
    for outcome in result.missed():
        site = outcome.site
        where = f"line {site.line}, {site.place}"
        lines.append(f"- {where} ({site.class_name}): `{site.text}` — {reason_of(site, reasons)}")
    if result.missed():
        lines += ["", f"All of them deleted at once: {document['all of them deleted at once']}."]
    return "\n".join(lines) + "\n"


def checks_named(text: str) -> Checks:
    """The checks for `strict`, or for comma-separated kinds that are errors in addition to the usual ones."""
    return Checks.strict() if text == "strict" else Checks(**{kind: "error" for kind in text.split(",") if kind})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--case", default="", help="the case's name; default: the file's")
    parser.add_argument("--write", action="store_true", help="replace the case's entry in results/mutation.json")
    parser.add_argument("--only", default="", help="classes, separated by commas")
    parser.add_argument("--sample", type=int, help="at most this many mutants a class")
    parser.add_argument("--checks", default="", help="strict, or kinds that are errors in addition to the usual ones")
    options = parser.parse_args()
    case = options.case or options.recording.stem
    only = tuple(options.only.split(",")) if options.only else ()
    checks = checks_named(options.checks)
    result = run(case, Recording.load(options.recording), only, options.sample, checks)
    reasons = reasons_for(case)
    print(readable(result, reasons))
    if options.write:
        summaries.update("mutation", {case: summary(result, reasons)})


if __name__ == "__main__":
    main()
