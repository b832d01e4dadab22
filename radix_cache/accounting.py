"""Accounting of prompt tokens: every token is a hit, or is recomputed for exactly one reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from dsv4_radix_cache.pages import PAGE_TOKENS, page_floor


class Stop(Enum):
    """Why a token of a prompt was recomputed, or why a request's prefix hit ended."""

    NO_BLOCK = "no block"  # the token's compressed entries are not stored
    NO_TAIL = "no tail"  # the entries are stored, but no tail at or after them on the path
    PAGE_REMAINDER = "page remainder"  # it is in an incomplete page, or is the one token that must be computed
    PROMPT_LOGPROBS = "prompt logprobs"  # the request asked for logprobs of its prompt from this token on
    SALT = "salt"  # no page of the prompt is stored under the request's cache_salt or extra_key


@dataclass(frozen=True)
class PrefixReport:
    """Sources of a request's prompt, as token counts; `hit + sum(recomputed) == prompt_tokens`."""

    prompt_tokens: int
    hit_tokens: int
    recomputed: dict[Stop, int]
    stop: Stop
    tier: str | None  # tier of the tail: "device", "host", or None when nothing was hit
    host_tokens: int = 0  # hit tokens whose pages were loaded from host memory
    storage_tokens: int = 0  # hit tokens whose pages were fetched from the storage backend, and loaded
    stored_tokens: int = 0  # tokens that the longest stored path begins with; hits end at pages and tails before
    differs: bool = False  # that path has another token there

    @property
    def why(self) -> str:
        """A sentence for people: the token at which the prompt leaves the stored ones, and why less was reused."""
        stored, hit = self.stored_tokens, self.hit_tokens
        if self.differs:
            found = f"prompt differs from the stored one at token {stored}"
        elif stored == 0:
            found = "no stored prompt begins with the prompt's tokens"
            found += " under its cache_salt or extra_key" if self.stop is Stop.SALT else ""
        elif stored < self.prompt_tokens:
            found = f"prompt is stored up to token {stored}"
        else:
            found = "the whole prompt is stored"
        if hit == stored:
            return found
        reasons = {
            Stop.NO_TAIL: "no tail is kept after that",
            Stop.PROMPT_LOGPROBS: "log-probabilities of the prompt were asked for",
        }
        pages = f"whole pages of {PAGE_TOKENS} tokens are reused, and the last token is computed always"
        reason = reasons.get(self.stop, pages)
        return f"{found}; reused up to token {hit}: {reason}"

    @property
    def pages_from(self) -> dict[str, int]:
        """Hit tokens by the tier that had their pages; tiers without any are left out."""
        device = self.hit_tokens - self.host_tokens - self.storage_tokens
        tiers = {"device": device, "host": self.host_tokens, "storage": self.storage_tokens}
        return {tier: tokens for tier, tokens in tiers.items() if tokens}

    def as_meta(self) -> dict[str, object]:
        """The report as a response's meta_info shows it."""
        return {
            "position": self.hit_tokens,
            "stopped_by": self.stop.value,
            "tail_from": self.tier,
            "pages_from": self.pages_from,
            "stored_tokens": self.stored_tokens,
            "differs_at": self.stored_tokens if self.differs else None,
            "why": self.why,
            "recomputed": {stop.value: tokens for stop, tokens in self.recomputed.items() if tokens},
        }


@dataclass
class PrefixTotals:
    """Token counts over all requests that have started, and bookkeeping errors. They only grow."""

    hit: Counter[str] = field(default_factory=Counter)  # by the tier of the tail
    pages: Counter[str] = field(default_factory=Counter)  # the same tokens, by the tier of their pages
    requests: Counter[str] = field(default_factory=Counter)  # requests with a hit, by the slowest tier of their pages
    recomputed: Counter[Stop] = field(default_factory=Counter)
    errors: int = 0

    def add(self, report: PrefixReport) -> None:
        """Add the report of a request that starts."""
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
    stored: tuple[int, bool] = (0, False),
) -> PrefixReport:
    """The report of a prompt: every token accounted for.

    Args:
        prompt_tokens: length of the prompt; at least 1.
        hit_tokens: tokens reused from the cache, up to the tail at which the match ended.
        block_tokens: tokens whose compressed blocks are stored, contiguously from position 0 (>= hit_tokens).
        limit_tokens: tokens beyond which the match was not allowed to go (a request that wants logprobs of its prompt).
        salted: whether the request has a cache namespace of its own. Whether *another* namespace holds the prompt is
            not looked up: the answer would tell one tenant what another one asked.
        tier: tier of the tail.
        host_tokens, storage_tokens: hit tokens whose pages were loaded from host memory, and from the storage backend.
        stored: tokens that the longest stored path begins with, and whether it has another token there; a path of fewer
            than `block_tokens` tokens lacks the pages that only host memory had.

    Raises:
        ValueError: the counts contradict each other.
    """
    whole = page_floor(max(0, prompt_tokens - 1))
    usable = min(whole, page_floor(limit_tokens))
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
    tokens, differs = stored if stored[0] >= block_tokens else (min(block_tokens, prompt_tokens), False)
    return PrefixReport(prompt_tokens, hit_tokens, recomputed, stop, tier, host_tokens, storage_tokens, tokens, differs)
