"""The hooks that the plugin installs when SGLang calls it, and the switch that turns it off."""

from __future__ import annotations

import os
import sys

import pytest

from sglang_dsv4 import plugin
from sglang_dsv4.cpu import shims
from sglang_dsv4.seam import hooks, install, self_check
from sglang_dsv4.seam.hooks import Process


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false"])
def test_off_turns_everything_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dsv4.cpu import platform as cpu_platform

    monkeypatch.setenv("SGLANG_DSV4", value)
    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE", raising=False)
    plugin.setup()
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE" not in os.environ
    assert cpu_platform.activate() is None
    monkeypatch.setattr(sys, "meta_path", [])
    shims.activate()
    assert [type(finder) for finder in sys.meta_path] == [shims.OffNotice]


@pytest.mark.parametrize("value", ["no", "disabled", "flase"])
def test_an_unknown_switch_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the package stayed on silently. SGLang's plugin loader catches every Exception; SystemExit is none."""
    monkeypatch.setenv("SGLANG_DSV4", value)
    with pytest.raises(SystemExit, match=rf"SGLANG_DSV4 is '{value}'; expected one of off, 0, false .*on, 1, true"):
        plugin.setup()
    monkeypatch.setattr(sys, "meta_path", [])
    shims.activate()  # runs at the start of every Python program, which must not end here


def test_a_hook_on_a_missing_target_is_not_swallowed() -> None:
    gone = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._gone"
    with pytest.raises((AttributeError, ImportError)):
        install.install(hooks.HOOKS[-1]._replace(target=gone, kind=hooks.Kind.AROUND))


def test_a_row_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a prefix cache was made before the plugin was loaded: SGLang refuses a second tree core of that name."""
    done: list[hooks.Hook] = []
    monkeypatch.setattr(install, "_installed", [])
    monkeypatch.setattr(self_check, "_failures", [])
    monkeypatch.setattr(install, "_INSTALLERS", dict.fromkeys(hooks.Kind, done.append))
    install.install(hooks.TREE_CORE)
    monkeypatch.setattr(plugin, "processes", lambda: set(Process))
    for _ in range(2):
        plugin.setup()
    assert done.count(hooks.TREE_CORE) == 1 and len(set(done)) == len(done) > 100
    assert not self_check._failures


def test_a_failure_is_remembered_and_the_other_hooks_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail_once(hook: hooks.Hook) -> None:
        tried.append(hook)
        if len(tried) == 3:
            raise AttributeError("has moved")

    monkeypatch.setattr(plugin, "install", fail_once)
    monkeypatch.setattr(plugin, "processes", lambda: {Process.EVERY})
    monkeypatch.setattr(self_check, "_failures", [])
    plugin.setup()
    assert [hook for hook in hooks.HOOKS if hook in tried] == tried and len(tried) > 10
    assert all(hook.process is Process.EVERY for hook in tried)
    ((what, error),) = self_check._failures
    assert tried[2].target in what and tried[2].function in what and "has moved" in str(error)


def test_without_its_check_the_plugin_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's plugin loader catches every Exception; SystemExit is none."""

    def fail(*_: object) -> None:
        raise AttributeError("Scheduler has moved")

    monkeypatch.setattr(plugin, "install", fail)
    with pytest.raises(SystemExit, match=r"start-up check.*Scheduler has moved.*SGLANG_DSV4=off"):
        plugin.install_self_check()
