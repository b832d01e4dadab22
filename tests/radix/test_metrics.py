"""The Prometheus metrics mirror the ledger: what has been counted is counted once."""

from __future__ import annotations

from collections.abc import Iterator

import prometheus_client
import pytest

from dsv4_radix_cache.placement import Placement
from dsv4_radix_cache.requests import Match, TailRequests
from dsv4_radix_cache.store import CheckpointStore
from sglang_dsv4.prefix.metrics import PrefixMetrics

LABELS = {"model_name": "tiny"}


@pytest.fixture
def tails() -> TailRequests:
    return TailRequests(CheckpointStore(4, 2), Placement(), ring_rows=128, state_rows=8, strict=False)


@pytest.fixture
def metrics(tails: TailRequests, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefixMetrics]:
    """In the registry that SGLang serves; taken out again, as another test's would collide."""
    registry, before = prometheus_client.REGISTRY, set(prometheus_client.REGISTRY._collector_to_names)
    yield PrefixMetrics(tails, {"device": 4000, "host": 2000}, LABELS)
    for collector in set(registry._collector_to_names) - before:
        registry.unregister(collector)


def value(name: str, **labels: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(f"sglang_dsv4:{name}", {**LABELS, **labels})


def test_counts_are_mirrored(tails: TailRequests, metrics: PrefixMetrics) -> None:
    assert value("tail_bytes", tier="host") == 2000 and value("tail_slots", tier="device", state="free") == 4
    assert value("tail_errors_total") == 0 and value("prefix_hit_tokens_total", tail="device") is None
    checkpoint, _ = tails.store.reserve(256)
    tails.store.publish(checkpoint.id, None)
    tails.admit(1, 1, Match(600, checkpoint.id, 256, 512, 600, False))
    tails.resume(1, 1, 256)
    for _ in range(2):
        metrics.refresh()
        assert value("prefix_hit_tokens_total", tail="device") == 256
        assert value("prefix_recomputed_tokens_total", reason="no tail") == 256
        assert value("prefix_recomputed_tokens_total", reason="page remainder") == 88
        assert value("tail_events_total", event="host_writes") == 1
        assert value("tail_slots", tier="device", state="cached") == 1


def test_a_bookkeeping_error_is_counted(tails: TailRequests, metrics: PrefixMetrics) -> None:
    tails.admit(1, 1, Match(600, None, 0, 0, 600, False))
    tails.resume(1, 1, 0)
    tails.extend(1, 1, 0, 512)
    tails.resume(1, 1, 300)
    metrics.refresh()
    assert value("tail_errors_total") == 1
    assert value("tail_slots", tier="device", state="in use") == 0
