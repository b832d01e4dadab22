"""Static plan of the FP8 product on Hopper: tiles, stages, shared memory, and the choice for a call (see
fp8_kernel.py)."""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from cutlass import Int32, Int64

BLOCK = 128
"""Channels that share a scale; also 128 bytes, a row of a stage."""
WARP = 32
WARPGROUP = 128
MMA_TOKENS = 64
"""Tokens of an instruction, and of a consumer warpgroup."""
PRODUCTS = BLOCK // 32
"""Instructions of a block."""
ROWS = (16, 32, 64)
"""Possible numbers of rows of the weight in a tile."""
TOKENS = (8, 16, 32, 64, 128)
"""Possible numbers of tokens of a plan."""
MOST_TOKENS = TOKENS[-1]
SMEM_BYTES = 227 * 1024
"""Shared memory of a multiprocessor that CTAs can use."""
ALIGNMENT = 2048
"""The most shared memory that a CTA loses to alignment and to the system's own kilobyte."""


@dataclass(frozen=True)
class Plan:
    """Compile-time parameters. None of them changes a bit of a result."""

    rows: int
    """Rows of the weight in a tile: one of `ROWS`."""
    tokens: int
    """The most tokens: one of `TOKENS`."""
    blocks: int
    """Blocks of 128 channels in a stage."""
    stages: int
    cluster: int = 1
    """CTAs with neighbouring tiles, each of which loads a part of the tokens for all of them."""
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        problem = self.problem()
        if problem:
            raise ValueError(f"{self}: {problem}")

    def problem(self) -> str | None:
        """Why the kernel does not support this plan; None for a supported one."""
        if self.rows not in ROWS or self.tokens not in TOKENS:
            return f"rows are one of {ROWS}, tokens of {TOKENS}"
        if self.cluster not in (1, 2, 4, 8) or self.tokens // self.cluster < 8:
            return "a cluster has 1, 2, 4 or 8 CTAs, and each of them brings at least 8 tokens"
        if self.blocks not in (1, 2, 4) or self.stages < 2:
            return "stages are at least 2, of 1, 2 or 4 blocks"
        if self.ctas_per_sm * self.shared_bytes > SMEM_BYTES:
            return f"{self.shared_bytes} bytes of shared memory, of {self.ctas_per_sm} CTAs each"
        return None

    @property
    def consumers(self) -> int:
        """Consumer warpgroups, of 64 tokens each."""
        return -(-self.tokens // MMA_TOKENS)

    @property
    def consumer_warps(self) -> int:
        """Warps that are not producers."""
        return self.consumers * WARPGROUP // WARP

    @property
    def threads(self) -> int:
        """Threads of a CTA: consumers, and two producer warps."""
        return (self.consumer_warps + 2) * WARP

    @property
    def accumulators(self) -> int:
        """Accumulators of a lane."""
        return self.rows // 2

    @property
    def brought(self) -> int:
        """Tokens that a CTA of the cluster loads for all its CTAs."""
        return self.tokens // self.cluster

    # Shared memory: the stages' weights, then their tokens, then the scales of both, then barriers.

    @property
    def weight_bytes(self) -> int:
        """Bytes of a stage's weights."""
        return self.blocks * self.rows * BLOCK

    @property
    def token_bytes(self) -> int:
        """Bytes of a stage's tokens."""
        return self.blocks * self.tokens * BLOCK

    @property
    def scale_bytes(self) -> int:
        """Bytes of a stage's scales: fp32 of [blocks, tokens], then of [4 blocks] of the weight."""
        return (self.blocks * self.tokens + 4) * 4

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage, with both barriers."""
        return self.weight_bytes + self.token_bytes + self.scale_bytes + 16

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.stages * self.stage_bytes + ALIGNMENT


class Arguments(NamedTuple):
    """Dynamic arguments; addresses are Int64. Rows of codes lie at multiples of 16 bytes, with contiguous channels."""

    codes: Int64  # [T, K] e4m3
    codes_row_bytes: Int64
    scales: Int64  # [T, K / 128] fp32
    scales_row_bytes: Int64
    scales_block_bytes: Int64
    weight: Int64  # [N, K] e4m3
    weight_row_bytes: Int64
    weight_scale: Int64  # [ceil(N / 128), K / 128] fp32, a row's blocks contiguous
    weight_scale_row_bytes: Int64
    out: Int64  # [T, N] bf16, contiguous in N
    out_row_bytes: Int64
    num_tokens: Int32
    num_rows: Int32  # N
    num_blocks: Int32  # K / 128
    num_tiles: Int32  # tiles of clusters: ceil(N / (rows * cluster))


BUSY = 0.7
"""The least share of multiprocessors that should have a tile: fewer than all can use the whole memory bandwidth."""
IN_FLIGHT = 64 * 1024
"""Bytes of weights in a multiprocessor's stages: 132 multiprocessors have 8 MB in flight, twice the product of memory's
bandwidth and latency (4.3 TB/s times 0.9 us)."""


def tile_rows(num_rows: int, multiprocessors: int) -> int:
    """The rows of a tile: the most with which a share BUSY of the multiprocessors has a tile, or the fewest of ROWS."""
    for rows in ROWS[:0:-1]:
        if -(-num_rows // rows) >= BUSY * multiprocessors:
            return rows
    return ROWS[0]


def chosen(num_tokens: int, num_rows: int, multiprocessors: int) -> Plan:
    """The plan for a call.

    Args:
        num_tokens: at most `MOST_TOKENS`.
        num_rows: of the weight.
        multiprocessors: of the GPU.
    """
    tokens = next(width for width in TOKENS if num_tokens <= width)
    rows = tile_rows(num_rows, multiprocessors)
    return planned(rows, tokens)


def planned(rows: int, tokens: int) -> Plan:
    """The plan for a shape of tile: stages of four blocks, or of two blocks where a block has more bytes, and as many
    stages as hold `IN_FLIGHT` bytes of weights or fit the shared memory.

    The overhead of a stage besides its products (a wait, loads of fragments, a wait for the last product: some 200
    clocks) is amortised over its blocks; a block's products take 80 clocks.
    """
    blocks = 2 if rows == 64 or tokens == MOST_TOKENS else 4
    cluster = 2 if tokens >= 16 else 1
    of_stage = Plan(rows, tokens, blocks, 2, cluster)
    stages = min(IN_FLIGHT // of_stage.weight_bytes, (SMEM_BYTES - ALIGNMENT) // of_stage.stage_bytes)
    return Plan(rows, tokens, blocks, stages, cluster)


@functools.cache
def sharing(plan: Plan) -> Plan:
    """The plan with so few stages that two CTAs share a multiprocessor, for a part of a joint launch: the CTAs of
    another part run at the same time. Tiles and clusters are the same.

    Tiles of 32 rows have stages of two blocks: with four, a thread needs more registers than the 168 that two CTAs
    leave.
    """
    blocks = 2 if plan.rows == 32 else plan.blocks
    of_stage = replace(plan, blocks=blocks, stages=2)
    most = (SMEM_BYTES // 2 - ALIGNMENT) // of_stage.stage_bytes
    return replace(of_stage, stages=min(plan.stages * plan.blocks // blocks, most), ctas_per_sm=2)
