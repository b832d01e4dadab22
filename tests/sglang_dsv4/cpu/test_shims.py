"""The import hook for machines with no GPU, and its messages."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sglang_dsv4.cpu import shims

ROOT = Path(__file__).resolve().parents[3]


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**os.environ, **env}, capture_output=True, text=True
    )


def test_a_program_without_sglang_sees_no_stand_in() -> None:
    done = run_python("import sys, torch, importlib.util as u; print('triton' in sys.modules, u.find_spec('triton'))")
    if done.stdout.strip() != "False None":
        pytest.skip("Triton is installed here: nothing stands in for it")


def test_importing_sglang_brings_the_stand_in_and_torchvision_works() -> None:
    done = run_python(
        "import sglang, triton, triton.language as tl, torchvision, torch._inductor.codecache\n"
        "@triton.jit\ndef kernel(x: tl.constexpr): return x\n"
        "print(triton.cdiv(7, 2), triton.next_power_of_2(5), callable(torchvision.ops.nms))"
    )
    assert done.stdout.strip() == "4 8 True", done.stderr[-2000:]


def test_off_leaves_python_as_it_was() -> None:
    done = run_python("import sys; print([f for f in sys.meta_path if 'CpuImportHook' in repr(f)])", SGLANG_DSV4="off")
    assert done.stdout.strip() == "[]"


def test_off_says_that_the_built_in_needs_a_gpu() -> None:
    """Before, the error was "No module named 'triton'" only."""
    done = run_python("import sglang.srt.server_args", SGLANG_DSV4="off")
    if done.returncode == 0:
        pytest.skip("Triton is installed here: SGLang can be imported without us")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "ModuleNotFoundError: No module named 'triton'. SGLANG_DSV4=off leaves DeepSeek-V4 to SGLang"
    )
    assert "needs a GPU" in last
    other = "import importlib.util as u; print(u.find_spec('triton'), u.find_spec('a_module_that_is_not_there'))"
    assert run_python(other, SGLANG_DSV4="off").stdout.strip() == "None None"


def test_a_missing_entry_point_is_named_where_sglang_is_started() -> None:
    """SGLang reports "No accelerator ... or platform plugin", and does not name this package."""
    look = "import importlib.util as u; u.find_spec('sglang'); u.find_spec('sglang')"  # in less time than an import
    hide = "import importlib.metadata as m; m.entry_points = lambda **_: m.EntryPoints(())\n"
    lines = run_python(hide + look).stderr.splitlines()
    named = [line for line in lines if line.startswith("sglang-dsv4: SGLang will not find this package")]
    assert len(named) == 1 and "pip install -e ." in named[0] and "'sglang_dsv4_cpu'" in named[0]
    assert "sglang-dsv4:" not in run_python(look).stderr


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SGLANG_PLUGINS", "one, two", "SGLANG_PLUGINS is 'one, two'. Add 'sglang_dsv4'"),
        ("SGLANG_PLUGINS", "one, sglang_dsv4", None),
        ("SGLANG_PLATFORM", "other", "SGLANG_PLATFORM is 'other'. Unset it"),
        ("SGLANG_PLATFORM", "sglang_dsv4_cpu", None),
    ],
    ids=["plugins-without-us", "plugins-with-us", "another-platform", "our-platform"],
)
def test_variables_that_keep_sglang_from_loading_us(
    variable: str, value: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shims.why_sglang_does_not_load_us() is None
    monkeypatch.setenv(variable, value)
    obstacle = shims.why_sglang_does_not_load_us()
    assert obstacle is None if said is None else said in (obstacle or "")


def test_the_entry_points_are_those_of_the_package() -> None:
    """The names that `shims` looks for are those that `pyproject.toml` declares."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {group: set(names) for group, names in declared.items()} == {
        group: {name} for group, name in shims.ENTRY_POINTS.items()
    }


def test_shims_install_and_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / shims.PTH_NAME
    monkeypatch.setattr(shims, "pth_path", lambda: path)
    assert shims.main(["install"]) == 0 and path.read_text().startswith("import ")
    assert shims.main(["status"]) == 0 and "shims installed" in capsys.readouterr().out
    assert shims.main(["remove"]) == 0 and not path.exists()
    assert shims.main(["remove"]) == 0  # removing it twice is no error
    assert shims.main(["nonsense"]) == 2


@pytest.mark.parametrize("value", ["on", "1", "True ", ""])
def test_words_for_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSV4", value)
    shims.require_known_switch()
    assert not shims.is_off()
