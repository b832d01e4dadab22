"""One owner connects the parts of prefix reuse in its constructor: read from the sources of `cache/` and `prefix/`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "sglang_dsv4"
# SGLang's objects: requests and batches carry our state, and a component empties the data of an evicted node.
OF_SGLANG = {
    "prefix/request_state.py",
    "prefix/tail_nodes.py: data.value",
    "prefix/metrics.py: reporter.stats.gen_throughput",
}


def sources(folder: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((FOLDER / folder).rglob("*.py")):
        yield str(path.relative_to(FOLDER)), ast.parse(path.read_text())


def assigned_elsewhere(tree: ast.AST) -> set[str]:
    """Attributes that are assigned (not counted up) on other objects than `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            found.add(ast.unparse(node))
            continue
        else:
            continue
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    owner = ast.unparse(part.value)
                    if owner not in ("self", "cls"):
                        found.add(f"{owner}.{part.attr}")
    return found


@pytest.mark.parametrize("folder", ["cache", "prefix"])
def test_no_attribute_is_assigned_from_outside(folder: str) -> None:
    wrong = {f"{name}: {target}" for name, tree in sources(folder) for target in assigned_elsewhere(tree)}
    assert not {line for line in wrong if line not in OF_SGLANG and line.split(":")[0] not in OF_SGLANG}


def test_an_assignment_from_outside_is_seen() -> None:
    planted = "self.a = 1\nself.count += 1\ntiers.storage = open()\nx, pool.draft.rows = 1, 2\nsetattr(pool, 'a', 1)\n"
    assert assigned_elsewhere(ast.parse(planted)) == {"tiers.storage", "pool.draft.rows", "setattr(pool, 'a', 1)"}


def test_bytes_know_no_requests() -> None:
    """`cache/` imports neither `prefix/` nor the ledger, except in the KV pool; imports for type checks count, too."""
    requests = ("dsv4_radix_cache.ledger", "dsv4_radix_cache.accounting")
    imported = {
        (name, module)
        for name, tree in sources("cache")
        for node in ast.walk(tree)
        for module in modules_of(node)
        if module.startswith("sglang_dsv4.prefix") or module in requests
    }
    assert imported == {("cache/kv_pool.py", "dsv4_radix_cache.ledger")}


def modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
