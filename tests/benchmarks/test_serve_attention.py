"""The benchmark that compares cached with cold answers, on the CPU server, where they are equal."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import serve_attention
from serve_attention import Answer, compare, conversations, distances, single_prompts, summary
from serving.server import Server


@pytest.mark.slow
def test_on_a_cpu_cached_is_cold_to_the_last_bit(server: Server) -> None:
    client, rng = serve_attention.Server(server.url), random.Random(0)
    assert client.info()["radix_cache_backend"] == "dsv4"
    singles = single_prompts(client, rng, 600, 4, lengths=(130, 600))
    assert [row["cached_tokens"] for row in singles] == [0, 512]
    turns = conversations(client, rng, 600, 4, sessions=2, turns=2)
    assert [row["cached_tokens"] > 0 for row in turns if row["turn"]] == [True, True]
    found = summary(singles, turns)
    for name in ("cold_against_cold", "cached_against_cold", "cached_against_cached", "turns_with_a_hit_against_cold"):
        assert found[name]["answers"] == found[name]["equal"] == found[name]["same_tokens"] > 0, name
        assert found[name]["largest_logprob_distance"] == 0.0
    assert server.is_alive()


def test_answers_are_compared_up_to_the_first_different_token() -> None:
    a = Answer([1, 2, 3, 4], [-0.5, -1.0, -2.0, -9.0], 0, 0.1)
    assert compare(a, a) == {"equal": True, "first_difference": None, "logprob_distance": 0.0}
    b = Answer([1, 2, 5, 4], [-0.5, -1.25, -2.5, -1.0], 0, 0.1)
    assert compare(a, b) == {"equal": False, "first_difference": 2, "logprob_distance": 0.5}
    c = Answer([1, 2, 3, 4], [-0.5, -1.0, -2.0, -9.5], 0, 0.1)
    assert compare(a, c) == {"equal": False, "first_difference": None, "logprob_distance": 0.5}


def test_distances_are_gathered_by_kind_and_mode(tmp_path: Path) -> None:
    lines = [
        {"layer": 0, "kind": "CSA", "mode": "prefill", "attended": [0.1, 0.3], "sublayer": [0.4, 0.4]},
        {"layer": 2, "kind": "CSA", "mode": "prefill", "attended": [0.2], "sublayer": [0.1]},
        {"layer": 1, "kind": "HCA", "mode": "decode", "attended": [0.5], "sublayer": []},
    ]
    (tmp_path / "file").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = distances(tmp_path / "file")
    assert found["attended, CSA, prefill"] == {"tokens": 3, "median": 0.2, "p90": 0.2, "max": 0.3}
    assert found["attended, HCA, decode"]["max"] == 0.5 and "sublayer, HCA, decode" not in found


def test_the_log_is_reduced_to_what_it_says_about_attention(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "[2026-01-01 TP0] op sparse_attention on cuda, torch.bfloat16: sm90\n[2026-01-02 TP0] nothing\n"
        "[2026-01-03 TP1] op sparse_attention on cuda, torch.bfloat16: sm90\n"
    )
    assert serve_attention._lines_of_interest(tmp_path / "log") == ["op sparse_attention on cuda, torch.bfloat16: sm90"]


def test_a_request_that_hits_after_a_flush_is_an_error() -> None:
    class Remembers:
        def flush(self) -> None:
            pass

        def generate(self, prompt: list[int], new_tokens: int) -> Answer:
            return Answer([1], [-1.0], 256, 0.1)

    with pytest.raises(AssertionError, match="after /flush_cache"):
        single_prompts(Remembers(), random.Random(0), 600, 1, lengths=(130,))  # type: ignore[arg-type]
