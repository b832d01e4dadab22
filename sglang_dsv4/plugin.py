"""Every place where this package touches SGLang, on one screen; the names of what is hooked are in `compat`.

SGLang calls :func:`setup` (entry point group ``sglang.srt.plugins``) in the launcher, in each scheduler process and in
the detokenizer, before it does anything else there. Besides this module there are two more touch points, both for
machines with no GPU: :mod:`sglang_dsv4.cpu.platform` (entry point) and :mod:`sglang_dsv4.cpu.shims` (a ``.pth`` file).

=================  ==================================================================================  =========
what               through                                                                             process
=================  ==================================================================================  =========
model              ``SGLANG_EXTERNAL_MODEL_PACKAGE`` (inherited by the spawned processes)              all
checkpoint files   resolution hook ``handle_model_source_paths``, see ``checkpoint_files``             launcher
CPU memory         resolution hook ``handle_gpu_memory_settings``                                      launcher
default arguments  resolution hook ``handle_model_specific_adjustments``                               launcher
determinism        SGLang's two lists of backends, AROUND ``maybe_enable_batch_invariant_mode``: ``exact``   both
CUDA graphs        resolution hook ``handle_cuda_graph_config``, see ``cuda_graphs``                   launcher
attention backend  ``register_attention_backend("dsv4")``, replaces the in-tree factory                scheduler
prefix cache       ``register_radix_cache_backend("dsv4")``, chosen by a default argument              scheduler
prefixes beyond    what the scheduler asks of a hierarchical cache: methods of ``Dsv4PrefixCache``      scheduler
prefix reuse       AFTER ``ForwardBatch.init_new`` and ``build_replay_fb_view``, ``prefix.restore_and_save``  scheduler
KV pool            AROUND ``KVCacheConfigurator._build_dsv4_kv_pool``: it has no registry              scheduler
pool sizing        AROUND ``create_memory_pool_configurator``: it has no registry                      scheduler
MTP draft          AROUND the two ``DraftBackendFactory._create_dsv4_*``: no registry                  scheduler
MTP draft's graph  AFTER ``EagleDraftWorker._capture_cuda_graphs``, for its extend step                scheduler
longest request    AFTER ``KVCacheConfigurator.configure``, see ``reserve_admission_pages``            scheduler
reasoning effort   AROUND ``DeepSeekRecipe.encode``, see ``effort``                                    launcher
sampling params    BEFORE ``SamplingParams.verify``, see ``request_checks``                            launcher
other requests     seven hooks and the scheduler's dispatcher, see ``request_guards``                 both
other weights      AFTER ``flush_cache_after_weight_update``, see ``prefix.storage_tier``                     scheduler
token ids          AFTER ``scheduler.validate_input_length``, see ``request_checks``                   scheduler
sampling           seven hooks of the sampler and its batches, see ``sampling``                        scheduler
penalties          four hooks where tokens are counted, see ``penalties``                              scheduler
CPU platform       AROUND ``reject_out_of_tree_path``, for our own KV pool only                        scheduler
CPU config         AROUND ``model_runner.adjust_config_with_unaligned_cpu_tp``: kept as it is          scheduler
CPU quantisation   AROUND ``loader._get_quantization_config``: weights are dequantised at load         scheduler
CPU speculation    REPLACE for functions that launch Triton kernels, and two more: ``cpu.speculation`` all
start-up times     AROUND four methods of ``ModelRunner``, see ``startup``                             scheduler
self-check         BEFORE ``ModelRunner.load_model``, AFTER ``Scheduler.__init__``                     scheduler
=================  ==================================================================================  =========

``SGLANG_DSV4=off`` turns all of it off. Nothing here decides anything for a model of another architecture.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dsv4.cpu.shims import is_off, require_known_switch
from sglang_dsv4.seam import compat
from sglang_dsv4.seam import refused_flags as server_flags

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigResult, KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfigurator
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.draft_utils import DraftBackendFactory
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

logger = logging.getLogger(__name__)

NAME = "dsv4"  # of the attention backend and of the prefix cache
# On a CPU the pool would otherwise take most of the machine's memory, and 256 request slots would.
CPU_MAX_TOTAL_TOKENS = 65536
CPU_MAX_RUNNING_REQUESTS = 32
# SGLang takes 1.5 MB a token of a prefill chunk off the memory, as GPU kernels need: beyond 16K tokens (with
# --chunked-prefill-size -1, too) a machine of 24 GB would have less than nothing left.
CPU_MEM_FRACTION_STATIC = 0.7


def setup() -> None:
    """Installs everything. Never raises for what concerns DeepSeek-V4 only: compat stops the server when it matters."""
    require_known_switch()
    if is_off():
        logger.info("sglang_dsv4 is off (SGLANG_DSV4=off): SGLang runs its own code.")
        return
    os.environ.setdefault(compat.MODEL_PACKAGE_VARIABLE, compat.OUR_MODELS)
    with compat.remembering_failures("setting default arguments"):
        _install_default_arguments()
        if multiprocessing.parent_process() is None:
            _install_route_hooks()
    # The scheduler process is the one that has imported SGLang's scheduler before it loads plugins. Elsewhere the
    # hooks would only cost the import of their targets.
    if "sglang.srt.managers.scheduler" in sys.modules:
        _install_self_check()
        with compat.remembering_failures("installing the scheduler's hooks"):
            _install_scheduler_hooks()


# --------------------------------------------------------------------------------------------- launcher process


def _install_default_arguments() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from sglang_dsv4.determinism import exact
    from sglang_dsv4.requests import checks as request_checks
    from sglang_dsv4.requests import guards as request_guards
    from sglang_dsv4.requests import reasoning_effort as effort
    from sglang_dsv4.seam import moe_runner as experts_runner
    from sglang_dsv4.warmup import cuda_graphs

    exact.lift_refusal(NAME)
    experts_runner.add_choice()
    _hook("render a prompt", effort.render, "AROUND")
    _hook("check sampling parameters", request_checks.check_sampling_parameters, "BEFORE")
    _hook("normalise a request", request_guards.check_generate_request, "BEFORE")
    _hook("normalise sampling parameters", request_guards.check_text_parameters, "BEFORE")
    _hook("await a control request", request_guards.raise_failures, "AROUND")
    if _on_our_cpu():
        from sglang_dsv4.cpu import speculation

        _hook("resolve DSpark", speculation.resolve_dspark, "AROUND")
    register_resolution_hook("handle_model_source_paths")(_check_checkpoint)
    register_resolution_hook("handle_gpu_memory_settings")(_resolve_cpu_memory)
    register_resolution_hook("handle_model_specific_adjustments")(_resolve_default_arguments)
    register_resolution_hook("handle_cuda_graph_config")(cuda_graphs.resolve_cuda_graphs)


def _install_route_hooks() -> None:
    """Where clients are answered. Not in the spawned processes, which would only pay for the imports."""
    from sglang_dsv4.requests import guards as request_guards

    _hook("make a tokenizer manager", request_guards.answer_value_errors, "AFTER")
    _hook("decode tokens", request_guards.check_tokens_to_decode, "AROUND")


def _check_checkpoint(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Before SGLang parses the config: what it fills in, or computes from it, would hide what the file says."""
    from sglang_dsv4.weights import checkpoint_files

    previous(server_args)
    checkpoint_files.check_checkpoint(compat.resolving_view(server_args))


def _resolve_cpu_memory(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    arguments = compat.resolving_view(server_args)
    if arguments.device == "cpu" and arguments.mem_fraction_static is None:
        if compat.is_ours(compat.model_config_of(server_args).hf_config.architectures):
            compat.declare_resolution(server_args, "sglang_dsv4", mem_fraction_static=CPU_MEM_FRACTION_STATIC)
    previous(server_args)


def _resolve_default_arguments(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Chooses what the user left open; SGLang's own step for this architecture (`previous`) runs after it."""
    from sglang_dsv4.seam import moe_runner as experts_runner
    from sglang_dsv4.weights import checkpoint_files

    model_config = compat.model_config_of(server_args)
    hf_config = model_config.hf_config
    if compat.is_ours(hf_config.architectures):
        compat.require_ready(hf_config.architectures)
        arguments = compat.resolving_view(server_args)
        checkpoint_files.require_same_config(model_config, arguments.decrypted_config_file)
        refuse_unsupported_arguments(arguments, hf_config)
        choose_effort_tiers(arguments, hf_config)
        compat.declare_resolution(server_args, "sglang_dsv4", **default_arguments(arguments, hf_config))
        if arguments.moe_runner_backend == "auto" and experts_runner.serves(arguments, model_config):
            compat.declare_resolution(server_args, "sglang_dsv4", moe_runner_backend=experts_runner.RUNNER)
        if arguments.device == "cpu":
            ranks = arguments.tp_size * arguments.pp_size * arguments.dp_size
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cores_of_ranks(ranks, sorted(os.sched_getaffinity(0))))
    previous(server_args)


def refuse_unsupported_arguments(arguments: Any, hf_config: Any) -> None:  # ServerArgs, or SGLang's view of it
    """Raises for what SGLang would accept and our pools or drafts can't serve.

    Raises:
        ValueError: names the flag and why.
    """
    server_flags.refuse(arguments)
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
    if arguments.device == "cpu" and arguments.speculative_use_rejection_sampling:
        raise ValueError(
            "sglang-dsv4 does not support --speculative-use-rejection-sampling on a CPU: leave the flag out, drafts "
            "are accepted by the target's probabilities"
        )


def choose_effort_tiers(arguments: Any, hf_config: Any) -> None:  # arguments: ServerArgs, or SGLang's view of it
    """Find out which reasoning efforts the checkpoint was trained with.

    Raises:
        ValueError: processes that load no plugin would render its prompts in another way.
    """
    from sglang_dsv4.requests import reasoning_effort as effort

    has_dspark = bool(getattr(hf_config, "dspark_target_layer_ids", None))
    tiers = effort.use_tiers_of(arguments.model_path, arguments.revision, has_dspark)
    if tiers is effort.Tiers.APRIL and arguments.tokenizer_worker_num > 1:
        raise ValueError(
            f"sglang-dsv4 does not support --tokenizer-worker-num {arguments.tokenizer_worker_num} with an April "
            "checkpoint: SGLang loads no plugin in those workers, and they would render the later releases' reasoning "
            "efforts. Leave the flag out."
        )


def cores_of_ranks(ranks: int, cores: list[int]) -> str:
    """``SGLANG_CPU_OMP_THREADS_BIND``, the cores of each rank as ``0,1|2,3``: SGLang wants it beyond one rank a node.

    More ranks than cores share them.
    """
    share = max(1, len(cores) // ranks)
    groups = [[cores[(rank * share + index) % len(cores)] for index in range(share)] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)


def default_arguments(
    arguments: Any, hf_config: Any
) -> dict[str, Any]:  # arguments: ServerArgs, or SGLang's view of it
    """The arguments that a DeepSeek-V4 server needs and its user did not set.

    Returns: field of ServerArgs -> value. Never a field that the user set.
    """
    defaults: dict[str, Any] = {}
    if arguments.radix_cache_backend is None:
        defaults["radix_cache_backend"] = NAME
    if arguments.device == "cpu":
        if arguments.dtype == "auto" and str(hf_config.dtype) in ("torch.float32", "float32"):
            defaults["dtype"] = "float32"  # SGLang would make float16 of it
        if arguments.kv_cache_dtype == "auto":
            defaults["kv_cache_dtype"] = "bfloat16"  # plain rows in the model's dtype
        if arguments.max_total_tokens is None:
            defaults["max_total_tokens"] = CPU_MAX_TOTAL_TOKENS
        if arguments.max_running_requests is None:
            defaults["max_running_requests"] = CPU_MAX_RUNNING_REQUESTS
        if arguments.speculative_algorithm == "DSPARK":
            defaults["disable_overlap_schedule"] = True  # as SGLang does for EAGLE on a CPU
    return defaults


# --------------------------------------------------------------------------------------------- scheduler process


def _install_scheduler_hooks() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from sglang_dsv4.prefix import prefix_cache, restore_and_save
    from sglang_dsv4.requests import checks as request_checks
    from sglang_dsv4.requests import guards as request_guards
    from sglang_dsv4.requests import penalties, sampling
    from sglang_dsv4.seam import moe_runner as experts_runner
    from sglang_dsv4.warmup import cuda_graphs
    from sglang_dsv4.warmup import startup_times as startup

    experts_runner.register()

    register_attention_backend(NAME)(_create_attention_backend)
    register_radix_cache_backend(NAME, _create_prefix_cache)
    _hook("load the model", startup.around("weights"), "AROUND")
    _hook("allocate the pools", startup.around("pools"), "AROUND")
    _hook("make attention backends", startup.around("attention backends"), "AROUND")
    _hook("capture graphs", startup.around("CUDA graphs"), "AROUND")
    _hook("build the KV pool", _build_kv_pool, "AROUND")
    _hook("size the pools", _size_pools, "AROUND")
    _hook("report the pools", _reserve_admission_pages, "AFTER")
    _hook("refuse a platform", _allow_our_kv_pool, "AROUND")
    _hook("make a batch", restore_and_save.carry_request_slots, "AFTER")
    _hook("view a batch for a replay", restore_and_save.carry_request_slots_to_replay, "AFTER")
    _hook("make a draft's decode backend", _create_draft_decode_backend, "AROUND")
    _hook("make a draft's prefill backend", _create_draft_extend_backend, "AROUND")
    _hook("capture a draft's graphs", _capture_draft_extend, "AFTER")
    _hook("name DSpark's target", cuda_graphs.model_type_for_epilogue, "AFTER")
    _hook("check a request", request_checks.refuse_unknown_token_ids, "AFTER")
    _hook("make a grammar", request_guards.refuse_empty_grammar, "AFTER")
    _hook("update weights", request_guards.keep_weights, "AROUND")
    _hook("flush after an exchange of weights", prefix_cache.suspend_without_flush, "AFTER")
    _hook("make sampling info", sampling.fill_seeds, "AFTER")
    _hook("make sampling info", sampling.ignore_greedy_temperatures, "AFTER")
    _hook("make sampling info", penalties.count_earlier, "AFTER")
    _hook("copy sampling info", penalties.remember_source, "AFTER")
    _hook("sample a batch", penalties.count_sampled, "AFTER")
    _hook("count for penalties", penalties.leave_out_processed, "AROUND")
    _hook("merge sampling info", sampling.align_seeds, "BEFORE")
    _hook("prepare logits", sampling.note_greedy_tokens, "AFTER")
    _hook("sample from probabilities", sampling.take_greedy_tokens, "AFTER")
    _hook("sample", sampling.sample_with_seeds, "AROUND")
    _hook("draw", sampling.draw, "AROUND")
    _hook("replace PyTorch's products", _keep_cpu_products, "AROUND")
    _hook("pad the config for a CPU", _keep_config, "AROUND")
    _hook("choose a quantisation", _skip_gpu_quantisation, "AROUND")
    _install_cpu_speculation()


def _on_our_cpu() -> bool:
    from sglang.srt.platforms import current_platform

    return type(current_platform).__module__ == "sglang_dsv4.cpu.platform"


def _install_cpu_speculation() -> None:
    if not _on_our_cpu():
        return
    from sglang_dsv4.cpu import speculation

    _hook("place the last token", speculation.last_locations, "REPLACE")
    _hook("place new tokens", speculation.assign_slots, "REPLACE")
    _hook("place drafts", speculation.assign_draft_slots, "REPLACE")
    _hook("link drafts", speculation.build_chain, "REPLACE")
    _hook("verify drafts", speculation.verify, "REPLACE")
    _hook("accept a sampled block", speculation.accept_block, "REPLACE")
    _hook("keep for a stream", speculation.keep_for_stream, "AROUND")
    _hook("take the last token", speculation.fill_bonus_tokens, "REPLACE")


def _install_self_check() -> None:
    """Not remembered but fatal: without these hooks nobody would notice that the others are missing."""
    try:
        _hook("load the model", _check_before_load, "BEFORE")
        _hook("start the scheduler", _check_scheduler, "AFTER")
    except Exception as error:
        # SystemExit is the one exception that SGLang's plugin loader does not swallow.
        raise SystemExit(
            f"sglang_dsv4 could not install its start-up check into SGLang {compat.sglang_version()}: {error!r}. "
            f"It was tested with {compat.TESTED_SGLANG}. Install that version, or set SGLANG_DSV4=off."
        ) from error


def _hook(what: str, function: Callable[..., Any], kind: str) -> None:
    """Hook a function of :data:`compat.SGLANG_HOOKS`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = compat.SGLANG_HOOKS[what]
    pkgutil.resolve_name(target)  # SGLang would only log that the target is gone
    HookRegistry.register(target, function, HookType[kind])


def _create_attention_backend(runner: ModelRunner) -> AttentionBackend:
    from sglang.srt.runtime_context import get_parallel

    from sglang_dsv4.attention import comparison as attention_comparison
    from sglang_dsv4.attention.backend import Dsv4AttentionBackend
    from sglang_dsv4.layers.packed_experts import log_arrangement
    from sglang_dsv4.warmup.compile_ahead import compile_ahead

    log_arrangement(runner.model)
    backend, parallel = Dsv4AttentionBackend(runner), get_parallel()
    heads = runner.model_config.num_attention_heads // parallel.tp_size
    compile_ahead(runner.model.dsv4_config, backend.token_to_kv_pool.geometry, heads, backend.device)
    file = attention_comparison.file_of_rank(parallel.tp_rank)
    if file is not None and not runner.is_draft_worker:
        logger.warning("sglang_dsv4: every attention is computed twice and compared, see %s", file)
        attention_comparison.install(backend, runner.model, file)
    return backend


def _create_draft_decode_backend(original: Callable[..., Any], factory: DraftBackendFactory) -> tuple[str, Any]:
    from sglang_dsv4.attention.draft_chain import create_draft_decode_backend

    return create_draft_decode_backend(factory)


def _create_draft_extend_backend(original: Callable[..., Any], factory: DraftBackendFactory) -> tuple[str, Any]:
    from sglang_dsv4.attention.draft_chain import create_draft_extend_backend

    return create_draft_extend_backend(factory)


def _capture_draft_extend(result: None, worker: EagleDraftWorker) -> None:
    """SGLang records a draft's extend step for the backends on a list of its own; ours can be recorded, too."""
    from sglang_dsv4.attention.backend import Dsv4AttentionBackend
    from sglang_dsv4.warmup import cuda_graphs

    if isinstance(worker.draft_extend_attn_backend, Dsv4AttentionBackend):
        cuda_graphs.capture_draft_extend(worker)


def _create_prefix_cache(context: TreeCacheBuildContext) -> BasePrefixCache:
    from sglang_dsv4.prefix.prefix_cache import create_prefix_cache

    return create_prefix_cache(context)


def _build_kv_pool(original: Callable[..., KVCache], configurator: KVCacheConfigurator, **sizes: Any) -> KVCache:
    from sglang_dsv4.prefix.pool_setup import build_kv_pool

    return build_kv_pool(configurator, **sizes)


def _size_pools(
    original: Callable[[KVCacheConfigurator], MemoryPoolConfigurator], configurator: KVCacheConfigurator
) -> MemoryPoolConfigurator:
    if not compat.is_ours(configurator.model_config.hf_config.architectures):
        return original(configurator)
    from sglang_dsv4.cache.pool_configurator import Dsv4PoolConfigurator

    sizing = Dsv4PoolConfigurator(configurator)
    compat.note_pool_sizing(sizing)
    return sizing


def _reserve_admission_pages(
    result: KVCacheConfigResult, configurator: KVCacheConfigurator, **kwargs: Any
) -> KVCacheConfigResult:
    if not compat.is_ours(configurator.model_config.hf_config.architectures):
        return result
    from sglang_dsv4.cache.pool_configurator import reserve_admission_pages

    return reserve_admission_pages(result)


def _keep_config(original: Callable[..., ModelConfig], model_config: ModelConfig, *args: Any) -> ModelConfig:
    """On a CPU SGLang pads heads and intermediate sizes to what its own layers want: one KV head becomes tp_size."""
    if compat.is_ours(model_config.hf_config.architectures):
        return model_config
    return original(model_config, *args)


def _skip_gpu_quantisation(
    original: Callable[..., QuantizationConfig | None], model_config: ModelConfig, *args: Any
) -> QuantizationConfig | None:
    """On a CPU weights are dequantised while they are loaded; SGLang's FP8 method would only refuse float32."""
    from sglang.srt.runtime_context import get_device

    if get_device().device == "cpu" and compat.is_ours(model_config.hf_config.architectures):
        return None
    return original(model_config, *args)


def _allow_our_kv_pool(original: Callable[..., None], platform: Any, *, subsystem: str) -> None:
    """An out-of-tree platform may not build SGLang's DeepSeek-V4 pool; ours is built in its place."""
    if subsystem != "the DeepSeek-V4 KV pool":
        original(platform, subsystem=subsystem)


def _keep_cpu_products(original: Callable[[ModelRunner], None], runner: ModelRunner) -> None:
    """On a CPU ours are batch-invariant, and SGLang would put Triton kernels in the place of PyTorch's."""
    if not (runner.device == "cpu" and compat.is_ours(runner.model_config.hf_config.architectures)):
        original(runner)


def _check_before_load(runner: ModelRunner) -> None:
    architectures = runner.model_config.hf_config.architectures
    compat.require_ready(architectures)
    if compat.is_ours(architectures):
        from sglang_dsv4.determinism import exact

        compat.require_our_model_classes()
        exact.start(runner)


def _check_scheduler(result: None, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    if not compat.is_ours(scheduler.model_config.hf_config.architectures):
        return
    from sglang_dsv4.requests import guards as request_guards
    from sglang_dsv4.requests import sampling
    from sglang_dsv4.warmup import startup_times as startup

    compat.require_ready(scheduler.model_config.hf_config.architectures)
    live = compat.require_live(scheduler)
    sampling.start(scheduler)
    request_guards.start(scheduler)
    parts = ", ".join(f"{part.replace('_', ' ')} {value.__qualname__}" for part, value in vars(live).items())
    logger.info("sglang_dsv4 start-up: %s", startup.summary())
    logger.info("sglang_dsv4 %s is live on SGLang %s: %s", compat.our_version(), compat.sglang_version(), parts)
