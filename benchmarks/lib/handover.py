"""A kernel of phases that each read all results of the phase before, as a layer's kernels do, without arithmetic.

A row has `vectors` of 16 bytes. In a phase every CTA reads a whole row, adds its words up as integers, and writes its
share of the next row from the sum. Phases are launches of their own, or parts of one launch whose CTAs are resident
together and hand rows on by themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32
from torch import Tensor

from dsv4_kernels.device import dependent_launch, peer_words, ptx
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.launch import current_stream, load_launcher

WARP = 32
VECTOR_BYTES = 16
FACTOR, MASK = 5, 0x0FFF_FFFF


class Way(Enum):
    """How a phase learns that the row before is complete."""

    LAUNCHES = "launches"
    """Each phase is a launch that begins early and waits (`dependent_launch`)."""
    AHEAD = "ahead"
    """Each phase is a launch that lets the next one begin at once, takes the words of the row as they arrive, and waits
    for the launch before only when it has stored its own."""
    WORDS = "words"
    """One launch; a word that is not EMPTY says itself that it has arrived (`peer_words`)."""
    COUNTERS = "counters"
    """One launch; a CTA adds 1 to the phase's counter after its stores, and waits until the counter has all CTAs."""


@dataclass(frozen=True)
class Shape:
    """Compile-time parameters.

    Attributes:
        way: from phase to phase.
        ctas: of a launch; each writes an equal share of a row.
        vectors: of a row, a thread for each; a multiple of WARP and of `ctas`, at most 1,024.
        phases: of all launches of `run`; 1 in the compiled shape of a way with a launch for each phase.
    """

    way: Way
    ctas: int
    vectors: int
    phases: int

    def __post_init__(self) -> None:
        if self.vectors % WARP or self.vectors % self.ctas or not 0 < self.vectors <= 1024:
            raise ValueError(
                f"vectors must be a multiple of {WARP} and of the number of CTAs ({self.ctas}), and at most 1,024; got "
                f"{self.vectors}"
            )


class Arguments(NamedTuple):
    """Dynamic arguments; addresses are Int64."""

    rows: Int64
    """[phases + 1, vectors, 4] int32: the first row is read, the others are EMPTY."""
    counters: Int64
    """[phases] int32, zeros."""


@cute.jit
def launch(args: Arguments, shape: cutlass.Constexpr[Shape], stream: cuda.CUstream) -> None:
    """Launches the CTAs of one or of all phases. CTAs that wait for each other are launched cooperatively, so that all
    are resident."""
    waits = shape.way in (Way.WORDS, Way.COUNTERS)
    kernel(args, shape).launch(
        grid=[shape.ctas, 1, 1],
        block=[shape.vectors, 1, 1],
        stream=stream,
        cooperative=waits,
        use_pdl=dependent_launch.may_begin_early(cooperative=waits),
    )


@cute.kernel
def kernel(args: Arguments, shape: cutlass.Constexpr[Shape]) -> None:
    """Computes the phases of a launch."""
    thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    memory = cutlass.utils.SmemAllocator()
    partial = memory.allocate_array(Int32, num_elems=shape.vectors // WARP)
    if cutlass.const_expr(shape.way is Way.LAUNCHES):
        dependent_launch.begin()
    if cutlass.const_expr(shape.way is Way.AHEAD):
        cute.arch.griddepcontrol_launch_dependents()
    row_bytes, share = shape.vectors * VECTOR_BYTES, shape.vectors // shape.ctas
    for phase in cutlass.range(shape.phases, unroll=1):
        row = args.rows + Int64(phase) * row_bytes
        if cutlass.const_expr(shape.way is Way.COUNTERS):
            if phase > 0:
                if thread == 0:
                    while ptx.load_acquire(args.counters + (phase - 1) * 4) < shape.ctas:
                        pass
                cute.arch.sync_threads()
        words = cute.make_rmem_tensor((4,), Uint32)
        load(words, row + thread * VECTOR_BYTES)
        if cutlass.const_expr(shape.way in (Way.AHEAD, Way.WORDS)):
            while peer_words.empties([words[i] for i in range(4)]) != 0:
                load(words, row + thread * VECTOR_BYTES)
        total = sum_over_cta(words[0] + words[1] + words[2] + words[3], Int32(partial.toint()), thread, shape.vectors)
        if thread < share:
            vector = cta * share + thread
            made = [(total * FACTOR + Uint32(4 * vector + i)) & MASK for i in range(4)]
            peer_words.store(row + row_bytes + vector * VECTOR_BYTES, made)
        cute.arch.sync_threads()  # the partial sums may be overwritten
        if cutlass.const_expr(shape.way is Way.COUNTERS):
            if thread == 0:
                ptx.add_release(args.counters + phase * 4)
    if cutlass.const_expr(shape.way is Way.AHEAD):
        dependent_launch.wait()


def load(words: cute.Tensor, address: Int64) -> None:
    """Loads a vector that other CTAs may be storing, from L2."""
    for i, word in enumerate(peer_words.poll(address, 4)):
        words[i] = word


@cute.jit
def sum_over_cta(x: Uint32, partial: Int32, thread: Int32, threads: cutlass.Constexpr[int]) -> Uint32:
    """The sum over the threads of a CTA, modulo 2^32, in all of them."""
    for i in cutlass.range_constexpr(5):
        x += cute.arch.shuffle_sync_bfly(x, offset=1 << i)
    if thread % WARP == 0:
        ptx.store_shared_u32(partial + thread // WARP * 4, x)
    cute.arch.sync_threads()
    total = Uint32(0)
    for i in cutlass.range_constexpr(threads // WARP):
        total += ptx.as_u32(ptx.load_shared_f32(partial + i * 4))
    return total


def compile(shape: Shape, arch: str) -> Callable[..., None]:
    """The compiled launch function: (arguments, stream)."""
    return load_launcher("handover", shape, arch, launch, Arguments, shape)


def run(impl: str, shape: Shape, rows: Tensor, counters: Tensor) -> None:
    """Computes all rows after the first one; `shape.phases` is the number of phases in all.

    Args:
        impl: "sm90" or "sm100".
        rows: [phases + 1, vectors, 4] int32, contiguous; EMPTY (-1) from row 1 on.
        counters: [phases] int32, zeros.

    Raises:
        RuntimeError: launches that should begin early may not.
    """
    if shape.way in (Way.LAUNCHES, Way.AHEAD) and not dependent_launch.is_on():
        raise RuntimeError(f"{shape.way.value} needs {dependent_launch.VARIABLE}=on, and it is off: unset it")
    arch, stream = architecture(impl, rows.device), current_stream(rows.device)
    if shape.way in (Way.WORDS, Way.COUNTERS):
        compile(shape, arch)(Arguments(rows.data_ptr(), counters.data_ptr()), stream)
        return
    launcher = compile(Shape(shape.way, shape.ctas, shape.vectors, 1), arch)
    for phase in range(shape.phases):
        launcher(Arguments(rows.data_ptr() + phase * shape.vectors * VECTOR_BYTES, counters.data_ptr()), stream)


def expected(first: Tensor, phases: int) -> Tensor:
    """The rows that `run` computes. first: [vectors, 4] int32; returns [phases, vectors, 4] int32."""
    numbers = torch.arange(first.numel(), dtype=torch.int64)
    rows, total = [], int(first.to(torch.int64).sum())
    for _ in range(phases):
        rows.append((total * FACTOR + numbers) & MASK)
        total = int(rows[-1].sum()) & 0xFFFF_FFFF
    return torch.stack(rows).to(torch.int32).view(phases, *first.shape)
