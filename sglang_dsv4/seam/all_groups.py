"""Agreement of all groups of attention data parallelism on control requests that every rank must answer alike.

SGLang sends a control request to all ranks, which handle it in the same turn of their loops. Whether a group is idle
differs from group to group: a flush or an exchange of weights on some ranks only would leave trees and weights that do
not fit together, and ranks that wait for each other for ever.

Each function is named by a row of :mod:`sglang_dsv4.seam.hooks`, or called by a handler that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_dsv4.seam import compat
from sglang_dsv4.seam.weight_manager import engine_is_idle, is_idle

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.flush_wrapper import SchedulerFlushWrapper
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

logger = logging.getLogger(__name__)


def true_in_all_groups(value: bool) -> bool:
    """Whether `value` is true on every rank; with attention data parallelism each rank must call it."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_dp_size == 1:
        return value
    agreed = torch.tensor([int(value)], dtype=torch.int64)
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=parallel.tp_group.cpu_group)
    return bool(agreed.item())


def flush(original: Callable[..., bool], scheduler: Scheduler, *args: Any, **options: Any) -> bool:
    """Whether the cache was flushed: on all ranks, if all groups are idle, or on none."""
    if _is_ours(scheduler) and not true_in_all_groups(engine_is_idle(scheduler)):
        logger.warning("The cache was not flushed: a group of ranks has requests.")
        return False
    return original(scheduler, *args, **options)


def flush_at_once(
    original: Callable[..., FlushCacheReqOutput | None], wrapper: SchedulerFlushWrapper, request: FlushCacheReqInput
) -> FlushCacheReqOutput | None:
    """The answer to `/flush_cache`; a request that would wait is refused with several groups, or stages of a pipeline.

    SGLang lets each rank wait for its own requests, by its own clock.
    """
    from sglang.srt.managers.io_struct import FlushCacheReqOutput
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if max(parallel.attn_dp_size, parallel.pp_size) > 1 and float(request.timeout_s or 0) > 0:
        flag = "--attn-dp-size" if parallel.attn_dp_size > 1 else "--pp-size"
        message = f"timeout is not supported with {flag} above 1: leave it out, and ask again until it succeeds"
        return FlushCacheReqOutput(success=False, message=message)
    return original(wrapper, request)


def require_idle(manager: SchedulerWeightUpdaterManager, request: object) -> None:
    """Before `/release_memory_occupation`: refuse it on all ranks if a group has requests.

    Raises:
        ValueError: a group has requests.
    """
    if not true_in_all_groups(is_idle(manager)):
        raise ValueError("the server is not idle: POST /pause_generation with mode abort, or wait for its requests")


def _is_ours(scheduler: Scheduler) -> bool:
    return compat.is_ours(scheduler.model_config.hf_config.architectures)
