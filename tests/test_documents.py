"""The documents: their size, their links, the tables made from results, and the files and functions that they name."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from documents import result_tables

from sglang_dsv4 import env

ROOT = Path(__file__).resolve().parents[1]
MOST_README_BYTES = 9 * 1024
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
QUOTED_PATH = re.compile(
    r"`((?:sglang_dsv4|kernels|radix_cache|benchmarks|tests|docs)/[\w./-]+)(?:: ([\w.]+))?(?: --[^`]*)?`"
)
RESULT = re.compile(r"\b(?:benchmarks/)?results/(\w+\.(?:json|png))|`(\w+\.json)`")
SWITCH = re.compile(r"\b(?:SGLANG_DSV4|DSV4)(?:_[A-Z0-9]+)*\b")
PACKAGES = ("sglang_dsv4", "kernels", "radix_cache")
NO_RESULTS = {"config.json", "tokenizer.json", "b200.json"}  # files of a checkpoint; of a reader's own run
QUESTIONS = 38
# Refused beginnings of docstrings.
OPENINGS = "Of What Which Who Whose Where As That It Its They Their Also And Or Otherwise".split()


@cache
def tracked(pattern: str) -> tuple[Path, ...]:
    """Files of the repository whose names match a glob; what git ignores is not among them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", pattern]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return tuple(ROOT / name for name in names if (ROOT / name).is_file())


DOCUMENTS = tuple(path for path in tracked("*.md") if "emulator" not in path.parts or path.name == "README.md")
LOGS = {path for path in DOCUMENTS if path.parent.name == "log"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """Names that links may use after `#`: GitHub's form of each heading."""
    headings = HEADING.findall(FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    size = len((ROOT / "README.md").read_bytes())
    assert size <= MOST_README_BYTES, (
        f"README.md has {size} bytes: move what is not read in the first five minutes to docs/"
    )


def test_the_readme_leads_to_every_document() -> None:
    """README, CONTRIBUTING or the index of the log links each document."""
    entrances = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "log" / "README.md")
    linked = {
        (page.parent / target.split("#")[0]).resolve()
        for page in entrances
        for target in LINK.findall(page.read_text())
    }
    missing = [name_of(path) for path in tracked("docs/*.md") if path not in linked]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_resolve(path: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", path.read_text())):
        if re.match(r"\w+://", target):
            continue
        file, _, anchor = target.partition("#")
        to = (path.parent / file).resolve() if file else path
        if not to.exists() or (anchor and anchor not in anchors(to)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_files_that_a_document_names_exist(path: Path) -> None:
    """If a document says `file.py: name`, the file also defines the name."""
    missing = []
    for file, name in QUOTED_PATH.findall(path.read_text()):
        if not (ROOT / file).exists():
            missing.append(file)
        elif name and name not in {part for full in defined(ROOT / file) for part in (full, full.split(".")[-1])}:
            missing.append(f"{file}: {name}")
    assert not missing


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if "emulator" not in path.parts], ids=name_of)
def test_result_files_exist(path: Path) -> None:
    named = {first or second for first, second in RESULT.findall(path.read_text())} - NO_RESULTS
    missing = sorted(name for name in named if not (ROOT / "benchmarks" / "results" / name).exists())
    assert not missing


@pytest.mark.parametrize("path", result_tables.documents(), ids=name_of)
def test_tables_are_those_of_the_results(path: Path) -> None:
    text = path.read_text()
    assert result_tables.written(text) == text, "run: python tests/lib/documents/result_tables.py --write"


def test_every_section_of_the_measurements_names_its_file() -> None:
    text = (ROOT / "docs" / "measurements.md").read_text()
    sections = re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]
    missing = [
        section.splitlines()[0] for section in sections if "<!-- table:" in section and not RESULT.search(section)
    ]
    # One file serves two neighbouring sections.
    assert not [name for name in missing if name != "Speculation"]


# -- the index of questions --------------------------------------------------------------------------------------------


def questions() -> list[tuple[str, list[str], list[str]]]:
    """Question, files and names of each row of the index."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Index of questions")[1]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ") and "?" in line]
    return [(row[0].strip(), *(re.findall(r"`([^`]+)`", cell) for cell in row[1:3])) for row in rows]


@cache
def defined(path: Path) -> set[str]:
    """Functions, classes, methods (`Class.method`) and constants of a module."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(ast.parse(path.read_text()).body, "")
    return found


def test_the_index_has_all_questions() -> None:
    assert len(questions()) == QUESTIONS


@pytest.mark.parametrize(("question", "files", "names"), questions(), ids=[question for question, *_ in questions()])
def test_an_answer_names_a_file_and_what_it_defines(question: str, files: list[str], names: list[str]) -> None:
    assert files and names, question
    missing = [file for file in files if not (ROOT / file).is_file()]
    assert not missing, question
    available = set().union(*(defined(ROOT / file) for file in files))
    assert set(names) <= available, f"{question} {files} do not define {sorted(set(names) - available)}"
    unused = [file for file in files if not defined(ROOT / file) & set(names)]
    assert not unused, f"{question} no name of {unused} is given"


def named_in_diagrams() -> list[tuple[str, str]]:
    """(file, function or "") of every Python file in the text diagrams of docs/architecture.md."""
    diagrams = FENCE.findall((ROOT / "docs" / "architecture.md").read_text())
    return sorted(
        {found for diagram in diagrams for found in re.findall(r"(?<![\w/>])(\w[\w/]*\.py)(?:: (\w+))?", diagram)}
    )


@pytest.mark.parametrize(("file", "function"), named_in_diagrams(), ids=[":".join(row) for row in named_in_diagrams()])
def test_diagrams_name_what_exists(file: str, function: str) -> None:
    """Files without a package are in sglang_dsv4/; a function may be a method."""
    path = next((path for path in (ROOT / file, ROOT / "sglang_dsv4" / file) if path.is_file()), None)
    assert path is not None, file
    assert not function or function in {name.split(".")[-1] for name in defined(path)}


# -- options -----------------------------------------------------------------------------------------------------------


def switches(text: str) -> set[str]:
    return set(SWITCH.findall(text)) - {"DSV4"}


def option_rows() -> dict[str, str]:
    """Variable -> its row in docs/options.md."""
    lines = [line for line in (ROOT / "docs" / "options.md").read_text().splitlines() if line.startswith("| `")]
    return {name: line for line in lines for name in re.findall(r"`([A-Z0-9_]+)`", line.split("|")[1])}


def test_every_switch_is_documented_with_its_values() -> None:
    rows, found = option_rows(), [*env.switches(), *env.FOREIGN]
    missing = [switch.name for switch in found if switch.name not in rows]
    synonyms = {"1", "true", "0", "false"}
    missing += [
        f"{switch.name}={value}"
        for switch in found
        for value in set(switch.values) - synonyms
        if f"`{value}`" not in rows.get(switch.name, "")
    ]
    assert not missing


def test_documented_switches_are_those_of_the_sources() -> None:
    """No source of the packages names another variable of ours, and docs/options.md none that is gone."""
    sources = [path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert switches((ROOT / "docs" / "options.md").read_text()) == set().union(*map(switches, sources))


def test_other_documents_name_switches_that_exist() -> None:
    documented = switches((ROOT / "docs" / "options.md").read_text())
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *set(tracked("docs/*.md")) - LOGS):
        of_tests = {"DSV4_TESTS_NEED", "DSV4_WRITE_RESULTS"}
        assert switches(path.read_text()) - of_tests <= documented, name_of(path)


# -- prose -------------------------------------------------------------------------------------------------------------


def docstrings(node: ast.AST) -> Iterator[str]:
    """The docstring of a module, class or function, and those of the attributes that it defines."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(node) or ""
        for before, after in pairwise(node.body):
            value = after.value if isinstance(after, ast.Expr) else None
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Constant):
                yield str(value.value)


def test_docstrings_say_first_what_is_returned() -> None:
    """ "Of the rows that …" leaves the reader to guess what a function returns or does; "It" and "Also" continue a
    sentence that stands nowhere."""
    found = [
        f"{name_of(path)}: {text.strip()[:60]}"
        for path in tracked("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for text in docstrings(node)
        if text.partition(" ")[0] in OPENINGS
    ]
    assert not found, "\n".join(found)


def test_what_hangs_on_the_radix_tree_is_a_tail() -> None:
    """A checkpoint is a model's weights; tails had that name once."""
    wrong = re.compile(r"(tail|prefix|state)s?[- _]checkpoint|checkpoints?[- _](slots?|tails?)\b", re.IGNORECASE)
    found = [
        f"{name_of(path)}: {match[0]}"
        for pattern in ("*.py", "*.md")
        for path in tracked(pattern)
        if path != Path(__file__)
        for match in wrong.finditer(path.read_text())
    ]
    assert not found, "\n".join(found)
