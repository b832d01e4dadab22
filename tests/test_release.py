"""The files of a release (`make dist`): what is refused, and the list of what the extras bring."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from release import dist, sbom
from release.dist import NotReleasable

ROOT = Path(__file__).resolve().parents[1]
ABOUT = dist.project(ROOT)
METADATA = f"""Metadata-Version: 2.4
Name: sglang-dsv4
Version: {ABOUT["version"]}
License-Expression: Apache-2.0
Requires-Python: <3.14,>=3.11
Provides-Extra: gpu
Description-Content-Type: text/markdown

# sglang-dsv4
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the files that a build reads, and no module."""
    for command in (["init", "--quiet"], ["config", "user.email", "a@b.example"], ["config", "user.name", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "README.md").write_text("# x\n")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "commit", "--quiet", "-m", "x"], cwd=tmp_path, check=True)
    return tmp_path


def test_changes_that_are_not_committed_are_refused(checkout: Path) -> None:
    assert len(dist.require_clean(checkout)) == 40
    (checkout / "new.py").write_text("")
    with pytest.raises(NotReleasable, match=r"expected a checkout without changes, got\n\?\? new.py"):
        dist.require_clean(checkout)


@pytest.mark.parametrize(
    ("changelog", "version", "reason"),
    [
        ("# C\n\n## Unreleased\n\n## 0.1.0 (2026-11-26)\n", "0.1.0", None),
        ("# C\n\n## Unreleased\n", "0.2.0.dev0", None),
        ("# C\n\n## Unreleased\n\n## 0.1.0\n", "0.1.0", "expected a section '## 0.1.0"),
        ("# C\n\n## 0.1.0 (2026-11-26)\n", "0.1.0", "expected a section '## Unreleased'"),
    ],
)
def test_the_changelog_has_the_version(changelog: str, version: str, reason: str | None) -> None:
    if reason is None:
        dist.require_changelog(changelog, version)
        return
    with pytest.raises(NotReleasable, match=reason):
        dist.require_changelog(changelog, version)


def test_this_changelog_has_this_version() -> None:
    dist.require_changelog((ROOT / "CHANGELOG.md").read_text(), ABOUT["version"])


@pytest.mark.parametrize(
    ("added", "removed", "reason"),
    [
        ("tests/test_ci.py", "", "files that don't belong: tests.test_ci"),
        ("benchmarks/results/a.json", "", "files that don't belong"),
        ("", "dsv4_kernels/a.py", "lacks dsv4_kernels.a"),
        ("sglang_dsv4-0.1.0.dist-info/RECORD", "", None),
    ],
)
def test_a_wheel_with_other_files_is_refused(added: str, removed: str, reason: str | None) -> None:
    modules = {"sglang_dsv4", "dsv4_kernels.a"}
    names = {"sglang_dsv4/__init__.py", "dsv4_kernels/a.py", added} - {removed, ""}
    if reason is None:
        dist.check_wheel(names, modules)
        return
    with pytest.raises(NotReleasable, match=reason):
        dist.check_wheel(names, modules)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tests/test_ci.py"}, "files that don't belong: tests/test_ci.py"),
        ({"LICENSE"}, "lacks LICENSE"),
        (set(), None),
    ],
)
def test_an_sdist_with_tests_or_without_its_files_is_refused(change: set[str], reason: str | None) -> None:
    files = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO", "kernels/ops.py"} ^ change
    names = [f"sglang_dsv4-0.1.0/{name}" for name in files]
    if reason is None:
        dist.check_sdist(names)
        return
    with pytest.raises(NotReleasable, match=reason):
        dist.check_sdist(names)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("", "", None),
        ("<3.14,>=3.11", ">=3.11", "requires_python: expected"),
        ("Provides-Extra: gpu\n", "", "provides_extra: expected"),
        ("License-Expression: Apache-2.0", "License-Expression: Apache 2", "license"),
        ("text/markdown", "text/x-rst", "expected README.md as description"),
        (f"Version: {ABOUT['version']}", "Version: 9.0", "version: expected"),
    ],
)
def test_metadata_is_checked_as_an_index_does(old: str, new: str, reason: str | None) -> None:
    text = METADATA.replace(old, new) if old else METADATA
    if reason is None:
        dist.check_metadata(text, ABOUT)
        return
    with pytest.raises(NotReleasable, match=reason):
        dist.check_metadata(text, ABOUT)


def test_an_interpreter_that_does_not_run_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv puts commands for all versions on PATH, which fail unless that version is chosen."""
    broken = tmp_path / "python3.12"
    broken.write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    found = dist.interpreters([sys.executable])
    assert broken not in found.values() and f"3.{sys.version_info.minor}" in found


def test_the_sbom_lists_what_the_extras_bring() -> None:
    made = sbom.document(ABOUT, "2026-11-26T00:00:00+00:00", "a.whl", "00")
    assert made == sbom.document(ABOUT, "2026-11-26T00:00:00+00:00", "a.whl", "00")
    assert (made["bomFormat"], made["specVersion"], made["version"]) == ("CycloneDX", "1.6", 1)
    components = {one["bom-ref"]: one for one in made["components"]}
    assert len(components) == len(made["components"])
    for extra, texts in ABOUT["optional-dependencies"].items():
        for requirement in map(Requirement, texts):
            (spec,) = requirement.specifier
            one = components[f"pkg:pypi/{requirement.name}@{spec.version}"]
            assert (one["name"], one["version"]) == (requirement.name, spec.version)
            assert {"name": "extra", "value": extra} in one["properties"]
    torch = next(text for text in importlib.metadata.requires("sglang") if text.startswith("torch=="))
    assert f"pkg:pypi/{torch.replace('==', '@')}" in components
    references = {made["metadata"]["component"]["bom-ref"], *components}
    edges = {entry["ref"]: entry["dependsOn"] for entry in made["dependencies"]}
    assert references >= set(edges) and set(components) == {ref for on in edges.values() for ref in on}


@pytest.mark.parametrize(
    ("requirement", "reason"), [("sglang>=0.5", "pin it"), ("sglang==0.4.0", "expected sglang 0.4.0")]
)
def test_an_extra_without_a_known_version_is_refused(requirement: str, reason: str) -> None:
    about = ABOUT | {"optional-dependencies": {"gpu": [requirement]}}
    with pytest.raises(ValueError, match=reason):
        sbom.document(about, "2026-11-26T00:00:00+00:00", "a.whl", "00")
