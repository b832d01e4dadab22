"""Tail placement: the positions inside one prefill chunk at which tails are written."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_radix_cache.pages import PAGE_TOKENS, page_floor

DEFAULT_INTERVAL_TOKENS = 2048


@dataclass(frozen=True)
class Placement:
    """The placement rule. `interval_tokens` is the distance of tails inside a prefill: the first request that diverges
    inside a stored prefix recomputes at most that many tokens."""

    interval_tokens: int = DEFAULT_INTERVAL_TOKENS

    def __post_init__(self) -> None:
        """Raise ValueError unless the interval is a positive multiple of the page."""
        if self.interval_tokens <= 0 or self.interval_tokens % PAGE_TOKENS:
            raise ValueError(
                f"the tail interval must be a positive multiple of {PAGE_TOKENS} tokens, got {self.interval_tokens}"
            )

    def in_chunk(self, begin: int, end: int, prompt_tokens: int, branch: int | None = None) -> list[int]:
        """Positions of tails in (begin, end] of a chunk, in a prompt of `prompt_tokens` tokens; most valuable first.

        * the last page boundary of the prompt, and the boundary at which the *same* prompt would match again (a match
          must leave at least one token to compute, so the two differ when the prompt fills its last page);
        * `branch`: the position where this request diverged from a stored prefix (a learned branch point);
        * the chunk's end, if it is a page boundary: a request that is retracted or aborted later loses no chunk;
        * multiples of the interval, counted from position 0, so that different requests agree on them.

        When tail slots are short, the first positions get them.
        """
        last = page_floor(prompt_tokens)
        again = page_floor(prompt_tokens - 1)
        wanted = [last, again]
        if branch is not None:
            wanted.append(page_floor(branch))
        if end % PAGE_TOKENS == 0:
            wanted.append(end)
        first_multiple = begin // self.interval_tokens * self.interval_tokens + self.interval_tokens
        wanted.extend(range(first_multiple, end + 1, self.interval_tokens))
        return [position for position in dict.fromkeys(wanted) if begin < position <= end]
