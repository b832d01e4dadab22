"""Modules of tests/ and benchmarks/ that may import each other: shared code has a folder of its own in both."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, folder
    return found


def imported(path: Path) -> set[str]:
    """Dotted names of the modules, and of the names in them, that a file imports, also inside functions and strings."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def is_of_a_test(name: str) -> bool:
    return any(part.startswith("test_") for part in name.split(".")[:-1])


def test_nothing_is_imported_from_a_test_module() -> None:
    """Code that several test modules use is in tests/lib. (A name that begins with `test_` may itself be imported: a
    test function.)"""
    wrong = {
        str(path.relative_to(ROOT)): found
        for folder in ("tests", "benchmarks")
        for path in files(folder)
        if (found := sorted(name for name in imported(path) if is_of_a_test(name) or name.startswith("tests.")))
    }
    assert not wrong, "move what is shared to tests/lib"


def test_scripts_of_benchmarks_are_imported_by_their_own_tests_only() -> None:
    """Code that several scripts, or tests of other folders, use is in benchmarks/lib."""
    wrong = {
        str(path.relative_to(ROOT)): found
        for folder in ("tests", "benchmarks")
        for path in files(folder)
        if path.parent != ROOT / "tests" / "benchmarks"
        if (found := sorted({name.split(".")[0] for name in imported(path)} & SCRIPTS))
    }
    assert not wrong, "move what is shared to benchmarks/lib"


def test_the_rules_are_seen() -> None:
    assert is_of_a_test("tests.kernels.test_x.case") and is_of_a_test("test_x.case")
    assert not is_of_a_test("serving.chat_tests.test_chat")
    assert {"serve_ab", "bench_linear"} <= SCRIPTS and "lib" not in SCRIPTS
