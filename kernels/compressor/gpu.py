"""Compressors on Hopper and Blackwell (sm_90a, sm_100a): one source for both, bound by memory.

    csa.py      entries of CSA layers, main and indexer in one launch    hca.py      entries of HCA layers
    rows.py     raw rows: loads of a group's rows, stores of kept rows   entries.py  norm, RoPE, quantisation

This file has the kernel that keeps the raw rows of a chunk, and the host side.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from dsv4_kernels.compressor import Compression, Groups, csa, hca, rows
from dsv4_kernels.compressor.entries import INDEX_DIM
from dsv4_kernels.compressor.rows import CHUNK, Arguments, Batch, Problem
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host import joint_launch
from dsv4_kernels.host.addresses import address, row_bytes
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.joint_launch import Part
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.kv_layout import ROPE_DIM, ROW_DIM, RowFormat
from dsv4_kernels.model_shapes import ModelShapes

KEPT_TOKENS = 4
"""Tokens of a chunk that one CTA processes when raw rows are kept; most tokens' rows are not kept."""
PACKED = {ROW_DIM: RowFormat.FP8, INDEX_DIM: RowFormat.INDEX_FP4}
"""The byte format of entries, and of indexer keys."""
DIMS = {csa.RATIO: ((ROW_DIM,), (INDEX_DIM,), (ROW_DIM, INDEX_DIM)), hca.RATIO: ((ROW_DIM,),)}
ALIGNMENT = 16


@cute.jit
def launch_keep(
    arguments: Arguments, dims: cutlass.Constexpr[tuple], ratio: cutlass.Constexpr[int], stream: cuda.CUstream
) -> None:
    """Launches one CTA for KEPT_TOKENS tokens."""
    grid = (arguments.batch.num_tokens + KEPT_TOKENS - 1) // KEPT_TOKENS
    keep(arguments, dims, ratio).launch(
        grid=[grid, 1, 1], block=[sum(dims) // CHUNK, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def keep(args: Arguments, dims: cutlass.Constexpr[tuple], ratio: cutlass.Constexpr[int]) -> None:
    """Keeps raw rows of a chunk; a thread has four channels of each half."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    batch, is_index = args.batch, thread >= csa.MAIN_THREADS
    p = Problem(*(cutlass.select_(is_index, b, a) for a, b in zip(args.first, args.second, strict=True)))
    dim, channel = cutlass.select_(is_index, Int32(INDEX_DIM), Int32(dims[0])), thread % csa.MAIN_THREADS * CHUNK
    parts = csa.PARTS if ratio == csa.RATIO else 1
    kept = []
    for i in cutlass.range_constexpr(KEPT_TOKENS):
        token = cta * KEPT_TOKENS + i
        exists = Int32(token < batch.num_tokens)
        overlaps = cutlass.select_(batch.overlap_rows != 0, exists, Int32(0))
        state_row = rows.row_number(batch.state_rows, token, exists)
        overlap_row = rows.row_number(batch.overlap_rows, token, overlaps)
        kept.append((state_row >= 0) | (overlap_row >= 0))
    for i in cutlass.range_constexpr(KEPT_TOKENS):
        if kept[i]:
            raw = rows.load_raw(batch, p, cta * KEPT_TOKENS + i, Int32(1), dim, parts, ratio, channel)
            rows.store_raw(p, raw, dim, channel)


# Host side


def compile(kernel: str, dims: tuple[int, ...], ratio: int, arch: str) -> Callable[..., None]:
    """A compiled launch function, from memory, from disk or from the compiler.

    Args:
        kernel: "entries" (arguments, groups, stream) or "keep" (arguments, stream).
        dims: channels of each compression's entries.
        ratio: tokens of a compression group, the same for all compressions.
        arch: "sm_90a".
    """

    name, config = f"compress_store_{kernel}", (dims, ratio)
    if kernel == "keep":
        return load_launcher(name, config, arch, launch_keep, Arguments, dims, ratio)
    if ratio == csa.RATIO:
        return load_launcher(name, config, arch, csa.launch, Arguments, dims, Int32)
    return load_launcher(name, config, arch, hca.launch, Arguments, Int32)


def ctas_of_group(ratio: int) -> int:
    """CTAs of a group."""
    return hca.CLUSTER if ratio == hca.RATIO else 1


@cache
def part(dims: tuple[int, ...], ratio: int) -> Part:
    """The kernel of entries as a part of a joint launch; arguments as for `compile`."""
    if ratio == hca.RATIO:
        return Part("compress_store_hca", None, Arguments, hca.body, threads=hca.THREADS, cluster=hca.CLUSTER)
    return Part("compress_store_csa", dims, Arguments, csa.body, threads=sum(dims) // CHUNK)


def _check(groups: Groups, compressions: Sequence[Compression]) -> None:
    dims = tuple(c.head_dim for c in compressions)
    if dims not in DIMS.get(groups.ratio, ()):
        raise ValueError(
            f"compress_store: the GPU kernels have entries of {DIMS} channels by ratio; got {dims} and ratio "
            f'{groups.ratio}. The implementation "ref" takes any'
        )
    lists = ("positions", "sources", "entry_positions", "slots", "state_rows", "overlap_rows")
    for name in lists:
        values = getattr(groups, name)
        if values is not None and not values.is_contiguous():
            raise ValueError(f"compress_store: the GPU kernels need contiguous {name}; strides are {values.stride()}")
    if groups.sources.data_ptr() % ALIGNMENT:
        raise ValueError("compress_store: the GPU kernels need sources at a multiple of 16 bytes")
    for c in compressions:
        _check_compression(c, packed=PACKED[c.head_dim])


def _check_compression(c: Compression, packed: RowFormat) -> None:
    constants = {"ape": c.ape, "norm_weight": c.norm_weight, "frequencies": c.frequencies}
    tensors = constants | {"kv": c.kv, "score": c.score, "state": c.state, "overlap": c.overlap}
    for name, values in tensors.items():
        if values is None:
            continue
        inner = values if name in constants else values[:1]  # rows may have gaps between them
        if not inner.is_contiguous() or values.stride(0) * 4 % ALIGNMENT or values.data_ptr() % ALIGNMENT:
            if not (values.dim() == 1 and values.is_contiguous() and values.data_ptr() % ALIGNMENT == 0):
                raise ValueError(
                    f"compress_store: the GPU kernels need {name} with contiguous channels and rows at multiples of "
                    f"{ALIGNMENT} bytes; got {tuple(values.shape)} with strides {values.stride()} at address "
                    f"{values.data_ptr():#x}"
                )
    if len(c.frequencies) != ROPE_DIM // 2 or (c.hadamard and packed is RowFormat.FP8):
        raise ValueError(
            f"compress_store: the GPU kernels rotate {ROPE_DIM} channels and transform indexer keys only; got "
            f"{len(c.frequencies)} frequencies, hadamard {c.hadamard} and {c.head_dim} channels"
        )
    if c.table.format not in (RowFormat.PLAIN, packed) or c.values_of not in (RowFormat.PLAIN, packed):
        raise ValueError(
            f"compress_store: the GPU kernels store {c.head_dim} channels as plain or {packed.value} rows; got "
            f"{c.table.format.value} rows with values of {c.values_of.value}"
        )
    if c.table.format is RowFormat.PLAIN:
        check_rows("compress_store: plain rows", c.table.storage, c.head_dim)
    elif c.table.storage.stride(0) % ALIGNMENT or c.table.storage.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"compress_store: pages of rows must lie at multiples of {ALIGNMENT} bytes; got pages of "
            f"{c.table.storage.stride(0)} bytes at {c.table.storage.data_ptr():#x}"
        )


def _problem(c: Compression) -> Problem:
    return Problem(
        kv=c.kv.data_ptr(),
        kv_row_bytes=stride_bytes(c.kv, 0),
        score=c.score.data_ptr(),
        score_row_bytes=stride_bytes(c.score, 0),
        ape=c.ape.data_ptr(),
        state=c.state.data_ptr(),
        state_row_bytes=stride_bytes(c.state, 0),
        overlap=address(c.overlap),
        overlap_row_bytes=row_bytes(c.overlap),
        weight=c.norm_weight.data_ptr(),
        frequencies=c.frequencies.data_ptr(),
        table=c.table.storage.data_ptr(),
        page_bytes=row_bytes(c.table.storage),
        eps=c.eps,
        is_packed=c.table.format is not RowFormat.PLAIN,
        is_rounded=c.values_of is not RowFormat.PLAIN,
        hadamard=c.hadamard,
    )


def _batch(groups: Groups, num_states: int) -> Batch:
    k = groups.tokens_per_request or 0
    return Batch(
        sources=groups.sources.data_ptr(),
        entry_positions=groups.entry_positions.data_ptr(),
        slots=groups.slots.data_ptr(),
        positions=groups.positions.data_ptr(),
        state_rows=groups.state_rows.data_ptr(),
        overlap_rows=address(groups.overlap_rows),
        num_states=num_states,
        num_tokens=len(groups.positions),
        tokens_per_request=k,
        groups_per_request=max(1, -(-k // groups.ratio)),
    )


def _run(name: str, groups: Groups, compressions: Sequence[Compression], dtype: torch.dtype) -> None:
    _check(groups, compressions)
    problems = [_problem(c) for c in compressions]
    arguments = Arguments(_batch(groups, compressions[0].state.shape[0]), problems[0], problems[-1])
    device: torch.device = groups.positions.device
    arch, stream = architecture(name, device), current_stream(device)
    dims = tuple(c.head_dim for c in compressions)
    count, keeps_apart = len(groups.sources), groups.tokens_per_request is None

    def store_entries() -> None:
        compile("entries", dims, groups.ratio, arch)(arguments, Int32(count), stream)

    if count and keeps_apart:  # before the second launch, which overwrites rows that this one reads
        store_entries()
    elif count:
        inputs = tuple(x for c in compressions for x in (c.kv, c.score))
        ctas = count * ctas_of_group(groups.ratio)
        joint_launch.run(part(dims, groups.ratio), arch, arguments, ctas, stream, inputs, alone=store_entries)
    if keeps_apart and len(groups.positions):
        compile("keep", dims, groups.ratio, arch)(arguments, stream)


def sm90(groups: Groups, compressions: Sequence[Compression], dtype: torch.dtype) -> None:
    """`dsv4_kernels.compressor.compress_store` on Hopper."""
    _run("sm90", groups, compressions, dtype)


def sm100(groups: Groups, compressions: Sequence[Compression], dtype: torch.dtype) -> None:
    """`dsv4_kernels.compressor.compress_store` on Blackwell (B200, GB200, B300); arguments as for `sm90`."""
    _run("sm100", groups, compressions, dtype)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of both kernels for every kind of layer with entries."""
    kernels = ("entries", "keep")
    return [partial(compile, kernel, dims, ratio, arch) for ratio, dims in model.entry_dims for kernel in kernels]
