"""Mutation test: is a wrong kernel noticed?

A launch of a right kernel is recorded once. Then each synchronisation instruction that the launch
executed is deleted, one at a time, and the launch is replayed under seven schedules. A mutant is
caught when the emulator raises an error, when the memory that it leaves differs, or when it warns
of something new.

    python mutation.py RECORDING.npz [--case NAME] [--write] [--only CLASSES] [--sample N]

A wait that never had to wait under any of the seven schedules is not a mutant: its deletion changes
nothing that these runs could show. What is not caught is listed with its reason, which a person
wrote into results/mutation_reasons.json: {case: {PTX text, or "PTX text @ line": why}}.
"""

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from device import Recording, program_of
from emulator import Checks, EmulationError, Options, UnknownInstruction

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
    outcomes: list[Outcome] = field(default_factory=list)
    possible: dict[str, int] = field(default_factory=dict)  # class -> mutants before sampling
    never_waited: int = 0
    cpu_seconds: float = 0.0

    def missed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.caught_by]

    def by_class(self) -> dict[str, tuple[int, int]]:
        """class -> (caught, all)."""
        total = Counter(outcome.site.class_name for outcome in self.outcomes)
        missed = Counter(outcome.site.class_name for outcome in self.missed())
        return {name: (total[name] - missed[name], total[name]) for name in CLASSES if total[name]}


def without(ptx: str, site: Site) -> str:
    """The PTX without one instruction; lines keep their numbers. A deleted wait succeeds."""
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
        ptx = without(self.recording.ptx, site)
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
    test, result = MutationTest(recording, checks), Result(case)
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
    result.cpu_seconds = time.process_time() - start
    return result


def as_json(result: Result, reasons: dict[str, str]) -> dict[str, Any]:
    return {
        "case": result.case,
        "schedules": [f"{schedule} {seed}" for schedule, seed in SCHEDULES],
        "cpu_seconds": round(result.cpu_seconds, 1),
        "waits that never waited": result.never_waited,
        "classes": {
            name: {"caught": caught, "mutants": total, "possible": result.possible[name]}
            for name, (caught, total) in result.by_class().items()
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
    }


def reasons_for(case: str) -> dict[str, str]:
    return json.loads((RESULTS / "mutation_reasons.json").read_text()).get(case, {})


def reason_of(site: Site, reasons: dict[str, str]) -> str:
    return reasons.get(f"{site.text} @ {site.line}") or reasons.get(site.text, NOT_ANALYSED)


def readable(document: dict[str, Any]) -> str:
    lines = [
        f"# Mutation test: {document['case']}",
        "",
        "| class | caught | mutants tried | possible |",
        "|---|---|---|---|",
    ]
    for name, counts in document["classes"].items():
        cells = (name, counts["caught"], counts["mutants"], counts["possible"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        f"{document['waits that never waited']} waits never had to wait and are no mutants.",
    ]
    lines += [
        f"Caught by: {document['caught by']}. {document['cpu_seconds']} s of CPU.",
        "",
        "Not caught:",
        "",
    ]
    for missed in document["not caught"]:
        lines.append(f"- line {missed['line']} ({missed['class']}): `{missed['text']}` — {missed['reason']}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--case", default="", help="the case's name; default: the file's")
    parser.add_argument("--write", action="store_true", help="to results/mutation_CASE.json and .md")
    parser.add_argument("--only", default="", help="classes, separated by commas")
    parser.add_argument("--sample", type=int, help="at most so many mutants of a class")
    parser.add_argument("--tcgen05-fence", action="store_true", help="check these fences, as our own kernels do")
    options = parser.parse_args()
    case = options.case or options.recording.stem
    only = tuple(options.only.split(",")) if options.only else ()
    checks = Checks(tcgen05_fence="error" if options.tcgen05_fence else "off")
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
