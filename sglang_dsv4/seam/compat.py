"""The SGLang version that this package was tested with, and the undocumented names of SGLang that it imports.

Importing SGLang's modules takes seconds in processes that never need them, so a name is resolved when it is read
(``compat.DeepSeekV4TokenToKVPool``). Private names of SGLang occur in four more modules only. The functions that this
package hooks are in :mod:`sglang_dsv4.seam.hooks`, methods and attributes of SGLang's classes in
:mod:`sglang_dsv4.seam.bases` and :mod:`sglang_dsv4.seam.weight_manager`. :mod:`sglang_dsv4.cpu.shims` has the names of
SGLang's stand-in for triton, which is needed before SGLang can be imported.
"""

from __future__ import annotations

import importlib.metadata
import pkgutil
from collections.abc import Callable
from typing import Any

TESTED_SGLANG = "0.5.23"
ARCHITECTURES = ("DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMNextN", "DeepseekV4ForCausalLMDSpark")
OUR_PACKAGE = "sglang_dsv4"

SGLANG_NAMES: dict[str, str] = {
    "BatchedPenalizer": "sglang.srt.sampling.penaltylib.orchestrator:_BatchedPenalizer",
    "DeepSeekV4TokenToKVPool": "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool",
    "UnifiedRadixCache": "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache",
    "UnifiedTreeCore": "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore",
    "create_unified_radix_cache": "sglang.srt.mem_cache.registry:create_unified_radix_cache",
    "model_config_of": "sglang.srt.arg_groups.model_override_base:model_config_of",
    "deep_gemm_serves": "sglang.srt.layers.quantization.fp8_utils:_deepgemm_block_fp8_supported",
    "declare_resolution": "sglang.srt.arg_groups.overrides:declare_resolution",
    "resolving_view": "sglang.srt.arg_groups.model_override_base:resolving_view",
}
"""Name in this module -> where SGLang 0.5.23 defines it."""


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
        raise StartupError(explain([f"{SGLANG_NAMES[name]} could not be imported: {error!r}"])) from error


def version_of(package: str, missing: str = "not installed") -> str:
    """A package's version; `missing` where it is not installed, or only on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return missing


def our_version() -> str:
    """This package's version; "not installed" where it is only on the path."""
    return version_of("sglang-dsv4")


def sglang_version() -> str:
    """The installed SGLang's version; "none" where it is not installed."""
    return version_of("sglang", "none")


def grammar_compiler(backend: Any) -> tuple[Callable[[tuple[str, str], bool], Any], int]:
    """SGLang's function that compiles a grammar, and the number of threads in its pool for it.

    Args:
        backend: SGLang's `BaseGrammarBackend`.
    """
    return backend._init_value_dispatch, backend.executor._max_workers


def place_of_rank(receiver: Any, *rank: int) -> dict[str, Any] | None:
    """The address of a rank of a receiver's prefill server; None if its bootstrap server does not know it.

    Args:
        receiver: a `CommonKVReceiver`.
        rank: its numbers of data parallelism, context parallelism, tensor parallelism and stages.
    """
    return receiver._get_bootstrap_info_from_server(*rank)


def is_ours(architectures: list[str] | None) -> bool:
    """Whether this package serves a model of these architectures."""
    return any(architecture in ARCHITECTURES for architecture in architectures or ())


def is_our_class(value: type) -> bool:
    """Whether a class is defined in this package."""
    return value.__module__.split(".")[0] == OUR_PACKAGE


def explain(problems: list[str]) -> str:
    """The message of a :class:`StartupError`: the problems, one a line, and what to do."""
    listed = "\n".join(f"  - {problem}" for problem in problems)
    return (
        f"sglang-dsv4 {our_version()} can't serve this DeepSeek-V4 model:\n{listed}\n"
        f"What to do: `pip install sglang=={TESTED_SGLANG}` (the tested version) and install this package again. "
        f"To run SGLang's own DeepSeek-V4 code instead, set SGLANG_DSV4=off. The server does not fall back by itself."
    )
