"""The SGLang that this package was tested with, the names it uses of it, and the check that all of it is live.

SGLang logs what goes wrong in a plugin and goes on with its own code. For DeepSeek-V4 that would be another model,
cache and arithmetic under the same name, without a word. So:

* what goes wrong in our plugin is remembered here (:func:`remembering_failures`);
* the server's argument resolution (launcher), the loading of the model and the end of the scheduler's initialisation
  (scheduler process) ask :func:`require_ready` and :func:`require_live`, which raise :class:`StartupError`. Both places
  are inside code whose exceptions end the server.

Only DeepSeek-V4 models are affected: another model on the same host is served by SGLang as if we were not there.

Names that are not part of a documented extension point stand here, and nowhere else: what is imported
(``compat.DeepSeekV4TokenToKVPool``, resolved when first asked for, because importing SGLang's
modules takes seconds in processes that never need them) and what is hooked. Private methods and attributes of SGLang's
classes are used in :mod:`sglang_dsv4.seam.bases` only; those of its stand-in for triton, needed before SGLang can be
imported, in :mod:`sglang_dsv4.cpu.shims`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

TESTED_SGLANG = "0.5.23"
ARCHITECTURES = ("DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMNextN", "DeepseekV4ForCausalLMDSpark")
OUR_PACKAGE = "sglang_dsv4"
OUR_MODELS = f"{OUR_PACKAGE}.models"
MODEL_PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"

# Names that are imported.
SGLANG_NAMES: dict[str, str] = {
    "DeepSeekV4TokenToKVPool": "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool",
    "UnifiedRadixCache": "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache",
    "UnifiedTreeCore": "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore",
    "create_unified_radix_cache": "sglang.srt.mem_cache.registry:create_unified_radix_cache",
    "model_config_of": "sglang.srt.arg_groups.model_override_base:model_config_of",
    "deep_gemm_serves": "sglang.srt.layers.quantization.fp8_utils:_deepgemm_block_fp8_supported",
    "declare_resolution": "sglang.srt.arg_groups.overrides:declare_resolution",
    "resolving_view": "sglang.srt.arg_groups.model_override_base:resolving_view",
}

# What `plugin` hooks, by what it is hooked for.
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
_RUNNER = "sglang.srt.model_executor"
_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
SGLANG_HOOKS: dict[str, str] = {
    "build the KV pool": f"{_CONFIGURATOR}.KVCacheConfigurator._build_dsv4_kv_pool",
    "size the pools": f"{_RUNNER}.pool_configurator.create_memory_pool_configurator",
    "report the pools": f"{_CONFIGURATOR}.KVCacheConfigurator.configure",
    "refuse a platform": f"{_CONFIGURATOR}.reject_out_of_tree_path",
    "make a batch": f"{_RUNNER}.forward_batch_info.ForwardBatch.init_new",
    "view a batch for a replay": f"{_RUNNER}.runner.decode_cuda_graph_runner.build_replay_fb_view",
    "make a draft's decode backend": f"{_DRAFTS}._create_dsv4_decode_backend",
    "make a draft's prefill backend": f"{_DRAFTS}._create_dsv4_prefill_backend",
    "capture a draft's graphs": "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs",
    "name DSpark's target": "sglang.srt.speculative.dspark_components.dspark_worker_v2.target_model_type",
    "render a prompt": "sglang.srt.parser.deepseek_recipe_renderer.DeepSeekRecipe.encode",
    "normalise a request": "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
    "normalise sampling parameters": "sglang.srt.sampling.sampling_params.SamplingParams.normalize",
    "await a control request": "sglang.srt.managers.communicator.FanOutCommunicator.__call__",
    "make a tokenizer manager": "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__",
    "decode tokens": (
        "sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request"
    ),
    "update weights": f"{_RUNNER}.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk",
    "flush after an exchange of weights": (
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".flush_cache_after_weight_update"
    ),
    "make a grammar": "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend._from_context",
    "check sampling parameters": "sglang.srt.sampling.sampling_params.SamplingParams.verify",
    "check a request": "sglang.srt.managers.scheduler.validate_input_length",
    "make sampling info": f"{_SAMPLING}.adjusted_from_schedule_batch",
    "merge sampling info": f"{_SAMPLING}.merge_batch",
    "copy sampling info": f"{_SAMPLING}.copy_for_forward",
    "count for penalties": "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
    "sample a batch": f"{_RUNNER}.model_runner.ModelRunner.sample",
    "prepare logits": "sglang.srt.layers.sampler.Sampler._preprocess_logits",
    "sample from probabilities": "sglang.srt.layers.sampler.Sampler._sample_from_probs",
    "sample": "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
    "draw": "sglang.srt.layers.sampler.multinomial_with_seed",
    "pad the config for a CPU": f"{_RUNNER}.model_runner.adjust_config_with_unaligned_cpu_tp",
    "choose a quantisation": "sglang.srt.model_loader.loader._get_quantization_config",
    "place the last token": "sglang.srt.mem_cache.allocation.get_last_loc",
    "place new tokens": "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
    "place drafts": "sglang.kernels.ops.speculative.cache_locs.assign_draft_cache_locs_contiguous_func",
    "link drafts": "sglang.kernels.ops.speculative.spec_tree.build_tree_kernel_efficient_func",
    "verify drafts": "sglang.srt.speculative.eagle_utils.eagle_sample",
    "accept a sampled block": "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton",
    "resolve DSpark": "sglang.srt.arg_groups.speculative_hook._handle_dspark",
    "keep for a stream": "torch.Tensor.record_stream",
    "take the last token": "sglang.kernels.ops.speculative.eagle.fill_bonus_tokens_func",
    "replace PyTorch's products": f"{_RUNNER}.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
    "load the model": f"{_RUNNER}.model_runner.ModelRunner.load_model",
    "allocate the pools": f"{_RUNNER}.model_runner.ModelRunner.alloc_memory_pool",
    "make attention backends": f"{_RUNNER}.model_runner.ModelRunner.init_attention_backends",
    "capture graphs": f"{_RUNNER}.model_runner.ModelRunner.init_cuda_graphs",
    "start the scheduler": "sglang.srt.managers.scheduler.Scheduler.__init__",
}

_failures: list[tuple[str, BaseException]] = []  # what went wrong in this process, in order
_pool_sizing: type = type(None)  # SGLang drops the configurator after use, so its class is noted when it is made
_live: LiveParts | None = None


class StartupError(RuntimeError):
    """The server would not run this package's code for a DeepSeek-V4 model. The message says what to do."""


def __getattr__(name: str) -> Any:
    """Resolves an entry of :data:`SGLANG_NAMES`.

    Raises:
        StartupError: the installed SGLang has no such name.
    """
    if name not in SGLANG_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return pkgutil.resolve_name(SGLANG_NAMES[name])
    except (ImportError, AttributeError) as error:
        raise StartupError(_explain([f"{SGLANG_NAMES[name]} could not be imported: {error!r}"])) from error


def wrap_dispatcher(scheduler: Any, wrap: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
    """Puts something around what a scheduler hands its requests to; it is made with what was there."""
    scheduler._request_dispatcher = wrap(scheduler._request_dispatcher)


def our_version() -> str:
    """This package's version; "not installed" where it is only on the path."""
    try:
        return importlib.metadata.version("sglang-dsv4")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def sglang_version() -> str:
    """The installed SGLang's version; "none" where it is not installed."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@contextmanager
def remembering_failures(what: str) -> Iterator[None]:
    """Keeps an exception for :func:`require_ready` and lets the process go on: it may serve another model."""
    try:
        yield
    except Exception as error:
        logging.getLogger(__name__).error("sglang_dsv4: %s failed: %r", what, error)
        _failures.append((what, error))


def note_pool_sizing(configurator: object) -> None:
    """Remembers which class sized the KV pool, for :func:`require_live`."""
    global _pool_sizing
    _pool_sizing = type(configurator)


def require_ready(architectures: list[str] | None) -> None:
    """Raises unless our plugin is fully in place for a model of these architectures; other models pass.

    Raises:
        StartupError: another SGLang version, a failure in our plugin, or another package's models asked for.
    """
    if not is_ours(architectures):
        return
    problems = [f"{what} failed: {error!r}" for what, error in _failures]
    if sglang_version() != TESTED_SGLANG:
        problems.insert(0, f"SGLang {sglang_version()} is installed; this version was tested with {TESTED_SGLANG} only")
    package = os.environ.get(MODEL_PACKAGE_VARIABLE)
    if package not in (None, OUR_MODELS):  # the plugin sets it unless the user did
        problems.append(
            f"the environment variable {MODEL_PACKAGE_VARIABLE} is {package!r}, so SGLang would not find our model "
            f"{OUR_MODELS!r}: unset it, SGLang takes one such package only"
        )
    if problems:
        raise StartupError(_explain(problems)) from (_failures[0][1] if _failures else None)


def require_our_model_classes() -> None:
    """Raises unless SGLang's registry gives our class for each DeepSeek-V4 architecture.

    SGLang only warns when a module of ``SGLANG_EXTERNAL_MODEL_PACKAGE`` can't be imported, and loads its own model.

    Raises:
        StartupError: caused by the import error, where there is one.
    """
    from sglang.srt.models.registry import ModelRegistry

    for module in ("deepseek_v4", "deepseek_v4_nextn", "deepseek_v4_dspark"):
        name = f"{OUR_PACKAGE}.models.{module}"
        try:
            importlib.import_module(name)
        except Exception as error:
            raise StartupError(_explain([f"{name} could not be imported: {error!r}"])) from error
    for architecture in ARCHITECTURES:
        registered = ModelRegistry.models.get(architecture)
        if registered is None or not _is_our_class(registered):
            raise StartupError(_explain([f"SGLang's model registry has {registered!r} for {architecture}, not ours"]))


@dataclass(frozen=True)
class LiveParts:
    """The classes that serve a DeepSeek-V4 model in this scheduler process."""

    model: type
    attention_backend: type
    kv_pool: type
    pool_sizing: type
    prefix_cache: type

    @classmethod
    def of(cls, scheduler: Scheduler) -> LiveParts:
        """Reads them off an initialised scheduler."""
        runner = scheduler.tp_worker.model_runner
        return cls(
            model=type(runner.model),
            attention_backend=type(runner.attn_backend),
            kv_pool=type(runner.token_to_kv_pool),
            pool_sizing=_pool_sizing,
            prefix_cache=type(scheduler.tree_cache),
        )

    def foreign(self) -> list[str]:
        """One sentence for each part that is not ours."""
        return [
            f"the live {part.replace('_', ' ')} is {value.__module__}.{value.__qualname__}, not ours"
            for part, value in vars(self).items()
            if not _is_our_class(value)
        ]


def require_live(scheduler: Scheduler) -> LiveParts:
    """Raises unless model, attention backend, KV pool, its sizing and prefix cache of the scheduler are ours.

    Raises:
        StartupError: names every part that is not.
    """
    global _live
    live = LiveParts.of(scheduler)
    problems = live.foreign()
    if problems:
        raise StartupError(_explain(problems))
    _live = live
    return live


def live_parts() -> LiveParts | None:
    """What :func:`require_live` found in this process; None while it serves no DeepSeek-V4 model."""
    return _live


def is_ours(architectures: list[str] | None) -> bool:
    """Whether a model of these architectures is one that this package serves."""
    return any(architecture in ARCHITECTURES for architecture in architectures or ())


def _is_our_class(value: type) -> bool:
    return value.__module__.split(".")[0] == OUR_PACKAGE


def _explain(problems: list[str]) -> str:
    listed = "\n".join(f"  - {problem}" for problem in problems)
    return (
        f"sglang-dsv4 {our_version()} can't serve this DeepSeek-V4 model:\n{listed}\n"
        f"What to do: `pip install sglang=={TESTED_SGLANG}` (the tested version) and install this package again. "
        f"To run SGLang's own DeepSeek-V4 code instead, set SGLANG_DSV4=off. The server does not fall back by itself."
    )
