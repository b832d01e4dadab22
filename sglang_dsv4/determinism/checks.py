"""Checks of `--enable-deterministic-inference`: a request has the same bits alone, in any batch, after a hit of any
kind, and with its prompt in any chunks.

One rule keeps that promise: every operator of a forward is batch-invariant, or the server does not start.

* Our operators come from the registry, which gives batch-invariant implementations only once :func:`start` has run.
* SGLang's operators are checked when the model's modules have been made (:func:`check_model`, `sglang_operators`).
* Sums over ranks are made in the order of the ranks (`layers.rank_sum`).
* A token may be decoded once and computed again in a prefill later: a prefill splits keys as a decode step does
  (`ForwardMetadata.split_keys`).
* Draws are keyed by the request's seed (`requests.sampling.sampler`); SGLang's default for it is 42.

Requests for which the promise can't hold get a 400 (`refused_requests`). SGLang 0.5.23 has a list of the attention
backends for which it accepts the flag, and a list of the backends with which it then keeps the radix cache on: two rows
of `seam.hooks` add our backend to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsv4_kernels import registry
from dsv4_kernels.model_shapes import Option
from dsv4_kernels.ops import forward_ops
from sglang_dsv4.attention import comparison
from sglang_dsv4.attention.implementation import required_implementation
from sglang_dsv4.determinism.flag import FLAG, is_on
from sglang_dsv4.determinism.sglang_operators import problems_of_modules
from sglang_dsv4.seam.compat import StartupError

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import nn


def start(runner: ModelRunner) -> None:
    """If the flag is on, let the registry give batch-invariant implementations only; called before a model is loaded.

    Raises:
        StartupError: ops have no batch-invariant implementation for this device and dtype; names all of them.
    """
    from sglang.srt.runtime_context import get_exec

    asked = bool(get_exec().deterministic.enable_deterministic_inference)
    registry.require_batch_invariance(asked)
    if asked:
        head_dim = getattr(runner.model_config.hf_config, "head_dim", None)
        problems = problems_of_ops(torch.device(runner.device), runner.model_config.dtype, head_dim)
        if comparison.file_of_rank(0) is not None:
            variable = comparison.FILE_VARIABLE
            problems.append(f"{variable} has the reference compute every attention a second time: unset it")
        refuse(problems)


def problems_of_ops(device: torch.device, dtype: torch.dtype, head_dim: int | None) -> list[str]:
    """A sentence for each op of a forward that has no batch-invariant implementation here.

    Args:
        device: of the model.
        dtype: of the model.
        head_dim: of the attention, which decides the attention's kernel; None leaves the choice to the registry.
    """
    options = set()
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10):
        options.add(Option.FP8_LINEAR)
    named = {} if head_dim is None else {"sparse_attention": required_implementation(device, head_dim)}
    problems = []
    for op in forward_ops(device.type, options):
        try:
            registry.chosen(op, device, dtype, named.get(op))
        except NotImplementedError as error:
            problems.append(
                f"{error}. What serves it: a GPU of Hopper's or Blackwell's generation in bfloat16, or a CPU"
            )
    return problems


def check_model(model: nn.Module) -> None:
    """Check SGLang's operators in a model whose modules have been made and whose weights are not loaded yet.

    Raises:
        StartupError: the flag is on, and an operator is not batch-invariant; names each one, and what to do.
    """
    if is_on():
        refuse(problems_of_modules(model))


def refuse(problems: list[str]) -> None:
    """Raise if there are problems.

    Raises:
        StartupError: lists them.
    """
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise StartupError(
            f"sglang-dsv4 can't keep what {FLAG} promises, that a request has the same bits in every batch:\n{listed}\n"
            f"Or leave {FLAG} out."
        )
