"""Chooses the plan of a hyper-connection call, and lists the plans to compile for a model.

A token's bits do not depend on the plan.
"""

import functools
import itertools
from dataclasses import replace

import torch

from dsv4_kernels.host import joint_launch, mailboxes
from dsv4_kernels.host.arch import ARCHITECTURES, clusters_at_once, implementation_of
from dsv4_kernels.host.mailboxes import CLUSTER, MOST_THREADS
from dsv4_kernels.hyper_connection.plan import HEAD_ROWS, PRE_ROWS, TEAMS, TOKENS, Plan
from dsv4_kernels.model_shapes import ModelShapes

MOST_TOKENS = {1: 4, 2: 16, 4: 64, 8: 128}
"""Tokens of a token group -> the most tokens of a call that uses it, one group a cluster. With few tokens, small groups
spread the work over more clusters; with many, large groups read fn, 1.5 MB a cluster, from L2 less often."""
MOST_TOKENS_OF_ONE_CTA = 16
"""Most tokens of a call whose CTAs have a multiprocessor each (benchmarks/results/boundary_h200_x4.json): its few
clusters find enough of them, and all of fn is in shared memory, with V4-Flash's width, when the kernel before ends."""

KEPT = 4096
"""Choices that are kept: a prefill makes the same one at every boundary."""


@functools.lru_cache(KEPT)
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
        chosen(size, dim, rows, post, bf16_weight, fp8 and follows, clusters)
        for rows, post, follows in forms.values()
        for size in sizes
        for clusters in possible_clusters(arch, size)
    )
    return list(dict.fromkeys(made))


def plans_of_model(model: ModelShapes, arch: str) -> list[Plan]:
    """The plans of all calls of `hc_boundary`, `hc_enter` and `hc_finish` in a model's forwards.

    Args:
        model: shapes.
        arch: to compile for.
    """
    made = plans(model.hidden_size, model.quantises_inputs, arch)
    if model.fewest_own_rows:  # a rank's own rows are gathered first and quantised after that
        made += plans(model.hidden_size, False, arch, fewest=model.fewest_own_rows)
    if model.leaves_expert_rows and not model.peer_boundary_tokens:
        for size in _sizes(_joint_tokens(arch)):
            for clusters in possible_clusters(arch, size):
                form = (model.hidden_size, PRE_ROWS, True, False, model.quantises_inputs)
                made += _summing_experts(chosen(size, *form, clusters), model, arch)
    return list(dict.fromkeys(made))


def plans_of_parts(model: ModelShapes, arch: str) -> list[Plan]:
    """The plans of all calls of `hc_boundary_of_parts` in a model's forwards, for parts of the attention and of the
    experts.

    Args:
        model: shapes.
        arch: to compile for.
    """
    made = []
    for size in _sizes(model.peer_boundary_tokens):
        for clusters in possible_clusters(arch, size):
            plan = chosen(size, model.hidden_size, PRE_ROWS, True, False, model.quantises_inputs, clusters)
            plan = replace(plan, ranks=model.peer_sum_ranks, sender_threads=MOST_THREADS)
            in_fp32 = replace(plan, fp32_parts=True)
            made += [plan, in_fp32] if model.experts_sum_fp32 else [plan]
            if model.leaves_expert_rows and size <= _joint_tokens(arch):
                made += _summing_experts(in_fp32 if model.experts_sum_fp32 else plan, model, arch)
    return list(dict.fromkeys(made))


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


def clusters_of(name: str, device: torch.device, boxes: mailboxes.Mailboxes | None) -> int | None:
    """`clusters` of `chosen` on this GPU; the same on all ranks that share mailboxes."""
    if name == "sm90":
        return None
    return clusters_at_once(device, CLUSTER) if boxes is None else _clusters_with_channels(boxes.plan, boxes.clusters)


def _clusters_with_channels(boxes: mailboxes.Plan, clusters: int) -> int:
    """Clusters that run at once on every GPU of a group, at most those whose CTAs have a channel each."""
    return min(clusters, boxes.channels // CLUSTER)
