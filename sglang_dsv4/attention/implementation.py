"""Which implementation of the attention serves a model on a device, and its compilation before the first request.

A large prefill chunk over FP8 rows has them unpacked and attends to bf16 rows (`dsv4_kernels.unpack.choice`): that is
compiled, too.

The registry decides by device and dtype. What it cannot see is the head_dim: the GPU kernels are written for 512, which
every released model has; a model of another one (a small random one) is served by the reference, and the log says so.

    SGLANG_DSV4_ATTENTION    an implementation by name ("ref", "sm90", "sm100") in place of the choice
"""

from __future__ import annotations

import itertools
import logging
import os
import time

import torch

from dsv4_kernels import compile_cache, registry
from dsv4_kernels.kv_layout import ROW_DIM, KVRows, RowFormat
from dsv4_kernels.sparse_attention import sparse_attention
from dsv4_kernels.sparse_attention.split import DECODE_SPLIT_KEYS
from dsv4_kernels.unpack import Pages, choice, unpack_pages
from sglang_dsv4.cache.geometry import PoolGeometry, entries_per_page
from sglang_dsv4.layer_kinds import CSA_RATIO, HCA_RATIO, SWA_RATIO, LayerKind

logger = logging.getLogger(__name__)

NAME_VARIABLE = "SGLANG_DSV4_ATTENTION"
COMPILED_ENTRIES = {
    SWA_RATIO: (0,),
    CSA_RATIO: (512, 2 * DECODE_SPLIT_KEYS),
    HCA_RATIO: (128, 512, 2 * DECODE_SPLIT_KEYS),
}
"""Entries that lists or page tables have room for in the calls that compile: few, some, and several parts of them."""
COMPILED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 512)
"""Hopper's kernel has variants that divide keys and channels among CTAs, by how many tokens there are and how wide
their lists; the bits are the same."""


def required_implementation(device: torch.device, head_dim: int) -> str | None:
    """Name of the implementation that must be taken; None leaves the choice to the registry.

    The environment's, or on a GPU the reference for a head_dim that no kernel has.
    """
    named = os.environ.get(NAME_VARIABLE, "").strip()
    if named:
        return named
    return "ref" if device.type == "cuda" and head_dim != ROW_DIM else None


def chosen_implementation(device: torch.device, dtype: torch.dtype, head_dim: int) -> registry.Implementation:
    """What will compute the attention of a model with this head_dim.

    Raises:
        KeyError, NotImplementedError: the name in the environment is none, or does not run on this device.
    """
    return registry.chosen("sparse_attention", device, dtype, required_implementation(device, head_dim))


def compile_ahead(geometry: PoolGeometry, heads: int, device: torch.device) -> None:
    """Call the attention for every kind of layer, in decode and in prefill, on rows of zeros.

    So the first request does not wait for a compiler, and a kernel that does not run here stops the server at once.
    Kernels that are on disk already take milliseconds. With the reference there is nothing to do.

    Args:
        geometry: of the pools; says which kinds of layers there are and how rows are stored.
        heads: of this rank.
    """
    chosen = chosen_implementation(device, geometry.dtype, geometry.row_dim)
    if chosen.name == "ref":
        if device.type == "cuda" and geometry.row_dim != ROW_DIM:
            logger.warning(
                "attention by the reference, slowly: the kernels are for head_dim %d, this model has %d",
                ROW_DIM,
                geometry.row_dim,
            )
        return
    splits = (DECODE_SPLIT_KEYS,) if registry.requires_batch_invariance() else (DECODE_SPLIT_KEYS, None)
    prefill_split = splits[-1]
    todo = [(ratio, split) for ratio in sorted(set(geometry.ratios)) for split in splits]
    begin, known = time.perf_counter(), len(compile_cache.origins())
    for done, (ratio, split_keys) in enumerate(todo, 1):
        what = f"{LayerKind(ratio).name}, {'prefill' if split_keys is None else 'decode'}"
        for entries, tokens in itertools.product(COMPILED_ENTRIES[ratio], COMPILED_TOKENS):
            _call_once(geometry, heads, device, ratio, split_keys, entries, tokens, False)
            if (
                split_keys == prefill_split
                and choice.helps(chosen.name)
                and may_unpack(geometry, heads, entries, tokens)
            ):
                _call_once(geometry, heads, device, ratio, split_keys, entries, tokens, True)
        logger.info(
            "attention kernel %s: %d of %d ready (%s), %.1f s", chosen.name, done, len(todo), what, _since(begin)
        )
    made = compile_cache.origins()[known:]
    compiled = sum(origin.source == "compiled" for origin in made)
    logger.info(
        "attention kernel %s is ready after %.1f s: %d compiled, %d from disk",
        chosen.name,
        _since(begin),
        compiled,
        len(made) - compiled,
    )


def may_unpack(geometry: PoolGeometry, heads: int, entries: int, tokens: int) -> bool:
    """Whether a chunk of so many tokens, which read at most so many entries each, can be one that unpacks its rows.

    Each token brings a window row of its own; how many rows of entries there are depends on the context.
    """
    if geometry.row_format is not RowFormat.FP8:
        return False
    return choice.pays(tokens, tokens * (geometry.window_tokens + entries), heads)


def _since(begin: float) -> float:
    return time.perf_counter() - begin


def _call_once(
    geometry: PoolGeometry,
    heads: int,
    device: torch.device,
    ratio: int,
    split_keys: int | None,
    entries: int,
    tokens: int,
    unpacked: bool,
) -> None:
    """Tokens that read one window row each, and one of so many entries if there are any; from FP8 rows, or unpacked."""

    def filled(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    rows = KVRows.allocate(64, geometry.row_format, geometry.row_dim, geometry.rope_dim, geometry.dtype, device, 0.0)
    if unpacked:
        out = torch.empty(64, geometry.row_dim, dtype=torch.bfloat16, device=device)
        (rows,) = unpack_pages([Pages(rows, filled(1), 64)], out)
    arguments: dict[str, object] = {}
    if ratio:
        arguments = {"entries": rows, "visible": filled(tokens, value=1)}
    if ratio == CSA_RATIO:
        arguments["entry_indices"] = filled(tokens, entries)
    elif ratio == HCA_RATIO:
        of_page = entries_per_page(HCA_RATIO)
        arguments |= {"page_table": filled(1, entries // of_page), "token_to_request": filled(tokens)}
        arguments["entries_per_page"] = of_page
    out = sparse_attention(
        torch.zeros(tokens, heads, geometry.row_dim, dtype=geometry.dtype, device=device),
        rows,
        torch.cat([filled(tokens, geometry.window_tokens - 1, value=-1), filled(tokens, 1)], 1),
        sink=torch.zeros(heads, device=device),
        scale=1.0,
        split_keys=split_keys,
        impl=required_implementation(device, geometry.row_dim),
        **arguments,
    )
    if out.any():
        raise RuntimeError(f"the attention of zeros ({LayerKind(ratio).name}, split_keys {split_keys}) is not zero")
