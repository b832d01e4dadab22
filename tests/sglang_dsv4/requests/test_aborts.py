"""An abort ends the request that it names, in every queue of SGLang's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dsv4.requests import aborts
from sglang_dsv4.seam import live

IDS = ("a", "ab", "a_0", "a_1", "a_12", "a_1_0", "a_", "a_x", "b", "ba")


class Queues:
    """SGLang's scheduler as its `abort_request` sees it, with requests of the same ids in each queue."""

    def __init__(self, ids: tuple[str, ...]) -> None:
        from sglang.srt.constrained.grammar_manager import GrammarManager
        from sglang.srt.disaggregation.utils import DisaggregationMode

        def some() -> list[Any]:
            return [Request(rid) for rid in ids]

        self.waiting_queue, self.in_grammar, self.running = some(), some(), some()
        self.chunked_req = Request(ids[-1])
        self._pending_chunked_abort_req = self.mm_receiver = self.dllm_config = None
        self.disaggregation_mode = DisaggregationMode.NULL
        self.disagg_prefill_bootstrap_queue = self.disagg_decode_prealloc_queue = None
        self.beam_coordinator = SimpleNamespace(retire_group=lambda request: None)
        grammars = SimpleNamespace(grammar_queue=self.in_grammar)
        grammars.abort_requests = lambda abort: GrammarManager.abort_requests(grammars, abort)
        self.grammar_manager = grammars
        self.answered: list[str] = []

    def _release_aborted_request(self, request: Any) -> None:
        pass

    def send_abort_output(self, abort: Any, request: Any) -> None:
        self.answered.append(abort.rid)

    def collect_inflight_reqs(self) -> set[Any]:
        return set(self.running)

    def ended(self) -> list[tuple[str, ...]]:
        """Ids of the requests that were ended: waiting, waiting for a grammar, running; and of the chunked one."""
        in_grammar = (request.rid for request in self.in_grammar if request.refused)
        running = (request.rid for request in self.running if request.to_finish is not None)
        chunked = self._pending_chunked_abort_req
        return [
            *(tuple(sorted(ids)) for ids in (self.answered, in_grammar, running)),
            () if chunked is None else (chunked.rid,),
        ]


class Request:
    def __init__(self, rid: str) -> None:
        self.rid, self.refused, self.to_finish, self.grammar = rid, "", None, None
        self.kv, self.finished_reason, self.weight_versions = SimpleNamespace(holds_mamba=False), None, None

    def finished(self) -> bool:
        return False

    def set_finish_with_abort(self, reason: str) -> None:
        self.refused = reason

    def __getattr__(self, name: str) -> Any:  # what SGLang reads for the answer
        return None


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, ...]]]:
    """Ids that SGLang's own method ends, with the plugin's hook around it."""
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    original = scheduler.Scheduler.abort_request
    while hasattr(original, "__wrapped__"):
        original = original.__wrapped__
    hooked = _wrap_fn(original, aborts.end_the_request, HookType.AROUND)
    monkeypatch.setattr(live, "_live", object())
    monkeypatch.setattr(scheduler, "_make_abort_req", lambda request, **kwargs: SimpleNamespace(rid=request.rid))

    def end(rid: str = "", ids: tuple[str, ...] = IDS, abort_all: bool = False) -> list:
        queues = Queues(ids)
        hooked(queues, AbortReq(rid=rid, abort_all=abort_all))
        left = {request.rid for request in (*queues.waiting_queue, *queues.in_grammar, *queues.running)}
        assert not any(aborts.HIDDEN in rid for rid in left)
        return queues.ended()

    return end


@pytest.mark.parametrize("rid", IDS)
def test_the_request_with_this_id_ends(end: Callable[..., Any], rid: str) -> None:
    """Every id is aborted; most ids are beginnings of others. SGLang alone ends six further requests with `a`."""
    assert end(rid) == [(rid,)] * 3 + [("ba",) if rid == "ba" else ()]


def test_an_unknown_id_ends_no_request(end: Callable[..., Any]) -> None:
    """The request may have ended meanwhile; `a` is also the id of a batch whose entries the client names one by one."""
    assert end("a", IDS[1:]) == [(), (), (), ()]
    assert end("z") == [(), (), (), ()]


def test_all_requests_end(end: Callable[..., Any]) -> None:
    assert end(abort_all=True) == [tuple(sorted(IDS))] * 3 + [("ba",)]


def test_another_models_requests_are_left_to_sglang(end: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_live", None)
    assert end("ab", ("ab", "abc"))[0] == ("ab", "abc")


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("rid", IDS)
def test_between_servers_the_request_with_this_id_ends(
    monkeypatch: pytest.MonkeyPatch, end: Callable[..., Any], side: str, rid: str
) -> None:
    """Requests wait for the other server, travel, or have given up their pages."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers import scheduler

    ended: list[list[str]] = [[], [], []]
    made: list[Any] = []

    def transfer(queue: int, name: str) -> Any:
        return SimpleNamespace(abort=lambda: ended[queue].append(name))

    class Between(Queues):
        def __init__(self, ids: tuple[str, ...]) -> None:
            super().__init__(ids)
            self.waiting_queue.clear()
            self.disaggregation_mode = DisaggregationMode(side)
            queues = [[Request(name) for name in ids] for _ in range(3)]
            if side == "prefill":
                for place, queue in enumerate(queues[:2]):
                    for request in queue:
                        request.disagg_kv_sender = transfer(place, request.rid)
                self.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=queues[0])
                self.disagg_prefill_inflight_queue = queues[1]
            else:
                arriving = [
                    [
                        SimpleNamespace(req=request, kv_receiver=transfer(place, request.rid), host_staged=False)
                        for request in queue
                    ]
                    for place, queue in enumerate(queues[:2])
                ]
                held = [Request(name) for name in ids]
                self.disagg_decode_prealloc_queue = SimpleNamespace(
                    queue=arriving[0], retracted_queue=queues[2], held_rebootstrap_reqs=held
                )
                made.append(self)
                self.disagg_decode_transfer_queue = SimpleNamespace(queue=arriving[1])
                self.tree_cache = None

    monkeypatch.setattr(scheduler, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    monkeypatch.setattr(scheduler, "get_disagg", lambda: SimpleNamespace(disaggregation_decode_retraction_backup="x"))
    monkeypatch.setattr(scheduler, "discard_kv_cache_backup", lambda request, *_: ended[2].append(request.rid))
    monkeypatch.setitem(globals(), "Queues", Between)
    _, in_grammar, running, _ = end(rid)
    assert in_grammar == running == (rid,)
    assert ended == [[rid], [rid], [rid, rid] if side == "decode" else []], "retracted by this server, and by a pause"
    for queues in made:
        prealloc = queues.disagg_decode_prealloc_queue
        left = [request.rid for request in (*prealloc.retracted_queue, *prealloc.held_rebootstrap_reqs)]
        assert sorted(left) == sorted(2 * [name for name in IDS if name != rid]), "others go on after the pause"
        assert len(prealloc.held_rebootstrap_reqs) == len(IDS) - 1
