"""The state of a training run in files of at most `PART_BYTES`, written so that an interrupted write loses nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

PART_BYTES = 16_500_000
"""Bytes of a file: the training host returns files of at most 16 MiB."""


def save_state(folder: Path, state: dict[str, Any]) -> list[Path]:
    """Write `state` (tensors, numbers, dictionaries) in parts; the list of parts is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    old = {path.name for path in folder.glob("state-*.part")}
    parts = []
    for index, begin in enumerate(range(0, len(data), PART_BYTES)):
        part = folder / f"state-{state['step']:06d}-{index}.part"
        part.write_bytes(data[begin : begin + PART_BYTES])
        parts.append(part)
    listing = folder / "state.json.new"
    listing.write_text(json.dumps({"step": state["step"], "parts": [part.name for part in parts], "bytes": len(data)}))
    listing.rename(folder / "state.json")
    for name in old - {part.name for part in parts}:
        (folder / name).unlink()
    return parts


def load_state(folder: Path) -> dict[str, Any]:
    """The state that `save_state` wrote.

    Raises:
        FileNotFoundError: the folder has no complete state.
        ValueError: a part is missing or cut.
    """
    listing = json.loads((folder / "state.json").read_text())
    data = b"".join((folder / name).read_bytes() for name in listing["parts"])
    if len(data) != listing["bytes"]:
        raise ValueError(f"{folder}: the parts have {len(data)} bytes; expected {listing['bytes']}")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
