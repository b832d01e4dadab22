"""Attention on Blackwell (sm_100a): configurations, compilation, and the launch of a call (kernel.py)."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from dsv4_kernels.host.addresses import address, row_bytes, row_stride
from dsv4_kernels.host.arch import architecture, hardware_multiprocessors
from dsv4_kernels.host.compile_cache import load_or_compile
from dsv4_kernels.host.launch import current_stream
from dsv4_kernels.host.launch_arguments import example
from dsv4_kernels.kv_layout import ROW_DIM, RowFormat
from dsv4_kernels.sparse_attention.problem import Problem
from dsv4_kernels.sparse_attention.scratch import NUM_COUNTERS, Scratch
from dsv4_kernels.sparse_attention.sm100.kernel import launch
from dsv4_kernels.sparse_attention.sm100.plan import HEADS, LOG2_E, Arguments, Plan
from dsv4_kernels.sparse_attention.sm100.softmax import RowState
from dsv4_kernels.sparse_attention.split import STEP_KEYS


@dataclass(frozen=True)
class Config:
    """Compile-time parameters of the kernel."""

    row_format: RowFormat
    can_split: bool
    """Whether tokens may have several KV splits: partial results then go through global memory and are combined."""
    plan: Plan
    """One CTA for up to 64 heads, a pair of CTAs for more."""


SLOT_BYTES = HEADS * ROW_DIM * 4
"""Bytes of a partial O; see the last fields of `Arguments`."""
STATE_BYTES = len(RowState._fields) * HEADS * 4
"""Bytes of the softmax states of a partial O's rows."""


def configurations() -> tuple[Config, ...]:
    """All configurations that `sparse_attention` may need, to compile them ahead."""
    axes = ((RowFormat.FP8, RowFormat.PLAIN), (False, True), (Plan(1), Plan(2)))
    return tuple(Config(*point) for point in itertools.product(*axes))


def compile(config: Config, arch: str = "sm_100a") -> Callable[..., None]:
    """The launcher of a configuration, from memory, from disk or from the compiler.

    Raises:
        RuntimeError: the compiler of CuTe DSL is older than CUDA 13.2.
    """

    def from_compiler() -> Callable[..., None]:
        if not cutlass.target_version(min_version="13.2"):
            raise RuntimeError(
                f"sparse_attention: CuTe DSL compiles with CUDA {cutlass.CUDA_VERSION.major}."
                f"{cutlass.CUDA_VERSION.minor}; expected 13.2 or later, for PTX 9.2. Install "
                "nvidia-cutlass-dsl[cu13], as SGLang does"
            )
        constants = config.row_format is RowFormat.FP8, config.can_split, config.plan
        return cute.compile(launch, example(Arguments), Int32(1), *constants, cuda.CUstream(0))

    return load_or_compile("sparse_attention_sm100", config, arch, from_compiler)


def sparse_attention(problem: Problem) -> None:
    """Writes `problem.out`.

    See `dsv4_kernels.sparse_attention.sparse_attention` for the definition.

    Raises:
        RuntimeError: a CUDA graph is being captured, and the kernel has not run on the device before.
        ValueError: more tokens than counters in a call with `split_keys`.
    """
    device, max_kv_splits = problem.q.device, problem.max_kv_splits
    plan = Plan(-(-problem.num_heads // HEADS))
    num_work_tiles = problem.num_tokens * max_kv_splits
    num_slots = num_work_tiles * plan.ctas
    states = slice(num_slots * SLOT_BYTES, num_slots * (SLOT_BYTES + STATE_BYTES))  # after the slots of O
    scratch = None
    if max_kv_splits > 1:
        if problem.num_tokens * plan.ctas > NUM_COUNTERS:
            raise ValueError(
                f"sparse_attention: {problem.num_tokens} tokens of {problem.num_heads} heads with split_keys; expected "
                f"at most {NUM_COUNTERS // plan.ctas}. Pass split_keys=None: so many tokens need no KV splits"
            )
        scratch = Scratch.on(device, states.stop)
    arguments = Arguments(
        q=address(problem.q),
        q_token_stride=problem.q.stride(0),
        q_head_stride=problem.q.stride(1),
        window=address(problem.window_storage),
        window_page_bytes=row_bytes(problem.window_storage),
        entries=address(problem.entry_storage),
        entry_page_bytes=row_bytes(problem.entry_storage),
        window_rows=address(problem.window_rows),
        window_rows_stride=problem.window_rows.stride(0),
        window_slots=problem.window_slots,
        entry_indices=address(problem.entry_indices),
        entry_indices_stride=row_stride(problem.entry_indices),
        entry_slots=problem.max_entry_slots,
        page_table=address(problem.page_table),
        page_table_stride=row_stride(problem.page_table),
        entries_per_page=problem.entries_per_page,
        token_to_request=address(problem.token_to_request),
        visible=address(problem.visible),
        sink=address(problem.sink),
        scale_log2=problem.scale * LOG2_E,
        out=address(problem.out),
        out_token_stride=problem.out.stride(0),
        out_head_stride=problem.out.stride(1),
        num_heads=problem.num_heads,
        steps_per_kv_split=0 if problem.split_keys is None else problem.split_keys // STEP_KEYS,
        max_kv_splits=max_kv_splits,
        num_work_tiles=num_work_tiles,
        partial_out=address(scratch and scratch.slots, slice(0, states.start)),
        partial_state=address(scratch and scratch.slots, states),
        arrived=address(scratch and scratch.counters),
        zeros=address(zero_row(device)),
    )
    num_ctas = plan.ctas * min(num_work_tiles, hardware_multiprocessors(device) // plan.ctas)
    launcher = compile(Config(problem.row_format, max_kv_splits > 1, plan), architecture("sm100", device))
    launcher(arguments, Int32(num_ctas), current_stream(device))


@functools.cache
def zero_row(device: torch.device) -> torch.Tensor:
    """A row of zeros [ROW_DIM] bf16, which kernels read in place of holes and missing heads.

    Raises:
        RuntimeError: a CUDA graph is being captured and the kernel has not run on the device before. The row would be
            allocated from the graph's memory.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"sparse_attention: a CUDA graph is being captured, and the kernel has not run on {device} before; make "
            "the same call once without a graph"
        )
    return torch.zeros(ROW_DIM, dtype=torch.bfloat16, device=device)
