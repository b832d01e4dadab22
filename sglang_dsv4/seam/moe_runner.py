"""Whether `--moe-runner-backend auto` chooses this package's MoE runner, "dsv4".

On Hopper it does wherever that runner serves (:func:`reason_against`), since it was the fastest one measured there
(`benchmarks/results/experts_h200.json`). On Blackwell, where its kernels were verified by emulation only, it does under
`--enable-deterministic-inference`, which no other runner serves; else the runner must be named. SGLang's runners can
still be chosen by name.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_dsv4.seam.hook_kinds import NAME

logger = logging.getLogger(__name__)

RUNNER = NAME
RUNNERS_WITH_CLAMP = ("auto", "marlin", "flashinfer_mxfp4")
"""SGLang's MoE runners that multiply MXFP4 experts on NVIDIA GPUs and apply `swiglu_limit`; others accept the limit and
ignore it, or expect another format."""
NVFP4_RUNNERS_WITH_CLAMP = ("flashinfer_trtllm_routed", "flashinfer_cutlass", "marlin")
"""Runners for NVFP4 experts that apply `swiglu_limit`. The first two multiply in NVFP4 on Blackwell; SGLang chooses the
first one by default (on Hopper, too, where its error asks for Marlin). Marlin multiplies in bf16."""
ON_BLACKWELL = ("flashinfer_mxfp4", *NVFP4_RUNNERS_WITH_CLAMP[:2])
"""Runners that serve on Blackwell, where SGLang chooses one of them itself."""
CHANNELS = {"sm90": {"mxfp4": (128, 256)}, "sm100": {"mxfp4": (128, 128), "nvfp4": (256, 256)}}
"""Kernels -> format of the weights -> (the columns of an expert's matrix are a multiple of, the fewest of them).
Hopper's kernels keep the factors of rows in the memory of scales."""
KERNELS = {9: "sm90", 10: "sm100"}
"""Major compute capability -> the implementation in `dsv4_kernels.moe` that serves such GPUs."""


def reason_against(
    capability: tuple[int, int] | None, numbers: str | None, hidden_size: int, channels: int, ranks: int
) -> str | None:
    """Why our MoE runner can't serve; None if it can.

    Args:
        capability: the GPU's compute capability; None for a CPU.
        numbers: format of the experts: "mxfp4", "nvfp4", or None for another one.
        hidden_size: d.
        channels: an expert's intermediate channels, over all ranks.
        ranks: number of ranks that share these channels.
    """
    if capability is None or capability[0] not in KERNELS:
        return f"it is for GPUs of compute capability 9 (Hopper) and 10 (B200, B300); this one has {capability}"
    kernels, share = KERNELS[capability[0]], channels // ranks
    if numbers not in CHANNELS[kernels]:
        return f"it is for {' and '.join(CHANNELS[kernels]).upper()} experts on this GPU"
    multiple, least = CHANNELS[kernels][numbers]
    if hidden_size % multiple or share % multiple or min(hidden_size, share) < least:
        return (
            f"hidden size {hidden_size} and {share} intermediate channels of a rank must be multiples of {multiple}, "
            f"at least {least}"
        )
    return None


def may_be_named(runner: str) -> bool:
    """Whether a user may name this runner on this machine's GPU."""
    import torch

    on_blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
    return runner in ("auto", RUNNER, "marlin") or (on_blackwell and runner in ON_BLACKWELL)


def numbers_of(model_config: Any) -> str | None:
    """Format of a checkpoint's routed experts: "mxfp4", "nvfp4", or None for another one."""
    if model_config.nvfp4_moe_meta is not None:
        return "nvfp4"
    return "mxfp4" if model_config.is_fp4_experts else None


def serves(arguments: Any, model_config: Any) -> bool:
    """Whether our runner computes the routed experts if the user names no runner; logs the reason if not."""
    import torch

    if arguments.device != "cuda":
        return False
    config, capability = model_config.hf_config, torch.cuda.get_device_capability()
    reason = reason_against(
        capability,
        numbers_of(model_config),
        config.hidden_size,
        config.moe_intermediate_size,
        arguments.tp_size // arguments.ep_size,
    )
    if reason is None and capability[0] != 9 and not arguments.enable_deterministic_inference:
        reason = "its kernels were verified by emulation only, so on Blackwell it must be named"
    if reason is not None:
        logger.info("routed experts: SGLang's runner, not %s: %s", RUNNER, reason)
    return reason is None
