"""Check a checkpoint's config, index and tokenizer files before SGLang reads them.

SGLang fills fields that `config.json` lacks with DeepSeek-V3's values (a routed_scaling_factor of 2.5, 8 experts a
token, no YaRN, 4,096 positions) and serves the model with them. Therefore the launcher reads the file unchanged,
applies ``--json-model-override-args`` and builds a :class:`Config` from that: a missing field is an error that names
it. A damaged index or a missing tokenizer is an error that names the file; SGLang's traceback would name none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_dsv4.model_config.config import Config, ConfigError
from sglang_dsv4.seam.compat import ARCHITECTURES, is_ours

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
"""Other names of our fields that SGLang's parser accepts."""

_ROPE_FIELDS = ("rope_parameters", "rope_scaling")  # two names of one table, as in SGLang's parser


class CheckpointFileError(ValueError):
    """A checkpoint's file is missing or can't be read; the message names it and says what to do."""


def check_checkpoint(arguments: Any) -> bool:  # noqa: ANN401 - ServerArgs, or SGLang's view of it
    """Check the files of a DeepSeek-V4 checkpoint, and the config of its draft; checkpoints of other models pass.

    Returns:
        Whether the checkpoint is a DeepSeek-V4 checkpoint. False, too, if SGLang has yet to find its files.

    Raises:
        ConfigError: a field of `config.json` is missing, or has a value that can't be served.
        CheckpointFileError: the index or the tokenizer is missing or damaged.
    """
    overrides = arguments.json_model_override_args
    if arguments.speculative_draft_model_path is not None:
        draft = (arguments.speculative_draft_model_path, arguments.speculative_draft_model_revision)
        _check_config(*draft, arguments.decrypted_draft_config_file, overrides)
    if not _check_config(arguments.model_path, arguments.revision, arguments.decrypted_config_file, overrides):
        return False
    folder, tokenizer = Path(arguments.model_path), Path(arguments.tokenizer_path or arguments.model_path)
    if folder.is_dir():
        check_files(folder, tokenizer if tokenizer.is_dir() and not arguments.skip_tokenizer_init else None)
    return True


def _check_config(model_path: str, revision: str | None, file: str | None, overrides: str) -> bool:
    try:
        config = stated(read_config(model_path, revision, file or CONFIG_FILE), json.loads(overrides))
    except (OSError, ValueError, AttributeError):
        return False  # no such model, or no JSON: SGLang reads the same file next, and its error says so
    architectures = getattr(config, "architectures", None)
    if architectures is None and getattr(config, "model_type", None) == "deepseek_v4":
        raise ConfigError("architectures", None, f"[{ARCHITECTURES[0]!r}]; the field is missing from {CONFIG_FILE}")
    if not is_ours(architectures):
        return False
    refuse_saved_by_transformers(config)
    Config.from_hf(config)
    return True


def refuse_saved_by_transformers(config: SimpleNamespace) -> None:
    """Raise for a config in the form in which transformers saves it: SGLang reads the release's fields only.

    Raises:
        CheckpointFileError: names transformers' fields, and gives the release's with their values.
    """
    rope = getattr(config, "rope_parameters", None)
    nested = isinstance(rope, Mapping) and "main" in rope
    theirs = [name for name in ("layer_types", "compress_rates", "mlp_layer_types") if hasattr(config, name)]
    theirs += ["rope_parameters['main']"] * nested
    if not theirs or (hasattr(config, "compress_ratios") and not nested):
        return
    try:
        written = released_fields(Config.from_hf(config))
    except ConfigError:
        written = "compress_ratios, num_hash_layers, qk_rope_head_dim, rope_theta and rope_scaling"
    raise CheckpointFileError(
        f"{CONFIG_FILE} was saved by transformers: it has {', '.join(theirs)}, which SGLang can't read. Take the "
        f"release's {CONFIG_FILE}, or replace these fields by the release's: {written}"
    )


def released_fields(config: Config) -> str:
    """JSON of the release's fields that transformers writes in another form."""
    yarn = config.yarn and {
        "type": "yarn",
        "factor": config.yarn.factor,
        "original_max_position_embeddings": config.yarn.original_max_positions,
        "beta_fast": config.yarn.beta_fast,
        "beta_slow": config.yarn.beta_slow,
    }
    fields = {
        "compress_ratios": [*config.schedule.ratios, *[0] * config.num_draft_layers],
        "num_hash_layers": config.num_hash_layers,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compress_rope_theta,
        "rope_scaling": yarn,
    }
    return json.dumps(fields)


def read_config(model_path: str, revision: str | None, file: str = CONFIG_FILE) -> dict[str, Any]:
    """The fields of a `config.json`, with no defaults added.

    Args:
        model_path: a folder, or a repository's name, which transformers resolves.
        revision: of the repository.
        file: the config's path, if SGLang has decrypted the config to another file.

    Raises:
        OSError: the file does not exist, or can't be fetched.
        CheckpointFileError: it holds no JSON object.
    """
    from transformers.utils import cached_file

    path = Path(cached_file(model_path, file, revision=revision))
    fields = _json(path)
    if not isinstance(fields, dict):
        raise CheckpointFileError(f"{path} holds a JSON {type(fields).__name__}; expected an object of fields")
    return fields


def stated(fields: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> SimpleNamespace:
    """The fields of a `config.json` under their official names, for `Config.from_hf`; no field is added.

    Args:
        fields: the file's.
        overrides: `--json-model-override-args`. As in SGLang, a RoPE table is merged into the file's, and any other
            field replaces the file's.
    """
    merged = dict(fields)
    for field, value in (overrides or {}).items():
        if field in _ROPE_FIELDS:
            tables = [merged.pop(name, None) for name in _ROPE_FIELDS]
            current = next((table for table in tables if table), None)
            both = isinstance(value, Mapping) and isinstance(current, Mapping)
            merged[_ROPE_FIELDS[0]] = {**current, **value} if both else value
        else:
            merged[field] = value
    for alias, field in ALIASES.items():
        if alias in merged and merged.get(field) is None:
            merged[field] = merged[alias]
    return SimpleNamespace(**merged)


def require_same_config(model_config: Any, file: str | None) -> None:  # noqa: ANN401 - SGLang's ModelConfig
    """Check that SGLang's config object, from which the model is built, has the values of the checkpoint's file.

    Args:
        model_config: the target's.
        file: SGLang's path of the decrypted config, if it has one.

    Raises:
        ConfigError: names a field that differs, or that the file lacks.
        OSError, CheckpointFileError: see `read_config`.
    """
    fields = read_config(model_config.model_path, model_config.revision, file or CONFIG_FILE)
    ours = Config.from_hf(stated(fields, model_config.model_override_args))
    sglangs = Config.from_hf(model_config.hf_config)
    for field in (field.name for field in dataclasses.fields(Config)):
        expected, found = getattr(ours, field), getattr(sglangs, field)
        if expected != found:
            raise ConfigError(field, found, f"{expected!r}, which {CONFIG_FILE} says; SGLang's parser changed it")


def check_files(folder: Path, tokenizer: Path | None) -> None:
    """Check the files that a server reads late, or whose damage it reports without naming the file.

    Args:
        folder: the checkpoint's.
        tokenizer: the tokenizer's folder; None if the server loads no tokenizer.

    Raises:
        CheckpointFileError: the index is damaged, or the tokenizer is missing or damaged.
    """
    index = folder / INDEX_FILE
    if index.exists():
        content = _json(index)
        names = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise CheckpointFileError(
                f"{index} has no 'weight_map' of tensor names and file names; fetch the file again"
            )
    if tokenizer is None:
        return
    if not any((tokenizer / name).exists() for name in TOKENIZER_FILES):
        raise CheckpointFileError(
            f"there is no {' or '.join(TOKENIZER_FILES)} in {tokenizer}: fetch the checkpoint's tokenizer files, name "
            "the folder that has them with --tokenizer-path, or serve token ids only with --skip-tokenizer-init"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).exists():
            _json(tokenizer / name)


def _json(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:  # ValueError: no JSON, or not UTF-8
        raise CheckpointFileError(
            f"{path} ({path.stat().st_size:,} bytes) can't be read: {error}. Fetch the file again."
        ) from error
