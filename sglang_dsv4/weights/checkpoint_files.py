"""What the small files of a checkpoint say, read before SGLang reads them.

SGLang fills what `config.json` leaves out with DeepSeek-V3's values (a routed_scaling_factor of 2.5, 8 experts a token,
no YaRN, 4,096 positions) and serves the model with them. So the file is read here as it is, with the fields of
``--json-model-override-args`` in their places, and :class:`Config` is built from that once, when
the launcher resolves its arguments: a missing field is an error that names it. A damaged index or a missing tokenizer
would end in a traceback that names no file.
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
"""Names that SGLang's parser takes for ours."""

_ROPE_FIELDS = ("rope_parameters", "rope_scaling")  # two names of one table, for SGLang's parser too


class CheckpointFileError(ValueError):
    """A file of a checkpoint that is missing or can't be read: names it, and says what to do."""


def check_checkpoint(arguments: Any) -> None:  # noqa: ANN401 - ServerArgs, or SGLang's view of it
    """Refuse a server whose model is ours, for what the small files of its checkpoint say. Others pass.

    Raises:
        ConfigError: a field of `config.json` is missing, or holds what can't be served.
        CheckpointFileError: the index or the tokenizer is missing or damaged.
    """
    overrides = arguments.json_model_override_args
    if arguments.speculative_draft_model_path is not None:
        draft = (arguments.speculative_draft_model_path, arguments.speculative_draft_model_revision)
        _check_config(*draft, arguments.decrypted_draft_config_file, overrides)
    if not _check_config(arguments.model_path, arguments.revision, arguments.decrypted_config_file, overrides):
        return
    folder, tokenizer = Path(arguments.model_path), Path(arguments.tokenizer_path or arguments.model_path)
    if folder.is_dir():
        check_files(folder, tokenizer if tokenizer.is_dir() and not arguments.skip_tokenizer_init else None)


def _check_config(model_path: str, revision: str | None, file: str | None, overrides: str) -> bool:
    try:
        config = stated(read_config(model_path, revision, file or CONFIG_FILE), json.loads(overrides))
    except (OSError, ValueError, AttributeError):
        return False  # no such model, or no JSON: SGLang reads the same in a moment and says so, for any model
    architectures = getattr(config, "architectures", None)
    if architectures is None and getattr(config, "model_type", None) == "deepseek_v4":
        raise ConfigError("architectures", None, f"[{ARCHITECTURES[0]!r}]; the field is missing from {CONFIG_FILE}")
    if not is_ours(architectures):
        return False
    Config.from_hf(config)
    return True


def read_config(model_path: str, revision: str | None, file: str = CONFIG_FILE) -> dict[str, Any]:
    """The fields of a `config.json`, none filled in.

    Args:
        model_path: a folder, or a repository's name, which is looked up as transformers does.
        revision: of the repository.
        file: another path of the config, as SGLang has after decrypting one.

    Raises:
        OSError: there is no such file, or it can't be fetched.
        CheckpointFileError: it holds no JSON object.
    """
    from transformers.utils import cached_file

    path = Path(cached_file(model_path, file, revision=revision))
    fields = _json(path)
    if not isinstance(fields, dict):
        raise CheckpointFileError(f"{path} holds a JSON {type(fields).__name__}; expected an object of fields")
    return fields


def stated(fields: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> SimpleNamespace:
    """What `Config.from_hf` reads: the fields of a `config.json` under their own names, and no other.

    Args:
        fields: of the file.
        overrides: `--json-model-override-args`. As SGLang does it, a table of RoPE is merged into the file's, and any
            other field takes the place of the file's.
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
    """The model is built from SGLang's config object: it must say what the checkpoint's file says.

    Args:
        model_config: of the target.
        file: SGLang's path of a decrypted config, if it has one.

    Raises:
        ConfigError: names a field that does not, or that the file leaves out.
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
    """Read the files of a checkpoint that a server reads late, or with an error that does not name them.

    Args:
        folder: of the checkpoint.
        tokenizer: the folder of the tokenizer; None where there is none to be read.

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
    except (OSError, ValueError) as error:  # ValueError: no JSON, or bytes that are no text
        raise CheckpointFileError(
            f"{path} ({path.stat().st_size:,} bytes) can't be read: {error}. Fetch the file again."
        ) from error
