"""The report on another SGLang: small trees whose changes are known, and the digests of the tested version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from upstream import report
from upstream.tree import Tree

OLD = {
    "__init__.py": "",
    "a.py": "from sglang.b import helper, Base\ndef stays(x):\n    '''Old text.'''\n    return x\nLIMIT = 5\n"
    "class Child(Base):\n    def own(self):\n        self.late = 1\n",
    "b.py": "def helper(x, y):\n    z = x + y\n    return z * 2\n"
    "class Base:\n    def inherited(self):\n        return 1\n",
    "star.py": "from sglang.b import *\n",
    "p/__init__.py": "from .c import deep\n",
    "p/c.py": "import sys\nif sys.platform:\n    def deep():\n        return 3\n",
}
NAMES = (
    *("a.stays", "a.LIMIT", "a.helper", "a.Child.inherited", "a.Child.own", "a.Child.late"),
    *("star.helper", "p.deep", "p.c.deep"),
)


def tree(folder: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(folder)


def found(tmp_path: Path, changed: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Compare the tree with these files changed: name -> (kind of change, new name)."""
    old, new = tree(tmp_path / "old", OLD), tree(tmp_path / "new", OLD | changed)
    names = [f"sglang.{name}" for name in NAMES]
    before = {name: report.digest_of(report.find(old, name).node) for name in names}
    changes = report.changes(before, {}, new, old)
    return {change.name.removeprefix("sglang."): (change.what, change.where) for change in changes}


def test_nothing_is_reported_of_the_same_text(tmp_path: Path) -> None:
    """No change is reported if only comments, docstrings, layout or other functions differ."""
    text = OLD["a.py"].replace("Old text.", "New text.").replace("return x", "return (x)  # as before")
    assert found(tmp_path, {"a.py": f"{text}def more():\n    pass\n"}) == {}


@pytest.mark.parametrize(
    ("file", "before", "after", "expected"),
    [
        ("a.py", "return x", "return x + 1", {"a.stays": ("changed", "")}),
        ("a.py", "stays(x)", "stays(x, y=1)", {"a.stays": ("changed", "")}),
        ("a.py", "LIMIT = 5", "", {"a.LIMIT": ("gone", "")}),
        ("a.py", "self.late = 1", "pass", {"a.Child.own": ("changed", ""), "a.Child.late": ("gone", "")}),
        ("b.py", "return 1", "return 2", {"a.Child.inherited": ("changed", "")}),
        ("p/c.py", "return 3", "return 4", {"p.deep": ("changed", ""), "p.c.deep": ("changed", "")}),
        (
            *("b.py", "helper(", "added("),
            {"a.helper": ("renamed", "sglang.b.added"), "star.helper": ("renamed", "sglang.b.added")},
        ),
    ],
)
def test_a_change_is_reported(
    file: str, before: str, after: str, expected: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    assert before in OLD[file]
    assert found(tmp_path, {file: OLD[file].replace(before, after)}) == expected


def test_a_function_in_another_module_has_moved(tmp_path: Path) -> None:
    helper, rest = OLD["b.py"].split("class Base")
    changed = found(tmp_path, {"b.py": f"class Base{rest}", "d.py": helper})
    assert changed == {name: ("moved", "sglang.d.helper") for name in ("a.helper", "star.helper")}


def test_a_folder_without_sglang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a folder that holds sglang/__init__\.py"):
        Tree(tmp_path)


def test_digests_are_those_of_the_tested_version() -> None:
    """`PYTHONPATH=tests/lib python -m upstream.report --write` renews them."""
    installed = report.installed()
    assert installed is not None
    assert json.loads(report.DIGESTS.read_text()) == report.digests(installed)
