"""The Prometheus metrics mirror the ledger: every event is counted once."""

from __future__ import annotations

from collections.abc import Iterator

import prometheus_client
import pytest
from prefix.tiered import Backend, TieredEngine
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from dsv4_radix_cache.ledger import Ledger, Match
from dsv4_radix_cache.placement import Placement
from dsv4_radix_cache.tail_store import TailStore
from sglang_dsv4.cache.record_files import Fault
from sglang_dsv4.prefix.metrics import PrefixMetrics

LABELS = {"model_name": "tiny"}


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(TailStore(4, 2), Placement(), ring_rows=128, state_rows=8, strict=False)


@pytest.fixture
def metrics(ledger: Ledger, own_prometheus: None) -> PrefixMetrics:
    return PrefixMetrics(ledger, {"device": 4000, "host": 2000}, LABELS)


@pytest.fixture
def own_prometheus() -> Iterator[None]:
    """The registry that SGLang serves; new collectors are unregistered afterwards, or another test's would collide."""
    registry, before = prometheus_client.REGISTRY, set(prometheus_client.REGISTRY._collector_to_names)
    yield
    for collector in set(registry._collector_to_names) - before:
        registry.unregister(collector)


def value(name: str, **labels: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(f"sglang_dsv4:{name}", {**LABELS, **labels})


def test_counts_are_mirrored(ledger: Ledger, metrics: PrefixMetrics) -> None:
    assert value("tail_bytes", tier="host") == 2000 and value("tail_slots", tier="device", state="free") == 4
    assert value("tail_errors_total") == 0 and value("prefix_hit_tokens_total", tail="device") is None
    tail, _ = ledger.store.reserve(256)
    ledger.store.publish(tail.id, None)
    ledger.admit(1, 1, Match(600, tail.id, 256, 512, 600, False))
    ledger.resume(1, 1, 256)
    for _ in range(2):
        metrics.refresh()
        assert value("prefix_hit_tokens_total", tail="device") == 256
        assert value("prefix_recomputed_tokens_total", reason="no tail") == 256
        assert value("prefix_recomputed_tokens_total", reason="page remainder") == 88
        assert value("tail_events_total", event="host_writes") == 1
        assert value("tail_slots", tier="device", state="cached") == 1


def test_a_bookkeeping_error_is_counted(ledger: Ledger, metrics: PrefixMetrics) -> None:
    ledger.admit(1, 1, Match(600, None, 0, 0, 600, False))
    ledger.resume(1, 1, 0)
    ledger.extend(1, 1, 0, 512)
    ledger.resume(1, 1, 300)
    metrics.refresh()
    assert value("tail_errors_total") == 1
    assert value("tail_slots", tier="device", state="in use") == 0


def test_tiers_are_counted(own_prometheus: None) -> None:
    """A prefix that is saved to host memory and loaded again, and a prefix that another server has stored."""
    backend = Backend()
    engine = TieredEngine.made(pages=16, host_pages=48, backend=backend)
    metrics = PrefixMetrics(engine.ledger, {}, LABELS, engine.tiers, engine.storage)
    prompt = list(range(1000, 1000 + 3 * 256 + 9))
    engine.run(prompt, [7])
    engine.cache.evict(EvictParams(num_tokens=16 * 256))
    engine.run(prompt, [7])
    engine.settle()
    engine.flush()
    engine.arrive(prompt)
    backend.faults[Fault.CORRUPT] += 2
    engine.run(prompt, [7])
    for _ in range(2):
        metrics.refresh()
        assert (
            value("prefix_tier_hits_total", tier="host") == 1 and value("prefix_tier_hits_total", tier="storage") == 1
        )
        assert (
            value("prefix_page_tokens_total", tier="host") == value("prefix_page_tokens_total", tier="storage") == 768
        )
        assert value("prefix_tier_pages_total", tier="host", way="written") == 3
        assert value("prefix_tier_pages_total", tier="host", way="read") == 6
        assert value("prefix_tier_pages_total", tier="storage", way="read") == 4, "three pages and a tail"
        assert value("prefix_tier_bytes_total", tier="storage", way="read") == 4 * 16
        assert value("prefix_tier_seconds_total", tier="storage", way="read") > 0
        assert value("prefix_tier_faults_total", reason="corrupt") == 2
        assert value("host_pages", state="cached") == 3 and value("host_pages", state="free") == 45
