"""Raw rows of a compressor on a GPU: loads of a compression group's rows, and stores of the rows that a forward keeps.

A thread has four neighbouring channels (CHUNK) of all rows that it reads, 16 bytes of kv and 16 of the score, and it
loads all of them before it uses the first.

Reading and keeping in one launch. A request's raw rows are a ring: position p is in ring row p % S. A group that ends
at p reads positions [p - (C r - 1), p]; the state has the positions before t, the forward's first position. The raw
rows of the k new tokens are kept in ring rows [t, t + k) % S. A ring row that is both read and written has a position q
< t that is read and a position w < t + k that is kept, with w - q a multiple of S. A group that closes has p >= t, so

    w - q  <=  (t + k - 1) - (p - C r + 1)  <=  C r - 2 + k  <=  S

(the states are laid out so that the last inequality holds: if only the first of the k tokens is accepted, the next step
begins at t + 1 and may read positions from t + 2 - C r on, which the k tokens must not have overwritten). So the only
case is w - q = S, which needs p = t, w the last of the k positions and q the first position of the group that t closes.
That group is the earliest of its request; therefore its CTA, and no other, keeps the request's tokens, and the thread
that writes a channel has read it before: in a CSA layer the same thread, in an HCA layer threads of the same CTA after
a barrier. A prefill chunk has too many tokens for this. A second launch, after the entries, keeps its raw rows.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from dsv4_kernels.device import ptx
from dsv4_kernels.device.bf16_rows import add, load_f32x4, mul

CHUNK = 4
"""Channels in 16 bytes."""
LOG2_E = 1.4426950408889634
NOTHING = float("-inf")
"""The score of a source that does not exist."""


class Batch(NamedTuple):
    """`Groups` in the form that kernels read; addresses are Int64."""

    sources: Int64  # int32
    entry_positions: Int64  # int64, as all lists of rows and positions
    slots: Int64
    positions: Int64
    state_rows: Int64
    overlap_rows: Int64  # 0: none
    num_states: Int32
    num_tokens: Int32
    tokens_per_request: Int32  # 0: this launch keeps no rows
    groups_per_request: Int32


class Problem(NamedTuple):
    """`Compression` in the form that kernels read; addresses are Int64."""

    kv: Int64
    kv_row_bytes: Int64
    score: Int64
    score_row_bytes: Int64
    ape: Int64
    state: Int64
    state_row_bytes: Int64
    overlap: Int64
    overlap_row_bytes: Int64
    weight: Int64
    frequencies: Int64
    table: Int64
    page_bytes: Int64  # from page to page, or from plain row to plain row
    eps: Float32
    is_packed: Int32  # whether the table has a byte format: FP8, or FP4 for an indexer's keys
    is_rounded: Int32  # whether a plain table gets the values that the byte format would represent
    hadamard: Int32


class Arguments(NamedTuple):
    """Dynamic arguments of all kernels; a single compression is passed twice."""

    batch: Batch
    first: Problem
    second: Problem


class Loaded(NamedTuple):
    """Four channels of one row of a group."""

    exists: Boolean
    kv: tuple
    score: tuple
    ape: tuple


def load_row(batch: Batch, p: Problem, source: Int32, place: Int32 | int, width: Int32 | int, channel: Int32) -> Loaded:
    """Four channels, from `channel` of [0, width) on, of the row that a source names.

    A negative source reads nothing. Rows of the state already contain the positional term.

    Args:
        batch, p: arguments of the kernel.
        source: -1: none; s < num_states: row of the state; otherwise token s - num_states.
        place: position of the row modulo ratio.
        width: channels of a row.
        channel: the first channel.
    """
    token = source - batch.num_states
    in_state = token < 0
    row = p.state + Int64(source) * p.state_row_bytes
    kv = cutlass.select_(in_state, row, p.kv + Int64(token) * p.kv_row_bytes) + channel * 4
    score = cutlass.select_(in_state, row + width * 4, p.score + Int64(token) * p.score_row_bytes) + channel * 4
    ape = p.ape + (place * width + channel) * 4
    return Loaded(
        source >= 0,
        ptx.load_or_zeros(Float32, CHUNK, kv, source, "ge.s32"),
        ptx.load_or_zeros(Float32, CHUNK, score, source, "ge.s32"),
        ptx.load_or_zeros(Float32, CHUNK, ape, token, "ge.s32", cache=""),
    )


def scores_of(row: Loaded) -> list:
    """The scores with the positional term, rounded as in the state; -inf for a row that does not exist."""
    made = [add(score, ape) for score, ape in zip(row.score, row.ape, strict=True)]
    return [cutlass.select_(row.exists, score, Float32(NOTHING)) for score in made]


def finite(maximum: Float32) -> Float32:
    """The number to subtract from scores with this maximum: the maximum, or 0 if there are no scores."""
    return cutlass.select_(maximum == Float32(NOTHING), Float32(0.0), maximum)


def weight_of(score: Float32, maximum: Float32) -> Float32:
    """e**(score - maximum); its error, relative to the largest weight, is below 2**-21."""
    return ptx.exp2(mul(add(score, -maximum), Float32(LOG2_E)))


def largest(scores: list) -> list:
    """The maximum over rows: [rows][4] -> [4]."""
    found = scores[0]
    for row in scores[1:]:
        found = [ptx.fmax(a, b) for a, b in zip(found, row, strict=True)]
    return found


def weighted(rows: list, scores: list, maxima: list) -> tuple:
    """Sums of the weights, and of the weights times kv, added in the order of the rows: two lists of four channels."""
    totals, sums = [], []
    for i in range(CHUNK):
        top = finite(maxima[i])
        weights = [weight_of(score[i], top) for score in scores]
        total, weighted_sum = weights[0], mul(weights[0], rows[0].kv[i])
        for weight, row in zip(weights[1:], rows[1:], strict=True):
            total, weighted_sum = add(total, weight), ptx.fma(weight, row.kv[i], weighted_sum)
        totals.append(total)
        sums.append(weighted_sum)
    return totals, sums


class Raw(NamedTuple):
    """Four channels of each half of a token's raw row, and the rows that keep it."""

    kv: list
    score: list
    ape: list
    state_row: Int64
    overlap_row: Int64


def row_number(rows: Int64, token: Int32, exists: Int32) -> Int64:
    """An element of an int64 list; -1 if `exists` is 0."""
    return ptx.asm(
        "{\n.reg .pred p;\nsetp.ne.s32 p, {$r1}, 0;\nmov.b64 {$w0}, -1;\n@p ld.global.b64 {$w0}, [{$r0}];\n}",
        [Int64],
        rows + Int64(token) * 8,
        exists,
    )


def load_raw(
    batch: Batch, p: Problem, token: Int32, exists: Int32, dim: Int32 | int, parts: int, ratio: int, channel: Int32
) -> Raw:
    """The raw row of a token, for `store_raw`; nothing is read if `exists` is 0."""
    width = parts * dim
    place = ptx.load_or_zeros(Int32, 1, batch.positions + Int64(token) * 8, exists, cache="") & (ratio - 1)
    overlaps = cutlass.select_(batch.overlap_rows != 0, exists, Int32(0))
    raw = Raw([], [], [], row_number(batch.state_rows, token, exists), row_number(batch.overlap_rows, token, overlaps))
    for part in range(parts):
        offset = (part * dim + channel) * 4
        kv = p.kv + Int64(token) * p.kv_row_bytes + offset
        score = p.score + Int64(token) * p.score_row_bytes + offset
        raw.kv.append(ptx.load_or_zeros(Float32, CHUNK, kv, exists))
        raw.score.append(ptx.load_or_zeros(Float32, CHUNK, score, exists))
        raw.ape.append(ptx.load_or_zeros(Float32, CHUNK, p.ape + place * (width * 4) + offset, exists, cache=""))
    return raw


@cute.jit
def store_raw(p: Problem, raw: Raw, dim: Int32 | int, channel: Int32) -> None:
    """Stores a raw row to the state and to the overlap table, to each only if its row number is not negative."""
    scores = [[add(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(raw.score, raw.ape, strict=True)]
    if raw.state_row >= 0:
        row = p.state + raw.state_row * p.state_row_bytes + channel * 4
        for part in cutlass.range_constexpr(len(scores)):
            ptx.store_f32x4(row + part * dim * 4, tuple(raw.kv[part]))
            ptx.store_f32x4(row + (len(scores) + part) * dim * 4, tuple(scores[part]))
    if raw.overlap_row >= 0:
        row = p.overlap + raw.overlap_row * p.overlap_row_bytes + channel * 4
        ptx.store_f32x4(row, tuple(raw.kv[0]))
        ptx.store_f32x4(row + dim * 4, tuple(scores[0]))


def weights_of(p: Problem, channel: Int32) -> tuple:
    """Four channels of the norm's weight."""
    return load_f32x4(p.weight + channel * 4)
