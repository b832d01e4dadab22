"""Entry points of the GPU kernels with the op's signature: arguments -> `Problem` -> kernel -> result.

A kernel module (`sm90.launch`, `sm100.launch`) has a function `sparse_attention(problem)` that writes `problem.out`. It
is imported at the first call, because it needs CuTe DSL.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from dsv4_kernels.sparse_attention.problem import Problem

_KERNELS = {
    "sm90": "dsv4_kernels.sparse_attention.sm90.launch",
    "sm100": "dsv4_kernels.sparse_attention.sm100.launch",
}


@functools.cache
def _kernel(module: str) -> Callable[[Problem], None]:
    try:
        return importlib.import_module(_KERNELS[module]).sparse_attention
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("cutlass", "cuda"):
            raise
        raise ModuleNotFoundError(
            f"the attention kernel {module!r} needs CuTe DSL (pip install nvidia-cutlass-dsl): {error}. impl='ref' "
            "computes the same in PyTorch, slowly",
            name=error.name,
        ) from error


def _run(module: str, *arguments: Any, **options: Any) -> Tensor:  # noqa: ANN401 - as the public function's
    problem = Problem.of(*arguments, **options)
    if problem.num_tokens:
        _kernel(module)(problem)
    return problem.out


def sm90(*arguments: Any, **options: Any) -> Tensor:  # noqa: ANN401
    """`dsv4_kernels.sparse_attention.sparse_attention` on Hopper."""
    return _run("sm90", *arguments, **options)


def sm100(*arguments: Any, **options: Any) -> Tensor:  # noqa: ANN401
    """`dsv4_kernels.sparse_attention.sparse_attention` on Blackwell (B200, GB200, B300)."""
    return _run("sm100", *arguments, **options)
