"""Products of few tokens with an FP8 weight (sm_90a, sm_100a): the first half of the grouped output projection.

The weight is read as the checkpoint stores it, e4m3 with a power of two for each block of 128 x 128, and becomes bf16
in registers without rounding, so the operands are those of the bf16 product. Instructions, the 16 channels of each and
the order of all sums are those of `linear.kernel`, and so are the bits: a quarter of K (a segment) in one accumulator,
quarters added in order. Only within an instruction channels are in another order (see `sum_stage`), which changes no
bit on the hardware. The fused operations save launches and change no bit either: x may be rotated back, the result
quantised.

The kernel is bound by memory, so all multiprocessors have to load the weight, even with two output groups. A cluster
has 128 rows of the weight and some tokens, each of its four CTAs one segment of K:

    load      weight, scale and tokens of 128 channels by cp.async into a ring of stages, several ahead
    rotate    a thread that copied channels among a head's last 64 turns them, in the stage, before other threads read
    sum       a warp has 16 or 32 rows and all tokens: codes to bf16, mma.m16n8k16
    exchange  a quad's lane q has the sums of tokens 2 q and 2 q + 1 of eight: they go to CTA q, by st.async
    finish    CTA q adds the four segments' sums, rounds to bf16, and may quantise: it has 128 rows of a token

Who waits for whom: a CTA's threads for each other at every stage (sync_threads); senders until all CTAs of the cluster
have started (the cluster's barrier) and, if the sums overwrite the stages, until no CTA reads these any more (`ready`);
finishing warps for the bytes of all four CTAs (`received`). No CTA waits for another cluster.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels.device import bf16_rows, dependent_launch, e4m3, pipeline, ptx
from dsv4_kernels.device.bf16_rows import add, mul
from dsv4_kernels.device.mma import multiply_bf16
from dsv4_kernels.device.rotation import cosine_and_sine, inverted, position_of, turned
from dsv4_kernels.linear.kernel import MMA_ROWS, MMA_TOKENS, SEGMENTS, UNITS, WARP, left_matrices

ROWS = 128
"""Rows of the weight in a cluster: rows that share a scale, in the weight and in the quantised result."""
STEP = 128
"""Channels of a stage: channels that share a scale of the weight."""
HEAD = 512
"""Channels of a head, of which the last ROTATED are rotated."""
ROTATED = 64
PAIRS = ROTATED // 2
WEIGHT_ROW_BYTES, TOKEN_BYTES = STEP, 2 * STEP
"""Bytes of a row of the weight, and of a token, in a stage."""
TOKEN_UNITS = TOKEN_BYTES // 16
"""Units of 16 bytes of a token in a stage; a row has UNITS."""
ROTATED_UNITS = 2 * ROTATED // 16
SUM_TILE_BYTES = MMA_ROWS * MMA_TOKENS + 16
"""Bytes that one CTA receives of an instruction's 16 rows: two tokens, in fp32. 16 bytes of padding put the words that
a warp reads at a time into different banks."""


@dataclass(frozen=True)
class Tile:
    """The part of the result that a cluster computes at once, and how a CTA's warps share it."""

    tokens: int
    warps: int
    stages: int
    rows: int = ROWS
    """Rows of a CTA: ROWS, or fewer in `fp8_weight_resident`, whose stages hold a whole segment."""

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * WARP

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows of a warp."""
        return self.rows // MMA_ROWS // self.warps

    @property
    def token_tiles(self) -> int:
        """Tiles of 8 tokens."""
        return self.tokens // MMA_TOKENS

    # Shared memory: the stages, their scales, the turns (cosines and sines), the sums of all segments. Sums of many
    # tokens overwrite the stages.

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: rows of the weight, then tokens."""
        return self.rows * WEIGHT_ROW_BYTES + self.tokens * TOKEN_BYTES

    @property
    def scales_offset(self) -> int:
        """Offset of the stages' scales."""
        return self.stages * self.stage_bytes

    @property
    def turns_offset(self) -> int:
        """Offset of the cosines and sines, one pair of numbers for each token and channel pair."""
        return self.scales_offset + 16 * -(-self.stages // 4)

    @property
    def sums_overwrite_stages(self) -> bool:
        """Whether the sums overwrite the stages, so that they are sent only when no CTA of the cluster reads stages."""
        return self.tokens > 16

    @property
    def sums_offset(self) -> int:
        """Offset of the sums that the CTAs of the cluster send."""
        return 0 if self.sums_overwrite_stages else self.turns_offset + self.tokens * PAIRS * 8

    @property
    def sums_bytes(self) -> int:
        """Bytes of all segments' sums."""
        return SEGMENTS * self.token_tiles * (ROWS // MMA_ROWS) * SUM_TILE_BYTES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA without the barriers."""
        return max(self.turns_offset + self.tokens * PAIRS * 8, self.sums_offset + self.sums_bytes)


@dataclass(frozen=True)
class Configuration:
    """Compile-time parameters besides the architecture."""

    tile: Tile
    rotates: bool
    quantises: bool


class Arguments(NamedTuple):
    """Dynamic arguments; addresses are Int64. Strides in bytes; K is contiguous everywhere, and N in the result."""

    x: Int64  # [T, G, K] bf16
    x_token_bytes: Int64
    x_group_bytes: Int64
    codes: Int64  # [G, N, K] e4m3
    code_row_bytes: Int64
    code_group_bytes: Int64
    scales: Int64  # [G, N / 128, K / 128] fp32
    scale_row_bytes: Int64
    scale_group_bytes: Int64
    positions: Int64  # [T] int64, if rotates
    frequencies: Int64  # [PAIRS] fp32, if rotates
    out: Int64  # [T, G, N] bf16, or e4m3 if quantises
    out_token_bytes: Int64
    out_group_bytes: Int64
    out_scales: Int64  # [T, G N / 128] fp32, if quantises
    out_scale_token_bytes: Int64
    out_scale_block_bytes: Int64
    num_tokens: Int32
    num_token_tiles: Int32
    num_row_tiles: Int32  # N / 128
    steps: Int32  # steps of a segment, K / 4 / 128


@cute.jit
def launch(
    args: Arguments,
    configuration: cutlass.Constexpr[Configuration],
    row_and_token_tiles: Int32,
    groups: Int32,
    stream: cuda.CUstream,
) -> None:
    """Launches one cluster for 128 rows of an output group and a tile of tokens."""
    kernel(args, configuration).launch(
        grid=[SEGMENTS, row_and_token_tiles, groups],
        cluster=[SEGMENTS, 1, 1],
        block=[configuration.tile.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=2,
        preferred_smem_carveout=100,  # percent: two CTAs fit
        use_pdl=dependent_launch.is_on(),
    )


class Place(NamedTuple):
    """A CTA's segment of K, its tokens, and the addresses of its part of all tensors."""

    segment: Int32
    first_token: Int32
    tokens: Int32  # tokens of its tile that exist
    x: Int64
    codes: Int64
    scales: Int64


@cute.kernel
def kernel(args: Arguments, configuration: cutlass.Constexpr[Configuration]) -> None:
    """Computes one segment of a tile, and finishes a quarter of its tokens."""
    tile = configuration.tile
    thread, _, _ = cute.arch.thread_idx()
    segment, number, group = cute.arch.block_idx()
    memory = cutlass.utils.SmemAllocator()
    shared = Int32(memory.allocate_array(Uint32, num_elems=tile.shared_bytes // 4, byte_alignment=128).toint())
    ready = memory.allocate_array(Int64, num_elems=1, byte_alignment=8)
    received = memory.allocate_array(Int64, num_elems=1, byte_alignment=8)
    if thread == 0:
        cute.arch.mbarrier_init(ready, SEGMENTS)
        cute.arch.mbarrier_init(received, 1)
        cute.arch.mbarrier_init_fence()
        # This CTA receives two of the eight tokens of every instruction's tile, from every segment.
        of_tile = SUM_TILE_BYTES - 16
        cute.arch.mbarrier_arrive_and_expect_tx(received, tile.sums_bytes // SUM_TILE_BYTES * of_tile)
    cute.arch.cluster_arrive_relaxed(aligned=False)  # thread 0 arrives later
    # Neighbours in the grid have the same rows of the weight, which are then read from memory once.
    row_tile = number // args.num_token_tiles
    first_token = (number - row_tile * args.num_token_tiles) * tile.tokens
    first_channel = segment * args.steps * STEP
    place = Place(
        segment=segment,
        first_token=first_token,
        tokens=ptx.imin(args.num_tokens - first_token, Int32(tile.tokens)),
        x=args.x
        + Int64(group) * args.x_group_bytes
        + Int64(first_token) * args.x_token_bytes
        + Int64(first_channel) * 2,
        codes=args.codes
        + Int64(group) * args.code_group_bytes
        + Int64(row_tile * ROWS) * args.code_row_bytes
        + Int64(first_channel),
        scales=args.scales
        + Int64(group) * args.scale_group_bytes
        + Int64(row_tile) * args.scale_row_bytes
        + Int64(segment * args.steps) * 4,
    )
    if cutlass.const_expr(dependent_launch.is_on()):
        fetch_ahead(args, tile, place, thread)
    dependent_launch.begin()
    warp, lane = thread // WARP, thread % WARP
    for i in cutlass.range_constexpr(tile.stages - 1):
        load(args, tile, place, Int32(i), thread, shared, Int32(i))
    if cutlass.const_expr(configuration.rotates):
        compute_turns(args, tile, place, thread, shared + tile.turns_offset)
        cute.arch.sync_threads()
    sums = cute.make_rmem_tensor((tile.row_tiles * tile.token_tiles * 4,), Float32)
    sums.fill(0.0)
    sum_segment(args, configuration, place, thread, warp, lane, shared, sums)
    cute.arch.cluster_wait()  # all CTAs of the cluster have started and set up their barriers
    if cutlass.const_expr(tile.sums_overwrite_stages):
        cute.arch.sync_threads()
        if thread < SEGMENTS:
            ptx.arrive_remote(ptx.remote(Int32(ready.toint()), thread))
        ptx.wait_cluster(Int32(ready.toint()), Int32(0))
    to = shared + tile.sums_offset
    send(tile, segment, warp, lane, to, Int32(received.toint()), sums)
    ptx.wait_cluster(Int32(received.toint()), Int32(0))
    for j in cutlass.range(warp, tile.token_tiles, tile.warps, unroll=1):
        finish(args, configuration, place, row_tile, group, lane, j, to)


# Loads


@cute.jit
def fetch_ahead(args: Arguments, tile: cutlass.Constexpr[Tile], place: Place, thread: Int32) -> None:
    """Prefetches all of this CTA's weight into L2: no kernel writes it, so the kernel before may still run."""
    for line in cutlass.range(thread, ROWS * args.steps, tile.threads, unroll=1):
        row = line // args.steps
        address = place.codes + Int64(row) * args.code_row_bytes + Int64(line - row * args.steps) * WEIGHT_ROW_BYTES
        ptx.asm("prefetch.global.L2 [{$r0}];", [], address)


@cute.jit
def load(
    args: Arguments,
    tile: cutlass.Constexpr[Tile],
    place: Place,
    step: Int32,
    thread: Int32,
    shared: Int32,
    stage: Int32,
) -> None:
    """Starts the copies of a step into a stage, with zeros for tokens that do not exist. After the last step the
    `cp.async` groups are empty.

    Units of 16 bytes are swizzled, so that the units that are read at a time lie in different banks: the weight's by
    three bits of the row, for the eight rows of a matrix; the tokens' in pairs by two bits of the token, because half a
    warp reads two units of four tokens.
    """
    if step < args.steps:
        at = shared + stage * tile.stage_bytes
        unit, first = thread % UNITS, thread // UNITS
        a_pass = tile.threads // UNITS  # a multiple of UNITS: all rows of a thread are swizzled alike
        to = at + first * WEIGHT_ROW_BYTES + ((unit ^ (first % UNITS)) * 16)
        address = place.codes + Int64(first) * args.code_row_bytes + Int64(step * WEIGHT_ROW_BYTES + unit * 16)
        for i in cutlass.range_constexpr(ROWS // a_pass):
            ptx.copy_async(to + i * (a_pass * WEIGHT_ROW_BYTES), address, Int32(16))
            address += a_pass * args.code_row_bytes
        if thread == 0:
            ptx.copy_4_bytes_async(shared + tile.scales_offset + stage * 4, place.scales + Int64(step) * 4, Int32(4))
        unit, first = thread % TOKEN_UNITS, thread // TOKEN_UNITS
        for i in cutlass.range_constexpr(passes_of_tokens(tile)):
            token = first + i * tokens_a_pass(tile)
            if (tile.tokens % tokens_a_pass(tile) == 0) | (token < tile.tokens):
                address, num_bytes = place.x, Int32(0)
                if token < place.tokens:
                    address = place.x + Int64(token) * args.x_token_bytes + Int64(step * TOKEN_BYTES + unit * 16)
                    num_bytes = Int32(16)
                ptx.copy_async(token_unit(tile, at, token, unit), address, num_bytes)
    cute.arch.cp_async_commit_group()


def tokens_a_pass(tile: Tile) -> int:
    """Tokens whose channels of a stage all threads together copy in one pass: an even number."""
    return tile.threads // TOKEN_UNITS


def passes_of_tokens(tile: Tile) -> int:
    """Passes to copy a stage's tokens."""
    return -(-tile.tokens // tokens_a_pass(tile))


def token_unit(tile: Tile, stage: Int32, token: Int32, unit: Int32) -> Int32:
    """The address of 16 bytes of a token in a stage."""
    return stage + tile.rows * WEIGHT_ROW_BYTES + token * TOKEN_BYTES + ((unit ^ ((token & 3) * 2)) * 16)


# The rotation


@cute.jit
def compute_turns(args: Arguments, tile: cutlass.Constexpr[Tile], place: Place, thread: Int32, turns: Int32) -> None:
    """Stores cosine and sine for every token of the tile and every pair, with the bits of `rope`; tokens that do not
    exist get angle 0."""
    for index in cutlass.range(thread, tile.tokens * PAIRS, tile.threads, unroll=1):
        token, pair = index // PAIRS, index % PAIRS
        angle = Float32(0.0)
        if token < place.tokens:
            position = position_of(args.positions + Int64(place.first_token + token) * 8)
            angle = mul(position, ptx.load_f32(args.frequencies + Int64(pair) * 4))
        cosine, sine = cosine_and_sine(angle)
        ptx.store_shared_f32x2(turns + index * 8, (cosine, inverted(sine, Int32(1))))


@cute.jit
def rotate(tile: cutlass.Constexpr[Tile], place: Place, step: Int32, steps: Int32, thread: Int32, stage: Int32,
           turns: Int32) -> None:  # fmt: skip
    """Rotates the 16 bytes of each of the stage's tokens that this thread has copied itself, if they belong to the
    rotated channels."""
    chunk, unit, first = place.segment * steps + step, thread % TOKEN_UNITS, thread // TOKEN_UNITS
    if (chunk % (HEAD // STEP) == HEAD // STEP - 1) & (unit >= TOKEN_UNITS - ROTATED_UNITS):
        pair = (unit - (TOKEN_UNITS - ROTATED_UNITS)) * 4
        for i in cutlass.range_constexpr(passes_of_tokens(tile)):
            token = first + i * tokens_a_pass(tile)
            if (tile.tokens % tokens_a_pass(tile) == 0) | (token < tile.tokens):
                at, of_pairs = token_unit(tile, stage, token, unit), turns + (token * PAIRS + pair) * 8
                words = ptx.load_shared_16_bytes(at)
                both = *ptx.load_shared_f32x4(of_pairs), *ptx.load_shared_f32x4(of_pairs + 16)
                ptx.store_shared(at, tuple(turned(words[n], both[2 * n], both[2 * n + 1]) for n in range(4)))


# The sums


@cute.jit
def sum_segment(
    args: Arguments,
    configuration: cutlass.Constexpr[Configuration],
    place: Place,
    thread: Int32,
    warp: Int32,
    lane: Int32,
    shared: Int32,
    sums: cute.Tensor,
) -> None:
    """Adds all products of a warp's rows with the tokens over the segment."""
    tile = configuration.tile
    stage = Int32(0)
    for step in cutlass.range(args.steps, unroll=1):
        cute.arch.cp_async_wait_group(tile.stages - 2)
        at = shared + stage * tile.stage_bytes
        if cutlass.const_expr(configuration.rotates):
            rotate(tile, place, step, args.steps, thread, at, shared + tile.turns_offset)
        cute.arch.sync_threads()  # all threads' copies have arrived, and all have read the stage before
        following = pipeline.index_after(stage, tile.stages, tile.stages - 1)
        load(args, tile, place, step + (tile.stages - 1), thread, shared, following)
        factor = ptx.load_shared_f32(shared + tile.scales_offset + stage * 4)
        sum_stage(tile, at, ptx.pack_bf16(factor, factor), warp, lane, sums)
        stage = pipeline.index_after(stage, tile.stages)


@cute.jit
def sum_stage(
    tile: cutlass.Constexpr[Tile], stage: Int32, factor: Uint32, warp: Int32, lane: Int32, sums: cute.Tensor
) -> None:
    """Adds the products of a stage: eight instructions to every accumulator, in the order of `linear.kernel`.

    Of an instruction's 16 channels a lane has four in each row and token. As K indices these are two neighbours, and
    two that are 8 further. Here they are four neighbouring channels, because `ldmatrix` gives a lane four neighbouring
    codes.
    """
    weights = left_matrices(stage + warp * tile.row_tiles * (MMA_ROWS * WEIGHT_ROW_BYTES), lane)
    # All tokens that a lane reads have the same last three bits, hence one swizzle.
    quad = lane % 4
    tokens = token_unit(tile, stage, lane // 4, quad // 2) + quad % 2 * 8
    for part in cutlass.range_constexpr(STEP // 32):
        at = [unit_of_token(tokens, 4 * part + 2 * half) for half in range(2)]
        right = [
            [load_8_bytes(at[half] + j * (MMA_TOKENS * TOKEN_BYTES)) for half in range(2)]
            for j in range(tile.token_tiles)
        ]
        for i in cutlass.range_constexpr(tile.row_tiles):
            # Codes of two instructions' left operands; ^ gives the swizzled address of a row's other units.
            codes = ptx.load_matrices((weights ^ (part * 2 * 16)) + i * (MMA_ROWS * WEIGHT_ROW_BYTES))
            for half in cutlass.range_constexpr(2):
                upper, lower = (e4m3.as_bf16(codes[2 * half + n], factor) for n in range(2))
                left = (upper[0], lower[0], upper[1], lower[1])
                for j in cutlass.range_constexpr(tile.token_tiles):
                    first = (i * tile.token_tiles + j) * 4
                    before = tuple(sums[first + n] for n in range(4))
                    after = multiply_bf16(left, right[j][half], before)
                    for n in cutlass.range_constexpr(4):
                        sums[first + n] = after[n]


def unit_of_token(at: Int32, unit: int) -> Int32:
    """The address in units `unit` and `unit` + 1 of a token that corresponds to `at` in units 0 and 1. The swizzle
    stays within eight units, and these begin at a multiple of 128 bytes, so ^ follows it."""
    return (at ^ (unit % UNITS * 16)) + unit // UNITS * (UNITS * 16)


def load_8_bytes(address: Int32) -> tuple:
    """8 bytes from shared memory, as two words."""
    return ptx.asm("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", [Uint32] * 2, address)


# The segments' sums


@cute.jit
def send(
    tile: cutlass.Constexpr[Tile],
    segment: Int32,
    warp: Int32,
    lane: Int32,
    to: Int32,
    received: Int32,
    sums: cute.Tensor,
) -> None:
    """Sends a segment's sums to the CTAs that finish them: two tokens of eight to each."""
    quad = lane % 4
    barrier = ptx.remote(received, quad)
    target = ptx.remote(to + lane // 4 * 16, quad)
    for i in cutlass.range_constexpr(tile.row_tiles):
        for j in cutlass.range_constexpr(tile.token_tiles):
            first = (i * tile.token_tiles + j) * 4
            offset = sum_tile(tile, segment, Int32(j), warp * tile.row_tiles + i)
            ptx.store_async_f32x4(target + offset, tuple(sums[first + n] for n in range(4)), barrier)


def sum_tile(tile: Tile, segment: Int32 | int, j: Int32, i: Int32) -> Int32:
    """Offset of a segment's sums with tokens 8 j to 8 j + 7 and rows 16 i to 16 i + 15: 16 bytes for each of the first
    eight rows, two tokens of it and of the row eight further."""
    return ((segment * tile.token_tiles + j) * (ROWS // MMA_ROWS) + i) * SUM_TILE_BYTES


@cute.jit
def finish(
    args: Arguments,
    configuration: cutlass.Constexpr[Configuration],
    place: Place,
    row_tile: Int32,
    group: Int32,
    lane: Int32,
    j: Int32,
    sums: Int32,
) -> None:
    """Adds the segments' sums of two tokens and 128 rows, four rows a lane, and writes the result; called by a warp."""
    tile = configuration.tile
    i, half, within = lane // 4, lane // 2 % 2, lane % 2 * 4
    total = [[Float32(0.0) for _ in range(4)] for _ in range(2)]
    for segment in cutlass.range_constexpr(SEGMENTS):
        at = sums + sum_tile(tile, segment, j, i) + within * 16 + half * 8
        for n in cutlass.range_constexpr(4):
            of_tokens = ptx.load_shared_f32x2(at + n * 16)
            for token in cutlass.range_constexpr(2):
                total[token][n] = add(total[token][n], of_tokens[token])
    for token in cutlass.range_constexpr(2):
        within_tile = j * MMA_TOKENS + place.segment * 2 + token
        words = bf16_rows.packed(total[token])
        row = row_tile * ROWS + lane * 4
        out = args.out + Int64(place.first_token + within_tile) * args.out_token_bytes + group * args.out_group_bytes
        if cutlass.const_expr(configuration.quantises):
            values = bf16_rows.channels(words)
            exponent = e4m3.scale_exponent(bf16_rows.max_over_lanes(e4m3.largest(values)))
            codes = e4m3.codes(values, exponent)[0]
            if within_tile < place.tokens:
                ptx.store_u32(out + row, codes)
                if lane == 0:
                    scale = args.out_scales + Int64(place.first_token + within_tile) * args.out_scale_token_bytes
                    scale += Int64(group * args.num_row_tiles + row_tile) * args.out_scale_block_bytes
                    ptx.store_f32(scale, e4m3.scale_of(exponent))
        else:
            if within_tile < place.tokens:
                bf16_rows.store_8_bytes(out + Int64(row) * 2, words)
