"""Whether `--moe-runner-backend auto` chooses this package's MoE runner, "dsv4".

It does wherever that runner serves (:func:`reason_against`), since it was the fastest one measured there
(`benchmarks/results/experts_h200.json`). SGLang's runners can still be chosen by name.
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
LEAST_CHANNELS = 256
"""The fewest columns of an expert's matrix: its rows' factors are stored in the memory of its scales."""


def reason_against(
    capability: tuple[int, int] | None, mxfp4: bool, hidden_size: int, channels: int, ranks: int
) -> str | None:
    """Why our MoE runner can't serve; None if it can.

    Args:
        capability: the GPU's compute capability; None for a CPU.
        mxfp4: whether the checkpoint's experts are MXFP4.
        hidden_size: d.
        channels: an expert's intermediate channels, over all ranks.
        ranks: number of ranks that share these channels.
    """
    if capability is None or capability[0] != 9:
        return f"it is for GPUs of compute capability 9 (Hopper); this one has {capability}"
    if not mxfp4:
        return "it is for MXFP4 experts"
    share = channels // ranks
    if hidden_size % 128 or share % 128 or min(hidden_size, share) < LEAST_CHANNELS:
        return (
            f"hidden size {hidden_size} and {share} intermediate channels of a rank must be multiples of 128, at least "
            f"{LEAST_CHANNELS}"
        )
    return None


def may_be_named(runner: str) -> bool:
    """Whether a user may name this runner on this machine's GPU."""
    import torch

    on_blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
    return runner in ("auto", RUNNER, "marlin") or (on_blackwell and runner in ON_BLACKWELL)


def serves(arguments: Any, model_config: Any) -> bool:
    """Whether our runner computes the routed experts if the user names no runner; logs the reason if not."""
    import torch

    if arguments.device != "cuda":
        return False
    config = model_config.hf_config
    reason = reason_against(
        torch.cuda.get_device_capability(),
        bool(model_config.is_fp4_experts) and model_config.nvfp4_moe_meta is None,
        config.hidden_size,
        config.moe_intermediate_size,
        arguments.tp_size // arguments.ep_size,
    )
    if reason is not None:
        logger.info("routed experts: SGLang's runner, not %s: %s", RUNNER, reason)
    return reason is None
