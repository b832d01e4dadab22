"""Why a prefix match stopped where it did: every prompt token is a hit or is recomputed for exactly one reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from dsv4_radix_cache.ring import PAGE_TOKENS


class Stop(Enum):
    """Why a token of a prompt was recomputed, or where a request's prefix hit ended."""

    NO_BLOCK = "no block"  # its compressed blocks are not stored
    NO_TAIL = "no tail"  # the blocks are stored, and no checkpoint at or after them on the path
    PAGE_REMAINDER = "page remainder"  # less than one page follows, or the token is needed to have something to compute
    PROMPT_LOGPROBS = "prompt logprobs"  # the request asked for logprobs of its prompt from there on
    SALT = "salt"  # not one page of the prompt is stored under the request's cache_salt or extra_key


@dataclass(frozen=True)
class PrefixReport:
    """How far a request's prompt was taken from the cache. Token counts; `hit + sum(recomputed) == prompt_tokens`."""

    prompt_tokens: int
    hit_tokens: int
    recomputed: dict[Stop, int]
    stop: Stop
    tier: str | None  # where the tail came from: "device", "host", or None when nothing was hit
    host_tokens: int = 0  # of the hit: their pages were loaded from host memory
    storage_tokens: int = 0  # of the hit: their pages were fetched from the storage, and loaded

    @property
    def pages_from(self) -> dict[str, int]:
        """Hit tokens by the tier that had their pages; tiers that had none are left out."""
        device = self.hit_tokens - self.host_tokens - self.storage_tokens
        tiers = {"device": device, "host": self.host_tokens, "storage": self.storage_tokens}
        return {tier: tokens for tier, tokens in tiers.items() if tokens}

    def as_meta(self) -> dict[str, object]:
        """The form in which a response's meta_info carries it."""
        return {
            "position": self.hit_tokens,
            "stopped_by": self.stop.value,
            "tail_from": self.tier,
            "pages_from": self.pages_from,
            "recomputed": {stop.value: tokens for stop, tokens in self.recomputed.items() if tokens},
        }


@dataclass
class PrefixTotals:
    """Token counts over all requests that have started, and errors in this bookkeeping. Only ever grow."""

    hit: Counter[str] = field(default_factory=Counter)  # by the tier that the tail came from
    pages: Counter[str] = field(default_factory=Counter)  # the same tokens, by the tier that had their pages
    requests: Counter[str] = field(default_factory=Counter)  # that hit, by the slowest tier that had pages of theirs
    recomputed: Counter[Stop] = field(default_factory=Counter)
    errors: int = 0

    def add(self, report: PrefixReport) -> None:
        """Count a request that starts."""
        if report.hit_tokens:
            self.hit[report.tier] += report.hit_tokens
            self.pages.update(report.pages_from)
            self.requests[list(report.pages_from)[-1]] += 1
        self.recomputed.update(report.recomputed)


def explain(
    prompt_tokens: int,
    hit_tokens: int,
    block_tokens: int,
    limit_tokens: int,
    salted: bool,
    tier: str | None,
    host_tokens: int = 0,
    storage_tokens: int = 0,
) -> PrefixReport:
    """Account for every token of a prompt.

    Args:
        prompt_tokens: its length; at least 1.
        hit_tokens: tokens taken from the cache, up to the checkpoint that the match ended at.
        block_tokens: tokens whose compressed blocks are stored, in a row from position 0 (>= hit_tokens).
        limit_tokens: the match was not allowed to go beyond it (a request that wants logprobs of its prompt).
        salted: whether the request has a cache namespace of its own. Whether *another* namespace holds the prompt is
            not looked up: the answer would tell one tenant what another one asked.
        tier: where the tail comes from.
        host_tokens, storage_tokens: of the hit, those whose pages were loaded from host memory, and from the storage.

    Raises:
        ValueError: the counts contradict each other.
    """
    whole = max(0, prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
    usable = min(whole, limit_tokens // PAGE_TOKENS * PAGE_TOKENS)
    if not 0 <= hit_tokens <= usable or block_tokens < hit_tokens:
        raise ValueError(f"prompt {prompt_tokens}, hit {hit_tokens}, blocks {block_tokens}: not a prefix match")
    blocks = min(block_tokens, usable)
    missing = Stop.SALT if salted and blocks == 0 else Stop.NO_BLOCK
    recomputed = {
        Stop.NO_TAIL: blocks - hit_tokens,
        missing: usable - blocks,
        Stop.PROMPT_LOGPROBS: whole - usable,
        Stop.PAGE_REMAINDER: prompt_tokens - whole,
    }
    stop = next(reason for reason, tokens in recomputed.items() if tokens)
    tier = tier if hit_tokens else None
    return PrefixReport(prompt_tokens, hit_tokens, recomputed, stop, tier, host_tokens, storage_tokens)
