"""sglang <- sglang_dsv4 -> {dsv4_kernels, dsv4_radix_cache}: read from the import statements of every module."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"sglang_dsv4": "sglang_dsv4", "dsv4_kernels": "kernels", "dsv4_radix_cache": "radix_cache"}
MAY_NOT_IMPORT = {
    "dsv4_kernels": {"sglang", "sglang_dsv4", "dsv4_radix_cache", "transformers"},
    "dsv4_radix_cache": {"sglang", "sglang_dsv4", "dsv4_kernels", "transformers"},
    "sglang_dsv4": {"tests", "benchmarks"},
}
# Our modules that run before SGLang can be imported, or at the start of every Python process. They may import each
# other.
STANDARD_LIBRARY_ONLY = {
    "sglang_dsv4/cpu/noise.py",
    "sglang_dsv4/cpu/shims.py",
    "sglang_dsv4/cpu/quickstart.py",
    "sglang_dsv4/cpu/quickstart_pd.py",
    "sglang_dsv4/env.py",
    "sglang_dsv4/seam/hook_kinds.py",
    "sglang_dsv4/seam/hooks.py",
    *(str(path.relative_to(ROOT)) for path in (ROOT / "sglang_dsv4/seam/rows").glob("*.py")),
    "kernels/host/environment.py",
}


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


def module_name(path: Path) -> str:
    """`sglang_dsv4.seam.hooks` of its file."""
    (package,) = [name for name, folder in FOLDERS.items() if path.is_relative_to(ROOT / folder)]
    parts = path.relative_to(ROOT / FOLDERS[package]).with_suffix("").parts
    return ".".join((package, *parts)).removesuffix(".__init__")


MODULES = {module_name(path): path for package in FOLDERS for path in modules(package)}


def edges(module: str, path: Path, top_level_only: bool = False) -> set[str]:
    """The modules of ours that a module imports: all, or only those that are imported with it.

    All includes imports inside functions and imports for type checkers, since a module depends on types, too.
    """
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else node.module or "")
    return (found & set(MODULES)) - {module}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first again as the last; empty if there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for imported in sorted(graph[name]):
                if found := walk(imported, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Late imports and imports of types included, functions that a table names by a string ("module:attribute") not."""
    found = circle({name: edges(name, path) for name, path in MODULES.items()})
    assert not found, " -> ".join(found)


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set(), "d": {"b"}}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"d", "e"}, "d": set(), "e": {"b"}}) == ["b", "c", "e", "b"]


def test_the_top_of_the_package_has_few_files() -> None:
    """A reader finds the subject's folder, and in it the module."""
    assert len(list((ROOT / "sglang_dsv4").glob("*.py"))) <= 10


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

    early = {module_name(ROOT / other) for other in STANDARD_LIBRARY_ONLY}
    imported = edges(module_name(ROOT / name), ROOT / name, top_level_only=True)
    assert imported <= early
    assert heads(imports(ROOT / name, top_level_only=True)) - set(FOLDERS) <= set(sys.stdlib_module_names)


def test_plugin_imports_sglang_only_inside_functions() -> None:
    """SGLang imports the plugin in every process; a failing import there would be logged and forgotten."""
    todo, seen = ["sglang_dsv4.plugin"], set()
    while todo:
        name = todo.pop()
        seen.add(name)
        assert not heads(imports(MODULES[name], top_level_only=True)) & {"sglang", "torch", "transformers"}, name
        todo += edges(name, MODULES[name], top_level_only=True) - seen
    assert "sglang_dsv4.seam.self_check" in seen


# SGLang's private names: functions that are imported in compat, targets of hooks in hooks and rows, methods and
# attributes of its classes in bases and, of its manager of weight updates, in weight_manager. Two exceptions: names of
# SGLang's stand-in for triton, which shims need before SGLang can be imported, and the attribute by which SGLang asks a
# platform whether it is out of tree.
KNOWS_PRIVATE_NAMES = {
    "seam/compat.py",
    "seam/hooks.py",
    *(f"seam/rows/{path.name}" for path in (ROOT / "sglang_dsv4/seam/rows").glob("*.py")),
    "seam/bases.py",
    "seam/weight_manager.py",
    "cpu/shims.py",
}
ASKED_FOR = {("cpu/platform.py", "_enum")}


def is_private(name: str) -> bool:
    return name.strip("_") != "" and name.startswith("_") and not name.endswith("__")


def private_names(tree: ast.AST) -> set[str]:
    """Private names that a module uses: attributes, definitions, imports, and dotted paths in strings."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("sglang."):
            names.update(node.value.replace(":", ".").split("."))
    return {name for name in names if is_private(name)}


def defined_here(tree: ast.AST) -> set[str]:
    """Private names that a module makes itself: functions, classes, variables, parameters, attributes of `self`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    return names


def names_of_sglang_bases(module: str) -> set[str]:
    """Private names in the source of every SGLang class that a class of this module inherits from."""
    names: set[str] = set()
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, type) and value.__module__ == module:
            for base in value.__mro__:
                if base.__module__.startswith("sglang."):
                    names |= private_names(ast.parse(textwrap.dedent(inspect.getsource(base))))
    return names


def test_sglangs_private_names_are_in_the_seam() -> None:
    """Elsewhere a private name is one that the file itself makes, and none that an SGLang base class uses."""
    wrong: dict[str, list[str]] = {}
    for path in modules("sglang_dsv4"):
        name = str(path.relative_to(ROOT / "sglang_dsv4"))
        if name in KNOWS_PRIVATE_NAMES:
            continue
        tree = ast.parse(path.read_text())
        said = private_names(tree)
        module = ".".join(("sglang_dsv4", *Path(name).with_suffix("").parts)).removesuffix(".__init__")
        foreign = (said - defined_here(tree)) | (said & names_of_sglang_bases(module))
        foreign -= {private for file, private in ASKED_FOR if file == name}
        if foreign:
            wrong[name] = sorted(foreign)
    assert not wrong, "take these from sglang_dsv4.seam.compat, hooks, rows, bases or weight_manager"


def test_private_names_are_seen() -> None:
    """The check above, on a file that would break the rule in each way."""
    said = private_names(
        ast.parse(
            "from sglang.srt.a import _b\n"
            "hook('sglang.srt.a.C._d')\n"
            "class E(F):\n"
            "    def _g(self):\n"
            "        return self.core._h(self.__class__)\n"
        )
    )
    assert said == {"_b", "_d", "_g", "_h"}


def test_page_window_and_ratios_are_said_once() -> None:
    """The constant 256 is in pages.py alone, 128 and 4 in ring.py, the compression ratios in layer_kinds.py."""
    from dsv4_radix_cache import pages, ring
    from sglang_dsv4.model_config import layer_kinds

    assert (pages.PAGE_TOKENS, ring.WINDOW_TOKENS, ring.OVERLAP_TOKENS) == (256, 128, 4)
    assert [kind.ratio for kind in layer_kinds.LayerKind] == [0, 4, 128]
    named = {"PAGE_TOKENS", "FULL_PAGE_TOKENS", "WINDOW_TOKENS", "OVERLAP_TOKENS", "CSA_RATIO", "HCA_RATIO"}
    numbers = {
        (str(path.relative_to(ROOT)), target.id)
        for package in ("sglang_dsv4", "dsv4_radix_cache")
        for path in modules(package)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in named
    }
    in_ring = {("radix_cache/ring.py", name) for name in ("WINDOW_TOKENS", "OVERLAP_TOKENS")}
    assert numbers == in_ring | {("radix_cache/pages.py", "PAGE_TOKENS")}


def test_no_file_is_longer_than_a_sitting() -> None:
    others = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    long = {
        str(path.relative_to(ROOT)): count
        for path in (*others, *(path for package in FOLDERS for path in modules(package)))
        if (count := len(path.read_text().splitlines())) > 500
    }
    assert not long


def test_no_file_that_git_ignores_is_tracked() -> None:
    """A compiled library of a build folder was committed with a merge, in which `git add` does not warn."""
    listed = subprocess.run(["git", "ls-files", "-ci", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert listed.stdout == ""


def test_sglangs_own_deepseek_v4_code_is_named_in_compat_only() -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in modules("sglang_dsv4")
        if (found := {name for name in imports(path) if name.startswith("sglang.") and "deepseek_v4" in name})
    }
    assert not wrong, f"take these names from sglang_dsv4.seam.compat: {wrong}"


# The floor under the kernels: what every op may use, besides its own folder.
FLOOR = {"device", "host"}
FORMATS = {"kv_layout", "number_formats"}
FOR_EVERY_OP = FLOOR | FORMATS | {"reference", "registry", "model_shapes"}
# Arithmetic in plain PyTorch, which is built of other ops' definitions.
DEFINITIONS = {"ref.py", "tiled.py"}


def rooms(path: Path) -> set[str]:
    """Folders and top modules of dsv4_kernels that a file imports from, late imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dsv4_kernels":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("dsv4_kernels.")}
    return found


def test_ops_do_not_import_each_other() -> None:
    """An op's folder imports the floor, formats and itself; its definition may be built of other ops."""
    wrong: dict[str, list[str]] = {}
    for path in modules("dsv4_kernels"):
        folder, *rest = path.relative_to(ROOT / "kernels").parts
        if rest and folder not in FOR_EVERY_OP and path.name not in DEFINITIONS:
            if foreign := rooms(path) - FOR_EVERY_OP - {folder}:
                wrong[str(path.relative_to(ROOT))] = sorted(foreign)
    assert not wrong, "move what these share to kernels/device, kernels/host or a format"


def test_the_floor_imports_no_op() -> None:
    """device/ and host/ know each other and formats; reference/ and the formats need neither."""
    may_import = {
        **dict.fromkeys(FLOOR, FLOOR | FORMATS),
        "reference": {"reference"},
        "kv_layout.py": FORMATS,
        "number_formats.py": set(),
    }
    wrong: dict[str, list[str]] = {}
    for path in modules("dsv4_kernels"):
        room = path.relative_to(ROOT / "kernels").parts[0]
        if room in may_import and (foreign := rooms(path) - may_import[room]):
            wrong[str(path.relative_to(ROOT))] = sorted(foreign)
    assert not wrong


def test_an_import_of_another_op_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "gpu.py"
    file.write_text(
        "from dsv4_kernels import kv_layout\nfrom dsv4_kernels.device import ptx\nimport dsv4_kernels.rope.gpu\n"
        "def late():\n    from dsv4_kernels.norm.gpu import launch\n"
    )
    assert rooms(file) == {"kv_layout", "device", "rope", "norm"}
