"""`--enable-deterministic-inference`: a request has the same bits alone, in any batch, after a hit, chunked any way.

SGLang 0.5.23 refuses that flag for every attention backend that two lists of its own don't name, and switches its
radix cache off for those that one of them does not; both lists may be extended (:func:`lift_refusal`).

What keeps the promise is one rule: every operator of a forward is batch-invariant, or the server does not start.

* Ours come through the registry, which gives no other implementation from then on (:func:`start`).
* SGLang's are in :data:`SGLANG_OPERATORS` (:func:`check_model` looks at what a model was built of): FP8 products by
  DeepGEMM, whose order of summation its block of K decides (ours of few tokens has its bits: `layers.fp8_linear`); bf16
  linear layers by SGLang's replacements of PyTorch's products, which it installs under this flag. No MoE runner of
  SGLang's is in it: they choose tiles by the number of tokens, and order these by atomics. Ours
  (`layers.packed_experts`) sums in an order that K alone decides.
* Sums over ranks are made in the order of the ranks (`layers.rank_sum`).
* A token that was decoded and one that is computed again in a prefill are one token: a forward of a prefill divides
  keys as one of decode does (`ForwardMetadata.split_keys`).
* Draws are keyed by the request's seed (`sampling`), which SGLang takes to be 42 where a request names none.

What can't be kept gets a 400 (:func:`reason_against`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from dsv4_kernels import registry
from dsv4_kernels.model_shapes import Option
from dsv4_kernels.ops import forward_ops
from sglang_dsv4.seam import compat

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import nn

FLAG = "--enable-deterministic-inference"

DEEP_GEMM = "deepgemm_w8a8_block_fp8_linear_with_fallback"
SGLANG_OPERATORS: dict[str, dict[str, str]] = {
    "FP8 linear layer": {DEEP_GEMM: "blocks of 128 channels, in order, for any number of rows"},
    "linear layer": {"UnquantizedLinearMethod": "aten::mm as SGLang replaces it under the flag: one tile, all of K"},
    "routed experts": {},
}
"""SGLang's operators in a forward -> its implementations that are batch-invariant, and why."""

WHAT_TO_DO = {
    "FP8 linear layer": "leave --fp8-gemm-backend out, or choose deep_gemm, with DeepGEMM installed",
    "linear layer": "serve the release's FP8 checkpoint",
    "routed experts": "none of its runners keeps a row's bits; on Hopper --moe-runner-backend dsv4 does, the default",
}


def is_deep_gemm(product: Callable[..., object]) -> bool:
    """Whether a product of SGLang's FP8 linear layers is DeepGEMM's, by itself or with arguments bound to it."""
    return _name_of(product) == DEEP_GEMM


def _name_of(product: Callable[..., object]) -> str:
    return getattr(product, "func", product).__name__


def lift_refusal(backend: str) -> None:
    """Let SGLang accept the flag with this attention backend, and keep its radix cache on."""
    from sglang.srt.arg_groups import choices

    for known, add in (
        (choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, choices.add_deterministic_attention_backend_choices),
        (
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            choices.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if backend not in known:
            add([backend])


def is_on() -> bool:
    """Whether this process serves under the flag."""
    return registry.requires_batch_invariance()


def start(runner: ModelRunner) -> None:
    """Before a model is loaded: from here on the registry gives batch-invariant implementations only, if the flag asks.

    Raises:
        compat.StartupError: an op has none for this device and dtype; names all such.
    """
    from sglang.srt.runtime_context import get_exec

    from sglang_dsv4.attention import comparison

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
        head_dim: of the attention, which decides over its kernel; None leaves that to the registry.
    """
    from sglang_dsv4.attention.implementation import required_implementation
    from sglang_dsv4.layers import fp8_linear

    options = set()
    if fp8_linear.is_on(device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9):
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
    """Once a model's modules are there, and nothing is loaded yet: are SGLang's operators in it batch-invariant?

    Raises:
        compat.StartupError: names each one that is not, and what to do.
    """
    if is_on():
        refuse(problems_of_modules(model))


def problems_of_modules(model: nn.Module) -> list[str]:
    """A sentence for each of SGLang's operators in the model that is not batch-invariant, with one place of it."""
    found: dict[tuple[str, str], str] = {}
    for name, module in model.named_modules():
        for operator, implementation in sglang_operators(module):
            found.setdefault((operator, implementation), name)
    return [
        f"the {operator} {place!r} is SGLang's {implementation}, whose bits depend on the batch: {WHAT_TO_DO[operator]}"
        for (operator, implementation), place in found.items()
        if implementation not in SGLANG_OPERATORS[operator]
    ]


def sglang_operators(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The operators of :data:`SGLANG_OPERATORS` that a module is, with the name of the implementation.

    A layer of SGLang's whose quantisation method is of this package computes by the registry, as do layers of our own:
    what they ask for is checked when they ask.
    """
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe import get_moe_runner_backend
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    method = getattr(module, "quant_method", None)
    if type(method).__module__.split(".")[0] == compat.OUR_PACKAGE:
        return
    if isinstance(module, FusedMoE):
        yield "routed experts", f"MoE runner {get_moe_runner_backend().value!r} ({type(method).__name__})"
    elif isinstance(module, LinearBase):
        product = getattr(method, "w8a8_block_fp8_linear", None)
        if product is None:
            yield "linear layer", type(method).__name__
            return
        name = _name_of(product)
        if name == DEEP_GEMM and not compat.deep_gemm_serves(
            tuple(module.weight.shape), method.weight_block_size, torch.get_default_dtype()
        ):
            name = f"Triton product ({tuple(module.weight.shape)} in blocks of {method.weight_block_size})"
        yield "FP8 linear layer", name


def refuse(problems: list[str]) -> None:
    """Raise for problems that were found.

    Raises:
        compat.StartupError: if there are any.
    """
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise compat.StartupError(
            f"sglang-dsv4 can't keep what {FLAG} promises, that a request has the same bits in every batch:\n{listed}\n"
            f"Or leave {FLAG} out."
        )


def reason_against(req: Req, on_gpu: bool, speculative_algorithm: str | None) -> str | None:
    """Why a request's bits can't be its own, for a 400 where the flag is on; None if they can.

    Args:
        req: the request.
        on_gpu: where the model is. On a CPU there is nothing to refuse.
        speculative_algorithm: of the server.
    """
    if not on_gpu:
        return None
    params = req.sampling_params
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    for name, value in neutral.items():
        if getattr(params, name) != value:
            return (
                f"{name} is not supported by a server with {FLAG} on a GPU: SGLang counts an answer's tokens when its "
                "scheduler gets to it, which depends on the other requests. Send none."
            )
    if speculative_algorithm is not None and params.top_k > 1:
        return (
            f"sampling is not supported by a server with {FLAG} and --speculative-algorithm on a GPU: what is drawn "
            "would depend on which drafts were accepted. Send temperature 0."
        )
    return None
