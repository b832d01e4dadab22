"""A random trace through router, prefill server and decode server: no wrong answer, nothing held in the end.

`serving.pd_trace` as a script runs traces of any length.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from serving import pd_trace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("sglang_router") is None, reason="needs sglang-router: pip install --no-deps sglang-router==0.3.2"
    ),
]


def test_a_random_trace_with_aborts_and_kills(tmp_path: Path) -> None:
    """Each server is killed once. Requests that were aborted when the other server did not know their pages yet stayed
    in the prefill server's tables for ever, and in the decode server for minutes."""
    report = pd_trace.run(tmp_path, count=200, kills=2, seed=1)
    assert report["wrong"] == []
    assert not pd_trace.holds_something(report["held"]), report["held"]
    assert report["outcomes"]["whole"] + report["outcomes"]["streamed"] > 50, report["outcomes"]
