"""Retention at a tenth of the simulation's size: the bounds that the policy must meet.

benchmarks/prefix_simulation.py has the same traces, larger, and the comparison with SGLang's own policy.
"""

from __future__ import annotations

import random

import pytest
from lib.prefix_replay import tail_engine
from lib.prefix_traces import Trace, agent_loop, alternation, retention, volatile_tail

from dsv4_radix_cache.page_chain import PageChain

INTERVAL = 2048


def test_retention_with_device_slots_for_a_quarter_of_the_tails() -> None:
    """8 prefixes of 4K tokens write 24 tails or more; 6 device slots, the rest on the host."""
    trace = Trace(tail_engine(65_536, device_slots=6, host_slots=64, chunk_tokens=1024), seed=1)
    retention(trace, small=True)
    assert len(trace.engine.ledger.store) >= 4 * 6
    assert len(trace.hits) == 8 and sum(trace.hits) >= 0.98 * sum(trace.bounds)
    assert trace.engine.ledger.store.counters.hits_host > 0


def test_alternating_sessions_recompute_at_most_one_interval() -> None:
    """Eight device slots and no host: each session's prefill writes more tails than that."""
    trace = Trace(tail_engine(65_536, device_slots=8, chunk_tokens=2048), seed=2)
    alternation(trace, small=True)
    lost = [bound - hit for hit, bound in zip(trace.hits, trace.bounds, strict=True)]
    assert trace.engine.ledger.store.counters.lost > 0
    assert max(lost) <= INTERVAL, lost


def test_an_agent_recomputes_its_new_tokens_and_the_page_remainder() -> None:
    trace = Trace(tail_engine(131_072, device_slots=16, host_slots=64, chunk_tokens=2048), seed=3)
    agent_loop(trace, small=True)
    assert trace.hits == trace.bounds


def test_a_volatile_tail_costs_one_miss_an_interval_at_most() -> None:
    trace = Trace(tail_engine(131_072, device_slots=32, host_slots=64, chunk_tokens=2048), seed=4)
    volatile_tail(trace, small=True)
    lost = [bound - hit for hit, bound in zip(trace.hits, trace.bounds, strict=True)]
    assert max(lost) < INTERVAL
    assert [lost[i] for i in (2, 5, 8, 11)] == [0, 0, 0, 0], "the third request pays nothing"


@pytest.mark.parametrize("overlap", [0, 1], ids=["tokens", "bigrams"])
def test_digests_name_prefixes(overlap: int) -> None:
    """Digests are equal exactly for equal prefixes of the same namespace, in any order of calls."""
    from array import array

    rng = random.Random(5)
    tokens = array("q", [rng.randrange(1 << 40) for _ in range(1025)])
    known = PageChain(("a", None), overlap)
    full = list(known.digests(tokens, 4))
    assert len(set(full)) == 4
    assert list(known.digests(tokens[: 512 + overlap], 2)) == full[:2] and list(known.digests(tokens, 4)) == full
    assert list(PageChain(("a", None), overlap).digests(tokens, 4)) == full
    assert PageChain((None, "a"), overlap).digests(tokens, 4)[0] != full[0]
    for changed in (0, 255, 256, 511, 700, 1023):
        other = tokens[:]
        other[changed] += 1
        same = changed // 256 - (overlap and changed % 256 == 0 and changed > 0)
        for chain in (known, PageChain(("a", None), overlap)):  # a chain survives a change of its request's tokens
            digests = chain.digests(other, 4)
            assert [a == b for a, b in zip(digests, full, strict=True)] == [i < same for i in range(4)]
        assert list(known.digests(tokens, 4)) == full
    with pytest.raises(ValueError, match="5 pages need"):
        known.digests(tokens, 5)
