"""Launches of the hyper-connections on Hopper and Blackwell: `kernel` is what runs, `choice` chooses its plan.

`hc_boundary`, `hc_enter` and `hc_finish` are configurations of that kernel, one launch each.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from cutlass import Int32
from torch import Tensor

from dsv4_kernels.device import expert_rows
from dsv4_kernels.device.peer_words import peers_of
from dsv4_kernels.host import mailboxes
from dsv4_kernels.host.addresses import address
from dsv4_kernels.host.arch import ARCHITECTURES, architecture, clusters_at_once
from dsv4_kernels.host.expert_rows import ExpertRows
from dsv4_kernels.host.fp8_rows import new_codes
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.mailboxes import CLUSTER
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.hyper_connection.choice import (
    MOST_TOKENS,
    chosen,
    clusters_of,
    most_tokens_of_parts,
    plans_of_model,
    plans_of_parts,
    with_parts,
)
from dsv4_kernels.hyper_connection.kernel import HyperConnection
from dsv4_kernels.hyper_connection.plan import (
    HEAD_ROWS,
    PRE_ROWS,
    STREAMS,
    Arguments,
    Plan,
    arguments_of,
)
from dsv4_kernels.model_shapes import ModelShapes


def compile(plan: Plan, arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, clusters, stream).

    Raises:
        ValueError: a width that the kernel does not support.
    """
    plan.check()
    return load_launcher("hyper_connection", plan, arch, HyperConnection(plan).launch, arguments_of(plan), Int32)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of the kernels of `hc_boundary`, `hc_enter` and `hc_finish`."""
    return [functools.partial(compile, plan, arch) for plan in plans_of_model(model, arch)]


def parts_compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of the kernels of `hc_boundary_of_parts`, for parts of the attention and of the experts."""
    return [functools.partial(compile, plan, arch) for plan in plans_of_parts(model, arch)]


def run(
    name: str,
    op: str,
    rows: int,
    streams: Tensor,
    written_back: tuple[Tensor | ExpertRows, Tensor, Tensor] | None,
    parameters: tuple[Tensor, Tensor, Tensor],
    norm_weight: Tensor,
    norm_eps: float = 0.0,
    hc_eps: float = 0.0,
    iterations: int = 1,
    tokens: int | None = None,
    teams: int = 1,
    fp8: bool = False,
    boxes: mailboxes.Mailboxes | None = None,
    interleaved: bool = False,
) -> tuple[Tensor | None, ...]:
    """Launches one form of the kernel.

    Args:
        name: "sm90" or "sm100".
        op: the function's name, for errors.
        rows: of fn.
        streams: [T, 4, d] bf16.
        written_back: y, or rows of experts whose sum is y, post and comb of the sublayer that ends; None if none ends.
        parameters: fn, base and scale.
        norm_weight: [d] fp32 or bf16.
        norm_eps, hc_eps, iterations: as in the functions.
        tokens: of a token group; None chooses `tokens`, `teams` and `interleaved`.
        teams: of a CTA.
        fp8: whether the normed mixture is also made as e4m3.
        boxes: mailboxes through which y, of which each rank has a part, is summed; None if y is the whole output.
        interleaved: whether products are interleaved, with one CTA a multiprocessor.

    Returns:
        streams, the normed mixture, post, comb; None for results that this form does not make. With `fp8` also
            codes and scales.

    Raises:
        ValueError: dtypes, widths or strides that the kernel does not support.
    """
    num_tokens, n, dim = streams.shape
    if n != STREAMS:
        raise ValueError(f"{op}: the GPU kernels are made for {STREAMS} streams; got {n}. Choose impl='ref'")
    form = (dim, rows, written_back is not None, norm_weight.dtype == torch.bfloat16)
    if tokens is None:
        plan = chosen(num_tokens, *form, fp8, clusters_of(name, streams.device, boxes))
    else:
        plan = Plan(tokens, *form, teams, fp8, one_cta=interleaved, interleaved=interleaved)
    plan.check()  # also for an empty batch, which compiles nothing
    y, post, comb = written_back or (None, None, None)
    fn, base, scale = parameters
    if boxes is not None:
        made_of_parts = with_parts(plan, boxes.plan, boxes.clusters, num_tokens, y.dtype)
        if made_of_parts is None:
            most = most_tokens_of_parts(boxes, dim, y.dtype, name)
            raise ValueError(
                f"{op}: {num_tokens} tokens in groups of {plan.tokens}; these mailboxes and GPUs take at most {most} "
                f"tokens of {dim} channels in {y.dtype}. Sum the parts first (all_reduce), then call hc_boundary"
            )
        plan = made_of_parts
    of_experts = y if isinstance(y, ExpertRows) else None
    if of_experts is not None:
        plan, y = _with_experts(op, plan, of_experts), None
    _check(op, {"y": y}, (torch.bfloat16,) if boxes is None else (torch.bfloat16, torch.float32))
    _check(op, {"streams": streams}, (torch.bfloat16,))
    _check(op, {"post": post, "comb": comb}, (torch.float32,))
    _check(op, {"fn": fn, "base": base, "scale": scale}, (torch.float32,), dense=True)
    _check(op, {"norm_weight": norm_weight}, (torch.float32, torch.bfloat16), dense=True)
    if comb is not None and comb.stride(1) != STREAMS:
        raise ValueError(f"{op}: the matrices of comb must be contiguous; got strides {comb.stride()}")

    def made(is_made: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(num_tokens, *shape, dtype=dtype, device=streams.device) if is_made else None

    out_streams = made(plan.post, STREAMS, dim, dtype=torch.bfloat16)
    out = made(True, dim, dtype=torch.bfloat16)
    out_post, out_comb = made(rows == PRE_ROWS, STREAMS), made(rows == PRE_ROWS, STREAMS, STREAMS)
    codes, scales, places = new_codes(num_tokens, dim, True, streams.device) if fp8 else (None, None, None)
    if num_tokens:
        arguments = Arguments(
            num_tokens=num_tokens,
            y=address(y),
            y_stride=stride_bytes(y, 0),
            streams=address(streams),
            streams_stride=stride_bytes(streams, 0),
            stream_stride=stride_bytes(streams, 1),
            post=address(post),
            post_stride=stride_bytes(post, 0),
            comb=address(comb),
            comb_stride=stride_bytes(comb, 0),
            fn=address(fn),
            base=address(base),
            scale=address(scale),
            norm_weight=address(norm_weight),
            norm_eps=norm_eps,
            hc_eps=hc_eps,
            iterations=iterations,
            out_streams=address(out_streams),
            out=address(out),
            out_post=address(out_post),
            out_comb=address(out_comb),
            out_codes=address(codes),
            out_scales=address(scales),
            scale_block_stride=places.scale_block_bytes if fp8 else 0,
        )
        peers = () if boxes is None else (peers_of(boxes),)
        rows_of = () if of_experts is None else (expert_rows.arguments(*of_experts.tensors),)
        arguments = arguments_of(plan)(*arguments, *peers, *rows_of)
        device, num_clusters = streams.device, -(-num_tokens // plan.tokens)
        if plan.teams > 1:
            num_clusters = min(-(-num_clusters // plan.teams), clusters_at_once(device, CLUSTER))
        compile(plan, architecture(name, device))(arguments, Int32(num_clusters), current_stream(device))
    made_ones = (out_streams, out, out_post, out_comb)
    return (*made_ones, codes, scales) if fp8 else made_ones


def _with_experts(op: str, plan: Plan, y: ExpertRows) -> Plan:
    """The plan that sums the rows of experts.

    Raises:
        ValueError: more tokens than a plan of one team takes, or rows that the kernel cannot read.
    """
    if plan.teams > 1:
        most = max(MOST_TOKENS.values())
        raise ValueError(f"{op}: {len(y.experts)} tokens; it sums the rows of experts for at most {most}")
    for name in ("rows", "shared"):
        check_rows(f"{op}: {name}", getattr(y, name), plan.dim)
    for name, tensor in (("rows", y.rows), ("experts", y.experts), ("slot_of_pair", y.slot_of_pair)):
        dtype = torch.bfloat16 if name == "rows" else torch.int32
        if not tensor.is_contiguous() or tensor.dtype != dtype:
            raise ValueError(f"{op}: {name} must be contiguous {dtype}; got {tensor.dtype} {tensor.stride()}")
    return replace(plan, experts=y.experts.shape[1], reads_ahead=y.reads_ahead)


def _check(op: str, tensors: dict[str, Tensor | None], dtypes: tuple[torch.dtype, ...], dense: bool = False) -> None:
    """Raises ValueError for tensors that the kernel cannot read in units of 16 bytes."""
    for name, x in tensors.items():
        if x is None:
            continue
        unit = 16 // x.element_size()
        rows_apart = x.is_contiguous() if dense else x.stride(-1) == 1 and not any(s % unit for s in x.stride()[:-1])
        if name == "comb":
            rows_apart = x.stride(-1) == 1 and x.stride(0) % unit == 0
        aligned = name in ("base", "scale") or x.data_ptr() % 16 == 0
        if x.dtype not in dtypes or not rows_apart or not aligned:
            layout = "contiguous" if dense else "with contiguous rows at multiples of 16 bytes"
            raise ValueError(
                f"{op}: the GPU kernels take {name} in {' or '.join(map(str, dtypes))}, {layout}; "
                f"got {x.dtype} with strides {x.stride()} at address {x.data_ptr():#x}"
            )


# The functions of this package. name: "sm90" or "sm100"


def hc_boundary(
    name: str,
    y: Tensor | ExpertRows,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    fp8: bool = False,
) -> tuple[Tensor, ...]:
    """`dsv4_kernels.hyper_connection.hc_boundary`."""
    written_back, parameters, numbers = (y, post, comb), (fn, base, scale), (norm_eps, hc_eps, iterations)
    form = (PRE_ROWS, streams, written_back, parameters, norm_weight)
    return run(name, "hc_boundary", *form, *numbers, fp8=fp8)


def hc_boundary_of_parts(
    name: str,
    part: Tensor | ExpertRows,
    boxes: mailboxes.Mailboxes,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    fp8: bool = False,
) -> tuple[Tensor, ...]:
    """`dsv4_kernels.hyper_connection.hc_boundary_of_parts`."""
    written_back, parameters, numbers = (part, post, comb), (fn, base, scale), (norm_eps, hc_eps, iterations)
    form = (PRE_ROWS, streams, written_back, parameters, norm_weight)
    return run(name, "hc_boundary_of_parts", *form, *numbers, fp8=fp8, boxes=boxes)


def hc_enter(
    name: str,
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    fp8: bool = False,
) -> tuple[Tensor, ...]:
    """`dsv4_kernels.hyper_connection.hc_enter`."""
    parameters, numbers = (fn, base, scale), (norm_eps, hc_eps, iterations)
    form = (PRE_ROWS, streams, None, parameters, norm_weight)
    return run(name, "hc_enter", *form, *numbers, fp8=fp8)[1:]


def hc_finish(
    name: str,
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
) -> tuple[Tensor, ...]:
    """`dsv4_kernels.hyper_connection.hc_finish`."""
    written_back, parameters = (y, post, comb), (fn, base, scale)
    return run(name, "hc_finish", HEAD_ROWS, streams, written_back, parameters, norm_weight, norm_eps, hc_eps)[:2]


sm90_hc_boundary, sm100_hc_boundary = (functools.partial(hc_boundary, name) for name in ARCHITECTURES)
sm90_hc_boundary_of_parts, sm100_hc_boundary_of_parts = (
    functools.partial(hc_boundary_of_parts, name) for name in ARCHITECTURES
)
sm90_hc_enter, sm100_hc_enter = (functools.partial(hc_enter, name) for name in ARCHITECTURES)
sm90_hc_finish, sm100_hc_finish = (functools.partial(hc_finish, name) for name in ARCHITECTURES)
