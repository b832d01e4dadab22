"""Choice of the attention's implementation for a model on a device, and its first calls, before the first request.

The registry decides by device and dtype. It cannot see head_dim: the GPU kernels are written for 512, which every
released model has. A model with another head_dim (a small random one) is served by the reference, and the log says so.

    SGLANG_DSV4_ATTENTION    an implementation by name ("ref", "sm90", "sm100") in place of the choice
"""

from __future__ import annotations

import itertools
import logging
import time

import torch

from dsv4_kernels import attention_calls, registry
from dsv4_kernels.host import compile_cache
from dsv4_kernels.kv_layout import ROW_DIM
from dsv4_kernels.model_shapes import AttentionLayer, AttentionShapes
from sglang_dsv4 import env
from sglang_dsv4.cache.geometry import PoolGeometry, entries_per_page
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, HCA_RATIO, LayerKind

logger = logging.getLogger(__name__)

NAME_VARIABLE = "SGLANG_DSV4_ATTENTION"


def required_implementation(device: torch.device, head_dim: int) -> str | None:
    """Name of the implementation that must be used; None leaves the choice to the registry.

    It is the implementation that the environment names, or on a GPU the reference for a head_dim that no kernel has.
    """
    named = env.text(NAME_VARIABLE)
    if named:
        return named
    return "ref" if device.type == "cuda" and head_dim != ROW_DIM else None


def chosen_implementation(device: torch.device, dtype: torch.dtype, head_dim: int) -> registry.Implementation:
    """The implementation that computes the attention of a model with this head_dim.

    Raises:
        KeyError: the environment names no implementation.
        NotImplementedError: the implementation that it names does not run on this device.
    """
    return registry.chosen("sparse_attention", device, dtype, required_implementation(device, head_dim))


def attention_shapes(
    geometry: PoolGeometry, heads: int, device: torch.device, heads_of_own_rows: int | None = None
) -> AttentionShapes:
    """Arguments of the attention calls that a rank makes.

    Args:
        geometry: of the pools: kinds of layers, and the format of their rows.
        heads: query heads of this rank.
        device: of the model.
        heads_of_own_rows: query heads where a rank attends for its own rows of a prefill; None: it never does.
    """
    layers = tuple(
        AttentionLayer(
            LayerKind(ratio).name,
            lists_entries=ratio == CSA_RATIO,
            entries_per_page=entries_per_page(ratio) if ratio == HCA_RATIO else 0,
        )
        for ratio in sorted(set(geometry.ratios))
    )
    return AttentionShapes(
        layers=layers,
        heads=heads,
        prefill_heads=(heads,) if heads_of_own_rows is None else (heads, heads_of_own_rows),
        row_dim=geometry.row_dim,
        rope_dim=geometry.rope_dim,
        window_tokens=geometry.window_tokens,
        row_format=geometry.row_format,
        dtype=geometry.dtype,
        device=device,
        impl=required_implementation(device, geometry.row_dim),
    )


def make_first_calls(shapes: AttentionShapes) -> None:
    """Call the attention for every kind of layer, in decode and in prefill, on rows of zeros.

    The first request then waits for no compiler, and a kernel that does not run here stops the server at once. Kernels
    that are on disk take milliseconds. With the reference there is nothing to do.

    Raises:
        RuntimeError: a kernel's result is wrong.
    """
    kernel = registry.chosen("sparse_attention", shapes.device, shapes.dtype, shapes.impl).name
    if kernel == "ref":
        if shapes.device.type == "cuda" and shapes.row_dim != ROW_DIM:
            logger.warning(
                "attention by the reference, slowly: the kernels are for head_dim %d, this model has %d",
                ROW_DIM,
                shapes.row_dim,
            )
        return
    begin, known = time.perf_counter(), len(compile_cache.origins())
    kinds = list(itertools.product(shapes.layers, attention_calls.splits()))
    for done, (layer, split_keys) in enumerate(kinds, 1):
        for call in attention_calls.calls(shapes, kernel, layer, split_keys):
            attention_calls.run(call, shapes)
        logger.info(
            "attention kernel %s: %d of %d ready (%s, %s), %.1f s",
            *(kernel, done, len(kinds), layer.kind, "decode" if split_keys else "prefill"),
            time.perf_counter() - begin,
        )
    made = compile_cache.origins()[known:]
    compiled = sum(origin.source == "compiled" for origin in made)
    logger.info(
        "attention kernel %s is ready after %.1f s: %d compiled, %d from disk",
        kernel,
        time.perf_counter() - begin,
        compiled,
        len(made) - compiled,
    )
