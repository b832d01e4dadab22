"""Names in a source tree of SGLang, resolved without importing it: another version may need other packages."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
NO_NODE = ast.Pass()
"""Stands for a name that exists but is neither a function nor a class: a constant, a module, an attribute."""


class Found(NamedTuple):
    """The definition of a name."""

    module: str
    name: str  # within the module, as "Class.method"
    node: ast.AST


class Tree:
    """The package `sglang` below a folder.

    Args:
        site: the folder that holds `sglang/`, for example a site-packages or an unpacked wheel.

    Raises:
        FileNotFoundError: no `sglang/__init__.py` there.
    """

    def __init__(self, site: Path) -> None:
        if not (site / "sglang" / "__init__.py").is_file():
            raise FileNotFoundError(f"expected a folder that holds sglang/__init__.py, got {site}")
        self.site = site
        self._bodies: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """The parsed source of a module; None if there is none."""
        if name not in self._bodies:
            path = self.site.joinpath(*name.split("."))
            files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
            self._bodies[name] = ast.parse(files[0].read_text(errors="replace")) if files else None
        return self._bodies[name]

    def find(self, target: str) -> Found | None:
        """The definition of a dotted name such as "sglang.srt.x.Class.method"; None if there is none.

        Follows imports between modules, base classes, and attributes that a class's methods assign to `self`.
        """
        parts = target.split(".")
        for cut in range(len(parts), 0, -1):
            module = ".".join(parts[:cut])
            if self.module(module) is not None:
                return self._within(module, parts[cut:], frozenset())
        return None

    def _within(self, module: str, names: list[str], seen: frozenset[tuple[str, str]]) -> Found | None:
        if not names:
            return Found(module, "", NO_NODE)
        if (module, names[0]) in seen:  # modules that import each other
            return None
        seen |= {(module, names[0])}
        body = self.module(module)
        for node in statements(body):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == names[0]:
                    return Found(module, names[0], node) if len(names) == 1 else None
                case ast.ClassDef() if node.name == names[0]:
                    return self._in_class(module, node, names[1:], seen)
                case ast.Assign() | ast.AnnAssign() if names[0] in assigned(node):
                    return Found(module, names[0], NO_NODE)
                case ast.Import() if names[0] in {alias.asname or alias.name for alias in node.names}:
                    return Found(module, names[0], NO_NODE)
                case ast.ImportFrom() if (alias := imported(node, names[0])) is not None:
                    source = absolute(node, module, self._is_package(module))
                    if self.module(f"{source}.{alias}") is not None:
                        return self._within(f"{source}.{alias}", names[1:], seen)
                    is_all = node.names[0].name == "*"
                    if self.module(source) is None and not is_all:
                        return Found(module, names[0], NO_NODE)  # another package's
                    found = self._within(source, [alias, *names[1:]], seen) if self.module(source) is not None else None
                    if found is not None or not is_all:
                        return found
        return None

    def _in_class(
        self, module: str, cls: ast.ClassDef, names: list[str], seen: frozenset[tuple[str, str]]
    ) -> Found | None:
        if not names:
            return Found(module, cls.name, cls)
        for node in statements(cls):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
                return Found(module, f"{cls.name}.{names[0]}", node)
            if isinstance(node, ast.Assign | ast.AnnAssign) and names[0] in assigned(node):
                return Found(module, f"{cls.name}.{names[0]}", NO_NODE)
        for base in cls.bases:
            parts = ast.unparse(base).split("[")[0].split(".")
            found = self._within(module, [parts[-1]] if len(parts) > 1 else parts, seen)
            if found is not None and isinstance(found.node, ast.ClassDef):
                inherited = self._in_class(found.module, found.node, names, seen)
                if inherited is not None:
                    return inherited
        for node in ast.walk(cls):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == names[0]:
                return Found(module, f"{cls.name}.{names[0]}", NO_NODE)
        return None

    def _is_package(self, module: str) -> bool:
        return self.site.joinpath(*module.split("."), "__init__.py").is_file()

    @functools.cache  # noqa: B019 - a run has two trees
    def definitions(self, package: str = "sglang") -> list[Found]:
        """Every function, class and method of a package."""
        found = []
        for path in sorted(self.site.joinpath(*package.split(".")).rglob("*.py")):
            parts = path.relative_to(self.site).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            body = self.module(module)
            for node in statements(body) if body is not None else ():
                if not isinstance(node, Definition):
                    continue
                found.append(Found(module, node.name, node))
                if isinstance(node, ast.ClassDef):
                    methods = (method for method in statements(node) if isinstance(method, Definition))
                    found += [Found(module, f"{node.name}.{method.name}", method) for method in methods]
        return found


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module or class, also those inside `try`, `with`, and `if` other than `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from statements(child)
        elif isinstance(child, ast.stmt):
            yield child


def assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    """The plain names that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def imported(node: ast.ImportFrom, name: str) -> str | None:
    """The name in the other module that a statement imports as `name`, or may import, by `*`; None if it does not."""
    names = {alias.asname or alias.name: alias.name for alias in node.names}
    return names.get(name, name if "*" in names else None)


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The absolute name of the module that a statement of `module` imports from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def text_of(node: ast.AST) -> str:
    """A definition's text without comments, docstrings and layout; of a class only its own line and attributes, since
    its methods are definitions of their own."""
    copy = ast.parse(ast.unparse(node)).body[0]
    for inner in ast.walk(copy):
        if isinstance(inner, Definition) and ast.get_docstring(inner, clean=False) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    if isinstance(copy, ast.ClassDef):
        copy.body = [line for line in copy.body if not isinstance(line, Definition)] or [ast.Pass()]
    return ast.unparse(copy)


def is_renamed(node: ast.AST, before: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function differs from another one by its name alone."""
    if type(node) is not type(before) or len(node.body) != len(before.body):
        return False
    if ast.dump(node.args) != ast.dump(before.args):
        return False
    return text_of(node).replace(f" {node.name}", " ", 1) == text_of(before).replace(f" {before.name}", " ", 1)


def digest_of(node: ast.AST) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of a definition's text; "" for a name that is no definition."""
    return "" if node is NO_NODE else hashlib.sha256(text_of(node).encode()).hexdigest()[:16]
