"""How long a server takes to start, by phase, in one line of the log; ready it is behind SGLang's warm-up request.

A phase is a function of SGLang that the plugin is around, or of ours. What runs inside another phase counts for itself:
kernels are compiled while attention backends are made.
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
_inner = [0.0]  # seconds of phases inside the phase that is open, the innermost last


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time inside under a name; of several with the same name (workers, calls) the sum."""
    begin = time.monotonic()
    _inner.append(0.0)
    try:
        yield
    finally:
        seconds = time.monotonic() - begin
        _seconds[name] += seconds - _inner.pop()
        _inner[-1] += seconds


def around(name: str) -> Callable[..., Any]:
    """A hook around a function that is a phase."""

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - SGLang's
        with phase(name):
            return original(*args, **kwargs)

    return hook


around_weights = around("weights")
around_pools = around("pools")
around_attention_backends = around("attention backends")
around_cuda_graphs = around("CUDA graphs")


def note(name: str, text: str) -> None:
    """What is said of a phase in brackets."""
    _notes[name] = text


def summary() -> str:
    """Seconds from the launcher's start to now, and of what: its own, this process's imports, phases, and the rest."""
    here, launcher = process_age("self"), process_age(f"{os.getppid()}")
    total = max(here, launcher)
    parts = {"launcher": total - here, **_seconds}
    parts["imports and the rest"] = here - sum(_seconds.values())
    said = [f"{name} {spent:.1f} s" + (f" ({_notes[name]})" if name in _notes else "") for name, spent in parts.items()]
    return f"{total:.1f} s since the launcher's start: " + ", ".join(said)


def process_age(pid: str) -> float:
    """Seconds since a process of this machine began; 0 if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    ticks = int(stat[stat.rindex(")") :].split()[20])  # field 22; a name in brackets, before, may have spaces
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
