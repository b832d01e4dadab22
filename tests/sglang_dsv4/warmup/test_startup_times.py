"""The log line on a start's time: nested phases do not count twice, and all parts add up to the total."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import defaultdict

import pytest

from sglang_dsv4.warmup import startup_times as startup


@pytest.fixture(autouse=True)
def nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_seconds", defaultdict(float))
    monkeypatch.setattr(startup, "_notes", {})
    monkeypatch.setattr(startup, "_inner", [0.0])


def test_a_phase_inside_another_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with startup.phase("attention backends"):
        now += 1
        with startup.phase("kernels"):
            now += 40
        now += 2
    with pytest.raises(ValueError, match="of the model"), startup.phase("weights"):
        now += 5
        raise ValueError("of the model")

    def load(model: str, *, fast: bool) -> str:
        nonlocal now
        now += 7
        return f"{model} {fast}"

    assert startup.around("weights")(load, "flash", fast=True) == "flash True"
    assert startup._seconds == {"attention backends": 3, "kernels": 40, "weights": 12}


def test_the_parts_are_all_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "process_age", lambda pid: 90.0 if pid == "self" else 100.0)
    startup._seconds.update({"weights": 4.0, "kernels": 46.0})
    startup.note("kernels", "63 compiled, 0 from disk")
    assert startup.summary() == (
        "100.0 s since the launcher's start: launcher 10.0 s, weights 4.0 s, "
        "kernels 46.0 s (63 compiled, 0 from disk), imports and the rest 40.0 s"
    )
    parts = [float(seconds) for seconds in re.findall(r"([\d.]+) s", startup.summary())]
    assert parts[0] == sum(parts[1:])


def test_the_age_of_a_process() -> None:
    begin = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        time.sleep(0.2)
        age = startup.process_age(f"{process.pid}")
        assert 0.1 < age <= time.monotonic() - begin + 0.1  # the kernel counts in hundredths of a second
        assert startup.process_age("self") == pytest.approx(startup.process_age(f"{os.getpid()}"), abs=0.5)
    finally:
        process.communicate(b"\n")
    assert startup.process_age(f"{process.pid}") == 0.0
