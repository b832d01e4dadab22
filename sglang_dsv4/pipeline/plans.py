"""A comparison of the stages' decisions: a stage that decides otherwise than the one before ends the server.

Each stage plans its batches, caches and evicts by itself, in the same order of the same requests. A stage
that planned another batch would wait for rows that never come, or mix one request's rows with another's. So every plan
is sent to the next stage, which compares it with its own before it waits for rows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang_dsv4.model_config.stages import StagesDifferError
from sglang_dsv4.pipeline.this_stage import Messages, is_divided
from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler

TAG = int.from_bytes(b"D4Pl", byteorder="big")
FIELDS = (
    *("round", "kind of the batch", "requests in it", "ids of these requests", "tokens to compute", "cached tokens"),
    *("requests that wait", "free tokens of the pool", "tokens that may be evicted", "free tails on the device"),
    *("free tails in host memory", "pages in host memory", "prefixes that are read from files"),
)
"""Numbers of a plan, in order."""
BY_DIGEST = ("ids of these requests",)
"""Fields whose numbers stand for other things."""


def compare(plan: NextBatchPlan, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
    """Compare a stage's plan with that of the stage before; runs after `Scheduler.get_next_batch_to_run`.

    Raises:
        StagesDifferError: names the stages, the round, and what differs.
    """
    if not is_divided() or live_parts() is None:
        return
    comparison = comparison_of(scheduler)
    comparison.check(numbers_of(plan.batch_to_run, scheduler))


class Comparison:
    """The rounds that this stage has compared."""

    def __init__(self, messages: Messages) -> None:
        self._messages, self._round = messages, 0

    def check(self, numbers: list[int]) -> None:
        """Compare the numbers of this round's plan with the stage before's, and send them to the next stage.

        Raises:
            StagesDifferError: they differ.
        """
        own, index = [self._round, *numbers], self._messages.index
        self._round += 1
        if index + 1 < self._messages.count:
            self._messages.send(own, index + 1)
        if index:
            refuse_other_plan(own, self._messages.receive(len(own), index - 1), index)


def refuse_other_plan(own: list[int], before: list[int], index: int) -> None:
    """Raise if the plan of stage `index` is not the plan of the stage before.

    Raises:
        StagesDifferError: names each field that differs.
    """
    if own == before:
        return
    differing = [
        f"{field}: other ones" if field in BY_DIGEST else f"{field}: {mine} here, {its} there"
        for field, mine, its in zip(FIELDS, own, before, strict=True)
        if mine != its
    ]
    raise StagesDifferError(
        f"stage {index} of the pipeline (--pp-size) has decided otherwise than stage {index - 1} in round {own[0]}: "
        f"{'; '.join(differing)}"
    )


@functools.cache
def comparison_of(scheduler: Scheduler) -> Comparison:
    """The comparison of this process's scheduler."""
    return Comparison(Messages.between_stages(TAG))


def numbers_of(batch: ScheduleBatch | None, scheduler: Scheduler) -> list[int]:
    """The numbers of a plan after its round, see `FIELDS`; read on the host, without waiting for a GPU."""
    kind = ids = computed = cached = requests = 0
    if batch is not None:
        requests, kind = len(batch.reqs), int(batch.forward_mode)
        ids = digest(req.rid for req in batch.reqs)
        computed = sum(batch.extend_lens) if batch.forward_mode.is_extend() else requests
        cached = sum(batch.prefix_lens) if batch.forward_mode.is_extend() else 0
    cache = scheduler.tree_cache
    return [kind, requests, ids, computed, cached, len(scheduler.waiting_queue), *cache.account()]


def digest(names: Iterable[str]) -> int:
    """A number that stands for these names, in their order."""
    return int.from_bytes(hashlib.blake2b("\0".join(names).encode(), digest_size=7).digest(), "big")
