"""SGLANG_DSV4_FIND_NOT_FINITE=on: the log names the first sublayer of a forward whose output is not finite.

A line for each such forward names the sublayer, the forward's number and kind, and the first tokens concerned with
their positions. The check waits for the device after every sublayer, so CUDA graphs are off and the server is slow: use
it to find the layer, not to serve.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sglang_dsv4 import env

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_DSV4_FIND_NOT_FINITE"
SHOWN = 8
"""Tokens that a line names."""


def is_on() -> bool:
    """Whether the environment switches the search on.

    Raises:
        ValueError: neither on nor off.
    """
    return env.choice(VARIABLE) == "on"


def install(model: nn.Module, runner: ModelRunner) -> Callable[[], None]:
    """Check every sublayer of `model` (the target's) from now on; returns a function that stops it."""
    from sglang_dsv4.layers.attention import Attention
    from sglang_dsv4.layers.moe import MoE

    found = False
    positions: Tensor | None = None

    def begin(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal found, positions
        found, positions = False, arguments[1]

    def check(name: str) -> Callable[..., None]:
        def after(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            nonlocal found
            if found:
                return
            rows = output[0] if isinstance(output, tuple) else output
            wrong = (~torch.isfinite(rows.flatten(1)).all(1)).nonzero().flatten().tolist()
            if wrong:
                found = True
                # With sequence parallelism a rank has only its own rows, whose positions are not known here.
                at = positions.tolist() if len(positions) == len(rows) else None
                tokens = [f"{token} at position {at[token]}" if at else str(token) for token in wrong[:SHOWN]]
                more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
                logger.error(
                    "sglang_dsv4: not finite first in %s, forward %d: tokens %s%s of %d",
                    *(name, runner.forward_pass_id, ", ".join(tokens), more, len(rows)),
                )

        return after

    handles = [model.model.register_forward_pre_hook(begin)]
    handles.append(model.model.embed.register_forward_hook(check("the embedding")))
    for number, layer in enumerate(model.model.layers):
        for module in layer.modules():
            if isinstance(module, Attention | MoE):
                sublayer = "attention" if isinstance(module, Attention) else "experts"
                handles.append(module.register_forward_hook(check(f"layer {number}, {sublayer}")))
    handles.append(model.model.hc_head.register_forward_hook(lambda m, a, out: check("the final norm")(m, a, out[1])))

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
