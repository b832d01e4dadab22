"""Flags of ``sglang.launch_server`` that are refused before anything is loaded, each with the reason.

SGLang would accept them for DeepSeek-V4, but our model, pools or prefix cache can't serve them.
`docs/coming_from_sglang.md` lists them together with the flags that work and the flags that SGLang refuses; a test
keeps that table and this code equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS


class Refusal(NamedTuple):
    """A flag and the values of it that can't be served."""

    flag: str
    is_refused: Callable[[Any], bool]  # called with the value of the ServerArgs field of that name
    why: str


USE_TENSOR_PARALLELISM = "use tensor and expert parallelism (--tp-size, --ep-size)"
REFUSALS = (
    Refusal("--pp-size", lambda size: size > 1, USE_TENSOR_PARALLELISM),
    Refusal(
        "--attn-dp-size", lambda size: size > 1, USE_TENSOR_PARALLELISM
    ),  # SGLang derives it from --enable-dp-attention
    Refusal("--moe-a2a-backend", lambda name: name != "none", "experts are summed by an all-reduce; leave it out"),
    Refusal("--dtype", lambda name: name in ("float16", "half"), "the model computes in bfloat16 or float32"),
    Refusal(
        "--page-size",
        lambda tokens: tokens not in (None, FULL_PAGE_TOKENS),
        f"pages hold {FULL_PAGE_TOKENS} tokens, two compression groups of the HCA layers; leave it out",
    ),
    Refusal(
        "--hicache-host-memory-mode",
        lambda mode: mode != "cache",
        "host memory keeps prefixes, and the storage backend gets them from there; leave it out",
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


def refuse_unsupported_arguments(arguments: Any, hf_config: Any) -> None:  # ServerArgs, or SGLang's view of it
    """Raise for flags that SGLang would accept and that our pools, or the checkpoint's draft, can't serve.

    Raises:
        ValueError: names the flag and why.
    """
    refuse(arguments)
    algorithm = arguments.speculative_algorithm
    has_dspark = bool(getattr(hf_config, "dspark_target_layer_ids", None))
    if algorithm == "DSPARK" and not has_dspark:
        raise ValueError(
            "sglang-dsv4 does not support --speculative-algorithm DSPARK with this checkpoint: it has no DSpark draft. "
            "Leave the flag out, or draft with its MTP module: EAGLE."
        )
    if algorithm not in (None, "DSPARK") and has_dspark:
        raise ValueError(
            f"sglang-dsv4 does not support --speculative-algorithm {algorithm} with this checkpoint: its draft is "
            "DSpark's, and it has no MTP module. Leave the flag out."
        )
    if arguments.tool_call_parser is not None:
        refuse_other_readers_of_tool_calls(arguments)
    if arguments.device == "cpu" and arguments.speculative_use_rejection_sampling:
        raise ValueError(
            "sglang-dsv4 does not support --speculative-use-rejection-sampling on a CPU: leave the flag out, drafts "
            "are accepted by the target's probabilities"
        )


def refuse_other_readers_of_tool_calls(arguments: Any) -> None:  # ServerArgs, or SGLang's view of it
    """Raise if code other than `requests.tool_calls` would read tool calls.

    Raises:
        ValueError: names the flag or the variable.
    """
    from sglang.srt.environ import envs

    others = {
        f"--tokenizer-worker-num {arguments.tokenizer_worker_num}": arguments.tokenizer_worker_num > 1,
        "SGLANG_RUST_SERVER": envs.SGLANG_RUST_SERVER.get(),
    }
    for other in (name for name, is_given in others.items() if is_given):
        raise ValueError(
            f"sglang-dsv4 does not support {other} with --tool-call-parser {arguments.tool_call_parser}: no plugin is "
            "loaded where answers are parsed, and clients would get damaged tool calls. Leave one of the two out."
        )


def refuse(arguments: Any) -> None:  # ServerArgs, or SGLang's view of it
    """Raise for a flag of :data:`REFUSALS`.

    Raises:
        ValueError: names the flag, its value and why.
    """
    for flag, is_refused, why in REFUSALS:
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if is_refused(value):
            shown = flag if value is True else f"{flag} {value}"
            raise ValueError(f"sglang-dsv4 does not support {shown}: {why}")
