"""Hides messages of SGLang 0.5.23 that are irrelevant to this model on a machine without a GPU.

Each process of a server printed them between the relevant lines. :mod:`sglang_dsv4.cpu.shims` calls :func:`silence`
before SGLang is imported, on machines without Triton only. Like `shims`, this module imports the standard library only.
"""

from __future__ import annotations

import logging
import re
import warnings
from typing import NamedTuple


class Message(NamedTuple):
    """The beginning of a message, and the module of SGLang that prints it."""

    module: str
    begin: str
    why: str


WARNINGS = (
    Message("sglang.launch_server", "'python -m sglang.launch_server' is still supported", "both commands work here"),
    Message("sglang.srt.layers.quantization.awq.awq", "Only CUDA, HIP and XPU support AWQ", "the model is not AWQ"),
    Message(
        "sglang.srt.layers.quantization.gguf", "Only CUDA, MUSA and NPU support GGUF", "the model is not in this format"
    ),
    Message(
        "sglang.kernels.ops.attention.fla.utils",
        "Triton is not supported on current platform",
        "the model has no linear attention",
    ),
)
"""Messages of Python's `warnings`."""

LOGGED = (
    Message("sglang.kernels.jit.utils.arch", "Cannot detect CUDA architecture", "no CUDA kernel is compiled"),
    Message(
        "sglang.srt.distributed.bootstrap",
        "init_cpu_threads_env and shared memory based AllReduce is disabled",
        "ranks sum over gloo",
    ),
    Message(
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup",
        "Disable prefill CUDA graph",
        "no graph is captured on a CPU",
    ),
)
"""Messages of a logger, which has the module's name."""


def silence() -> None:
    """Don't show :data:`WARNINGS` and :data:`LOGGED` in this process."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=re.escape(message.begin), category=UserWarning)
    for message in LOGGED:
        logging.getLogger(message.module).addFilter(_Without(message.begin))


class _Without(logging.Filter):
    """A filter that drops the messages with one beginning."""

    def __init__(self, begin: str) -> None:
        super().__init__()
        self._begin = begin

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._begin)
