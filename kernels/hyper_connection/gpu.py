"""The hyper-connections on Hopper and Blackwell: plans and launches. The kernel is in `kernel`.

`hc_boundary`, `hc_enter` and `hc_finish` are configurations of that kernel, one launch each.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from cutlass import Int32
from torch import Tensor

from dsv4_kernels.device import expert_rows
from dsv4_kernels.device.peer_words import peers_of
from dsv4_kernels.host import joint_launch, mailboxes
from dsv4_kernels.host.addresses import address
from dsv4_kernels.host.arch import ARCHITECTURES, architecture, clusters_at_once, implementation_of
from dsv4_kernels.host.expert_rows import ExpertRows
from dsv4_kernels.host.fp8_rows import new_codes
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.mailboxes import CLUSTER, MOST_THREADS
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.hyper_connection.kernel import HyperConnection
from dsv4_kernels.hyper_connection.plan import (
    HEAD_ROWS,
    PRE_ROWS,
    STREAMS,
    TEAMS,
    TOKENS,
    Arguments,
    Plan,
    arguments_of,
)
from dsv4_kernels.hyper_connection.unbalanced import MOST_TOKENS as MOST_UNBALANCED
from dsv4_kernels.hyper_connection.unbalanced import Unbalanced
from dsv4_kernels.model_shapes import ModelShapes

MOST_TOKENS = {1: 4, 2: 16, 4: 64, 8: 128}
"""Tokens of a token group -> the most tokens of a call that uses it, one group a cluster. With few tokens, small groups
spread the work over more clusters; with many, large groups read fn, 1.5 MB a cluster, from L2 less often."""
MOST_TOKENS_OF_ONE_CTA = 16
"""Most tokens of a call whose CTAs have a multiprocessor each (benchmarks/results/boundary_h200_x4.json): its few
clusters find enough of them, and all of fn is in shared memory, with V4-Flash's width, when the kernel before ends."""


def chosen(
    num_tokens: int,
    dim: int,
    rows: int,
    post: bool,
    bf16_weight: bool,
    fp8: bool = False,
    clusters: int | None = None,
) -> Plan:
    """The plan for a number of tokens. A token's bits do not depend on it.

    With more tokens than one group for each cluster that the GPU runs at once, clusters are persistent and keep fn in
    shared memory, if it fits: fn is then read from L2 once a cluster, not once a group.

    On Blackwell every CTA of a boundary of fewer tokens has a multiprocessor of its own, which it reads fn into before
    the kernel before ends: groups are so large that all clusters run at once. Modelled (docs/step_model.md).

    Args:
        num_tokens: of the call.
        dim, rows, post, bf16_weight, fp8: of the plan.
        clusters: on Blackwell, clusters that run at once with one CTA on each multiprocessor; None on Hopper.
    """
    tokens = next((tokens for tokens, most in MOST_TOKENS.items() if num_tokens <= most), None)
    form = (dim, rows, post, bf16_weight)
    if clusters is not None and tokens is not None and rows == PRE_ROWS:
        sizes = [size for size in TOKENS if size >= tokens and -(-num_tokens // size) <= clusters]
        if sizes:
            return Plan(sizes[0], *form, fp8=fp8, one_cta=True, interleaved=True)
        return Plan(TOKENS[-1], *form, fp8=fp8)
    if tokens is None and Plan(TOKENS[-1], *form, teams=TEAMS).fits:
        return Plan(TOKENS[-1], *form, teams=TEAMS, fp8=fp8)
    one_cta = rows == PRE_ROWS and num_tokens <= MOST_TOKENS_OF_ONE_CTA
    return Plan(tokens or TOKENS[-1], *form, fp8=fp8, one_cta=one_cta)


def served(plan: Plan, num_tokens: int) -> Plan:
    """The plan in a model's forwards: up to MOST_UNBALANCED tokens comb is balanced by the launch that reads it."""
    if num_tokens > MOST_UNBALANCED:
        return plan
    return replace(plan, balances_ended=plan.post, balances=plan.rows != PRE_ROWS)


def compile(plan: Plan, arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, clusters, stream).

    Raises:
        ValueError: a width that the kernel does not support.
    """
    plan.check()
    return load_launcher("hyper_connection", plan, arch, HyperConnection(plan).launch, arguments_of(plan), Int32)


def with_parts(
    plan: Plan, boxes: mailboxes.Plan, clusters_at_once: int, num_tokens: int, parts: torch.dtype
) -> Plan | None:
    """The plan that sums parts through the mailboxes of a group; None if its launch does not fit.

    The answer is the same on all ranks.

    Args:
        plan: without ranks.
        boxes: geometry of the mailboxes; every CTA of a launch needs a channel.
        clusters_at_once: with one CTA on each multiprocessor, on every GPU of the group. All clusters of a launch must
            be resident at once.
        num_tokens: of the launch.
        parts: dtype of the parts.
    """
    clusters = -(-num_tokens // plan.tokens)
    fits = plan.teams == 1 and clusters <= min(clusters_at_once * plan.ctas, boxes.channels // CLUSTER)
    if not plan.has_a_kernel or not fits or plan.threads > boxes.threads:
        return None
    made = replace(plan, ranks=boxes.ranks, fp32_parts=parts == torch.float32, sender_threads=boxes.threads)
    return made if made.places <= boxes.places else None


def most_tokens_of_parts(boxes: mailboxes.Mailboxes, dim: int, parts: torch.dtype, name: str | None = None) -> int:
    """The most tokens that `hc_boundary_of_parts` takes, with any smaller number; 0 if it takes none.

    The answer is the same on all ranks.

    Args:
        boxes: of the group.
        dim: d.
        parts: dtype of the parts.
        name: "sm90" or "sm100"; None for the GPU that has the mailboxes.
    """
    name = name or implementation_of(boxes.buffer_of.device)
    return _most_tokens_of_parts(boxes.plan, boxes.clusters, dim, parts, name == "sm100")


@functools.cache
def _most_tokens_of_parts(
    boxes: mailboxes.Plan, clusters: int, dim: int, parts: torch.dtype, on_blackwell: bool
) -> int:
    def fits(num_tokens: int) -> bool:
        allowed = _clusters_with_channels(boxes, clusters) if on_blackwell else None
        plan = chosen(num_tokens, dim, PRE_ROWS, True, False, clusters=allowed)
        return with_parts(plan, boxes, clusters, num_tokens, parts) is not None

    return max(itertools.takewhile(fits, range(1, max(MOST_TOKENS.values()) + 1)), default=0)


def possible_clusters(arch: str, num_tokens: int) -> tuple[int | None, ...]:
    """Values of `clusters` with which `chosen` returns every plan that it returns for this number of tokens on any GPU
    of the architecture: the machine that compiles ahead may have none."""
    if arch == ARCHITECTURES["sm90"]:
        return (None,)
    return (*(-(-num_tokens // size) for size in TOKENS), 0)


def plans(dim: int, fp8: bool, arch: str, bf16_weight: bool = False, fewest: int = 1) -> list[Plan]:
    """All plans that a model of this width runs, to compile them ahead.

    Args:
        dim: d.
        fp8: whether sublayers also take their input as e4m3.
        arch: to compile for.
        bf16_weight: whether the norms' weights are bf16; otherwise they are fp32.
        fewest: the fewest tokens of a forward.
    """
    forms = {  # functions that a model calls: rows of fn, post, and whether a sublayer follows
        "hc_boundary": (PRE_ROWS, True, True),
        "hc_enter": (PRE_ROWS, False, True),
        "hc_finish": (HEAD_ROWS, True, False),
    }
    sizes = (*(most for most in MOST_TOKENS.values() if most >= fewest), max(MOST_TOKENS.values()) + 1)
    made = (
        served(chosen(size, dim, rows, post, bf16_weight, fp8 and follows, clusters), size)
        for rows, post, follows in forms.values()
        for size in sizes
        for clusters in possible_clusters(arch, size)
    )
    return list(dict.fromkeys(made))


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of the kernels of `hc_boundary`, `hc_enter` and `hc_finish`."""
    made = plans(model.hidden_size, model.quantises_inputs, arch)
    if model.fewest_own_rows:  # a rank's own rows are gathered first and quantised after that
        made += plans(model.hidden_size, False, arch, fewest=model.fewest_own_rows)
    if model.leaves_expert_rows and not model.peer_boundary_tokens:
        for size in _sizes(_joint_tokens(arch)):
            for clusters in possible_clusters(arch, size):
                form = (model.hidden_size, PRE_ROWS, True, False, model.quantises_inputs)
                made += _summing_experts(served(chosen(size, *form, clusters), size), model, arch)
    return [functools.partial(compile, plan, arch) for plan in dict.fromkeys(made)]


def parts_compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of the kernels of `hc_boundary_of_parts`, for parts of the attention and of the experts."""
    made = []
    for size in _sizes(model.peer_boundary_tokens):
        for clusters in possible_clusters(arch, size):
            plan = chosen(size, model.hidden_size, PRE_ROWS, True, False, model.quantises_inputs, clusters)
            plan = replace(
                served(plan, size),
                ranks=model.peer_sum_ranks,
                sender_threads=MOST_THREADS,
            )
            in_fp32 = replace(plan, fp32_parts=True)
            made += [plan, in_fp32] if model.experts_sum_fp32 else [plan]
            if model.leaves_expert_rows and size <= _joint_tokens(arch):
                made += _summing_experts(in_fp32 if model.experts_sum_fp32 else plan, model, arch)
    return [functools.partial(compile, plan, arch) for plan in dict.fromkeys(made)]


def _sizes(most: int) -> list[int]:
    """The fewest tokens of each size of token groups, of calls of up to `most` tokens."""
    return [size for size in (1, *(tokens + 1 for tokens in MOST_TOKENS.values())) if size <= most]


def _joint_tokens(arch: str) -> int:
    """Most tokens of a forward whose boundaries sum over experts."""
    return joint_launch.MOST_TOKENS["sm90" if arch == ARCHITECTURES["sm90"] else "sm100"]


def _summing_experts(plan: Plan, model: ModelShapes, arch: str) -> list[Plan]:
    """The plan as it sums over experts. The lists may be read ahead after Hopper's products for one token."""
    summing = replace(plan, experts=model.experts_per_token)
    ahead = arch == ARCHITECTURES["sm90"] and plan.tokens == 1
    return [summing, replace(summing, reads_ahead=True)] if ahead else [summing]


def run(
    name: str,
    op: str,
    rows: int,
    streams: Tensor,
    written_back: tuple[Tensor | ExpertRows, Tensor, Tensor | Unbalanced] | None,
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
    balances: bool = True,
) -> tuple[Tensor | Unbalanced | None, ...]:
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
        balances: whether comb is balanced; otherwise it is left `Unbalanced`.

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
        plan = chosen(num_tokens, *form, fp8, _clusters(name, streams.device, boxes))
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
    plan = replace(plan, balances_ended=isinstance(comb, Unbalanced), balances=balances)
    if isinstance(comb, Unbalanced):
        iterations = comb.iterations if rows == HEAD_ROWS else iterations
        if (comb.hc_eps, comb.iterations) != (hc_eps, iterations):
            raise ValueError(
                f"{op}: the GPU kernels balance comb with hc_eps {hc_eps} and {iterations} iterations; the sublayer "
                f"that ends has {comb.hc_eps} and {comb.iterations}"
            )
        comb = comb.logits
    if plan.teams > 1 and (plan.balances_ended or not plan.balances):
        raise ValueError(f"{op}: {num_tokens} tokens; comb of at most {MOST_UNBALANCED} tokens may be unbalanced")
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
    made_comb = out_comb if balances else Unbalanced(out_comb, hc_eps, iterations)
    made_ones = (out_streams, out, out_post, made_comb)
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


def _clusters(name: str, device: torch.device, boxes: mailboxes.Mailboxes | None) -> int | None:
    """`clusters` for `chosen`; the same on all ranks that share mailboxes."""
    if name == "sm90":
        return None
    return clusters_at_once(device, CLUSTER) if boxes is None else _clusters_with_channels(boxes.plan, boxes.clusters)


def _clusters_with_channels(boxes: mailboxes.Plan, clusters: int) -> int:
    """Clusters that run at once on every GPU of a group, at most those whose CTAs have a channel each."""
    return min(clusters, boxes.channels // CLUSTER)


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
    comb: Tensor | Unbalanced,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    fp8: bool = False,
    balances: bool = True,
) -> tuple[Tensor | Unbalanced, ...]:
    """`dsv4_kernels.hyper_connection.hc_boundary`."""
    written_back, parameters, numbers = (y, post, comb), (fn, base, scale), (norm_eps, hc_eps, iterations)
    form = (PRE_ROWS, streams, written_back, parameters, norm_weight)
    return run(name, "hc_boundary", *form, *numbers, fp8=fp8, balances=balances)


def hc_boundary_of_parts(
    name: str,
    part: Tensor | ExpertRows,
    boxes: mailboxes.Mailboxes,
    streams: Tensor,
    post: Tensor,
    comb: Tensor | Unbalanced,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    fp8: bool = False,
    balances: bool = True,
) -> tuple[Tensor | Unbalanced, ...]:
    """`dsv4_kernels.hyper_connection.hc_boundary_of_parts`."""
    written_back, parameters, numbers = (part, post, comb), (fn, base, scale), (norm_eps, hc_eps, iterations)
    form = (PRE_ROWS, streams, written_back, parameters, norm_weight)
    return run(name, "hc_boundary_of_parts", *form, *numbers, fp8=fp8, boxes=boxes, balances=balances)


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
    balances: bool = True,
) -> tuple[Tensor | Unbalanced, ...]:
    """`dsv4_kernels.hyper_connection.hc_enter`."""
    parameters, numbers = (fn, base, scale), (norm_eps, hc_eps, iterations)
    form = (PRE_ROWS, streams, None, parameters, norm_weight)
    return run(name, "hc_enter", *form, *numbers, fp8=fp8, balances=balances)[1:]


def hc_finish(
    name: str,
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor | Unbalanced,
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
