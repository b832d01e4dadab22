"""Our resolution steps for a server's arguments: check the checkpoint, refuse flags, set defaults.

Each resolution step gets the server arguments and `previous`, SGLang's own step of the same name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dsv4 import env
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.requests.chat import reasoning_effort
from sglang_dsv4.requests.refused import grammars
from sglang_dsv4.requests.tool_calls import output_parser
from sglang_dsv4.seam import compat, install, moe_runner, refused_combinations, refused_flags, self_check
from sglang_dsv4.seam.hook_kinds import NAME

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# SGLang would take most of a CPU's memory for the pool, and 256 request slots.
CPU_MAX_TOTAL_TOKENS = 65536
CPU_MAX_RUNNING_REQUESTS = 32
# SGLang subtracts 1.5 MB of memory for each token of a prefill chunk, which GPU kernels need. With 24 GB of memory the
# rest is below zero beyond 16K tokens, also with --chunked-prefill-size -1.
CPU_MEM_FRACTION_STATIC = 0.7
EAGLE_STEPS = 3
"""Drafts of an EAGLE step: SGLang's number for DeepSeek's models."""

Step = Callable[["ServerArgs"], None]


def check_checkpoint(server_args: ServerArgs, previous: Step) -> None:
    """Check the checkpoint's files before SGLang parses the config: it would fill in fields that the file lacks.

    Flags are refused here as the user gave them, before SGLang changes them or stops with an error of its own.

    Raises:
        ValueError: a file is missing or damaged, or the checkpoint or a flag can't be served.
    """
    from sglang_dsv4.weights import checkpoint_files

    previous(server_args)
    arguments = compat.resolving_view(server_args)
    if checkpoint_files.check_checkpoint(arguments):
        refused_flags.refuse(arguments, as_given=True)


def resolve_cpu_memory(server_args: ServerArgs, previous: Step) -> None:
    """Set the share of memory for weights and pools on a CPU, unless the user did."""
    arguments = compat.resolving_view(server_args)
    if arguments.device == "cpu" and arguments.mem_fraction_static is None:
        if compat.is_ours(compat.model_config_of(server_args).hf_config.architectures):
            compat.declare_resolution(server_args, "sglang_dsv4", mem_fraction_static=CPU_MEM_FRACTION_STATIC)
    previous(server_args)


def resolve_default_arguments(server_args: ServerArgs, previous: Step) -> None:
    """Refuse flags that can't be served, and set the arguments that the user left open.

    Raises:
        StartupError: this package is not fully installed.
        ValueError: a flag or the checkpoint can't be served, or a switch of `requests` has an unknown value.
    """
    from sglang_dsv4.weights import checkpoint_files

    model_config = compat.model_config_of(server_args)
    hf_config = model_config.hf_config
    if compat.is_ours(hf_config.architectures):
        self_check.require_ready(hf_config.architectures)
        logger.info("sglang_dsv4: %d hooks installed in the launcher (docs/hooks.md)", len(install.installed()))
        arguments = compat.resolving_view(server_args)
        checkpoint_files.require_same_config(model_config, arguments.decrypted_config_file)
        compat.declare_resolution(server_args, "sglang_dsv4", **drafts_of_eagle(arguments))
        refused_flags.refuse_unsupported_arguments(arguments, hf_config)
        refused_combinations.refuse_combinations(arguments)
        refused_flags.refuse_ranks(arguments, Config.from_hf(hf_config))
        refused_flags.refuse_other_quantization(server_args, hf_config)
        choose_effort_tiers(arguments, hf_config)
        output_parser.repairs()
        grammars.limit_s()
        compat.declare_resolution(server_args, "sglang_dsv4", **default_arguments(arguments, hf_config))
        if arguments.moe_runner_backend == "auto" and moe_runner.serves(arguments, model_config):
            compat.declare_resolution(server_args, "sglang_dsv4", moe_runner_backend=moe_runner.RUNNER)
        if arguments.speculative_moe_runner_backend == "auto":  # not None, for which SGLang takes the target's
            compat.declare_resolution(server_args, "sglang_dsv4", speculative_moe_runner_backend=None)
        if arguments.device == "cpu":
            ranks = arguments.tp_size * arguments.pp_size * arguments.dp_size
            env.set_default("SGLANG_CPU_OMP_THREADS_BIND", cores_of_ranks(ranks, sorted(os.sched_getaffinity(0))))
    previous(server_args)


def drafts_of_eagle(arguments: Any) -> dict[str, int]:  # arguments: ServerArgs, or SGLang's view of it
    """The numbers of drafts that `--speculative-algorithm EAGLE` needs and its user did not set: field -> value.

    SGLang would choose the same three numbers, but for DeepSeek-V4 it first asserts that the user gave the top-k. The
    number of draft tokens is that of steps plus 1; the user may give either.

    Raises:
        ValueError: a verify step would have no draft.
    """
    if arguments.speculative_algorithm != "EAGLE":
        return {}
    steps, tokens = arguments.speculative_num_steps, arguments.speculative_num_draft_tokens
    if steps is None and tokens is not None and tokens < 2:
        raise ValueError(
            f"sglang-dsv4 expected --speculative-num-draft-tokens of at least 2, got {tokens}: a verify step has a "
            "request's last token and its drafts. Leave the flag out for three drafts."
        )
    if steps is not None and steps < 1:
        raise ValueError(
            f"sglang-dsv4 expected --speculative-num-steps of at least 1, got {steps}: a step proposes a draft. Leave "
            "the flag out for three drafts."
        )
    if steps is None:
        steps = EAGLE_STEPS if tokens is None else tokens - 1
    chosen = {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }
    return {name: value for name, value in chosen.items() if getattr(arguments, name) is None}


def choose_effort_tiers(arguments: Any, hf_config: Any) -> None:  # arguments: ServerArgs, or SGLang's view of it
    """Find out which reasoning efforts the checkpoint was trained with."""
    has_dspark = bool(getattr(hf_config, "dspark_target_layer_ids", None))
    reasoning_effort.use_tiers_of(arguments.model_path, arguments.revision, has_dspark)


def cores_of_ranks(ranks: int, cores: list[int]) -> str:
    """The cores of each rank as ``0,1|2,3``, for ``SGLANG_CPU_OMP_THREADS_BIND``.

    SGLang needs the variable for more than one rank on a machine. Ranks share cores if there are more ranks than cores.
    """
    share = max(1, len(cores) // ranks)
    groups = [[cores[(rank * share + index) % len(cores)] for index in range(share)] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)


def default_arguments(
    arguments: Any, hf_config: Any
) -> dict[str, Any]:  # arguments: ServerArgs, or SGLang's view of it
    """The arguments that a DeepSeek-V4 server needs and its user did not set: field of ServerArgs -> value."""
    defaults: dict[str, Any] = {"enable_cache_report": True}  # no flag of SGLang's switches it off
    if arguments.radix_cache_backend is None:
        defaults["radix_cache_backend"] = NAME
    if arguments.attn_dp_size > 1:
        defaults["enable_dp_lm_head"] = True  # a group of ranks makes the logits of its own requests
    if chooses_ranks_by_prefix(arguments) and arguments.disaggregation_mode == "prefill":
        # SGLang's default there is the rank that the room's number names. Under the name `round_robin`
        # `prefix.rank_choice` chooses, and the decode server asks which rank has the room.
        defaults["load_balance_method"] = "round_robin"
    if arguments.device == "cuda" and arguments.tp_size > 1 and env.choice("SGLANG_DSV4_ALL_REDUCE") != "sglang":
        # Our kernel sums what FlashInfer's would, which needs memory of its own and, on Hopper, NVLink multicast.
        defaults["enforce_disable_flashinfer_allreduce_fusion"] = True
    if arguments.device == "cpu":
        if arguments.dtype == "auto" and str(hf_config.dtype) in ("torch.float32", "float32"):
            defaults["dtype"] = "float32"  # SGLang's "auto" is float16 here
        if arguments.kv_cache_dtype == "auto":
            defaults["kv_cache_dtype"] = "bfloat16"  # plain rows in the model's dtype
        if arguments.max_total_tokens is None:
            defaults["max_total_tokens"] = CPU_MAX_TOTAL_TOKENS
        if arguments.max_running_requests is None:
            defaults["max_running_requests"] = CPU_MAX_RUNNING_REQUESTS
        if arguments.speculative_algorithm == "DSPARK" or arguments.disaggregation_mode != "null":
            # SGLang does the same for EAGLE on a CPU; a prefill server's overlapping loop makes events of a GPU.
            defaults["disable_overlap_schedule"] = True
    return defaults


def chooses_ranks_by_prefix(arguments: Any) -> bool:  # ServerArgs, or SGLang's view of it
    """Whether there are ranks with requests of their own, and their user leaves the choice to this package."""
    several = arguments.dp_size * arguments.attn_dp_size > 1
    return several and arguments.load_balance_method == "auto" and env.choice("SGLANG_DSV4_RANK_CHOICE") != "sglang"
