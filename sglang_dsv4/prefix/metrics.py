"""Prometheus metrics of prefix reuse, on SGLang's own `/metrics` (`--enable-metrics`).

    sglang_dsv4:prefix_hit_tokens_total{tail}           prompt tokens reused from the cache, by the tier of the tail
    sglang_dsv4:prefix_recomputed_tokens_total{reason}  prompt tokens computed: no block, no tail, page remainder,
                                                        salt, prompt logprobs
    sglang_dsv4:tail_slots{tier,state}                  tail slots: free, cached, in use
    sglang_dsv4:tail_bytes{tier}                        memory of a tier's tail slots
    sglang_dsv4:tail_events_total{event}                events of tails: reserved, published, lost, …
    sglang_dsv4:tail_errors_total                       bookkeeping errors that the server survived
    sglang_dsv4:prefix_page_tokens_total{tier}          the hit tokens again, by the tier of their pages: device, host,
                                                        storage
    sglang_dsv4:prefix_tier_hits_total{tier}            requests with a hit, by the slowest tier of their pages

With `--enable-hierarchical-cache`:

    sglang_dsv4:host_pages{state}                       pages in host memory: free, cached
    sglang_dsv4:prefix_tier_pages_total{tier,way}       pages, and tails of the storage backend: read, written
    sglang_dsv4:prefix_tier_bytes_total{tier,way}       their bytes
    sglang_dsv4:prefix_tier_seconds_total{tier,way}     their time: of the transfers for host memory, of the
                                                        threads for the storage backend
    sglang_dsv4:prefix_tier_faults_total{reason}        records that were missing, damaged, foreign or not written;
                                                        requests that stopped waiting, prefixes without room

A tail on the host causes no recomputation: it is a hit, with tail="host".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from prometheus_client import Counter
    from sglang.srt.managers.scheduler import Scheduler

    from dsv4_radix_cache.ledger import Ledger
    from sglang_dsv4.prefix.host_tier import HostTier
    from sglang_dsv4.prefix.storage_tier import StorageTier


class PrefixMetrics:
    """Mirrors the counts of one worker's ledger, tail store and tiers."""

    def __init__(
        self,
        ledger: Ledger,
        tier_bytes: Mapping[str, int],
        labels: dict[str, str],
        host: HostTier | None = None,
        storage: StorageTier | None = None,
    ) -> None:
        """Declare the metrics. Make it after SGLang has set prometheus_client's multi-process folder.

        Args:
            ledger: the worker's ledger.
            tier_bytes: memory of each tier's tail slots.
            labels: SGLang's, of this worker.
            host: the host tier, if there is one.
            storage: the storage tier, if there is one.
        """
        from prometheus_client import Counter, Gauge

        names = list(labels)
        self._labels = labels
        self._ledger, self._host, self._storage = ledger, host, storage
        self._hit = Counter("sglang_dsv4:prefix_hit_tokens", "Prompt tokens taken from the cache.", [*names, "tail"])
        self._recomputed = Counter(
            "sglang_dsv4:prefix_recomputed_tokens", "Prompt tokens computed, and why.", [*names, "reason"]
        )
        self._events = Counter("sglang_dsv4:tail_events", "What happened to tails.", [*names, "event"])
        self._errors = Counter("sglang_dsv4:tail_errors", "Bookkeeping errors of tails.", names)
        how = {"multiprocess_mode": "mostrecent"}
        self._slots = Gauge("sglang_dsv4:tail_slots", "Slots of tails.", [*names, "tier", "state"], **how)
        held = Gauge("sglang_dsv4:tail_bytes", "Memory of tails.", [*names, "tier"], **how)
        for tier, count in tier_bytes.items():
            held.labels(**labels, tier=tier).set(count)
        self._page_tokens = Counter(
            "sglang_dsv4:prefix_page_tokens", "Hit tokens by the tier that had their pages.", [*names, "tier"]
        )
        self._hits = Counter(
            "sglang_dsv4:prefix_tier_hits", "Requests that hit, by their slowest tier.", [*names, "tier"]
        )
        if host is not None:
            by_way = [*names, "tier", "way"]
            self._host_pages = Gauge("sglang_dsv4:host_pages", "Pages in host memory.", [*names, "state"], **how)
            self._moved = {
                "pages": Counter("sglang_dsv4:prefix_tier_pages", "Records read and written.", by_way),
                "bytes": Counter("sglang_dsv4:prefix_tier_bytes", "Bytes read and written.", by_way),
                "seconds": Counter("sglang_dsv4:prefix_tier_seconds", "Time of reads and writes.", by_way),
            }
            self._faults = Counter("sglang_dsv4:prefix_tier_faults", "What went wrong, by reason.", [*names, "reason"])
        self._counted: dict[str, float] = {}
        self._errors.labels(**labels)  # shown from the start, as 0
        self.refresh()

    def refresh(self) -> None:
        """Copy the counts to Prometheus."""
        store, totals = self._ledger.store, self._ledger.totals
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
        for tier, tokens in totals.pages.items():
            self._count(f"pages {tier}", self._page_tokens, {"tier": tier}, tokens)
        for tier, count in totals.requests.items():
            self._count(f"requests {tier}", self._hits, {"tier": tier}, count)
        if self._host is not None:
            self._refresh_tiers(self._host, self._storage)

    def _refresh_tiers(self, host: HostTier, storage: StorageTier | None) -> None:
        for state, count in (("free", host.pages.free), ("cached", len(host.pages))):
            self._host_pages.labels(**self._labels, state=state).set(count)
        records = host.copies.records
        moved = {
            ("host", way): {"pages": totals.pages, "bytes": totals.bytes, "seconds": totals.seconds}
            for way, totals in (("read", records.loaded), ("written", records.saved))
        }
        if storage is not None:
            done = storage.totals
            read = {"pages": done.pages_read + done.tails_read, "bytes": done.bytes_read, "seconds": done.read_seconds}
            moved["storage", "read"] = read
            moved["storage", "written"] = {
                "pages": done.pages_written + done.tails_written,
                "bytes": done.bytes_written,
                "seconds": done.write_seconds,
            }
            faults = {fault.value: count for fault, count in storage.faults.items()}
            faults |= {"late": done.late, "dropped": done.dropped, "error": done.errors}
            for reason, count in faults.items():
                self._count(f"fault {reason}", self._faults, {"reason": reason}, count)
        for (tier, way), totals in moved.items():
            for unit, total in totals.items():
                self._count(f"{tier} {way} {unit}", self._moved[unit], {"tier": tier, "way": way}, total)

    def _count(self, key: str, counter: Counter, labels: dict[str, str], total: float) -> None:
        """Raise one time series of a counter to `total`; a series whose total is 0 is not shown."""
        before = self._counted.get(key, 0)
        if total > before:
            counter.labels(**self._labels, **labels).inc(total - before)
            self._counted[key] = total


def publish_after_flush(flushed: bool, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
    """Publish the use of the empty pools; runs after ``Scheduler.flush_cache``.

    SGLang publishes with the next batch, and until then the gauges look like a leak.
    """
    reporter = scheduler.metrics_reporter
    if flushed and live_parts() is not None and reporter.current_scheduler_metrics_enabled:
        scheduler.pool_stats_observer.get_pool_stats().update_scheduler_stats(reporter.stats)
        reporter.stats.gen_throughput = 0
        reporter.metrics_collector.log_stats(reporter.stats)
        scheduler.tree_cache.refresh_metrics()
