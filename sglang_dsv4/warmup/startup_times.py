"""Time that a server takes to start, by phase, for one log line after SGLang's warm-up request.

A phase is a function of SGLang that a hook of ours wraps, or a function of ours. The time of a phase inside another
phase is not part of the outer one: kernels are compiled while attention backends are made.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_seconds: dict[str, float] = defaultdict(float)
_notes: dict[str, str] = {}
_inner = [0.0]  # seconds spent in nested phases, one element for each open phase, the innermost last


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Add the time spent inside to the phase `name`; several calls and workers add up."""
    begin = time.monotonic()
    _inner.append(0.0)
    try:
        yield
    finally:
        seconds = time.monotonic() - begin
        _seconds[name] += seconds - _inner.pop()
        _inner[-1] += seconds


def around(name: str) -> Callable[..., Any]:
    """A hook that calls the hooked function as the phase `name`."""

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - SGLang's
        with phase(name):
            return original(*args, **kwargs)

    return hook


around_weights = around("weights")
around_pools = around("pools")
around_attention_backends = around("attention backends")
around_cuda_graphs = around("CUDA graphs")


def note(name: str, text: str) -> None:
    """Set the text that the summary prints in brackets after a phase."""
    _notes[name] = text


def summary() -> str:
    """One line: seconds since the launcher's start, divided into the launcher's own time, the phases, and the rest,
    which is mostly this process's imports."""
    here, launcher = process_age("self"), process_age(f"{os.getppid()}")
    total = max(here, launcher)
    parts = {"launcher": total - here, **_seconds}
    parts["imports and the rest"] = here - sum(_seconds.values())
    said = [f"{name} {spent:.1f} s" + (f" ({_notes[name]})" if name in _notes else "") for name, spent in parts.items()]
    return f"{total:.1f} s since the launcher's start: " + ", ".join(said)


def process_age(pid: str) -> float:
    """Seconds since a process of this machine started; 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    ticks = int(stat[stat.rindex(")") :].split()[20])  # field 22; the name, in brackets before, may contain spaces
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
