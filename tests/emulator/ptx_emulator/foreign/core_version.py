"""A version of the code that decides a launch's result; comments and docstrings do not change it."""

import ast
import functools
import hashlib
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def core_version() -> str:
    """12 hex digits, a hash of the core's C++ and of the Python that decodes for it, without comments and
    docstrings."""
    sources = sorted(file for file in (PACKAGE / "core").iterdir() if file.suffix in (".h", ".cpp"))
    python = [*sorted((PACKAGE / "front_end").glob("*.py")), PACKAGE / "program.py"]
    digest = hashlib.sha256()
    for file in sources:
        digest.update(file.name.encode() + b"\0" + _without_cpp_comments(file.read_text()).encode())
    for file in python:
        digest.update(file.name.encode() + b"\0" + _without_docstrings(file.read_text()).encode())
    return digest.hexdigest()[:12]


def _without_cpp_comments(text: str) -> str:
    """The C++ source with comments removed and white space collapsed; string literals are kept."""
    token = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
    kept = token.sub(lambda match: match[0] if match[0].startswith('"') else " ", text)
    return " ".join(kept.split())


def _without_docstrings(text: str) -> str:
    """The dumped syntax tree without docstrings and other bare strings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not _is_bare_string(statement)]
    return ast.dump(tree)


def _is_bare_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
