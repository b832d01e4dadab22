"""Agreement of all stages on prefixes from files: a prefix is used as far as every stage has read its part of it.

Each stage looks up and reads files of its own, in threads, so that the stages finish at different times and may find
different parts. Stage 0 decides. In every round in which there are fetches, the ranks of a stage take the least of what
they have; a later stage reports that to stage 0, and stage 0 sends its decision to the next stage, which passes it on.
Stage s's report of a round is received by stage 0 in its round + s: by then it has been sent, whatever the stages wait
for otherwise. A fetch is over once all stages have reported so; a report never changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from sglang_dsv4.model_config.stages import StagesDifferError
from sglang_dsv4.pipeline.this_stage import Messages

STATES = 4
"""Numbers of a fetch, of which the least over all ranks counts: 1 if it is over; its usable pages; their negative,
whose least is the most pages; 1 if its request may still wait."""
_REPORTED = 3
"""Numbers of a fetch that later stages report to stage 0, the first of `STATES`. Whether a request may still wait is
decided by the clocks of stage 0 alone."""
UNKNOWN = (0, 0, 0)
"""The report of a stage that has not reported yet: its fetch goes on."""


class Votes:
    """The least of each number of every fetch, over all ranks that keep equal trees.

    Args:
        least_of_ranks: the least of each number over the ranks of this stage; each of these ranks must call it.
        messages: to the other stages; None where the model is not divided.
    """

    def __init__(self, least_of_ranks: Callable[[list[int]], list[int]], messages: Messages | None = None) -> None:
        self._least_of_ranks, self._messages = least_of_ranks, messages
        # names of the fetches of this stage's last rounds, this round's first
        self._rounds: deque[tuple[int, ...]] = deque(maxlen=1 if messages is None else messages.count)
        self._reports: dict[tuple[int, int], Sequence[int]] = {}  # by stage and name, of stages after 0

    def agree(self, names: Sequence[int], states: list[int]) -> list[int]:
        """Return the decision on every fetch; called once in each round of the scheduler, without fetches too.

        Args:
            names: of the fetches, a number for each fetch and step of it, equal on all ranks.
            states: `STATES` numbers of each.

        Raises:
            StagesDifferError: the stage before has other fetches.
        """
        if self._messages is None:
            return self._least_of_ranks(states) if states else states
        self._rounds.appendleft(tuple(names))
        least = self._least_of_ranks(states) if states else states
        if self._messages.index == 0:
            return self._decide(names, least)
        return self._follow(names, least) if names else []

    def _decide(self, names: Sequence[int], least: list[int]) -> list[int]:
        for stage in range(1, self._messages.count):
            reported = self._rounds[stage] if stage < len(self._rounds) else ()
            if reported:
                numbers = self._messages.receive(_REPORTED * len(reported), stage)
                for i, name in enumerate(reported):
                    self._reports[stage, name] = numbers[_REPORTED * i : _REPORTED * (i + 1)]
        self._reports = {key: report for key, report in self._reports.items() if key[1] in names}
        for i, name in enumerate(names):
            for stage in range(1, self._messages.count):
                report = self._reports.get((stage, name), UNKNOWN)
                for at, number in enumerate(report, STATES * i):
                    least[at] = min(least[at], number)
        if names:
            self._pass_on(names, least)
        return least

    def _follow(self, names: Sequence[int], least: list[int]) -> list[int]:
        report = [number for i in range(len(names)) for number in least[STATES * i : STATES * i + _REPORTED]]
        self._messages.send(report, 0)
        before = self._messages.index - 1
        expected = header(names)
        got = self._messages.receive(len(expected), before)
        if got != expected:
            raise StagesDifferError(
                f"stage {self._messages.index} of the pipeline reads {expected[0]} prefixes from files, stage {before} "
                f"{got[0]}, or others of them"
            )
        decision = self._messages.receive(STATES * len(names), before)
        self._pass_on(names, decision)
        return decision

    def _pass_on(self, names: Sequence[int], decision: list[int]) -> None:
        if self._messages.index + 1 < self._messages.count:
            self._messages.send(header(names), self._messages.index + 1)
            self._messages.send(decision, self._messages.index + 1)


def header(names: Sequence[int]) -> list[int]:
    """The number of fetches, and a number that stands for their names."""
    return [len(names), hash(tuple(names))]
