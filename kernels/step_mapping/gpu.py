"""A step's slot mapping on a GPU (sm_90a, sm_100a): one CTA a request, one launch; no thread waits for another."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.model_shapes import ModelShapes
from dsv4_kernels.step_mapping.layout import GroupMapping, StepLayout, StepMapping

THREADS = 128


class GroupAddresses(NamedTuple):
    """Addresses, Int64, of one ratio's mapping."""

    sources: Int64  # [M, C * r] int32
    slots: Int64  # [M] int64
    positions: Int64  # [M] int64
    state_rows: Int64  # [T] int64
    visible: Int64  # [T] int32


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel."""

    first_positions: Int64  # [B] int64
    req_slots: Int64  # [B] int64
    req_to_token: Int64  # [N, L] int32
    req_to_token_row: Int64  # bytes from row to row
    num_pages: Int32  # P
    request_slots: Int32
    positions: Int64  # [T] int64
    token_to_request: Int64  # [T] int32
    page_table: Int64  # [B, P] int32
    window_rows: Int64  # [T, W] int32
    ring_rows: Int64  # [T] int64


class StepMappingKernel:
    """The kernel for one layout and one number of tokens a request.

    Args:
        layout: dimensions, compile-time constants.
        tokens_per_request: k.
    """

    def __init__(self, layout: StepLayout, tokens_per_request: int) -> None:
        self.layout = layout
        self.tokens = tokens_per_request

    @cute.jit
    def launch(self, args: Arguments, groups: tuple, requests: Int32, stream: cuda.CUstream) -> None:
        """Launches one CTA for each request."""
        self.kernel(args, groups).launch(
            grid=[requests, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
        )

    @cute.kernel
    def kernel(self, args: Arguments, groups: tuple) -> None:
        """Computes the whole mapping of one request."""
        dependent_launch.begin()
        thread, _, _ = cute.arch.thread_idx()
        request, _, _ = cute.arch.block_idx()
        first = load_position(args.first_positions + Int64(request) * 8)
        slot = load_position(args.req_slots + Int64(request) * 8)
        table = args.req_to_token + Int64(slot) * args.req_to_token_row
        self.pages(args, table, request, slot, thread)
        self.window(args, request, slot, first, thread)
        for i in cutlass.range_constexpr(len(self.layout.groups)):
            self.groups_of(i, args, groups[i], table, request, slot, first, thread)

    @cute.jit
    def pages(self, args: Arguments, table: Int64, request: Int32, slot: Int32, thread: Int32) -> None:
        """Writes the request's row of the page table."""
        out = args.page_table + Int64(request) * args.num_pages * 4
        for place in cutlass.range(thread, args.num_pages, THREADS):
            page = Int32(0)
            if slot != 0:
                page = page_of(table, place, self.layout.page_tokens)
            ptx.store_i32(out + Int64(place) * 4, page)

    @cute.jit
    def window(self, args: Arguments, request: Int32, slot: Int32, first: Int32, thread: Int32) -> None:
        """Writes positions, request numbers, ring rows written and window rows read of the request's tokens."""
        window, ring, blocks = self.layout.window_tokens, self.layout.ring_rows, self.layout.blocks
        width = window_width(self.layout, self.tokens)
        token = request * self.tokens
        for i in cutlass.range(thread, self.tokens, THREADS):
            store_i64(args.positions + Int64(token + i) * 8, first + i)
            ptx.store_i32(args.token_to_request + Int64(token + i) * 4, request)
            store_i64(args.ring_rows + Int64(token + i) * 8, slot * ring + (first + i) % ring)
        out = args.window_rows + Int64(token) * (width * 4)
        for place in cutlass.range(thread, self.tokens * width, THREADS):
            seen = first - window + place % width
            if cutlass.const_expr(not blocks):
                seen += 1 + place // width
            row = Int32(-1)
            if seen >= 0:
                row = slot * ring + seen % ring
            ptx.store_i32(out + Int64(place) * 4, row)

    @cute.jit
    def groups_of(
        self,
        index: cutlass.Constexpr,
        args: Arguments,
        out: GroupAddresses,
        table: Int64,
        request: Int32,
        slot: Int32,
        first: Int32,
        thread: Int32,
    ) -> None:
        """Writes one ratio's part: the compression groups that the request may close, and where its raw rows are
        kept."""
        group = self.layout.groups[index]
        ratio, rows = group.ratio, group.state_rows
        num_sources, per_request = group.overlap_groups * ratio, -(-self.tokens // ratio)
        per_page = self.layout.page_tokens // ratio
        token = request * self.tokens
        for i in cutlass.range(thread, self.tokens, THREADS):
            store_i64(out.state_rows + Int64(token + i) * 8, slot * rows + (first + i) % rows)
            ptx.store_i32(out.visible + Int64(token + i) * 4, (first + i + 1) // ratio)
        for place in cutlass.range(thread, per_request * num_sources, THREADS):
            begin = (first // ratio + place // num_sources) * ratio
            raw = begin + (place % num_sources - (num_sources - ratio))
            source = Int32(-1)
            if (raw >= 0) & (begin + ratio <= first + self.tokens):
                source = slot * rows + raw % rows
                if raw >= first:
                    source = args.request_slots * rows + token + (raw - first)
            number = Int64(request) * (per_request * num_sources) + place
            ptx.store_i32(out.sources + number * 4, source)
        for i in cutlass.range(thread, per_request, THREADS):
            begin = (first // ratio + i) * ratio
            row = Int64(0)
            if begin + ratio <= first + self.tokens:
                page = Int32(0)
                if slot != 0:
                    page = page_of(table, begin // self.layout.page_tokens, self.layout.page_tokens)
                row = Int64(page) * per_page + (begin // ratio) % per_page
            number = Int64(request) * per_request + i
            store_i64(out.slots + number * 8, row)
            store_i64(out.positions + number * 8, begin)


def window_width(layout: StepLayout, tokens_per_request: int) -> int:
    """Number of window rows in a token's list."""
    return layout.window_tokens + (tokens_per_request if layout.blocks else 0)


@cute.jit
def load_position(address: Int64) -> Int32:
    """The low word of a non-negative int64: positions and request slots are below 2**31."""
    return ptx.load_i32(address)


@cute.jit
def page_of(table: Int64, place: Int32, page_tokens: cutlass.Constexpr) -> Int32:
    """The number of a request's page, from the token slot of its first token."""
    return ptx.load_i32(table + Int64(place) * (page_tokens * 4)) // page_tokens


def store_i64(address: Int64, x: Int32 | Int64) -> None:
    """Stores an int64 to global memory."""
    ptx.asm("st.global.b64 [{$r0}], {$r1};", [], address, Int64(x))


# Host side


def compile(arch: str, layout: StepLayout, tokens_per_request: int) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, addresses of the groups,
    requests, stream)."""

    kernel, groups = StepMappingKernel(layout, tokens_per_request), (GroupAddresses,) * len(layout.groups)
    return load_launcher("step_mapping", (layout, tokens_per_request), arch, kernel.launch, Arguments, groups, Int32)


def _run(
    name: str,
    first_positions: Tensor,
    req_slots: Tensor,
    req_to_token: Tensor,
    tokens_per_request: int,
    num_pages: int,
    request_slots: int,
    layout: StepLayout,
) -> StepMapping:
    device, requests = req_slots.device, req_slots.shape[0]
    tokens = requests * tokens_per_request

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    groups = []
    for group in layout.groups:
        number = requests * -(-tokens_per_request // group.ratio)
        groups.append(
            GroupMapping(
                sources=empty(number, group.overlap_groups * group.ratio, dtype=torch.int32),
                slots=empty(number, dtype=torch.int64),
                positions=empty(number, dtype=torch.int64),
                state_rows=empty(tokens, dtype=torch.int64),
                visible=empty(tokens, dtype=torch.int32),
            )
        )
    found = StepMapping(
        positions=empty(tokens, dtype=torch.int64),
        token_to_request=empty(tokens, dtype=torch.int32),
        page_table=empty(requests, num_pages, dtype=torch.int32),
        window_rows=empty(tokens, window_width(layout, tokens_per_request), dtype=torch.int32),
        ring_rows=empty(tokens, dtype=torch.int64),
        groups=tuple(groups),
    )
    if requests:
        first_positions, req_slots = first_positions.contiguous(), req_slots.contiguous()
        arguments = Arguments(
            first_positions=first_positions.data_ptr(),
            req_slots=req_slots.data_ptr(),
            req_to_token=req_to_token.data_ptr(),
            req_to_token_row=req_to_token.stride(0) * 4,
            num_pages=num_pages,
            request_slots=request_slots,
            **{name: Int64(getattr(found, name).data_ptr()) for name in StepMapping._fields if name != "groups"},
        )
        addresses = tuple(GroupAddresses(*(Int64(tensor.data_ptr()) for tensor in group)) for group in groups)
        launch = compile(architecture(name, device), layout, tokens_per_request)
        launch(arguments, addresses, Int32(requests), current_stream(device))
    return found


def sm90(*arguments: object) -> StepMapping:
    """`dsv4_kernels.step_mapping.step_mapping` on Hopper."""
    return _run("sm90", *arguments)


def sm100(*arguments: object) -> StepMapping:
    """`dsv4_kernels.step_mapping.step_mapping` on Blackwell (B200, GB200, B300)."""
    return _run("sm100", *arguments)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of every mapping of the model's steps."""
    return [partial(compile, arch, layout, tokens) for layout, tokens in model.step_mappings]
