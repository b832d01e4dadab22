"""Sessions that time out end on all ranks in the same turn.

SGLang lets every rank end such a session by its own clock, once a second. A request of the session that arrives
meanwhile is served by the ranks that still have the session, and refused by the others: the batch differs, and ranks
wait for each other for ever. Here the rank that receives requests looks at its clock, and sends a request to close the
session to all ranks, in order with the other requests.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq, CloseSessionReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.session.session_controller import SessionController

PERIOD_S = 1.0
"""Seconds between two looks at the sessions, as in SGLang."""


class Turns:
    """The time at which a scheduler has last looked at its sessions."""

    def __init__(self) -> None:
        self._looked_s = -PERIOD_S

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to look again; the answer yes is noted."""
        if now_s - self._looked_s < PERIOD_S:
            return False
        self._looked_s = now_s
        return True


def request_closes(requests: list[AbortReq | CloseSessionReqInput], scheduler: Scheduler) -> None:
    """Add a request to close each session that has timed out; runs after `Scheduler._poll_timeout_aborts`.

    SGLang calls that on one rank of each group of ranks with the same requests, and gives its result to all of them.
    """
    if live_parts() is None or not turns_of(scheduler).is_due(time.monotonic()):
        return
    from sglang.srt.managers.io_struct import CloseSessionReqInput

    sessions = scheduler.session_controller.sessions
    requests += [CloseSessionReqInput(session_id=name) for name, session in sessions.items() if session.is_timed_out()]


def wait_for_close(original: Callable[..., None], controller: SessionController, *args: Any, **kwargs: Any) -> None:
    """Leave sessions to :func:`request_closes`; around `SessionController.maybe_reap`.

    SGLang's function also ends streaming sessions whose last request has finished; this package refuses them.
    """
    if live_parts() is None:
        original(controller, *args, **kwargs)


@functools.cache
def turns_of(scheduler: Scheduler) -> Turns:
    """The turns of this process's scheduler."""
    return Turns()
