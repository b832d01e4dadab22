"""The committed summaries of campaigns in tests/emulator/results: JSON with one entry a line, so that a diff can be
read."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "results"


def read(name: str) -> Any:
    """The document RESULTS/name.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def write(name: str, document: dict[str, Any] | list[Any]) -> None:
    """Writes RESULTS/name.json, with one line for each entry of the document."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text_of(document))


def text_of(document: dict[str, Any] | list[Any]) -> str:
    """The document as JSON with one line for each entry of its top level."""
    if isinstance(document, dict):
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"
    return "[\n" + ",\n".join(map(json.dumps, document)) + "\n]\n"


def update(name: str, entries: dict[str, Any]) -> None:
    """Replaces these entries of the dict in RESULTS/name.json, and keeps the others; keys are sorted."""
    known = read(name) if (RESULTS / f"{name}.json").exists() else {}
    write(name, dict(sorted((known | entries).items())))
