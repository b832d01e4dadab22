"""The root logger, which SGLang changes in the process that answers clients."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def root_logger_kept() -> Iterator[None]:
    """Set the root logger's level and handlers back, which SGLang sets where it reads a server's
    arguments and where it starts an engine."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
