"""Requests that end on a prefill server or on its decode server, through SGLang's own functions."""

from __future__ import annotations

import inspect
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification, CommonKVManager, CommonKVSender, KVTransferError
from sglang.srt.disaggregation.common.utils import pack_int_lists
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.nixl.conn import GUARD, NixlKVManager

from sglang_dsv4.disaggregation import rooms
from sglang_dsv4.seam import live
from sglang_dsv4.seam.rows.disaggregation import HANDLES_ABORTS

# SGLang's thread over NIXL has no other end than an error.
pytestmark = pytest.mark.filterwarnings("ignore:(?s).*SystemExit:pytest.PytestUnhandledThreadExceptionWarning")

# ---- what the decode server is told


class SendingManager:
    """The parts of SGLang's manager that a sender needs; notes what the decode server is told."""

    deferred_bootstrap = None
    conclude_transfer = CommonKVManager.conclude_transfer
    conclude_failure = CommonKVManager.conclude_failure

    def __init__(self, status: int | None) -> None:
        self.request_status = {} if status is None else {7: status}
        self.failure_records: dict[int, str] = {}
        self.failure_lock = threading.Lock()
        self.told: list[tuple[int, str]] = []

    def record_failure(self, room: int, reason: str) -> None:
        self.failure_records[room] = reason

    def update_status(self, room: int, status: int) -> None:
        self.request_status[room] = status

    def send_kv_status_message(self, *, bootstrap_room: int, failure_reason: str, **rest: Any) -> None:
        self.told.append((bootstrap_room, failure_reason))

    def _room_notify_targets(self, room: int) -> list[Any]:
        return []


def sender_of(manager: SendingManager) -> Any:
    sender = object.__new__(CommonKVSender)
    sender.kv_mgr, sender.bootstrap_room = manager, 7
    sender.trace_ctx = SimpleNamespace(abort=lambda **info: None, trace_req_finish=lambda: None)
    return sender


@pytest.mark.parametrize(
    "status", [None, *range(5)], ids=["gone", "failed", "bootstrapping", "waiting", "sent", "done"]
)
def test_the_decode_server_hears_of_an_abort(monkeypatch: pytest.MonkeyPatch, status: int | None) -> None:
    """SGLang's own method tells it nothing. It is told once, while the request goes on there."""
    monkeypatch.setattr(live, "_live", object())
    original, manager = inspect.unwrap(CommonKVSender.abort), SendingManager(status)
    original(sender_of(manager))
    assert not manager.told
    manager = SendingManager(status)
    rooms.tell_decode(original, sender_of(manager))
    assert len(manager.told) == (1 if status in (1, 2, 3) else 0)


def test_the_decode_server_hears_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one counts: that of the request, not that of its transfer."""
    monkeypatch.setattr(live, "_live", object())
    manager = SendingManager(2)
    request = SimpleNamespace(to_finish=SimpleNamespace(message="no token can be drawn"), finished_reason=None)
    request.disagg_kv_sender = sender_of(manager)
    rooms.give_reason(None, request)
    rooms.tell_decode(inspect.unwrap(CommonKVSender.abort), request.disagg_kv_sender)
    assert manager.told == [(7, "no token can be drawn")]
    request.disagg_kv_sender = SimpleNamespace()  # a warm-up request's, which goes to no server
    rooms.give_reason(None, request)


# ---- rooms of requests that have ended


class Heard:
    """SGLang's manager of a prefill server without sockets and threads, with our hooks around its own methods."""

    def __init__(self) -> None:
        self.request_status, self.transfer_infos, self.req_to_decode_prefix_len = {}, {}, {}
        self.failure_records, self.failure_lock = {}, threading.Lock()
        self._deferred_ack_targets, self._deferred_ack_poisoned_rooms = {}, set()
        self._staging_outstanding, self._staging_ctx = defaultdict(int), None
        self.deferred_bootstrap, self.attn_tp_size, self._stopped, self.bootstrap_timeout = None, 1, False, 1e12
        self.attn_dp_rank, self.system_dp_size, self.system_dp_rank = 0, 1, 0
        self._worker_threads: list[threading.Thread] = []
        self.disaggregation_mode = SimpleNamespace(value="prefill")
        self.server_socket, self.told, self.enable_deferred_decode_kv_release = None, [], True

    def resolve_kv_replica_factor(self, infos: Any) -> None:
        pass

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        self.failure_records[bootstrap_room] = failure_reason

    def send_kv_status_message(self, *, targets: Any, bootstrap_room: int, status: int, failure_reason: str) -> None:
        self.told += [(target, bootstrap_room, int(status), failure_reason) for target in targets]

    def hear(self, *messages: list[bytes]) -> None:
        """Let SGLang's thread read messages of decode servers."""
        is_live, parts = threading.Event(), live._live
        live._live = None  # SGLang starts its thread before the server is live
        thread = self.started(iter(messages), is_live)
        live._live = parts
        is_live.set()
        thread.join(10)
        assert not thread.is_alive()


class MooncakeRooms(Heard, MooncakeKVManager):
    def started(self, messages: Iterator[list[bytes]], is_live: threading.Event) -> threading.Thread:
        def receive() -> list[bytes] | None:
            is_live.wait(10)
            message = next(messages, None)
            self._stopped = message is None  # the last message has been handled
            return message

        self._stopped = False
        self._make_worker_recv = lambda socket: rooms.hear_under_lock(lambda manager: receive, self)
        inspect.unwrap(MooncakeKVManager.start_prefill_thread)(self)
        return self._worker_threads.pop()

    @staticmethod
    def pages_of_room(room: int, port: int = 7, of: int = 1) -> list[bytes]:
        """Return a decode server's message that names its pages for a room; `of` ranks of it send one."""
        number = struct.pack("i", 3)
        rest = [f"10.0.0.1:{port}".encode(), number, b"2", pack_int_lists([[1]], "i"), str(of).encode(), b"0", b""]
        return [str(room).encode(), b"10.0.0.1", str(port).encode(), *rest]


class NixlRooms(Heard, NixlKVManager):
    def started(self, messages: Iterator[list[bytes]], is_live: threading.Event) -> threading.Thread:
        def receive() -> list[bytes]:
            is_live.wait(10)
            message = next(messages, None)
            if message is None:
                raise SystemExit  # of this thread
            return message

        vars(self).pop(HANDLES_ABORTS, None)
        self.server_socket, before = SimpleNamespace(recv_multipart=receive), set(threading.enumerate())
        rooms.hear_nixl_under_lock(None, self)
        inspect.unwrap(NixlKVManager._start_bootstrap_thread)(self)
        (thread,) = set(threading.enumerate()) - before
        return thread

    @staticmethod
    def pages_of_room(room: int, port: int = 7, of: int = 1) -> list[bytes]:
        """The same in NIXL's format."""
        number, agent = struct.pack("i", 3), f"agent {port}".encode()
        rest = [agent, number, b"2", str(of).encode(), pack_int_lists([[1]], "i"), b"0", b"0"]
        return [GUARD, str(room).encode(), b"10.0.0.1", str(port).encode(), *rest]


Rooms = MooncakeRooms | NixlRooms


class ClearingSender(CommonKVSender):
    """SGLang's sender with our hooks around its own methods."""

    def __init__(self, manager: Rooms, room: int) -> None:
        rooms.open_room(ClearingSender.begin, self, manager, room)

    def begin(self, manager: Rooms, room: int) -> None:
        self.kv_mgr, self.bootstrap_room, self.conclude_state, self.init_time = manager, room, None, 0.0
        self.trace_ctx = SimpleNamespace(abort=lambda **info: None, trace_req_finish=lambda: None)
        manager.update_status(room, KVPoll.Bootstrapping)

    def abort(self) -> None:
        rooms.tell_decode(inspect.unwrap(CommonKVSender.abort), self)

    def clear(self) -> None:
        rooms.end_room(inspect.unwrap(CommonKVSender.clear), self)


def dropped(sender: ClearingSender) -> None:
    """Drop a request as SGLang does where it only aborts the sender."""
    sender.abort()
    rooms.forget_aborted(None, SimpleNamespace(), SimpleNamespace(disagg_kv_sender=sender))


def timed_out(sender: ClearingSender) -> None:
    sender.kv_mgr.bootstrap_timeout = 1.0
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError):
        inspect.unwrap(CommonKVSender.failure_exception)(sender)


@pytest.fixture(params=[MooncakeRooms, NixlRooms], ids=["Mooncake", "NIXL"])
def manager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rooms:
    monkeypatch.setattr(live, "_live", object())
    return request.param()


def is_empty(manager: Rooms) -> bool:
    tables = ("request_status", "transfer_infos", "req_to_decode_prefix_len", "failure_records")
    return not any(getattr(manager, name) for name in tables)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("end", "reason"), [(dropped, "The prefill server has aborted the request."), (timed_out, "timed out after")]
)
def test_a_decode_server_that_names_its_pages_late_is_told(
    manager: Rooms, end: Callable[[ClearingSender], None], reason: str, ranks: int
) -> None:
    """SGLang opened the room again: the decode server waited for minutes, and the room stayed."""
    end(ClearingSender(manager, 5))
    assert is_empty(manager) and not manager.told
    manager.hear(*(manager.pages_of_room(5, port, ranks) for port in range(ranks)))
    assert is_empty(manager)
    assert [told[:3] for told in manager.told] == [(("10.0.0.1", port), 5, 0) for port in range(ranks)]
    assert all(reason in told[3] for told in manager.told)


def test_no_room_ends_while_its_message_is_handled(manager: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler drops the request while SGLang's thread puts its pages into the tables: the thread ended with a
    KeyError, and no later request was served."""
    sender, handled = ClearingSender(manager, 5), []
    scheduler = threading.Thread(target=dropped, args=(sender,))

    def begin_drop(infos: Any) -> None:
        scheduler.start()
        scheduler.join(0.2)
        handled.append(scheduler.is_alive())

    monkeypatch.setattr(manager, "resolve_kv_replica_factor", begin_drop)
    manager.hear(manager.pages_of_room(5))
    scheduler.join(10)
    assert handled == [True] and is_empty(manager)
    assert [told[:3] for told in manager.told] == [(("10.0.0.1", 7), 5, 0)]


def test_a_thread_that_has_ended_is_an_error(manager: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler must not wait for ever for the lock that it holds."""
    monkeypatch.setattr(rooms, "LOCK_TIMEOUT_S", 0.01)
    sender = ClearingSender(manager, 5)
    rooms.rooms_of(manager).locked_after(lambda: [b"broken"])()
    with pytest.raises(RuntimeError, match="the thread that hears decode servers has ended"):
        sender.abort()


@pytest.mark.parametrize("named", [False, True], ids=["no pages yet", "pages named"])
def test_an_abort_that_comes_before_the_request(manager: Rooms, named: bool) -> None:
    """SGLang forgot it: the request waited for pages until a timeout of minutes, or the named pages stayed."""
    abort = AbortNotification(5, "10.0.0.1", 7).to_zmq()
    manager.hear(*([manager.pages_of_room(5)] if named else []), abort)
    assert is_empty(manager)
    sender = ClearingSender(manager, 5)
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="The decode server has aborted the request"):
        inspect.unwrap(CommonKVSender.failure_exception)(sender)
    assert is_empty(manager) and not manager.told
    manager.hear(abort)  # of a request that was here: a later one may have its room
    assert ClearingSender(manager, 5).poll() == KVPoll.Bootstrapping


def test_other_rooms_and_a_new_request_in_an_old_room_go_on(manager: Rooms) -> None:
    dropped(ClearingSender(manager, 5))
    manager.hear(manager.pages_of_room(6))
    assert manager.request_status == {6: KVPoll.WaitingForInput} and not manager.told
    ClearingSender(manager, 5)
    manager.hear(manager.pages_of_room(5))
    assert manager.request_status[5] == KVPoll.WaitingForInput and not manager.told


def test_an_aborted_request_in_transfer_ends_on_both_servers_and_is_forgotten(manager: Rooms) -> None:
    sender = ClearingSender(manager, 5)
    manager.hear(manager.pages_of_room(5))
    dropped(sender)
    assert is_empty(manager)
    assert manager.told == [(("10.0.0.1", 7), 5, 0, "Aborted by AbortReq.")]


def test_a_request_that_is_dropped_between_chunks_is_forgotten(manager: Rooms) -> None:
    """SGLang's function aborts the sender, and no more."""
    from sglang.srt.managers.scheduler import Scheduler

    assert "disagg_kv_sender.abort()" in inspect.getsource(inspect.unwrap(Scheduler.process_pending_chunked_abort))
    sender = ClearingSender(manager, 5)
    scheduler = SimpleNamespace(chunked_req=SimpleNamespace(disagg_kv_sender=sender))
    rooms.forget_aborted_chunks(lambda scheduler: None, scheduler)
    assert manager.request_status == {5: KVPoll.Bootstrapping}

    def drop(scheduler: Any) -> None:
        sender.abort()
        scheduler.chunked_req = None

    rooms.forget_aborted_chunks(drop, scheduler)
    assert is_empty(manager)
    rooms.forget_aborted_chunks(drop, scheduler)


def test_few_ended_rooms_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MANY_ROOMS", 3)
    ended = rooms.Rooms()
    for room in range(5):
        ended.open(room)
        ended.end(room, f"reason {room}")
    ended.end(4, "later")
    assert [ended.why_ended(room) for room in range(5)] == [None, None, "reason 2", "reason 3", "reason 4"]
    assert [ended.end_there(room) for room in range(5)] == [True, True, False, False, False]
    assert [ended.open(room) for room in (0, 3, 0)] == [True, False, False]
    assert ended.why_ended(3) is None
