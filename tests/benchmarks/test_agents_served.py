"""The benchmark of agent programs against the CPU server."""

from __future__ import annotations

import agents
import pytest
from agents import figures_of
from lib.agent_sessions import ALL, SEED, STYLES, Load
from serving.server import Server


@pytest.mark.slow
def test_sessions_on_the_cpu_server(server: Server) -> None:
    """Two sessions, on a server whose memory holds one of them: every request is counted, and both styles hit alike."""
    load = Load(sessions=2, turns=8, at_once=2, scale=0.02)
    for style in STYLES:
        found = figures_of(*agents.run(server.url, load.requests(style, SEED), load.at_once))
        assert found[ALL, "requests"] == 2 * (8 + 6)
        assert found["subagent", "hit_rate"] > 0.2 and found["grow", "hit_rate"] > 0.5
