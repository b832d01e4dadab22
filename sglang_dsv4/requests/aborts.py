"""An abort ends the request that it names, and no other.

SGLang 0.5.23's scheduler ends every request whose id begins with the abort's id, so that the entries `a_0`, `a_1`, … of
the batch `a` end with it: a client whose id is `a` and that disconnects ends the request `ab` of another client. The
process that answers clients knows the entries of a batch and sends an abort for each, so a batch's id needs no match
here. Only the additional processes of `--tokenizer-worker-num`, which is refused, pass on a batch's id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

HIDDEN = "\0"
"""Prefix of a request's id while SGLang handles the abort of another request."""


def end_the_request(original: Callable[[Scheduler, AbortReq], None], scheduler: Scheduler, abort: AbortReq) -> None:
    """Abort the request with this very id, and no other; around ``Scheduler.abort_request``.

    Requests that SGLang would end in addition have another id while it compares.
    """
    if live_parts() is None:
        return original(scheduler, abort)
    show_held_requests(scheduler, abort)
    if abort.abort_all:
        return original(scheduler, abort)
    requests = known_requests(scheduler)
    with hidden(request for request in requests if request.rid.startswith(abort.rid) and request.rid != abort.rid):
        return original(scheduler, abort)


def show_held_requests(scheduler: Scheduler, abort: AbortReq) -> None:
    """Move the requests that the abort names from the queue that a pause holds to SGLang's queue of retracted requests.

    SGLang holds them until the pause ends, and compares no abort with them: a pause with mode `abort` that follows
    waited for them without an end.
    """
    queue = scheduler.disagg_decode_prealloc_queue
    if queue is None:
        return
    held, queue.held_rebootstrap_reqs = queue.held_rebootstrap_reqs, []
    for request in held:
        is_meant = abort.abort_all or request.rid == abort.rid
        (queue.retracted_queue if is_meant else queue.held_rebootstrap_reqs).append(request)


def known_requests(scheduler: Scheduler) -> set[Req]:
    """The requests that SGLang compares with an abort's id: waiting, waiting for a grammar, running.

    On a prefill or decode server also the requests that wait for the other server, travel, or were retracted.
    """
    chunked = scheduler.chunked_req
    bootstrap, preallocation = scheduler.disagg_prefill_bootstrap_queue, scheduler.disagg_decode_prealloc_queue
    between: list[Req] = []
    if bootstrap is not None:
        between += [*bootstrap.queue, *scheduler.disagg_prefill_inflight_queue]
    if preallocation is not None:
        arriving = (*preallocation.queue, *scheduler.disagg_decode_transfer_queue.queue)
        between += [*(entry.req for entry in arriving), *preallocation.retracted_queue]
    return {
        *between,
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
