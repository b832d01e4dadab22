"""Choice and weights of experts on Hopper and Blackwell (sm_90a, sm_100a): one warp a token, or several tokens if the
kernel is one of a chain.

Lane l has the scores of experts l, 32 + l, 64 + l, ... in registers. The learned router picks the best expert `top_k`
times: the best of a lane, the best of the warp, the lowest id among the experts with that score. In routing by token
id, lane j has the token's expert j.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from dsv4_kernels.device import bf16_rows, dependent_launch, ptx
from dsv4_kernels.device.bf16_rows import WARP, add, at_least, magnitude, mul
from dsv4_kernels.device.joint_kernel import Cta, cta_of_launch
from dsv4_kernels.host import joint_launch
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.joint_launch import Part
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import stride_bytes
from dsv4_kernels.model_shapes import ModelShapes
from dsv4_kernels.router.ref import LEAST_SUM

WARPS = 4
MOST_EXPERTS = 512
_CHOSEN = -(1 << 31)
_NO_EXPERT = (1 << 31) - 1
# Polynomial in s**2 for (atanh(s) / s - 1) / s**2 on [0, 1 / 9]; atanh(s) / s is right to 2**-31.
_LOG1P = (0.11612164974212646, 0.1085328757762909, 0.142961785197258, 0.19999852776527405, 0.3333333432674408)


@dataclass(frozen=True)
class Configuration:
    """Compile-time parameters besides the architecture."""

    top_k: int
    experts: int
    """Experts of the learned router; 0 for routing by token id."""
    wide_table: bool = False
    """Whether the table of experts is int64; otherwise int32."""
    wide_ids: bool = False
    """Whether token ids are int64; otherwise int32."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= WARP or self.experts > MOST_EXPERTS:
            raise ValueError(
                f"the GPU router takes up to {WARP} experts a token of up to {MOST_EXPERTS}; got {self.top_k} of "
                f'{self.experts}. The implementation "ref" takes any'
            )


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel; addresses are Int64."""

    logits: Int64  # fp32
    logits_row_bytes: Int64
    bias: Int64  # fp32 [E]
    table: Int64  # [V, k]
    token_ids: Int64
    vocabulary: Int64  # V
    weights: Int64  # fp32 [T, k]
    experts: Int64  # int32 [T, k]
    scale: Float32
    num_tokens: Int32


@cute.jit
def launch(
    arguments: Arguments, configuration: cutlass.Constexpr[Configuration], num_ctas: Int32, stream: cuda.CUstream
) -> None:
    """Launches one warp for each token."""
    kernel(arguments, configuration).launch(
        grid=[num_ctas, 1, 1], block=[WARPS * WARP, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def kernel(args: Arguments, configuration: cutlass.Constexpr[Configuration]) -> None:
    """The kernel of a launch of its own."""
    body(args, configuration, (), cta_of_launch())


@cute.jit
def body(
    args: Arguments, configuration: cutlass.Constexpr[Configuration], prepared: tuple, cta: cutlass.Constexpr[Cta]
) -> None:
    """Routes the tokens of a CTA."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    first, lane = cta.number * warps_of(cta) + thread // WARP, thread % WARP
    if cutlass.const_expr(warps_of(cta) > WARPS):  # the CTA of a chain has all tokens
        for token in cutlass.range(first, args.num_tokens, warps_of(cta), unroll=1):
            route(args, configuration, token, lane)
    elif first < args.num_tokens:
        route(args, configuration, first, lane)


@cute.jit
def route(args: Arguments, configuration: cutlass.Constexpr[Configuration], token: Int32, lane: Int32) -> None:
    """Routes one token, in a warp."""
    if cutlass.const_expr(configuration.experts > 0):
        by_score(args, configuration, token, lane)
    else:
        by_token_id(args, configuration, token, lane)


def warps_of(cta: Cta) -> int:
    """Warps, and so tokens, of a CTA."""
    return WARPS if cta.threads is None else cta.threads // WARP


def score_of(logit: Float32) -> Float32:
    """sqrt(softplus(logit)), to a relative 2**-21.

    softplus(x) is max(x, 0) + log1p(u) with u = exp(-|x|), and log1p(u) = 2 atanh(u / (2 + u)).
    """
    u = bf16_rows.exp(-magnitude(logit))
    s = mul(u, bf16_rows.reciprocal(add(u, Float32(2.0))))
    square, twice = mul(s, s), add(s, s)
    series = Float32(_LOG1P[0])
    for coefficient in _LOG1P[1:]:
        series = ptx.fma(series, square, Float32(coefficient))
    log1p = ptx.fma(mul(twice, square), series, twice)
    return bf16_rows.root(add(at_least(logit, Float32(0.0)), log1p))


def in_order(x: Float32) -> Int32:
    """The bits of an fp32 as an int32 of the same order. The NaN that the GPU makes becomes the largest number, as in a
    sort by PyTorch."""
    bits = Int32(ptx.as_u32(x))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def tree_sum(values: list) -> Float32:
    """The sum of the values, in the order of `dsv4_kernels.reference.batch_invariant.tree_sum`."""
    while len(values) > 1:
        half = len(values) // 2
        folded = [add(values[i], values[i + half]) for i in range(half)]
        values = folded + values[2 * half :]
    return values[0]


def best(args: Arguments, configuration: Configuration, token: Int32, lane: Int32) -> list:
    """(score, expert) of the chosen experts, in order, in all lanes."""
    logits = args.logits + Int64(token) * args.logits_row_bytes + lane * 4
    ids = [lane + i * WARP for i in range(-(-configuration.experts // WARP))]
    loaded = []
    for i, expert in enumerate(ids):
        exists = Int32(expert < configuration.experts)
        logit = ptx.load_or_zeros(Float32, 1, logits + i * WARP * 4, exists)
        bias = ptx.load_or_zeros(Float32, 1, args.bias + lane * 4 + i * WARP * 4, exists, cache="")
        loaded.append((logit, bias))
    scores = [score_of(logit) for logit, _ in loaded]
    keys = [in_order(add(score, bias)) for score, (_, bias) in zip(scores, loaded, strict=True)]
    if configuration.experts % WARP:
        keys[-1] = cutlass.select_(ids[-1] < configuration.experts, keys[-1], Int32(_CHOSEN))
    chosen = []
    for _ in range(configuration.top_k):
        key, score, expert = keys[0], scores[0], ids[0]
        for i in range(1, len(ids)):
            better = keys[i] > key  # of equal keys the earlier one stays
            key = cutlass.select_(better, keys[i], key)
            score = cutlass.select_(better, scores[i], score)
            expert = cutlass.select_(better, ids[i], expert)
        is_best = key == cute.arch.warp_redux_sync(key, "max")
        winner = cute.arch.warp_redux_sync(cutlass.select_(is_best, expert, Int32(_NO_EXPERT)), "min")
        chosen.append((cute.arch.shuffle_sync(score, winner % WARP), winner))
        keys = [cutlass.select_(ids[i] == winner, Int32(_CHOSEN), keys[i]) for i in range(len(ids))]
    return chosen


def weight_of(score: Float32, scores: list, scale: Float32) -> Float32:
    """`score / (sum of scores + LEAST_SUM) * scale`, rounded as in the reference."""
    return mul(bf16_rows.divide(score, add(tree_sum(scores), Float32(LEAST_SUM))), scale)


@cute.jit
def by_score(args: Arguments, configuration: cutlass.Constexpr[Configuration], token: Int32, lane: Int32) -> None:
    """Chooses experts by the gate's logits; lane j writes the j-th choice."""
    chosen = best(args, configuration, token, lane)
    score, expert = mine(chosen, lane)
    weight = weight_of(score, [score for score, _ in chosen], args.scale)
    if lane < configuration.top_k:
        write(args, configuration, token, lane, weight, expert)


def mine(chosen: list, lane: Int32) -> tuple:
    """The pair whose number is the lane's; the first pair in lanes that have none."""
    score, expert = chosen[0]
    for j in range(1, len(chosen)):
        score = cutlass.select_(lane == j, chosen[j][0], score)
        expert = cutlass.select_(lane == j, chosen[j][1], expert)
    return score, expert


@cute.jit
def by_token_id(args: Arguments, configuration: cutlass.Constexpr[Configuration], token: Int32, lane: Int32) -> None:
    """Weights the experts that the table lists for a token's id; lane j writes expert j."""
    k = configuration.top_k
    token_id = load_integer(args.token_ids, Int64(token), configuration.wide_ids)
    token_id = clamped(token_id, args.vocabulary - 1)
    place = Int64(cutlass.select_(lane < k, lane, Int32(0)))
    expert = Int32(load_integer(args.table, token_id * k + place, configuration.wide_table))
    score = score_of(ptx.load_f32(args.logits + Int64(token) * args.logits_row_bytes + Int64(expert) * 4))
    weight = weight_of(score, shared(score, k), args.scale)
    if lane < k:
        write(args, configuration, token, lane, weight, expert)


def clamped(x: Int64, last: Int64) -> Int64:
    """The number of [0, last] that is nearest to x."""
    return ptx.asm(
        "{\n.reg .b64 x;\nmin.s64 x, {$r0}, {$r1};\nmax.s64 {$w0}, x, 0;\n}",
        [Int64],
        *(x, last),
    )


def shared(x: Float32, lanes: int) -> list:
    """The values of the first `lanes` lanes, in all lanes."""
    return [cute.arch.shuffle_sync(x, j) for j in range(lanes)]


def load_integer(address: Int64, index: Int64, wide: bool) -> Int64:
    """An element of an int64 or int32 tensor."""
    return bf16_rows.load_i64(address + index * 8) if wide else Int64(ptx.load_i32(address + index * 4))


def write(
    args: Arguments, configuration: Configuration, token: Int32, place: Int32, weight: Float32, expert: Int32
) -> None:
    """Writes one expert of a token and its weight."""
    index = Int64(token) * configuration.top_k + place
    ptx.store_f32(args.weights + index * 4, weight)
    ptx.store_i32(args.experts + index * 4, expert)


# Host side


def compile(configuration: Configuration, arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, CTAs, stream)."""

    return load_launcher("router", configuration, arch, launch, Arguments, configuration, Int32)


@cache
def part(configuration: Configuration, chained: bool = False) -> Part:
    """The kernel as a part of a joint launch, or as a kernel of a chain."""
    threads = joint_launch.CHAIN_THREADS if chained else WARPS * WARP
    return Part("router", configuration, Arguments, body, threads=threads)


def _run(
    name: str,
    logits: Tensor,
    configuration: Configuration,
    scale: float,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    given = {"bias": bias, "expert_table": table, "token_ids": token_ids}
    for what, tensor in given.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"the GPU router needs a contiguous {what}; got strides {tensor.stride()}")
    if logits.dtype != torch.float32 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(
            f"the GPU router needs torch.float32 logits with neighbouring experts; got {logits.dtype} with strides "
            f"{logits.stride()}"
        )
    tokens = len(logits)
    weights = torch.empty(tokens, configuration.top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, configuration.top_k, dtype=torch.int32, device=logits.device)
    if tokens:
        addresses = {what: Int64(0 if tensor is None else tensor.data_ptr()) for what, tensor in given.items()}
        arguments = Arguments(
            logits=logits.data_ptr(),
            logits_row_bytes=stride_bytes(logits, 0),
            bias=addresses["bias"],
            table=addresses["expert_table"],
            token_ids=addresses["token_ids"],
            vocabulary=0 if table is None else len(table),
            weights=weights.data_ptr(),
            experts=experts.data_ptr(),
            scale=scale,
            num_tokens=tokens,
        )
        arch, ctas, stream = architecture(name, logits.device), -(-tokens // WARPS), current_stream(logits.device)
        inputs = logits, *(tensor for tensor in given.values() if tensor is not None)
        chained = joint_launch.in_chain()
        as_part = part(configuration, chained)
        joint_launch.run(
            as_part,
            arch,
            arguments,
            1 if chained else -(-tokens * WARP // as_part.threads),
            stream,
            inputs,
            alone=lambda: compile(configuration, arch)(arguments, Int32(ctas), stream),
        )
    return weights, experts


def _topk(name: str, logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    if bias.dtype != torch.float32:
        raise ValueError(f"the GPU router needs a torch.float32 bias; got {bias.dtype}")
    return _run(name, logits, Configuration(top_k, logits.shape[1]), scale, bias=bias)


def _hash(name: str, logits: Tensor, table: Tensor, token_ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    for what, tensor in (("expert_table", table), ("token_ids", token_ids)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"the GPU router needs {what} in torch.int32 or torch.int64; got {tensor.dtype}")
    wide = (table.dtype == torch.int64, token_ids.dtype == torch.int64)
    return _run(name, logits, Configuration(table.shape[1], 0, *wide), scale, table=table, token_ids=token_ids)


def sm90_topk(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.router.route_topk_logits` on Hopper, of at most MOST_EXPERTS experts."""
    return _topk("sm90", logits, bias, top_k, scale)


def sm100_topk(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.router.route_topk_logits` on Blackwell (B200, GB200, B300); as `sm90_topk`."""
    return _topk("sm100", logits, bias, top_k, scale)


def sm90_hash(logits: Tensor, expert_table: Tensor, token_ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.router.route_hash_logits` on Hopper."""
    return _hash("sm90", logits, expert_table, token_ids, scale)


def sm100_hash(logits: Tensor, expert_table: Tensor, token_ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.router.route_hash_logits` on Blackwell (B200, GB200, B300)."""
    return _hash("sm100", logits, expert_table, token_ids, scale)


def configurations(model: ModelShapes) -> list[Configuration]:
    """The learned router's, and that of routing by token id for a model whose first layers have it."""
    by_token_id = [Configuration(model.experts_per_token, 0, wide_ids=True)] if model.routes_by_token_id else []
    return [Configuration(model.experts_per_token, model.experts), *by_token_id]


def topk_compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """The compile job of `route_topk_logits`."""
    return [partial(compile, configurations(model)[0], arch)]


def hash_compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """The compile job of `route_hash_logits`; none for a model whose layers all have a learned router."""
    return [partial(compile, configuration, arch) for configuration in configurations(model)[1:]]
