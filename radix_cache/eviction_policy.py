"""The eviction policy of tails: which tail to evict when no slot is left, in words and in one number.

Evicting a tail never changes an answer: the compressed blocks stay, and a request that would have used the tail starts
from the nearest tail before it and recomputes the tokens between. So a tail is worth

    value = tokens between it and the tail before it  x  how likely a request's match ends exactly there.

* A tail with another tail close before it is cheap to evict; when that neighbour is evicted, it becomes expensive.
* The *end* of a stored conversation is where the next turn continues, and a *branch point* (two or more stored
  continuations) is where the next divergence will be: both have full weight, and so has a tail that was hit before. A
  tail that only lies on the path to a deeper tail is used if a request diverges exactly there: `PASSED_WEIGHT`.
* Values age. The policy is GreedyDual (Young 1994; Cao and Irani 1997), which equals LRU for equal values and whose
  loss is within a factor of the optimum for arbitrary values: credit = clock + value when a tail is published or hit;
  the tail with the least credit is evicted, and the clock advances to that credit. A long prompt that writes hundreds
  of tails thins out its own tails, since each eviction makes the successor more expensive; it cannot evict the single
  end of another session.

Giving up only the *device copy* of a tail that the host holds too costs one PCIe copy whatever its value, so plain LRU
decides there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Any

PASSED_WEIGHT = 0.125


def value_tokens(gap_tokens: int, successors: int, hits: int) -> float:
    """Expected tokens to recompute if a tail is evicted.

    Args:
        gap_tokens: tokens between the tail and the nearest tail before it (position 0 if there is none).
        successors: tails whose nearest tail before them is this one.
        hits: how often a request resumed from it.
    """
    passed = successors == 1 and hits == 0
    return gap_tokens * (PASSED_WEIGHT if passed else 1.0)


class CreditHeap:
    """Candidates ordered by credit, with O(log n) updates. Ties go to the older entry."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Hashable]] = []  # credit, serial, id
        self._current: dict[Hashable, tuple[float, int]] = {}  # id -> (credit, serial) of its valid heap entry
        self._serial = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, item: Hashable) -> bool:
        return item in self._current

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._current)

    def credit(self, item: Hashable) -> float:
        """The credit of a queued item."""
        return self._current[item][0]

    def put(self, item: Hashable, credit: float) -> None:
        """Insert `item`, or change its credit."""
        self._serial += 1
        self._current[item] = (credit, self._serial)
        heapq.heappush(self._heap, (credit, self._serial, item))
        if len(self._heap) > 64 + 4 * len(self._current):
            self._heap = [(c, s, i) for i, (c, s) in self._current.items()]
            heapq.heapify(self._heap)

    def discard(self, item: Hashable) -> None:
        """Remove `item`, if it is queued."""
        self._current.pop(item, None)

    def least(self, allowed: Callable[[Any], bool]) -> Any | None:  # noqa: ANN401 - an item
        """The item with the least credit among the allowed ones, or None; it stays queued."""
        refused = []
        found = None
        while self._heap:
            entry = self._heap[0]
            credit, serial, item = entry
            if self._current.get(item) != (credit, serial):
                heapq.heappop(self._heap)
            elif allowed(item):
                found = item
                break
            else:
                refused.append(heapq.heappop(self._heap))
        for entry in refused:
            heapq.heappush(self._heap, entry)
        return found
