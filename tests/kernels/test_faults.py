"""faults.toml, the table of kernels and fault classes, against CONTRIBUTING, the table of ops and the named tests."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

from dsv4_kernels.ops import OPS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLE = tomllib.loads((HERE / "faults.toml").read_text())
KERNELS = TABLE["kernel"]
ROW_KEYS = {"ops", "implementations", "tests"}
WITHOUT_A_GPU_KERNEL = {"ref", "tiled", "cublas"}
"""Implementations that are PyTorch, or a library's kernel."""


def classes() -> list[str]:
    """The classes of CONTRIBUTING: the bold words at the beginning of each item of the list of faults."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("## Faults to plant in every GPU kernel")[2].partition("\n## ")[0]
    found = re.findall(r"^- \*\*(.+?)\*\*", section.replace("\n  ", " "), re.MULTILINE)
    assert len(found) == section.count("\n- ") > 10
    return found


def name_of(row: dict) -> str:
    return "-".join([*row["ops"], *row.get("implementations", [])])


@functools.cache
def functions(file: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(file.read_text())
    assert "mark.slow" not in "".join(
        ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def is_quick(function: ast.FunctionDef) -> bool:
    """Whether the whole function is marked neither slow nor gpu; single cases may be."""
    return not {"pytest.mark.slow", "pytest.mark.gpu"} & {ast.unparse(mark) for mark in function.decorator_list}


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> dict[Path, set[str]]:
    """The names of the collected tests of each file, cases included: of all files in a run of the whole suite, without
    slow tests unless they are asked for. Empty if tests are chosen by their names."""
    found: dict[Path, set[str]] = {}
    chosen = request.config.option.keyword or request.config.getoption("shard") is not None
    if not chosen and "::" not in "".join(request.config.args):
        for item in request.session.items:
            found.setdefault(item.path, set()).add(item.name)
    return found


def test_every_kernel_has_a_row() -> None:
    """One row for each implementation of each op, except for implementations that are PyTorch or cuBLAS."""
    wanted = {(op.name, made.name) for op in OPS.values() for made in op.implementations}
    wanted = {(op, made) for op, made in wanted if made not in WITHOUT_A_GPU_KERNEL}
    found = [
        (op, made)
        for row in KERNELS
        for op in row["ops"]
        for made in row.get("implementations") or [made for other, made in wanted if other == op]
    ]
    assert len(found) == len(set(found)) and set(found) == wanted


@pytest.mark.parametrize("row", KERNELS, ids=name_of)
def test_a_row_answers_for_every_class(row: dict, collected: dict[Path, set[str]]) -> None:
    """A list of tests that exist, at least one of them quick, or a reason."""
    assert [key for key in row if key not in ROW_KEYS] == classes()
    for fault in classes():
        answer = row[fault]
        if isinstance(answer, str):
            assert answer.removeprefix("@") in TABLE["reasons"] or (answer[0] != "@" and len(answer) > 20), fault
            continue
        found = []
        for test in answer:
            file, _, name = test.rpartition("::")
            path = HERE / (file or row["tests"])
            name, _, case = name.partition("[")
            assert path.exists() and name in functions(path), f"{fault}: there is no {test}"
            found.append(functions(path)[name])
            if case and path in collected:
                ids = [other.partition("[")[2] for other in collected[path] if other.startswith(f"{name}[")]
                assert any(case.rstrip("]") in made for made in ids), f"{fault}: there is no quick {test}"
        assert any(map(is_quick, found)), f"{fault}: all tests are slow, or need a GPU"


def test_every_reason_is_used() -> None:
    text = (HERE / "faults.toml").read_text()
    assert [name for name in TABLE["reasons"] if f'"@{name}"' not in text] == []
