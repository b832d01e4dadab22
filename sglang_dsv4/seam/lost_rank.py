"""How long a rank waits for a lost rank, and the log line that explains the error.

A rank whose process ends closes its connections. The next exchange of any other rank raises an error of gloo or NCCL
that names an address; SGLang then ends that rank's whole server. A host that hangs, or whose cable is cut, closes
nothing: other ranks wait for `--dist-timeout`.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import psutil

from sglang_dsv4.seam.compat import is_ours
from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

LAUNCHER_ENDS_S = 1.0
"""In which a launcher that ends its processes has ended the data-parallel controller, too."""
SIGNS = ("connection closed by peer", "connection reset by peer", "broken pipe", "timed out waiting", "remote process")
"""Parts of messages of gloo and NCCL about a peer that is gone, in lower case."""


def limit_waits(original: Callable[..., None], group: GroupCoordinator, *args: Any, **kwargs: Any) -> None:
    """Make a group of ranks whose exchanges between CPUs wait for `--dist-timeout` seconds too, if the flag is given.

    Around the constructor, which takes the flag for exchanges between devices, and waits for two hours between CPUs:
    for the next requests, for example, or for the sizes of a stage's rows.
    """
    from sglang.srt.runtime_context import get_parallel, process_model_config

    seconds = get_parallel().dist_timeout
    if seconds is not None and is_ours(process_model_config().hf_config.architectures):
        kwargs["gloo_timeout"] = timedelta(seconds=seconds)
    original(group, *args, **kwargs)


def watch_replicas(controller: DataParallelController) -> None:
    """End the server when a replica's process ends; before the loop of SGLang's data-parallel controller.

    SGLang looks at these processes after its loop, which has no end. A replica that was killed got requests as before,
    and their clients waited. The ranks of groups belong to the launcher, which watches them.
    """
    from sglang.srt.runtime_context import process_model_config

    processes = [process for process in controller.scheduler_procs if process is not None]
    if processes and is_ours(process_model_config().hf_config.architectures):
        launcher = psutil.Process().parent()
        threading.Thread(target=end_with_a_replica, args=(processes, launcher), name="replicas", daemon=True).start()


def end_with_a_replica(processes: Sequence[BaseProcess], launcher: psutil.Process) -> None:
    """Wait until one of the processes ends, and let the launcher end the server, unless it does so itself meanwhile."""
    ended = wait([process.sentinel for process in processes])
    time.sleep(LAUNCHER_ENDS_S)
    for process in processes:
        if process.sentinel in ended:
            process.join()
            logger.error(
                "sglang_dsv4: a replica (process %d) has ended with exit code %s. The server ends, too.",
                process.pid,
                process.exitcode,
            )
    launcher.send_signal(signal.SIGQUIT)


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
