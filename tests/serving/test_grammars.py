"""Grammars that take long to compile, through a server: each kind ends at the limit, and other requests are served."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from serving.server import SLEEP_ON_IDLE, Server, running_server

from sglang_dsv4.requests.refused import grammars

FLAGS = ("--max-total-tokens", "3072", "--max-running-requests", "6", SLEEP_ON_IDLE)
LIMIT_S = 3
SIZES = range(100, 400)
SLOW_SCHEMA = {"anyOf": [{"type": "string", "minLength": n, "maxLength": 10 * n} for n in SIZES for _ in range(3)]}
SLOW = {
    "json_schema": json.dumps(SLOW_SCHEMA),
    "regex": "|".join(f"([a-z]{{1,{n}}}-){{1,{n}}}" for n in SIZES),
    "structural_tag": json.dumps(
        {
            "structures": [{"begin": "<a>", "schema": SLOW_SCHEMA, "end": "</a>"}],
            "triggers": ["<a>"],
        }
    ),
    "ebnf": "root ::= " + " | ".join(f'([a-z]{{1,{n}}} "-"){{1,{n}}}' for n in SIZES),
}
"""Some kilobytes each, whose compilations take minutes."""


def asked(server: Server, **sampling: Any) -> tuple[requests.Response, float]:
    """The answer to a request, and its seconds."""
    begin = time.monotonic()
    body = {"input_ids": [0, 300, 301], "sampling_params": {"max_new_tokens": 8, "temperature": 0, **sampling}}
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    return response, time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kinds"), [(1, tuple(SLOW)), (2, ("json_schema", "regex"))], ids=["tp-1", "tp-2"])
def test_slow_grammars_end_at_the_limit_beside_other_requests(
    ranks: int, kinds: tuple[str, ...], checkpoint: Path, tmp_path: Path
) -> None:
    """Two ranks compile each for itself; would they decide differently, the server would hang."""
    env, flags = {grammars.SECONDS: str(LIMIT_S)}, (*FLAGS, "--tp-size", str(ranks))
    with running_server(checkpoint, tmp_path / "log", *flags, env=env) as server, ThreadPoolExecutor(1) as pool:
        alone = max(asked(server)[1] for _ in range(5))
        assert asked(server, regex="yes|no")[0].json()["text"] in ("yes", "no")
        reasons = {}
        for kind in kinds:
            grammar = SLOW[kind]
            slow = pool.submit(asked, server, **{kind: grammar})
            beside = []
            while not slow.done():
                beside.append(asked(server)[1])
            response, seconds = slow.result()
            assert response.status_code == 400 and seconds < LIMIT_S + 15
            reasons[kind] = response.json()["error"]["message"]
            assert grammars.SECONDS in reasons[kind]
            assert max(beside) < 2 + 10 * alone, (kind, alone, beside)
            again, seconds = asked(server, **{kind: grammar})
            assert again.json()["error"]["message"] == reasons[kind] and seconds < 2 + 10 * alone
        assert "takes longer than" in reasons["json_schema"]
        assert asked(server, regex="yes|no")[0].json()["text"] in ("yes", "no")  # compiled before
        assert server.is_alive()
