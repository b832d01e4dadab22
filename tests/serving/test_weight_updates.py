"""Weights from a trainer through a server: served only after the end, hits equal cold answers, failures change nothing.

The loop at the end is that of verl and slime: rollout, pause, synchronise, continue, rollout. Its log-probabilities are
those of a fresh server with the new weights, bitwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from model.checkpoint_tensors import read, with_last
from model.updates import buckets_of
from serving.server import (
    MAX_RUNNING,
    POOL_TOKENS,
    SLEEP_ON_IDLE,
    TAILS,
    Server,
    account,
    flush,
    output_logprobs,
    running_server,
    wait_for_files,
)
from serving.speculation import ALGORITHMS, HOST_TIERS, drafting_flags
from serving.trainer import Trainer

from sglang_dsv4.cache.record_files import FOLDER_VARIABLE
from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.layers import row_exchange, sequence_parallel

PROMPT = [0, *range(40, 640)]
NORM = "layers.1.attn_norm.weight"
Answer = tuple[list[int], list[float]]


def answer(server: Server, prompt: list[int], tokens: int = 4) -> Answer:
    result = server.generate(prompt, max_new_tokens=tokens)
    return result["output_ids"], output_logprobs(result)


def version(server: Server) -> str:
    return requests.get(f"{server.url}/model_info", timeout=60).json()["weight_version"]


@pytest.fixture
def trained(server: Server, checkpoint: Path) -> Iterator[Trainer]:
    """A trainer of the session's server, which gets its own weights back."""
    trainer = Trainer(server)
    trainer.post("abandon_weight_update")
    try:
        yield trainer
    finally:
        trainer.post("abandon_weight_update")
        trainer.do("update_weights_from_disk", model_path=str(checkpoint))


def test_one_tensor(server: Server, checkpoint: Path, trained: Trainer) -> None:
    """Such an update failed with "209 missing tensors", changed the tensor all the same, and kept the prefix cache."""
    flush(server)
    norm, before, named = read(checkpoint)[NORM], answer(server, PROMPT), version(server)
    assert account(server.generate(PROMPT, max_new_tokens=1))["position"] > 0
    trained.do("begin_weight_update")
    sent = trained.send([(NORM, norm.flip(0))], weight_version="step 1", flush_cache=False)
    assert sent.status_code == 200, sent.text
    assert answer(server, PROMPT) == before and version(server) == named
    trained.do("end_weight_update")
    assert version(server) == "step 1"
    result = server.generate(PROMPT, max_new_tokens=4)
    assert account(result)["position"] == 0
    now = result["output_ids"], output_logprobs(result)
    assert now != before
    assert answer(server, PROMPT) == now and account(server.generate(PROMPT, max_new_tokens=1))["position"] > 0
    trained.update([[(NORM, norm)]])
    assert answer(server, PROMPT) == before


def test_failures_through_http(server: Server, checkpoint: Path, trained: Trainer) -> None:
    norm, before, named = read(checkpoint)[NORM], answer(server, PROMPT), version(server)
    refused = trained.send([(NORM, norm)])
    assert refused.status_code == 400 and "No weight update is open" in refused.text
    trained.do("begin_weight_update")
    refused = trained.send([(NORM, with_last(norm, math.nan))], weight_version="bad")
    assert refused.status_code == 400 and "(NaN)" in refused.text
    ended = trained.post("end_weight_update")
    assert ended.status_code == 400 and "The old weights stay" in ended.text
    trained.do("begin_weight_update")
    assert trained.send([(NORM, norm.flip(0))]).status_code == 200
    again = trained.post("begin_weight_update")
    assert again.status_code == 400 and "/abandon_weight_update" in again.text
    trained.do("abandon_weight_update")
    assert trained.post("end_weight_update").status_code == 400
    assert answer(server, PROMPT) == before and version(server) == named


PROMPTS = [[0, *range(10 + 7 * i, 10 + 7 * i + n)] for i, n in enumerate((3, 130, 257, 600))]
FLAGS = ("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(MAX_RUNNING), SLEEP_ON_IDLE)
FLAGS += ("--chunked-prefill-size", "512", "--enable-deterministic-inference")
GROUPS = ("--tp", "2", "--attn-dp-size", "2", "--chunked-prefill-size", "1024")  # of both groups together
SERVERS = {
    "files": (PRESETS["tiny"], HOST_TIERS, 1),
    "EAGLE": (ALGORITHMS["EAGLE"][0], drafting_flags("EAGLE"), 1),
    "DSPARK": (ALGORITHMS["DSPARK"][0], drafting_flags("DSPARK"), 1),
    "tp-2": (PRESETS["tiny"], ("--tp", "2"), 2),
    "tp-2-ep-2": (PRESETS["tiny"], ("--tp", "2", "--ep", "2"), 2),
    "tp-2-own-rows": (PRESETS["tiny"], ("--tp", "2"), 2),
    "groups": (PRESETS["tiny"], GROUPS, 2),
    "groups-exchange": (PRESETS["tiny"], (*GROUPS, "--ep", "2"), 2),
}
SWITCHES = {
    "tp-2-own-rows": {sequence_parallel.VARIABLE: "attention"},
    "groups-exchange": {row_exchange.VARIABLE: "exchange"},
}


def rollout(server: Server) -> list[Answer]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: answer(server, prompt, 12), PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVERS)
def test_rollout_synchronise_rollout(kind: str, tmp_path: Path) -> None:
    """Old weights, new ones from tensors, the old ones again through a process group, new ones from disk.

    Requests that run when the trainer pauses are computed again with the new weights. With drafts the accepted lengths
    are those of the fresh server too, so the draft has its new weights; stored prefixes have an identity for each of
    the weights, and are found again when their weights are back.
    """
    shape, flags, ranks = SERVERS[kind]
    for seed, name in enumerate(("old", "new"), 11):
        write_checkpoint(tmp_path / name, shape, seed=seed)
    old, new = read(tmp_path / "old"), read(tmp_path / "new")
    env = TAILS | {FOLDER_VARIABLE: str(tmp_path / "prefixes")} | SWITCHES.get(kind, {})
    with running_server(tmp_path / "new", tmp_path / "log-fresh", *FLAGS, *flags, env=env) as server:
        expected, steps = rollout(server), verified(server)
        if kind == "files":
            wait_for_files(tmp_path / "prefixes")
    with running_server(tmp_path / "old", tmp_path / "log", *FLAGS, *flags, env=env) as server:
        trainer, before = Trainer(server, ranks), rollout(server)
        assert before != expected
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(answer, server, PROMPTS[1], 400)
            time.sleep(1)
            trainer.do("pause_generation", mode="retract")
            message = trainer.update(buckets_of(new, 40, seed=6), flush_cache=False)
            assert f"{sum(not name.startswith('mtp.') for name in new)} tensors of the target" in message
            trainer.do("continue_generation")
            running.result()
        assert rollout(server) == expected
        if kind == "files":
            assert account(server.generate(PROMPTS[3], max_new_tokens=1))["position"] > 0
            flush(server)
            found = server.generate(PROMPTS[3], max_new_tokens=1)
            assert account(found)["pages_from"].get("storage", 0) > 0, "those of the fresh server"
        assert verified(server) == steps
        bad = [(NORM, with_last(new[NORM], math.nan))]
        trainer.do("begin_weight_update")
        refused = trainer.send_each_rank([[(NORM, new[NORM])]] * (ranks - 1) + [bad])
        assert refused.status_code == 400 and ("rank 1: " in refused.text) is (ranks == 2)
        assert trainer.post("end_weight_update").status_code == 400
        assert rollout(server) == expected
        trainer.broadcast(buckets_of(old, 60, seed=7))
        assert rollout(server) == before
        trainer.do("update_weights_from_disk", model_path=str(tmp_path / "new"))
        assert rollout(server) == expected
        assert server.is_alive() and "Traceback" not in server.log


def verified(server: Server) -> list[int]:
    """Verify steps of each prompt alone, which depend on the draft's weights; zeros without drafts."""
    results = (server.generate(prompt, max_new_tokens=12) for prompt in PROMPTS)
    return [result["meta_info"].get("spec_verify_ct", 0) for result in results]


@pytest.mark.slow
def test_requests_that_run_in_place_keep_their_weights(server: Server, checkpoint: Path, trained: Trainer) -> None:
    """Paused in place, their KV stays: the update waits for them, and no answer belongs to two sets of weights."""
    norm, before = read(checkpoint)[NORM], answer(server, PROMPTS[1], 300)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answer, server, PROMPTS[1], 300)
        time.sleep(0.3)
        trained.do("pause_generation", mode="in_place")
        trained.do("begin_weight_update")
        assert trained.send([(NORM, norm.flip(0))]).status_code == 200
        ended = trained.post("end_weight_update")
        assert ended.status_code == 400 and "A pause in_place keeps them" in ended.text, ended.text
        trained.do("continue_generation")
        assert running.result() == before
        trained.do("end_weight_update")
    assert answer(server, PROMPTS[1], 300) != before
