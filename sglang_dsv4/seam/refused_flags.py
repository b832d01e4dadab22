"""Flags of ``sglang.launch_server`` that are refused before anything is loaded, each with the reason.

SGLang would accept them for DeepSeek-V4, and our model, pools or prefix cache can't serve them. README, "Coming from
SGLang", has them beside those that work and those that SGLang itself refuses; a test holds that table to this code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS


class Refusal(NamedTuple):
    """A flag and the values of it that can't be served."""

    flag: str
    is_refused: Callable[[Any], bool]  # of the value of the field of that name
    why: str


USE_TENSOR_PARALLELISM = "use tensor and expert parallelism (--tp-size, --ep-size)"
REFUSALS = (
    Refusal("--pp-size", lambda size: size > 1, USE_TENSOR_PARALLELISM),
    Refusal(
        "--attn-dp-size", lambda size: size > 1, USE_TENSOR_PARALLELISM
    ),  # SGLang makes it of --enable-dp-attention
    Refusal("--moe-a2a-backend", lambda name: name != "none", "experts are summed by an all-reduce; leave it out"),
    Refusal("--dtype", lambda name: name in ("float16", "half"), "the model computes in bfloat16 or float32"),
    Refusal(
        "--page-size",
        lambda tokens: tokens not in (None, FULL_PAGE_TOKENS),
        f"pages hold {FULL_PAGE_TOKENS} tokens, two groups of the HCA layers; leave it out",
    ),
    Refusal(
        "--hicache-host-memory-mode",
        lambda mode: mode != "cache",
        "host memory keeps prefixes, and the storage gets them from there; leave it out",
    ),
    Refusal(
        "--hicache-host-memory-fraction",
        lambda share: share not in (None, 0.8),
        "give the size by --hicache-ratio or --hicache-size",
    ),
    Refusal("--enable-streaming-session", bool, "a session's rows are not kept"),
    Refusal(
        "--disaggregation-mode",
        lambda mode: mode != "null",
        "rings and compressor states are not transferred between servers",
    ),
    Refusal("--enable-lora", bool, "the model has no place for adapters"),
)


def refuse(arguments: Any) -> None:  # ServerArgs, or SGLang's view of it
    """Raises for a flag of :data:`REFUSALS`.

    Raises:
        ValueError: names the flag, its value and why.
    """
    for flag, is_refused, why in REFUSALS:
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if is_refused(value):
            shown = flag if value is True else f"{flag} {value}"
            raise ValueError(f"sglang-dsv4 does not support {shown}: {why}")
