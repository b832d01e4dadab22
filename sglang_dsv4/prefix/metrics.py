"""Prometheus metrics of prefix reuse, on SGLang's own `/metrics` (`--enable-metrics`).

    sglang_dsv4:prefix_hit_tokens_total{tail}           prompt tokens taken from the cache, by where the tail came from
    sglang_dsv4:prefix_recomputed_tokens_total{reason}  prompt tokens computed: no block, no tail, page remainder,
                                                        salt, prompt logprobs
    sglang_dsv4:tail_slots{tier,state}                  checkpoints: free, cached, in use
    sglang_dsv4:tail_bytes{tier}                        memory of a tier's slots
    sglang_dsv4:tail_events_total{event}                what happened to checkpoints

A tail on the host never makes a token be recomputed: it is a hit, with tail="host".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dsv4_radix_cache.accounting import PrefixReport

if TYPE_CHECKING:
    from sglang_dsv4.cache.kv_pool import Dsv4KVPool


class PrefixMetrics:
    """Counts what the requests of one worker report, and mirrors its checkpoint store."""

    def __init__(self, pool: Dsv4KVPool, labels: dict[str, str]) -> None:
        """`labels` are SGLang's. Make it after SGLang has set prometheus_client's multi-process folder."""
        from prometheus_client import Counter, Gauge

        names = list(labels)
        self._labels = labels
        self._pool = pool
        self._hit = Counter("sglang_dsv4:prefix_hit_tokens", "Prompt tokens taken from the cache.", [*names, "tail"])
        self._recomputed = Counter(
            "sglang_dsv4:prefix_recomputed_tokens", "Prompt tokens computed, and why.", [*names, "reason"]
        )
        self._events = Counter("sglang_dsv4:tail_events", "What happened to tail checkpoints.", [*names, "event"])
        how = {"multiprocess_mode": "mostrecent"}
        self._slots = Gauge("sglang_dsv4:tail_slots", "Slots of tail checkpoints.", [*names, "tier", "state"], **how)
        self._bytes = Gauge("sglang_dsv4:tail_bytes", "Memory of tail checkpoints.", [*names, "tier"], **how)
        self._counted = dict.fromkeys(dataclasses.asdict(pool.tails.store.counters), 0)
        storage = pool.tail_storage
        for tier, slots in (("device", storage.device), ("host", storage.host)):
            self._bytes.labels(**labels, tier=tier).set(slots.nbytes)
        self.refresh()

    def report(self, request: str, report: PrefixReport) -> None:
        """A request starts."""
        if report.hit_tokens:
            self._hit.labels(**self._labels, tail=report.tier).inc(report.hit_tokens)
        for reason, tokens in report.recomputed.items():
            if tokens:
                self._recomputed.labels(**self._labels, reason=reason.value).inc(tokens)
        self.refresh()

    def refresh(self) -> None:
        """Copy the store's counts."""
        store = self._pool.tails.store
        for tier, pool in (("device", store.device), ("host", store.host)):
            for state, count in (("free", pool.free), ("cached", pool.cached), ("in use", pool.in_use)):
                self._slots.labels(**self._labels, tier=tier, state=state).set(count)
        for event, count in dataclasses.asdict(store.counters).items():
            if count > self._counted[event]:
                self._events.labels(**self._labels, event=event).inc(count - self._counted[event])
                self._counted[event] = count
