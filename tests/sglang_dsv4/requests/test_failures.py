"""A request that fails, in the scheduler or in the process that answers clients, ends alone and with a reason."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient
from pydantic import BaseModel, model_validator
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_dsv4.requests import failures
from sglang_dsv4.requests.failures import GuardedRequests
from sglang_dsv4.seam import live

SGLANG_ABORT = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": "the queue is full"}


class TokenizedHostileReqInput:
    """A request whose every field but the id makes its reader fail."""

    rid = "r"

    def __getattr__(self, name: str) -> None:
        raise TypeError(f"{name} is of another type")


class State(SimpleNamespace):
    """The fields of SGLang's ReqState that an abort reads."""

    def __init__(self) -> None:
        hostile = SimpleNamespace(return_logprob=True, top_logprobs_num=[1], token_ids_logprob=None, lora_path=None)
        hostile.return_text_in_logprobs = False
        super().__init__(obj=hostile, out_list=[], finished=False, event=asyncio.Event(), output_ids=[3])
        self.prompt_token_ids, self.lora_released = None, False
        self.time_stats = SimpleNamespace(set_finished_time=lambda: None, get_e2e_latency=lambda: 0.0)
        for kind in ("input_token", "output_token", "input_top", "output_top"):
            for part in ("logprobs", "logprobs_val", "logprobs_idx"):
                setattr(self, f"{kind}_{part}", [])

    def get_text(self) -> str:
        return "invented"


class Manager(TokenizerManager):
    """SGLang's own functions, without its start."""

    def __init__(self, **states: State) -> None:
        self.rid_to_state, self.aborted = dict(states), []
        self.incremental_streaming_output = self.enable_lora = False

    def config_value(self, name: str) -> str:
        return "default"

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborted.append(rid)


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sglang.srt.managers.tokenizer_manager.get_serving", lambda: SimpleNamespace(skip_tokenizer_init=True)
    )


# ---- the scheduler's guard


def test_an_abort_by_the_guard_holds_the_id_and_the_reason_only() -> None:
    def dispatcher(request: Any) -> None:
        raise TypeError("'>' not supported between instances of 'list' and 'int'")

    abort = GuardedRequests(dispatcher, lambda answer, request: None)(TokenizedHostileReqInput())
    assert isinstance(abort, AbortReq) and abort.rid == "r"
    assert {name for name in abort.__struct_fields__ if getattr(abort, name)} == {"rid", "finished_reason"}
    assert isinstance(abort.finished_reason["status_code"], HTTPStatus)  # a stream of chat compares the type


def test_it_is_answered_without_the_requests_fields() -> None:
    """SGLang compared `top_logprobs_num: [1]` with a number once more, and ended its process."""
    abort = failures.failure_of(TokenizedHostileReqInput(), TypeError("why"))
    with pytest.raises(TypeError):
        inspect.unwrap(TokenizerManager._handle_abort_req)(Manager(r=State()), abort)

    def not_asked(manager: Manager, abort: AbortReq) -> None:
        pytest.fail("SGLang's function reads the request's fields")

    state = State()
    manager = Manager(r=state, other=State())
    failures.finish_aborted(not_asked, manager, abort)
    (out,) = state.out_list
    assert out["meta_info"]["finish_reason"] == {"type": "abort", "status_code": 400, "message": "TypeError: why"}
    assert out["text"] == "" and out["output_ids"] == [] and state.finished and state.event.is_set()
    assert list(manager.rid_to_state) == ["other"]


def test_an_abort_that_sglang_can_not_answer_gets_its_reason() -> None:
    state = State()
    manager = Manager(r=state)
    abort = AbortReq(rid="r", finished_reason=SGLANG_ABORT)
    failures.finish_aborted(TokenizerManager._handle_abort_req, manager, abort)
    assert state.out_list[0]["meta_info"]["finish_reason"] == SGLANG_ABORT and state.event.is_set()
    assert not manager.rid_to_state


def test_other_aborts_are_sglangs() -> None:
    state = State()
    state.obj.return_logprob = False
    failures.finish_aborted(TokenizerManager._handle_abort_req, Manager(r=state), AbortReq(rid="r"))
    assert state.out_list[0]["text"] == "invented" and state.out_list[0]["output_ids"] == [3]
    failures.finish_aborted(TokenizerManager._handle_abort_req, Manager(), AbortReq(rid="gone"))


def test_an_output_that_can_not_be_handled_ends_its_requests_only() -> None:
    answered, failing, later, bystander = State(), State(), State(), State()

    async def handle(manager: Manager, outputs: Any) -> None:
        del manager.rid_to_state["a"]
        answered.finished = True
        answered.out_list.append({"meta_info": {"finish_reason": {"type": "length"}}})
        raise KeyError("nobody expects it")

    manager = Manager(a=answered, b=failing, c=later, d=bystander)
    asyncio.run(failures.finish_outputs(handle, manager, SimpleNamespace(rids=["a", "b", "c", "unknown"])))
    assert answered.event.is_set() and len(answered.out_list) == 1
    for state in (failing, later):
        reason = state.out_list[-1]["meta_info"]["finish_reason"]
        assert reason["status_code"] == 500 and "KeyError" in reason["message"] and state.event.is_set()
    assert manager.aborted == ["b", "c"] and list(manager.rid_to_state) == ["d"] and not bystander.event.is_set()


# ---- streams


@pytest.mark.parametrize(("status", "raises"), [(400, True), (503, False)], ids=["refused", "later"])
def test_a_refused_request_raises_in_a_stream_too(status: int, raises: bool) -> None:
    reason = {"type": "abort", "status_code": HTTPStatus(status), "message": "why"}
    out = {"text": "invented", "meta_info": {"finish_reason": reason}}
    state = State()
    state.obj.rid = "r"
    call = failures.raise_in_streams(TokenizerManager._handle_abort_finish_reason, Manager(r=state), out, state, True)
    if raises:
        with pytest.raises(ValueError, match="why"):
            asyncio.run(call)
    else:
        assert asyncio.run(call) is out


async def answer_of(*chunks: bytes) -> tuple[Any, list[bytes], bool]:
    """Return the answer of `refuse_stream` to a stream, the chunks that a client reads, and whether it was closed."""
    closed = False

    async def stream() -> AsyncIterator[bytes]:
        nonlocal closed
        try:
            for chunk in chunks:
                yield chunk
        finally:
            closed = True

    async def route(obj: object, request: object) -> StreamingResponse:
        return StreamingResponse(stream())

    response = await failures.refuse_streams(route, None)(None, None)
    read = [chunk async for chunk in response.body_iterator] if isinstance(response, StreamingResponse) else []
    return response, read, closed


def test_a_stream_that_begins_with_an_error_is_an_error() -> None:
    error = b'data: {"error": {"message": "why", "code": 400}}\n\n'
    response, _, closed = asyncio.run(answer_of(error, b"data: [DONE]\n\n"))
    assert isinstance(response, JSONResponse) and response.status_code == 400 and b"why" in response.body and closed


@pytest.mark.parametrize(
    "chunks",
    [(), (b'data: {"text":"a"}\n\n', b'data: {"error": {"message": "why", "code": 400}}\n\n'), (b'data: {"error":1}',)],
    ids=["empty", "an-error-after-an-output", "an-error-without-a-status"],
)
def test_other_streams_are_passed_on(chunks: tuple[bytes, ...]) -> None:
    if chunks == (b'data: {"error":1}',):
        chunks = (b'data: {"error": {"message": "why"}}\n\n',)
    _, read, closed = asyncio.run(answer_of(*chunks))
    assert read == list(chunks) and closed


def test_a_route_is_wrapped_once() -> None:
    async def route(obj: object, request: object) -> None: ...

    wrapped = failures.refuse_streams(route, None)
    assert failures.refuse_streams(wrapped, None) is wrapped


# ---- bodies that SGLang's validators can't read


class Body(BaseModel):
    value: int = 0

    @model_validator(mode="before")
    @classmethod
    def read(cls, values: Any) -> Any:
        format = values.get("format")  # as ChatCompletionRequest.set_json_schema reads `response_format`
        return {**values, "value": format.get("value", 0)}


UNREADABLE: tuple[tuple[Any, str], ...] = (
    ({"format": "text", "value": 5}, "format can't be read, got 'text': AttributeError: 'str' object"),
    ({"format": ["a"]}, "format can't be read, got ['a']: AttributeError"),
    ({}, "The body can't be read: AttributeError"),
    ([1], "The body can't be read, got [1]: AttributeError"),
)


def test_a_body_that_a_validator_can_not_read_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()

    @app.post("/read")
    def read(body: Body) -> int:
        if body.value == 1:
            raise AttributeError("a fault of the server")
        if body.value == 2:
            raise ValueError("a parser that does not exist")
        if body.value == 4:
            GenerateReqInput(**{"text": "a", "type": "b"})  # as /vertex_generate
        return body.value

    @app.post("/read_raw")
    async def read_raw(request: Request) -> None:
        body = await request.json()  # as /remove_external_corpus
        assert not body.get("corpus_id"), body["of"]["this"]

    server = SimpleNamespace(app=app, serve_generate_request=lambda obj, request: None)
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", server)
    monkeypatch.setattr(live, "_answers_clients", False)
    for architectures, expected in ((["LlamaForCausalLM"], 500), (["DeepseekV4ForCausalLM"], 400)):
        config = SimpleNamespace(hf_config=SimpleNamespace(architectures=architectures))
        app.middleware_stack = None  # built again with the new handlers
        failures.note_model_and_answer_errors(None, SimpleNamespace(model_config=config))  # type: ignore[arg-type]
        client = TestClient(app, raise_server_exceptions=False)
        for body, named in UNREADABLE:
            response = client.post("/read", json=body)
            assert response.status_code == expected, body
            assert expected == 500 or response.json()["error"]["message"].startswith(named)
        assert client.post("/read", json={"format": {"value": 1}}).status_code == 500  # not the client's fault
        assert client.post("/read", json={"format": {"value": 2}}).status_code == expected
        assert client.post("/read", json={"format": {"value": 3}}).json() == 3
        assert client.post("/read", json={"format": {"value": 4}}).status_code == expected
        raw = client.post("/read_raw", json=[1])
        assert raw.status_code == expected and (expected == 500 or "The body can't be read, got [1]" in raw.text)
        assert client.post("/read_raw", json={"corpus_id": 1}).status_code == 500  # a KeyError of the route
        assert client.post("/read_raw", content=b"{").status_code == expected
