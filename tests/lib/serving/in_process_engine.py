"""SGLang's engine in the tests' own process, leaving nothing behind for the tests after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import psutil
from serving.root_logger import root_logger_kept
from serving.server import free_port


@contextmanager
def running_engine(**options: Any) -> Iterator[Any]:
    """`sglang.Engine(**options)`, ended with its processes.

    The engine publishes its configuration in this process: a context of its own keeps that from later tests. Its
    `shutdown` would end every child of this process, the session's server among them: only its own are ended here. With
    groups of ranks it binds ports next to `port` and keeps them while this process lives: each engine gets another one.
    """
    import sglang
    from sglang.srt.runtime_context import ParallelContext, RuntimeContext, use_context

    before = children()
    with use_context(RuntimeContext(parallel=ParallelContext())):
        try:
            with root_logger_kept():
                engine = sglang.Engine(**{"port": free_port(), **options})
            yield engine
        finally:
            own = children() - before
            for process in own:
                process.kill()
            psutil.wait_procs(own, timeout=30)


def children() -> set[psutil.Process]:
    """Return this process's children of every generation, without multiprocessing's tracker, which others share."""
    tracker = resource_tracker._resource_tracker._pid
    return {process for process in psutil.Process().children(recursive=True) if process.pid != tracker}
