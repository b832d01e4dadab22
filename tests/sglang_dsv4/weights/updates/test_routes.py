"""Weight updates in the process that answers clients: a busy scheduler is asked again; versions are set at the end."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import (
    EndWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)

from sglang_dsv4.seam import live
from sglang_dsv4.weights.updates import routes
from sglang_dsv4.weights.updates.routes import ABANDON, BUSY, UNCHANGED

BUSY_ANSWER = (False, f"{BUSY}: wait for them")
DONE = (True, "2 tensors of the target serve.")


class Manager(SimpleNamespace):
    """SGLang's tokenizer manager, as far as the routes use it; the scheduler gives the answers in turn."""

    def __init__(self, *answers: tuple[bool, str]) -> None:
        super().__init__()
        self.answers, self.asked, self.versions = list(answers), 0, []

    async def answer(self, manager: Any, *args: Any) -> tuple[bool, str]:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def update_weight_version(self, request: UpdateWeightVersionReqInput) -> None:
        self.versions.append(request.new_version)

    def end(self, rid: str | None = None) -> tuple[bool, str]:
        return asyncio.run(routes.end(self.answer, self, EndWeightUpdateReqInput(rid=rid), None))

    def bucket(self, version: str | None) -> UpdateWeightsFromTensorReqInput:
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], weight_version=version)
        routes.hold_version(self, request, None)
        return request


@pytest.fixture(autouse=True)
def a_server_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_answers_clients", True)
    monkeypatch.setattr(live, "_live", None)
    monkeypatch.setattr(routes, "replicas", lambda: 1)


def test_the_scheduler_is_asked_again_while_requests_run() -> None:
    manager = Manager(BUSY_ANSWER, BUSY_ANSWER, DONE)
    assert manager.end() == DONE and manager.asked == 3


def test_a_failure_is_answered_at_once() -> None:
    manager = Manager((False, "1 missing tensors"), DONE)
    assert not manager.end()[0] and manager.asked == 1


def test_it_is_asked_for_some_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "ASK_FOR_S", 0.1)
    manager = Manager(BUSY_ANSWER)
    assert manager.end() == BUSY_ANSWER and manager.asked == 2


def test_a_version_waits_for_the_end() -> None:
    manager = Manager(DONE)
    assert manager.bucket("a").weight_version is None and manager.bucket(None).weight_version is None
    assert manager.versions == []
    success, message = manager.end()
    assert success and message.endswith("Weight version updated to a.") and manager.versions == ["a"]
    assert manager.end() == DONE and manager.versions == ["a"]


def test_a_version_is_kept_while_the_update_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "ASK_FOR_S", 0.05)
    manager = Manager(BUSY_ANSWER, DONE)
    manager.bucket("b")
    assert manager.end() == BUSY_ANSWER and manager.versions == []
    assert manager.end()[0] and manager.versions == ["b"]


@pytest.mark.parametrize(("answer", "rid"), [((False, "NaN"), None), (DONE, ABANDON)], ids=["failed", "abandoned"])
def test_a_version_goes_with_its_update(answer: tuple[bool, str], rid: str | None) -> None:
    manager = Manager(answer)
    manager.bucket("c")
    manager.end(rid)
    manager.answers = [DONE]
    assert manager.end() == DONE and manager.versions == []


def test_another_model_s_versions_are_sglang_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_answers_clients", False)
    assert Manager(DONE).bucket("d").weight_version == "d"


def test_files_are_asked_for_again() -> None:
    manager = Manager((False, f"{BUSY}: wait", 0), (True, "done", 0))
    assert asyncio.run(routes.from_files(manager.answer, manager, None)) == (True, "done", 0)


@pytest.mark.parametrize(
    ("message", "asked", "warned"),
    [
        (f"{BUSY}: wait | 9 tensors serve", 100, True),
        (f"9 tensors serve | {BUSY}: wait", 100, True),
        (f"{BUSY}: wait | {BUSY}: wait", 100, False),
        (f"no file. {UNCHANGED}. | no file. {UNCHANGED}.", 1, False),
        (f"9 tensors serve | no file. {UNCHANGED}.", 1, True),
    ],
    ids=["busy first", "busy last", "both busy", "all failed", "one failed"],
)
def test_replicas_are_asked_again_while_one_is_busy(
    message: str, asked: int, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of an idle replica, which had exchanged its weights, hid that of a busy one."""
    monkeypatch.setattr(routes, "replicas", lambda: 2)
    monkeypatch.setattr(routes, "_PAUSE_S", 0.05 / 100)
    monkeypatch.setattr(routes, "ASK_FOR_S", 0.05)
    manager = Manager((False, message, 0))
    manager.is_pause = False
    success, found, _ = asyncio.run(routes.from_files(manager.answer, manager, None))
    assert not success and manager.asked == asked
    assert found.startswith(message) and ("Replicas may have other weights now" in found) is warned


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("idle_after", [0, 2, None])
def test_no_replica_of_a_paused_server_exchanges_weights_while_one_has_requests(
    idle_after: int | None, aborts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `abort_all_requests` they are aborted first."""
    monkeypatch.setattr(routes, "replicas", lambda: 2)
    monkeypatch.setattr(routes, "ASK_FOR_S", 0.2)
    manager, flushed, aborted = Manager((True, "done", 0)), [], []
    manager.is_pause = True
    manager.abort_request = lambda abort_all: aborted.append(abort_all)

    async def flush_cache() -> Any:
        assert bool(aborted) is aborts
        flushed.append(manager.asked)
        return SimpleNamespace(success=idle_after is not None and len(flushed) > idle_after)

    manager.flush_cache = flush_cache
    asked = SimpleNamespace(abort_all_requests=aborts)
    success, message, _ = asyncio.run(routes.from_files(manager.answer, manager, asked))
    assert success is (idle_after is not None) and (success or message == routes.NOT_ASKED)
    assert manager.asked == success and not any(flushed)


def test_replicas_take_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    routes.refuse_parts(None, None)
    monkeypatch.setattr(routes, "replicas", lambda: 2)
    with pytest.raises(ValueError, match=r"\(--dp-size 2\) take new weights from files only: .* --attn-dp-size"):
        routes.refuse_parts(None, None)
    monkeypatch.setattr(live, "_answers_clients", False)
    routes.refuse_parts(None, None)


def test_the_route_that_drops_an_update_is_in_the_servers_own_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """A route whose types FastAPI can't resolve leaves the server without its OpenAPI document."""
    from fastapi import FastAPI

    app, manager = FastAPI(), Manager(DONE)
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", SimpleNamespace(app=app))
    sent = []

    async def ended(request: EndWeightUpdateReqInput) -> tuple[bool, str]:
        sent.append(request.rid)
        return len(sent) == 1, "a message"

    manager.end_weight_update = ended
    routes.add_route(None, manager)
    monkeypatch.setattr(live, "_answers_clients", False)  # another model's server
    routes.add_route(None, manager)
    assert "/abandon_weight_update" in app.openapi()["paths"]
    (route,) = [route for route in app.routes if route.path == "/abandon_weight_update"]
    assert [asyncio.run(route.endpoint()).status_code for _ in range(2)] == [200, 400]
    assert sent == [ABANDON] * 2
