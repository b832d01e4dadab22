"""Which checkpoint to lose when no slot is left, in words and in one number.

Losing a checkpoint never loses an answer: the compressed blocks stay, and the request that would have used it starts
from the nearest checkpoint before it and recomputes the tokens between. So a checkpoint is worth

    value = tokens between it and the checkpoint before it  x  how likely a request ends exactly here.

* A checkpoint with another one close before it is cheap to lose; when that neighbour goes, it becomes dear.
* The *end* of a stored conversation is where the next turn continues, and a *branch point* (two or more stored
  continuations) is where the next divergence will be: full weight. So is one that was hit before. A checkpoint which
  only lies on the way to a deeper one is used when a request diverges just there: `PASSED_WEIGHT`.
* Values age. We use GreedyDual (Young 1994; Cao and Irani 1997), which is LRU for equal values and whose loss is
  within a factor of the optimum for any: credit = clock + value when a checkpoint is stored or hit, the one with the
  least credit goes, and the clock moves up to the credit it had. A long prompt that leaves hundreds of checkpoints
  thins out its own, since each one lost makes its successor dearer; it can't flush the single end of another session.

Taking away only the *device copy* of a checkpoint which the host also holds costs one PCIe copy whatever it is, so
there plain LRU decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Any

PASSED_WEIGHT = 0.125


def value_tokens(gap_tokens: int, successors: int, hits: int) -> float:
    """Expected tokens that losing a checkpoint costs.

    Args:
        gap_tokens: tokens between it and the nearest checkpoint before it (position 0 if there is none).
        successors: checkpoints whose nearest one before them this is.
        hits: times that a request was resumed from it.
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

    def __iter__(self) -> object:
        return iter(self._current)

    def credit(self, item: Hashable) -> float:
        """The credit under which `item` is queued."""
        return self._current[item][0]

    def put(self, item: Hashable, credit: float) -> None:
        """Insert `item` or move it to another credit."""
        self._serial += 1
        self._current[item] = (credit, self._serial)
        heapq.heappush(self._heap, (credit, self._serial, item))
        if len(self._heap) > 64 + 4 * len(self._current):
            self._heap = [(c, s, i) for i, (c, s) in self._current.items()]
            heapq.heapify(self._heap)

    def discard(self, item: Hashable) -> None:
        """Take `item` out, if it is in."""
        self._current.pop(item, None)

    def least(self, allowed: Callable[[Any], bool]) -> Any | None:  # noqa: ANN401 - an item
        """The allowed item with the least credit; it stays in."""
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
