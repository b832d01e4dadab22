"""Report the functions and names of SGLang used here that another version moves, renames, changes or lacks.

    make compat SGLANG=0.5.24                       download that version and compare
    python -m upstream.report FOLDER                compare with the version below FOLDER (which holds sglang/)
    python -m upstream.report --write               renew digests.json from the installed version

The last two commands need PYTHONPATH=tests/lib.

Watched: the targets of `sglang_dsv4/seam/hooks.py`, the names that our modules import from SGLang, and the methods of
SGLang's classes that our classes override. `digests.json` has a digest of each one's text in the tested version, so a
change is noticed with the new version alone; where the tested version is installed, too, the difference is printed.

The exit status is 1 if a name is gone, 0 otherwise.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from upstream.tree import NO_NODE, Found, Tree, digest_of, is_renamed, text_of

from sglang_dsv4.seam import compat, hooks
from sglang_dsv4.seam.hooks import Hook, Kind

ROOT = Path(__file__).resolve().parents[3]
DIGESTS = Path(__file__).with_name("digests.json")
PACKAGES = ("sglang_dsv4", "kernels", "radix_cache")
NOT_NAMES = (Kind.ENTRY_POINT, Kind.ENVIRONMENT)
RESOLUTION_STEPS = "sglang.srt.arg_groups"
"""Package of the functions that run SGLang's resolution steps."""


class Change(NamedTuple):
    """A watched name that differs in the other version."""

    name: str
    users: str  # which of our files, or "a hook"
    what: str  # "changed", "moved", "renamed" or "gone"
    where: str = ""  # the new name
    difference: str = ""


def watched(tree: Tree) -> dict[str, set[str]]:
    """Dotted names of SGLang -> our users, "a hook" or files; overridden methods are found in `tree`."""
    names: dict[str, set[str]] = {}

    def add(name: str, user: str) -> None:
        names.setdefault(name, set()).add(user)

    for hook in all_hooks():
        if hook.kind not in NOT_NAMES and not hook.target.startswith("torch."):
            add(hook.target if "." in hook.target else f"{RESOLUTION_STEPS}:{hook.target}", "a hook")
    for target in compat.SGLANG_NAMES.values():
        add(target.replace(":", "."), "sglang_dsv4/seam/compat.py")
    for path in sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")):
        source, user = ast.parse(path.read_text()), str(path.relative_to(ROOT))
        imports = dict(imports_of_sglang(source))
        for name in imports.values():
            add(name, user)
        for name in overridden(source, imports, tree):
            add(name, user)
    return names


def all_hooks() -> Iterator[Hook]:
    """The rows of every table in `hooks`."""
    for value in vars(hooks).values():
        if isinstance(value, Hook):
            yield value
        elif isinstance(value, tuple) and value and isinstance(value[0], Hook):
            yield from value


def imports_of_sglang(source: ast.Module) -> Iterator[tuple[str, str]]:
    """(name in the module, dotted name of SGLang) for each import, late ones included."""
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang" and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module == "sglang_dsv4.seam.compat":
            for alias in node.names:
                if alias.name in compat.SGLANG_NAMES:
                    yield alias.asname or alias.name, compat.SGLANG_NAMES[alias.name].replace(":", ".")


def overridden(source: ast.Module, imports: dict[str, str], tree: Tree) -> Iterator[str]:
    """Methods of SGLang's classes that the module's classes override."""
    for cls in (node for node in ast.walk(source) if isinstance(node, ast.ClassDef)):
        bases = [imports[name] for base in cls.bases if (name := ast.unparse(base).split("[")[0]) in imports]
        for method in (node.name for node in cls.body if isinstance(node, ast.FunctionDef)):
            if method != "__init__":
                yield from (f"{base}.{method}" for base in bases if tree.find(f"{base}.{method}") is not None)


def find(tree: Tree, name: str) -> Found | None:
    """The definition of a watched name; "package:function" is a function anywhere in a package."""
    package, _, function = name.partition(":")
    if not function:
        return tree.find(name)
    return next((found for found in tree.definitions(package) if found.name == function), None)


def digests(tree: Tree) -> dict[str, str]:
    """Watched name -> digest of its text in the tested version.

    Raises:
        LookupError: a name is not in `tree`.
    """
    found = {name: find(tree, name) for name in sorted(watched(tree))}
    missing = [name for name, definition in found.items() if definition is None]
    if missing:
        raise LookupError(f"not in SGLang {compat.TESTED_SGLANG}: {', '.join(missing)}")
    return {name: digest_of(definition.node) for name, definition in found.items() if definition is not None}


def changes(before: dict[str, str], users: dict[str, set[str]], tree: Tree, old: Tree | None) -> Iterator[Change]:
    """The watched names that are not in `tree` as `before` has them.

    Args:
        before: digests of the tested version.
        users: as `watched` returns them.
        tree: the other version.
        old: the tested version, for differences and for finding a renamed function by its text; or None.
    """
    for name, digest in before.items():
        used_by, found = ", ".join(sorted(users.get(name, ()))), find(tree, name)
        if found is not None and digest_of(found.node) == digest:
            continue
        was = find(old, name) if old is not None else None
        if found is None:
            yield gone(name, used_by, was, tree)
        else:
            difference = "" if was is None or was.node is NO_NODE else unified(was, found)
            yield Change(name, used_by, "changed", difference=difference)


def gone(name: str, used_by: str, was: Found | None, tree: Tree) -> Change:
    """The change of a name that was not found: moved (same name, another module), renamed (same text) or gone."""
    last = re.split("[.:]", name)
    local = was.name if was is not None and was.name else last[-1]
    moved = [found for found in tree.definitions() if found.name == local]
    if moved:
        return Change(name, used_by, "moved", " or ".join(f"{found.module}.{found.name}" for found in moved[:3]))
    if was is not None and isinstance(was.node, ast.FunctionDef | ast.AsyncFunctionDef):
        for found in tree.definitions():
            if is_renamed(found.node, was.node):
                return Change(name, used_by, "renamed", f"{found.module}.{found.name}")
    return Change(name, used_by, "gone")


def unified(was: Found, found: Found) -> str:
    """The difference of two definitions' texts."""
    texts = (
        text_of(definition.node).splitlines() if definition.node is not NO_NODE else [] for definition in (was, found)
    )
    return "\n".join(difflib.unified_diff(*texts, lineterm="", n=1))


def as_text(found: Iterable[Change], with_differences: bool) -> str:
    """The report: names by kind of change, each with our users."""
    found, lines = list(found), []
    for what in ("gone", "renamed", "moved", "changed"):
        rows = [change for change in found if change.what == what]
        lines += [f"{what}: {len(rows)}"]
        for change in rows:
            lines.append(f"  {change.name}{f' -> {change.where}' if change.where else ''}  (used by {change.users})")
            if with_differences and change.difference:
                lines += [f"      {line}" for line in change.difference.splitlines()]
    return "\n".join(lines)


def installed() -> Tree | None:
    """The installed SGLang if it is the tested version."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None or compat.sglang_version() != compat.TESTED_SGLANG:
        return None
    return Tree(Path(spec.origin).parents[1])


def main() -> int:
    """Compare and print, or write the digests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="the other version's folder, which holds sglang/")
    parser.add_argument("--write", action="store_true", help="renew digests.json from the installed version")
    parser.add_argument("--differences", action="store_true", help="print the difference of each changed text")
    arguments = parser.parse_args()
    old = installed()
    if arguments.write:
        if old is None:
            parser.error(f"--write wants SGLang {compat.TESTED_SGLANG} installed, got {compat.sglang_version()}")
        DIGESTS.write_text(json.dumps(digests(old), indent=1) + "\n")
        return 0
    if arguments.folder is None:
        parser.error("give the folder of the other version, or --write")
    tree = Tree(arguments.folder)
    found = list(changes(json.loads(DIGESTS.read_text()), watched(old or tree), tree, old))
    print(as_text(found, arguments.differences))
    return int(any(change.what == "gone" for change in found))


if __name__ == "__main__":
    sys.exit(main())
