"""An out-of-tree SGLang platform for a machine with no accelerator: SGLang's layers run their PyTorch path.

SGLang's own CPU engine calls ``sgl_kernel``, which PyPI has as CUDA builds only. With this platform SGLang's layers run
``forward_native``, and no module imports ``sgl_kernel``. It is declared as an entry point in the group
``sglang.srt.platforms``; SGLang calls :func:`activate` once in every process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_dsv4 import env
from sglang_dsv4.cpu.shims import is_off


def activate() -> str | None:
    """The dotted path of the platform class on a machine with no accelerator; None on any other machine."""
    if is_off() or env.text("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    accelerators = [torch.cuda, torch.xpu, getattr(torch, "npu", None), getattr(torch, "mps", None)]
    if any(device is not None and device.is_available() for device in accelerators):
        return None
    # SGLang wraps some sampling functions in torch.compile. The first request that uses one would wait seconds for its
    # tracing, without a gain, as the backend is "eager". The processes that the launcher spawns inherit the variable.
    env.set_default("TORCHDYNAMO_DISABLE", "1")
    return "sglang_dsv4.cpu.platform.CpuPlatform"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU on which every SGLang layer runs its PyTorch path: no Triton, no CUDA graphs, gloo between ranks."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """The text ``cpu``: SGLang resolves ``--device`` with it and splits it at a colon."""
        return "cpu"

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        """False: there is no device to copy to asynchronously."""
        return False

    def get_default_attention_backend(self) -> str:
        """The backend of models other than DeepSeek-V4; for DeepSeek-V4 SGLang's model override names ``dsv4``."""
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """The backend of torch.compile: eager, for a short start-up and the results of the eager operators."""
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        """The name of the activity that `/start_profile` always records."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """PyTorch's constant for the activity that `/start_profile` always records."""
        return torch.profiler.ProfilerActivity.CPU

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Whether `cpu.speculation` has PyTorch versions of the algorithm's kernels; SGLang refuses the others."""
        return algorithm in ("EAGLE", "NEXTN", "DSPARK")

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """The function that gives the pool slots of a verify step's tokens."""
        from sglang_dsv4.cpu.speculation import slots_of_steps

        return slots_of_steps
