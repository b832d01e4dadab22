"""SGLang's pool configurator for this project's pools: the worker's geometry, and its number of tokens.

Replaces `DSV4PoolConfigurator`, whose sizes are those of SGLang's own paged pools. `pool_plan` computes the bytes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import torch
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator
from sglang.srt.runtime_context import (
    get_disagg,
    get_memory,
    get_schedule,
    get_spec,
    max_speculative_num_draft_tokens,
)

from dsv4_kernels.kv_layout import RowFormat
from dsv4_radix_cache.pages import page_floor
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.pool_plan import ADMISSION_TOKENS, MIN_FULL_TOKENS, largest_plan
from sglang_dsv4.cache.tail_options import TailOptions
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS, SWA_RATIO

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigResult, KVCacheConfigurator

logger = logging.getLogger(__name__)


def geometry_of(kvc: KVCacheConfigurator) -> PoolGeometry:
    """The geometry of the worker that `kvc` configures: the target's layers of this pipeline stage, or the draft's."""
    config = Config.from_hf(kvc.model_config.hf_config)
    start, end = kvc.layer_info.start_layer, kvc.layer_info.end_layer
    speculative = get_spec().speculative_algorithm is not None
    fp8 = kvc.kv_cache_dtype == torch.float8_e4m3fn
    if kvc.is_draft_worker:
        ratios, draft_layers = (SWA_RATIO,) * kvc.layer_info.num_effective_layers, 0
    else:
        ratios, draft_layers = config.schedule.ratios[start:end], config.num_draft_layers if speculative else 0
    if fp8 and not config.qat.kv_fp8:
        logger.warning(
            "KV rows are stored as fp8 although this checkpoint is not quantised: outputs differ from the unquantised "
            "model's. --kv-cache-dtype bfloat16 keeps plain rows."
        )
    return PoolGeometry(
        ratios=tuple(ratios),
        first_layer=start,
        row_dim=config.head_dim,
        rope_dim=config.qk_rope_head_dim,
        index_dim=config.index_head_dim,
        window_tokens=config.sliding_window,
        draft_tokens=(max_speculative_num_draft_tokens() or 0) if speculative else 0,
        draft_layers=draft_layers,
        row_format=RowFormat.FP8 if fp8 else RowFormat.PLAIN,
        index_format=RowFormat.INDEX_FP4 if fp8 and config.qat.indexer_fp4 else RowFormat.PLAIN,
        dtype=kvc.model_dtype,
        transfers=get_disagg().disaggregation_mode != "null" and not kvc.is_draft_worker,
    )


class Dsv4PoolConfigurator(MemoryPoolConfigurator):
    """Replaces SGLang's DSV4PoolConfigurator, whose sizes are those of its own paged pools."""

    def __init__(self, kvc: KVCacheConfigurator) -> None:
        if kvc.page_size != FULL_PAGE_TOKENS:
            raise ValueError(f"DeepSeek-V4 needs --page-size {FULL_PAGE_TOKENS}, not {kvc.page_size}")
        self.geometry = geometry_of(kvc)
        self._context_len = kvc.model_config.context_len
        requested = get_schedule().max_running_requests
        self._requested = None if requested is None else max(1, requested // kvc.attn_dp_size)

    def _request_slots(self, full_tokens: int) -> int:
        """Request slots that SGLang will allocate (KVCacheConfigurator.resolve_max_num_reqs), and the null slot.

        A decode server has further slots, for requests that are being transferred.
        """
        default = max(min(full_tokens * 512 // self._context_len, 4096), 2048)
        wanted = default if self._requested is None else self._requested
        return min(wanted, full_tokens // 2) + extra_slots() + 1

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        """Pool sizes for a byte budget (--mem-fraction-static of the GPU's memory, or of the host's on a CPU)."""
        return self._config(largest_plan(self.geometry, available_bytes, self._request_slots, tail_slots).full_tokens)

    def calculate_pool_sizes_from_max_tokens(self, max_total_num_tokens: int, page_size: int) -> MemoryPoolConfig:
        """Pool sizes for --max-total-tokens, rounded down to whole pages."""
        full_tokens = page_floor(max_total_num_tokens)
        if full_tokens < MIN_FULL_TOKENS:
            raise ValueError(
                f"--max-total-tokens {max_total_num_tokens} is less than {MIN_FULL_TOKENS} (three pages of "
                f"{FULL_PAGE_TOKENS}): SGLang keeps two pages free, so no request could run"
            )
        return self._config(full_tokens)

    @staticmethod
    def _config(full_tokens: int) -> MemoryPoolConfig:
        # `swa` feeds only SGLang's reports: window rows are in rings of request slots here, not in tokens.
        return MemoryPoolConfig(
            max_total_num_tokens=full_tokens,
            full_max_total_num_tokens=full_tokens,
            swa_max_total_num_tokens=full_tokens,
        )


def extra_slots() -> int:
    """Request slots of a decode server for requests in transfer (--disaggregation-decode-extra-slots), else 0."""
    disaggregation = get_disagg()
    return (disaggregation.disaggregation_decode_extra_slots or 0) * (disaggregation.disaggregation_mode == "decode")


def tail_slots(full_tokens: int, request_slots: int) -> int:
    """Tail slots on the device of a target worker.

    0 with --disable-radix-cache, and on a decode server: its requests arrive with their rings, so that a stored prefix
    needs no tail.
    """
    if get_memory().disable_radix_cache or get_disagg().disaggregation_mode == "decode":
        return 0
    return TailOptions.from_environment().slots_on_device(full_tokens, request_slots)


def reserve_admission_pages(result: KVCacheConfigResult, *args: object, **kwargs: object) -> KVCacheConfigResult:
    """The result with the longest request two pages shorter than the pool (an AFTER hook on `configure`).

    SGLang refuses requests that are longer than the pool. It accepts requests that end in the last two pages, but never
    admits the longer ones, which wait for ever, and answers the shorter ones with no token at all. With this hook they
    get a 400 that names the limit.
    """
    tokens = result.full_max_total_num_tokens
    return msgspec.structs.replace(result, full_max_total_num_tokens=tokens - ADMISSION_TOKENS)
