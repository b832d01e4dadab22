"""If new files of weights can't be loaded, the old files are loaded again.

This is for layers of SGLang that keep weights in a layout of their own, whose updates come from files only. SGLang
0.5.23 loads half of the weights that do not fit, and its rollback reads the same files again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def keep_weights(
    original: Callable[..., tuple[bool, str]], updater: Any, model_path: str, *args: Any, **kwargs: Any
) -> tuple[bool, str]:
    """Load new weights; if that fails, load the old ones again. Runs around ``update_weights_from_disk``.

    Returns:
        Whether `model_path` was loaded, and the error if it was not.

    Raises:
        SystemExit: neither could be loaded, so the model holds tensors of both and must not answer.
    """
    config, before = updater.model_config, updater.model_config.model_path
    try:
        loaded, message = original(updater, model_path, *args, **kwargs)
        if loaded or "Rolling back" not in message:  # else tensors may have been written
            config.model_path = model_path if loaded else before
            return loaded, message
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    logger.error("The weights of %s could not be loaded, those of %s are loaded again: %s", model_path, before, message)
    config.model_path = before
    try:
        restored, why = original(updater, before, "auto")
    except Exception as error:
        restored, why = False, f"{type(error).__name__}: {error}"
    if not restored:
        raise SystemExit(
            f"The weights of {model_path} could not be loaded ({message}), nor those of {before} again ({why}): the "
            "model holds some of both. Start the server again."
        )
    return False, f"{message} The weights of {before} were loaded again."
