"""Servers with the flags of `docs/server_flags.toml` that work, a set at a time, and with all that have no effect.

Every server answers the same requests, alone and in batches, cold and after hits, with the bits of a server without
the flags (`lib.determinism_trace`); only sets that change the model's numbers have references of their own. `CHECKS`
then tests the purpose of the flags.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from documents import server_flags
from lib import determinism_trace
from lib.determinism_trace import References, Sizes
from serving import speculation
from serving.server import (
    SLEEP_ON_IDLE,
    TAILS,
    Server,
    flush,
    free_port,
    output_logprobs,
    running_server,
    start,
    stop,
    wait_until,
)
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from sglang_dsv4.cpu.random_checkpoint import write_checkpoint

POOL_TOKENS = 3072
MAX_RUNNING = 6
FLAGS = ("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(MAX_RUNNING), SLEEP_ON_IDLE)
FLAGS += ("--chunked-prefill-size", "256")
SIZES = Sizes(
    lengths=(5, 520),
    new_tokens=6,
    batches=(4,),
    pool_tokens=POOL_TOKENS,
    displaced=0,
    requests=30,
    at_once=8,
    longest=400,
)
OWN_NUMBERS = ("formats", "other weights")
"""Sets whose flags change the model's numbers."""
TIMEOUT_S = 300


LINES = server_flags.command_lines()


@pytest.fixture(scope="module")
def known(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    """Cold answers of a server without the flags, after a proof that its answers have the same bits in every batch."""
    references: References = {}
    with running_server(checkpoint, tmp_path_factory.mktemp("plain") / "log", *FLAGS, env=TAILS) as server:
        found = determinism_trace.prove(server.url, SIZES, references)
    assert not found.mismatches, "\n".join(determinism_trace.describe(found))
    return references


def filled(words: list[str], checkpoint: Path, folder: Path) -> list[str]:
    """The words with values for their placeholders."""
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
    digests = {name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in files.items()}
    (folder / "checksums.json").write_text(json.dumps({"files": digests}))
    values = {"model": checkpoint, "folder": folder, "checksums": folder / "checksums.json"}
    values["ipc"] = f"ipc://{folder}/metrics.ipc"
    text = []
    for word in words:
        for name, value in values.items():
            word = word.replace("{" + name + "}", str(value))
        text.append(word.replace("{port}", str(free_port())) if "{port}" in word else word)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_answers_do_not_depend_on_the_flags(name: str, checkpoint: Path, tmp_path: Path, known: References) -> None:
    words = filled(LINES[name], checkpoint, tmp_path)
    with running_server(checkpoint, tmp_path / "log", *FLAGS, *words, env=TAILS) as server:
        family = name.rstrip(" 0123456789")
        found = determinism_trace.prove(server.url, SIZES, {} if family in OWN_NUMBERS else dict(known))
        assert not found.mismatches, "\n".join(determinism_trace.describe(found))
        assert found.seen["hit device"] > 0
        if family in CHECKS:
            CHECKS[family](server, tmp_path)
        assert server.is_alive()


# ---- what the flags are for

PROMPT = [0, *range(300, 600)]


def post(server: Server, path: str, **body: Any) -> requests.Response:
    return requests.post(f"{server.url}{path}", json=body, timeout=TIMEOUT_S)


def asked(server: Server, prompt: list[int], new_tokens: int = 6, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    response = post(server, "/generate", input_ids=prompt, sampling_params=sampling, return_logprob=True, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def answers_to_urgent_requests(server: Server) -> int:
    """Ask urgent requests of a full server, and check that all answers have the bits that they have alone; returns how
    often a request was pushed out."""
    prompts = [[0, first, *range(400, 400 + 40 * first)] for first in range(3, 3 + 2 * MAX_RUNNING)]
    alone = [asked(server, prompt, 40) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        waiting = [pool.submit(asked, server, prompt, 40, priority=100) for prompt in prompts[:MAX_RUNNING]]
        wait_until(lambda: "#running-req: 6" in server.log)
        waiting += [pool.submit(asked, server, prompt, 40, priority=0) for prompt in prompts[MAX_RUNNING:]]
        together = [answer.result() for answer in waiting]
    for expected, got in zip(alone, together, strict=True):
        assert got["output_ids"] == expected["output_ids"]
        assert output_logprobs(got) == output_logprobs(expected)
    return sum(answer["meta_info"]["num_retractions"] for answer in together)


def check_preemption(server: Server, folder: Path) -> None:
    assert answers_to_urgent_requests(server) > 0


def check_no_preemption(server: Server, folder: Path) -> None:
    assert answers_to_urgent_requests(server) == 0


def check_requests(server: Server, folder: Path) -> None:
    """A logit processor of the request's own forbids a token; other requests of the batch keep theirs."""
    plain = asked(server, PROMPT)
    forbidden = plain["output_ids"][0]
    processor = {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()}
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    body = {
        "input_ids": [PROMPT, PROMPT],
        "return_logprob": True,
        "custom_logit_processor": [processor["custom_logit_processor"], None],
    }
    body["sampling_params"] = [sampling | {"custom_params": {"token_ids": [forbidden]}}, sampling]
    both = post(server, "/generate", **body).json()
    assert forbidden not in both[0]["output_ids"]
    assert both[1]["output_ids"] == plain["output_ids"]
    assert output_logprobs(both[1]) == output_logprobs(plain)


def check_hidden_states(server: Server, folder: Path) -> None:
    """The hidden states of a prompt's last token and of the answer have the same bits after a hit. With the mode `last`
    /generate refuses both values of the field: SGLang's check of the route takes true and false only."""
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}, "return_hidden_states": True}
    if post(server, "/generate", **body).status_code == 400:
        assert post(server, "/generate", **body | {"return_hidden_states": "last"}).status_code == 400
        return
    flush(server)
    cold, warm = (asked(server, PROMPT, return_hidden_states=True) for _ in range(2))
    assert warm["meta_info"]["cached_tokens"] > 0
    states = [answer["meta_info"]["hidden_states"] for answer in (cold, warm)]
    assert len(states[0]) == len(states[1]) > 0
    assert states[0][0][-1] == states[1][0][-1]
    assert states[0][1:] == states[1][1:]
    assert warm["output_ids"] == cold["output_ids"]


def check_http(server: Server, folder: Path) -> None:
    client, messages = server.client(), [{"role": "user", "content": "and the water " * 200}]
    options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**options)
    again = client.chat.completions.create(**options)
    assert again.choices[0].message.content == whole.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0  # --enable-cache-report
    tokens = post(server, "/v1/chat/completions", **options).json()["sglext"]
    assert len(tokens["input_ids"]) == whole.usage.prompt_tokens  # --return-input-ids
    chunks = list(client.chat.completions.create(**options, stream=True))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) <= 1 + 20 // 3  # --stream-interval 3
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # without stream_options
    stored = client.responses.create(model="tiny", input="Hello!", max_output_tokens=12, temperature=0)
    assert client.responses.retrieve(stored.id).output_text == stored.output_text  # --enable-response-store
    assert requests.get(f"{server.url}/get_model_info", timeout=TIMEOUT_S).json()["preferred_sampling_params"]


def check_chat(server: Server, folder: Path) -> None:
    message = server.chat("ponder", max_tokens=8).choices[0].message
    assert message.reasoning_content and not message.content  # a thought without end, asked for by the server's default


def check_metrics(server: Server, folder: Path) -> None:
    post(server, "/v1/completions", model="tiny", prompt="a", max_tokens=2)
    labels = {"x-labels": json.dumps({"a": "1"})}
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    requests.post(f"{server.url}/v1/completions", json=body, headers=labels, timeout=TIMEOUT_S)
    text = requests.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text
    assert 'a="1"' in text and 'le="984.0"' in text
    assert "sglang:dsv4" in text or "tail" in text


def check_logs(server: Server, folder: Path) -> None:
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix in (".log", ".json", ".jsonl", "")]
    assert any("rid" in path.read_text(errors="replace") for path in found)


def check_sessions(server: Server, folder: Path) -> None:
    """Requests of a session have the answers of requests without one, and closing it frees nothing that others use."""
    session = post(server, "/open_session", capacity_of_str_len=10000).json()
    prompt = [0, *range(100, 700)]
    flush(server)
    cold, warm = (asked(server, prompt, session_id=session) for _ in range(2))
    assert post(server, "/close_session", session_id=session).status_code == 200
    after = asked(server, prompt)
    assert warm["meta_info"]["cached_tokens"] > 0 and after["meta_info"]["cached_tokens"] > 0
    for answer in (warm, after):
        assert output_logprobs(answer) == output_logprobs(cold)


def check_together(server: Server, folder: Path) -> None:
    for check in (
        check_requests,
        check_hidden_states,
        check_http,
        check_chat,
        check_metrics,
        check_logs,
        check_sessions,
    ):
        check(server, folder)


CHECKS: dict[str, Callable[[Server, Path], None]] = {
    "together": check_together,
    "priorities": check_preemption,
    "no preemption": check_no_preemption,
}


# ---- servers that cannot be asked like the others


@pytest.mark.slow
def test_dspark_drafts_of_a_few_tokens(tmp_path: Path, known: References) -> None:
    """This checkpoint's target has the same weights as the target of the other checkpoints."""
    shape, _, _ = speculation.ALGORITHMS["DSPARK"]
    write_checkpoint(tmp_path / "model", shape)
    flags = ("--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "3")
    with running_server(tmp_path / "model", tmp_path / "log", *FLAGS, *flags, env=TAILS) as server:
        greedy = dataclasses.replace(SIZES, sampled=False)
        found = determinism_trace.prove(server.url, greedy, dict(known))
        assert not found.mismatches, "\n".join(determinism_trace.describe(found))
        assert asked(server, PROMPT, 40)["meta_info"]["spec_verify_ct"] > 0


@pytest.mark.slow
def test_a_context_beyond_the_models(checkpoint: Path, tmp_path: Path, known: References) -> None:
    """RoPE has no table of positions: if SGLang accepts a longer context, requests get the bits of a model that was
    configured for it."""
    flags = ("--json-model-override-args", '{"max_position_embeddings": 256}', "--context-length", "2048")
    env = {**TAILS, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    with running_server(checkpoint, tmp_path / "log", *FLAGS, *flags, env=env, from_command=True) as server:
        found = determinism_trace.prove(server.url, SIZES, dict(known))
        assert not found.mismatches, "\n".join(determinism_trace.describe(found))


@pytest.mark.slow
def test_another_grammar_backend(checkpoint: Path, tmp_path: Path) -> None:
    """Answers obey their grammars, and a grammar that can't be compiled is refused."""
    flags = ("--grammar-backend", "llguidance", "--constrained-json-disable-any-whitespace")
    with running_server(checkpoint, tmp_path / "log", *FLAGS, *flags, env=TAILS) as server:
        schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 60, "temperature": 0}}

        def constrained(**grammar: str) -> requests.Response:
            return post(server, "/generate", **{**body, "sampling_params": {**body["sampling_params"], **grammar}})

        assert json.loads(constrained(json_schema=json.dumps(schema)).json()["text"])["age"] <= 99
        assert constrained(regex="It is 42[.]").json()["text"] == "It is 42."
        assert constrained(ebnf='root ::= "yes" | "no"').json()["text"] in ("yes", "no")
        assert constrained(regex="(").status_code == constrained(json_schema="{").status_code == 400
        assert server.is_alive()


PASSWORD, KEY, ADMIN_KEY = "secret", "key", "admin"


@pytest.mark.slow
def test_keys_certificates_and_a_gate(checkpoint: Path, tmp_path: Path) -> None:
    """A server behind TLS and keys, whose start waits at a gate and whose checkpoint is deleted once it is loaded."""
    make = "openssl req -x509 -newkey rsa:2048 -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = [*make.split(), "-passout", f"pass:{PASSWORD}", "-keyout", "key", "-out", "certificate"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    certificate, model, gate = str(tmp_path / "certificate"), tmp_path / "model", free_port()
    shutil.copytree(checkpoint, model)
    flags = ("--ssl-keyfile", str(tmp_path / "key"), "--ssl-certfile", certificate, "--ssl-ca-certs", certificate)
    flags += (
        "--ssl-keyfile-password",
        PASSWORD,
        "--api-key",
        KEY,
        "--admin-api-key",
        ADMIN_KEY,
    )
    flags += (
        "--delete-ckpt-after-loading",
        "--gated-launch-port",
        str(gate),
        "--constrained-json-max-whitespace-cnt",
        "1",
    )
    process, port = start(model, tmp_path / "log", (*FLAGS, *flags), TAILS, from_command=False)

    def call(method: str, path: str, key: str | None = None, **options: Any) -> requests.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url = f"https://127.0.0.1:{port}{path}"
        return requests.request(method, url, headers=headers, verify=certificate, timeout=TIMEOUT_S, **options)

    try:
        wait_until(lambda: requests.post(f"http://127.0.0.1:{gate}/gate/activate", timeout=5).ok)
        wait_until(lambda: call("GET", "/health").ok)
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        sampling = {"max_new_tokens": 100, "temperature": 1.0, "json_schema": json.dumps(schema)}
        body = {"input_ids": PROMPT, "sampling_params": sampling}
        assert call("POST", "/generate", json=body).status_code == 401
        answer = call("POST", "/generate", KEY, json=body)
        assert answer.ok and set(json.loads(answer.json()["text"])) >= {"a"}
        assert "  " not in answer.json()["text"].replace('"', "")
        assert [call("POST", "/flush_cache", key).ok for key in (None, KEY, ADMIN_KEY)] == [False, False, True]
        assert not model.exists()
    finally:
        stop(process)
