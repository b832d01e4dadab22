"""Code that a user may pass to `sglang.Engine`: the engine's processes import it from here."""

from __future__ import annotations

import os
from pathlib import Path
from types import FrameType
from typing import Any

from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

FILE_VARIABLE = "NOTED_METRICS"
signals: list[int] = []


class NotedMetrics(SchedulerMetricsCollector):
    """SGLang's collector, which writes its process into the file of FILE_VARIABLE."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Path(os.environ[FILE_VARIABLE]).write_text(str(os.getpid()))


def note_signal(number: int, frame: FrameType | None) -> None:
    signals.append(number)
