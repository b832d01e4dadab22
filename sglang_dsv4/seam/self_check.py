"""The check that this package, and none of SGLang's own DeepSeek-V4 code, serves a DeepSeek-V4 model.

SGLang logs an error in a plugin and goes on with its own code. For DeepSeek-V4 that would be another model, cache and
arithmetic under the same name. Therefore:

* an error while hooks are installed is remembered (:func:`remembering_failures`);
* :func:`require_ready` raises for it when SGLang resolves the server's arguments (launcher), before it loads the model
  and after it has made the scheduler (scheduler process). Exceptions end the server in all three.

A model of another architecture is served by SGLang as if this package were not installed.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang_dsv4 import env
from sglang_dsv4.seam import compat, hooks, install, live
from sglang_dsv4.seam.compat import StartupError, explain
from sglang_dsv4.seam.hook_kinds import NOT_CALLED

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_failures: list[tuple[str, BaseException]] = []  # what failed in this process and its exception, in order


@contextmanager
def remembering_failures(what: str) -> Iterator[None]:
    """Keep an exception for :func:`require_ready` and go on: the process may serve another model."""
    try:
        yield
    except Exception as error:
        logger.error("sglang_dsv4: %s failed: %r", what, error)
        _failures.append((what, error))


def require_ready(architectures: list[str] | None) -> None:
    """Raise unless our plugin is fully installed for a model of these architectures; other models pass.

    It also imports the functions of the hooks that are installed in this process, so that a module of ours that can't
    be imported stops the server here, and not at the first call.

    Raises:
        StartupError: another SGLang version, a failure in our plugin, or a model package other than ours.
    """
    if not compat.is_ours(architectures):
        return
    problems = [f"{what} failed: {error!r}" for what, error in _failures]
    causes = [error for _, error in _failures]
    if compat.sglang_version() != compat.TESTED_SGLANG:
        problems.insert(
            0,
            f"SGLang {compat.sglang_version()} is installed; this version was tested with {compat.TESTED_SGLANG} only",
        )
    package = env.text(hooks.MODEL_PACKAGE_VARIABLE)
    if package not in (None, hooks.OUR_MODELS):  # the plugin sets it unless the user did
        problems.append(
            f"the environment variable {hooks.MODEL_PACKAGE_VARIABLE} is {package!r}, so SGLang would not find our "
            f"model {hooks.OUR_MODELS!r}: unset it, SGLang takes one such package only"
        )
    for hook in install.installed():
        if hook.kind in NOT_CALLED:
            continue
        try:
            install.ours(hook)
        except Exception as error:
            problems.append(f"{hook.function} could not be imported: {error!r}")
            causes.append(error)
    if problems:
        raise StartupError(explain(problems)) from (causes[0] if causes else None)


def require_our_model_classes() -> None:
    """Raise unless SGLang's registry has our class for each DeepSeek-V4 architecture.

    SGLang only warns when a module of ``SGLANG_EXTERNAL_MODEL_PACKAGE`` can't be imported, and loads its own model.

    Raises:
        StartupError: caused by the import error, if there is one.
    """
    from sglang.srt.models.registry import ModelRegistry

    for module in ("deepseek_v4", "deepseek_v4_nextn", "deepseek_v4_dspark"):
        name = f"{hooks.OUR_MODELS}.{module}"
        try:
            importlib.import_module(name)
        except Exception as error:
            raise StartupError(explain([f"{name} could not be imported: {error!r}"])) from error
    for architecture in compat.ARCHITECTURES:
        registered = ModelRegistry.models.get(architecture)
        if registered is None or not compat.is_our_class(registered):
            raise StartupError(explain([f"SGLang's model registry has {registered!r} for {architecture}, not ours"]))


def check_before_load(runner: ModelRunner) -> None:
    """Before ``ModelRunner.load_model``: the plugin, the model classes and, if asked for, determinism are ready.

    Raises:
        StartupError: one of them is not.
    """
    architectures = runner.model_config.hf_config.architectures
    require_ready(architectures)
    if compat.is_ours(architectures):
        from sglang_dsv4.determinism import checks

        require_our_model_classes()
        checks.start(runner)


def check_scheduler(result: None, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler.__init__``: every part is ours; logs the parts, the start-up times and the number of hooks.

    Raises:
        StartupError: a part is not ours.
    """
    if not compat.is_ours(scheduler.model_config.hf_config.architectures):
        return
    from sglang_dsv4.warmup import operators, startup_times

    require_ready(scheduler.model_config.hf_config.architectures)
    parts = vars(live.require_live(scheduler)).items()
    listed = ", ".join(f"{part.replace('_', ' ')} {value.__qualname__}" for part, value in parts)
    logger.info("sglang_dsv4: %d hooks installed in the scheduler (docs/hooks.md)", len(install.installed()))
    operators.log_operators_of_sglang(scheduler.tp_worker.model_runner.model)
    logger.info("sglang_dsv4 start-up: %s", startup_times.summary())
    logger.info("sglang_dsv4 %s is live on SGLang %s: %s", compat.our_version(), compat.sglang_version(), listed)
