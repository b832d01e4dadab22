"""The table of everything in SGLang that this package hooks, registers or replaces; `docs/hooks.md` is made from it.

    python -m sglang_dsv4.seam.hooks > docs/hooks.md

Rows of five subjects are in `rows`; `HOOKS` names their place in the order. Functions are named by strings, so that
importing this module imports nothing else. `plugin` installs the rows when SGLang loads it, except for the kinds
ENTRY_POINT and ATTRIBUTE (`hook_kinds.KINDS`); `install` says how. A test finds changes to SGLang that have no row.
Targets are names of SGLang 0.5.23.
"""

from __future__ import annotations

from sglang_dsv4.seam.hook_kinds import (
    KINDS,
    REFUSED,
    REQUESTS,
    RUNNER,
    SCHEDULER,
    SURVIVES,
    UPDATES,
    VALIDATES,
    Hook,
    Kind,
    Process,
)
from sglang_dsv4.seam.rows.clients import CLIENTS
from sglang_dsv4.seam.rows.cpu import CPU
from sglang_dsv4.seam.rows.disaggregation import DISAGGREGATION
from sglang_dsv4.seam.rows.pipeline import PIPELINE
from sglang_dsv4.seam.rows.sampling import SAMPLING

MODEL_PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
OUR_MODELS = "sglang_dsv4.models"
EXPRESSIONS = "re"
DISPATCHER = "_request_dispatcher"
FP8_PRODUCT = "w8a8_block_fp8_linear"

_CHOICES = "sglang.srt.arg_groups.choices"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
_PROFILER = "sglang.srt.managers.scheduler_components.profiler_manager.SchedulerProfilerManager"
_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_DRAFT_CHAIN = "sglang_dsv4.attention.draft_chain"
_CPU = "sglang_dsv4.cpu"
_UPDATE = "sglang_dsv4.weights.updates"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_ALL_GROUPS = "sglang_dsv4.seam.all_groups"

_STAYS = "never: this is SGLang's extension point"
_POOLS = "KV pools, their sizing and their reports can be registered, as radix caches can"
_DRAFT_BACKENDS = "draft attention backends come from the registry of attention backends"
_GROUPS_DIFFER = "SGLang's ranks agree that they are idle"
_COMPILES = "SGLang limits the seconds of a compilation, and its threads"
_SESSIONS = "SGLang's ranks agree that a session has timed out"
_TIMES = "SGLang logs the duration of its start-up phases"

SELF_CHECK = (
    Hook(f"{RUNNER}.model_runner.ModelRunner.load_model", Kind.BEFORE, Process.SCHEDULER,
         "sglang_dsv4.seam.self_check:check_before_load",
         "stops a server that would run SGLang's own DeepSeek-V4 code, and one that can't be deterministic",
         "an error in a plugin stops SGLang"),
    Hook(f"{SCHEDULER}.__init__", Kind.AFTER, Process.SCHEDULER,
         "sglang_dsv4.seam.self_check:check_scheduler",
         "stops a server in which a part is not ours, and logs the live parts",
         "an error in a plugin stops SGLang"),
)  # fmt: skip
"""Installed first. Without these rows an error in another row would go unnoticed, so an error here ends the process."""

TREE_CORE = Hook(
    "sglang.srt.mem_cache.unified_cache.tree_core_registry.register_tree_core_backend", Kind.REGISTRY,
    Process.SCHEDULER, "sglang_dsv4.prefix.prefix_cache:create_tree_core",
    "the radix tree's walk, which ends a match where a tail is kept", _STAYS,
)  # fmt: skip
"""Named, since a prefix cache that is made without the plugin needs it, too."""

HOOKS = (
    # ---- before any plugin is loaded
    Hook("entry point group sglang.srt.plugins", Kind.ENTRY_POINT, Process.EVERY, "sglang_dsv4.plugin:setup",
         "installs the rows below", _STAYS),
    Hook("entry point group sglang.srt.platforms", Kind.ENTRY_POINT, Process.EVERY, f"{_CPU}.platform:activate",
         "a machine with no accelerator: SGLang's layers run their PyTorch path", _STAYS),
    Hook("site-packages/sglang_dsv4_cpu.pth", Kind.ENTRY_POINT, Process.EVERY, f"{_CPU}.shims:activate",
         "lets `import sglang` succeed without Triton, and with torchvision's CUDA wheel and a CPU build of torch",
         "SGLang can be imported on a machine with no GPU"),
    # ---- every process
    Hook(MODEL_PACKAGE_VARIABLE, Kind.ENVIRONMENT, Process.EVERY, OUR_MODELS,
         "SGLang's model registry finds our model classes", _STAYS),
    Hook(f"{_CHOICES}.add_deterministic_attention_backend_choices", Kind.CHOICE, Process.EVERY,
         "sglang_dsv4.attention.backend:Dsv4AttentionBackend",
         "`--enable-deterministic-inference` accepts our attention backend", _STAYS),
    Hook(f"{_CHOICES}.add_radix_supported_deterministic_attention_backend_choices", Kind.CHOICE, Process.EVERY,
         "sglang_dsv4.attention.backend:Dsv4AttentionBackend",
         "`--enable-deterministic-inference` keeps the radix cache on", _STAYS),
    Hook(f"{_CHOICES}.add_moe_runner_backend_choices", Kind.CHOICE, Process.EVERY,
         "sglang_dsv4.layers.packed_experts:PackedExperts",
         "`--moe-runner-backend` accepts our MoE runner", _STAYS),
    Hook("sglang.srt.parser.deepseek_recipe_renderer.DeepSeekRecipe.encode", Kind.AROUND, Process.EVERY,
         f"{REQUESTS}.chat.reasoning_effort:render",
         "prompts carry the reasoning-effort text that the checkpoint was trained with",
         "SGLang reads the efforts from the checkpoint's encoder"),
    Hook("sglang.srt.sampling.sampling_params.SamplingParams.verify", Kind.BEFORE, Process.EVERY,
         f"{REFUSED}.sampling_numbers:check_sampling_parameters",
         "numbers that would overflow a batch's tensors get a 400", VALIDATES),
    Hook("sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments", Kind.BEFORE, Process.EVERY,
         f"{REFUSED}.guards:check_request",
         "fields of another type or of another number of prompts, embeddings, `n` and media get a 400", VALIDATES),
    Hook("sglang.srt.managers.io_struct.EmbeddingReqInput.normalize_batch_and_arguments", Kind.BEFORE, Process.EVERY,
         f"{REFUSED}.guards:check_request",
         "as for the row above, on the routes for embeddings", VALIDATES),
    Hook("sglang.srt.sampling.sampling_params.SamplingParams.normalize", Kind.BEFORE, Process.EVERY,
         f"{REFUSED}.guards:check_text_parameters",
         "an invalid `stop_regex`, or a grammar together with `min_new_tokens`, gets a 400", VALIDATES),
    Hook("sglang.srt.managers.communicator.FanOutCommunicator.__call__", Kind.AROUND, Process.EVERY,
         f"{REQUESTS}.failures:raise_failures",
         "a control request that failed in the scheduler gets a 400",
         "SGLang's scheduler answers failed control requests with an error"),
    Hook("handle_model_source_paths", Kind.RESOLUTION, Process.EVERY,
         "sglang_dsv4.seam.default_arguments:check_checkpoint",
         "reads config.json, index and tokenizer before SGLang fills in missing fields", _STAYS),
    Hook("handle_gpu_memory_settings", Kind.RESOLUTION, Process.EVERY,
         "sglang_dsv4.seam.default_arguments:resolve_cpu_memory",
         "on a CPU SGLang's share of memory can be negative", _STAYS),
    Hook("handle_model_specific_adjustments", Kind.RESOLUTION, Process.EVERY,
         "sglang_dsv4.seam.default_arguments:resolve_default_arguments",
         "refuses flags that can't be served, and sets the defaults of a DeepSeek-V4 server", _STAYS),
    Hook("handle_cuda_graph_config", Kind.RESOLUTION, Process.EVERY,
         "sglang_dsv4.warmup.cuda_graphs:resolve_cuda_graphs",
         "CUDA graphs of prefills are ours; no graphs of decode steps while an op can't be captured", _STAYS),
    *CLIENTS,
    # ---- the scheduler: registries
    Hook("sglang.srt.layers.moe.utils.register_moe_runner_backend_name", Kind.NAME, Process.SCHEDULER,
         "sglang_dsv4.layers.packed_experts:PackedExperts",
         "`--moe-runner-backend` accepts our MoE runner", _STAYS),
    Hook("sglang.srt.layers.attention.attention_registry.register_attention_backend", Kind.DECORATOR,
         Process.SCHEDULER, "sglang_dsv4.seam.creators:create_attention_backend",
         "our attention backend; replaces SGLang's factory of that name", _STAYS),
    Hook("sglang.srt.mem_cache.registry.register_radix_cache_backend", Kind.REGISTRY, Process.SCHEDULER,
         "sglang_dsv4.prefix.prefix_cache:create_prefix_cache",
         "our prefix cache; a default argument chooses it", _STAYS),
    TREE_CORE,
    # ---- the scheduler: start-up
    *(
        Hook(f"{RUNNER}.model_runner.ModelRunner.{method}", Kind.AROUND, Process.SCHEDULER,
             f"sglang_dsv4.warmup.startup_times:around_{phase}", "adds its duration to the start-up line of the log",
             _TIMES)
        for method, phase in (("load_model", "weights"), ("alloc_memory_pool", "pools"),
                              ("init_attention_backends", "attention_backends"), ("init_cuda_graphs", "cuda_graphs"))
    ),
    Hook(f"{RUNNER}.model_runner.ModelRunner.init_cuda_graphs", Kind.AFTER, Process.SCHEDULER,
         "sglang_dsv4.seam.creators:record_prefills",
         "CUDA graphs of prefills: SGLang's runner of `breakable` graphs gives a model's layers the batch",
         "SGLang's runner of prefills takes a model whose layers have other arguments"),
    Hook(f"{SCHEDULER}.__init__", Kind.AFTER, Process.SCHEDULER,
         f"{REQUESTS}.failures:start", "guards the scheduler's dispatcher (row below)",
         SURVIVES),
    Hook(f"{SCHEDULER}.__init__", Kind.AFTER, Process.SCHEDULER,
         f"{REFUSED}.guards:note_hidden_size", "the width that embeddings must have", VALIDATES),
    Hook(f"{_PROFILER}._profile", Kind.AROUND, Process.SCHEDULER, f"{REFUSED}.administration:profile",
         "a profile that can't be written, or would be started twice, gets a 400", VALIDATES),
    Hook(f"{_PROFILER}._profile_batch_predicate", Kind.AROUND, Process.SCHEDULER,
         f"{REFUSED}.administration:profile_step",
         "a profile that fails between two forwards is dropped", "SGLang's scheduler survives a profile that fails"),
    # ---- the scheduler: pools and batches
    Hook(f"{_CONFIGURATOR}.KVCacheConfigurator._build_dsv4_kv_pool", Kind.REPLACE, Process.SCHEDULER,
         "sglang_dsv4.prefix.pool_setup:build_kv_pool",
         "our KV pool: rings of window rows and pools of compressed entries", _POOLS),
    Hook(f"{RUNNER}.pool_configurator.create_memory_pool_configurator", Kind.AROUND, Process.SCHEDULER,
         "sglang_dsv4.seam.creators:size_pools", "computes how many tokens fit into memory", _POOLS),
    Hook(f"{_CONFIGURATOR}.KVCacheConfigurator.configure", Kind.AFTER, Process.SCHEDULER,
         "sglang_dsv4.seam.creators:reserve_admission_pages",
         "a request that could never be admitted gets a 400 and does not wait for ever",
         "SGLang refuses requests longer than its scheduler admits"),
    Hook(f"{_CONFIGURATOR}.reject_out_of_tree_path", Kind.AROUND, Process.SCHEDULER,
         f"{_CPU}.overrides:allow_our_kv_pool",
         "SGLang refuses its DeepSeek-V4 pool on an out-of-tree platform; ours is built there", _POOLS),
    Hook(f"{RUNNER}.forward_batch_info.ForwardBatch.init_new", Kind.AFTER, Process.SCHEDULER,
         "sglang_dsv4.prefix.restore_and_save:carry_request_slots",
         "request slots stay on the host in every mode, so that a decode step reads nothing back",
         "SGLang keeps `req_pool_indices_cpu` in every mode"),
    Hook(f"{RUNNER}.runner.decode_cuda_graph_runner.build_replay_fb_view", Kind.AFTER, Process.SCHEDULER,
         "sglang_dsv4.prefix.restore_and_save:carry_request_slots_to_replay",
         "request slots also stay on the host when a CUDA graph is replayed",
         "SGLang keeps `req_pool_indices_cpu` in every mode"),
    # ---- the scheduler: drafts
    Hook(f"{_DRAFTS}._create_dsv4_decode_backend", Kind.REPLACE, Process.SCHEDULER,
         f"{_DRAFT_CHAIN}:create_draft_decode_backend", "the attention of an MTP draft's chain", _DRAFT_BACKENDS),
    Hook(f"{_DRAFTS}._create_dsv4_prefill_backend", Kind.REPLACE, Process.SCHEDULER,
         f"{_DRAFT_CHAIN}:create_draft_extend_backend",
         "the attention of an MTP draft's extend step", _DRAFT_BACKENDS),
    Hook("sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs", Kind.AFTER,
         Process.SCHEDULER, "sglang_dsv4.seam.creators:capture_draft_extend",
         "SGLang captures a draft's extend step only for a list of its own backends",
         "a backend can say that the extend step may be captured"),
    Hook("sglang.srt.speculative.dspark_components.dspark_worker_v2.target_model_type", Kind.AFTER,
         Process.SCHEDULER, "sglang_dsv4.warmup.cuda_graphs:model_type_for_epilogue",
         "draft acceptance is captured in DSpark's verify graph", "a target can ask for that epilogue"),
    Hook(f"{RUNNER}.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAFT_CHAIN}:plan_padded_batch",
         "a draft's metadata has the rows that attention data parallelism adds after SGLang has planned it",
         "SGLang plans a draft's step after it has padded the batch"),
    # ---- the scheduler: requests
    Hook("sglang.srt.managers.schedule_batch.Req._check_str_based_finish", Kind.AROUND, Process.SCHEDULER,
         f"{REFUSED}.stop_patterns:check_within_limit",
         "a `stop_regex` that is searched for too long gets a 400", "SGLang limits the time of that search"),
    Hook("sglang.srt.managers.scheduler.validate_input_length", Kind.AFTER, Process.SCHEDULER,
         f"{REFUSED}.token_ids:refuse_unknown_token_ids", "token ids outside the vocabulary get a 400", VALIDATES),
    Hook(f"{SCHEDULER}.abort_request", Kind.AROUND, Process.SCHEDULER,
         f"{REQUESTS}.aborts:end_the_request", "a client that disconnects ends its own request, not every request "
         "whose id begins with that request's id", "SGLang compares ids, and sends the entries of a batch by name"),
    Hook(f"{SCHEDULER}._poll_timeout_aborts", Kind.AFTER, Process.SCHEDULER, f"{REQUESTS}.sessions:request_closes",
         "a session that times out ends on all ranks in the same turn", _SESSIONS),
    Hook("sglang.srt.session.session_controller.SessionController.maybe_reap", Kind.AROUND, Process.SCHEDULER,
         f"{REQUESTS}.sessions:wait_for_close", "no rank ends a session by its own clock", _SESSIONS),
    Hook("sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend._from_context", Kind.AFTER,
         Process.SCHEDULER, f"{REFUSED}.guards:refuse_empty_grammar",
         "a grammar that no text fulfils gets a 400", VALIDATES),
    Hook("sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.get_cached_or_future_value", Kind.AROUND,
         Process.SCHEDULER, f"{REFUSED}.grammars:compile_within_limit",
         "requests with the same grammar share a compilation, and slow ones leave threads to others", _COMPILES),
    Hook("sglang.srt.constrained.grammar_manager.GrammarManager.get_ready_grammar_requests", Kind.AROUND,
         Process.SCHEDULER, f"{REFUSED}.grammars:refuse_slow_grammars",
         "a grammar that is compiled for too long gets a 400 that names the limit", _COMPILES),
    Hook(f"{RUNNER}.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk", Kind.AROUND,
         Process.SCHEDULER, f"{_UPDATE}.old_files:keep_weights",
         "new weights that can't be loaded leave the old ones in service",
         "SGLang reloads the old weights when an update fails"),
    *(
        Hook(f"{_WEIGHTS}.{method}", Kind.AROUND, Process.SCHEDULER, f"{_UPDATE}.session:{function}", why, UPDATES)
        for method, function, why in (
            ("begin_weight_update", "begin", "tensors are kept in host memory until the update ends"),
            ("update_weights_from_tensor", "from_tensors", "a bucket is checked; the weights that serve stay"),
            ("update_weights_from_distributed", "from_group", "a bucket is checked; the weights that serve stay"),
            ("end_weight_update", "end", "all models and ranks exchange their weights and flush the cache, or none"),
            ("update_weights_from_disk", "from_files", "all models and ranks exchange their weights, or none"),
            ("update_weights_from_ipc", "from_ipc", "all models and ranks exchange their weights, or none"),
        )
    ),
    Hook(f"{_WEIGHTS}.release_memory_occupation", Kind.AFTER, Process.SCHEDULER,
         f"{_UPDATE}.session:note_lost_weights",
         "weights whose memory was released without a copy must come whole", UPDATES),
    Hook(f"{SCHEDULER}.flush_cache", Kind.AROUND, Process.SCHEDULER,
         f"{_ALL_GROUPS}:flush", "all groups of attention data parallelism are flushed, or none", _GROUPS_DIFFER),
    Hook("sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper.handle", Kind.AROUND,
         Process.SCHEDULER, f"{_ALL_GROUPS}:flush_at_once", "a flush that waits is refused there", _GROUPS_DIFFER),
    Hook(f"{_WEIGHTS}.release_memory_occupation", Kind.BEFORE, Process.SCHEDULER,
         f"{_ALL_GROUPS}:require_idle", "memory is released on all ranks, or on none", _GROUPS_DIFFER),
    Hook(f"{SCHEDULER}.flush_cache", Kind.AFTER, Process.SCHEDULER,
         "sglang_dsv4.prefix.metrics:publish_after_flush", "the gauges of pools that were emptied are published",
         "SGLang publishes its gauges after a flush"),
    *SAMPLING,
    Hook("sglang.srt.managers.data_parallel_controller.DataParallelController.round_robin_scheduler", Kind.AROUND,
         Process.SCHEDULER, "sglang_dsv4.prefix.rank_choice:dispatch",
         "a request goes to the data-parallel rank where most of its prompt is cached",
         "load-balancing methods can be registered"),
    *DISAGGREGATION,
    *PIPELINE,
    # ---- attributes of SGLang's objects, set by the function in brackets
    Hook(f"{SCHEDULER}.{DISPATCHER}", Kind.ATTRIBUTE, Process.SCHEDULER,
         f"{REQUESTS}.failures:guard", "a request whose handler raises is answered with the reason "
         "(`requests.failures.start`)", SURVIVES),
    Hook(f"sglang.srt.managers.schedule_batch.{EXPRESSIONS}", Kind.ATTRIBUTE, Process.SCHEDULER,
         f"{REFUSED}.stop_patterns:timed", "a search for `stop_regex` ends "
         "(`requests.refused.stop_patterns.check_within_limit`)", "SGLang limits the time of that search"),
    Hook(f"sglang.srt.layers.quantization.fp8.Fp8LinearMethod.{FP8_PRODUCT}", Kind.ATTRIBUTE, Process.SCHEDULER,
         "sglang_dsv4.layers.fp8_linear:our_product", "FP8 linear layers multiply by our kernel: few tokens on Hopper, "
         "any number on Blackwell (`layers.fp8_linear.OurProductConfig`)", "SGLang's FP8 products can be registered"),
    *CPU,
)  # fmt: skip
"""All other rows, in the order in which they are installed."""


def document() -> str:
    """The text of `docs/hooks.md`."""
    lines = [
        "# Hooks",
        "",
        "Everything in SGLang 0.5.23 that this package hooks, registers or replaces. Made from the table in",
        "`sglang_dsv4/seam/hooks.py` and `seam/rows/` by `python -m sglang_dsv4.seam.hooks > docs/hooks.md`;",
        "a test compares table and document.",
        "",
        "| kind | how it is installed |",
        "|---|---|",
        *(f"| {kind.value} | {how} |" for kind, how in KINDS.items()),
        "",
        "| SGLang's (`sglang.srt.` left out) | kind | process | ours (`sglang_dsv4.` left out) | why | goes when |",
        "|---|---|---|---|---|---|",
    ]
    for hook in (*SELF_CHECK, *HOOKS):
        process = hook.process.value + (", on a CPU" if hook.only_cpu else "")
        target = hook.target.removeprefix("sglang.srt.")
        ours = hook.function.removeprefix("sglang_dsv4.") if ":" in hook.function else hook.function
        lines.append(f"| `{target}` | {hook.kind.value} | {process} | `{ours}` | {hook.why} | {hook.until} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
