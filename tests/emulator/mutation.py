"""Mutation test: is a wrong kernel noticed?

A launch of a right kernel is recorded once. Then each synchronisation instruction that the launch
executed is deleted, one at a time, and the launch is replayed under seven schedules. A mutant is
caught when the emulator raises an error, when the memory that it leaves differs, or when it warns
of something new.

    python mutation.py RECORDING.npz [--case NAME] [--write] [--only CLASSES] [--sample N]
        [--checks strict|KIND,KIND]

A wait that never had to wait under any of the seven schedules is not a mutant: its deletion changes
nothing that these runs could show. What is not caught is listed with its reason, which a person
wrote into results/mutation_reasons.json: {case: {PTX text, or "PTX text @ line": why}}. A reason
begins with "redundant" or with "blind spot"; the rate of a class leaves the redundant ones out.

At the end all that is not caught is deleted at once. If that is not caught either, none of it stands in
for another: what each would order, instructions that are caught order too.
"""

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from device import Recording, program_of
from emulator import Checks, EmulationError, Options, Program, UnknownInstruction

RESULTS = Path(__file__).resolve().parent / "results"

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

# A mutant may loop for ever; a right launch needs far less than this many times its own length.
RUNAWAY_FACTOR = 30
NOT_ANALYSED = "not analysed"
REDUNDANT = "redundant"
USUAL = Checks()


@dataclass(frozen=True)
class Site:
    """One instruction that a mutant lacks."""

    class_name: str
    line: int
    opcode: str
    text: str


@dataclass
class Outcome:
    site: Site
    caught_by: str = ""  # the kind of the error, "wrong result", or "" for not caught
    schedule: str = ""
    message: str = ""


@dataclass
class Result:
    case: str
    checks: Checks
    outcomes: list[Outcome] = field(default_factory=list)
    possible: dict[str, int] = field(default_factory=dict)  # class -> mutants before sampling
    never_waited: int = 0
    together: Outcome | None = None  # all that is not caught, deleted at once
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
    """Of what could be caught."""
    return caught / (total - redundant) if total > redundant else 1.0


def without(ptx: str, *sites: Site) -> str:
    """The PTX without some instructions; lines keep their numbers. A deleted wait succeeds."""
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
    """One recorded launch and what its unchanged replays executed."""

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
        """Synchronisation instructions that ran; of the waits, those that ever waited."""
        kernel = program_of(self.recording.ptx).kernel(self.recording.kernel)
        seen: set[tuple[int, str]] = set()
        for instruction in kernel.instructions:
            key = (instruction.line, instruction.opcode)
            if key in seen or not self.executed[instruction.line]:
                continue
            seen.add(key)
            for name, pattern in CLASSES.items():
                if re.match(pattern, instruction.opcode):
                    text = " ".join(instruction.text.split())
                    yield Site(name, instruction.line, instruction.opcode, text)
                    break

    def waited(self, site: Site) -> bool:
        return site.class_name != "mbarrier wait" or bool(self.blocked[site.line])

    def run(self, site: Site) -> Outcome:
        return self.run_without([site])

    def run_without(self, sites: list[Site]) -> Outcome:
        """Of all these deletions together; the outcome is called the first one's."""
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
    """sample: at most so many mutants of a class, chosen by a fixed seed."""
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


def as_json(result: Result, reasons: dict[str, str]) -> dict[str, Any]:
    return {
        "case": result.case,
        "schedules": [f"{schedule} {seed}" for schedule, seed in SCHEDULES],
        "checks": {
            f.name: getattr(result.checks, f.name)
            for f in fields(Checks)
            if getattr(result.checks, f.name) != f.default
        },
        "cpu_seconds": round(result.cpu_seconds, 1),
        "waits that never waited": result.never_waited,
        "classes": {
            name: {"caught": caught, "redundant": redundant, "mutants": total, "possible": result.possible[name]}
            for name, (caught, redundant, total) in result.by_class(reasons).items()
        },
        "caught by": dict(Counter(o.caught_by for o in result.outcomes if o.caught_by)),
        "not caught": [
            {
                "class": outcome.site.class_name,
                "line": outcome.site.line,
                "text": outcome.site.text,
                "reason": reason_of(outcome.site, reasons),
            }
            for outcome in result.missed()
        ],
        "all of them deleted at once": result.together.caught_by or "not caught" if result.together else None,
    }


def reasons_for(case: str) -> dict[str, str]:
    return json.loads((RESULTS / "mutation_reasons.json").read_text()).get(case, {})


def reason_of(site: Site, reasons: dict[str, str]) -> str:
    return reasons.get(f"{site.text} @ {site.line}") or reasons.get(site.text, NOT_ANALYSED)


def readable(document: dict[str, Any]) -> str:
    lines = [
        f"# Mutation test: {document['case']}",
        "",
        "| class | mutants | caught | redundant | rate | possible |",
        "|---|---|---|---|---|---|",
    ]
    for name, counts in document["classes"].items():
        caught, redundant, total = counts["caught"], counts["redundant"], counts["mutants"]
        percent = f"{100 * rate(caught, redundant, total):.0f} %" if total > redundant else "-"
        cells = (name, total, caught, redundant, percent, counts["possible"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    asked = ", ".join(f"{kind} {level}" for kind, level in document["checks"].items())
    lines += [
        "",
        f"The rate leaves out what is redundant. Checks besides the usual ones: {asked or 'none'}.",
        f"{document['waits that never waited']} waits never had to wait and are no mutants.",
        f"Caught by: {document['caught by']}. {document['cpu_seconds']} s of CPU.",
        "",
        "Not caught:" if document["not caught"] else "All are caught.",
        *([""] if document["not caught"] else []),
    ]
    for missed in document["not caught"]:
        lines.append(f"- line {missed['line']} ({missed['class']}): `{missed['text']}` — {missed['reason']}")
    if document["not caught"]:
        lines += ["", f"All of them deleted at once: {document['all of them deleted at once']}."]
    return "\n".join(lines) + "\n"


def checks_named(text: str) -> Checks:
    """`strict`, or comma-separated kinds that are errors here, besides the usual ones."""
    return Checks.strict() if text == "strict" else Checks(**{kind: "error" for kind in text.split(",") if kind})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--case", default="", help="the case's name; default: the file's")
    parser.add_argument("--write", action="store_true", help="to results/mutation_CASE.json and .md")
    parser.add_argument("--only", default="", help="classes, separated by commas")
    parser.add_argument("--sample", type=int, help="at most so many mutants of a class")
    parser.add_argument("--checks", default="", help="strict, or kinds that are errors besides the usual ones")
    options = parser.parse_args()
    case = options.case or options.recording.stem
    only = tuple(options.only.split(",")) if options.only else ()
    checks = checks_named(options.checks)
    result = run(case, Recording.load(options.recording), only, options.sample, checks)
    document = as_json(result, reasons_for(case))
    print(readable(document))
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        base = RESULTS / f"mutation_{case}"
        base.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
        base.with_suffix(".md").write_text(readable(document))


if __name__ == "__main__":
    main()
