"""The joint launches of a layer in forwards of few tokens, and their compile jobs (`dsv4_kernels.host.joint_launch`).

    product of the query latent and the KV row | products of compressors and indexer
    product of the queries | product of the indexer's queries
    norm, RoPE and store of queries and window rows | entries and indexer keys | the indexer's queries
    logits of the gate | the shared expert's first product
    choice of experts, then the list of their work | the shared expert's SwiGLU

A layer without entries or indexer lacks their parts; a launch with one part left is the op's own. Products are parts
on Hopper only: Blackwell's FP8 products are launches of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from dsv4_kernels.host import joint_launch
from dsv4_kernels.host.arch import ARCHITECTURES, multiprocessors
from dsv4_kernels.host.joint_launch import MOST_TOKENS, Part
from dsv4_kernels.kv_layout import ROW_DIM
from dsv4_kernels.model_shapes import ModelShapes


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of every joint launch that forwards of `model` make."""
    if arch != ARCHITECTURES["sm90"]:  # Blackwell's FP8 product is a launch of its own
        model = replace(model, fp8_linear_tokens=0)
    every = dict.fromkeys(itertools.chain(_of_attention(model), _of_experts(model)))
    return [partial(joint_launch.compile, parts, arch) for parts in every]


def _of_attention(model: ModelShapes) -> Iterator[tuple[Part, ...]]:
    from dsv4_kernels.compressor import gpu as compressor
    from dsv4_kernels.indexer import query
    from dsv4_kernels.linear import gpu as linear
    from dsv4_kernels.norm_rope_store import gpu as norm_rope_store

    queries = model.attention.heads * ROW_DIM
    for _, dims in model.entry_dims:
        has_indexer = len(dims) > 1
        for latents in _fp8_products(model, model.norm_dims[0] + ROW_DIM):
            yield latents[0], linear.part(True)
        if has_indexer:
            yield from _fp8_products(model, queries, model.index_heads * dims[1])
    for ratio, dims in model.entry_dims:
        rows = norm_rope_store.part(1), compressor.part(dims, ratio)
        yield (*rows, query.part(model.index_fp4)) if len(dims) > 1 else rows


def _of_experts(model: ModelShapes) -> Iterator[tuple[Part, ...]]:
    from dsv4_kernels.linear import gpu as linear
    from dsv4_kernels.moe import gpu as moe
    from dsv4_kernels.router import gpu as router

    for (first,) in _fp8_products(model, 2 * model.shared_channels):
        yield linear.part(True), first
    for configuration in router.configurations(model):
        choice = router.part(configuration)
        if (model.packed_experts or model.nvfp4_experts) and not model.exchanges_rows:
            from dsv4_kernels.moe import work_list

            choice = joint_launch.chain((router.part(configuration, True), work_list.PART))
        yield choice, moe.part(model.quantises_inputs)


def _fp8_products(model: ModelShapes, *rows: int) -> Iterator[tuple[Part, ...]]:
    """The FP8 products with weights of so many rows, of the same tokens, in each plan for few tokens."""
    if not model.fp8_linear_tokens:
        return
    from dsv4_kernels.linear import fp8
    from dsv4_kernels.linear.fp8_plan import TOKENS, chosen, sharing

    resident = multiprocessors(model.attention.device)
    for tokens in (width for width in TOKENS if width <= MOST_TOKENS["sm90"]):
        yield tuple(fp8.part(sharing(chosen(tokens, count, resident))) for count in rows)
