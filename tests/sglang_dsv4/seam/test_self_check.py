"""The start-up check stops a DeepSeek-V4 server that would run other code, and no server of another model."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from sglang_dsv4 import env
from sglang_dsv4.seam import compat, hooks, install, live, self_check

OURS = ["DeepseekV4ForCausalLM"]


@pytest.fixture(scope="module", autouse=True)
def our_models_are_registered() -> None:
    """SGLang fills its registry once a process from the environment; do it before a test here changes that."""
    env.set_default(hooks.MODEL_PACKAGE_VARIABLE, hooks.OUR_MODELS)
    self_check.require_our_model_classes()


@pytest.fixture(autouse=True)
def clean_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_failures", [])
    monkeypatch.setattr(live, "_live", None)


def test_a_failure_stops_our_model_and_no_other() -> None:
    with self_check.remembering_failures("installing hooks"):
        raise ImportError("no such thing")
    self_check.require_ready(["LlamaForCausalLM"])
    with pytest.raises(
        compat.StartupError, match=r"(?s)installing hooks failed.*no such thing.*What to do.*SGLANG_DSV4=off"
    ):
        self_check.require_ready(OURS)


def test_another_sglang_version_stops_our_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.6.0")
    self_check.require_ready(["LlamaForCausalLM"])
    with pytest.raises(compat.StartupError, match=r"(?s)SGLang 0\.6\.0 is installed.*pip install sglang==0\.5\.23"):
        self_check.require_ready(OURS)


def test_another_model_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang uses one external package only; with another one it would serve its own DeepSeek-V4."""
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "my.models")
    self_check.require_ready(["LlamaForCausalLM"])
    with pytest.raises(compat.StartupError, match=r"(?s)SGLANG_EXTERNAL_MODEL_PACKAGE is 'my\.models'.*unset it"):
        self_check.require_ready(OURS)


def test_everything_in_place_passes() -> None:
    self_check.require_ready(OURS)


@pytest.mark.parametrize("part", ["model", "attention_backend", "kv_pool", "pool_sizing", "prefix_cache"])
def test_each_foreign_part_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = type("Ours", (), {"__module__": "sglang_dsv4.somewhere"})
    foreign = type("InTree", (), {"__module__": "sglang.srt.somewhere"})
    parts = {name: ours for name in ("model", "attention_backend", "kv_pool", "pool_sizing", "prefix_cache")}
    parts[part] = foreign
    monkeypatch.setattr(live, "_pool_sizing", parts["pool_sizing"])
    runner = SimpleNamespace(
        model=parts["model"](), attn_backend=parts["attention_backend"](), token_to_kv_pool=parts["kv_pool"]()
    )
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), tree_cache=parts["prefix_cache"]())
    with pytest.raises(
        compat.StartupError, match=rf"the live {part.replace('_', ' ')} is sglang\.srt\.somewhere\.InTree"
    ):
        live.require_live(scheduler)  # type: ignore[arg-type]
    assert live.live_parts() is None


def test_package_that_looks_like_ours_is_not_ours() -> None:
    assert not compat.is_our_class(type("X", (), {"__module__": "sglang_dsv4_fork.models"}))


@pytest.mark.parametrize("name", sorted(compat.SGLANG_NAMES))
def test_private_name_exists_in_the_tested_version(name: str) -> None:
    assert getattr(compat, name) is not None


def test_a_missing_private_name_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.SGLANG_NAMES, "Gone", "sglang.srt.utils:Gone")
    with pytest.raises(compat.StartupError, match=r"(?s)sglang\.srt\.utils:Gone.*pip install"):
        _ = compat.Gone


def test_model_module_that_fails_to_import_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def broken(name: str, *args: object) -> object:
        if name == "sglang_dsv4.models.deepseek_v4":
            raise ImportError("forced")
        return real(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(self_check.importlib, "import_module", broken)
    with pytest.raises(
        compat.StartupError, match=r"models\.deepseek_v4 could not be imported: ImportError\('forced'\)"
    ):
        self_check.require_our_model_classes()


def test_a_function_of_ours_that_fails_to_import_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of hooks are imported at their first call, which may be a request long after the start."""
    hook = hooks.HOOKS[-1]._replace(function="sglang_dsv4.requests.gone:gone")
    monkeypatch.setattr(install, "_installed", [hook])
    self_check.require_ready(["LlamaForCausalLM"])
    with pytest.raises(
        compat.StartupError, match=r"sglang_dsv4\.requests\.gone:gone could not be imported: ModuleNotF"
    ):
        self_check.require_ready(OURS)
