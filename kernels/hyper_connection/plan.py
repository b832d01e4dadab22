"""Compile-time parameters of the hyper-connection kernel, its shared memory, and its dynamic arguments."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from dsv4_kernels.device.expert_rows import Rows
from dsv4_kernels.device.peer_words import Peers
from dsv4_kernels.host.mailboxes import CLUSTER

STREAMS = 4
CHANNELS = 4
"""Neighbouring channels of a unit in a thread, of each stream: 8 bytes in bf16, 16 in fn."""
WARP = 32
QUAD = 4
"""Threads that share a unit of a token: sixteen channels, two steps (k = 8) of `mma.sync` in each stream."""
UNITS = WARP // QUAD
"""Units of a warp: 128 channels."""
DIM_UNIT = CLUSTER * CHANNELS * WARP
"""d is a multiple of this: 1,024."""
MAX_DIM = 8 * DIM_UNIT
PRE_ROWS = (2 + STREAMS) * STREAMS
HEAD_ROWS = STREAMS
TOKENS = (1, 2, 4, 8)
"""Possible sizes of a token group: up to N = 8 of `mma.sync`."""
TEAMS = 2
"""Teams of a plan that has more than one: as many as the registers allow with token groups of eight tokens."""
SHARED_BYTES = 227 * 1024
"""Shared memory of a multiprocessor that CTAs can use; each CTA also takes 1 KiB of the 228."""
REGISTERS = 64 * 1024


@dataclass(frozen=True)
class Plan:
    """One configuration of the kernel."""

    tokens: int
    """Tokens of a token group, which a cluster, or a team of it, processes at a time."""
    dim: int
    rows: int
    """Rows of fn: PRE_ROWS or HEAD_ROWS."""
    post: bool
    """Whether a sublayer's output is written back first."""
    bf16_weight: bool = False
    """Whether the norm's weight is bf16; otherwise it is fp32."""
    teams: int = 1
    """Teams of threads in a CTA. Several teams process token groups independently, one after the other, and share fn,
    which stays in shared memory. A single team processes one group."""
    fp8: bool = False
    """Whether the normed mixture is also written as e4m3, with one scale for the 128 channels of a warp."""
    ranks: int = 0
    """Ranks whose parts are summed to the output that is written back; 0 if `y` is the whole output."""
    fp32_parts: bool = False
    """Whether parts are fp32; otherwise they are bf16."""
    one_cta: bool = False
    """Whether a multiprocessor has one CTA in any case, so that the parts of fn of more streams fit into its shared
    memory."""
    sender_threads: int = 0
    """Threads of a block of the mailboxes (`host.mailboxes.Plan.threads`), if there are ranks."""
    interleaved: bool = False
    """Whether a warp's products are in the order of a warp that is alone on its scheduler; the bits are the same. It
    computes all streams side by side, since 32 products of a stream are one chain; and it computes upper halves of fn
    with a mask that the compiler does not know. With a known one the compiler multiplies fn itself, of which the tensor
    core uses the upper half, and moves each number to its place before: a quarter of the instructions."""
    experts: int = 0
    """Experts of a token whose rows are summed to `y`, or to this rank's part of it; 0 if `y` is given."""
    reads_ahead: bool = False
    """Whether the lists of experts and slots are read before the launch before has ended (`moe.sums.Sum`)."""

    def check(self) -> None:
        """Raises ValueError for a width that the kernel does not support."""
        if not self.has_a_kernel:
            raise ValueError(
                f"the hyper-connection kernels take d in multiples of {DIM_UNIT} up to {MAX_DIM}; got {self.dim}. "
                "Choose the reference (impl='ref') for other widths"
            )
        assert self.tokens in TOKENS and self.rows in (HEAD_ROWS, PRE_ROWS), self
        assert not self.fp8 or self.rows == PRE_ROWS, self
        assert self.teams == 1 or self.fits, self
        assert not self.interleaved or (self.ctas == 1 and self.teams == 1), self  # it needs the registers
        assert not self.experts or (self.post and self.teams == 1), self
        # A channel of the mailboxes is used once a launch.
        assert not self.ranks or (self.post and self.teams == 1 and self.sender_threads >= self.threads), self

    @property
    def has_a_kernel(self) -> bool:
        """Whether the kernel supports the width."""
        return self.dim % DIM_UNIT == 0 and 0 < self.dim <= MAX_DIM

    @property
    def fits(self) -> bool:
        """Whether the registers suffice for the teams, and the shared memory for all of fn."""
        registers = self.cta_threads * 168 <= REGISTERS
        return registers and self.tokens == CLUSTER and self.stages == STREAMS

    @property
    def slice(self) -> int:
        """Channels of a CTA."""
        return self.dim // CLUSTER

    @property
    def threads(self) -> int:
        """Threads of a team that have channels."""
        return self.slice // CHANNELS

    @property
    def warps(self) -> int:
        """Warps of a team that have channels."""
        return self.threads // WARP

    @property
    def cta_threads(self) -> int:
        """Threads of all teams, each with one more warp that fetches fn and balances comb."""
        return self.teams * (self.threads + WARP)

    @property
    def ctas(self) -> int:
        """CTAs of a multiprocessor: two where the registers allow it, so that one computes while the other waits."""
        return 2 if self.teams == 1 and not self.one_cta and 2 * self.cta_threads * 192 <= REGISTERS else 1

    @property
    def runs(self) -> int:
        """Runs of neighbouring channels of a thread, in each stream; see `streams`."""
        return max(1, self.tokens // 2)

    @property
    def run_words(self) -> int:
        """Words (two bf16) of a run: two adjacent units, or the only one."""
        return min(2, self.tokens) * CHANNELS // 2

    @property
    def run_step(self) -> int:
        """Channels from the start of a run to the start of the next."""
        return 2 * QUAD * CHANNELS

    @property
    def piece_words(self) -> int:
        """Words of a piece: what a thread sends at once of its part of a run, at most 16 bytes."""
        return min(4, self.run_words * (1 + self.fp32_parts))

    @property
    def pieces(self) -> int:
        """Pieces of a thread."""
        return self.runs * self.run_words * (1 + self.fp32_parts) // self.piece_words

    @property
    def places(self) -> int:
        """Places of a mailbox's channel that a CTA uses. A sender's block in a place has a vector for each of
        `sender_threads`, so the CTA's threads put one or several pieces next to each other into it."""
        return -(-self.pieces // (self.sender_threads // self.threads))

    @property
    def row_bytes(self) -> int:
        """Bytes from a row of fn to the next, for one stream in a CTA. The 16 bytes of padding put even and odd rows
        into different banks: eight threads read at a time, 16 of every 32 bytes of each row."""
        return self.slice * 4 + 16

    @property
    def stage_bytes(self) -> int:
        """Bytes of all rows of fn for one stream."""
        return self.rows * self.row_bytes

    @property
    def stages(self) -> int:
        """Streams whose part of fn is in shared memory at once."""
        other = self.teams * self.tokens * self.quads * 16 * (self.warps + CLUSTER) + 2048
        return min(STREAMS, (SHARED_BYTES // self.ctas - 1024 - other) // self.stage_bytes)

    @property
    def side_by_side(self) -> int:
        """Streams whose products a warp computes at once: all, if it is to and all of fn is in shared memory."""
        return STREAMS if self.interleaved and self.stages == STREAMS else 1

    @property
    def quads(self) -> int:
        """Quads (four sums each) of a token: one sum for each row of fn, and the sum of squares."""
        return self.rows // 4 + 1

    @property
    def square_slots(self) -> int:
        """Number of stored sums of squares of the mixtures; with fewer tokens than this, tokens are repeated."""
        return max(self.tokens, 4)


def shared_memory(plan: Plan) -> type:
    """The structure of a CTA's shared memory."""
    num_sums, teams = plan.tokens * plan.quads * 4, plan.teams

    @cute.struct
    class Shared:
        fn: cute.struct.Align[cute.struct.MemRange[Uint8, plan.stages * plan.stage_bytes], 128]
        # fn: [stage][row][channel], fp32
        sums: cute.struct.Align[cute.struct.MemRange[Float32, teams * plan.warps * num_sums], 16]
        # sums: [team][warp][token][quads * 4]; after the rows' sums the sum of squares and three zeros
        received: cute.struct.Align[cute.struct.MemRange[Float32, teams * CLUSTER * num_sums], 16]
        # received: [team], the sums from all CTAs of the cluster
        squares: cute.struct.Align[cute.struct.MemRange[Float32, teams * plan.warps * plan.square_slots], 16]
        # squares: [team][warp][token], sums of squares of the mixtures
        received_squares: cute.struct.Align[cute.struct.MemRange[Float32, teams * CLUSTER * plan.square_slots], 16]
        # received_squares: [team], these sums from all CTAs of the cluster
        pre: cute.struct.Align[cute.struct.MemRange[Float32, teams * plan.tokens * STREAMS], 16]
        full: cute.struct.MemRange[Int64, plan.stages]
        # full: [stage]; counts the bytes of a stream's rows
        empty: cute.struct.MemRange[Int64, plan.stages]
        # empty: [stage]; all warps that have read it arrive; with one team only
        sums_there: cute.struct.MemRange[Int64, teams]
        # sums_there: [team]; `received` is complete
        taken: cute.struct.MemRange[Int64, teams]
        # taken: [team]; the balancing warp has read the sums that it needs from `received`
        squares_there: cute.struct.MemRange[Int64, teams]
        # squares_there: [team]; `received_squares` is complete

    return Shared


class Arguments(NamedTuple):
    """Dynamic arguments of a plan without ranks; addresses are Int64, 0 for tensors that a plan does not use; strides
    are in bytes."""

    num_tokens: Int32
    y: Int64  # [T, d] bf16
    y_stride: Int64
    streams: Int64  # [T, 4, d] bf16
    streams_stride: Int64  # from token to token
    stream_stride: Int64
    post: Int64  # [T, 4] fp32
    post_stride: Int64
    comb: Int64  # [T, 4, 4] fp32
    comb_stride: Int64  # from token to token
    fn: Int64  # [rows, 4 * d] fp32
    base: Int64  # [rows] fp32
    scale: Int64  # [3 or 1] fp32
    norm_weight: Int64  # [d] fp32 or bf16
    norm_eps: Float32
    hc_eps: Float32
    iterations: Int32
    out_streams: Int64  # [T, 4, d] bf16, contiguous like all results
    out: Int64  # [T, d] bf16
    out_post: Int64  # [T, 4] fp32
    out_comb: Int64  # [T, 4, 4] fp32
    out_codes: Int64  # [T, d] e4m3
    out_scales: Int64  # fp32, scales of neighbouring tokens contiguous
    scale_block_stride: Int64


ArgumentsOfParts = NamedTuple("ArgumentsOfParts", [*Arguments.__annotations__.items(), ("peers", Peers)])
"""Dynamic arguments of a plan with ranks: `y` is this rank's part, [T, d] bf16 or fp32."""
ArgumentsOfExperts = NamedTuple("ArgumentsOfExperts", [*Arguments.__annotations__.items(), ("of_experts", Rows)])
ArgumentsOfExpertParts = NamedTuple(
    "ArgumentsOfExpertParts", [*ArgumentsOfParts.__annotations__.items(), ("of_experts", Rows)]
)
"""Dynamic arguments of plans that sum over experts, which do not use `y`."""
AnyArguments = Arguments | ArgumentsOfParts | ArgumentsOfExperts | ArgumentsOfExpertParts


def arguments_of(plan: Plan) -> type:
    """The type of a plan's dynamic arguments."""
    if plan.ranks:
        return ArgumentsOfExpertParts if plan.experts else ArgumentsOfParts
    return ArgumentsOfExperts if plan.experts else Arguments
