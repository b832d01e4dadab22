"""The plugin that SGLang loads: installs the rows of :mod:`sglang_dsv4.seam.hooks` that belong to this process.

SGLang calls :func:`setup` (entry point group ``sglang.srt.plugins``) in the launcher, in each scheduler process and in
the detokenizer, before it does anything else there. ``SGLANG_DSV4=off`` turns the plugin off. No hook changes anything
for a model of another architecture.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys

from sglang_dsv4.cpu.shims import is_off, require_known_switch
from sglang_dsv4.seam import compat
from sglang_dsv4.seam.hooks import HOOKS, SELF_CHECK, Kind, Process
from sglang_dsv4.seam.install import install
from sglang_dsv4.seam.self_check import remembering_failures

logger = logging.getLogger(__name__)


def setup() -> None:
    """Install every hook of this process. A failure is remembered: it stops the server if the model is DeepSeek-V4.

    Raises:
        SystemExit: ``SGLANG_DSV4`` holds an unknown word, or the self-check can't be installed.
    """
    require_known_switch()
    if is_off():
        logger.info("sglang_dsv4 is off (SGLANG_DSV4=off): SGLang runs its own code.")
        return
    here = processes()
    if Process.SCHEDULER in here:
        install_self_check()
    for hook in HOOKS:
        if hook.process in here and hook.kind not in (Kind.ENTRY_POINT, Kind.ATTRIBUTE):
            with remembering_failures(f"installing {hook.function} at {hook.target}"):
                if not hook.only_cpu or on_our_cpu():
                    install(hook)


def processes() -> set[Process]:
    """The roles of this process: several, if it is launcher and scheduler at once, as in some tests."""
    here = {Process.EVERY}
    if multiprocessing.parent_process() is None:
        here.add(Process.LAUNCHER)
    # Elsewhere the scheduler's hooks would only cost the import of their targets.
    if "sglang.srt.managers.scheduler" in sys.modules:
        here.add(Process.SCHEDULER)
    return here


def on_our_cpu() -> bool:
    """Whether SGLang's platform is :class:`sglang_dsv4.cpu.platform.CpuPlatform`."""
    from sglang.srt.platforms import current_platform

    return type(current_platform).__module__ == "sglang_dsv4.cpu.platform"


def install_self_check() -> None:
    """Install the hooks that stop a server in which another hook is missing.

    Raises:
        SystemExit: the one exception that SGLang's plugin loader does not catch.
    """
    try:
        for hook in SELF_CHECK:
            install(hook)
    except Exception as error:
        raise SystemExit(
            f"sglang_dsv4 could not install its start-up check into SGLang {compat.sglang_version()}: {error!r}. "
            f"It was tested with {compat.TESTED_SGLANG}. Install that version, or set SGLANG_DSV4=off."
        ) from error
