"""Build the files of a release from the committed tree, check them, install them into empty environments.

    make dist                       dist/: sdist, wheel, and a list of what each extra brings (SBOM)
    make dist PYTHONS="/path/to/python3.12 …"     and these interpreters beside those that are found

1. `git archive` of HEAD into an empty folder; the sdist from it, the wheel from the sdist. Changes that are not
   committed are refused, since they would not be in the files.
2. Metadata of both as a package index checks it; every module of the checkout is in the wheel, and nothing else.
3. In an empty environment of each interpreter, without an index: installed, imported, `pip check`; an interpreter that
   `requires-python` excludes must refuse it.

Times in the files are those of the commit, so a second build gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from release import sbom

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = {"sglang_dsv4": "sglang_dsv4", "dsv4_kernels": "kernels", "dsv4_radix_cache": "radix_cache"}
"""Import name -> folder of the checkout."""
INTERPRETERS = tuple(f"python3.{minor}" for minor in range(10, 16))
NOT_IN_SDIST = ("tests", "benchmarks")
BUILD_SDIST = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
# Standard library only: an empty environment has no PyTorch.
IMPORTED = ("sglang_dsv4", "sglang_dsv4.env", "sglang_dsv4.cpu.shims", "dsv4_kernels.host.environment")
LOOK = """
import importlib, importlib.metadata, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
found = importlib.metadata.distribution("sglang-dsv4")
print(found.version, sorted(point.name for point in found.entry_points))
"""
ENTRY_POINTS = ["sglang_dsv4", "sglang_dsv4_cpu"]


class NotReleasable(Exception):
    """The files can't be released; the message says what was expected, what came, and what to do."""


def require(condition: bool, message: str) -> None:
    """Raise `NotReleasable` unless a condition holds."""
    if not condition:
        raise NotReleasable(message)


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] = os.environ) -> str:
    """The output of a command.

    Raises:
        NotReleasable: its exit status is not 0.
    """
    done = subprocess.run([*map(str, command)], cwd=cwd, env=dict(env), capture_output=True, text=True)
    require(done.returncode == 0, f"{' '.join(map(str, command))[:200]} failed:\n{done.stdout}{done.stderr}"[-3000:])
    return done.stdout


def project(root: Path) -> dict:
    """The table `project` of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def require_clean(root: Path) -> str:
    """The commit of a checkout without changes.

    Raises:
        NotReleasable: it has changes, which the commit's files would lack.
    """
    changed = run("git", "status", "--porcelain", cwd=root)
    require(not changed, f"expected a checkout without changes, got\n{changed}Commit or stash them, then run again.")
    return run("git", "rev-parse", "HEAD", cwd=root).strip()


def require_changelog(changelog: str, version: str) -> None:
    """Check that the version has its section, and that a section is open for the next one.

    Raises:
        NotReleasable: the version is not a development version and the changelog has no dated section of it, or there
            is no section "Unreleased".
    """
    require("\n## Unreleased\n" in changelog, "CHANGELOG.md: expected a section '## Unreleased', got none; add it")
    if Version(version).is_devrelease:
        return
    found = re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.M)
    require(
        found is not None,
        f"CHANGELOG.md: expected a section '## {version} (YYYY-MM-DD)', got none; see CONTRIBUTING, 'Release'",
    )


def build(root: Path, commit: str, out: Path) -> tuple[Path, Path]:
    """The sdist of a commit, and the wheel that the sdist gives, in an empty folder.

    Raises:
        NotReleasable: a step of the build failed.
    """
    stamp = run("git", "show", "--no-patch", "--format=%ct", commit, cwd=root).strip()
    env = {**os.environ, "SOURCE_DATE_EPOCH": stamp}
    with tempfile.TemporaryDirectory(prefix="dsv4-dist-") as scratch:
        archive, source, unpacked = (Path(scratch) / name for name in ("source.tar", "source", "unpacked"))
        run("git", "archive", "--output", archive, commit, cwd=root)
        for folder, packed in ((source, archive), (unpacked, None)):
            folder.mkdir()
            if packed is None:
                name = run(sys.executable, "-c", BUILD_SDIST, out, cwd=source, env=env).split()[-1]
                packed = out / name
            with tarfile.open(packed) as tar:
                tar.extractall(folder, filter="data")
        (tree,) = unpacked.iterdir()
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out]
        run(*pip, ".", cwd=tree, env=env)
    (wheel,) = out.glob("*.whl")
    return packed, wheel


def source_modules(root: Path) -> set[str]:
    """Dotted import names of every module of the packages in a checkout."""
    names = set()
    for package, folder in FOLDERS.items():
        for path in (root / folder).rglob("*.py"):
            parts = [package, *path.relative_to(root / folder).with_suffix("").parts]
            names.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def check_wheel(names: Iterable[str], modules: set[str]) -> None:
    """Check the names of a wheel's files.

    Raises:
        NotReleasable: a module is missing, or a file is no module of ours: a test, a result, a benchmark.
    """
    files = {name for name in names if ".dist-info/" not in name}
    packed = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files}
    missing, strange = sorted(modules - packed), sorted(packed - modules)
    hint = "`packages` in pyproject.toml lists every folder"
    require(not missing, f"the wheel lacks {', '.join(missing)}: {hint}")
    require(not strange, f"the wheel has files that don't belong: {', '.join(strange)}: {hint}")


def check_sdist(names: Iterable[str]) -> None:
    """Check the names of an sdist's files, without the folder that holds all of them.

    Raises:
        NotReleasable: a file of NOT_IN_SDIST is in it, or one that a build or a reader needs is not.
    """
    files = {name.split("/", 1)[1] for name in names if "/" in name}
    strange = sorted(name for name in files if name.startswith(tuple(f"{folder}/" for folder in NOT_IN_SDIST)))
    require(
        not strange, f"the sdist has files that don't belong: {', '.join(strange[:5])}; MANIFEST.in leaves them out"
    )
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"}
    require(needed <= files, f"the sdist lacks {', '.join(sorted(needed - files))}; MANIFEST.in adds them")


def check_metadata(text: str, about: dict) -> None:
    """Check a file METADATA or PKG-INFO by the rules of a package index, and against pyproject.toml.

    Raises:
        NotReleasable: a field is invalid, or another than in pyproject.toml.
    """
    try:
        found = Metadata.from_email(text, validate=True)
    except ExceptionGroup as errors:
        raise NotReleasable("; ".join(str(error) for error in errors.exceptions)) from errors
    readme = f"expected README.md as description, in Markdown, got {found.description_content_type!r}"
    require(bool(found.description) and (found.description_content_type or "").startswith("text/markdown"), readme)
    wanted = {
        "name": about["name"],
        "version": Version(about["version"]),
        "requires_python": SpecifierSet(about["requires-python"]),
        "license_expression": about["license"],
        "provides_extra": sorted(about["optional-dependencies"]),
    }
    got = {name: getattr(found, name) for name in wanted}
    got["provides_extra"] = sorted(got["provides_extra"] or [])
    for name, value in wanted.items():
        require(got[name] == value, f"{name}: expected {value}, as in pyproject.toml, got {got[name]}")


def interpreters(named: Iterable[str]) -> dict[str, Path]:
    """Version ("3.12") -> interpreter, of those that are named, on PATH, or pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*named, sys.executable, *INTERPRETERS, *sorted(map(str, pyenv.glob("*/bin/python")))]
    found: dict[str, Path] = {}
    for candidate in filter(None, map(shutil.which, candidates)):
        code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        version = done.stdout.strip()
        if done.returncode == 0 and f"python{version}" in INTERPRETERS:
            found.setdefault(version, Path(candidate))
    return dict(sorted(found.items(), key=lambda item: Version(item[0])))


def install(interpreter: Path, wheel: Path, folder: Path, allowed: bool) -> str:
    """Install a wheel into an empty environment of an interpreter, and use it; one line of what was seen.

    Raises:
        NotReleasable: it was refused or does not work; or, where it is not allowed, it was installed.
    """
    run(interpreter, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    command = [*pip, "install", "--quiet", "--no-index", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if not allowed:
        refused = done.returncode != 0 and "requires a different Python" in done.stderr
        require(
            refused, f"{interpreter}: expected pip to refuse the wheel by requires-python, got {done.stderr[-500:]}"
        )
        return "refused, as requires-python says"
    require(done.returncode == 0, f"{interpreter}: pip did not install the wheel: {done.stderr[-2000:]}")
    run(*pip, "check", cwd=folder)
    said = run(python, "-W", "error", "-c", LOOK, *IMPORTED, cwd=folder).strip()
    version, points = said.split(" ", 1)
    require(points == str(ENTRY_POINTS), f"{interpreter}: expected the entry points {ENTRY_POINTS}, got {points}")
    site = next((folder / "lib").glob("python*/site-packages"))
    run(python, "-W", "error", "-m", "compileall", "-q", *(site / package for package in FOLDERS), cwd=folder)
    return f"installed {version}, imported, compiled"


def write_sbom(root: Path, commit: str, wheel: Path, out: Path) -> Path:
    """Write the SBOM beside the wheel; its path."""
    stamp = run("git", "show", "--no-patch", "--format=%cI", commit, cwd=root).strip()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    path = out / f"{wheel.name.split('-py3')[0]}.cdx.json"
    path.write_text(json.dumps(sbom.document(project(root), stamp, wheel.name, digest), indent=1) + "\n")
    return path


def make(root: Path, out: Path, named: Iterable[str] = ()) -> list[str]:
    """Build into an empty folder and check; the lines of a report.

    Raises:
        NotReleasable: a check failed.
    """
    commit, about = require_clean(root), project(root)
    require_changelog((root / "CHANGELOG.md").read_text(), about["version"])
    sdist, wheel = build(root, commit, out)
    with tarfile.open(sdist) as tar, zipfile.ZipFile(wheel) as archive:
        check_sdist(member.name for member in tar if member.isfile())
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        check_metadata(archive.read(metadata).decode(), about)
        (information,) = [member for member in tar if re.fullmatch(r"[^/]+/PKG-INFO", member.name)]
        check_metadata(tar.extractfile(information).read().decode(), about)
        check_wheel(archive.namelist(), source_modules(root) - {"dsv4_kernels", "dsv4_radix_cache"})
    allowed = SpecifierSet(about["requires-python"])
    lines = [f"{about['name']} {about['version']} of commit {commit[:12]}, metadata checked"]
    with tempfile.TemporaryDirectory(prefix="dsv4-dist-") as scratch:
        for version, interpreter in interpreters(named).items():
            folder = Path(scratch) / version
            lines.append(f"Python {version}: {install(interpreter, wheel, folder, allowed.contains(version + '.99'))}")
    files = (sdist, wheel, write_sbom(root, commit, wheel, out))
    return lines + [f"{path.stat().st_size:>9,} {path}" for path in files]


def main() -> int:
    """Build into dist/; 1 if the files can't be released."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="replaced")
    parser.add_argument("pythons", nargs="*", help="interpreters beside those on PATH")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    try:
        print("\n".join(make(ROOT, arguments.out.resolve(), arguments.pythons)))
    except NotReleasable as error:
        print(f"make dist: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
