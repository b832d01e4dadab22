"""Determinism through a server: the same bits alone, in any batch and after any hit; and planted faults are found.

`lib.determinism_trace` asks the server; on a CPU answers are deterministic with the flag and without it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lib import determinism_trace
from lib.determinism_trace import Answer, Findings, Request, Sizes
from serving.planted import planted_ops
from serving.planted.planted_ops import FILE_VARIABLE
from serving.server import MAX_RUNNING, POOL_TOKENS, SLEEP_ON_IDLE, TAILS, Server, run_until_it_stops, running_server

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.layers import sequence_parallel
from sglang_dsv4.seam.default_arguments import cores_of_ranks

FLAGS = ("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(MAX_RUNNING), SLEEP_ON_IDLE)
FLAGS += ("--chunked-prefill-size", "512", "--enable-deterministic-inference")
SMALL = Sizes(
    lengths=(520,), new_tokens=4, batches=(3,), pool_tokens=1024, displaced=0, requests=10, at_once=6, longest=300
)
WHOLE = Sizes(
    lengths=(1, 5, 127, 256, 257, 513, 515, 641, 900),
    new_tokens=8,
    batches=(2, 13),
    pool_tokens=POOL_TOKENS,
    displaced=10,
    requests=100,
    at_once=14,
    longest=600,
)


def test_the_servers_answers_have_the_same_bits_in_every_batch(server: Server) -> None:
    found = determinism_trace.prove(server.url, SMALL)
    assert not found.mismatches, "\n".join(determinism_trace.describe(found))
    assert set(found.compared) == {"cold", "hit", "split", "evicted", "continued", "batch", "trace"}
    assert found.seen["hit device"] > 0
    assert server.is_alive()


REQUEST = Request((5, 6), 2)
ANSWER = Answer(((7, -1.5, ((-1.5, 7), (-2.0, 3))), (8, -0.25, ((-0.25, 8), (-3.0, 1)))))


@pytest.mark.parametrize(
    "tokens",
    [
        (ANSWER.tokens[0], (9, *ANSWER.tokens[1][1:])),
        (ANSWER.tokens[0], (8, -0.25000000000000006, ANSWER.tokens[1][2])),
        (ANSWER.tokens[0], (8, -0.25, ((-0.25, 8), (-3.0, 2)))),
        ANSWER.tokens[:1],
    ],
    ids=["token", "logprob", "top", "length"],
)
def test_whatever_differs_is_a_mismatch(tokens: tuple) -> None:
    found = Findings()
    found.compare("batch", REQUEST, ANSWER, dataclasses.replace(ANSWER, hit_tokens=256, tier="host"))
    assert not found.mismatches and found.seen == {"hit host": 1}
    found.compare("batch", REQUEST, ANSWER, Answer(tokens))
    result = found.as_json()
    assert (result["compared"], result["mismatches"], result["by_kind"]) == (2, 1, {"batch": [2, 1]})
    assert result["first_mismatches"][0]["output_token"] == 1


def test_references_and_findings_outlive_a_run(tmp_path: Path) -> None:
    """Written references are bitwise equal when read, so that a later run can compare with them."""
    sampled = Request((1, 2, 3), 4, 17, (("temperature", 0.7), ("top_p", 0.9)))
    known = {REQUEST: ANSWER, sampled: Answer(((3, -0.1234567835569381, ((-0.1, 3),)),))}
    determinism_trace.write_references(known, tmp_path / "references.json")
    assert determinism_trace.read_references(tmp_path / "references.json") == known
    found = Findings()
    found.compare("hit", REQUEST, ANSWER, dataclasses.replace(ANSWER, hit_tokens=256, tier="host"))
    found.compare("batch", REQUEST, ANSWER, Answer(ANSWER.tokens[:1]))
    assert Findings.from_json(found.as_json()).as_json() == found.as_json()


def test_a_trace_has_what_it_should() -> None:
    """Prompts that share prefixes, greedy requests and seeds; with speculation no request is sampled."""
    asked = determinism_trace.requests_of_a_trace(WHOLE)
    assert len(asked) == len(set(asked)) == 20
    assert 4 < sum(request.seed is not None for request in asked) < 14
    assert max(len(request.prompt) for request in asked) <= WHOLE.longest
    beginnings = {request.prompt[:2] for request in asked if len(request.prompt) > 1}
    assert len(beginnings) < 14
    greedy = determinism_trace.requests_of_a_trace(dataclasses.replace(WHOLE, sampled=False))
    assert all(request.seed is None and request.body()["sampling_params"]["temperature"] == 0 for request in greedy)


@pytest.mark.slow
def test_under_the_flag_bits_are_the_same_in_every_batch(checkpoint: Path, tmp_path: Path) -> None:
    """All comparisons, with requests retracted now and then; other chunks and another start give the same bits."""
    known: determinism_trace.References = {}
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "23"}
    with running_server(checkpoint, tmp_path / "log", *FLAGS, env=TAILS | retract) as server:
        found = determinism_trace.prove(server.url, WHOLE, known)
        assert not found.mismatches, "\n".join(determinism_trace.describe(found))
        assert all(found.seen[what] for what in ("hit device", "hit host", "left", "flushed"))
        assert "etract" in server.log
        unseeded, seed_42 = (
            server.generate([0, 5, 9], temperature=1.5, **seed) for seed in ({}, {"sampling_seed": 42})
        )
        assert unseeded["output_ids"] == seed_42["output_ids"], "SGLang's seed where a request names none"
    other_chunks = [flag if flag != "512" else "256" for flag in FLAGS]
    smaller = dataclasses.replace(WHOLE, requests=20)
    with running_server(checkpoint, tmp_path / "log2", *other_chunks, env=TAILS) as server:
        found = determinism_trace.prove(server.url, smaller, known)
        assert not found.mismatches, "\n".join(determinism_trace.describe(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "switch"),
    [(2, "off"), (4, "off"), (4, "on"), (4, "attention")],
    ids=["2", "4", "4-shards", "4-shards-attend"],
)
def test_ranks_are_deterministic_under_the_flag(checkpoint: Path, tmp_path: Path, ranks: int, switch: str) -> None:
    """Two ranks add in any order with the same result; four do not, and gloo's order depends on a row's index in the
    batch. Chunks have 512 tokens, the threshold of sequence parallelism."""
    if ranks == 4:
        checkpoint = tmp_path / "model"
        write_checkpoint(checkpoint, dataclasses.replace(PRESETS["tiny"], o_groups=4, moe_intermediate_size=512))
    # Other tests of this process may have left one rank's cores in the affinity mask.
    env = {"SGLANG_CPU_OMP_THREADS_BIND": cores_of_ranks(ranks, sorted(os.sched_getaffinity(0)))}
    env[sequence_parallel.VARIABLE] = switch
    with running_server(checkpoint, tmp_path / "log", *FLAGS, "--tp-size", str(ranks), env=TAILS | env) as server:
        found = determinism_trace.prove(server.url, SMALL)
        assert not found.mismatches, "\n".join(determinism_trace.describe(found))
        assert server.log.count("is live on SGLang") == ranks


@pytest.fixture(scope="module")
def planted_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """Yield a server whose operators are faulty while the file names them, and the file."""
    folder = tmp_path_factory.mktemp("planted")
    file = folder / "fault"
    file.write_text("")
    env = {**TAILS, "PYTHONPATH": str(Path(planted_ops.__file__).parent), FILE_VARIABLE: str(file)}
    with running_server(checkpoint, folder / "log", *FLAGS, env=env) as server:
        yield server, file


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "",
        "linear rows",
        "linear_fp32 rows",
        "grouped_linear rows",
        "experts_forward rows",
        "experts_forward order",
        "linear order",
        "fused_swiglu rows",
        "hc_boundary rows",
        "compress_store order",
        "index_topk rows",
        "norm_rope_store rows",
        "rms_norm rows",
        "route_topk_logits rows",
        "sparse_attention rows",
        "sparse_attention order",
    ],
    ids=lambda fault: fault.replace(" ", "-") or "none",
)
def test_a_planted_fault_is_found(planted_server: tuple[Server, Path], fault: str) -> None:
    server, file = planted_server
    file.write_text(fault)
    try:
        found = determinism_trace.prove(server.url, SMALL)
    finally:
        file.write_text("")
    assert bool(found.mismatches) == bool(fault), "\n".join(determinism_trace.describe(found))


@pytest.mark.slow
def test_an_operator_that_is_not_batch_invariant_stops_the_server(checkpoint: Path, tmp_path: Path) -> None:
    """The CPU's products are not marked batch-invariant here."""
    (tmp_path / "sitecustomize.py").write_text(
        (Path(planted_ops.__file__).parent / "sitecustomize.py").read_text().replace("planted_ops", "unmarked")
    )
    (tmp_path / "unmarked.py").write_text(
        "import dataclasses\n"
        "def plant(registry):\n"
        "    row = registry._table['grouped_linear']['tiled']\n"
        "    registry._table['grouped_linear']['tiled'] = dataclasses.replace(row, batch_invariant=False)\n"
    )
    log = run_until_it_stops(checkpoint, tmp_path / "log", *FLAGS, env={"PYTHONPATH": str(tmp_path)})
    assert "op 'grouped_linear' has no batch-invariant implementation for device 'cpu'" in log
    assert "Or leave --enable-deterministic-inference out" in log
