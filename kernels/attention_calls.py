"""Sample attention calls that run every kernel a model's forwards may run, and the compile jobs found by making them.

Which kernel a call runs depends on its tokens, the widths of its lists, heads and multiprocessors, in ways that only
the attention's host code knows. So compile jobs are found by making a call of each kind, on rows of zeros, and noting
the kernels that are missing. A large prefill chunk over FP8 rows first unpacks them and then attends to bf16 rows
(`dsv4_kernels.sparse_attention.unpacking`): calls with unpacked rows are included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from dsv4_kernels import registry
from dsv4_kernels.host import compile_cache
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.model_shapes import AttentionLayer, AttentionShapes, ModelShapes
from dsv4_kernels.sparse_attention import sparse_attention, unpacking
from dsv4_kernels.sparse_attention.split import DECODE_SPLIT_KEYS
from dsv4_kernels.unpack import Pages, unpack_pages

LIST_ENTRIES = (512, 2 * DECODE_SPLIT_KEYS)
PAGE_TABLE_ENTRIES = (128, 512, 2 * DECODE_SPLIT_KEYS)
"""Entries that a list or a page table has room for: few, some, and enough for several KV splits."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 512)
"""Numbers of tokens of the calls. Hopper's kernel has variants that divide keys and channels among CTAs, chosen by the
number of tokens and the width of their lists; the bits are the same."""
ROWS = 64
"""Rows of a call's tables."""


class Call(NamedTuple):
    """Arguments of one call: each token reads one window row and, if `entries` is not 0, one entry."""

    layer: AttentionLayer
    heads: int
    split_keys: int | None
    entries: int
    """Entries that a token's list or page table has room for."""
    tokens: int
    unpacked: bool
    """Whether the rows were unpacked from FP8 rows."""


def splits() -> tuple[int | None, ...]:
    """`split_keys` of decode and of prefill, or the one value that both use where batch invariance is required."""
    return (DECODE_SPLIT_KEYS,) if registry.requires_batch_invariance() else (DECODE_SPLIT_KEYS, None)


def calls(shapes: AttentionShapes, kernel: str, layer: AttentionLayer, split_keys: int | None) -> Iterator[Call]:
    """The calls of one kind of layer, in decode or in prefill.

    Args:
        shapes: of the model's attention.
        kernel: name of the attention's implementation.
        layer: one of `shapes.layers`.
        split_keys: one of `splits()`.
    """
    is_prefill = split_keys == splits()[-1]
    numbers_of_heads = shapes.prefill_heads if is_prefill else (shapes.heads,)
    for heads, entries, tokens in itertools.product(numbers_of_heads, _entries(layer), TOKENS):
        yield Call(layer, heads, split_keys, entries, tokens, False)
        if is_prefill and unpacking.helps(kernel) and may_unpack(shapes, entries, tokens):
            yield Call(layer, heads, split_keys, entries, tokens, True)


def _entries(layer: AttentionLayer) -> tuple[int, ...]:
    if layer.lists_entries:
        return LIST_ENTRIES
    return PAGE_TABLE_ENTRIES if layer.entries_per_page else (0,)


def may_unpack(shapes: AttentionShapes, entries: int, tokens: int) -> bool:
    """Whether a chunk of `tokens` tokens, each of which reads up to `entries` entries, may unpack its rows.

    Each token adds one window row; the number of rows of entries depends on the context and is not counted.
    """
    if shapes.row_format is not RowFormat.FP8:
        return False
    return unpacking.pays(tokens, tokens * (shapes.window_tokens + entries), shapes.heads)


def run(call: Call, shapes: AttentionShapes) -> None:
    """Makes a call on rows of zeros, which are unpacked from FP8 rows if `call.unpacked`.

    Raises:
        RuntimeError: the result is not zero.
    """
    table = _zeros(shapes)
    if call.unpacked:
        out = torch.empty(ROWS, shapes.row_dim, dtype=torch.bfloat16, device=shapes.device)
        (table,) = unpack_pages([Pages(table, torch.zeros(1, dtype=torch.int32, device=shapes.device), ROWS)], out)
    _attend(call, shapes, table)


def _zeros(shapes: AttentionShapes) -> KVRows:
    dims = shapes.row_dim, shapes.rope_dim
    return KVRows.allocate(ROWS, shapes.row_format, *dims, shapes.dtype, shapes.device, fill=0.0)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of the attention kernels that are neither in memory nor on disk.

    Every call is made; a missing kernel ends the call instead of being compiled. A missing kernel that `_COMPILE` does
    not list is left to the first real call.
    """
    shapes = model.attention
    found: dict[tuple[str, Hashable], Callable[[], object]] = {}
    with compile_cache.only_stored():
        for call in _all_calls(shapes):
            as_read = replace(shapes, row_format=RowFormat.PLAIN, dtype=torch.bfloat16) if call.unpacked else shapes
            try:
                _attend(call, shapes, _zeros(as_read))
            except compile_cache.KernelMissing as missing:
                if missing.name in _COMPILE:
                    found[missing.name, missing.config] = _COMPILE[missing.name](missing.config, missing.arch)
    return list(found.values())


def unpack_compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """The compile job of `unpack_pages`; none if no call of the model's attention reads unpacked rows."""
    from dsv4_kernels.unpack import gpu

    return [partial(gpu.compile, arch)] if any(call.unpacked for call in _all_calls(model.attention)) else []


def _all_calls(shapes: AttentionShapes) -> Iterator[Call]:
    kernel = registry.chosen("sparse_attention", shapes.device, shapes.dtype, shapes.impl).name
    for layer, split_keys in itertools.product(shapes.layers, splits()):
        yield from calls(shapes, kernel, layer, split_keys)


def _sm90(config: Hashable, arch: str) -> Callable[[], object]:
    from dsv4_kernels.sparse_attention.sm90 import launch

    return partial(launch.compile, config)


def _sm100(config: Hashable, arch: str) -> Callable[[], object]:
    from dsv4_kernels.sparse_attention.sm100 import launch

    return partial(launch.compile, config, arch)


_COMPILE = {"sparse_attention_sm90": _sm90, "sparse_attention_sm100": _sm100}
"""Name of a kernel in the compile cache -> its compile job."""


def _attend(call: Call, shapes: AttentionShapes, table: KVRows) -> None:
    layer, heads, split_keys, entries, tokens, _ = call

    def filled(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=shapes.device)

    arguments: dict[str, object] = {}
    if entries:
        arguments = {"entries": table, "visible": filled(tokens, value=1)}
    if layer.lists_entries:
        arguments["entry_indices"] = filled(tokens, entries)
    elif layer.entries_per_page:
        pages = filled(1, entries // layer.entries_per_page)
        arguments |= {"page_table": pages, "token_to_request": filled(tokens)}
        arguments["entries_per_page"] = layer.entries_per_page
    out = sparse_attention(
        torch.zeros(tokens, heads, shapes.row_dim, dtype=shapes.dtype, device=shapes.device),
        table,
        torch.cat([filled(tokens, shapes.window_tokens - 1, value=-1), filled(tokens, 1)], 1),
        sink=torch.zeros(heads, device=shapes.device),
        scale=1.0,
        split_keys=split_keys,
        impl=shapes.impl,
        **arguments,
    )
    if out.any():
        raise RuntimeError(f"the attention of zeros ({layer.kind}, split_keys {split_keys}) is not zero")
