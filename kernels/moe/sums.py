"""The sum over the experts of each token, the last launch of a call: on Hopper and Blackwell (sm_90a, sm_100a)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from dsv4_kernels.device import bf16_rows, dependent_launch, expert_rows, ptx
from dsv4_kernels.device.bf16_rows import CHUNK, CHUNK_BYTES
from dsv4_kernels.device.expert_rows import Rows
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import check_rows
from dsv4_kernels.moe.workspace import EARLY_TOKENS

THREADS = 128


class Arguments(NamedTuple):
    """Dynamic arguments; addresses are Int64."""

    rows: Rows
    chunks: Int32  # d / 8
    num_chunks: Int32  # of all tokens
    out: Int64  # fp32 or bf16 [tokens, d]


@dataclass(frozen=True)
class Sum:
    """Compile-time parameters of the kernel that sums."""

    chosen: int
    """Experts of a token."""
    fp32: bool
    """Whether the result is fp32. If it is bf16, `shared` is added to the rounded sum."""
    adds_shared: bool
    reads_ahead: bool = False
    """Whether experts and slots are read before the launch before has ended: if it calls `dependent_launch.begin`, and
    is not the one that lists them."""


@cute.jit
def launch(args: Arguments, config: cutlass.Constexpr[Sum], ctas: Int32, stream: cuda.CUstream) -> None:
    """Launches one thread for eight channels of a token."""
    kernel(args, config).launch(
        grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def kernel(args: Arguments, config: cutlass.Constexpr[Sum]) -> None:
    """Sums a token's rows by rising expert, in fp32."""
    if cutlass.const_expr(not config.reads_ahead):
        dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    unit = cta * THREADS + thread
    token = unit // args.chunks
    chunk = unit - token * args.chunks
    exists = args.num_chunks - unit
    experts, slots = expert_rows.listed(args.rows, token, config.chosen, exists)
    if cutlass.const_expr(config.reads_ahead):
        dependent_launch.begin()
    if exists > 0:
        slots = expert_rows.in_order(experts, slots)
        rows = expert_rows.load(args.rows, slots, token, chunk * CHUNK, CHUNK // 2, exists, config.adds_shared)
        sums = expert_rows.total(rows, config.fp32, config.adds_shared)
        if cutlass.const_expr(config.fp32):
            for half in cutlass.range_constexpr(2):
                ptx.store_f32x4(args.out + Int64(unit) * (4 * CHUNK) + 16 * half, tuple(sums[4 * half : 4 * half + 4]))
        else:
            ptx.store_16_bytes(args.out + Int64(unit) * CHUNK_BYTES, bf16_rows.packed(sums))


def compile(config: Sum, arch: str) -> Callable[..., None]:
    """The launcher: (arguments, CTAs, stream)."""
    return load_launcher("experts_sum", config, arch, launch, Arguments, config, Int32)


# Host side


def sum_rows(
    slot_rows: Tensor,
    experts: Tensor,
    slot_of_pair: Tensor,
    dtype: torch.dtype,
    shared: Tensor | None,
    arch: str,
    reads_ahead: bool = False,
) -> Tensor:
    """[T, d] in `dtype`: the sums of each token's rows by rising expert, plus `shared` [T, d] bf16.

    Args:
        slot_rows: bf16 [slots, d], contiguous.
        experts: [T, k] int32, contiguous, among the experts of all ranks.
        slot_of_pair: [T, k] int32, contiguous: rows of `slot_rows`; negative: the row is missing and adds nothing.
        dtype: fp32 or bf16; to a bf16 result the shared expert's output is added after rounding.
        shared: rows of any stride; None for none.
        arch: to compile for.
        reads_ahead: see `Sum`.

    Raises:
        ValueError: rows of `shared` cannot be read 16 bytes at a time.
    """
    tokens, chosen = experts.shape
    d = slot_rows.shape[1]
    if shared is not None:
        check_rows("mxfp4_experts_forward: shared", shared, d)
    out = torch.empty(tokens, d, dtype=dtype, device=slot_rows.device)
    chunks = d // CHUNK
    arguments = Arguments(
        rows=expert_rows.arguments(slot_rows, experts, slot_of_pair, shared),
        chunks=chunks,
        num_chunks=tokens * chunks,
        out=out.data_ptr(),
    )
    launcher = compile(Sum(chosen, dtype == torch.float32, shared is not None, reads_ahead), arch)
    launcher(arguments, Int32(-(-tokens * chunks // THREADS)), current_stream(out.device))
    return out


def sum_pairs(rows: Tensor, experts: Tensor, row_of_pair: Tensor, shared: Tensor, arch: str) -> Tensor:
    """`sum_rows` of rows that several ranks have computed: [T, d] bf16, the bits of the sum on one rank.

    Args:
        rows: bf16 [R, d], contiguous.
        experts: [T, k] integer, among the experts of all ranks.
        row_of_pair: [T, k] int32, contiguous, in [0, R).
        shared: [T, d] bf16, rows of any stride.
        arch: to compile for.

    Raises:
        ValueError: rows of `shared` cannot be read 16 bytes at a time.
    """
    with dependent_launch.switched(dependent_launch.is_on() and len(experts) <= EARLY_TOKENS):
        return sum_rows(rows, experts.int().contiguous(), row_of_pair, torch.bfloat16, shared, arch)
