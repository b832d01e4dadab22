"""Hooks for prefill and decode on different servers, through SGLang's own functions."""

from __future__ import annotations

import inspect
import struct
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification, CommonKVManager, CommonKVSender, KVTransferError
from sglang.srt.disaggregation.common.utils import pack_int_lists
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.mem_cache import common

from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.kv_pool import DraftOf, Dsv4KVPool
from sglang_dsv4.cache.transfer import describe
from sglang_dsv4.disaggregation import buffers, decode_side, pieces, prefill_side
from sglang_dsv4.seam import live

SMALL = PoolGeometry((0, 4, 128), row_dim=32, rope_dim=8, index_dim=32, draft_tokens=4, draft_layers=1, transfers=True)


def sglangs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return SGLang's function, without a hook that a plugin in this process has put around it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def small_pool(draft_of: Dsv4KVPool | None = None) -> Dsv4KVPool:
    geometry = SMALL if draft_of is None else replace(SMALL, ratios=(0,), draft_layers=0)
    join = None if draft_of is None else DraftOf(draft_of, torch.nn.Identity(), injected=False)
    return Dsv4KVPool(geometry, full_tokens=1024, request_slots=3, device="cpu", draft_of=join)


def test_rings_are_two_components_of_request_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own description of a DeepSeek-V4 pool asks ours for pages of window rows, which it does not have."""
    target = small_pool()
    draft = small_pool(target)
    setup, described = sglangs(utils.setup_state_kv_args), SimpleNamespace()
    with pytest.raises((NotImplementedError, AttributeError)):
        setup(SimpleNamespace(), target, draft, 3)
    monkeypatch.setattr(CommonKVManager, "kv_status_msg_carries_reason", False)
    buffers.list_rings(setup, described, target, draft, 3, req_to_token_pool=None)
    assert CommonKVManager.kv_status_msg_carries_reason is True
    assert [kind.value for kind in described.state_types] == ["request_row", "request_row"]
    assert [len(addresses) for addresses in described.state_data_ptrs] == [3 + 1 + 1 + 1, 1]
    assert described.state_item_lens[1] == [256 * 32 * 2]
    assert described.mla_compression_ratios is None


# ---- prefill servers that are refused


class Manager:
    """The parts of SGLang's manager that its own check of a prefill server needs."""

    try_ensure_parallel_info = sglangs(CommonKVManager.try_ensure_parallel_info)
    dsv41_spec_layout, kv_cache_dtype_str, is_mla_backend, is_hybrid_mla_backend = None, "auto", True, False
    attn_tp_size, attn_cp_size, dcp_size = 1, 1, 1

    def __init__(self, layout: str) -> None:
        self.kv_layout, self.prefill_info_table = layout, {}
        self.kv_args = SimpleNamespace(page_size=256, state_types=[])
        self.failures: dict[int, str] = {}

    def record_failure(self, room: int, reason: str) -> None:
        self.failures[room] = reason

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def waiting_request(room: int) -> Any:
    ended: list[int] = []
    receiver = SimpleNamespace(abort=lambda: ended.append(room))
    return SimpleNamespace(req=SimpleNamespace(bootstrap_room=room), kv_receiver=receiver, ended=ended)


def test_a_prefill_server_with_other_pools_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests end with what differs; those of other prefill servers go on."""
    ours = describe(SMALL, "1.0", "abc")
    layouts = {"one": ours, "other": describe(replace(SMALL, draft_tokens=0), "1.0", "abc"), "late": None}

    def route(url: str, timeout: float) -> Any:
        name = url.split("/")[2]
        topology = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 256}
        topology |= {"kv_cache_dtype": "auto", "follow_bootstrap_room": True, "kv_layout": layouts[name]}
        return SimpleNamespace(status_code=200 if layouts[name] else 503, json=lambda: topology, text="")

    monkeypatch.setattr(requests, "get", route)
    queue = SimpleNamespace(
        kv_manager=Manager(ours),
        _ensure_last_attempt_time={},
        _ensure_retry_interval=1.0,
        _ensure_retry_count={},
        _max_ensure_retries=15,
    )
    waiting = {name: [waiting_request(room)] for room, name in enumerate(layouts)}
    original = sglangs(DecodePreallocQueue._ensure_prefill_info)
    with pytest.raises(RuntimeError, match="KV layout mismatch"):
        original(queue, {"other": waiting["other"]})
    queue._ensure_last_attempt_time.clear()
    ready, still = decode_side.refuse_other_prefills(original, queue, waiting)
    assert ready == {"one": waiting["one"]} and still == waiting["late"]
    assert waiting["other"][0].ended and not waiting["one"][0].ended
    (reason,) = queue.kv_manager.failures.values()
    assert "The prefill server at other can't serve this decode server" in reason
    assert "draft-tokens: 0 there, 4 here" in reason and "window-ring: 128 there, 256 here" in reason
    assert "dtype:" not in reason and "dsv4-attn-backend" not in reason


def test_another_page_size_is_refused_with_sglangs_words() -> None:
    assert decode_side.explain("Page size mismatch: 64, 256") == "Page size mismatch: 64, 256"


# ---- retraction, early sends, packed pages


def test_our_pools_copy_a_retracted_request() -> None:
    original = sglangs(common.dsv4_needs_rebootstrap)
    allocator = SimpleNamespace(get_kvcache=small_pool)
    assert original(allocator)
    assert not decode_side.keep_bytes(original, allocator)
    assert not decode_side.keep_bytes(original, SimpleNamespace(get_kvcache=object))


@pytest.mark.parametrize(
    ("idle", "overlap", "on_gpu", "sent"),
    [(True, True, True, True), (False, True, True, False), (True, False, True, False), (True, False, False, True)],
    ids=["nothing waits", "a copy waits", "no event to wait for", "on a CPU copies are done"],
)
def test_a_prefix_is_not_sent_before_it_is_there(idle: bool, overlap: bool, on_gpu: bool, sent: bool) -> None:
    pool, early = small_pool(), []
    pool.page_copies = SimpleNamespace(idle=idle, on_gpu=on_gpu)
    scheduler = SimpleNamespace(
        enable_overlap=False,
        enable_staging=False,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool, page_size=256),
        send_kv_chunk=lambda req, last_chunk, end_idx: early.append(end_idx),
    )
    request = SimpleNamespace(pending_bootstrap=False, prefix_len=512, host_hit_length=0, start_send_idx=0)
    original = sglangs(SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk)

    def with_overlap(scheduler: Any, req: Any, allow_send: bool) -> None:
        original(scheduler, req, allow_send)

    view = SimpleNamespace(**{**vars(scheduler), "enable_overlap": overlap})
    prefill_side.send_prefix_early(lambda _, req, allow_send: with_overlap(scheduler, req, allow_send), view, request)
    assert early == ([512] if sent else [])


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
    original, manager = sglangs(CommonKVSender.abort), SendingManager(status)
    original(sender_of(manager))
    assert not manager.told
    manager = SendingManager(status)
    prefill_side.tell_decode(original, sender_of(manager))
    assert len(manager.told) == (1 if status in (1, 2, 3) else 0)


def test_the_decode_server_hears_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one counts: that of the request, not that of its transfer."""
    monkeypatch.setattr(live, "_live", object())
    manager = SendingManager(2)
    request = SimpleNamespace(to_finish=SimpleNamespace(message="no token can be drawn"), finished_reason=None)
    request.disagg_kv_sender = sender_of(manager)
    prefill_side.give_reason(None, request)
    prefill_side.tell_decode(sglangs(CommonKVSender.abort), request.disagg_kv_sender)
    assert manager.told == [(7, "no token can be drawn")]
    request.disagg_kv_sender = SimpleNamespace()  # a warm-up request's, which goes to no server
    prefill_side.give_reason(None, request)


def test_a_slot_is_published_after_its_last_forward() -> None:
    waited: list[str] = []
    pool = small_pool()
    scheduler = SimpleNamespace(
        enable_overlap=True,
        forward_stream=SimpleNamespace(synchronize=lambda: waited.append("waited")),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
    )
    queue = SimpleNamespace(scheduler=scheduler)
    decode_side.wait_for_forwards(queue, None, None)
    assert not waited  # a CPU has computed what it was given
    pool.device = "cuda"
    decode_side.wait_for_forwards(queue, None, None)
    assert waited == ["waited"]
    scheduler.enable_overlap = False  # the step's results are on the host
    decode_side.wait_for_forwards(queue, None, None)
    assert waited == ["waited"]


def test_a_forward_packs_the_pages_that_it_wrote() -> None:
    packed: list[int] = []
    pool = small_pool()
    pool.packed_pages = SimpleNamespace(pack=lambda pages: packed.extend(pages.tolist()))
    rows = torch.arange(3 * 1024).view(3, 1024)
    runner = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=rows))
    mode = SimpleNamespace(is_extend_without_speculative=lambda: True)
    batch = partial(SimpleNamespace, forward_mode=mode, req_pool_indices=torch.tensor([2, 1]))
    prefill_side.pack_pages(None, runner, batch(extend_prefix_lens_cpu=[300, 0], extend_seq_lens_cpu=[300, 256]))
    assert packed == [8 + 1, 8 + 2, 4]  # tokens [300, 600) of slot 2, [0, 256) of slot 1
    prefill_side.pack_pages(None, runner, batch(extend_prefix_lens_cpu=None, extend_seq_lens_cpu=None))
    assert len(packed) == 3
    pool.packed_pages = None
    prefill_side.pack_pages(None, runner, batch(extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[1]))


# ---- pieces over TCP


@pytest.mark.parametrize(("device", "calls"), [("", [2000, 2000, 500]), ("mlx5_0", [4500]), (None, [4500])])
def test_a_transfer_over_tcp_has_pieces(device: str | None, calls: list[int]) -> None:
    """Mooncake refused calls of more than 2048 blocks, and SGLang then took the decode server for dead."""
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine

    sent: list[tuple[Any, ...]] = []
    engine = object.__new__(MooncakeTransferEngine)
    engine.ib_device = device
    engine.engine = SimpleNamespace(batch_transfer_sync_write=lambda *call: sent.append(call) or 0)
    original = sglangs(MooncakeTransferEngine.batch_transfer_sync)
    lists = [list(range(begin, begin + 4500)) for begin in (0, 10_000, 20_000)]
    assert pieces.transfer_in_pieces(original, engine, "peer:1", *lists) == 0
    assert [len(call[1]) for call in sent] == calls and {call[0] for call in sent} == {"peer:1"}
    assert [[number for call in sent for number in call[i]] for i in (1, 2, 3)] == lists
    assert pieces.transfer_in_pieces(original, engine, "peer:1", [], [], []) == 0


def test_a_piece_that_fails_ends_the_transfer() -> None:
    results = iter([0, -1])
    engine, many = SimpleNamespace(ib_device=""), [0] * 5000
    assert pieces.transfer_in_pieces(lambda *call: next(results), engine, "peer:1", many, many, many) == -1


# ---- rooms of requests that have ended


class RoomsManager(MooncakeKVManager):
    """SGLang's manager of a prefill server without sockets and threads, with our hooks around its own methods."""

    def __init__(self) -> None:
        self.request_status, self.transfer_infos, self.req_to_decode_prefix_len = {}, {}, {}
        self.failure_records, self.failure_lock = {}, threading.Lock()
        self._deferred_ack_targets, self._deferred_ack_poisoned_rooms = {}, set()
        self._staging_outstanding, self._staging_ctx = defaultdict(int), None
        self.deferred_bootstrap, self.attn_tp_size, self._stopped, self.bootstrap_timeout = None, 1, False, 1e12
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
        rest, is_live = list(messages), threading.Event()

        def receive() -> list[bytes]:
            is_live.wait(10)
            if not rest:  # the last message has been handled
                self._stopped = True
            return rest.pop(0) if rest else None

        self._stopped, parts = False, live._live
        self._make_worker_recv = lambda socket: prefill_side.hear_under_lock(lambda manager: receive, self)
        live._live = None  # SGLang starts its thread before the server is live
        sglangs(MooncakeKVManager.start_prefill_thread)(self)
        live._live = parts
        is_live.set()
        self._worker_threads.pop().join(10)


def pages_of_room(room: int, port: int = 7, of: int = 1) -> list[bytes]:
    """Return a decode server's message that names its pages for a room; `of` ranks of it send one."""
    number = struct.pack("i", 3)
    rest = [f"10.0.0.1:{port}".encode(), number, b"2", pack_int_lists([[1]], "i"), str(of).encode(), b"0", b""]
    return [str(room).encode(), b"10.0.0.1", str(port).encode(), *rest]


class ClearingSender(CommonKVSender):
    """SGLang's sender with our hooks around its own methods."""

    def __init__(self, manager: RoomsManager, room: int) -> None:
        prefill_side.open_room(ClearingSender.begin, self, manager, room)

    def begin(self, manager: RoomsManager, room: int) -> None:
        self.kv_mgr, self.bootstrap_room, self.conclude_state, self.init_time = manager, room, None, 0.0
        self.trace_ctx = SimpleNamespace(abort=lambda **info: None, trace_req_finish=lambda: None)
        manager.update_status(room, KVPoll.Bootstrapping)

    def abort(self) -> None:
        prefill_side.tell_decode(sglangs(CommonKVSender.abort), self)

    def clear(self) -> None:
        prefill_side.end_room(sglangs(CommonKVSender.clear), self)


def dropped(sender: ClearingSender) -> None:
    """Drop a request as SGLang does where it only aborts the sender."""
    sender.abort()
    prefill_side.forget_aborted(None, SimpleNamespace(), SimpleNamespace(disagg_kv_sender=sender))


def timed_out(sender: ClearingSender) -> None:
    sender.kv_mgr.bootstrap_timeout = 1.0
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError):
        sglangs(CommonKVSender.failure_exception)(sender)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> RoomsManager:
    monkeypatch.setattr(live, "_live", object())
    return RoomsManager()


def is_empty(manager: RoomsManager) -> bool:
    tables = ("request_status", "transfer_infos", "req_to_decode_prefix_len", "failure_records")
    return not any(getattr(manager, name) for name in tables)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("end", "reason"), [(dropped, "The prefill server has aborted the request."), (timed_out, "timed out after")]
)
def test_a_decode_server_that_names_its_pages_late_is_told(
    rooms: RoomsManager, end: Callable[[ClearingSender], None], reason: str, ranks: int
) -> None:
    """SGLang opened the room again: the decode server waited for minutes, and the room stayed."""
    end(ClearingSender(rooms, 5))
    assert is_empty(rooms) and not rooms.told
    rooms.hear(*(pages_of_room(5, port, ranks) for port in range(ranks)))
    assert is_empty(rooms)
    assert [told[:3] for told in rooms.told] == [(("10.0.0.1", port), 5, 0) for port in range(ranks)]
    assert all(reason in told[3] for told in rooms.told)


def test_no_room_ends_while_its_message_is_handled(rooms: RoomsManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler drops the request while SGLang's thread puts its pages into the tables: the thread ended with a
    KeyError, and no later request was served."""
    sender, handled = ClearingSender(rooms, 5), []
    scheduler = threading.Thread(target=dropped, args=(sender,))

    def begin_drop(infos: Any) -> None:
        scheduler.start()
        scheduler.join(0.2)
        handled.append(scheduler.is_alive())

    monkeypatch.setattr(rooms, "resolve_kv_replica_factor", begin_drop)
    rooms.hear(pages_of_room(5))
    scheduler.join(10)
    assert handled == [True] and is_empty(rooms)
    assert [told[:3] for told in rooms.told] == [(("10.0.0.1", 7), 5, 0)]


def test_a_thread_that_has_ended_is_an_error(rooms: RoomsManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler must not wait for ever for the lock that it holds."""
    monkeypatch.setattr(prefill_side, "LOCK_TIMEOUT_S", 0.01)
    sender = ClearingSender(rooms, 5)
    prefill_side.rooms_of(rooms).locked_after(lambda: [b"broken"])()
    with pytest.raises(RuntimeError, match="the thread that hears decode servers has ended"):
        sender.abort()


@pytest.mark.parametrize("named", [False, True], ids=["no pages yet", "pages named"])
def test_an_abort_that_comes_before_the_request(rooms: RoomsManager, named: bool) -> None:
    """SGLang forgot it: the request waited for pages until a timeout of minutes, or the named pages stayed."""
    abort = AbortNotification(5, "10.0.0.1", 7).to_zmq()
    rooms.hear(*([pages_of_room(5)] if named else []), abort)
    assert is_empty(rooms)
    sender = ClearingSender(rooms, 5)
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="The decode server has aborted the request"):
        sglangs(CommonKVSender.failure_exception)(sender)
    assert is_empty(rooms) and not rooms.told
    rooms.hear(abort)  # of a request that was here: a later one may have its room
    assert ClearingSender(rooms, 5).poll() == KVPoll.Bootstrapping


def test_other_rooms_and_a_new_request_in_an_old_room_go_on(rooms: RoomsManager) -> None:
    dropped(ClearingSender(rooms, 5))
    rooms.hear(pages_of_room(6))
    assert rooms.request_status == {6: KVPoll.WaitingForInput} and not rooms.told
    ClearingSender(rooms, 5)
    rooms.hear(pages_of_room(5))
    assert rooms.request_status[5] == KVPoll.WaitingForInput and not rooms.told


def test_an_aborted_request_in_transfer_ends_on_both_servers_and_is_forgotten(rooms: RoomsManager) -> None:
    sender = ClearingSender(rooms, 5)
    rooms.hear(pages_of_room(5))
    dropped(sender)
    assert is_empty(rooms)
    assert rooms.told == [(("10.0.0.1", 7), 5, 0, "Aborted by AbortReq.")]


def test_a_request_that_is_dropped_between_chunks_is_forgotten(rooms: RoomsManager) -> None:
    """SGLang's function aborts the sender, and no more."""
    from sglang.srt.managers.scheduler import Scheduler

    assert "disagg_kv_sender.abort()" in inspect.getsource(sglangs(Scheduler.process_pending_chunked_abort))
    sender = ClearingSender(rooms, 5)
    scheduler = SimpleNamespace(chunked_req=SimpleNamespace(disagg_kv_sender=sender))
    prefill_side.forget_aborted_chunks(lambda scheduler: None, scheduler)
    assert rooms.request_status == {5: KVPoll.Bootstrapping}

    def drop(scheduler: Any) -> None:
        sender.abort()
        scheduler.chunked_req = None

    prefill_side.forget_aborted_chunks(drop, scheduler)
    assert is_empty(rooms)
    prefill_side.forget_aborted_chunks(drop, scheduler)


def test_few_ended_rooms_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_side, "MANY_ROOMS", 3)
    ended = prefill_side.Rooms()
    for room in range(5):
        ended.open(room)
        ended.end(room, f"reason {room}")
    ended.end(4, "later")
    assert [ended.why_ended(room) for room in range(5)] == [None, None, "reason 2", "reason 3", "reason 4"]
    assert [ended.end_there(room) for room in range(5)] == [True, True, False, False, False]
    assert [ended.open(room) for room in (0, 3, 0)] == [True, False, False]
    assert ended.why_ended(3) is None
