"""Prometheus metrics of prefix reuse, on SGLang's own `/metrics` (`--enable-metrics`).

    sglang_dsv4:prefix_hit_tokens_total{tail}           prompt tokens taken from the cache, by where the tail came from
    sglang_dsv4:prefix_recomputed_tokens_total{reason}  prompt tokens computed: no block, no tail, page remainder,
                                                        salt, prompt logprobs
    sglang_dsv4:tail_slots{tier,state}                  checkpoints: free, cached, in use
    sglang_dsv4:tail_bytes{tier}                        memory of a tier's slots
    sglang_dsv4:tail_events_total{event}                what happened to checkpoints
    sglang_dsv4:tail_errors_total                       errors in their bookkeeping that the server outlived

A tail on the host never makes a token be recomputed: it is a hit, with tail="host".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter

    from dsv4_radix_cache.requests import TailRequests


class PrefixMetrics:
    """Mirrors the counts of one worker's ledger and checkpoint store."""

    def __init__(self, tails: TailRequests, tier_bytes: Mapping[str, int], labels: dict[str, str]) -> None:
        """Declare the metrics. Make it after SGLang has set prometheus_client's multi-process folder.

        Args:
            tails: whose counts.
            tier_bytes: memory of each tier's slots.
            labels: SGLang's, of this worker.
        """
        from prometheus_client import Counter, Gauge

        names = list(labels)
        self._labels = labels
        self._tails = tails
        self._hit = Counter("sglang_dsv4:prefix_hit_tokens", "Prompt tokens taken from the cache.", [*names, "tail"])
        self._recomputed = Counter(
            "sglang_dsv4:prefix_recomputed_tokens", "Prompt tokens computed, and why.", [*names, "reason"]
        )
        self._events = Counter("sglang_dsv4:tail_events", "What happened to tail checkpoints.", [*names, "event"])
        self._errors = Counter("sglang_dsv4:tail_errors", "Bookkeeping errors of tail checkpoints.", names)
        how = {"multiprocess_mode": "mostrecent"}
        self._slots = Gauge("sglang_dsv4:tail_slots", "Slots of tail checkpoints.", [*names, "tier", "state"], **how)
        held = Gauge("sglang_dsv4:tail_bytes", "Memory of tail checkpoints.", [*names, "tier"], **how)
        for tier, count in tier_bytes.items():
            held.labels(**labels, tier=tier).set(count)
        self._counted: dict[str, int] = {}
        self._errors.labels(**labels)  # shown from the start, as 0
        self.refresh()

    def refresh(self) -> None:
        """Copy the counts."""
        store, totals = self._tails.store, self._tails.totals
        for tier, pool in (("device", store.device), ("host", store.host)):
            for state, count in (("free", pool.free), ("cached", pool.cached), ("in use", pool.in_use)):
                self._slots.labels(**self._labels, tier=tier, state=state).set(count)
        for tier, tokens in totals.hit.items():
            self._count(f"hit {tier}", self._hit, {"tail": tier}, tokens)
        for reason, tokens in totals.recomputed.items():
            self._count(f"recomputed {reason.value}", self._recomputed, {"reason": reason.value}, tokens)
        for event, count in dataclasses.asdict(store.counters).items():
            self._count(f"event {event}", self._events, {"event": event}, count)
        self._count("errors", self._errors, {}, totals.errors)

    def _count(self, key: str, counter: Counter, labels: dict[str, str], total: int) -> None:
        """Raise one time series of a counter to `total`; a series that never counted anything is not shown."""
        before = self._counted.get(key, 0)
        if total > before:
            counter.labels(**self._labels, **labels).inc(total - before)
            self._counted[key] = total
