"""A stand-in for a server: SGLang's /generate, answered greedily from a function's logits. It has no cache."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from lib.quality_figures import scores_of
from torch import Tensor

Logits = Callable[[Tensor], Tensor]
"""Logits [tokens, vocab] fp32 of token ids [tokens] int64."""


def entries(logprobs: Tensor, tokens: Tensor) -> tuple[list[Any], list[Any]]:
    """Return SGLang's lists for the tokens after the first: of each, and of the likeliest ones in its place."""
    scores = scores_of(logprobs, tokens)
    own = [[value, int(token), None] for value, token in zip(scores.own.tolist(), tokens[1:], strict=True)]
    pairs = zip(scores.top.tolist(), scores.top_ids.tolist(), strict=True)
    return own, [[[value, at, None] for value, at in zip(*row, strict=True)] for row in pairs]


def answer(logits: Logits, body: dict[str, Any], cached: int) -> dict[str, Any]:
    """Return the JSON answer to a request; `cached` is the number of tokens that are reported as found in a cache."""
    prompt, start = torch.tensor(body["input_ids"]), body["logprob_start_len"]
    tokens = prompt
    for _ in range(body["sampling_params"]["max_new_tokens"]):
        tokens = torch.cat([tokens, logits(tokens)[-1:].argmax(-1)])
    logprobs = logits(tokens).log_softmax(-1)
    info: dict[str, Any] = {"cached_tokens": cached if start > 0 else 0}
    last = len(prompt) - 1
    info["output_token_logprobs"], info["output_top_logprobs"] = entries(logprobs[last:], tokens[last:])
    if start >= 0:
        own, top = entries(logits(prompt).log_softmax(-1)[start:], prompt[start:])
        info["input_token_logprobs"] = [[None, int(prompt[start]), None], *own]
        info["input_top_logprobs"] = [None, *top]
    return {"output_ids": tokens[len(prompt) :].tolist(), "meta_info": info}


@contextmanager
def served(logits: Logits, cached: int = 0) -> Iterator[str]:
    """Serve these logits; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            data = json.dumps(answer(logits, json.loads(body), cached) if body else {}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
