"""Sessions of processes that a benchmark has started: they end with it, also when SIGTERM ends it.

Servers run in sessions of their own, so a signal for the benchmark does not reach them. `own` notes a session; at
SIGTERM all noted sessions are ended before the benchmark ends with status 143, as `timeout` expects. Python's own
answer to SIGTERM runs no `finally`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

SECONDS_TO_END = 10.0
"""Seconds that processes have between SIGTERM and SIGKILL."""
SECONDS_AT_SIGTERM = 3.0
"""The same when this process was told to end, since `timeout` may send SIGKILL after some seconds."""

SECONDS_AFTER_SIGKILL = 2.0
"""Seconds in which the system takes back what killed processes had."""

_owned: set[int] = set()


def own(session: int) -> None:
    """Note a session; the first one installs the handler of SIGTERM, which only the main thread can do."""
    _owned.add(session)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_all)


def end(session: int) -> None:
    """End all processes of a session: SIGTERM, SECONDS_TO_END at most, SIGKILL."""
    _end([session], SECONDS_TO_END)
    _owned.discard(session)


def leader_runs(session: int) -> bool:
    """Return whether the process that began a session still runs."""
    return session in _processes_of(session)


def suspend(session: int) -> None:
    """Stop a session's processes until `resume`; a session that has ended is left alone."""
    _signal(session, signal.SIGSTOP)


def resume(session: int) -> None:
    """Let a session's processes continue: a benchmark that was killed may have left them suspended."""
    _signal(session, signal.SIGCONT)


def _processes_of(session: int) -> list[int]:
    """The processes of a session's process group that are no zombies."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
            state, _, group = file.read().rpartition(")")[2].split()[:3]
            if int(group) == session and state != "Z":
                found.append(int(entry))
    return found


def _end(sessions: list[int], seconds: float) -> None:
    for session in sessions:
        _signal(session, signal.SIGTERM)
        resume(session)  # a suspended process does not see SIGTERM
    if not _have_ended(sessions, seconds):
        for session in sessions:
            _signal(session, signal.SIGKILL)
        _have_ended(sessions, SECONDS_AFTER_SIGKILL)  # the next benchmark needs their ports and memory


def _have_ended(sessions: list[int], seconds: float) -> bool:
    """Wait until the sessions have no processes; return whether that is so after `seconds`."""
    deadline = time.monotonic() + seconds
    while any(map(_processes_of, sessions)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _signal(session: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, number)


def _end_all(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` may send it again
    _end(list(_owned), SECONDS_AT_SIGTERM)
    raise SystemExit(128 + number)
