"""An abort ends the request that it names, and no other.

SGLang 0.5.23's scheduler ends every request whose id begins with the abort's id, so that the entries `a_0`, `a_1`, … of
the batch `a` end with it: a client whose id is `a` and that disconnects ends the request `ab` of another client. Its
process that answers clients knows the entries and sends an abort for each; several such processes
(`--tokenizer-worker-num`) pass on ids that they do not know, which can be a batch's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

ENTRY = re.compile(r"_\d+")
"""SGLang appends it to a batch's id for the ids of its entries."""
HIDDEN = "\0"
"""Prefix of a request's id while SGLang handles the abort of another request."""


def end_the_request(original: Callable[[Scheduler, AbortReq], None], scheduler: Scheduler, abort: AbortReq) -> None:
    """Abort the request with this very id, else the entries of the batch with it; around ``Scheduler.abort_request``.

    Requests that SGLang would end in addition have another id while it compares.
    """
    if abort.abort_all or live_parts() is None:
        return original(scheduler, abort)
    requests = known_requests(scheduler)
    meant = {request.rid for request in requests if request.rid == abort.rid}
    if not meant and several_processes_answer():
        begin = len(abort.rid)
        meant = {r.rid for r in requests if r.rid.startswith(abort.rid) and ENTRY.fullmatch(r.rid, begin)}
    with hidden(request for request in requests if request.rid.startswith(abort.rid) and request.rid not in meant):
        return original(scheduler, abort)


def several_processes_answer() -> bool:
    """Whether several processes answer clients: one of them can pass on an id that it does not know."""
    from sglang.srt.runtime_context import get_serving

    return get_serving().tokenizer_worker_num > 1


def known_requests(scheduler: Scheduler) -> set[Req]:
    """The requests that SGLang compares with an abort's id: waiting, waiting for a grammar, running."""
    chunked = scheduler.chunked_req
    return {
        *scheduler.waiting_queue,
        *scheduler.grammar_manager.grammar_queue,
        *scheduler.collect_inflight_reqs(),
        *([] if chunked is None else [chunked]),
    }


@contextmanager
def hidden(requests: Iterable[Req]) -> Iterator[None]:
    """Give requests other ids for the duration of a ``with`` block."""
    ids = {request: request.rid for request in requests}
    for request in ids:
        request.rid = HIDDEN + request.rid
    try:
        yield
    finally:
        for request, rid in ids.items():
            request.rid = rid
