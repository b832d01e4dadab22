"""The launcher's checks of `config.json`, index and tokenizer: no default is filled in, and errors name the file."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model.released_configs import FLASH, RELEASED, as_sglang_parses, as_transformers_parses

from sglang_dsv4.model_config.config import Config, ConfigError
from sglang_dsv4.weights import checkpoint_files
from sglang_dsv4.weights.checkpoint_files import (
    INDEX_FILE,
    CheckpointFileError,
    check_checkpoint,
    require_same_config,
    stated,
)

MAY_BE_LEFT_OUT = {
    "attention_bias": "not in every release; any value but the default is refused",
    "tie_word_embeddings": "likewise",
    "topk_method": "likewise",
    "expert_dtype": "the tensors' dtype tells",
    "quantization_config": "an unquantised checkpoint; one with FP8 weights is refused by its weights",
    "bos_token_id": "the tokenizer's",
    "eos_token_id": "the tokenizer's",
    "torch_dtype": "SGLang's default, float16, is refused",
}


@pytest.fixture(autouse=True)
def no_switches_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_DSV4_QAT", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path, FLASH)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"norm.weight": "model-00001-of-00001.safetensors"}}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def write_config(folder: Path, fields: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(fields))


def arguments(folder: Path, **fields: Any) -> SimpleNamespace:
    unset = {
        "revision": None,
        "json_model_override_args": "{}",
        "decrypted_config_file": None,
        "decrypted_draft_config_file": None,
        "speculative_draft_model_path": None,
        "speculative_draft_model_revision": None,
        "tokenizer_path": None,
        "skip_tokenizer_init": False,
    }
    return SimpleNamespace(model_path=str(folder), **{**unset, **fields})


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_configs_pass(name: str, folder: Path) -> None:
    write_config(folder, RELEASED[name])
    check_checkpoint(arguments(folder))


@pytest.mark.parametrize("field", sorted(FLASH.keys() - MAY_BE_LEFT_OUT.keys() - {"model_type"}))
def test_a_missing_field_is_named(field: str, folder: Path) -> None:
    """SGLang would fill in DeepSeek-V3's value: 2.5 for routed_scaling_factor, no YaRN, 4,096 positions, ..."""
    write_config(folder, {name: value for name, value in FLASH.items() if name != field})
    with pytest.raises(ConfigError, match=rf"'{field}' is None; accepted: .*missing from config.json"):
        check_checkpoint(arguments(folder))


@pytest.mark.parametrize("field", MAY_BE_LEFT_OUT)
def test_a_field_that_may_be_left_out(field: str, folder: Path) -> None:
    write_config(folder, {name: value for name, value in FLASH.items() if name != field})
    check_checkpoint(arguments(folder))


@pytest.mark.parametrize("field", sorted(FLASH["rope_scaling"]))
def test_a_missing_field_of_yarn_is_named(field: str, folder: Path) -> None:
    table = {name: value for name, value in FLASH["rope_scaling"].items() if name != field}
    write_config(folder, FLASH | {"rope_scaling": table})
    with pytest.raises(ConfigError, match=rf"\"rope_scaling\['{field}'\]\" is None"):
        check_checkpoint(arguments(folder))


def resolve(folder: Path) -> None:
    """SGLang's own resolution of a server's arguments, with the plugin as it is installed."""
    import sglang.srt.managers.scheduler  # noqa: F401 - plugins are loaded once a process; other tests need it before
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    ServerArgs(model_path=str(folder)).resolve_once()


def test_sglang_asks_us_before_it_fills_anything_in(folder: Path) -> None:
    """SGLang would assume 43 layers where four have ratios, and transformers would report `layer_types`."""
    small = FLASH | {"compress_ratios": [0, 4, 128, 4, 0]}
    write_config(folder, {name: value for name, value in small.items() if name != "num_hidden_layers"})
    with pytest.raises(ConfigError, match="'num_hidden_layers' is None"):
        resolve(folder)


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_a_config_saved_by_transformers_is_refused_by_name(folder: Path, name: str) -> None:
    """Such a config passed our check, and SGLang failed on it. The error lists the release's fields to put in."""
    from transformers import DeepseekV4Config

    released = copy.deepcopy(RELEASED[name])  # transformers writes into its tables
    DeepseekV4Config(**released).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text()) | {"architectures": released["architectures"]}
    write_config(folder, saved)
    with pytest.raises(CheckpointFileError, match="was saved by transformers: it has layer_types") as error:
        check_checkpoint(arguments(folder))
    theirs = {"layer_types", "compress_rates", "mlp_layer_types", "rope_parameters"}
    fields = json.loads(str(error.value).split("release's: ")[1])
    assert fields["num_hash_layers"] == released["num_hash_layers"]
    write_config(folder, {key: value for key, value in saved.items() if key not in theirs} | fields)
    check_checkpoint(arguments(folder))
    repaired = Config.from_hf(stated(json.loads((folder / "config.json").read_text())))
    assert repaired.schedule == Config.from_hf(stated(released)).schedule


def test_a_config_that_was_not_found_at_first_is_checked_with_sglangs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only SGLang can resolve the repository's name, or the network failed for a moment."""
    monkeypatch.setattr(checkpoint_files, "check_checkpoint", lambda arguments: None)
    write_config(folder, {name: value for name, value in FLASH.items() if name != "routed_scaling_factor"})
    with pytest.raises(ConfigError, match="'routed_scaling_factor' is None"):
        resolve(folder)


def test_the_draft_s_own_checkpoint_is_read_too(folder: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    write_config(draft, FLASH | {"hc_eps": float("inf")})
    with pytest.raises(ConfigError, match="'hc_eps' is inf"):
        check_checkpoint(arguments(folder, speculative_draft_model_path=str(draft)))


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize("spelling", ["official", "transformers"])
def test_the_files_config_equals_sglangs(name: str, spelling: str, tmp_path: Path) -> None:
    fields = RELEASED[name] if spelling == "official" else as_transformers_parses(RELEASED[name]).to_dict()
    parsed = as_sglang_parses(fields, tmp_path)
    assert Config.from_hf(stated(fields)) == Config.from_hf(parsed)
    require_same_config(
        SimpleNamespace(model_path=str(tmp_path), revision=None, model_override_args={}, hf_config=parsed), None
    )


@pytest.mark.parametrize(
    ("alias", "field"), [("num_local_experts", "n_routed_experts"), ("num_mtp_layers", "num_nextn_predict_layers")]
)
def test_other_names_of_sglangs_parser(alias: str, field: str, tmp_path: Path) -> None:
    fields = {name: value for name, value in FLASH.items() if name != field} | {alias: FLASH[field]}
    assert Config.from_hf(stated(fields)) == Config.from_hf(as_sglang_parses(fields, tmp_path))


OVERRIDES: dict[str, dict[str, Any]] = {
    "number": {"routed_scaling_factor": 2.25},
    "missing-in-the-file": {"swiglu_limit": 7.5},
    "part-of-yarn": {"rope_scaling": {"factor": 8}},
    "part-of-yarn-by-its-other-name": {"rope_parameters": {"beta_fast": 16, "rope_theta": 5000}},
    "list": {"compress_ratios": [0, 4, *FLASH["compress_ratios"][2:]]},
    "two": {"index_topk": 64, "num_experts_per_tok": 4},
}


@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
def test_overrides_are_those_of_sglang(overrides: dict[str, Any], tmp_path: Path) -> None:
    """We and SGLang merge overrides alike, also into a file without swiglu_limit if an override has it."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    file = {name: value for name, value in FLASH.items() if name != "swiglu_limit" or name not in overrides}
    write_config(tmp_path, file)
    parsed = get_config(str(tmp_path), trust_remote_code=False, model_override_args=overrides)
    ours = Config.from_hf(stated(file, overrides))
    assert ours == Config.from_hf(parsed)
    assert ours != Config.from_hf(stated(FLASH))
    check_checkpoint(arguments(tmp_path, json_model_override_args=json.dumps(overrides), skip_tokenizer_init=True))


def test_a_wrong_override_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'hc_mult' is 0"):
        check_checkpoint(arguments(folder, json_model_override_args='{"hc_mult": 0}'))
    with pytest.raises(ConfigError, match=r"rope_scaling\['factor'\]\" is inf"):
        check_checkpoint(arguments(folder, json_model_override_args='{"rope_scaling": {"factor": Infinity}}'))


def test_a_field_that_sglangs_parser_changes_is_named(tmp_path: Path) -> None:
    parsed = as_sglang_parses(FLASH, tmp_path)
    parsed.index_topk = 513
    model_config = SimpleNamespace(model_path=str(tmp_path), revision=None, model_override_args={}, hf_config=parsed)
    with pytest.raises(ConfigError, match=r"'index_topk' is 513; accepted: 512, which config\.json says"):
        require_same_config(model_config, None)


@pytest.mark.parametrize(
    "content", [b"", b'{"weight_map": {"a', b"\xff\xfe\x00", b"[]", b'{"metadata": {}}', b'{"weight_map": {"a": 1}}']
)
def test_an_index_that_cannot_be_read_is_named(content: bytes, folder: Path) -> None:
    """Before, it ended in a JSONDecodeError or a KeyError that named no file."""
    (folder / INDEX_FILE).write_bytes(content)
    with pytest.raises(CheckpointFileError, match=rf"{folder}/{INDEX_FILE} .*(?i:fetch the file again)"):
        check_checkpoint(arguments(folder))


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def cut_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"voc')


def cut_tokenizer_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_tokenizer, r"no tokenizer\.json or tokenizer\.model in .*--tokenizer-path.*--skip-tokenizer-init"),
        (cut_tokenizer, r"tokenizer\.json \(33 bytes\) can't be read: .*Fetch the file again"),
        (cut_tokenizer_config, r"tokenizer_config\.json \(0 bytes\) can't be read"),
    ],
    ids=["missing", "cut", "cut-config"],
)
def test_a_tokenizer_that_cannot_be_read_is_named(
    damage: Callable[[Path], None], message: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_checkpoint(arguments(folder))
    damage(folder)
    with pytest.raises(CheckpointFileError, match=message):
        check_checkpoint(arguments(folder))
    check_checkpoint(arguments(folder, skip_tokenizer_init=True))
    elsewhere = tmp_path_factory.mktemp("tokenizer")
    (elsewhere / "tokenizer.json").write_text("{}")
    check_checkpoint(arguments(folder, tokenizer_path=str(elsewhere)))


@pytest.mark.parametrize(
    "content", ['{"architectures": ["LlamaForCausalLM"]}', "{", "[]"], ids=["llama", "cut", "list"]
)
def test_other_models_are_left_alone(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    check_checkpoint(arguments(tmp_path))
    check_checkpoint(arguments(tmp_path / "nothing"))
    check_checkpoint(arguments(tmp_path, json_model_override_args="{"))
