"""Changes of SGLang's behaviour on a CPU: the loop of its data-parallel controller."""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
import zmq
from sglang.srt.managers.data_parallel_controller import DataParallelController
from sglang.srt.managers.io_struct import FlushCacheReqInput, sock_send

from sglang_dsv4.cpu import overrides


class EndOfTest(Exception):
    """Ends the controller's endless loop."""


def test_the_controller_waits_for_requests_and_misses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own loop, which turned thousands of times a second; a request ends a wait, also of ten seconds."""
    monkeypatch.setattr(overrides, "WAIT_MS", 10_000)
    turns, taken = deque(), []
    with zmq.Context() as context, context.socket(zmq.PUSH) as client, context.socket(zmq.PULL) as inbox:
        port = inbox.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")
        client.setsockopt(zmq.LINGER, 0)

        def take(request: object) -> None:
            taken.append(request)
            if len(taken) == 4:
                raise EndOfTest

        controller = SimpleNamespace(
            recv_from_tokenizer=inbox,
            soft_watchdog=SimpleNamespace(feed=lambda: turns.append(1)),
            _request_dispatcher=take,
        )
        overrides.wait_for_requests(controller)
        for delay in (0.2, 0.2, 0.2, 0.3):
            threading.Timer(delay, sock_send, (client, FlushCacheReqInput())).start()
        begin = time.monotonic()
        with pytest.raises(EndOfTest):
            inspect.unwrap(DataParallelController.event_loop)(controller)
    assert all(isinstance(request, FlushCacheReqInput) for request in taken)
    assert time.monotonic() - begin < 5
    assert len(turns) < 12
