"""The table of everything in SGLang that this package hooks, registers or replaces; `docs/hooks.md` is made from it.

    python -m sglang_dsv4.seam.hooks > docs/hooks.md

Functions are named by strings, so that importing this module imports nothing else. `plugin` installs the rows when
SGLang loads it, except for the kinds ENTRY_POINT and ATTRIBUTE (`hook_kinds.KINDS`); `install` says how. A test finds
changes to SGLang that have no row. Targets are names of SGLang 0.5.23.
"""

from __future__ import annotations

from sglang_dsv4.seam.disaggregation_hooks import DISAGGREGATION
from sglang_dsv4.seam.hook_kinds import KINDS, Hook, Kind, Process
from sglang_dsv4.seam.pipeline_hooks import PIPELINE

MODEL_PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
OUR_MODELS = "sglang_dsv4.models"
EXPRESSIONS = "re"
DISPATCHER = "_request_dispatcher"
PROCESSOR = "_processor"
FP8_PRODUCT = "w8a8_block_fp8_linear"
RESOLVING_VIEW = "resolving_view"
FORWARD_IS_ON_CPU = "_is_cpu"
LOG_SOFTMAX = "enable_deterministic"
GENERATE_ROUTE = "serve_generate_request"
MESSAGE, MESSAGE_DELTA = "AnthropicMessagesResponse", "MessageDeltaEvent"

_CHOICES = "sglang.srt.arg_groups.choices"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
_RUNNER = "sglang.srt.model_executor"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_PROFILER = "sglang.srt.managers.scheduler_components.profiler_manager.SchedulerProfilerManager"
_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_SAMPLER = "sglang.srt.layers.sampler"
_EAGLE_SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
_DSPARK = "sglang.srt.speculative.dspark_components.dspark_verify"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_OPS = "sglang.kernels.ops.speculative"
_REQUESTS = "sglang_dsv4.requests"
_REFUSED = f"{_REQUESTS}.refused"
_PARSER = f"{_REQUESTS}.tool_calls.output_parser"
_DRAWN = f"{_REQUESTS}.sampling"
_OPENAI = "sglang.srt.entrypoints.openai"
_ANTHROPIC = "sglang.srt.entrypoints.anthropic.serving"
_RECIPE = f"{_OPENAI}.serving_deepseek_recipe.DeepSeekRecipeChatEncodingAdapter"
_RECIPE_OUTPUT = "sglang.srt.parser.deepseek_recipe_output.DeepSeekRecipeOutputParser"
_DRAFT_CHAIN = "sglang_dsv4.attention.draft_chain"
_CPU = "sglang_dsv4.cpu"
_UPDATE = "sglang_dsv4.weights.updates"
_ROUTES = f"{_UPDATE}.routes"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

_STAYS = "never: this is SGLang's extension point"
_POOLS = "KV pools, their sizing and their reports can be registered, as radix caches can"
_DRAFT_BACKENDS = "draft attention backends come from the registry of attention backends"
_VALIDATES = "SGLang validates the value and answers 400"
_ASKS_PLATFORM = "SGLang asks the platform first"
_ALL_GROUPS = "sglang_dsv4.seam.all_groups"
_GROUPS_DIFFER = "SGLang's ranks agree that they are idle"
_COMPILES = "SGLang limits the seconds of a compilation, and its threads"
_SEEDS = "SGLang's sampler gives a request the same draw in every batch, seeds included"
_COUNTS = "SGLang counts the tokens of penalties where they are sampled"
_CALLS = "SGLang gives a tool call to the client only if it is complete and its arguments are a JSON object"
_NOT_FINITE = "SGLang ends a request whose logits are not finite, with a reason"
_DRAFTED = "SGLang's verification samples each row as without drafts"
_SWITCHES = "SGLang honours the switch for this model's chat encoding, or answers 400"
_USAGE = "SGLang reports them on Anthropic's route"
_INLINE = "SGLang renders a late system message of this encoding where it was sent"
_TIMES = "SGLang logs the duration of its start-up phases"
_UPDATES = "SGLang's weight updates are all or nothing"
_CPU_OPS = "SGLang's speculation has a path without Triton"

SELF_CHECK = (
    Hook(f"{_RUNNER}.model_runner.ModelRunner.load_model", Kind.BEFORE, Process.SCHEDULER,
         "sglang_dsv4.seam.self_check:check_before_load",
         "stops a server that would run SGLang's own DeepSeek-V4 code, and one that can't be deterministic",
         "an error in a plugin stops SGLang"),
    Hook("sglang.srt.managers.scheduler.Scheduler.__init__", Kind.AFTER, Process.SCHEDULER,
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
         f"{_REQUESTS}.chat.reasoning_effort:render",
         "prompts carry the reasoning-effort text that the checkpoint was trained with",
         "SGLang reads the efforts from the checkpoint's encoder"),
    Hook("sglang.srt.sampling.sampling_params.SamplingParams.verify", Kind.BEFORE, Process.EVERY,
         f"{_REFUSED}.sampling_numbers:check_sampling_parameters",
         "numbers that would overflow a batch's tensors get a 400", _VALIDATES),
    Hook("sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments", Kind.BEFORE, Process.EVERY,
         f"{_REFUSED}.guards:check_request",
         "fields of another type or of another number of prompts, embeddings, `n` and media get a 400", _VALIDATES),
    Hook("sglang.srt.managers.io_struct.EmbeddingReqInput.normalize_batch_and_arguments", Kind.BEFORE, Process.EVERY,
         f"{_REFUSED}.guards:check_request",
         "as for the row above, on the routes for embeddings", _VALIDATES),
    Hook("sglang.srt.sampling.sampling_params.SamplingParams.normalize", Kind.BEFORE, Process.EVERY,
         f"{_REFUSED}.guards:check_text_parameters",
         "an invalid `stop_regex`, or a grammar together with `min_new_tokens`, gets a 400", _VALIDATES),
    Hook("sglang.srt.managers.communicator.FanOutCommunicator.__call__", Kind.AROUND, Process.EVERY,
         f"{_REQUESTS}.failures:raise_failures",
         "a control request that failed in the scheduler gets a 400",
         "SGLang's scheduler answers failed control requests with an error"),
    Hook("sglang.srt.arg_groups.speculative_hook._handle_dspark", Kind.AROUND, Process.EVERY,
         f"{_CPU}.speculation:resolve_dspark",
         "SGLang's resolution step for DSPARK refuses a CPU",
         "that resolution step asks the platform, as EAGLE's does", only_cpu=True),
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
         "no CUDA graphs of prefills, nor of decode steps while an op can't be captured", _STAYS),
    # ---- the process that answers clients
    Hook(f"{_TOKENIZER}.__init__", Kind.AFTER, Process.LAUNCHER, f"{_REQUESTS}.failures:note_model_and_answer_errors",
         "a ValueError that no route catches, and a body that SGLang's validators can't read, are a 400, not a 500",
         "SGLang's HTTP server answers 400"),
    Hook(f"{_TOKENIZER}._handle_abort_req", Kind.AROUND, Process.LAUNCHER, f"{_REQUESTS}.failures:finish_aborted",
         "an abort by our guard is answered with the reason alone; SGLang reads fields of the request",
         "SGLang's scheduler survives a handler that raises"),
    Hook(f"{_TOKENIZER}._handle_batch_output", Kind.AROUND, Process.LAUNCHER, f"{_REQUESTS}.failures:finish_outputs",
         "an output that can't be handled ends its requests, not the server", "SGLang's output loop survives an error"),
    Hook(f"{_TOKENIZER}._handle_abort_finish_reason", Kind.AROUND, Process.LAUNCHER,
         f"{_REQUESTS}.failures:raise_in_streams",
         "a refused request in a stream is an error without the token that SGLang computes for it",
         "SGLang's scheduler refuses a request without a forward"),
    Hook(f"{_TOKENIZER}.configure_logging", Kind.BEFORE, Process.LAUNCHER, f"{_REFUSED}.administration:check_logging",
         "levels, formats and folders that do not exist get a 400 before the first is set", _VALIDATES),
    Hook("sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._validate_request", Kind.AFTER,
         Process.LAUNCHER, f"{_REFUSED}.guards:check_completion",
         "fields of `/v1/completions` that SGLang ignores, `best_of` and `suffix`, get a 400",
         "SGLang implements or refuses them"),
    Hook(f"{_TOKENIZER}.__init__", Kind.AFTER, Process.LAUNCHER,
         f"{_ROUTES}:add_route", "a weight update that its trainer will not end can be dropped", _UPDATES),
    *(
        Hook(f"{_CONTROL}.update_weights_from_{source}", Kind.BEFORE, Process.LAUNCHER, f"{_ROUTES}:hold_version",
             "a weight version is reported once its weights serve", _UPDATES)
        for source in ("tensor", "distributed")
    ),
    Hook(f"{_CONTROL}.end_weight_update", Kind.AROUND, Process.LAUNCHER, f"{_ROUTES}:end",
         "the scheduler is asked again while it finishes its last step; the weight version is set", _UPDATES),
    Hook(f"{_TOKENIZER}.update_weights_from_disk", Kind.AROUND,
         Process.LAUNCHER, f"{_ROUTES}:from_files",
         "the scheduler is asked again while it finishes its last step", _UPDATES),
    Hook("sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request",
         Kind.AROUND, Process.LAUNCHER, f"{_REFUSED}.guards:check_tokens_to_decode",
         "invalid token ids for `/detokenize` get a 400", _VALIDATES),
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__", Kind.AFTER, Process.LAUNCHER,
         f"{_PARSER}:start", "declares the metrics of tool calls", _CALLS),
    Hook(f"{_RECIPE}._new_output_parser", Kind.AROUND, Process.LAUNCHER,
         f"{_PARSER}:in_chat", "tells the tools' schemas to the parser of a chat answer", _CALLS),
    Hook(f"{_RECIPE}._new_responses_parser", Kind.AROUND, Process.LAUNCHER,
         f"{_PARSER}:in_responses",
         "tells the tools' schemas to the parser of a response's answer", _CALLS),
    Hook(f"{_RECIPE}.parse_function_call_text", Kind.AROUND, Process.LAUNCHER,
         f"{_PARSER}:in_text", "tells the tools' schemas to the parser of `/parse_function_call`", _CALLS),
    Hook(f"{_RECIPE_OUTPUT}.__init__", Kind.AROUND, Process.LAUNCHER, f"{_PARSER}:make_parser",
         "leaves tool calls to our reader: final, with arguments that are a JSON object, or text", _CALLS),
    Hook(f"{_OPENAI}.serving_responses.OpenAIServingResponses.create_responses", Kind.AROUND, Process.LAUNCHER,
         f"{_REQUESTS}.chat.responses:read_switches", "`thinking` and `custom_params` of a Responses request are read",
         "SGLang's `ResponsesRequest` has these fields"),
    Hook(f"{_OPENAI}.protocol.ResponsesRequest.to_sampling_params", Kind.AFTER, Process.LAUNCHER,
         f"{_REQUESTS}.chat.responses:complete_sampling",
         "an answer of the Responses API has all `max_output_tokens`, and a thinking budget",
         "SGLang takes no tokens off, and its `ResponsesRequest` has `custom_params`"),
    Hook(f"{_OPENAI}.serving_chat.OpenAIServingChat._process_messages", Kind.BEFORE, Process.LAUNCHER,
         f"{_REQUESTS}.chat.switches:settle",
         "`thinking`, `enable_thinking` and a thinking budget of a chat request are honoured, contradictions get a 400",
         _SWITCHES),
    Hook(f"{_ANTHROPIC}.AnthropicServing._convert_to_chat_completion_request", Kind.AROUND,
         Process.LAUNCHER, f"{_REQUESTS}.chat.switches:carry_budget",
         "`thinking.budget_tokens` is kept, and not logged as one that nothing enforces", _SWITCHES),
    Hook(f"{_ANTHROPIC}._anthropic_usage_from_openai", Kind.AFTER, Process.LAUNCHER,
         f"{_REQUESTS}.chat.usage:add_thinking_tokens", "usage reports reasoning tokens on Anthropic's route", _USAGE),
    Hook(f"{_ANTHROPIC}.AnthropicServing.__init__", Kind.AFTER, Process.LAUNCHER,
         f"{_REQUESTS}.chat.usage:start", "sets the two attributes that carry them", _USAGE),
    Hook(f"{_OPENAI}.serving_chat.OpenAIServingChat._resolve_inline_system_support", Kind.AFTER, Process.LAUNCHER,
         f"{_REQUESTS}.chat.late_system:keep_inline",
         "the Anthropic and Responses routes leave a system message where it was sent", _INLINE),
    Hook(f"{_OPENAI}.serving_chat.OpenAIServingChat._process_messages", Kind.BEFORE, Process.LAUNCHER,
         f"{_REQUESTS}.chat.late_system:gather_tools",
         "the model is told of the tools of a system message", "SGLang renders the tools of messages"),
    Hook(f"{_RECIPE}.encode_messages", Kind.AROUND, Process.LAUNCHER, f"{_REQUESTS}.chat.late_system:encode",
         "a late system message stays at its place, and the prefix before it stays stored", _INLINE),
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
        Hook(f"{_RUNNER}.model_runner.ModelRunner.{method}", Kind.AROUND, Process.SCHEDULER,
             f"sglang_dsv4.warmup.startup_times:around_{phase}", "adds its duration to the start-up line of the log",
             _TIMES)
        for method, phase in (("load_model", "weights"), ("alloc_memory_pool", "pools"),
                              ("init_attention_backends", "attention_backends"), ("init_cuda_graphs", "cuda_graphs"))
    ),
    Hook("sglang.srt.managers.scheduler.Scheduler.__init__", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.sampler:start", "seeds the random numbers that all ranks share", _SEEDS),
    Hook("sglang.srt.managers.scheduler.Scheduler.__init__", Kind.AFTER, Process.SCHEDULER,
         f"{_REQUESTS}.failures:start", "guards the scheduler's dispatcher (row below)",
         "SGLang's scheduler survives a handler that raises"),
    Hook("sglang.srt.managers.scheduler.Scheduler.__init__", Kind.AFTER, Process.SCHEDULER,
         f"{_REFUSED}.guards:note_hidden_size", "the width that embeddings must have", _VALIDATES),
    Hook(f"{_PROFILER}._profile", Kind.AROUND, Process.SCHEDULER, f"{_REFUSED}.administration:profile",
         "a profile that can't be written, or would be started twice, gets a 400", _VALIDATES),
    Hook(f"{_PROFILER}._profile_batch_predicate", Kind.AROUND, Process.SCHEDULER,
         f"{_REFUSED}.administration:profile_step",
         "a profile that fails between two forwards is dropped", "SGLang's scheduler survives a profile that fails"),
    Hook("sglang.srt.managers.scheduler.Scheduler.__init__", Kind.AFTER, Process.SCHEDULER,
         f"{_REQUESTS}.not_finite:start", "declares the metric of logits that are not finite", _NOT_FINITE),
    # ---- the scheduler: pools and batches
    Hook(f"{_CONFIGURATOR}.KVCacheConfigurator._build_dsv4_kv_pool", Kind.REPLACE, Process.SCHEDULER,
         "sglang_dsv4.prefix.pool_setup:build_kv_pool",
         "our KV pool: rings of window rows and pools of compressed entries", _POOLS),
    Hook(f"{_RUNNER}.pool_configurator.create_memory_pool_configurator", Kind.AROUND, Process.SCHEDULER,
         "sglang_dsv4.seam.creators:size_pools", "computes how many tokens fit into memory", _POOLS),
    Hook(f"{_CONFIGURATOR}.KVCacheConfigurator.configure", Kind.AFTER, Process.SCHEDULER,
         "sglang_dsv4.seam.creators:reserve_admission_pages",
         "a request that could never be admitted gets a 400 and does not wait for ever",
         "SGLang refuses requests longer than its scheduler admits"),
    Hook(f"{_CONFIGURATOR}.reject_out_of_tree_path", Kind.AROUND, Process.SCHEDULER,
         f"{_CPU}.overrides:allow_our_kv_pool",
         "SGLang refuses its DeepSeek-V4 pool on an out-of-tree platform; ours is built there", _POOLS),
    Hook(f"{_RUNNER}.forward_batch_info.ForwardBatch.init_new", Kind.AFTER, Process.SCHEDULER,
         "sglang_dsv4.prefix.restore_and_save:carry_request_slots",
         "request slots stay on the host in every mode, so that a decode step reads nothing back",
         "SGLang keeps `req_pool_indices_cpu` in every mode"),
    Hook(f"{_RUNNER}.runner.decode_cuda_graph_runner.build_replay_fb_view", Kind.AFTER, Process.SCHEDULER,
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
    # ---- the scheduler: requests
    Hook("sglang.srt.managers.schedule_batch.Req._check_str_based_finish", Kind.AROUND, Process.SCHEDULER,
         f"{_REFUSED}.stop_patterns:check_within_limit",
         "a `stop_regex` that is searched for too long gets a 400", "SGLang limits the time of that search"),
    Hook("sglang.srt.managers.scheduler.validate_input_length", Kind.AFTER, Process.SCHEDULER,
         f"{_REFUSED}.token_ids:refuse_unknown_token_ids", "token ids outside the vocabulary get a 400", _VALIDATES),
    Hook("sglang.srt.managers.scheduler.Scheduler.abort_request", Kind.AROUND, Process.SCHEDULER,
         f"{_REQUESTS}.aborts:end_the_request", "a client that disconnects ends its own request, not every request "
         "whose id begins with that request's id", "SGLang compares ids, and sends the entries of a batch by name"),
    Hook("sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend._from_context", Kind.AFTER,
         Process.SCHEDULER, f"{_REFUSED}.guards:refuse_empty_grammar",
         "a grammar that no text fulfils gets a 400", _VALIDATES),
    Hook("sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.get_cached_or_future_value", Kind.AROUND,
         Process.SCHEDULER, f"{_REFUSED}.grammars:compile_within_limit",
         "requests with the same grammar share a compilation, and slow ones leave threads to others", _COMPILES),
    Hook("sglang.srt.constrained.grammar_manager.GrammarManager.get_ready_grammar_requests", Kind.AROUND,
         Process.SCHEDULER, f"{_REFUSED}.grammars:refuse_slow_grammars",
         "a grammar that is compiled for too long gets a 400 that names the limit", _COMPILES),
    Hook(f"{_RUNNER}.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk", Kind.AROUND,
         Process.SCHEDULER, f"{_UPDATE}.old_files:keep_weights",
         "new weights that can't be loaded leave the old ones in service",
         "SGLang reloads the old weights when an update fails"),
    *(
        Hook(f"{_WEIGHTS}.{method}", Kind.AROUND, Process.SCHEDULER, f"{_UPDATE}.session:{function}", why, _UPDATES)
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
         "weights whose memory was released without a copy must come whole", _UPDATES),
    Hook("sglang.srt.managers.scheduler.Scheduler.flush_cache", Kind.AROUND, Process.SCHEDULER,
         f"{_ALL_GROUPS}:flush", "all groups of attention data parallelism are flushed, or none", _GROUPS_DIFFER),
    Hook("sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper.handle", Kind.AROUND,
         Process.SCHEDULER, f"{_ALL_GROUPS}:flush_at_once", "a flush that waits is refused there", _GROUPS_DIFFER),
    Hook(f"{_WEIGHTS}.release_memory_occupation", Kind.BEFORE, Process.SCHEDULER,
         f"{_ALL_GROUPS}:require_idle", "memory is released on all ranks, or on none", _GROUPS_DIFFER),
    Hook("sglang.srt.managers.scheduler.Scheduler.flush_cache", Kind.AFTER, Process.SCHEDULER,
         "sglang_dsv4.prefix.metrics:publish_after_flush", "the gauges of pools that were emptied are published",
         "SGLang publishes its gauges after a flush"),
    # ---- the scheduler: logits that are not finite
    Hook(f"{_RUNNER}.model_runner.ModelRunner.forward", Kind.AFTER, Process.SCHEDULER,
         f"{_REQUESTS}.not_finite:note_rows", "marks of the model's rows are copied to the host", _NOT_FINITE),
    Hook(f"{_SAMPLER}.Sampler._preprocess_logits", Kind.AFTER, Process.SCHEDULER,
         f"{_REQUESTS}.not_finite:after_preprocessing",
         "rows in which penalties, biases and processors leave no token are marked", _NOT_FINITE),
    Hook(f"{_RUNNER}.model_runner.ModelRunner.sample", Kind.AFTER, Process.SCHEDULER,
         f"{_REQUESTS}.not_finite:note_adjusted_rows", "and copied to the host", _NOT_FINITE),
    Hook(f"{_RESULTS}.process_batch_result_prefill", Kind.BEFORE, Process.SCHEDULER,
         f"{_REQUESTS}.not_finite:end_requests", "their requests end with a reason", _NOT_FINITE),
    Hook(f"{_RESULTS}.process_batch_result_decode", Kind.BEFORE, Process.SCHEDULER,
         f"{_REQUESTS}.not_finite:end_requests", "their requests end with a reason", _NOT_FINITE),
    # ---- the scheduler: sampling and penalties
    Hook(f"{_SAMPLING}.adjusted_from_schedule_batch", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.sampler:fill_seeds", "every request of a batch with seeds has a seed", _SEEDS),
    Hook(f"{_SAMPLING}.adjusted_from_schedule_batch", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.sampler:ignore_greedy_temperatures",
         "a greedy request's log-probabilities do not depend on the other requests", _SEEDS),
    Hook(f"{_SAMPLING}.adjusted_from_schedule_batch", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.penalties:complete",
         "a retracted request keeps its counts, and a thinking budget is a penaliser", _COUNTS),
    *(
        Hook(f"{_SAMPLING}.{method}", Kind.BEFORE, Process.SCHEDULER,
             f"{_DRAWN}.penalties:wait_for_counts", "the scheduler's stream reads complete counts", _COUNTS)
        for method in ("copy_for_forward", "filter_batch", "merge_batch")
    ),
    Hook(f"{_SAMPLING}.copy_for_forward", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.penalties:remember_source", "the copy leads to the batch's penalisers", _COUNTS),
    Hook(f"{_RUNNER}.model_runner.ModelRunner.sample", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.penalties:count_sampled", "tokens are counted where they are sampled", _COUNTS),
    Hook("sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens", Kind.AROUND,
         Process.SCHEDULER, f"{_DRAWN}.penalties:leave_out_processed",
         "these tokens are not counted twice", _COUNTS),
    Hook(_EAGLE_SAMPLE, Kind.BEFORE, Process.SCHEDULER,
         f"{_DRAWN}.drafts:before_eagle_sample",
         "each row of a verify step gets the penalties and processors that it has without drafts", _DRAFTED),
    Hook(_EAGLE_SAMPLE, Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.drafts:after_eagle_sample", "accepted tokens are counted", _DRAFTED),
    Hook(f"{_DSPARK}.TargetVerifyExecutor.run_non_compact", Kind.AROUND, Process.SCHEDULER,
         f"{_DRAWN}.drafts:leave_rows", "SGLang gives all rows of a block the same penalties, or none", _DRAFTED),
    Hook(f"{_DSPARK}.TargetVerifyExecutor.accept_and_finalize", Kind.BEFORE, Process.SCHEDULER,
         f"{_DRAWN}.drafts:before_accept",
         "each row of a verify step gets the penalties and processors that it has without drafts", _DRAFTED),
    Hook(f"{_DSPARK}.TargetVerifyExecutor.accept_and_finalize", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.drafts:after_accept", "accepted tokens are counted", _DRAFTED),
    Hook(f"{_DSPARK}.verify_logits_adjustments_are_noop", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.drafts:rows_stay",
         "a batch with penalties accepts its drafts outside of the CUDA graph", _DRAFTED),
    Hook("sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.drafts:process_results_first",
         "a custom logit processor sees the whole answer, not one that is a token late", _DRAFTED),
    Hook(f"{_SAMPLING}.merge_batch", Kind.BEFORE, Process.SCHEDULER,
         f"{_DRAWN}.sampler:align_seeds", "seeds survive the merge of two batches", _SEEDS),
    Hook(f"{_SAMPLER}.Sampler._preprocess_logits", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.sampler:note_greedy_tokens", "the argmax of a greedy request's logits is kept", _SEEDS),
    Hook(f"{_SAMPLER}.Sampler._sample_from_probs", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.sampler:take_greedy_tokens", "that argmax is the request's token", _SEEDS),
    Hook(f"{_SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch", Kind.AROUND, Process.SCHEDULER,
         f"{_DRAWN}.sampler:sample_with_seeds", "a seeded request's candidates do not depend on the batch", _SEEDS),
    Hook(f"{_SAMPLER}.multinomial_with_seed", Kind.AROUND, Process.SCHEDULER,
         f"{_DRAWN}.sampler:draw", "SGLang's seeded draw is a Triton kernel; a CPU needs another", _SEEDS),
    Hook("sglang.srt.managers.data_parallel_controller.DataParallelController.round_robin_scheduler", Kind.AROUND,
         Process.SCHEDULER, "sglang_dsv4.prefix.rank_choice:dispatch",
         "a request goes to the data-parallel rank where most of its prompt is cached",
         "load-balancing methods can be registered"),
    *DISAGGREGATION,
    *PIPELINE,
    # ---- the scheduler on a CPU
    Hook(f"{_RUNNER}.model_runner.ModelRunner.maybe_enable_batch_invariant_mode", Kind.AROUND, Process.SCHEDULER,
         f"{_CPU}.overrides:keep_products",
         "SGLang would replace PyTorch's products by Triton kernels", _ASKS_PLATFORM),
    Hook(f"{_RUNNER}.model_runner.adjust_config_with_unaligned_cpu_tp", Kind.AROUND, Process.SCHEDULER,
         f"{_CPU}.overrides:keep_config",
         "SGLang would pad heads and intermediate sizes for its own CPU layers", "SGLang asks the model first"),
    Hook(f"{_RUNNER}.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAFT_CHAIN}:plan_padded_batch",
         "a draft's metadata has the rows that attention data parallelism adds after SGLang has planned it",
         "SGLang plans a draft's step after it has padded the batch"),
    Hook(f"{_RUNNER}.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch", Kind.AROUND, Process.SCHEDULER,
         f"{_CPU}.overrides:pad_on_cpu", "with attention data parallelism SGLang would pin memory here", _ASKS_PLATFORM,
         only_cpu=True),
    Hook("sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop", Kind.BEFORE,
         Process.SCHEDULER, f"{_CPU}.overrides:wait_for_requests", "SGLang's loop takes a core that the ranks need",
         "the controller waits for requests", only_cpu=True),
    Hook("sglang.srt.model_loader.loader._get_quantization_config", Kind.AROUND, Process.SCHEDULER,
         f"{_CPU}.overrides:skip_gpu_quantisation",
         "weights are dequantised while they are loaded; SGLang's FP8 method refuses float32",
         "SGLang's FP8 method runs on a CPU"),
    Hook("sglang.srt.mem_cache.allocation.get_last_loc", Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:last_locations", "SGLang launches a Triton kernel", _CPU_OPS, only_cpu=True),
    Hook("sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func", Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:assign_slots", "SGLang launches a Triton kernel", _CPU_OPS, only_cpu=True),
    Hook(f"{_OPS}.cache_locs.assign_draft_cache_locs_contiguous_func", Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:assign_draft_slots", "SGLang launches a Triton kernel", _CPU_OPS, only_cpu=True),
    Hook(f"{_OPS}.spec_tree.build_tree_kernel_efficient_func", Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:build_chain", "SGLang launches a CUDA kernel", _CPU_OPS, only_cpu=True),
    Hook(_EAGLE_SAMPLE, Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:verify", "SGLang launches CUDA kernels", _CPU_OPS, only_cpu=True),
    Hook(f"{_OPS}.reject_sampling.chain_speculative_sampling_triton", Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:accept_block", "SGLang launches a Triton kernel", _CPU_OPS, only_cpu=True),
    Hook("torch.Tensor.record_stream", Kind.AROUND, Process.SCHEDULER,
         f"{_CPU}.speculation:keep_for_stream", "PyTorch refuses CPU tensors", _CPU_OPS, only_cpu=True),
    Hook(f"{_OPS}.eagle.fill_bonus_tokens_func", Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:fill_bonus_tokens", "SGLang launches a Triton kernel", _CPU_OPS, only_cpu=True),
    # ---- attributes of SGLang's objects, set by the function in brackets
    Hook(f"{_RECIPE_OUTPUT}.{PROCESSOR}", Kind.ATTRIBUTE, Process.LAUNCHER, f"{_PARSER}:read_calls",
         "reads the calls, and keeps the text before half a letter (`requests.tool_calls.output_parser.make_parser`)",
         _CALLS),
    *(
        Hook(f"{_ANTHROPIC}.{model}", Kind.ATTRIBUTE, Process.LAUNCHER, f"{_REQUESTS}.chat.usage:carrying_details",
             "its JSON has all fields of its usage (`requests.chat.usage.start`)", _USAGE)
        for model in (MESSAGE, MESSAGE_DELTA)
    ),
    Hook(f"sglang.srt.managers.scheduler.Scheduler.{DISPATCHER}", Kind.ATTRIBUTE, Process.SCHEDULER,
         f"{_REQUESTS}.failures:guard", "a request whose handler raises is answered with the reason "
         "(`requests.failures.start`)", "SGLang's scheduler survives a handler that raises"),
    Hook(f"sglang.srt.managers.schedule_batch.{EXPRESSIONS}", Kind.ATTRIBUTE, Process.SCHEDULER,
         f"{_REFUSED}.stop_patterns:timed", "a search for `stop_regex` ends "
         "(`requests.refused.stop_patterns.check_within_limit`)", "SGLang limits the time of that search"),
    Hook(f"sglang.srt.entrypoints.http_server.{GENERATE_ROUTE}", Kind.ATTRIBUTE, Process.LAUNCHER,
         f"{_REQUESTS}.failures:refuse_streams", "a stream of `/generate` that begins with an error is a 400 "
         "(`requests.failures.note_model_and_answer_errors`)", "SGLang begins a stream after the request is accepted"),
    Hook(f"{_SAMPLER}.Sampler.{LOG_SOFTMAX}", Kind.ATTRIBUTE, Process.SCHEDULER,
         f"{_DRAWN}.sampler:use_log_softmax", "log-probabilities are `log_softmax` in every batch "
         "(`requests.sampling.sampler.start`)", _SEEDS),
    Hook(f"sglang.srt.layers.quantization.fp8.Fp8LinearMethod.{FP8_PRODUCT}", Kind.ATTRIBUTE, Process.SCHEDULER,
         "sglang_dsv4.layers.fp8_linear:our_product", "FP8 linear layers multiply by our kernel: few tokens on Hopper, "
         "any number on Blackwell (`layers.fp8_linear.OurProductConfig`)", "SGLang's FP8 products can be registered"),
    Hook(f"{_RUNNER}.forward_batch_info.{FORWARD_IS_ON_CPU}", Kind.ATTRIBUTE, Process.SCHEDULER,
         f"{_CPU}.overrides:is_on_cpu", "while a batch is padded, it is on a CPU (`cpu.overrides.pad_on_cpu`)",
         _ASKS_PLATFORM, only_cpu=True),
    Hook(f"sglang.srt.arg_groups.speculative_hook.{RESOLVING_VIEW}", Kind.ATTRIBUTE, Process.EVERY,
         f"{_CPU}.speculation:view_as_on_a_gpu", "while that step runs, the arguments' device is a GPU "
         "(`cpu.speculation.resolve_dspark`)", "that step asks the platform, as EAGLE's does", only_cpu=True),
)  # fmt: skip
"""All other rows, in the order in which they are installed."""


def document() -> str:
    """The text of `docs/hooks.md`."""
    lines = [
        "# Hooks",
        "",
        "Everything in SGLang 0.5.23 that this package hooks, registers or replaces. Made from the table in",
        "`sglang_dsv4/seam/hooks.py` by `python -m sglang_dsv4.seam.hooks > docs/hooks.md`; a test keeps both equal.",
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
