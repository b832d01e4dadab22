"""Sessions that time out, through SGLang's own functions; no servers."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dsv4.requests import sessions
from sglang_dsv4.seam import live


class Rank:
    """The parts of SGLang's scheduler that decide about sessions."""

    def __init__(self) -> None:
        from sglang.srt.managers.io_struct import OpenSessionReqInput
        from sglang.srt.session.session_controller import SessionController

        self.waiting_queue: list[Any] = []
        tree = SimpleNamespace(release_radix_session=lambda name: None, release_session=lambda name: None)
        self.session_controller = SessionController(tree)
        for name, timeout in (("short", 0.0), ("long", 1e9), ("no timeout", None)):
            opened = OpenSessionReqInput(capacity_of_str_len=9, session_id=name, timeout=timeout)
            assert self.session_controller.open(opened).success

    @property
    def names(self) -> set[str]:
        return set(self.session_controller.sessions)

    def poll(self) -> list[Any]:
        from sglang.srt.managers.scheduler import Scheduler

        return Scheduler._poll_timeout_aborts(self)


@pytest.fixture(autouse=True)
def plugins() -> None:
    import sglang.srt.managers.scheduler  # noqa: F401 - as in a scheduler's process, before the plugins
    from sglang.srt.plugins import load_plugins

    load_plugins()


def test_a_session_that_times_out_ends_on_all_ranks_by_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank ended it within a second of its own: a request in between was served by some ranks only."""
    monkeypatch.setattr(live, "_live", object())
    first, second = Rank(), Rank()
    second.session_controller.maybe_reap(time.monotonic() + 5)
    assert second.names == first.names == {"short", "long", "no timeout"}
    requests = first.poll()
    assert [request.session_id for request in requests] == ["short"]
    assert first.poll() == [], "once a second"
    for rank in (first, second):
        for request in requests:  # as `Scheduler.close_session` does
            rank.session_controller.close(request)
        assert rank.names == {"long", "no timeout"}
    monkeypatch.setattr(sessions, "PERIOD_S", 0.0)
    assert first.poll() == []


def test_another_model_s_sessions_end_as_in_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_live", None)
    rank = Rank()
    assert rank.poll() == []
    rank.session_controller.maybe_reap(time.monotonic() + 5)
    assert rank.names == {"long", "no timeout"}
