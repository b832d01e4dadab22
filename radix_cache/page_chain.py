"""Names of prefixes: one digest per page, each over the page's tokens and the digest before it.

Two prefixes have the same digest if and only if they have the same tokens and namespace (128-bit BLAKE2b; a collision
is not to be expected before 2**64 pages). So the deepest tail of a prompt is found by looking up its digests, deepest
first, instead of comparing tokens node by node from the root.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

import numpy as np

from dsv4_radix_cache.pages import PAGE_TOKENS

DIGEST_BYTES = 16
_TOKEN_BYTES = 8


class PageChain:
    """Digests of the pages of one growing token sequence, kept with its request so that only new pages are hashed."""

    def __init__(self, namespace: object, overlap_tokens: int = 0) -> None:
        """Make an empty chain.

        Args:
            namespace: equal tokens of different namespaces have different digests.
            overlap_tokens: tokens of the next page that a page's digest covers too (bigram keys).
        """
        self.namespace = namespace
        self.overlap_tokens = overlap_tokens
        self._seed = blake2b(repr(namespace).encode(), digest_size=DIGEST_BYTES).digest()
        self._tokens = np.empty(0, dtype=np.int64)
        self._digests: list[bytes] = []

    def digests(self, tokens: array[int], pages: int) -> list[bytes]:
        """Digests of the first `pages` pages of `tokens` (int64); element i names the prefix of i + 1 pages.

        The tokens may differ from those of an earlier call; digests of a common beginning are reused.

        Raises:
            ValueError: fewer tokens than `pages` pages need.
        """
        needed = pages * PAGE_TOKENS + (self.overlap_tokens if pages else 0)
        if len(tokens) < needed:
            raise ValueError(f"{pages} pages need {needed} tokens, got {len(tokens)}")
        view = np.frombuffer(tokens, dtype=np.int64, count=needed)
        known = min(len(self._tokens), needed)
        if not np.array_equal(view[:known], self._tokens[:known]):
            differing = int(np.flatnonzero(view[:known] != self._tokens[:known])[0])
            del self._digests[max(0, differing - self.overlap_tokens) // PAGE_TOKENS :]
            self._tokens = self._tokens[:0]
        if len(self._digests) < pages:
            raw = memoryview(view).cast("B")
            digest = self._digests[-1] if self._digests else self._seed
            page_bytes = (PAGE_TOKENS + self.overlap_tokens) * _TOKEN_BYTES
            for page in range(len(self._digests), pages):
                first = page * PAGE_TOKENS * _TOKEN_BYTES
                state = blake2b(digest, digest_size=DIGEST_BYTES)
                state.update(raw[first : first + page_bytes])
                digest = state.digest()
                self._digests.append(digest)
        if needed > len(self._tokens):
            self._tokens = view.copy()
        return self._digests[:pages]
