"""sglang <- sglang_dsv4 -> {dsv4_kernels, dsv4_radix_cache}: read from the import statements of every module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"sglang_dsv4": "sglang_dsv4", "dsv4_kernels": "kernels", "dsv4_radix_cache": "radix_cache"}
MAY_NOT_IMPORT = {
    "dsv4_kernels": {"sglang", "sglang_dsv4", "dsv4_radix_cache", "transformers"},
    "dsv4_radix_cache": {"sglang", "sglang_dsv4", "dsv4_kernels", "transformers"},
    "sglang_dsv4": {"tests", "benchmarks"},
}
# Modules of ours that run before SGLang can be imported, or at the start of every Python process.
STANDARD_LIBRARY_ONLY = {"cpu/shims.py", "cpu/quickstart.py"}


def modules(package: str) -> list[Path]:
    found = sorted((ROOT / FOLDERS[package]).rglob("*.py"))
    assert found, package
    return found


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Full names of the modules that a file imports; relative imports don't occur."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def heads(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", FOLDERS)
def test_package_imports_only_what_it_may(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in modules(package)
        if (found := heads(imports(path)) & MAY_NOT_IMPORT[package])
    }
    assert not wrong


@pytest.mark.parametrize("name", sorted(STANDARD_LIBRARY_ONLY))
def test_early_modules_need_nothing_but_python(name: str) -> None:
    import sys

    assert heads(imports(ROOT / "sglang_dsv4" / name, top_level_only=True)) <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", ["plugin.py", "compat.py"])
def test_plugin_imports_sglang_only_inside_functions(name: str) -> None:
    """SGLang imports the plugin in every process; a failing import there would be logged and forgotten."""
    assert "sglang" not in heads(imports(ROOT / "sglang_dsv4" / name, top_level_only=True))


def test_sglangs_own_deepseek_v4_code_is_named_in_compat_only() -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in modules("sglang_dsv4")
        if (found := {name for name in imports(path) if name.startswith("sglang.") and "deepseek_v4" in name})
    }
    assert not wrong, f"take these names from sglang_dsv4.compat: {wrong}"
