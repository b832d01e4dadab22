"""Pipeline stages over gloo: the bits of one stage, with prefixes from the device, host memory and files; and a stage
that decides otherwise ends the server with a line that names it. CPU only: the GPU's tests are in
`test_pipeline_gpu.py`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from model.checkpoint_tensors import changed_tensor
from serving import planted_stage, replayed_graphs
from serving.groups import DETERMINISTIC, QUESTIONS, RETRACTING, Question, at_once, bits, shape_for, some
from serving.server import SLEEP_ON_IDLE, TAILS, Server, account, flush, running_server, wait_for_files

from sglang_dsv4.cache.record_files import FOLDER_VARIABLE
from sglang_dsv4.cpu.random_checkpoint import write_checkpoint
from sglang_dsv4.layers import sequence_parallel

FLAGS = ("--max-total-tokens", "6144", "--max-running-requests", "16", SLEEP_ON_IDLE, "--enable-metrics")
TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "3")
FILES = (*TIERS, "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")
STAGES = ("--pp-size", "2")
KINDS: dict[str, tuple[str, ...]] = {
    "plain": FILES,
    "fp8": ("--kv-cache-dtype", "fp8_e4m3", *FILES),
    "tp": ("--tp-size", "2", *DETERMINISTIC, *FILES),
    "crowded": ("--enable-mixed-chunk",),
}
BROKEN = 1000
"""A token whose embedding makes every row after it NaN."""
LONG = Question(tuple(some(30, 1100)), 6)


class Served(NamedTuple):
    server: Server
    kind: str
    expected: list[tuple[list[int], list[float]]]  # answers of one stage to `questions(kind)`
    files: Path

    @property
    def is_crowded(self) -> bool:
        return self.kind == "crowded"


def questions(kind: str) -> list[Question]:
    """Return the questions; a crowded server answers at length, and mixes no request with log-probabilities."""
    crowded = kind == "crowded"
    return [with_fields(one, new=one.new + 30 * crowded, logprobs=not crowded) for one in (*QUESTIONS, LONG)]


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, folder = request.param, tmp_path_factory.mktemp("stages")
    write_checkpoint(folder / "model", shape_for("plain", 2))
    with changed_tensor(folder / "model", "embed.weight") as embedding:
        embedding[BROKEN] = 3e38
    crowded = kind == "crowded"
    flags = (*FLAGS, *KINDS[kind], "--chunked-prefill-size", "512" if crowded else "256")
    with running_server(folder / "model", folder / "one", *flags, env=TAILS | at(folder / "of one")) as server:
        expected = [bits(question.ask(server, None)) for question in questions(kind)]
    env = TAILS | at(folder / "files") | (RETRACTING if crowded else {})
    stages = (*STAGES, "--pp-max-micro-batch-size", "5") if crowded else STAGES
    with running_server(folder / "model", folder / "log", *flags, *stages, env=env) as server:
        yield Served(server, kind, expected, folder / "files")


def at(folder: Path) -> dict[str, str]:
    return {FOLDER_VARIABLE: str(folder)}


def stage_folders(files: Path, count: int = 2) -> list[Path]:
    """Return the folder of each stage's records, by the stage in its identity."""
    found = {path.parent: path.read_text() for path in files.glob("*/identity.json")}
    names = [f"stage {index} of {count}" for index in range(count)]
    return [next(folder for folder, text in found.items() if name in text) for name in names]


def test_alone_and_at_once_the_bits_of_one_stage(running: Served) -> None:
    """Cold, then all at once, three times each: some prefill while others decode; with hits and retractions."""
    server, asked = running.server, questions(running.kind)
    flush(server)
    for i, question in enumerate(asked):
        answer = question.ask(server, None)
        assert bits(answer) == running.expected[i], i
    flush(server)
    order = list(range(len(asked))) * 3
    answers = at_once(server, [(asked[i], None) for i in order])
    for i, answer in zip(order, answers, strict=True):
        assert bits(answer) == running.expected[i], (i, account(answer))
    again = LONG.ask(server, None)
    assert again["meta_info"]["cached_tokens"] == 1024
    if running.is_crowded:
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers)
    else:
        assert bits(again) == running.expected[-1]
    assert server.is_alive() and "Traceback" not in server.log


def test_prefixes_of_every_tier(running: Served) -> None:
    """From the device, from host memory after other requests filled the pool, and from files after a flush."""
    if running.is_crowded:
        pytest.skip("without tiers")
    server = running.server
    flush(server)
    assert bits(LONG.ask(server, None)) == running.expected[-1]
    assert account(found(running))["pages_from"] == {"device": 1024}
    for seed in range(60, 68):
        server.generate(some(seed, 900), max_new_tokens=2)
    assert account(found(running))["pages_from"] == {"host": 1024}
    assert wait_for_files(running.files) > 20
    flush(server)
    assert account(found(running))["pages_from"] == {"storage": 1024}
    assert server.is_alive() and "Traceback" not in server.log


def found(running: Served) -> dict[str, Any]:
    """Return the answer to the long question, which must have a hit and the bits of a cold answer."""
    answer = LONG.ask(running.server, None)
    assert bits(answer) == running.expected[-1] and answer["meta_info"]["cached_tokens"] == 1024
    return answer


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_without_its_files_makes_all_compute(running: Served, stage: int) -> None:
    """One stage's records are gone, or only those of the third page and later: every stage uses what both have."""
    if running.is_crowded:
        pytest.skip("without tiers")
    server = running.server
    question = Question(tuple(some(70 + stage, 1300)), 4)
    flush(server)
    cold = bits(question.ask(server, None))
    wait_for_files(running.files)
    flush(server)
    for path in stage_folders(running.files)[stage].rglob("*.tail"):
        path.unlink()
    again = question.ask(server, None)
    assert bits(again) == cold and again["meta_info"]["cached_tokens"] == 0
    assert server.is_alive() and "Traceback" not in server.log


def test_aborts_and_flushes_between_requests(running: Served) -> None:
    """Six prefixes, more than the pool holds, at once; some requests end early, and the cache is flushed meanwhile."""
    server = running.server
    prefixes = [some(80 + i, 500 + 140 * i) for i in range(6)]
    prompts = [Question(tuple(prefixes[i % 6] + some(90 + i, 20 + 9 * i)), 6) for i in range(12)]
    flush(server)
    expected = [bits(prompt.ask(server, None)) for prompt in prompts]

    def one(i: int) -> None:
        answer = prompts[i].ask(server, None)
        assert running.is_crowded or bits(answer) == expected[i], (i, account(answer))

    def aborted(i: int) -> None:
        body = {"input_ids": list(prompts[i].tokens), "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        try:
            requests.post(f"{server.url}/generate", json=body, timeout=0.4 + 0.1 * i)
        except requests.RequestException:
            pass

    with ThreadPoolExecutor(16) as pool:
        for round_number in range(3):
            jobs = [pool.submit(one, i) for i in range(12)] + [pool.submit(aborted, i) for i in range(4)]
            if round_number == 1:
                requests.post(f"{server.url}/flush_cache", timeout=60)  # refused while requests run
            for job in jobs:
                job.result()
            if round_number == 1:
                flush(server)
    flush(server)
    assert server.is_alive() and "Traceback" not in server.log


def test_a_request_whose_logits_are_not_finite_ends_on_all_stages(running: Served) -> None:
    server = running.server
    greedy = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    force = {"logit_bias": {str(BROKEN): 1e4}}
    for tokens, parameters in (([5, BROKEN, 6], greedy), ([5, 6], greedy | force)):
        body = {"input_ids": tokens, "sampling_params": parameters}
        response = requests.post(f"{server.url}/generate", json=body, timeout=120)
        assert response.status_code == 500 and "logits are not finite" in response.text, response.text
    stops = {**greedy, "stop_token_ids": list(range(1024)), "min_new_tokens": 3}
    response = requests.post(f"{server.url}/generate", json={"input_ids": [5], "sampling_params": stops}, timeout=120)
    assert response.status_code == 400 and "no token can be drawn" in response.text, response.text
    assert bits(questions(running.kind)[0].ask(server, None)) == running.expected[0]


def test_grammars_and_log_probabilities(running: Served) -> None:
    """The first stage decides when a grammar is there; the last one has the logits of prompts."""
    server = running.server
    sampling = {"max_new_tokens": 8, "temperature": 0, "regex": "[a-c]{8}"}
    response = requests.post(
        f"{server.url}/generate", json={"input_ids": [5, 6], "sampling_params": sampling}, timeout=120
    )
    assert response.status_code == 200 and set(response.json()["text"]) <= set("abc"), response.text
    body = {"input_ids": some(3, 300), "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    response = requests.post(f"{server.url}/generate", json=body | {"logprob_start_len": 0}, timeout=120)
    assert len(response.json()["meta_info"]["input_token_logprobs"]) == 300


def test_what_stages_do_not_do_is_refused(running: Served) -> None:
    server = running.server
    model = requests.get(f"{server.url}/model_info", timeout=60).json()["model_path"]
    update = requests.post(f"{server.url}/update_weights_from_disk", json={"model_path": model}, timeout=120)
    assert update.status_code == 400 and "with --pp-size above 1" in update.text
    for parameters, named in (
        ({"stop_regex": "a+"}, "stop_regex is not supported with --pp-size"),
        ({"stop_token_ids": [5000]}, "Stop token id 5000 is not in the vocabulary"),
    ):
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4, **parameters}}
        refused = requests.post(f"{server.url}/generate", json=body, timeout=60)
        assert refused.status_code == 400 and named in refused.text, refused.text
        assert server.is_alive(), "both stages refuse it"
    pause = requests.post(f"{server.url}/pause_generation", json={"mode": "in_place"}, timeout=60)
    assert pause.status_code == 400 and "--pp-size 2" in pause.text, pause.text
    waiting = requests.post(f"{server.url}/flush_cache", params={"timeout": 5}, timeout=60)
    assert waiting.status_code == 400 and "--pp-size above 1" in waiting.text
    assert server.is_alive()


@pytest.mark.slow
def test_sharded_rows_of_stages_have_the_bits_of_one_stage(tmp_path: Path) -> None:
    """Two stages of two ranks. In a chunk of 512 tokens or more each rank computes its share of the rows, with
    `attention` in the attention too, and the next stage gets all rows."""
    write_checkpoint(tmp_path / "model", shape_for("plain", 2))
    flags = (*FLAGS, "--tp-size", "2", *DETERMINISTIC, "--chunked-prefill-size", "1024")
    asked = questions("plain")
    with running_server(tmp_path / "model", tmp_path / "one", *flags, env=TAILS) as server:
        expected = [bits(question.ask(server, None)) for question in asked]
    for rows in ("on", "attention"):
        env = TAILS | {sequence_parallel.VARIABLE: rows}
        with running_server(tmp_path / "model", tmp_path / rows, *flags, *STAGES, env=env) as server:
            assert [bits(question.ask(server, None)) for question in asked] == expected, rows
            flush(server)
            order = list(range(len(asked))) * 2
            answers = at_once(server, [(asked[i], None) for i in order])
            assert [bits(answer) for answer in answers] == [expected[i] for i in order], rows
            assert LONG.ask(server, None)["meta_info"]["cached_tokens"] == 1024
            assert server.is_alive() and "Traceback" not in server.log


@pytest.mark.slow
def test_three_stages_have_the_bits_of_one(tmp_path: Path) -> None:
    """Stage 1 has neither embedding nor head, and passes decisions on; the last stage's files are gone at one time."""
    shape = with_fields(shape_for("plain", 2), compress_ratios=(4, 128, 4))
    write_checkpoint(tmp_path / "model", shape)
    flags, asked = (*FLAGS, *FILES, "--chunked-prefill-size", "256"), questions("plain")
    with running_server(tmp_path / "model", tmp_path / "one", *flags, env=TAILS | at(tmp_path / "of one")) as server:
        expected = [bits(question.ask(server, None)) for question in asked]
    env = TAILS | at(tmp_path / "files")
    with running_server(tmp_path / "model", tmp_path / "log", *flags, "--pp-size", "3", env=env) as server:
        running = Served(server, "plain", expected, tmp_path / "files")
        order = list(range(len(asked))) * 3
        for _ in range(2):
            answers = at_once(server, [(asked[i], None) for i in order])
            assert [bits(answer) for answer in answers] == [expected[i] for i in order]
        flush(server)
        assert bits(LONG.ask(server, None)) == expected[-1]
        for seed in range(60, 68):
            server.generate(some(seed, 900), max_new_tokens=2)
        assert account(found(running))["pages_from"] == {"host": 1024}
        wait_for_files(running.files)
        flush(server)
        assert account(found(running))["pages_from"] == {"storage": 1024}
        wait_for_files(running.files)
        flush(server)
        for path in stage_folders(running.files, 3)[2].rglob("*.tail"):
            path.unlink()
        again = LONG.ask(server, None)
        assert bits(again) == expected[-1] and again["meta_info"]["cached_tokens"] == 0
        assert server.is_alive() and "Traceback" not in server.log


@pytest.mark.slow
def test_replayed_graphs_of_both_stages(tmp_path: Path) -> None:
    """Decode steps run in graphs on both stages, prefills without: the bits of one stage without graphs."""
    write_checkpoint(tmp_path / "model", shape_for("plain", 2))
    flags = (*FLAGS, "--chunked-prefill-size", "256")
    with running_server(tmp_path / "model", tmp_path / "one", *flags, env=TAILS) as server:
        expected = [bits(question.ask(server, None)) for question in questions("plain")]
    env = TAILS | replayed_graphs.install(tmp_path / "graphs")
    flags = (*flags, *STAGES, "--cuda-graph-bs-decode", "2", "4", "16")
    with running_server(tmp_path / "model", tmp_path / "log", *flags, env=env) as server:
        order = list(range(len(expected))) * 2
        answers = at_once(server, [(questions("plain")[i], None) for i in order])
        assert [bits(answer) for answer in answers] == [expected[i] for i in order]
        assert server.log.count("replayed graphs: DecodeCudaGraphRunner") == 2, "on both stages"
        assert server.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("evict", "free tokens of the pool: "),
        ("forget", "free tails on the device: "),
        ("drop", "requests"),  # in the batch, or that wait, or other ones: it depends on what arrived when
        ("skip", "requests|kind of the batch"),
        ("abort", "requests in it|kind of the batch"),
        ("flush", "free tokens of the pool: .*tokens that may be evicted: 0 here"),
    ],
)
def test_a_stage_that_decides_otherwise_is_named(fault: str, named: str, tmp_path: Path) -> None:
    """The server ends at once; no stage waits for rows or results that never come."""
    write_checkpoint(tmp_path / "model", shape_for("plain", 2))
    env = TAILS | planted_stage.install(tmp_path / "planted")
    flags = (*FLAGS, "--chunked-prefill-size", "256", *STAGES)
    with running_server(tmp_path / "model", tmp_path / "log", *flags, env=env) as server:
        LONG.ask(server, None)
        Path(env[planted_stage.VARIABLE]).write_text(fault)
        with ThreadPoolExecutor(20) as pool:
            for i in range(20):
                pool.submit(ask_once, server, some(i, 40))
        deadline = time.monotonic() + 60
        while server.process.poll() is None:
            assert time.monotonic() < deadline, "the server goes on, or hangs"
            time.sleep(0.2)
        line = next(line for line in server.log.splitlines() if "StagesDifferError: " in line)
        assert "stage 1 of the pipeline (--pp-size) has decided otherwise than stage 0 in round" in line
        assert re.search(named, line), line


def ask_once(server: Server, tokens: list[int]) -> None:
    """Ask, whatever becomes of the request."""
    try:
        requests.post(f"{server.url}/generate", json={"input_ids": tokens}, timeout=60)
    except requests.RequestException:
        pass
