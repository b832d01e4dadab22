"""The installed wheel: its modules, entry points and requirements."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from release.dist import FOLDERS, source_modules

ROOT = Path(__file__).resolve().parents[1]


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
    assert packed == source_modules(ROOT) - {"dsv4_kernels", "dsv4_radix_cache"} | {"sglang_dsv4"}


def test_wheel_has_no_top_level_kernels_module(wheel: Path) -> None:
    """SGLang imports the PyPI package `kernels` inside a try, so no module of ours may have that name."""
    with zipfile.ZipFile(wheel) as archive:
        assert {name.split("/")[0] for name in archive.namelist() if ".dist-info" not in name} == set(FOLDERS)


def test_the_pythons_are_those_of_sglang(wheel: Path) -> None:
    """SGLang needs 3.11 and has wheels for 3.11 to 3.13; `setup_venv.sh` takes the same, and `make dist` tries them."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    allowed = SpecifierSet(re.search(r"^Requires-Python: (.*)$", metadata, re.M)[1])
    minors = [minor for minor in range(8, 20) if allowed.contains(f"3.{minor}.9")]
    assert minors == [11, 12, 13] and Version(importlib.metadata.metadata("sglang")["Requires-Python"][2:]).minor == 11
    classifiers = re.findall(r"^Classifier: Programming Language :: Python :: 3\.(\d+)$", metadata, re.M)
    cases = re.search(r"^(3\.\d+(?: \| 3\.\d+)*)\) ;;$", (ROOT / "setup_venv.sh").read_text(), re.M)[1]
    assert [int(minor) for minor in classifiers] == minors
    assert [int(case.strip()[2:]) for case in cases.split("|")] == minors


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
    names = sorted(source_modules(ROOT))
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


@pytest.mark.parametrize(
    ("pins", "apart"), [("requirements-cpu.txt", {"torch"}), ("benchmarks/gpu_stack/pack.py", set())]
)
def test_pins_are_what_sglang_wants(pins: str, apart: set[str]) -> None:
    """SGLang allows the versions that we install on a CPU, and pack for a GPU host, of what it requires."""
    found = re.findall(r"^ *\*?\(?\"?([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", (ROOT / pins).read_text(), re.M)
    found += re.findall(r"\"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)\"", (ROOT / pins).read_text())
    ours = {canonicalize_name(name): version for name, version in found}
    wanted = [Requirement(text) for text in importlib.metadata.requires("sglang")]
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    checked = {canonicalize_name(one.name): one.specifier for one in wanted} | {"sglang": SpecifierSet("==0.5.23")}
    wrong = {name for name, version in ours.items() if name in checked and version not in checked[name]}
    assert wrong == apart and len(checked.keys() & ours.keys()) > 25 and "transformers" in ours


def test_requirements_install_the_sglang_that_was_tested() -> None:
    from sglang_dsv4.seam.compat import TESTED_SGLANG, sglang_version

    assert f"sglang=={TESTED_SGLANG}\n" in (ROOT / "requirements-cpu.txt").read_text()
    assert sglang_version() == TESTED_SGLANG
