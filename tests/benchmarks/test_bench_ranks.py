"""Conversations over two caches: what the benchmark counts, and a router in front of two servers of ours."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import bench_ranks
import pytest
from bench_ranks import IN_TURN, PREFIX, ROUTER, ROUTER_OF_RANKS, Load, Turn, figures_of
from serving.server import ENV, free_port


def test_figures_of_a_run() -> None:
    turns = [Turn(0, 300, 0, "a 0"), Turn(0, 500, 256, "a 0"), Turn(1, 100, 0, "a 1"), Turn(1, 100, 44, "a 0")]
    assert figures_of(turns) == {"hit_rate": 0.3, "busier": 0.75, "one_rank": 0.5}


def test_the_means_are_over_seeds() -> None:
    rows = [
        {
            "contender": name,
            "requests": 1,
            "shared": 9,
            "seed": seed,
            "hit_rate": seed * share,
            "busier": 0.5,
            "one_rank": 1.0,
        }
        for name, share in ((PREFIX, 0.5), (IN_TURN, 0.25))
        for seed in (0, 1)
    ]
    assert [(row["contender"], row["hit_rate"]) for row in bench_ranks.means(rows)] == [
        (PREFIX, 0.25),
        (IN_TURN, 0.125),
    ]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("sglang_router") is None, reason="needs sglang-router: pip install --no-deps sglang-router==0.3.2"
)
def test_a_router_keeps_conversations_on_their_server(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router sees requests and no caches; ours also sees the load, and moves a conversation now and then."""
    for name, value in (*ENV.items(), ("SGLANG_DSV4_TAIL_INTERVAL", "256")):
        monkeypatch.setenv(name, value)
    contenders = (PREFIX, IN_TURN, ROUTER, ROUTER_OF_RANKS)
    rows = bench_ranks.compare(checkpoint, [Load(6, 3, 2, 256, 1)], contenders, free_port(), tmp_path)
    hits, one_rank = ({row["contender"]: row[name] for row in rows} for name in ("hit_rate", "one_rank"))
    assert hits[PREFIX] > hits[IN_TURN] and hits[PREFIX] >= 0.8 * hits[ROUTER]
    assert hits[ROUTER] > hits[IN_TURN] and hits[ROUTER_OF_RANKS] > hits[IN_TURN]
    assert one_rank[ROUTER] == one_rank[ROUTER_OF_RANKS] == 1
