"""A request that fails ends alone: the server goes on, and the client gets the reason.

The scheduler. If a request's handler raises, its dispatcher answers with the error. The answer holds the request's id
and the reason only: a field that made this handler fail could make the next process fail, too.

The process that answers clients. SGLang's loop there handles the outputs of all requests, and an error in it ends the
server:

* an abort by the scheduler's dispatcher becomes an answer without log-probabilities, which SGLang would collect by the
  request's own fields;
* an output that can't be handled ends the requests of that output with a 500.

Streams. SGLang answers a refused request with status 200, the token that it computes for the request, and then the
error. Here the status is 400, as without `stream`, unless the client has already received output.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang_dsv4.requests.refused import administration
from sglang_dsv4.seam import live
from sglang_dsv4.seam.hooks import DISPATCHER
from sglang_dsv4.seam.install import set_attribute
from sglang_dsv4.seam.rows.clients import GENERATE_ROUTE

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

logger = logging.getLogger(__name__)

FAILED = "sglang_dsv4: failed: "
"""Prefix of the `rid` in the answer to a control request whose handler raised; the reason follows it."""
BY_GUARD = "dsv4_guard"
"""Key in the `finished_reason` of an abort that :func:`failure_of` made."""
UNKNOWN_NAME = re.compile(r"GenerateReqInput(\.__init__)?\(\) got ")
READING_ERRORS = (AttributeError, TypeError, KeyError, IndexError, RecursionError, OverflowError)
"""Errors of SGLang's validators, which expect an object where a body has another value."""

# ------------------------------------------------------------------------------ the scheduler


class GuardedRequests:
    """A scheduler's dispatcher that answers a request with the reason if its handler raises."""

    def __init__(self, dispatcher: Callable[[Any], Any], answer: Callable[[Any, Any], None]) -> None:
        """Guard a dispatcher.

        Args:
            dispatcher: SGLang's; request -> its answer, or None.
            answer: sends an answer to the client of a request.
        """
        self._dispatcher, self._answer = dispatcher, answer

    def __call__(self, request: Any) -> Any:
        """The answer of SGLang's dispatcher, or an answer with the error."""
        if type(request).__name__.startswith("BatchTokenized"):  # each request alone, as in SGLang's handler
            for one in request:
                self._send(self(one), one)
            return None
        try:
            administration.check(request)
            return self._dispatcher(request)
        except Exception as error:
            logger.exception("%s failed; the server goes on", type(request).__name__)
            return failure_of(request, error)

    def _send(self, answer: Any, request: Any) -> None:
        if answer is not None:
            self._answer(answer, request)

    def __getattr__(self, name: str) -> Any:
        """An attribute of SGLang's dispatcher, to which SGLang adds handlers."""
        return getattr(self._dispatcher, name)


def start(result: None, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler.__init__``: guard the dispatcher."""
    if live.live_parts() is not None:
        set_attribute(scheduler, DISPATCHER)


def guard(dispatcher: Callable[[Any], Any], scheduler: Scheduler) -> GuardedRequests:
    """The value of ``Scheduler._request_dispatcher``: SGLang's dispatcher, guarded."""
    return GuardedRequests(dispatcher, scheduler.send_control_output)


def failure_of(request: object, error: Exception) -> object | None:
    """An answer of the type that the request expects, which holds only the error; None if it expects no answer."""
    import msgspec
    from sglang.srt.managers import io_struct

    name = type(request).__name__
    reason = f"{type(error).__name__}: {error}"
    if name.startswith("Tokenized"):
        status = HTTPStatus.BAD_REQUEST  # SGLang's streams compare the type of a status
        return io_struct.AbortReq(
            rid=request.rid, finished_reason={"type": "abort", "status_code": status, "message": reason, BY_GUARD: True}
        )
    answer_type = getattr(io_struct, re.sub(r"(Req)(Input)?$", r"\1Output", name), None)
    if answer_type is None or answer_type is type(request):
        return None
    values: dict[str, object] = {"rid": FAILED + reason}
    for field in msgspec.structs.fields(answer_type):
        kind = getattr(field.type, "__origin__", field.type)
        if "message" in field.name:
            values[field.name] = reason
        elif field.required:
            values[field.name] = kind() if kind in (bool, int, float, str, list, dict) else None
    return answer_type(**values)


# ------------------------------------------------------------------------------ the process that answers clients


async def raise_failures(
    original: Callable[[Any, Any], Awaitable[list]], communicator: object, request: object
) -> list:
    """The scheduler's answers to a control request; a request that failed in the scheduler gets a 400.

    Runs around ``FanOutCommunicator.__call__``.

    Raises:
        HTTPException: 400, with the reason.
    """
    from fastapi import HTTPException

    answers = await original(communicator, request)
    for answer in answers:
        reason = getattr(answer, "rid", None)
        if isinstance(reason, str) and reason.startswith(FAILED):
            raise HTTPException(400, reason.removeprefix(FAILED))
        if type(answer).__name__ == "ProfileReqOutput" and not answer.success:
            raise HTTPException(400, answer.message)
    return answers


def finish_aborted(
    original: Callable[[TokenizerManager, AbortReq], None], manager: TokenizerManager, abort: AbortReq
) -> None:
    """End an aborted request; runs around ``TokenizerManager._handle_abort_req``.

    SGLang's answer holds the log-probabilities so far. An abort by our guard, and an abort that SGLang fails to answer,
    get the reason only.
    """
    reason = abort.finished_reason or {}
    state = manager.rid_to_state.get(abort.rid)
    if state is None or not reason.get(BY_GUARD):
        try:
            return original(manager, abort)
        except Exception:
            logger.exception("The abort of request %s could not be answered in full; the server goes on", abort.rid)
    if state is not None:
        end(manager, abort.rid, state, {name: value for name, value in reason.items() if name != BY_GUARD})
    return None


def end(manager: TokenizerManager, rid: str, state: ReqState, reason: dict[str, Any]) -> None:
    """Answer a request with a reason alone, and forget it."""
    state.finished = True
    state.out_list.append(
        {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "id": rid,
                "finish_reason": reason or {"type": "abort", "message": "The request was aborted."},
                "completion_tokens": 0,
                "output_token_logprobs_length": 0,
            },
        }
    )
    if manager.rid_to_state.get(rid) is state:
        del manager.rid_to_state[rid]
    state.event.set()


async def finish_outputs(
    original: Callable[[TokenizerManager, Any], Awaitable[None]], manager: TokenizerManager, outputs: Any
) -> None:
    """Handle the outputs of a step; if that fails, end their requests with a 500.

    Runs around ``TokenizerManager._handle_batch_output``. A failure here is a fault of the server. SGLang handles the
    requests in one loop, so the one that caused the failure is unknown.
    """
    states = {rid: manager.rid_to_state.get(rid) for rid in outputs.rids}
    try:
        await original(manager, outputs)
    except Exception as error:
        logger.exception("The outputs of %d requests could not be handled; the server goes on", len(states))
        reason = {"type": "abort", "status_code": HTTPStatus.INTERNAL_SERVER_ERROR}
        reason["message"] = f"This server failed to handle an output. {type(error).__name__}: {error}"
        for rid, state in states.items():
            if state is None:
                continue
            if state.out_list and state.out_list[-1]["meta_info"].get("finish_reason"):  # it was answered in full
                state.event.set()
                continue
            manager.abort_request(rid)
            end(manager, rid, state, reason)


async def raise_in_streams(
    original: Callable[..., Awaitable[dict | None]], manager: TokenizerManager, out: dict, state: ReqState, stream: bool
) -> dict | None:
    """Raise for a refused request in a stream, too; runs around ``TokenizerManager._handle_abort_finish_reason``.

    Raises:
        ValueError: the reason. SGLang would send the token that it computed, and the reason after it.
    """
    refused = out["meta_info"]["finish_reason"].get("status_code") == HTTPStatus.BAD_REQUEST
    return await original(manager, out, state, stream and not refused)


def refuse_streams(route: Callable[..., Awaitable[Any]], server: object) -> Callable[..., Awaitable[Any]]:
    """The value of ``http_server.serve_generate_request``: SGLang's function, then :func:`refuse_stream`."""
    if isinstance(route, functools.partial) and route.func is refuse_stream:  # this process has had a server before
        return route
    return functools.partial(refuse_stream, route)


async def refuse_stream(route: Callable[..., Awaitable[Any]], obj: Any, request: Any) -> Any:
    """The answer to ``/generate``; a stream that begins with an error becomes an error with that status."""
    response = await route(obj, request)
    chunks = getattr(response, "body_iterator", None)
    if chunks is None:
        return response
    first = await anext(chunks, None)
    error = error_in(first)
    if error is not None:
        from fastapi.responses import JSONResponse

        await chunks.aclose()
        return JSONResponse({"error": error}, error["code"])
    response.body_iterator = _all_of(first, chunks)
    return response


def error_in(chunk: bytes | None) -> dict[str, Any] | None:
    """The error that a chunk of ``/generate``'s stream holds, with its status as `code`; None if it holds an output."""
    if chunk is None or not chunk.startswith(b'data: {"error":'):
        return None
    error = json.loads(chunk.removeprefix(b"data: "))["error"]
    return error if isinstance(error.get("code"), int) and 400 <= error["code"] < 600 else None


async def _all_of(first: bytes | None, rest: Any) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(rest):
        if first is not None:
            yield first
        async for chunk in rest:
            yield chunk


def note_model_and_answer_errors(result: None, manager: TokenizerManager, *args: object, **kwargs: object) -> None:
    """Note whether this process answers for a DeepSeek-V4 model; if so, answer 400 to bodies that SGLang can't read.

    Runs after ``TokenizerManager.__init__``.
    """
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if live.note_clients_model(manager.model_config.hf_config.architectures) and server is not None:
        set_attribute(server, GENERATE_ROUTE)
        server.app.add_exception_handler(ValueError, _bad_request)
        for error in READING_ERRORS:
            server.app.add_exception_handler(error, _bad_body)


async def _bad_request(request: Any, error: Exception) -> object:
    from fastapi.responses import JSONResponse

    logger.warning("%s is answered with 400: %s", request.url.path, error, exc_info=error)
    return JSONResponse({"error": {"message": str(error)}}, 400)


async def _bad_body(request: Any, error: Exception) -> object:
    """A 400 for an error that SGLang's validators raised while they read a body; a route's error is raised again."""
    if UNKNOWN_NAME.search(str(error)):  # `/vertex_generate` passes the names in a body on as arguments
        return await _bad_request(request, ValueError(f"The body has a name that no request has: {error}"))
    field = field_that_failed(error)
    if is_from_a_route(error) and (field is None or field[0] != "The body"):  # some routes read the body themselves
        raise error
    what = "The body can't be read" if field is None else f"{field[0]} can't be read, got {field[1]!r:.100}"
    return await _bad_request(request, ValueError(f"{what}: {type(error).__name__}: {error}"))


def field_that_failed(error: Exception) -> tuple[str, object] | None:
    """Name and value of the field that a validator was reading; None if it was reading no field.

    A validator that runs before pydantic's own has the whole body as `values`, and the field under its own name; a
    route that reads the body itself has it as `body`.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    known = {} if traceback is None else traceback.tb_frame.f_locals
    name = next((name for name in ("values", "body") if name in known), None)
    body = None if name is None else known[name]
    if not isinstance(body, dict):
        in_json = body is None or isinstance(body, (list, str, int, float))
        return ("The body", body) if name is not None and in_json else None
    return next(((name, value) for name, value in body.items() if known.get(name, body) is value), None)


def is_from_a_route(error: Exception) -> bool:
    """Whether an error was raised after FastAPI had read the request and called the route's function."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name == "run_endpoint_function":
            return True
        traceback = traceback.tb_next
    return False
