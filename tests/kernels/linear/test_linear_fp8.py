"""The FP8 product of few tokens on Hopper, emulated: against float64 and against its own summation order; a token has
the same bits for every number of tokens, index and plan; Hopper's own products and DeepGEMM's on a GPU.

Regimes: every width of a plan and one token more; weights smaller than a tile and a tile larger than a cluster; K of
one block, of less than a stage, of more stages than the ring has; more tiles than CTAs; different scales for all blocks
and tokens; tensors with gaps, filled with NaN; rows far apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.early_launches import launched_early
from ops.fp8_products import E4M3, Operands, assert_products, operands, plan_of, product, with_gaps
from ops.memory_layout import far_apart
from ops.number_formats import same_bits
from ops.row_kernels import poisoned
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.linear import linear_fp8


@pytest.fixture(autouse=True)
def cutlass(compiled_here: None) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


@pytest.fixture(autouse=True)
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for results is filled with NaN."""
    monkeypatch.setattr(torch, "empty", poisoned)


def test_the_definition_is_the_formula() -> None:
    """The cases include K and N that end inside a block."""
    for sizes in ((3, 130, 200), (1, 128, 128), (2, 8, 640)):
        o = operands(*sizes)
        assert_products(linear_fp8(*o), o)
        assert same_bits(linear_fp8(*with_gaps(o)), linear_fp8(*o))


# Rows of the plan, tokens, N, K, resident CTAs, changes of the plan.
CASES = {
    "t1": (16, 1, 40, 384, 132, {}),
    "t2-one-block": (64, 2, 136, 128, 132, {}),
    "t7": (32, 7, 104, 640, 132, {}),
    "t8": (32, 8, 8, 256, 132, {}),
    "t9": (32, 9, 72, 384, 132, {}),
    "t16-last-tile-is-empty": (64, 16, 320, 256, 132, {}),
    "t17": (16, 17, 24, 1152, 132, {}),
    "t33-more-steps-than-stages": (32, 33, 72, 2432, 132, {}),
    "t64": (64, 64, 200, 1280, 132, {}),
    "t64-wide": (16, 64, 40, 640, 132, {"cluster": 4}),
    "t65": (32, 65, 72, 384, 132, {}),
    "t128": (64, 128, 136, 640, 132, {"stages": 3}),
    "persistent": (16, 5, 264, 384, 3, {"stages": 2}),
    "persistent-clusters": (32, 20, 264, 640, 4, {"stages": 3}),
    "two-of-a-multiprocessor": (64, 12, 456, 256, 2, {"ctas_per_sm": 2, "blocks": 2, "stages": 2}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_multiplies(case: tuple) -> None:
    """Operands with gaps. NaN in the gaps must not enter the result, and no part of the result is missing."""
    rows, tokens, width, channels, multiprocessors, changes = case
    o = operands(tokens, width, channels)
    plan = plan_of(rows, tokens, **changes)
    out, device = product(with_gaps(o), plan, multiprocessors)
    assert_products(out, o)
    tiles = -(-width // (plan.rows * plan.cluster))
    clusters = min(tiles, multiprocessors * plan.ctas_per_sm // plan.cluster)
    assert device.reports[0].grid[0] == clusters * plan.cluster


def test_it_may_begin_early() -> None:
    """A warp reads weights of four blocks and their scales, which are constant, before the wait."""
    with launched_early(read_ahead={"linear_fp8": ["UTMALDG"] * 4 + ["LDGSTS"]}):
        test_it_multiplies(CASES["persistent-clusters"])


def test_an_empty_tile_is_not_looked_up() -> None:
    """Two of a cluster's four CTAs have no rows and no scales: the memory after this weight's scales is not
    allocated."""
    o = operands(20, 128, 256)
    assert_products(product(o, plan_of(64, 20, cluster=4))[0], o)


def in_order(o: Operands, blocks: list[int], fused: bool = True) -> Tensor:
    """Each block's product without rounding; then one fused multiply-add per block, in the order of K."""
    codes, scales, weight, weight_scale = o
    of_rows = weight_scale.repeat_interleave(128, 0)[: len(weight)]
    total = torch.zeros(len(codes), len(weight))
    for block in blocks:
        channels = slice(128 * block, 128 * block + 128)
        exact = codes[:, channels].double() @ weight[:, channels].double().T
        factor = (scales[:, block, None] * of_rows[None, :, block]).double()
        for at in range(total.numel()):
            t, n = divmod(at, len(weight))
            scaled = Fraction(float(exact[t, n])) * Fraction(float(factor[t, n]))
            total[t, n] = rounded((scaled if fused else Fraction(rounded(scaled))) + Fraction(float(total[t, n])))
    return total.bfloat16()


def rounded(x: Fraction) -> float:
    """x rounded to fp32, ties to even."""
    if x == 0:
        return 0.0
    exponent = max(abs(x).numerator.bit_length() - abs(x).denominator.bit_length() - 24, -149)
    while abs(x) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    return float(round(x / Fraction(2) ** exponent) * Fraction(2) ** exponent)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_blocks_are_added_in_order_by_fused_multiply_adds(rows: int) -> None:
    """Codes whose products fp32 sums without an error, so that only the sums of blocks round. The order matters: the
    last block cancels the first, which is so large that little is left of the blocks between."""
    generator = torch.Generator().manual_seed(3)
    codes, scales, weight, weight_scale = operands(3, 24, 1152)
    codes, weight = (torch.randint(-15, 16, x.shape, generator=generator).float() for x in (codes, weight))
    scales, weight_scale = (torch.rand(x.shape, generator=generator) + 0.5 for x in (scales, weight_scale))
    scales[:, 0] *= 2.0**19
    codes[:, 1024:], weight[:, 1024:] = -codes[:, :128], weight[:, :128]
    scales[:, 8], weight_scale[:, 8] = scales[:, 0], weight_scale[:, 0]
    o = codes.to(E4M3), scales, weight.to(E4M3), weight_scale
    wanted, blocks = in_order(o, list(range(9))), list(range(9))
    assert same_bits(product(o, plan_of(rows, 3))[0], wanted)
    others = in_order(o, blocks[::-1]), in_order(o, blocks[1:] + blocks[:1]), in_order(o, blocks, fused=False)
    assert not any(same_bits(wanted, other) for other in others)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_a_token_has_its_bits_at_every_number_of_tokens(rows: int) -> None:
    """Alone, first or last, in every plan, in batches with tokens of NaN and infinite scales: the bits of a batch of
    64."""
    codes, scales, weight, weight_scale = operands(64, 72, 640, seed=1)
    whole, _ = product((codes, scales, weight, weight_scale), plan_of(rows, 64))
    for order in ([5], [63, 0], list(range(7)), list(range(20, 28)), list(range(40, 57)), list(range(63, 30, -1))):
        part = codes[order], scales[order], weight, weight_scale
        assert same_bits(product(part, plan_of(rows, len(order)))[0], whole[order]), order
    spoilt = codes.repeat(2, 1), scales.repeat(2, 1), weight, weight_scale
    spoilt[0][1:17], spoilt[1][17:40], spoilt[0][70:] = torch.tensor(float("nan")).to(E4M3), float("inf"), 448.0
    kept = [0, *range(40, 70)]
    assert same_bits(product(spoilt, plan_of(rows, 128))[0][kept], whole.repeat(2, 1)[kept])


def test_a_token_has_its_bits_under_every_plan_and_schedule() -> None:
    """Clusters of 1, 2 and 4, stages of 1, 2 and 4 blocks, on few multiprocessors and on many."""
    o = operands(30, 136, 1152, seed=2)
    whole, _ = product(o, plan_of(32, 32))
    changes = {
        "late": {"cluster": 1, "blocks": 4, "stages": 2},
        "random": {"cluster": 4, "blocks": 1, "stages": 5},
        "random_warps": {"cluster": 2, "blocks": 4, "stages": 3},
        "eager": {"cluster": 4, "blocks": 2, "stages": 4},
    }
    for seed, (schedule, change) in enumerate(changes.items()):
        for multiprocessors in (4, 132):
            plan = plan_of((32, 16, 64)[seed % 3], 32, **change)
            found, _ = product(o, plan, multiprocessors, schedule=schedule, seed=seed)
            assert same_bits(found, whole), change


def test_rows_beyond_32_bits() -> None:
    """Rows of codes, of both scales and of the weight at distances whose bytes and elements exceed 32 bits."""
    o = operands(4, 640, 256, seed=4)
    expected, _ = product(o, plan_of(64, 4))
    codes, scales, weight, weight_scale = o
    places = [
        (far_apart(codes.view(torch.uint8), 16).view(E4M3), scales, weight, weight_scale),
        (codes, far_apart(scales), weight, weight_scale),
        (codes, far_apart(scales.T.contiguous().repeat(2, 1)).T[:, :2], weight, weight_scale),
        (codes, scales, far_apart(weight.view(torch.uint8), 16).view(E4M3), weight_scale),
        (codes, scales, weight, far_apart(weight_scale)),
    ]
    for far in places:
        assert same_bits(product(far, plan_of(64, 4), in_place=far)[0], expected)
    far = (far_apart(codes[:2].view(torch.uint8), 16).view(E4M3), scales[:2], weight, weight_scale)
    assert same_bits(product(far, plan_of(64, 4), in_place=far)[0], expected[:2])


def test_zeros_and_numbers_at_the_ends() -> None:
    """No token, tokens of zeros, scales whose product is subnormal, sums beyond bf16's range."""
    codes, scales, weight, weight_scale = operands(4, 24, 256, seed=5)
    from dsv4_kernels.linear import fp8

    assert fp8.sm90(codes[:0], scales[:0], weight, weight_scale).shape == (0, 24)
    codes[0] = 0.0
    scales[1], scales[2] = 2.0**-126, 2.0**110
    weight_scale[:] = 2.0**-10
    o = codes, scales, weight, weight_scale
    out, _ = product(o)
    assert not out[0].any() and not out[0].signbit().any()
    assert_products(out[2:], (codes[2:], scales[2:], weight, weight_scale))
    scales[1] = 1.0
    small, of_one = out[1].double(), product(o)[0][1].double() * 2.0**-126
    assert ((small - of_one).abs() <= 2.0**-7 * of_one.abs() + 2.0**-134).all() and small.any()  # bf16's spacing there
    weight_scale[:] = 16.0
    assert product(o)[0][2].isinf().any()


# ---- launches that begin early


def test_weights_are_read_ahead_and_nothing_else() -> None:
    """A launch that begins early has the same bits. It reads weights before its wait: the emulator demands constant
    memory."""
    from ptx_emulator import EmulationError, emulated

    from dsv4_kernels.linear import fp8

    for tokens, rows in ((3, 16), (20, 32)):
        o = operands(tokens, 72, 1152, seed=6)
        with dependent_launch.switched(False):
            expected, _ = product(o, plan_of(rows, tokens))
        with dependent_launch.switched(True):
            assert same_bits(product(with_gaps(o), plan_of(rows, tokens), schedule="random")[0], expected)
            for named in ((), o[2:3], o[3:]):
                with pytest.raises(EmulationError, match="grid_dependency"), emulated(arch="sm_90a") as device:
                    for constant in named:
                        device.memory.constant(constant)
                    fp8.sm90(*o, plan=plan_of(rows, tokens))


# ---- refused arguments, and the choice of a plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(2, 128).to(E4M3)}, r"codes \(2, 128\).* do not fit each other"),
        ({1: torch.ones(2, 3)}, r"expected scales \(2, 2\) and \(1, 2\)"),
        ({3: torch.ones(2, 2)}, r"expected scales \(2, 2\) and \(1, 2\)"),
        ({1: torch.ones(2, 2).double()}, "codes must be float8_e4m3fn and scales float32"),
        ({2: torch.zeros(8, 256).bfloat16()}, "codes must be float8_e4m3fn and scales float32"),
    ],
)
def test_operands_that_do_not_fit(change: dict[int, Tensor], message: str) -> None:
    o = list(operands(2, 8, 256))
    for at, tensor in change.items():
        o[at] = tensor
    with pytest.raises(ValueError, match=message):
        linear_fp8(*o)


@pytest.mark.parametrize(
    ("sizes", "change", "message"),
    [
        ((129, 8, 256), {}, "at most 128 tokens, .* got 129 tokens"),
        ((2, 8, 200), {}, "K a multiple of 128"),
        ((2, 12, 256), {}, "N of 8"),
        ((2, 8, 256), {0: torch.zeros(256, 2).to(E4M3).T}, "codes must have contiguous channels"),
        ((2, 8, 256), {2: torch.zeros(8, 260).to(E4M3)[:, :256]}, "weight must have .* rows at multiples of 16 bytes"),
        ((2, 8, 256), {3: torch.zeros(2, 1).T}, "weight_scale must have contiguous rows"),
    ],
)
def test_what_the_kernel_refuses(sizes: tuple[int, int, int], change: dict[int, Tensor], message: str) -> None:
    from dsv4_kernels.linear import fp8

    o = list(operands(*sizes))
    for at, tensor in change.items():
        o[at] = tensor if at != 3 else torch.zeros(2, 2).T
    with pytest.raises(ValueError, match=message):
        fp8.sm90(*o)


def test_plans_that_are_not_made() -> None:
    from dsv4_kernels.linear import fp8
    from dsv4_kernels.linear.fp8_plan import Plan

    for fields, message in (
        ((48, 8, 2, 4), "rows are one of"),
        ((32, 8, 2, 4, 2), "at least 8 tokens"),
        ((32, 8, 3, 4), "of 1, 2 or 4 blocks"),
        ((64, 128, 4, 8), "bytes of shared memory"),
    ):
        with pytest.raises(ValueError, match=message):
            Plan(*fields)
    with pytest.raises(ValueError, match=r"9 tokens; .* has room for 8"):
        fp8.sm90(*operands(9, 8, 128), plan=Plan(32, 8, 2, 4))


def test_narrow_weights_have_narrow_tiles() -> None:
    """Most of 132 multiprocessors get a tile, and calls get exactly the kernels that are compiled ahead."""
    from dsv4_kernels.linear import fp8
    from dsv4_kernels.linear.fp8_plan import TOKENS, chosen, tile_rows

    widths = {1536: 16, 2048: 16, 4096: 32, 6144: 64, 7168: 64, 8192: 64, 16384: 64, 32768: 64, 65536: 64}
    assert {width: tile_rows(width, 132) for width in widths} == widths
    plans = fp8.plans(64)
    assert len(plans) == len(set(plans)) == 12 and {plan.tokens for plan in plans} == set(TOKENS[:4])
    assert set(plans) == {chosen(tokens, width, 132) for width in widths for tokens in range(1, 65)}
    for width in widths:
        for tokens in (1, 16, 64, 128):
            plan = chosen(tokens, width, 132)
            assert plan.cluster == (1 if tokens == 1 else 2)
            assert plan.stages * plan.weight_bytes >= 40 * 1024 or tokens == 128


def test_registers_and_shared_memory() -> None:
    from lib.cubin import resources
    from ptx_emulator import emulated

    from dsv4_kernels.linear import fp8
    from dsv4_kernels.linear.fp8_plan import SMEM_BYTES

    with emulated(arch="sm_90a"):
        for rows in (16, 32, 64):
            for tokens in (8, 64, 128):
                plan = plan_of(rows, tokens)
                found = resources(fp8.compile(plan).__cubin__)
                assert found["stack_bytes"] == 0 and found["registers"] <= 184, found
                assert plan.shared_bytes <= SMEM_BYTES


def test_each_generation_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for generation, name in ((9, "sm90"), (10, "sm100"), (8, "ref")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, major=generation: (major, 0))
        assert registry.chosen("linear_fp8", torch.device("cuda", 0), torch.bfloat16).name == name


@pytest.mark.slow
@pytest.mark.usefixtures("in_turns")
@pytest.mark.parametrize("name", ["alone", "cluster"])
def test_deleted_synchronisation_is_noticed(name: str) -> None:
    """Every deletion is noticed, except those explained in emulator/results/mutation_reasons.json."""
    changes = {"alone": {"stages": 2}, "cluster": {"stages": 2, "cluster": 2}}[name]
    tokens = {"alone": 5, "cluster": 16}[name]
    _, device = product(operands(tokens, 136, 640), plan_of(32, tokens, **changes), multiprocessors=2, record=True)
    rates = delete_synchronisation(f"linear_fp8_{name}", device)
    assert rates and set(rates.values()) == {1}, rates


# ---- on a GPU

LAYERS = {
    "wqkv_a": (1536, 4096),
    "wq_b": (32768, 1024),
    "wo_b": (4096, 8192),
    "gate_up": (4096, 4096),
    "down": (4096, 2048),
    "index_wq_b": (8192, 1024),
}


@pytest.fixture
def hopper() -> Iterator[torch.device]:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU (sm_90a)")
    yield torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_a_hopper_gpu_multiplies(hopper: torch.device, layer: str) -> None:
    """Flash's layers: right results, and in every plan a token has the bits that it has alone."""
    rows, channels = LAYERS[layer]
    codes, scales, weight, weight_scale = (x.to(hopper) for x in operands(128, rows, channels))
    whole = linear_fp8(codes, scales, weight, weight_scale, impl="sm90")
    checked = slice(0, min(rows, 4096))
    blocks = -(-checked.stop // 128)
    some = codes.cpu(), scales.cpu(), weight[checked].cpu(), weight_scale[:blocks].cpu()
    # The tensor cores of Hopper keep fewer bits within an instruction than fp32 has: DeepGEMM has the same error.
    exact = exact_product(some)
    assert (whole[:, checked].cpu().double() - exact).norm() <= 2.0**-8 * exact.norm()
    for tokens in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127):
        for part in (slice(0, tokens), slice(128 - tokens, 128)):
            found = linear_fp8(codes[part], scales[part], weight, weight_scale, impl="sm90")
            assert same_bits(found, whole[part]), (tokens, part)


def exact_product(o: Operands) -> Tensor:
    codes, scales, weight, weight_scale = o
    x = codes.double() * scales.double().repeat_interleave(128, 1)
    scale = weight_scale.double().repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    return x @ (weight.double() * scale).T


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_its_bits_are_deepgemm_s(hopper: torch.device, layer: str) -> None:
    """The same instructions in the same order: tokens on the left, 32 channels each, a block in one accumulator, then
    `fma` with the product of both scales. The width of the right operand differs, as it does among DeepGEMM's own
    plans, and here tokens come from registers."""
    import deep_gemm  # installed with SGLang on a GPU host

    rows, channels = LAYERS[layer]
    for tokens in (1, 4, 7, 16, 33, 64):
        codes, scales, weight, weight_scale = (x.to(hopper) for x in operands(tokens, rows, channels, seed=tokens))
        theirs = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16, device=hopper)
        deep_gemm.fp8_gemm_nt((codes, scales), (weight, weight_scale), theirs)
        assert same_bits(linear_fp8(codes, scales, weight, weight_scale, impl="sm90"), theirs), tokens


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 16, 64])
def test_graphs_on_a_hopper_gpu(hopper: torch.device, tokens: int) -> None:
    """A product whose input the kernel before computes: late and early launches, replayed with other inputs, have the
    same bits."""
    from dsv4_kernels.quant import fp8_quantise

    first = [x.to(hopper) for x in operands(tokens, 4096, 1024, seed=7)]
    second = [x.to(hopper) for x in operands(tokens, 1536, 4096, seed=8)]
    first[3].mul_(2.0**-10)

    def chain() -> Tensor:
        hidden = linear_fp8(*first, impl="sm90")
        return linear_fp8(*fp8_quantise(hidden, column_major=True), *second[2:], impl="sm90")

    with dependent_launch.switched(False):
        expected = chain()
    with dependent_launch.switched(True):
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [chain() for _ in range(8)]
    graph.replay()
    assert all(same_bits(out, expected) for out in outs)
    first[0].copy_(operands(tokens, 8, 1024, seed=9)[0])
    with dependent_launch.switched(False):
        expected = chain()
    for _ in range(20):  # a kernel that reads before it waits is wrong only sometimes
        graph.replay()
        assert all(same_bits(out, expected) for out in outs)
