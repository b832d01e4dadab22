"""The numbers in the emulator's documents are those of the committed results."""

from collections import Counter
from pathlib import Path

from ptx_emulator.campaigns import summaries
from ptx_emulator.campaigns.mutation import reasons_for, redundant_of

README = (Path(__file__).parent / "README.md").read_text()
WORDS = " ".join(README.split())
MAX_README_BYTES = 12 * 1024


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= MAX_README_BYTES


def test_foreign_programs_in_the_readme() -> None:
    rows = summaries.read("foreign")
    count = Counter(row["status"] for row in rows)
    findings = sum("finding" in row for row in rows)
    assert (count["failed"], count["skipped"]) == (1, 1)
    expected = (
        f"of {len(rows)} programs {count['passed']} complete with right results, {findings} of them with a forgiven"
    )
    assert expected in WORDS


def test_deleted_synchronisation_in_the_readme() -> None:
    mutation = summaries.read("mutation")
    caught, redundant, mutants, _ = map(sum, zip(*mutation["fa4_sparse_mla"]["classes"].values(), strict=True))
    assert f"{caught} of {mutants} caught, {redundant} redundant" in WORDS
    assert f"{mutation['fa4_sparse_mla']['waits that never waited']} waits never had to wait" in WORDS
    exceptions = {
        text
        for case, summary in mutation.items()
        for (_, text), count in Counter(map(tuple, summary["not caught"])).items()
        if redundant_of(text, count, reasons_for(case)) < count
    }
    assert exceptions == {"fence.proxy.async.shared::cta"}
