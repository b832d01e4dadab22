"""An abort ends the request that it names, on a server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import requests
from serving.server import Server

TOKENS = 150


def test_a_request_survives_the_abort_of_a_request_whose_id_begins_its_own(server: Server) -> None:
    """SGLang ended all three: the ids of two of them begin with the first's."""

    def ask(rid: str) -> dict:
        body = {"input_ids": [5, 6, 7], "rid": rid}
        body["sampling_params"] = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        return requests.post(f"{server.url}/generate", json=body, timeout=300).json()["meta_info"]

    with ThreadPoolExecutor(3) as pool:
        given = {rid: pool.submit(ask, rid) for rid in ("client-1", "client-12", "client-1_0")}
        while not given["client-1"].done():  # it may not have arrived yet
            requests.post(f"{server.url}/abort_request", json={"rid": "client-1"}, timeout=60)
            requests.get(f"{server.url}/health", timeout=60)
        ends = {rid: answer.result() for rid, answer in given.items()}
    assert ends["client-1"]["finish_reason"]["type"] == "abort"
    for rid in ("client-12", "client-1_0"):
        assert ends[rid]["finish_reason"]["type"] == "length", ends[rid]
        assert ends[rid]["completion_tokens"] == TOKENS
