"""Parts of the suite: `--shard 2/8` runs an eighth of the collected tests, `--minutes 20` bounds when the last one
begins.

    chosen(nodeids, Shard.of("2/8"))      the tests of the second of eight shards
    Shard.of("4f2a…e1/8")                 a commit's hash chooses the shard, and the test at which it begins

A shard that runs out of time leaves its last tests out. Another commit's shard begins at another test, so that every
test runs in the end. Neighbours in a file share models and compiled kernels, so they stay together in blocks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 30
"""Most tests of a file that one shard has in a row."""
HASH_DIGITS = 8


@dataclass(frozen=True)
class Shard:
    """The `index`-th of `count` parts, [0, count), beginning at its block number `begin` modulo their number."""

    index: int
    count: int
    begin: int = 0

    @staticmethod
    def of(text: str) -> Shard:
        """Return the shard of "2/8", or of "HASH/8" with at least 16 hexadecimal digits.

        Raises:
            ValueError: the text is neither.
        """
        chosen, _, count = text.partition("/")
        if re.fullmatch("[1-9][0-9]{0,3}", chosen) and count.isdigit() and int(chosen) <= int(count):
            return Shard(int(chosen) - 1, int(count))
        if re.fullmatch("[0-9a-f]{16,}", chosen) and count.isdigit() and int(count):
            number, begin = int(chosen[:HASH_DIGITS], 16), int(chosen[HASH_DIGITS : 2 * HASH_DIGITS], 16)
            return Shard(number % int(count), int(count), begin)
        raise ValueError(f"a shard is K/N with 1 <= K <= N, or HASH/N with a commit's hash, not {text!r}")

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"


def blocks(nodeids: Sequence[str]) -> list[list[str]]:
    """Return the tests in blocks of at most BLOCK of one file, in their order."""
    found: list[list[str]] = []
    for _, group in itertools.groupby(nodeids, lambda nodeid: nodeid.split("::")[0]):
        of_file = list(group)
        found += [of_file[i : i + BLOCK] for i in range(0, len(of_file), BLOCK)]
    return found


def chosen(nodeids: Sequence[str], shard: Shard) -> list[str]:
    """Return the tests of a shard in the order in which it runs them."""
    own = blocks(nodeids)[shard.index :: shard.count]
    first = shard.begin % len(own) if own else 0
    return [nodeid for block in own[first:] + own[:first] for nodeid in block]
