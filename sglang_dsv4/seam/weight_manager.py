"""Private methods and attributes of SGLang's manager and loader of weights that `weights.updates.session` uses."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from torch import Tensor, nn


def runners_of(manager: SchedulerWeightUpdaterManager, selector: str = "all") -> list[tuple[str, ModelRunner]]:
    """Pairs (role, runner) that `selector` names: "target", "draft" or "all"; a role is "target" or "draft"."""
    return manager._select_runners(selector)


def is_idle(manager: SchedulerWeightUpdaterManager) -> bool:
    """Whether the cache can be flushed now: no request has KV. Waiting requests of a paused engine have none."""
    return manager.is_fully_idle(ignore_waiting=manager.scheduler._engine_paused)


def engine_is_idle(scheduler: Scheduler) -> bool:
    """Whether this rank's cache can be flushed now, see `is_idle`."""
    return scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused)


def timed(manager: SchedulerWeightUpdaterManager, source: str) -> AbstractContextManager[None]:
    """A `with` block whose duration goes to SGLang's metric of weight loads."""
    return manager._observe_weight_load(source)


def close_session(manager: SchedulerWeightUpdaterManager) -> None:
    """End the session that `begin_weight_update` has opened."""
    manager._session = None


def tensors_of(loader: DefaultModelLoader, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the checkpoint at `model_config.model_path`."""
    return loader._get_weights_iterator(loader.Source.init_new(model_config, model))
