"""A rank that lost another one: how long it waits, a line of the log that says which error that is, and what to do.

A rank whose process ends closes its connections. The next exchange of any other rank raises an error of gloo or NCCL
that names an address; SGLang then ends that rank's whole server. A host that hangs, or whose cable is cut, closes
nothing: other ranks wait for `--dist-timeout`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_dsv4.seam.compat import set_timeout
from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

SIGNS = ("connection closed by peer", "connection reset by peer", "broken pipe", "timed out waiting", "remote process")
"""Parts of messages of gloo and NCCL about a peer that is gone, in lower case."""


def limit_waits() -> None:
    """Let this rank wait for others' parts of a collective between CPUs for `--dist-timeout` seconds, if it is given.

    SGLang takes the flag for the groups of devices, and lets ranks wait for two hours for the next requests.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.dist_timeout is None:
        return
    for group in (parallel.world_group, parallel.tp_group, parallel.attn_tp_group):
        set_timeout(group.cpu_group, parallel.dist_timeout)


def explain(original: Callable[[Scheduler], None], scheduler: Scheduler) -> None:
    """Run the scheduler's loop; log what an error of a lost connection means. Around ``Scheduler.run_event_loop``."""
    if live_parts() is not None:
        limit_waits()
    try:
        original(scheduler)
    except RuntimeError as error:
        if live_parts() is not None and is_of_lost_rank(error):
            logger.error(
                "sglang_dsv4: another rank of this server has ended, or can't be reached any longer (%s). This rank "
                "ends, too. Look at the end of the other ranks' logs, on every node, and start all nodes again.",
                str(error).splitlines()[0],
            )
        raise


def is_of_lost_rank(error: RuntimeError) -> bool:
    """Whether the error is that of an exchange with a rank that is gone."""
    text = str(error).lower()
    return any(sign in text for sign in SIGNS)
