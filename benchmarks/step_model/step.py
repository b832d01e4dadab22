"""The launches of a forward, layer by layer, and its time (docs/log/decode_step.md lists them)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lib.experts_inputs import MODELS, Model

from dsv4_kernels.host.joint_launch import CHAIN_THREADS, MOST_TOKENS
from dsv4_kernels.moe.sm90.plan import NARROW
from step_model import attention, blackwell, experts, index, products, rows
from step_model.hardware import Gpu
from step_model.launch import Launch, bound_by, one_after_the_other, parts_us, time_us, together

SIDE_TOKENS = 32
"""Most tokens of a forward with a second stream. Hopper's joint launches, of up to 16 tokens, are counted so too."""
JOINT_TOKENS = MOST_TOKENS["sm100"]
"""Most tokens of a forward on Blackwell with joint launches, which have no products."""
FP8_WO_A_TOKENS = 16
"""Most tokens of a forward whose `wo_a` is multiplied from FP8."""
FEW_HEADS = 16
ROUTED_AT_ONCE = CHAIN_THREADS // 32
OTHER_LAUNCHES, OTHER_US = 30, 2.5
"""Launches of a step besides its layers' and the logits: embedding, metadata, marks, sampling; mostly PyTorch's."""
ROOM = 131_072
"""Tokens of context for which a graph's page tables have room."""


@dataclass(frozen=True)
class Released:
    """Dimensions of a released model that decide the work of a step."""

    name: str
    dim: int
    heads: int
    q_lora: int
    top_k: int
    layers: tuple[int, ...]
    """Compression ratio of each layer: 0, 4, or 128."""
    groups: int
    """Output groups of `wo_a`, each of 1,024 rows and heads / groups heads."""
    vocabulary: int = 129_280

    @property
    def experts(self) -> Model:
        """Return the dimensions of the experts on one GPU."""
        return MODELS[self.name]


FLASH = Released("flash", 4096, 64, 1024, 512, (0, 0, *(4, 128) * 20, 4), 8)
PRO = Released("pro", 7168, 128, 1536, 1024, (128, 128, *(4, 128) * 29, 4), 16)


@dataclass(frozen=True)
class Forward:
    """A forward to predict."""

    model: Released
    tokens: int
    context: int
    ranks: int = 1
    prefill: bool = False
    parts: bool = True
    """Whether boundaries sum over ranks."""
    of_few: bool = True
    """Whether few tokens have the kernels of 2026-11-27: scores, attention and `wo_a` of few tokens, experts of one."""
    expert_rows: bool = True
    """Whether boundaries of few tokens may sum over experts."""
    gate_ahead: bool = True
    """Whether tiles of one CTA read their weight ahead, too, in gate, projections and logits of few tokens."""

    def sums_in_boundaries(self, gpu: Gpu) -> bool:
        """Return whether boundaries sum over experts."""
        in_one = self.ranks == 1 or self.parts
        most = MOST_TOKENS["sm90" if gpu.is_hopper else "sm100"]
        return self.expert_rows and in_one and not self.prefill and self.tokens <= most

    @property
    def kinds(self) -> tuple[int, ...]:
        """Return the compression ratio of each layer."""
        return self.model.layers


def product(name: str, tokens: int, n: int, k: int, gpu: Gpu) -> list[Launch]:
    """Return the launches of an FP8 product of any number of tokens."""
    if not gpu.is_hopper:
        return [products.fp8_by_tcgen05(name, tokens, n, k, gpu)]
    if tokens <= 128:
        return [products.fp8_hopper(name, tokens, n, k, gpu)]
    return [products.deepgemm_hopper(name, tokens, n, k, gpu)]


@dataclass(frozen=True)
class Sublayer:
    """The launches of a sublayer besides its boundary."""

    main: list[Launch]
    side: list[Launch]
    """Launches of the second stream, beside `main`."""
    after: list[Launch]
    """Launches that wait for both streams."""

    @property
    def all(self) -> list[Launch]:
        """Return all launches."""
        return [*self.main, *self.side, *self.after]


def attention_sublayer(f: Forward, ratio: int, gpu: Gpu) -> Sublayer:
    """Return the launches from the boundary before to `wo_b`; attention waits for the choice of entries."""
    m, t = f.model, f.tokens
    heads, groups = m.heads // f.ranks, max(1, m.groups // f.ranks)
    kind = {0: "swa", 4: f"csa{m.top_k}", 128: "hca"}[ratio]
    main = [
        *product("wqkv_a", t, m.q_lora + 512, m.dim, gpu),
        rows.row_kernel("rms_norm_fp8", t, gpu, m.q_lora / 1024),
        *product("wq_b", t, heads * 512, m.q_lora, gpu),
        rows.row_kernel("norm_rope_store", t, gpu, (heads + 1) / 9),
    ]
    side: list[Launch] = []
    if ratio:
        side += [
            products.in_fp32("projections", t, 2624 if ratio == 4 else 1024, gpu, 1, m.dim, f.gate_ahead),
            rows.row_kernel("compress_store", t, gpu),
        ]
    if ratio == 4:
        side += product("index wq_b", t, 8192, m.q_lora, gpu)
        side.append(rows.row_kernel("index_query", t, gpu, 4))
        side += index_launches(f, gpu)
    after: list[Launch] = []
    if gpu.is_hopper and heads <= FEW_HEADS and not f.prefill:
        after.append(attention.few_heads("attention", kind, f.context, t, heads, gpu, f.of_few))
    elif gpu.is_hopper:
        unpacked = f.prefill  # FP8 rows of a large chunk are expanded once
        after.append(attention.many_heads("attention", kind, f.context, t, heads, gpu, not unpacked, f.prefill))
    else:
        after.append(blackwell.attention("attention", kind, f.context, t, heads, gpu, f.prefill))
    if t <= FP8_WO_A_TOKENS:
        after.append(products.wo_a_from_fp8("wo_a", t, groups, gpu, may_reside=f.of_few))
    else:
        after += [
            rows.row_kernel("apply_rope_in_place", t, gpu, heads / 8),
            products.in_fp32("wo_a", t, 1024, gpu, groups, heads * 512 // groups),
            rows.row_kernel("fp8_quantise", t, gpu, groups / 4),
        ]
    after += product("wo_b", t, m.dim, groups * 1024, gpu)
    if gpu.is_hopper or f.prefill:
        return Sublayer(main, side, after)
    wqkv_a, rms_norm, wq_b, store = main
    latents, queries, stored, chosen = (
        [launch for launch in side if launch.name in names]
        for names in (("projections",), ("index wq_b",), ("compress_store", "index_query"), ("scores", "choice"))
    )
    main = [
        *beside(SIDE_TOKENS, t, gpu, wqkv_a, *latents),
        rms_norm,
        *beside(SIDE_TOKENS, t, gpu, wq_b, *queries),
        *beside(JOINT_TOKENS, t, gpu, store, *stored),
        *chosen,
    ]
    return Sublayer(main, [], after)


def beside(most: int, tokens: int, gpu: Gpu, *launches: Launch) -> list[Launch]:
    """Return launches that do not depend on each other, as one if a forward has at most so many tokens."""
    return [together(launches, gpu)] if tokens <= most and len(launches) > 1 else list(launches)


def index_launches(f: Forward, gpu: Gpu) -> list[Launch]:
    """Return the launches of scores and choice; none if all entries of the requests are chosen."""
    t, entries = f.tokens, f.context // 4
    if entries <= f.model.top_k:
        return []
    if not f.prefill:
        return [index.scores("scores", t, entries, ROOM // 4, gpu, f.of_few), index.choice("choice", t, entries, gpu)]
    seen = [max(0.0, (f.context - t + i) / 4) for i in range(0, t, 64)]
    pairs = 64 * sum(n for n in seen if n > f.model.top_k)
    scores = index.scores_of_chunk("scores", pairs, gpu)
    return [scores, index.choice("choice", t, sum(seen) / len(seen), gpu)]


def experts_sublayer(f: Forward, gpu: Gpu) -> Sublayer:
    """Return the launches from the gate to the sum of the experts, which waits for the shared expert.

    The sum is missing if boundaries sum over experts.
    """
    m, t = f.model, f.tokens
    model = Model(m.experts.experts, m.dim, m.experts.channels // f.ranks)
    slots = experts.slots_of_experts(model.experts, t, "uniform")
    main = [
        products.in_fp32("gate", t, model.experts, gpu, 1, m.dim, f.gate_ahead),
        rows.row_kernel("route_topk_logits", t, gpu),
    ]
    if gpu.is_hopper:
        shape = NARROW if t == 1 and not f.of_few else None
        main += experts.calls(model, slots, t, gpu, codes=t <= SIDE_TOKENS, shape=shape)
    else:
        main += blackwell.experts(model, slots, t, gpu)
    side = [
        *product("shared gate and up", t, 2 * model.channels, m.dim, gpu),
        rows.row_kernel("swiglu_fp8", t, gpu, model.channels / 2048),
        *product("shared down", t, m.dim, model.channels, gpu),
    ]
    after = [] if f.sums_in_boundaries(gpu) else main[-1:]
    if gpu.is_hopper or f.prefill:
        return Sublayer(main[:-1], side, after)
    (gate, router, work_list, gate_and_up, down, _), (shared, swiglu, shared_down) = main, side
    if t <= JOINT_TOKENS:  # one CTA, whose 32 warps have a token each
        listed = [one_after_the_other(work_list, *[router] * -(-t // ROUTED_AT_ONCE))]
    else:
        listed = [router, work_list]
    main = [
        *beside(SIDE_TOKENS, t, gpu, gate, shared),
        *listed[:-1],
        *beside(JOINT_TOKENS, t, gpu, listed[-1], swiglu),
        *beside(SIDE_TOKENS, t, gpu, gate_and_up, shared_down),
        down,
    ]
    return Sublayer(main, [], after)


def boundaries(f: Forward, gpu: Gpu, of_experts: bool = False) -> list[Launch]:
    """Return the launches that end a sublayer, of attention or of experts."""
    m, t = f.model, f.tokens
    if f.ranks == 1 or (f.parts and t <= 64):
        alone = rows.boundary("boundary", t, m.dim, gpu)
        made = alone if f.ranks == 1 else rows.boundary_of_parts("boundary", t, m.dim, f.ranks, gpu)
        return [rows.summing_experts(made, t, m.dim, gpu) if of_experts and f.sums_in_boundaries(gpu) else made]
    summed = rows.sum_over_ranks("sum over ranks", t, m.dim, f.ranks, gpu)
    return [summed, rows.boundary("boundary", t, m.dim, gpu)]


@dataclass(frozen=True)
class Prediction:
    """Microseconds of a forward."""

    us: float
    by_launch: dict[str, float]
    """Name of a launch -> microseconds in the whole forward, launches of a second stream included."""
    floor_us: float
    """Bytes of memory over the published bandwidth, or products over the published rate, summed over launches."""
    by_floor: dict[str, float]
    by_reach: dict[str, float]
    """The floors, with the launches' gaps and the loads and crossings that they wait for one after the other."""
    launches: int
    """Number of launches of all layers and of the logits."""
    bounds: dict[str, str]
    """Name of a launch -> the largest term of its time."""


def predict(f: Forward, gpu: Gpu) -> Prediction:
    """Return the time of a forward."""
    early = f.tokens <= 512
    total, launched, by_launch, by_floor, by_reach, bounds = 0.0, 0, {}, {}, {}, {}

    def add(launches: list[Launch], times: int) -> float:
        nonlocal launched
        us, idle = 0.0, 0.0
        launched += times * len(launches)
        for launch in launches:
            alone = time_us(launch, gpu, early, idle)
            us += alone
            idle = alone if launch.memory == 0 else 0.0  # what the next launch may load ahead
            by_launch[launch.name] = by_launch.get(launch.name, 0.0) + times * alone
            bounds[launch.name] = bound_by(launch, gpu, early)
            by_floor[launch.name] = by_floor.get(launch.name, 0.0) + times * floor_us(launch, gpu)
            parts = parts_us(launch, gpu, early)
            reach = floor_us(launch, gpu) + parts["gap"] + parts["latency"]
            by_reach[launch.name] = by_reach.get(launch.name, 0.0) + times * reach
        return us

    for ratio in sorted(set(f.kinds)):
        times = f.kinds.count(ratio)
        for of_experts, sublayer in enumerate((attention_sublayer(f, ratio, gpu), experts_sublayer(f, gpu))):
            spans = add(sublayer.main, times), add(sublayer.side, times)
            beside = f.tokens <= SIDE_TOKENS and not f.prefill
            total += times * (max(spans) if beside else sum(spans))
            total += times * add(sublayer.after, times)
            total += times * add(boundaries(f, gpu, bool(of_experts)), times)
    wanted = 1 if f.prefill else f.tokens
    logits = products.in_fp32("logits", wanted, f.model.vocabulary // f.ranks, gpu, 1, f.model.dim, f.gate_ahead)
    if f.sums_in_boundaries(gpu):  # the last layer's experts are followed by no boundary
        total += add(experts_sublayer(replace(f, expert_rows=False), gpu).after, 1)
    total += add([logits], 1) + OTHER_LAUNCHES * OTHER_US
    by_launch["others"] = OTHER_LAUNCHES * OTHER_US
    return Prediction(total, by_launch, sum(by_floor.values()), by_floor, by_reach, launched, bounds)


def floor_us(launch: Launch, gpu: Gpu) -> float:
    """Return the least time of a launch: its bytes at the published bandwidths, or its products."""
    tensor = launch.clocks.get("floor", launch.clocks.get("tensor", 0.0)) * launch.ctas / gpu.multiprocessors
    return max(launch.memory / gpu.memory_bytes_us, launch.link / gpu.link_bytes_us, tensor / gpu.clocks_us)
