"""The installed wheel: its modules, entry points and requirements."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"sglang_dsv4": "sglang_dsv4", "dsv4_kernels": "kernels", "dsv4_radix_cache": "radix_cache"}


def source_modules() -> set[str]:
    """Return the dotted import names of every module in the checkout."""
    names = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            names.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # Building with the installed setuptools needs no network.
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(out),
        ".",
    ]
    source = tmp_path_factory.mktemp("source")
    files = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, files.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(command, cwd=source, check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site-packages of an environment that holds the wheel and nothing else of ours."""
    target = tmp_path_factory.mktemp("venv")
    venv.create(target, with_pip=False)
    site = next((target / "lib").glob("python*/site-packages"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True)
    return site


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
    packed = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files}
    assert packed == source_modules() - {"dsv4_kernels", "dsv4_radix_cache"} | {"sglang_dsv4"}


def test_wheel_has_no_top_level_kernels_module(wheel: Path) -> None:
    """SGLang imports the PyPI package `kernels` inside a try, so no module of ours may have that name."""
    with zipfile.ZipFile(wheel) as archive:
        assert {name.split("/")[0] for name in archive.namelist() if ".dist-info" not in name} == set(FOLDERS)


def test_a_later_python_may_install_the_wheel(wheel: Path) -> None:
    """A GPU host with Python 3.12 was refused, although only the CPU set-up (setup_venv.sh) needs 3.11."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        assert "Requires-Python: >=3.11\n" in archive.read(name).decode()


@pytest.mark.parametrize("folder", ["kernels", "radix_cache", "tests"])
def test_folder_is_no_package_in_the_checkout(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_wheel_declares_license_entry_points_and_gpu_extra(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        read = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "[sglang.srt.plugins]\nsglang_dsv4 = sglang_dsv4.plugin:setup" in read["entry_points.txt"]
    assert "[sglang.srt.platforms]\nsglang_dsv4_cpu = sglang_dsv4.cpu.platform:activate" in read["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in read["METADATA"]
    assert "TERMS AND CONDITIONS" in read["LICENSE"]
    assert 'Requires-Dist: sglang==0.5.23; extra == "gpu"' in read["METADATA"]
    assert "Requires-Dist: torch" not in read["METADATA"]


def test_every_module_imports_from_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    """The process is fresh and outside the checkout, with the wheel's modules in front of the editable install's."""
    code = (
        "import importlib, sys\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"  # the checkout's finder
        "modules = [importlib.import_module(name) for name in sys.argv[1:]]\n"
        "for module in modules:\n"
        "    origins = [module.__file__] if module.__file__ else list(module.__path__)\n"
        f"    assert all(origin.startswith({str(installed)!r}) for origin in origins), (module, origins)\n"
        "print(len(modules))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(installed), "PYTHONWARNINGS": "ignore"}
    names = sorted(source_modules())
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == str(len(names))


def test_checkout_does_not_shadow_the_kernels_package(tmp_path: Path) -> None:
    """`python -m sglang.launch_server` puts the current folder first on the path; PyPI's `kernels` must still win."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("who = 'PyPI'\n")
    code = "import sys; sys.path.append(sys.argv[1]); import kernels; print(kernels.who)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == "PyPI\n"


def test_ruff_is_pinned_to_one_version() -> None:
    pinned = re.search(r"^ruff==(\S+)$", (ROOT / "requirements-test.txt").read_text(), re.M)
    hook = re.search(r"rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert pinned is not None and hook is not None and pinned[1] == hook[1]


@pytest.mark.parametrize("name", ["requirements-cpu.txt", "requirements-test.txt"])
def test_requirements_are_pinned_and_name_no_index(name: str) -> None:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    assert lines and all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)


def test_requirements_install_the_sglang_that_was_tested() -> None:
    from sglang_dsv4.seam.compat import TESTED_SGLANG, sglang_version

    assert f"sglang=={TESTED_SGLANG}\n" in (ROOT / "requirements-cpu.txt").read_text()
    assert sglang_version() == TESTED_SGLANG
