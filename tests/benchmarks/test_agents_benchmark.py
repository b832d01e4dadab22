"""The benchmarks of agent programs: the shapes of their sessions, their sums, and a small simulation."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import agents
import agents_simulation
import pytest
from agents import Reply, figures_of
from lib import agent_sessions
from lib.agent_sessions import ALL, CLEARED, KINDS, STYLES, Load, Request
from lib.policy_memory import Budget

TURNS = 14


def texts(request: Request) -> list[str]:
    return [json.dumps(message) for message in request.messages]


def shared(one: Request, other: Request) -> int:
    """Return how many messages two requests have in common from the first on."""
    pairs = zip(texts(one), texts(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def requests_of(number: int = 0, seed: int = 3, style: str = "system") -> list[Request]:
    program = agent_sessions.program(0, seed, 0.05)
    return list(agent_sessions.session(program, number, seed, TURNS, style, 0.05))


def test_a_seed_makes_the_same_sessions() -> None:
    assert requests_of() == requests_of()
    assert requests_of(seed=4) != requests_of() != requests_of(number=1)
    styles = [requests_of(style=style) for style in STYLES]
    for system, user in zip(*styles, strict=True):  # the styles differ in the reminders' role alone
        assert [message["content"] for message in system.messages] == [message["content"] for message in user.messages]


@pytest.mark.parametrize("number", range(4))
def test_every_kind_of_request_has_its_shape(number: int) -> None:
    found = requests_of(number)
    main, sub, before = [], [], None
    for request in found:
        is_sub = request.kind == "subagent" or len(sub) % agent_sessions.SUBAGENT_TURNS > 0
        (sub if is_sub else main).append(request)
    assert {request.kind for request in found} >= set(KINDS) - {"moved"}
    assert len(main) == TURNS and len(sub) == 2 * agent_sessions.SUBAGENT_TURNS
    for request in main:
        kept = 0 if before is None else shared(before, request)
        assert request.messages[-1]["role"] == "system" and request.messages[0] == found[0].messages[0]
        if request.kind == "grow":
            assert kept == len(before.messages)
        elif request.kind == "moved":
            assert kept == len(before.messages) - 1 < len(request.messages)
        elif request.kind == "edit":
            assert 0 < kept < len(before.messages) - 1 and request.messages[kept]["content"] == CLEARED
        elif request.kind == "compact":
            assert kept == 1 and len(request.messages) == 3
        before = request
    for first, *more in (sub[: agent_sessions.SUBAGENT_TURNS], sub[agent_sessions.SUBAGENT_TURNS :]):
        assert shared(first, found[0]) == 1 and first.tools == found[0].tools
        assert [request.kind for request in more] == ["grow"] * len(more)


def test_requests_that_edit_and_move_are_among_those_of_the_measured_load() -> None:
    kinds = {request.kind for requests in Load(4, TURNS, 4, 0.02).requests("user", 71) for request in requests}
    assert kinds == set(KINDS)


def test_figures_are_weighted_by_tokens() -> None:
    replies = [Reply("grow", 1000, 900, 0.1), Reply("grow", 3000, 0, 0.3), Reply("edit", 1000, 300, 0.2)]
    found = figures_of(replies, 2.0)
    assert found["grow", "hit_rate"] == 900 / 4000 and found["edit", "hit_rate"] == 0.3
    assert found[ALL, "hit_rate"] == 1200 / 5000 and found[ALL, "tok_s"] == 2500
    assert found["grow", "ttft_p50"] == pytest.approx(200) and ("start", "requests") not in found


def test_servers_that_were_measured_are_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours gets the bytes that the built-in really had, also where they are those of an earlier command."""
    started: list[tuple[str, ...]] = []

    @contextlib.contextmanager
    def running(
        name: str, model: Path, flags: list[str], port: int, log: Path, alone: bool
    ) -> Iterator[SimpleNamespace]:
        assert alone
        started.append((name, *flags[-2:]))
        yield SimpleNamespace(contender=name, kv_memory=lambda: (900.0 if name == "builtin" else 890.0, 512))

    monkeypatch.setattr(agents, "running", running)
    monkeypatch.setattr(agents, "measure", lambda server, load, style: {("grow", "hit_rate"): 0.5})
    monkeypatch.setattr(agents, "builtin_tokens", lambda *arguments: 256)
    monkeypatch.setattr(agents, "tokens_that_fit", lambda model, size, flags: int(size))
    arguments = argparse.Namespace(
        **{"models": tmp_path, "sessions": 1, "turns": 8, "at_once": 1, "scale": 1.0, "tiny": False, "flags": []},
        **{"builtin_flags": "", "kv_gib": 1.0, "port": 1, "logs": tmp_path, "out": tmp_path / "out.json"},
        **{"styles": STYLES, "contenders": ["builtin"]},
    )
    agents.compare(arguments, agents.Results({}, {}))
    arguments.contenders = ["builtin", "ours"]
    agents.compare(arguments, agents.Results(json.loads(arguments.out.read_text()), {}))
    assert started == [("builtin", agents.LIMIT, "256"), ("ours", agents.LIMIT, "900")]
    arguments.builtin_flags = f"{agents.LIMIT} 512"
    agents.compare(arguments, agents.Results({}, {}))
    assert started[2:] == [("builtin", agents.LIMIT, "512"), ("ours", agents.LIMIT, "900")]
    rows = json.loads(arguments.out.read_text())["rows"]
    assert [(row["style"], row["builtin"], row["ours"]) for row in rows] == [(style, 0.5, 0.5) for style in STYLES]


def test_a_simulation_without_memory_pressure_hits_what_an_unbounded_cache_would() -> None:
    """Both policies reuse whole pages of equal prompts. With reminders at the front the prompts themselves differ."""
    budget = Budget.of(65_536)
    render, make = agents_simulation.renderers(), agents_simulation.engines(budget, 1024)
    found = {}
    for style, name in (("system", "builtin"), ("system", "ours"), ("user", "builtin"), ("user", "ours")):
        sessions = Load(1, 8, 1, 0.1).requests(style, 71)
        found[style, name] = agents_simulation.replay(sessions, render[name], make[name]())
    for counts in found.values():
        every = counts[ALL]
        assert every["requests"] == sum(c["requests"] for kind, c in counts.items() if kind != ALL) == 8 + 6
        assert 0.9 * every["bound"] < every["hit"] <= every["bound"]
    assert found["system", "ours"] == found["user", "ours"]
    assert found["user", "builtin"][ALL]["prompt"] == found["user", "ours"][ALL]["prompt"]
    assert found["system", "builtin"][ALL]["bound"] < 0.5 * found["user", "builtin"][ALL]["bound"]
