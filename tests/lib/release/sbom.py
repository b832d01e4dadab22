"""The software bill of materials of a release: what each extra of pyproject.toml brings, by name and version.

A CycloneDX 1.6 document: the package, each extra's requirements, and the requirements of SGLang with the versions that
SGLang's own metadata pins. A requirement that SGLang does not pin has no version: pip chooses it at installation.
"""

from __future__ import annotations

import importlib.metadata
import uuid
from collections.abc import Iterable
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "extra": ""}
"""The environment whose requirements count."""


def pinned(requirement: Requirement) -> str | None:
    """The version that a requirement pins, or None."""
    exact = [one.version for one in requirement.specifier if one.operator == "=="]
    return exact[0] if len(exact) == 1 and "*" not in exact[0] else None


def requirements_of(package: str, version: str) -> list[Requirement]:
    """The requirements of an installed package on Linux.

    Raises:
        ValueError: another version of it is installed, whose requirements may differ.
    """
    installed = importlib.metadata.version(package)
    if installed != version:
        raise ValueError(f"expected {package} {version}, which the extra names, got {installed}: run `make setup`")
    found = map(Requirement, importlib.metadata.requires(package) or [])
    return [one for one in found if one.marker is None or one.marker.evaluate(LINUX)]


def purl(name: str, version: str | None) -> str:
    """The package URL of a package of PyPI."""
    return f"pkg:pypi/{canonicalize_name(name)}" + (f"@{version}" if version else "")


def component(requirement: Requirement) -> dict[str, Any]:
    """A requirement as a component."""
    version = pinned(requirement)
    reference = purl(requirement.name, version)
    found: dict[str, Any] = {"type": "library", "bom-ref": reference, "name": requirement.name, "purl": reference}
    if version:
        found["version"] = version
    elif str(requirement.specifier):
        found["properties"] = [{"name": "required", "value": str(requirement.specifier)}]
    return found


def document(project: dict[str, Any], timestamp: str, wheel: str, sha256: str) -> dict[str, Any]:
    """The CycloneDX document of a wheel.

    Args:
        project: the table `project` of pyproject.toml.
        timestamp: of the commit, ISO 8601.
        wheel: its file name.
        sha256: of the wheel.

    Raises:
        ValueError: an extra's requirement is not pinned, or another version of it is installed.
    """
    own = purl(project["name"], project["version"])
    root = {"type": "library", "bom-ref": own, "name": project["name"], "version": project["version"], "purl": own}
    root |= {
        "licenses": [{"expression": project["license"]}],
        "hashes": [{"alg": "SHA-256", "content": sha256}],
        "properties": [{"name": "file", "value": wheel}],
    }
    components: dict[str, dict[str, Any]] = {}
    depends: dict[str, list[str]] = {own: []}

    def add(requirements: Iterable[Requirement], parent: str, extra: str) -> None:
        for requirement in requirements:
            found = components.setdefault(component(requirement)["bom-ref"], component(requirement))
            note = {"name": "extra", "value": extra}
            if note not in found.setdefault("properties", []):
                found["properties"].append(note)
            depends.setdefault(parent, []).append(found["bom-ref"])

    for extra, texts in project["optional-dependencies"].items():
        direct = [Requirement(text) for text in texts]
        add(direct, own, extra)
        for requirement in direct:
            version = pinned(requirement)
            if version is None:
                raise ValueError(f"extra {extra}: expected 'name==version', got {str(requirement)!r}: pin it")
            add(requirements_of(requirement.name, version), purl(requirement.name, version), extra)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, own + sha256)}",
        "version": 1,
        "metadata": {"timestamp": timestamp, "component": root},
        "components": sorted(components.values(), key=lambda one: one["bom-ref"]),
        "dependencies": [{"ref": ref, "dependsOn": sorted(set(on))} for ref, on in sorted(depends.items())],
    }
