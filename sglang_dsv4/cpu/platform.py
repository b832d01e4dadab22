"""SGLang's view of a machine with no accelerator: an out-of-tree platform, so that nothing imports ``sgl_kernel``.

``sgl_kernel`` (CUDA builds only on PyPI) is what SGLang's own CPU engine calls. With this platform SGLang's layers take
their ``forward_native`` path, plain PyTorch. Declared as an entry point in the group ``sglang.srt.platforms``; SGLang
asks :func:`activate` once in every process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_dsv4 import env
from sglang_dsv4.cpu.shims import is_off

logger = logging.getLogger(__name__)


def activate() -> str | None:
    """The platform class's dotted path on a machine with no accelerator; None (no opinion) everywhere else."""
    if is_off() or env.text("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    accelerators = [torch.cuda, torch.xpu, getattr(torch, "npu", None), getattr(torch, "mps", None)]
    if any(device is not None and device.is_available() for device in accelerators):
        return None
    # SGLang wraps a few sampling functions in torch.compile: seconds of tracing in the first request that uses one, for
    # nothing, as the backend is "eager". Set in the launcher, inherited by the processes that it spawns.
    env.set_default("TORCHDYNAMO_DISABLE", "1")
    return "sglang_dsv4.cpu.platform.CpuPlatform"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU on which every SGLang layer runs its PyTorch path: no Triton, no graphs, gloo between ranks."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """``cpu``, as text: SGLang resolves ``--device`` with it and splits it at a colon."""
        return "cpu"

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        """No device to copy to asynchronously."""
        return False

    def get_default_attention_backend(self) -> str:
        """For models other than DeepSeek-V4, which the model override sends to ``dsv4``."""
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Nothing is compiled: start-up stays short and results stay those of the eager operators."""
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        """What `/start_profile` records beside what it was asked for."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """The same, for torch."""
        return torch.profiler.ProfilerActivity.CPU

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Those whose Triton kernels `speculation` has a plain form of; SGLang refuses the others by name."""
        return algorithm in ("EAGLE", "NEXTN", "DSPARK")

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Slots of the tokens of a verify step."""
        from sglang_dsv4.cpu.speculation import slots_of_steps

        return slots_of_steps
