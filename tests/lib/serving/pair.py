"""A prefill server and a decode server on loopback, and requests that are sent to both, as a router does."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from serving.server import SLEEP_ON_IDLE, Server, free_port, running_server

HOST = "127.0.0.1"
TRANSFER = ("--disaggregation-transfer-backend", "mooncake_tcp")
NIXL = ("--disaggregation-transfer-backend", "nixl")  # after `TRANSFER` it counts
needs_nixl = pytest.mark.skipif(
    find_spec("nixl") is None, reason="needs NIXL: pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1"
)
# The address by which SGLang's processes find each other; without it they ask for a route to the internet.
ENV = {"SGLANG_HOST_IP": HOST}
_rooms = itertools.count(1)


@dataclass
class Pair:
    """Two servers, and the port at which the decode server finds the prefill server."""

    prefill: Server
    decode: Server
    bootstrap_port: int
    answers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(32))

    def generate(self, input_ids: list[int], **sampling_params: Any) -> dict[str, Any]:
        """Return the decode server's result of SGLang's own endpoint, greedy by default, with the log-probability of
        each output token."""
        response = self.post(input_ids, **sampling_params)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, input_ids: list[int], rid: str | None = None, **sampling_params: Any) -> requests.Response:
        """Send a request to both servers; return the decode server's response."""
        response, at_prefill = self.both(input_ids, rid, **sampling_params)
        if response.status_code == 200:
            assert at_prefill.result().status_code == 200, at_prefill.result().text
        return response

    def both(
        self, input_ids: list[int], rid: str | None = None, **sampling_params: Any
    ) -> tuple[requests.Response, Future[requests.Response]]:
        """Send a request to both servers; return the decode server's response, and the prefill server's to come."""
        return self.send(self.body(input_ids, rid, **sampling_params))

    def send(self, body: dict[str, Any]) -> tuple[requests.Response, Future[requests.Response]]:
        """The same for the body of a request."""
        at_prefill = self.answers.submit(requests.post, f"{self.prefill.url}/generate", json=body, timeout=300)
        return requests.post(f"{self.decode.url}/generate", json=body, timeout=300), at_prefill

    def body(self, input_ids: list[int], rid: str | None = None, **sampling_params: Any) -> dict[str, Any]:
        """Return a request in a new room."""
        sampling_params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True, **sampling_params}
        body = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True, "rid": rid}
        return body | self.room()

    def room(self) -> dict[str, Any]:
        """Return the fields by which both servers know a request."""
        return {"bootstrap_host": HOST, "bootstrap_port": self.bootstrap_port, "bootstrap_room": next(_rooms)}


class Address(NamedTuple):
    url: str


@contextmanager
def one_address(pair: Pair) -> Iterator[Address]:
    """Yield an address whose POST /generate is the pair's: the decode server's answer, with the prefill server's
    log-probabilities of the prompt's tokens."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            response, at_prefill = pair.send(body | pair.room())
            status, data = response.status_code, response.content
            if status == 200:
                prompt, result = at_prefill.result().json()["meta_info"], response.json()
                result["meta_info"] |= {name: of for name, of in prompt.items() if name.startswith("input_")}
                data = json.dumps(result).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer((HOST, 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield Address(f"http://{HOST}:{server.server_address[1]}")
    finally:
        server.shutdown()
        server.server_close()


class Served(NamedTuple):
    """A prefill and a decode server, and one server with the same flags, whose answers they must give."""

    pair: Pair
    one: Server
    kind: str


def words_of(side: str, bootstrap_port: int) -> tuple[str, ...]:
    """Return the flags of a side, `prefill` or `decode`."""
    mode = ("--disaggregation-mode", side, "--disaggregation-bootstrap-port", str(bootstrap_port))
    return (*mode, *TRANSFER, SLEEP_ON_IDLE, "--host", HOST)


@contextmanager
def started_side(
    checkpoint: Path, log: Path, side: str, bootstrap_port: int, *flags: str, env: dict[str, str] | None = None
) -> Iterator[Server]:
    """Start one side, yield it once it answers, and stop it."""
    words = (*words_of(side, bootstrap_port), *flags)
    with running_server(checkpoint, log, *words, env=ENV | (env or {})) as server:
        yield server


@contextmanager
def running_pair(
    checkpoint: Path,
    folder: Path,
    *flags: str,
    prefill: tuple[str, ...] = (),
    decode: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    decode_env: dict[str, str] | None = None,
) -> Iterator[Pair]:
    """Start both servers at the same time, yield them once they answer, and stop them. The logs are in `folder`.

    Args:
        flags: of both servers.
        prefill, decode: further flags of each.
        env: environment of both.
        decode_env: further environment of the decode server.
    """
    port = free_port()
    sides = (("prefill", prefill, {}), ("decode", decode, decode_env or {}))
    with ExitStack() as stack, ThreadPoolExecutor(2) as starting:

        def begin(side: str, further: tuple[str, ...], own: dict[str, str]) -> Server:
            one = started_side(checkpoint, folder / side, side, port, *flags, *further, env=(env or {}) | own)
            return stack.enter_context(one)

        first, second = [starting.submit(begin, *side) for side in sides]
        yield Pair(first.result(), second.result(), port)
