"""The classes that serve a DeepSeek-V4 model in this scheduler process, once the start-up check has passed.

Hooks of the scheduler ask :func:`live_parts` whether this process serves a DeepSeek-V4 model, hooks of every process
:func:`serves_deepseek_v4`. For another model they do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_dsv4.seam.compat import StartupError, explain, is_our_class, is_ours

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

_pool_sizing: type = type(None)  # SGLang drops the pool configurator after use, so its class is noted when it is made
_live: LiveParts | None = None
_answers_clients = False  # whether this process answers the clients of a DeepSeek-V4 model


@dataclass(frozen=True)
class LiveParts:
    """The class of each part that this package replaces, as found in a running scheduler."""

    model: type
    attention_backend: type
    kv_pool: type
    pool_sizing: type
    prefix_cache: type

    @classmethod
    def of(cls, scheduler: Scheduler) -> LiveParts:
        """The classes of an initialised scheduler's parts."""
        runner = scheduler.tp_worker.model_runner
        return cls(
            model=type(runner.model),
            attention_backend=type(runner.attn_backend),
            kv_pool=type(runner.token_to_kv_pool),
            pool_sizing=_pool_sizing,
            prefix_cache=type(scheduler.tree_cache),
        )

    def foreign(self) -> list[str]:
        """One sentence for each part whose class is not ours."""
        return [
            f"the live {part.replace('_', ' ')} is {value.__module__}.{value.__qualname__}, not ours"
            for part, value in vars(self).items()
            if not is_our_class(value)
        ]


def note_pool_sizing(configurator: object) -> None:
    """Remember which class sized the KV pool, for :func:`require_live`."""
    global _pool_sizing
    _pool_sizing = type(configurator)


def require_live(scheduler: Scheduler) -> LiveParts:
    """The scheduler's parts, remembered for :func:`live_parts`.

    Raises:
        StartupError: model, attention backend, KV pool, its sizing or prefix cache is not ours; names each such part.
    """
    global _live
    live = LiveParts.of(scheduler)
    problems = live.foreign()
    if problems:
        raise StartupError(explain(problems))
    _live = live
    return live


def live_parts() -> LiveParts | None:
    """The parts that :func:`require_live` accepted in this process; None while it serves no DeepSeek-V4 model."""
    return _live


def note_clients_model(architectures: list[str] | None) -> bool:
    """Whether this process, which answers clients, serves a model of ours; kept for :func:`serves_deepseek_v4`."""
    global _answers_clients
    _answers_clients = is_ours(architectures)
    return _answers_clients


def serves_deepseek_v4() -> bool:
    """Whether this process schedules a DeepSeek-V4 model, or answers its clients."""
    return _answers_clients or _live is not None
