"""Undo changes that SGLang makes on a CPU for its own CPU engine, and a loop that takes a core.

Each function is named by a row of :mod:`sglang_dsv4.seam.hooks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dsv4.seam import compat
from sglang_dsv4.seam.install import attribute_set
from sglang_dsv4.seam.rows.cpu import FORWARD_IS_ON_CPU

if TYPE_CHECKING:
    from types import ModuleType

    import zmq
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


REST_S = 0.002
"""Pause of a prefill or decode server that waits for a transfer."""
WAIT_MS = 100
"""Longest wait of the data-parallel controller for a request; SGLang's watchdog wants to hear from it now and then."""


def keep_config(original: Callable[..., ModelConfig], model_config: ModelConfig, *args: Any) -> ModelConfig:
    """The config, unchanged for DeepSeek-V4: SGLang would pad heads and sizes, and make tp_size KV heads of one."""
    if compat.is_ours(model_config.hf_config.architectures):
        return model_config
    return original(model_config, *args)


def skip_gpu_quantisation(
    original: Callable[..., QuantizationConfig | None], model_config: ModelConfig, *args: Any
) -> QuantizationConfig | None:
    """No quantisation config for DeepSeek-V4 on a CPU, where weights are dequantised while they are loaded."""
    from sglang.srt.runtime_context import get_device

    if get_device().device == "cpu" and compat.is_ours(model_config.hf_config.architectures):
        return None
    return original(model_config, *args)


def allow_our_kv_pool(original: Callable[..., None], platform: Any, *, subsystem: str) -> None:
    """Let an out-of-tree platform build a DeepSeek-V4 KV pool: it is ours, not the one that SGLang refuses there."""
    if subsystem != "the DeepSeek-V4 KV pool":
        original(platform, subsystem=subsystem)


def keep_products(original: Callable[[ModelRunner], None], runner: ModelRunner) -> None:
    """Keep PyTorch's products for DeepSeek-V4 on a CPU: ours are batch-invariant, SGLang's would be Triton kernels."""
    if not (runner.device == "cpu" and compat.is_ours(runner.model_config.hf_config.architectures)):
        original(runner)


def pad_on_cpu(original: Callable[..., None], batch: ForwardBatch, runner: ModelRunner) -> None:
    """Pad a batch for attention data parallelism; SGLang's own function would pin memory, which needs a GPU."""
    from sglang.srt.model_executor import forward_batch_info

    with attribute_set(forward_batch_info, FORWARD_IS_ON_CPU):
        original(batch, runner)


def is_on_cpu(before: bool, module: ModuleType) -> bool:
    """The value of ``forward_batch_info._is_cpu``: True, as for SGLang's own CPU engine."""
    return True


def rest_while_transferring(result: object, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
    """Give the core to the other server while all requests of this one wait for it.

    After the step of a prefill or decode server's loop that looks for finished transfers. SGLang's loops look without
    pause, which takes a core that the other server, and the threads of the transfer, need.
    """
    idle = not scheduler.waiting_queue and scheduler.running_batch.is_empty() and scheduler.chunked_req is None
    if idle and scheduler.cur_batch_for_debug is None:
        time.sleep(REST_S)


class WaitingSocket:
    """A ZeroMQ socket that waits up to `WAIT_MS` for a message before it is asked for one."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket

    def recv(self, flags: int = 0) -> bytes:
        """The next message, as `zmq.Socket.recv`."""
        self._socket.poll(WAIT_MS)
        return self._socket.recv(flags=flags)

    def recv_pyobj(self, flags: int = 0) -> Any:
        """The next message's object, as `zmq.Socket.recv_pyobj`."""
        self._socket.poll(WAIT_MS)
        return self._socket.recv_pyobj(flags=flags)


def wait_for_requests(controller: DataParallelController) -> None:
    """Let the loop of SGLang's controller wait for requests: it asks without pause, which takes half a core or more."""
    controller.recv_from_tokenizer = WaitingSocket(controller.recv_from_tokenizer)
