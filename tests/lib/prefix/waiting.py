"""The calls of SGLang's scheduler around a storage backend, for engines that replay requests."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_dsv4.prefix.prefix_cache import Dsv4PrefixCache


class WithStorage:
    """Rounds of the scheduler, and requests that wait for a storage backend."""

    cache: Dsv4PrefixCache

    def active(self) -> AbstractContextManager[None]:
        """The engine's context."""
        return nullcontext()

    def round(self) -> None:
        """Do what the scheduler does in every round, whether or not a forward follows."""
        with self.active():
            self.cache.check_hicache_events()

    def settle(self) -> None:
        """Run rounds until no read or write of the storage backend is under way."""
        deadline = time.monotonic() + 30
        self.round()
        while self.cache.storage is not None and not self.cache.storage.idle:
            assert time.monotonic() < deadline, "the storage does not come to rest"
            time.sleep(0.001)
            self.round()

    def arrive(self, prompt: Sequence[int], name: str = "r", patience_s: float = 30) -> bool:
        """Do what the scheduler does when a request arrives; returns whether it need not wait any longer."""
        key = RadixKey(array("q", prompt), limit=len(prompt) - 1)
        with self.active():
            match = self.cache.match_prefix(MatchPrefixParams(key=key))
        known = match.device_prefix_len + match.host_hit_length
        tokens = array("q", prompt)
        self.cache.prefetch_from_storage(
            handle(name), 0, tokens[known : len(prompt) - 1], matched_prefix_tokens=tokens[:known]
        )
        deadline = time.monotonic() + patience_s
        while not self.cache.check_prefetch_progress(handle(name)) and time.monotonic() < deadline:
            self.round()
            time.sleep(0.0005)
        return self.cache.check_prefetch_progress(handle(name))


def handle(name: str) -> CacheRequestHandle:
    """The scheduler's handle of a request."""
    return CacheRequestHandle(name, 0)
