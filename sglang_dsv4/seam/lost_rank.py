"""A line of the log on a rank that lost another one: which error that is, and what to do.

A rank whose process ends, or whose host can't be reached, closes its connections. The next exchange of any other rank
raises an error of gloo or NCCL that names an address; SGLang then ends that rank's whole server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

SIGNS = ("connection closed by peer", "connection reset by peer", "broken pipe", "timed out waiting", "remote process")
"""Parts of messages of gloo and NCCL about a peer that is gone, in lower case."""


def explain(original: Callable[[Scheduler], None], scheduler: Scheduler) -> None:
    """Run the scheduler's loop; log what an error of a lost connection means. Around ``Scheduler.run_event_loop``."""
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
