"""The table of environment switches: one parser, one place, and every switch has a reader."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dsv4_kernels.host import environment
from sglang_dsv4 import env

ROOT = Path(__file__).resolve().parents[2]
TABLES = {"sglang_dsv4/env.py", "kernels/host/environment.py"}
# These pass the environment to a process, hash it as part of a key, or read the user's cache folder from it; tiled.py
# sets a limit of oneDNN before torch is imported.
WHOLE_ENVIRONMENT = {
    "kernels/host/compile_cache.py",
    "kernels/host/compile_pool.py",
    "kernels/linear/tiled.py",
    "sglang_dsv4/kernel_check/children.py",
}


def sources() -> list[Path]:
    return [
        path for folder in ("sglang_dsv4", "kernels", "radix_cache") for path in sorted((ROOT / folder).rglob("*.py"))
    ]


@pytest.fixture(params=["SGLANG_DSV4_JOINT_LAUNCH"])
def switch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv(request.param, raising=False)
    return request.param


@pytest.mark.parametrize(("said", "read"), [("on", "on"), (" OFF ", "off"), ("", None), ("  ", None)])
def test_a_word_is_read(said: str, read: str | None, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.choice(switch) is None
    monkeypatch.setenv(switch, said)
    assert env.choice(switch) == read


def test_another_word_is_refused_by_name(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, "Yes")
    with pytest.raises(ValueError, match=f"^{switch} must be 'on' or 'off', got 'Yes'$"):
        env.choice(switch)


@pytest.mark.parametrize(("said", "read"), [("0", 0), (" 12 ", 12), ("", None)])
def test_a_number_is_read(said: str, read: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSV4_TAIL_SLOTS", said)
    assert env.number("SGLANG_DSV4_TAIL_SLOTS") == read


@pytest.mark.parametrize("said", ["-1", "many", "1.5"])
def test_no_number_is_refused_by_name(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSV4_TAIL_SLOTS", said)
    with pytest.raises(ValueError, match=f"SGLANG_DSV4_TAIL_SLOTS must be a number of at least 0, got '{said}'"):
        env.number("SGLANG_DSV4_TAIL_SLOTS")


def test_what_is_not_in_the_table_is_not_read() -> None:
    with pytest.raises(KeyError):
        env.text("SGLANG_DSV4_UNKNOWN")


def test_a_default_is_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    env.set_default("TORCHDYNAMO_DISABLE", "1")
    assert env.text("TORCHDYNAMO_DISABLE") == "0"


def test_the_environment_is_read_in_the_tables_only() -> None:
    reads = {
        str(path.relative_to(ROOT))
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and ast.unparse(node.value) == "os"
    }
    assert reads <= TABLES | WHOLE_ENVIRONMENT


def test_every_switch_has_a_reader() -> None:
    """A module other than the tables names each switch."""
    text = "\n".join(path.read_text() for path in sources() if str(path.relative_to(ROOT)) not in TABLES)
    for switch in env.SWITCHES:
        assert f'"{switch.name}"' in text, switch.name
    constants = {value.name: name for name, value in vars(environment).items() if isinstance(value, environment.Switch)}
    for switch in environment.SWITCHES:
        assert re.search(rf"\b{constants[switch.name]}\.(choice|text|number)\(", text), switch.name


def test_the_tables_are_markdown() -> None:
    lines = env.markdown().splitlines()
    for switch in (*env.switches(), *env.FOREIGN):
        (row,) = [line for line in lines if line.startswith(f"| `{switch.name}` ")]
        assert len(re.findall(r"(?<!\\)\|", row)) == 5 and switch.default in row and switch.meaning in row
        assert switch.values or switch.form
