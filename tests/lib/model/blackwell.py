"""A model as a server on a B200 builds and runs it: SGLang's runner on a CPU, our kernels in the emulator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from model.harness import Harness
from ops.experts_cases import emulated_on

from dsv4_kernels import registry
from dsv4_kernels.device import dependent_launch
from sglang_dsv4.layers import grouped_projection, linear, logits, moe, packed_experts

KERNEL = "sm100"
ROUTES = ("route_topk_logits", "route_hash_logits")
"""Ops whose kernels take fp32."""


@contextlib.contextmanager
def said_to_be_a_b200() -> Iterator[None]:
    """Modules are built as for a GPU of compute capability 10.0, with our experts."""
    with contextlib.ExitStack() as patches:
        for module in (linear, moe, logits, grouped_projection):
            patches.enter_context(mock.patch.object(module, "builds_on_cpu", lambda: False))
        patches.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        capability = mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
        patches.enter_context(capability)
        patches.enter_context(mock.patch.object(packed_experts, "is_chosen", lambda: True))
        yield


def harness_of_a_b200(checkpoint: Path, **arguments: Any) -> Harness:
    """A harness whose model has the modules of a B200's, in the memory of a CPU, over FP8 rows."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

    from sglang_dsv4.models.deepseek_v4 import DeepseekV4ForCausalLM

    build = DeepseekV4ForCausalLM.__init__

    def built(self: DeepseekV4ForCausalLM, config: object, quant_config: object = None, prefix: str = "") -> None:
        with said_to_be_a_b200():
            build(self, config, Fp8Config(True, weight_block_size=[128, 128]), prefix)

    of_model = mock.patch.object(DeepseekV4ForCausalLM, "__init__", built)
    # On a CPU SGLang would arrange FP8 weights for AMX; on a B200 it leaves them as they are for our product.
    arranged = mock.patch.object(Fp8LinearMethod, "process_weights_after_loading", lambda self, layer: None)
    with of_model, arranged:
        return Harness(checkpoint, dtype="bfloat16", kv_cache_dtype="fp8_e4m3", **arguments)


@contextlib.contextmanager
def kernels_of_a_b200(multiprocessors: int = 8, **options: Any) -> Iterator[tuple[Any, dict[str, str]]]:
    """Ops run their kernels for sm_100a in the emulator. Yields the emulated device, and op -> implementation that ran.

    The logits' product stays a CPU's, because its rows are fp32 there.
    """
    choose, used = registry.chosen, {}

    def chosen(op: str, device: torch.device, dtype: torch.dtype, impl: str | None = None) -> registry.Implementation:
        implementations = registry._table[op]
        if KERNEL in implementations and (dtype == torch.bfloat16 or op in ROUTES):
            found = implementations[KERNEL]
        else:
            found = choose(op, device, dtype, impl)
        used[op] = found.name if used.get(op, KERNEL) == KERNEL else used[op]
        return found

    by_name = mock.patch.object(registry, "chosen", chosen)
    with by_name, mock.patch.object(registry, "_resolved", {}), dependent_launch.switched(False):
        with emulated_on(multiprocessors, **options) as device:
            yield device, used
