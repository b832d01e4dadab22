"""Rooms of a prefill server: a request that ends on one server ends on the other, and both forget its room.

A room is the number under which both servers know a request. The decode server names its pages and slot whenever it has
them, which may be after this server has given up the request; it may also abort a request before this server has it.
SGLang's thread that hears decode servers and its scheduler change the tables of rooms at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sglang_dsv4.disaggregation.ranks import count_replicas
from sglang_dsv4.seam.install import set_attribute
from sglang_dsv4.seam.live import live_parts
from sglang_dsv4.seam.rows.disaggregation import HANDLES_ABORTS, SOCKET

if TYPE_CHECKING:
    import zmq
    from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler


ABORTED = "The prefill server has aborted the request."
ABORTED_THERE = "The decode server has aborted the request."
MANY_ROOMS = 1 << 16
LOCK_TIMEOUT_S = 60.0
"""Seconds that the scheduler waits for a message to be handled; a thread that died while it did so keeps the lock."""


class Rooms:
    """Rooms whose requests have ended on one server before the other knew of them; the newest `MANY_ROOMS` of them.

    A lock is held while a room ends, and while a decode server's message is handled. Without it the end of a room
    between two steps of SGLang's thread that hears decode servers ends that thread, or leaves the room open for ever.
    """

    def __init__(self) -> None:
        """Begin with no rooms."""
        self._ended: dict[int, str] = {}  # on this server -> the reason
        self._opened: dict[int, None] = {}  # on this server; may have ended since
        self._ended_there: dict[int, None] = {}  # on the decode server, before they were opened here
        self._lock = threading.Lock()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock.

        Raises:
            RuntimeError: the thread that hears decode servers has ended while it handled a message.
        """
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise RuntimeError("the thread that hears decode servers has ended; its error is above")
        try:
            yield
        finally:
            self._lock.release()

    def locked_after(self, receive: Callable[[], list[bytes] | None]) -> Callable[[], list[bytes] | None]:
        """`receive`, with the lock held from its return of a message to the next call."""
        held = False

        def receive_unlocked() -> list[bytes] | None:
            nonlocal held
            if held:
                held = False
                self._lock.release()
            message = receive()
            held = message is not None and self._lock.acquire()
            return message

        return receive_unlocked

    def open(self, room: int) -> bool:
        """Open the room of a new request; returns whether the decode server has aborted it already."""
        self._ended.pop(room, None)
        _remember(self._opened, room, None)
        is_aborted = room in self._ended_there
        self._ended_there.pop(room, None)
        return is_aborted

    def end(self, room: int, reason: str) -> None:
        """Note a room's end on this server; its first reason stays."""
        _remember(self._ended, room, self._ended.get(room, reason))

    def end_there(self, room: int) -> bool:
        """Note that the decode server has aborted a request; returns whether it was never opened here."""
        if room in self._opened:
            return False
        _remember(self._ended_there, room, None)
        return True

    def why_ended(self, room: int) -> str | None:
        """The reason why a room has ended here; None for other rooms."""
        return self._ended.get(room)


def _remember(rooms: dict[int, Any], room: int, value: object) -> None:
    rooms[room] = value
    if len(rooms) > MANY_ROOMS:
        del rooms[next(iter(rooms))]


_rooms: WeakKeyDictionary[CommonKVManager, Rooms] = WeakKeyDictionary()


def rooms_of(manager: CommonKVManager) -> Rooms:
    """The rooms of a manager's server."""
    return _rooms.setdefault(manager, Rooms())


def hear_under_lock(
    original: Callable[..., Callable[[], Any]], manager: CommonKVManager, *args: Any, **kwargs: Any
) -> Callable[[], Any]:
    """A function that receives the next message, and lets no room end while it is handled.

    Around `_make_worker_recv`, which is called before the server is live, at the first moment at which a manager is
    known to be Mooncake's: it gets :func:`hear_decode` here.
    """
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    receive = original(manager, *args, **kwargs)
    if manager.disaggregation_mode.value != "prefill":
        return receive
    if isinstance(manager, MooncakeKVManager):
        set_attribute(manager, HANDLES_ABORTS)
    return rooms_of(manager).locked_after(receive)


class LockedSocket:
    """The socket at which NIXL's manager hears decode servers, with the rooms' lock held while a message is handled."""

    def __init__(self, socket: zmq.Socket, rooms: Rooms) -> None:
        self.recv_multipart = rooms.locked_after(socket.recv_multipart)


def hear_nixl_under_lock(result: None, manager: CommonKVManager, *args: Any, **kwargs: Any) -> None:
    """The same for NIXL's manager, which asks its socket itself; after `CommonKVManager.__init__`, before its threads
    start."""
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    if isinstance(manager, NixlKVManager) and manager.disaggregation_mode.value == "prefill":
        set_attribute(manager, HANDLES_ABORTS)
        set_attribute(manager, SOCKET)


def lock_socket(socket: zmq.Socket, manager: CommonKVManager) -> LockedSocket:
    """The value of a NIXL manager's `server_socket`."""
    return LockedSocket(socket, rooms_of(manager))


def hear_decode(handle: Callable[[list[bytes]], bool], manager: CommonKVManager) -> Callable[[list[bytes]], bool]:
    """The manager's `_handle_abort_notification`, with an answer to messages about requests that are not here.

    SGLang's thread passes it every message that names pages or aborts a request. A decode server that names its pages
    for a request that has ended here is told so; one that aborts a request that is not here yet is remembered. SGLang
    opens the room of the ended request anew, and forgets an abort that comes first: a request waits for a timeout of
    minutes, and rooms stay here.

    Returns:
        A function of a message: whether the message needs no further handling.
    """

    def hear(msg: list[bytes]) -> bool:
        if live_parts() is None:
            return handle(msg)
        from sglang.srt.disaggregation.base import KVPoll
        from sglang.srt.disaggregation.common.conn import ABORT_TAG, AbortNotification

        rooms = rooms_of(manager)
        if handle(msg):
            abort = AbortNotification.from_zmq(msg) if msg[0] == ABORT_TAG else None
            if abort is not None and rooms.end_there(abort.room):
                for table in (manager.request_status, manager.transfer_infos, manager.req_to_decode_prefix_len):
                    table.pop(abort.room, None)
                with manager.failure_lock:
                    manager.failure_records.pop(abort.room, None)
            return True
        transfer_info, msg = _format_of(manager, msg)
        if not msg[0].isdigit():  # the registration of a decode server, which names no room
            return False
        room = int(msg[0])
        reason = rooms.why_ended(room)
        if reason is None:
            return False
        info = transfer_info.from_zmq(msg)
        manager.send_kv_status_message(
            targets=[] if info.is_dummy else [(info.endpoint, info.dst_port)],
            bootstrap_room=room,
            status=KVPoll.Failed,
            failure_reason=reason,
        )
        return True

    return hear


def _format_of(manager: CommonKVManager, msg: list[bytes]) -> tuple[type, list[bytes]]:
    """The class of the manager's messages that name pages, and the message without the frame that NIXL puts first."""
    from sglang.srt.disaggregation.mooncake.conn import TransferInfo as MooncakeInfo
    from sglang.srt.disaggregation.nixl.conn import GUARD, NixlKVManager
    from sglang.srt.disaggregation.nixl.conn import TransferInfo as NixlInfo

    if isinstance(manager, NixlKVManager):
        return NixlInfo, msg[1:] if msg[0] == GUARD else msg
    return MooncakeInfo, msg


def open_room(
    original: Callable[..., None], sender: CommonKVSender, mgr: CommonKVManager, *args: Any, **kwargs: Any
) -> None:
    """Open the room of a new request, and fail it if the decode server has aborted it already; around the constructor.

    An old request's room may be opened again.
    """
    from sglang.srt.disaggregation.base import KVPoll

    if live_parts() is None:
        return original(sender, mgr, *args, **kwargs)
    count_replicas(mgr)
    rooms = rooms_of(mgr)
    with rooms.locked():
        original(sender, mgr, *args, **kwargs)
        if rooms.open(sender.bootstrap_room):
            mgr.record_failure(sender.bootstrap_room, ABORTED_THERE)
            mgr.update_status(sender.bootstrap_room, KVPoll.Failed)


def tell_decode(original: Callable[[CommonKVSender], None], sender: CommonKVSender) -> None:
    """End a transfer on both servers; around `CommonKVSender.abort`.

    SGLang ends it on this server only: a request that this server alone gives up would hold slots and pages of the
    decode server until a timeout of minutes. If that server has not named its pages yet, it is told when it does
    (`hear_decode`).
    """
    from sglang.srt.disaggregation.base import KVPoll

    if live_parts() is None:
        return original(sender)
    manager, room = sender.kv_mgr, sender.bootstrap_room
    rooms = rooms_of(manager)
    with rooms.locked():
        going_on = manager.request_status.get(room) not in (None, KVPoll.Failed, KVPoll.Success)
        original(sender)
        if going_on:
            rooms.end(room, ABORTED)
            manager.conclude_failure(bootstrap_room=room, failure_reason=ABORTED)


def end_room(original: Callable[[CommonKVSender], None], sender: CommonKVSender) -> None:
    """Forget a sender's room; around `CommonKVSender.clear`. A room that has failed in any way, for example by a
    timeout, is noted as ended."""
    from sglang.srt.disaggregation.base import KVPoll

    if live_parts() is None:
        return original(sender)
    manager, room = sender.kv_mgr, sender.bootstrap_room
    rooms = rooms_of(manager)
    with rooms.locked():
        if manager.request_status.get(room) == KVPoll.Failed:
            rooms.end(room, manager.failure_records.get(room, "The prefill server has given up the request."))
        original(sender)


def forget_aborted(result: Any, scheduler: Scheduler, req: Req) -> None:
    """After a request was dropped whose sender has aborted: forget its room, which SGLang keeps."""
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.common.conn import CommonKVSender

    sender = req.disagg_kv_sender
    if live_parts() is None or not isinstance(sender, CommonKVSender) or sender.conclude_state != KVPoll.Failed:
        return
    sender.clear()
    with sender.kv_mgr.failure_lock:
        sender.kv_mgr.failure_records.pop(sender.bootstrap_room, None)


def forget_aborted_chunks(original: Callable[[Scheduler], None], scheduler: Scheduler) -> None:
    """The same for a request that is dropped between two of its chunks; around `process_pending_chunked_abort`."""
    req = scheduler.chunked_req
    original(scheduler)
    if req is not None and scheduler.chunked_req is not req:
        forget_aborted(None, scheduler, req)


def give_reason(scheduler: Scheduler, req: Req) -> None:
    """Before a request ends at its first token: give the decode server, which answers the client, the reason."""
    from sglang.srt.disaggregation.common.conn import CommonKVSender

    finish, sender = req.to_finish or req.finished_reason, req.disagg_kv_sender
    message = getattr(finish, "message", None)
    if live_parts() is not None and message and isinstance(sender, CommonKVSender):
        sender.kv_mgr.conclude_failure(bootstrap_room=sender.bootstrap_room, failure_reason=message)
