"""How a row of :mod:`sglang_dsv4.seam.hooks` is installed into SGLang; no other module changes SGLang's behaviour."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_dsv4 import env
from sglang_dsv4.seam.hook_kinds import NAME, Hook, Kind
from sglang_dsv4.seam.hooks import HOOKS

logger = logging.getLogger(__name__)

_installed: list[Hook] = []


def installed() -> tuple[Hook, ...]:
    """The rows that are installed in this process, in order."""
    return tuple(_installed)


def ours(hook: Hook) -> Any:
    """Our function of a row, imported.

    Raises:
        ImportError, AttributeError: the module can't be imported, or has no such function.
    """
    return pkgutil.resolve_name(hook.function)


def install(hook: Hook) -> None:
    """Install a row of a kind that is installed when the plugin is loaded, unless it is installed.

    A prefix cache that is made without the plugin installs its row itself, and the plugin may be loaded afterwards.
    A row is left out, with a line in the log, if SGLang's module needs a package that is missing: SGLang does without
    that module, too (/v1/responses needs openai-harmony, for example).

    Raises:
        ImportError, AttributeError: SGLang has no such target. (SGLang's hook registry would only log that.)
    """
    if hook in _installed:
        return
    try:
        _INSTALLERS[hook.kind](hook)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] in ("sglang", "sglang_dsv4"):
            raise
        logger.warning("%s is not hooked: its module needs the package %s, which is missing", hook.target, missing.name)
        return
    _installed.append(hook)


def _lazily(hook: Hook) -> Callable[..., Any]:
    """Our function, imported at its first call: SGLang loads plugins in processes that never call it."""
    function: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal function
        if function is None:
            function = ours(hook)
        return function(*args, **kwargs)

    call.__qualname__ = hook.function
    return call


def _target(name: str) -> Any:
    """The object of SGLang that a row names.

    Raises:
        AttributeError: SGLang has no such object.
        ImportError: the import of its module failed. (`pkgutil.resolve_name` alone would raise AttributeError.)
    """
    try:
        return pkgutil.resolve_name(name)
    except AttributeError:
        parts = name.split(".")
        for end in range(2, len(parts)):
            module = ".".join(parts[:end])
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as missing:
                if missing.name != module:
                    raise
                break  # the rest are attributes
        raise


def _in_hook_registry(hook: Hook) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _target(hook.target)
    HookRegistry.register(hook.target, _lazily(hook), HookType[hook.kind.name])


def _as_resolution_step(hook: Hook) -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook(hook.target)(_lazily(hook))


def _in_registry(hook: Hook) -> None:
    _target(hook.target)(NAME, _lazily(hook))


def _by_decorator(hook: Hook) -> None:
    _target(hook.target)(NAME)(_lazily(hook))


def _by_name(hook: Hook) -> None:
    _target(hook.target)(NAME)


def _as_choice(hook: Hook) -> None:
    _target(hook.target)([NAME])


def _in_environment(hook: Hook) -> None:
    env.set_default(hook.target, hook.function)


_INSTALLERS: dict[Kind, Callable[[Hook], None]] = {
    Kind.BEFORE: _in_hook_registry,
    Kind.AFTER: _in_hook_registry,
    Kind.AROUND: _in_hook_registry,
    Kind.REPLACE: _in_hook_registry,
    Kind.RESOLUTION: _as_resolution_step,
    Kind.REGISTRY: _in_registry,
    Kind.DECORATOR: _by_decorator,
    Kind.NAME: _by_name,
    Kind.CHOICE: _as_choice,
    Kind.ENVIRONMENT: _in_environment,
}


@functools.cache
def _attribute_row(attribute: str) -> Hook:
    (row,) = (hook for hook in HOOKS if hook.kind is Kind.ATTRIBUTE and hook.target.endswith(f".{attribute}"))
    return row


def set_attribute(owner: object, attribute: str) -> None:
    """Set an attribute of one of SGLang's objects as its row says: ``owner.attribute = ours(before, owner)``.

    Raises:
        ValueError: the table has no row of kind ATTRIBUTE for it.
        AttributeError: SGLang's object has no such attribute.
    """
    setattr(owner, attribute, ours(_attribute_row(attribute))(getattr(owner, attribute), owner))


@contextmanager
def attribute_set(owner: object, attribute: str) -> Iterator[None]:
    """:func:`set_attribute` for the duration of a ``with`` block."""
    before = getattr(owner, attribute)
    set_attribute(owner, attribute)
    try:
        yield
    finally:
        setattr(owner, attribute, before)
