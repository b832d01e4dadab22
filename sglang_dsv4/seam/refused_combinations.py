"""Flags that are refused beside another one: groups of ranks, stages, disaggregation, CUDA graphs of prefills.

Each is served alone, or in a server without the other (`refused_flags` has the flags that no server takes).
"""

from __future__ import annotations

from typing import Any

from sglang_dsv4 import env
from sglang_dsv4.seam.refused_flags import Refusal, above, flags, other_than, refuse_first

UNTESTED = "it was never tested between servers; leave it out"
BETWEEN_STAGES = "it was never tested between stages; leave it out"


def refuse_combinations(arguments: Any) -> None:  # ServerArgs, or SGLang's view of it
    """Raise for flags and variables that can't be served together. Graphs of prefills are known later
    (:func:`refuse_with_recorded_prefills`).

    Raises:
        ValueError: names the flags or variables, their values and why.
    """
    refuse_with_groups(arguments)
    refuse_with_stages(arguments)
    if arguments.disaggregation_mode != "null":
        refuse_with_transfers(arguments)


def refuse_with_groups(arguments: Any) -> None:  # ServerArgs, or SGLang's view of it
    """Raise for flags and variables that attention data parallelism can't be combined with.

    Raises:
        ValueError: names the flag or variable, and what to do.
    """
    from sglang.srt.environ import envs

    groups, ranks = arguments.attn_dp_size, arguments.tp_size
    rooms_choose = arguments.load_balance_method == "follow_bootstrap_room"
    if rooms_choose and arguments.disaggregation_mode == "null" and groups * arguments.dp_size > 1:
        raise ValueError(
            "sglang-dsv4 does not support --load-balance-method follow_bootstrap_room without --disaggregation-mode: a "
            "request without a room would end the server; leave it out"
        )
    if groups == 1:
        return
    if groups < 1 or ranks % groups:
        raise ValueError(f"--attn-dp-size must divide --tp-size: got {groups} and {ranks}")
    of_group, drafts = ranks // groups, arguments.speculative_num_draft_tokens or 1
    beside = f"with --attn-dp-size {groups}"
    if arguments.speculative_algorithm == "DSPARK" and of_group > 1:
        raise ValueError(
            f"sglang-dsv4 does not support --speculative-algorithm DSPARK {beside} and --tp-size {ranks}: SGLang "
            f"drafts with one rank a group. Use --attn-dp-size {ranks}, or leave the drafts out."
        )
    if arguments.speculative_algorithm is not None and drafts % of_group:
        raise ValueError(
            f"sglang-dsv4 does not support --speculative-num-draft-tokens {drafts} {beside} and --tp-size {ranks}: a "
            f"group's {of_group} ranks share the rows of a step. Use a multiple of {of_group}."
        )
    if arguments.enable_dp_attention_local_control_broadcast:
        raise ValueError(
            f"sglang-dsv4 does not support --enable-dp-attention-local-control-broadcast {beside}: all ranks answer a "
            "control request together; leave it out"
        )
    if _sequence_parallel_is_on():
        raise ValueError(f"sglang-dsv4 does not support SGLANG_DSV4_SEQUENCE_PARALLEL {beside}: unset it")
    if envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.get():
        raise ValueError(f"sglang-dsv4 does not support SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION {beside}: unset it")
    if envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get():
        raise ValueError(
            f"sglang-dsv4 does not support SGLANG_SCHEDULER_SKIP_ALL_GATHER {beside}: a forward needs the rows of all "
            "groups; unset it"
        )


BETWEEN_SERVERS = (
    Refusal(
        "--disaggregation-transfer-backend",
        other_than("mooncake", "mooncake_tcp", "nixl"),
        "only Mooncake's and NIXL's transfers were tested; use mooncake, mooncake_tcp or nixl",
    ),
    Refusal("--disaggregation-decode-allocation-policy", other_than("early"), UNTESTED),
    *flags("--disaggregation-decode-enable-offload-kvcache --disaggregation-enable-kv-checksum", bool, UNTESTED),
    Refusal(
        "--disaggregation-decode-retraction-backup",
        other_than(None, "cpu_tensor"),
        "a retracted request is copied to the host, pages and rings; leave it out",
    ),
    Refusal("--disaggregation-decode-host-receive-threshold", other_than(1, 1.0), UNTESTED),
    *flags("--optimistic-prefill-attempts", above(0), UNTESTED),
    Refusal("--nnodes", above(1), "start a pair of servers for each host; leave it out"),
    Refusal("--enable-memory-saver", bool, UNTESTED),
)
"""Refused with --disaggregation-mode."""


def refuse_with_transfers(arguments: Any) -> None:  # ServerArgs, or SGLang's view of it
    """Raise for flags that a prefill or decode server can't have.

    Raises:
        ValueError: names the flag, its value and why.
    """
    mode = f"with --disaggregation-mode {arguments.disaggregation_mode}"
    refuse_first(arguments, BETWEEN_SERVERS, f" {mode}")
    if arguments.disaggregation_mode == "decode" and arguments.enable_hierarchical_cache:
        raise ValueError(
            f"sglang-dsv4 does not support --enable-hierarchical-cache {mode}: a decode server computes no prompt that "
            "could continue a stored prefix. Give the flag to the prefill server."
        )


BESIDE_RECORDED_PREFILLS = (
    Refusal(
        "--pp-size",
        above(1),
        "a recorded prefill begins with token ids and ends with the model's last layer; leave one of the two out",
    ),
    Refusal("--attn-dp-size", above(1), "a recorded prefill has the rows of one group; leave one of the two out"),
)
"""Refused with CUDA graphs of prefills."""


def refuse_with_recorded_prefills(arguments: Any) -> None:  # ServerArgs, or SGLang's view of it
    """Raise for flags and variables that CUDA graphs of prefills can't be combined with, whichever flag asks for them.

    Raises:
        ValueError: names the flag or variable and its value, and why.
    """
    from sglang.srt.environ import envs

    beside = " with CUDA graphs of prefills (backend `breakable`)"
    refuse_first(arguments, BESIDE_RECORDED_PREFILLS, beside)
    if envs.SGLANG_MEMORY_SAVER_CUDA_GRAPH.get():
        raise ValueError(f"sglang-dsv4 does not support SGLANG_MEMORY_SAVER_CUDA_GRAPH{beside}: unset it")


WITH_STAGES = (
    Refusal("--speculative-algorithm", other_than(None), "a draft would need the last stage's rows on the first"),
    Refusal("--disaggregation-mode", other_than("null"), "a request's pages would come from all stages"),
    *flags("--dp-size --attn-dp-size", above(1), BETWEEN_STAGES),
    Refusal("--hicache-storage-backend", other_than(None, "file"), "only files were tested between stages; use file"),
    *flags("--pp-async-batch-depth", above(0), BETWEEN_STAGES),
    *flags("--enable-dynamic-chunking --enable-memory-saver", bool, BETWEEN_STAGES),
    Refusal(
        "--scheduler-recv-interval",
        above(1),
        "a stage that skips a turn leaves what the stage before has sent, and both wait for ever; leave it out",
    ),
    Refusal("--enable-prefill-delayer", bool, "it needs overlapped scheduling, which stages do not have; leave it out"),
    Refusal("--enable-return-hidden-states", bool, "SGLang's stages do not exchange them; leave it out"),
)
"""Refused with --pp-size above 1."""


def refuse_with_stages(arguments: Any) -> None:  # ServerArgs, or SGLang's view of it
    """Raise for flags that the stages of a pipeline can't be combined with.

    Raises:
        ValueError: names the flag, its value and why.
    """
    if arguments.pp_size > 1:
        refuse_first(arguments, WITH_STAGES, f" with --pp-size {arguments.pp_size}")


def _sequence_parallel_is_on() -> bool:
    """Whether the environment shards the rows of prefills; the module that does so imports SGLang's layers."""
    return env.choice("SGLANG_DSV4_SEQUENCE_PARALLEL") in ("on", "attention")
