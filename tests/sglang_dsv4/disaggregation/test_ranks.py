"""Data-parallel ranks of a prefill server, through SGLang's own functions."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender
from sglang.srt.disaggregation.decode import DecodePreallocQueue

from sglang_dsv4.disaggregation import ranks, rooms
from sglang_dsv4.seam import live

ROOM = 5


@pytest.fixture(autouse=True)
def is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_live", object())


class Manager:
    """The parts of SGLang's managers that a sender or receiver needs."""

    deferred_bootstrap, is_dummy_cp_rank, sender_trace_module, attn_dp_rank = None, False, None, 0

    def __init__(self, **others: Any) -> None:
        self.request_status: dict[int, int] = {}
        self.failure_records: dict[int, str] = {}
        self.failure_lock = threading.Lock()
        vars(self).update(others)

    def record_failure(self, room: int, reason: str) -> None:
        self.failure_records[room] = reason

    def update_status(self, room: int, status: int) -> None:
        self.request_status[room] = status


@pytest.mark.parametrize("method", ["follow_bootstrap_room", "round_robin"])
def test_rooms_of_a_replica_are_its_own(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """SGLang failed each room of replica 1, or told the decode server to find it on replica 0."""
    parallel = SimpleNamespace(num_dp_ranks=2, load_balance_method=method)
    monkeypatch.setattr(conn, "get_parallel", lambda: parallel)
    monkeypatch.setattr(conn, "get_observability", lambda: SimpleNamespace(enable_trace=False))
    told: list[int] = []
    monkeypatch.setattr(
        conn.requests,
        "post",
        lambda url, json, timeout: (told.append(json["dp_rank"]), SimpleNamespace(status_code=200))[1],
    )
    manager = Manager(system_dp_size=2, system_dp_rank=1)
    original = inspect.unwrap(CommonKVSender.__init__)
    rooms.open_room(original, object.__new__(CommonKVSender), manager, "10.0.0.1:8998", ROOM)
    assert manager.request_status == {ROOM: KVPoll.Bootstrapping}, manager.failure_records
    assert told == ([1] if method == "round_robin" else [])


def aborted(groups: int, rank: int | None, silent: Sequence[int] = ()) -> tuple[list[Any], list[Any]]:
    """Return which ranks of a prefill server are looked for, and which are told, when a request is aborted whose rank
    is known, or None. The bootstrap server does not know the ranks of the groups `silent`."""
    info = SimpleNamespace(dp_size=groups, target_cp_ranks=[0], target_tp_ranks=[2, 3], target_pp_ranks=[0])
    table, asked, told = {"10.0.0.1:8998": info} if groups else {}, [], []
    receiver = object.__new__(CommonKVReceiver)
    receiver.kv_mgr, receiver.bootstrap_addr, receiver.bootstrap_room = (
        Manager(prefill_info_table=table),
        "10.0.0.1:8998",
        ROOM,
    )
    receiver.conclude_state, receiver.abort_notified = None, False
    receiver._get_bootstrap_info_from_server = lambda *place: asked.append(place) or (
        None if place[0] in silent else place
    )
    receiver._send_abort_notification = lambda force_arm: told.extend(receiver.bootstrap_infos)
    if rank is not None:
        receiver.prefill_dp_rank, receiver.bootstrap_infos = rank, ["the rank's"]
    original = inspect.unwrap(CommonKVReceiver.ensure_abort_notified)
    receiver.ensure_abort_notified = lambda **words: ranks.tell_every_rank(original, receiver, **words)
    for _ in range(2):
        inspect.unwrap(CommonKVReceiver.abort)(receiver)
    return asked, told


def test_an_abort_is_told_to_every_rank_until_the_rank_is_known() -> None:
    """Once, though the request is aborted twice; a server that does not answer is asked once."""
    every = [(0, 0, 2, 0), (0, 0, 3, 0), (1, 0, 2, 0), (1, 0, 3, 0)]
    assert aborted(2, None) == (every, every)
    assert aborted(2, None, silent=[1]) == (every[:3], every[:2])
    assert aborted(2, None, silent=[0, 1]) == (every[:1], [])
    assert aborted(2, 1) == ([], ["the rank's"])
    assert aborted(1, None) == aborted(0, None) == ([], [])


@pytest.mark.parametrize(("groups", "kept"), [(2, 1), (1, None), (0, None)], ids=["two", "one", "not known"])
def test_the_rank_is_kept_for_a_pause(groups: int, kept: int | None) -> None:
    """The request that goes to the prefill server after the pause names the rank; SGLang's names none."""
    address = "10.0.0.1:8998"
    table = {address: SimpleNamespace(dp_size=groups)} if groups else {}
    receiver = SimpleNamespace(bootstrap_addr=address)
    request = SimpleNamespace(disagg_prefill_dp_rank=None)
    queue = SimpleNamespace(kv_manager=Manager(prefill_info_table=table))
    ranks.keep_rank(queue, SimpleNamespace(req=request, kv_receiver=receiver), 1)
    assert request.disagg_prefill_dp_rank == kept
    resolve = inspect.unwrap(DecodePreallocQueue._resolve_prefill_dp_rank)
    request.bootstrap_host, request.bootstrap_port = address.split(":")
    if kept is not None:
        assert resolve(queue, request) == kept, "nobody is asked again"
