"""Which implementation of the attention serves a model on a device, and its compilation before the first request.

A large prefill chunk over FP8 rows has them unpacked and attends to bf16 rows (`sparse_attention.unpacking`): that is
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
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from dsv4_kernels import registry
from dsv4_kernels.host import compile_cache
from dsv4_kernels.kv_layout import ROW_DIM, KVRows, RowFormat
from dsv4_kernels.sparse_attention import sparse_attention, unpacking
from dsv4_kernels.sparse_attention.split import DECODE_SPLIT_KEYS
from dsv4_kernels.unpack import Pages, unpack_pages
from sglang_dsv4.cache.geometry import PoolGeometry, entries_per_page
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, HCA_RATIO, SWA_RATIO, LayerKind

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
    begin, known = time.perf_counter(), len(compile_cache.origins())
    kinds = _kinds(geometry)
    for done, kind in enumerate(kinds, 1):
        for call in _calls(geometry, heads, chosen.name, *kind):
            _call_once(call, _rows(geometry, device, call.unpacked), geometry, heads, device)
        logger.info(
            "attention kernel %s: %d of %d ready (%s, %s), %.1f s",
            *(chosen.name, done, len(kinds), LayerKind(kind[0]).name, "decode" if kind[1] else "prefill"),
            time.perf_counter() - begin,
        )
    made = compile_cache.origins()[known:]
    compiled = sum(origin.source == "compiled" for origin in made)
    logger.info(
        "attention kernel %s is ready after %.1f s: %d compiled, %d from disk",
        chosen.name,
        time.perf_counter() - begin,
        compiled,
        len(made) - compiled,
    )


def missing_kernels(geometry: PoolGeometry, heads: int, device: torch.device) -> list[Callable[[], object]]:
    """What compiles the kernels of `compile_ahead` that are not on disk, so that others can do it before.

    Which ones a call needs depends on heads and multiprocessors in ways that only it knows: so all calls are made, each
    as far as its kernel is there. A kernel that is not in the table below is left to `compile_ahead`.
    """
    chosen = chosen_implementation(device, geometry.dtype, geometry.row_dim)
    found: dict[tuple[str, Hashable], Callable[[], object]] = {}
    if chosen.name == "ref":
        return []

    def note(missing: compile_cache.KernelMissing) -> None:
        make = _COMPILE.get(missing.name)
        if make is not None:
            found[missing.name, missing.config] = make(missing.config, missing.arch)

    with compile_cache.only_stored():
        for call in itertools.chain(*(_calls(geometry, heads, chosen.name, *kind) for kind in _kinds(geometry))):
            try:
                rows = _rows(geometry, device, call.unpacked)
            except compile_cache.KernelMissing as missing:
                note(missing)
                rows = KVRows.allocate(
                    64, RowFormat.PLAIN, geometry.row_dim, geometry.rope_dim, torch.bfloat16, device, 0.0
                )
            try:
                _call_once(call, rows, geometry, heads, device)
            except compile_cache.KernelMissing as missing:
                note(missing)
    return list(found.values())


def _sm90(config: Hashable, arch: str) -> Callable[[], object]:
    from dsv4_kernels.sparse_attention.sm90 import launch

    return partial(launch.compile, config)


def _sm100(config: Hashable, arch: str) -> Callable[[], object]:
    from dsv4_kernels.sparse_attention.sm100 import launch

    return partial(launch.compile, config, arch)


def _unpack(config: Hashable, arch: str) -> Callable[[], object]:
    from dsv4_kernels.unpack import gpu

    return partial(gpu.compile, arch)


_COMPILE = {"sparse_attention_sm90": _sm90, "sparse_attention_sm100": _sm100, "unpack_pages": _unpack}


class _Call(NamedTuple):
    """Tokens that read one window row each, and one of so many entries if there are any; from FP8 rows, or unpacked."""

    ratio: int
    split_keys: int | None
    entries: int
    tokens: int
    unpacked: bool


def _kinds(geometry: PoolGeometry) -> list[tuple[int, int | None]]:
    """(ratio, split_keys) of every kind of layer, in decode and in prefill."""
    return list(itertools.product(sorted(set(geometry.ratios)), _splits()))


def _splits() -> tuple[int | None, ...]:
    """Of decode and of prefill; one where both divide keys alike."""
    return (DECODE_SPLIT_KEYS,) if registry.requires_batch_invariance() else (DECODE_SPLIT_KEYS, None)


def _calls(geometry: PoolGeometry, heads: int, kernel: str, ratio: int, split_keys: int | None) -> Iterator[_Call]:
    may_be_unpacked = split_keys == _splits()[-1] and unpacking.helps(kernel)
    for entries, tokens in itertools.product(COMPILED_ENTRIES[ratio], COMPILED_TOKENS):
        yield _Call(ratio, split_keys, entries, tokens, False)
        if may_be_unpacked and may_unpack(geometry, heads, entries, tokens):
            yield _Call(ratio, split_keys, entries, tokens, True)


def may_unpack(geometry: PoolGeometry, heads: int, entries: int, tokens: int) -> bool:
    """Whether a chunk of so many tokens, which read at most so many entries each, can be one that unpacks its rows.

    Each token brings a window row of its own; how many rows of entries there are depends on the context.
    """
    if geometry.row_format is not RowFormat.FP8:
        return False
    return unpacking.pays(tokens, tokens * (geometry.window_tokens + entries), heads)


def _rows(geometry: PoolGeometry, device: torch.device, unpacked: bool) -> KVRows:
    """Zeros, as the pools store them, or unpacked from there."""
    rows = KVRows.allocate(64, geometry.row_format, geometry.row_dim, geometry.rope_dim, geometry.dtype, device, 0.0)
    if unpacked:
        out = torch.empty(64, geometry.row_dim, dtype=torch.bfloat16, device=device)
        (rows,) = unpack_pages([Pages(rows, torch.zeros(1, dtype=torch.int32, device=device), 64)], out)
    return rows


def _call_once(call: _Call, rows: KVRows, geometry: PoolGeometry, heads: int, device: torch.device) -> None:
    ratio, split_keys, entries, tokens, _ = call

    def filled(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

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
