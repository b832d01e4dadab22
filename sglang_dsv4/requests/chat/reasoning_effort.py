"""The reasoning efforts that a checkpoint was trained with, and their texts in rendered prompts.

A thinking prompt begins with a text that depends on the requested effort. The releases' chat encodings differ in that
text only:

============  ========================  ====================================
effort        April 2026, and -DSpark   0731, 0813
============  ========================  ====================================
none given    nothing                   nothing (its encoder's default, low)
low           -                         nothing
high          nothing                   "Absolute maximum ..."
max           "Absolute maximum ..."    "Beyond maximum ..."
============  ========================  ====================================

SGLang 0.5.23 renders the right-hand column for all releases, and "high" if a request names no effort. The requested
effort is mapped here before SGLang renders; SGLang renders minimal as low, and medium and xhigh as high. An effort that
no release knows is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from sglang_dsv4 import env

logger = logging.getLogger(__name__)

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""The efforts of a request; SGLang's `none` turns thinking off, and its `ultra` is of other models."""
VARIABLE = "SGLANG_DSV4_EFFORT_TIERS"
SGLANG_DEFAULT_VARIABLE = "SGLANG_DSV4_REASONING_EFFORT"  # SGLang's variable: the effort of requests that name none
ENCODER_FILE = "encoding/encoding_dsv4.py"


class Tiers(Enum):
    """The efforts that a checkpoint's own encoder knows."""

    APRIL = "april"  # high, max
    LATER = "later"  # low, high, max


TRAINED = {Tiers.APRIL: "high and max", Tiers.LATER: "low, high and max"}

_tiers = Tiers.LATER  # of the checkpoint that this process serves


def use_tiers_of(model_path: str, revision: str | None, has_dspark: bool) -> Tiers:
    """The efforts of a checkpoint, with which this process renders prompts from now on; the launcher calls it.

    Raises:
        ValueError: `SGLANG_DSV4_EFFORT_TIERS` holds another word.
    """
    global _tiers
    _tiers, why = tiers_of(model_path, revision, has_dspark)
    env.set_default(SGLANG_DEFAULT_VARIABLE, "low")
    logger.info("sglang_dsv4: reasoning efforts of the %s encoding (%s)", _tiers.value, why)
    return _tiers


def tiers_of(model_path: str, revision: str | None, has_dspark: bool) -> tuple[Tiers, str]:
    """The efforts of a checkpoint, and their source in words for the log.

    The environment variable decides; else the encoder in the checkpoint, if it was downloaded; else the draft: of the
    April checkpoints only the ones named -DSpark have a DSpark draft.

    Args:
        model_path: a folder, or a repository's name.
        revision: the repository's.
        has_dspark: whether `config.json` has the fields of a DSpark draft.

    Raises:
        ValueError: the variable holds another word.
    """
    word = env.choice(VARIABLE)
    if word is not None:
        return Tiers(word), VARIABLE
    encoder = _encoder_of(model_path, revision)
    for constant, tiers in (("REASONING_EFFORT_PROMPTS", Tiers.LATER), ("REASONING_EFFORT_MAX", Tiers.APRIL)):
        if encoder is not None and constant in encoder:
            return tiers, f"{ENCODER_FILE} has {constant}"
    if not has_dspark:
        return Tiers.APRIL, "no DSpark draft"
    return Tiers.LATER, f"a DSpark draft; {VARIABLE}=april for V4-Flash-DSpark and V4-Pro-DSpark of June 2026"


def _encoder_of(model_path: str, revision: str | None) -> str | None:
    from transformers.utils import cached_file

    try:
        found = cached_file(model_path, ENCODER_FILE, revision=revision)
    except OSError:  # the checkpoint has no such file, or there is no network to fetch it
        return None
    return None if found is None else Path(found).read_text(errors="replace")


def render(original: Callable[..., list[int]], recipe: Any, body: dict[str, Any], **options: Any) -> list[int]:
    """The prompt's token ids, with the effort texts of this process's checkpoint; runs around `DeepSeekRecipe.encode`.

    Args:
        original: SGLang's method.
        recipe: SGLang's renderer, for this encoding or another model's.
        body: the request; it lacks `reasoning_effort` if neither the client nor the server names one.
        options: of SGLang's method.

    Raises:
        ValueError: an effort that the model does not have, also in a prompt without thinking, or a body that the
            renderer can't read, as one of more than 128 levels; SGLang answers 400.
    """
    if recipe.model == "DeepSeek-V4-Pro":  # SGLang's name for every model of this encoding
        effort = body.get("reasoning_effort", "low")
        if effort not in EFFORTS:
            raise ValueError(
                f"reasoning_effort must be one of none, {', '.join(EFFORTS)}, got {effort!r}: this checkpoint was "
                f"trained with {TRAINED[_tiers]} (docs/coming_from_sglang.md)."
            )
        if _tiers is Tiers.APRIL:
            effort = "high" if effort == "max" else "low" if effort in ("medium", "high", "xhigh") else effort
        body = {**body, "reasoning_effort": effort}
    try:
        return original(recipe, body, **options)
    except ValueError:
        raise
    except Exception as error:  # the renderer reads nothing but the body
        raise ValueError(f"The prompt can't be rendered: {type(error).__name__}: {error}") from error
