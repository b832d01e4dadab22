"""Norm, rotation and storing on Hopper and Blackwell (sm_90a, sm_100a): one kernel, bound by memory.

A warp computes a row of 512 channels: lane l has channels [8 l, 8 l + 8) and [256 + 8 l, 256 + 8 l + 8), two loads of
16 bytes. So blocks 0 to 3 of 64 channels are the first halves of 8 neighbouring lanes each, blocks 4 to 6 the second
halves, and the second halves of lanes 24 to 31 are the rotated channels, a pair a word. Lane l computes cosine and sine
of pair l; lane 24 + i gets cosines and sines of its four pairs from lanes 4 i to 4 i + 3.

The first CTAs make window rows, a warp a token, because these take longest. The other CTAs make queries: a warp has
`heads_a_warp` heads of a token, which share the angles, and issues all their loads before it uses the first. Warps
share nothing and never wait for each other.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from torch import Tensor

from dsv4_kernels.device import bf16_rows as rows_of
from dsv4_kernels.device import dependent_launch, e4m3, ptx
from dsv4_kernels.device.bf16_rows import WARP
from dsv4_kernels.device.joint_kernel import Cta, cta_of_launch
from dsv4_kernels.device.rotation import cosine_and_sine, position_of, turned
from dsv4_kernels.host import joint_launch
from dsv4_kernels.host.addresses import row_bytes
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.joint_launch import Part
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.kv_layout import (
    NOPE_DIM,
    PAGE_ROWS,
    ROPE_DIM,
    ROW_DATA_BYTES,
    ROW_DIM,
    ROW_SCALE_BYTES,
    SCALE_GROUP,
    RowFormat,
)
from dsv4_kernels.model_shapes import ModelShapes
from dsv4_kernels.norm_rope_store import MAX_DESTINATIONS, Destination

WARPS = 4
HALF_BYTES = ROW_DIM  # bytes of half a row in bf16
BLOCK_LANES = SCALE_GROUP // rows_of.CHUNK
ROTATED_LANE = WARP - ROPE_DIM // rows_of.CHUNK
"""The first lane whose second half is rotated."""
FEW_ROWS = 8448
"""If all tokens together have at most this many heads, a warp makes one head: 64 warps on each of 132
multiprocessors."""
HEADS_A_WARP = 4


class Table(NamedTuple):
    """A destination of window rows; addresses are Int64."""

    storage: Int64
    page_bytes: Int64  # from page to page, or from plain row to plain row
    rows: Int64  # int64 [T]; 0: this destination is not used
    is_fp8: Int32


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel. The first `kv_ctas` CTAs make window rows."""

    q: Int64
    q_token_bytes: Int64
    q_head_bytes: Int64
    out: Int64
    out_token_bytes: Int64
    out_head_bytes: Int64
    kv: Int64
    kv_token_bytes: Int64
    kv_weight: Int64  # fp32
    positions: Int64  # int64
    frequencies: Int64  # fp32
    first: Table
    second: Table
    third: Table
    eps: Float32
    qat: Int32
    num_tokens: Int32
    num_heads: Int32
    kv_ctas: Int32


@cute.jit
def launch(arguments: Arguments, heads_a_warp: cutlass.Constexpr[int], num_ctas: Int32, stream: cuda.CUstream) -> None:
    """Launches one warp for each window row, and one for `heads_a_warp` heads of a token."""
    kernel(arguments, heads_a_warp).launch(
        grid=[num_ctas, 1, 1], block=[WARPS * WARP, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def kernel(args: Arguments, heads_a_warp: cutlass.Constexpr[int]) -> None:
    """The kernel of a launch of its own."""
    body(args, heads_a_warp, (), cta_of_launch())


@cute.jit
def body(args: Arguments, heads_a_warp: cutlass.Constexpr[int], prepared: tuple, place: cutlass.Constexpr[Cta]) -> None:
    """Makes the rows of each warp."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    cta = place.number
    lane = thread % WARP
    if cta < args.kv_ctas:
        token = cta * WARPS + thread // WARP
        if token < args.num_tokens:
            store_row(args, token, lane)
    else:
        unit = (cta - args.kv_ctas) * WARPS + thread // WARP
        units_a_token = (args.num_heads + heads_a_warp - 1) // heads_a_warp
        token = unit // units_a_token
        if token < args.num_tokens:
            make_heads(args, token, (unit - token * units_a_token) * heads_a_warp, lane, heads_a_warp)


def turns(args: Arguments, token: Int32, lane: Int32) -> list:
    """(cosine, sine) of the four pairs that a lane rotates; lanes before ROTATED_LANE get values that they do not
    use."""
    frequency = ptx.load_f32(args.frequencies + lane * 4)
    cosine, sine = cosine_and_sine(rows_of.mul(position_of(args.positions + Int64(token) * 8), frequency))
    pairs = []
    for j in range(4):
        source = (4 * lane + j) % WARP  # 4 (lane - ROTATED_LANE) + j
        pairs.append((cute.arch.shuffle_sync(cosine, source), cute.arch.shuffle_sync(sine, source)))
    return pairs


def normed(words: tuple, eps: Float32, weights: Sequence[Float32] | None) -> tuple:
    """A lane's words of a row: `x * rsqrt(mean(x**2) + eps) * weight`, rounded to bf16."""
    values = rows_of.channels(words)
    half = len(values) // 2
    total = rows_of.add(rows_of.sum_of_squares(values[:half]), rows_of.sum_of_squares(values[half:]))
    total = rows_of.sum_over_lanes(total)
    factor = rows_of.reciprocal_root(ptx.fma(total, Float32(1 / ROW_DIM), eps))
    values = [rows_of.mul(value, factor) for value in values]
    if weights is not None:
        values = [rows_of.mul(value, weight) for value, weight in zip(values, weights, strict=True)]
    return rows_of.packed(values)


def rotated(words: tuple, lane: Int32, pairs: list) -> tuple:
    """A lane's words, with the rotated channels turned."""
    rotates = lane >= ROTATED_LANE
    upper = [cutlass.select_(rotates, turned(word, *pair), word) for word, pair in zip(words[4:], pairs, strict=True)]
    return (*words[:4], *upper)


@cute.jit
def make_heads(
    args: Arguments, token: Int32, first_head: Int32, lane: Int32, heads_a_warp: cutlass.Constexpr[int]
) -> None:
    """Norms and rotates heads of one token."""
    q = args.q + Int64(token) * args.q_token_bytes + Int64(first_head) * args.q_head_bytes + lane * 16
    loaded = []
    for i in cutlass.range_constexpr(heads_a_warp):
        row = q + i * args.q_head_bytes
        exists = first_head + i < args.num_heads
        loaded.append((*rows_of.load_words_if(exists, row), *rows_of.load_words_if(exists, row + HALF_BYTES)))
    pairs = turns(args, token, lane)
    out = args.out + Int64(token) * args.out_token_bytes + Int64(first_head) * args.out_head_bytes + lane * 16
    for i in cutlass.range_constexpr(heads_a_warp):
        words = rotated(normed(loaded[i], args.eps, None), lane, pairs)
        if first_head + i < args.num_heads:
            ptx.store_16_bytes(out + i * args.out_head_bytes, words[:4])
            ptx.store_16_bytes(out + i * args.out_head_bytes + HALF_BYTES, words[4:])


@cute.jit
def store_row(args: Arguments, token: Int32, lane: Int32) -> None:
    """Makes one window row and stores it."""
    destinations = (args.first, args.second, args.third)
    numbers = cute.make_rmem_tensor((MAX_DESTINATIONS,), Int64)
    for i in cutlass.range_constexpr(MAX_DESTINATIONS):
        numbers[i] = Int64(-1)
        if destinations[i].rows != 0:
            numbers[i] = rows_of.load_i64(destinations[i].rows + Int64(token) * 8)
    kv = args.kv + Int64(token) * args.kv_token_bytes + lane * 16
    loaded = (*rows_of.load_words(kv), *rows_of.load_words(kv + HALF_BYTES))
    weight = args.kv_weight + lane * 32
    weights = [
        *(*rows_of.load_f32x4(weight), *rows_of.load_f32x4(weight + 16)),
        *(*rows_of.load_f32x4(weight + 2 * HALF_BYTES), *rows_of.load_f32x4(weight + (2 * HALF_BYTES + 16))),
    ]
    words = rotated(normed(loaded, args.eps, weights), lane, turns(args, token, lane))

    values = rows_of.channels(words)
    lower, upper = values[:8], values[8:]
    exponents = [rows_of.max_over_lanes(e4m3.largest(half), BLOCK_LANES) for half in (lower, upper)]
    exponents = [e4m3.scale_exponent(amax) for amax in exponents]
    lower_codes, upper_codes = e4m3.codes(lower, exponents[0]), e4m3.codes(upper, exponents[1])
    # The scales' 8 bytes: one byte from the first lane of each of seven blocks, and a zero.
    block, speaks = lane // BLOCK_LANES, lane % BLOCK_LANES == 0
    nothing = Uint32(0)
    shift = 8 * block
    in_first = cutlass.select_(speaks, exponents[0] << shift, nothing)
    in_second = cutlass.select_(speaks & (lane < ROTATED_LANE), exponents[1] << shift, nothing)
    scales = (cute.arch.warp_redux_sync(in_first, "or"), cute.arch.warp_redux_sync(in_second, "or"))
    kept = plain_words(words, lower_codes, upper_codes, exponents, lane, args.qat != 0)
    for i in cutlass.range_constexpr(MAX_DESTINATIONS):
        if numbers[i] >= 0:
            if destinations[i].is_fp8 != 0:
                store_fp8(destinations[i], numbers[i], lane, lower_codes, upper_codes, words, scales)
            else:
                row = destinations[i].storage + numbers[i] * destinations[i].page_bytes + lane * 16
                ptx.store_16_bytes(row, kept[:4])
                ptx.store_16_bytes(row + HALF_BYTES, kept[4:])


def plain_words(
    words: tuple, lower_codes: tuple, upper_codes: tuple, exponents: list, lane: Int32, qat: cutlass.Boolean
) -> tuple:
    """The words that a plain table stores: the row, or with `qat` the values of its codes."""
    rounded = []
    for codes, exponent in ((lower_codes, exponents[0]), (upper_codes, exponents[1])):
        scale = ptx.scale_pair(exponent)
        for word in codes:
            rounded += ptx.dequantise(word, scale)
    is_code = [qat] * 4 + [qat & (lane < ROTATED_LANE)] * 4
    return tuple(cutlass.select_(test, a, b) for test, a, b in zip(is_code, rounded, words, strict=True))


@cute.jit
def store_fp8(
    table: Table, number: Int64, lane: Int32, lower_codes: tuple, upper_codes: tuple, words: tuple, scales: tuple
) -> None:
    """Writes a row of 584 bytes."""
    page = table.storage + (number // PAGE_ROWS) * table.page_bytes
    place = number % PAGE_ROWS
    row = page + place * ROW_DATA_BYTES
    rows_of.store_8_bytes(row + lane * 8, lower_codes)
    if lane < ROTATED_LANE:
        rows_of.store_8_bytes(row + (NOPE_DIM // 2 + 32) + lane * 8, upper_codes)
    else:
        ptx.store_16_bytes(row + NOPE_DIM + (lane - ROTATED_LANE) * 16, words[4:])
    if lane == 0:
        rows_of.store_8_bytes(page + PAGE_ROWS * ROW_DATA_BYTES + place * ROW_SCALE_BYTES, scales)


# Host side


def compile(heads_a_warp: int, arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, CTAs, stream)."""

    return load_launcher(
        "norm_rope_store", f"{heads_a_warp} heads a warp", arch, launch, Arguments, heads_a_warp, Int32
    )


@cache
def part(heads_a_warp: int) -> Part:
    """The kernel as a part of a joint launch."""
    return Part("norm_rope_store", heads_a_warp, Arguments, body, threads=WARPS * WARP)


def _table(destination: Destination) -> Table:
    table, rows = destination
    if table.format is RowFormat.PLAIN:
        check_rows("norm_rope_store: plain rows", table.storage, ROW_DIM)
    elif table.storage.stride(0) % 16 or table.storage.data_ptr() % 16:
        raise ValueError(
            f"norm_rope_store: pages of FP8 rows must lie at multiples of 16 bytes; got pages of "
            f"{table.storage.stride(0)} bytes at {table.storage.data_ptr():#x}"
        )
    return Table(
        storage=table.storage.data_ptr(),
        page_bytes=row_bytes(table.storage),
        rows=rows.data_ptr(),
        is_fp8=table.format is RowFormat.FP8,
    )


def _run(
    name: str,
    q: Tensor,
    kv: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    eps: float,
    destinations: Sequence[Destination],
    qat: bool,
    out: Tensor,
) -> None:
    for what, rows in (("q", q), ("kv", kv), ("out", out)):
        check_rows(f"norm_rope_store: {what}", rows, ROW_DIM)
    constants = {"kv_weight": (kv_weight, ROW_DIM), "frequencies": (frequencies, ROPE_DIM // 2)}
    for what, (values, length) in constants.items():
        if values.shape != (length,) or values.dtype != torch.float32 or not values.is_contiguous():
            raise ValueError(
                f"norm_rope_store: the GPU kernel needs {what} [{length}] torch.float32, contiguous; got "
                f"{tuple(values.shape)} {values.dtype}"
            )
    tokens, heads, _ = q.shape
    heads_a_warp = 1 if tokens * heads <= FEW_ROWS else HEADS_A_WARP
    lists = [positions, *(destination.rows for destination in destinations)]
    if not all(values.is_contiguous() for values in lists):
        raise ValueError("norm_rope_store: the GPU kernel needs contiguous positions and rows of destinations")
    tables = [_table(destination) for destination in destinations]
    nowhere = Table(0, 0, 0, 0)
    tables += [nowhere] * (MAX_DESTINATIONS - len(tables))
    kv_ctas = -(-tokens // WARPS)
    arguments = Arguments(
        q=q.data_ptr(),
        q_token_bytes=stride_bytes(q, 0),
        q_head_bytes=stride_bytes(q, 1),
        out=out.data_ptr(),
        out_token_bytes=stride_bytes(out, 0),
        out_head_bytes=stride_bytes(out, 1),
        kv=kv.data_ptr(),
        kv_token_bytes=stride_bytes(kv, 0),
        kv_weight=kv_weight.data_ptr(),
        positions=positions.data_ptr(),
        frequencies=frequencies.data_ptr(),
        first=tables[0],
        second=tables[1],
        third=tables[2],
        eps=eps,
        qat=qat,
        num_tokens=tokens,
        num_heads=heads,
        kv_ctas=kv_ctas,
    )
    num_ctas = kv_ctas + -(-tokens * -(-heads // heads_a_warp) // WARPS)
    arch, stream = architecture(name, q.device), current_stream(q.device)
    inputs = q, kv, positions, *(destination.rows for destination in destinations)
    joint_launch.run(
        part(heads_a_warp),
        arch,
        arguments,
        num_ctas,
        stream,
        inputs,
        lambda: compile(heads_a_warp, arch)(arguments, Int32(num_ctas), stream),
    )


def sm90(*arguments: object) -> None:
    """`dsv4_kernels.norm_rope_store.norm_rope_store` on Hopper; writes all of `out`."""
    _run("sm90", *arguments)


def sm100(*arguments: object) -> None:
    """`dsv4_kernels.norm_rope_store.norm_rope_store` on Blackwell (B200, GB200, B300); arguments as for `sm90`."""
    _run("sm100", *arguments)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs for one head a warp and for HEADS_A_WARP, between which the number of rows decides."""
    return [partial(compile, heads_a_warp, arch) for heads_a_warp in (1, HEADS_A_WARP)]
