"""Kernels of the router, of clamped SwiGLU and of FP8 activations, emulated, against float64 and the references' bits.

Regimes: 8, 256, 384 experts, ties of all kinds, logits from -100 to 100; token ids outside the table; every finite bf16
through the quantiser; short last blocks; scales in both layouts; rows in wider tensors; NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ops.number_formats import same_bits
from ops.row_kernels import ARCH, KERNELS, NAN, SCHEDULES, assert_no_spills, emulated_row_kernel
from torch import Tensor

from dsv4_kernels import moe, number_formats, quant, registry, router
from dsv4_kernels.linear import linear_fp32

INF = float("inf")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, compiled_here: None) -> str:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    return request.param


def call(module: str, kernel: str, suffix: str, *arguments: object, **options: object) -> object:
    """The result of one call of an implementation in the emulator."""
    import importlib

    function = getattr(importlib.import_module(f"dsv4_kernels.{module}.gpu"), kernel + suffix)
    with emulated_row_kernel(kernel, **options):
        return function(*arguments)


# ---- the references


def test_routing_is_its_product_and_the_rest() -> None:
    x, gate, bias = normal(40, 24, seed=0), normal(10, 24, seed=1), normal(10, seed=2)
    table = torch.randint(0, 10, (50, 3), generator=torch.Generator().manual_seed(3))
    ids = torch.arange(40)
    logits = linear_fp32(x, gate)
    for whole, parts in (
        (router.route_topk(x, gate, bias, 3, 2.5), router.route_topk_logits(logits, bias, 3, 2.5)),
        (router.route_hash(x, gate, table, ids, 2.5), router.route_hash_logits(logits, table, ids, 2.5)),
    ):
        assert all(same_bits(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("column_major", [False, True], ids=["rows", "columns"])
def test_fp8_activations_are_codes_and_scales(column_major: bool) -> None:
    gate_up = normal(5, 2 * 320, seed=4).bfloat16() * 6
    swiglu = moe.fused_swiglu(gate_up, 10.0)
    assert same_bits(swiglu, moe.swiglu(*gate_up.chunk(2, 1), 10.0).bfloat16())
    for codes, scales in (
        moe.swiglu_fp8(gate_up, 10.0, column_major),
        quant.fp8_quantise(swiglu, 128, column_major),
    ):
        assert codes.is_contiguous() and scales.shape == (5, 3)
        assert scales.stride() == ((1, 8) if column_major else (3, 1))
        assert same_bits(number_formats.decode_fp8(codes, scales, 128).bfloat16(), quant.fp8_qdq(swiglu, 128))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: router.route_topk_logits(torch.zeros(3, 4).bfloat16(), torch.zeros(4), 2, 1.0), "logits .T, E. torch"),
        (lambda: router.route_topk_logits(torch.zeros(3, 4), torch.zeros(5), 2, 1.0), r"bias has shape \(5,\)"),
        (lambda: router.route_topk_logits(torch.zeros(3, 4), torch.zeros(4), 5, 1.0), "top_k is 5; expected 1 to 4"),
        (
            lambda: router.route_hash_logits(torch.zeros(3, 4), torch.zeros(9, 2).int(), torch.zeros(2).int(), 1.0),
            r"token_ids \(3,\)",
        ),
        (
            lambda: router.route_hash_logits(torch.zeros(3, 4), torch.zeros(0, 2).int(), torch.zeros(3).int(), 1.0),
            r"expert_table \[V, k\]; got \(3,\) and \(0, 2\)",
        ),
        (lambda: moe.fused_swiglu(torch.zeros(3, 5), 1.0), r"gate_up \[T, 2I\]"),
        (lambda: moe.swiglu_fp8(torch.zeros(3, 4), 0.0), "positive number"),
        (lambda: quant.fp8_quantise(torch.zeros(3, 4, 4)), r"x \[T, K\]"),
    ],
    ids=["dtype", "bias", "top_k", "token_ids", "no_table", "halves", "limit", "dimensions"],
)
def test_what_is_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


def test_ops_are_in_the_table() -> None:
    for op in ("route_topk_logits", "route_hash_logits", "fused_swiglu", "swiglu_fp8", "fp8_quantise"):
        assert set(registry.available(op)) == {"sm90", "sm100", "ref"}


# ---- the router

SCORE_ERROR = 2.0**-21
"""Relative error of sqrt(softplus): exp 2**-21.8, a sum, a reciprocal of an ulp and three products give some 2**-20.6
of softplus; its sum with max(x, 0) adds 2**-24; the root halves that and adds its own 2**-24."""


def exact_scores(logits: Tensor) -> Tensor:
    x = logits.double()
    return (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))).sqrt()


def assert_weights(weights: Tensor, experts: Tensor, logits: Tensor, scale: float) -> None:
    """Bound of a weight's error: score and sum with their errors, then three additions, a quotient, a product."""
    chosen = exact_scores(logits).gather(1, experts.long())
    expected = chosen / chosen.sum(1, keepdim=True) * scale
    assert ((weights.double() - expected).abs() <= (2 * SCORE_ERROR + 5 * 2.0**-24) * expected).all()


def assert_topk(weights: Tensor, experts: Tensor, logits: Tensor, bias: Tensor, scale: float) -> None:
    """Checks that the chosen experts are distinct, in falling order and the best, up to the scores' errors; and their
    weights."""
    scores, top_k = exact_scores(logits), experts.shape[1]
    biased = scores + bias.double()
    margin = (SCORE_ERROR + 2.0**-23) * (scores + bias.abs()).amax(1, keepdim=True)
    picked = biased.gather(1, experts.long())
    assert (picked[:, 1:] <= picked[:, :-1] + margin).all()
    assert all(len(row.unique()) == top_k for row in experts)
    others = biased.scatter(1, experts.long(), -INF)
    assert (others.amax(1) <= picked[:, -1] + margin[:, 0]).all()
    assert_weights(weights, experts, logits, scale)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_experts", "top_k"), [(256, 6), (384, 6), (8, 3), (40, 8)], ids=str)
def test_the_kernel_chooses_by_score(kernel: str, num_experts: int, top_k: int, schedule: str) -> None:
    """Logits of all sizes in rows of a wider tensor. Except with 384 experts all sums are negative: there an expert
    after the last one, with zeros for logit and bias, would be the best."""
    logits = (normal(11, num_experts + 5, seed=5) * torch.logspace(-3, 1, 11)[:, None])[:, 3:-2]
    bias = normal(num_experts, seed=6) * 0.2 - (0.0 if num_experts == 384 else 10.0)
    weights, experts = call("router", kernel, "_topk", logits, bias, top_k, 1.5, schedule=schedule)
    assert_topk(weights, experts, logits, bias, 1.5)
    _, expected = router.route_topk_logits(logits, bias, top_k, 1.5)
    assert (experts == expected).float().mean() > 0.95  # scores that differ by less than their error may swap


def test_of_equals_the_kernel_takes_the_lower_id(kernel: str) -> None:
    """Ties: all equal, all but one, equal sums of different scores and biases, scores of zero."""
    logits, bias = torch.zeros(5, 256), torch.zeros(256)
    bias[7] = 1.0
    logits[1], logits[2, 200:203], logits[3] = -200.0, 1.0, torch.arange(256) % 4.0
    logits[4] = torch.arange(256).flip(0) // 2
    weights, experts = call("router", kernel, "_topk", logits, bias, 6, 1.0)
    expected_weights, expected = router.route_topk_logits(logits, bias, 6, 1.0)
    assert torch.equal(experts, expected)
    assert experts[0].tolist() == [7, 0, 1, 2, 3, 4] and experts[2].tolist() == [7, 200, 201, 202, 0, 1]
    assert torch.allclose(weights, expected_weights, rtol=2.0**-19, atol=0)
    assert (weights[1] == 0).all()  # all chosen scores are 0


def test_the_kernel_chooses_something_of_anything(kernel: str) -> None:
    """NaN comes first, as in the reference's sort; ids stay within the table, and other tokens do not change."""
    logits, bias = normal(4, 256, seed=7), normal(256, seed=8)
    clean = call("router", kernel, "_topk", logits, bias, 6, 1.0)
    logits[1, 9], logits[2] = NAN, NAN
    logits[3, 100], logits[3, 101] = INF, -INF
    weights, experts = call("router", kernel, "_topk", logits, bias, 6, 1.0)
    assert torch.equal(experts, router.route_topk_logits(logits, bias, 6, 1.0)[1])
    assert experts[1, 0] == 9 and experts[2].tolist() == [0, 1, 2, 3, 4, 5] and experts[3, 0] == 100
    assert same_bits(weights[0], clean[0][0]) and torch.equal(experts[0], clean[1][0])


def test_the_kernel_routes_a_token_alike_in_any_batch(kernel: str) -> None:
    logits, bias = normal(9, 384, seed=9), normal(384, seed=10)
    weights, experts = call("router", kernel, "_topk", logits, bias, 6, 2.5)
    for order in ([4], [8, 2, 5, 0, 1, 3]):
        again = call("router", kernel, "_topk", logits[order], bias, 6, 2.5)
        assert same_bits(again[0], weights[order]) and torch.equal(again[1], experts[order])


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=["ids32", "ids64"])
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64], ids=["table32", "table64"])
def test_the_kernel_chooses_by_token_id(kernel: str, table_dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    """An id outside the table reads the table's first or last row; the reference raises."""
    logits = (normal(9, 260, seed=11) * 3)[:, 4:]
    table = torch.randint(0, 256, (50, 6), generator=torch.Generator().manual_seed(12)).to(table_dtype)
    ids = torch.tensor([0, 49, 7, 7, 50, -1, 2**31 - 1, -(2**31), 30]).to(ids_dtype)
    weights, experts = call("router", kernel, "_hash", logits, table, ids, 1.5)
    assert torch.equal(experts, table[ids.long().clamp(0, 49)].int())
    assert_weights(weights, experts, logits, 1.5)
    with pytest.raises(IndexError):
        router.route_hash_logits(logits, table, ids, 1.5)


def test_hashed_tokens_have_their_bits_in_any_batch(kernel: str) -> None:
    """The batches include tokens whose logits are NaN or infinite, or whose id is outside the table."""
    logits, ids = normal(9, 256, seed=24) * 3, torch.tensor([3, 49, 0, 7, 7, 12, 2**40, -5, 30])
    table = torch.randint(0, 256, (50, 6), generator=torch.Generator().manual_seed(25))
    logits[0], logits[2] = NAN, INF
    whole = call("router", kernel, "_hash", logits, table, ids, 1.5)
    assert whole[0][[1, 3, 4, 5, 6, 7, 8]].isfinite().all() and not same_bits(whole[0][3], whole[0][4])
    for order in ([4], [8, 3, 5, 1, 7]):
        again = call("router", kernel, "_hash", logits[order], table, ids[order], 1.5)
        assert all(same_bits(few, many[order]) for few, many in zip(again, whole, strict=True))


def test_the_kernel_weighs_vanishing_scores(kernel: str) -> None:
    """Logits at the ends of fp32 and of exp, by score and by token id: no weight is 0 / 0."""
    ends = torch.tensor([-3.4e38, -1e4, -104.0, -103.0, -80.0, -57.0, -40.0, 57.0, 1e4, 3.4e38])
    logits, table = ends[:, None].repeat(1, 256), torch.arange(6).int().expand(1, 6)
    logits[1::2, 3] = -90.0
    by_score, experts = call("router", kernel, "_topk", logits, torch.zeros(256), 6, 1.5)
    by_id, _ = call("router", kernel, "_hash", logits, table.contiguous(), torch.zeros(10).int(), 1.5)
    for weights, chosen in ((by_score, experts), (by_id, table.expand(10, 6))):
        scores = exact_scores(logits).gather(1, chosen.long())
        expected = scores / (scores.sum(1, keepdim=True) + 1e-20) * 1.5
        assert weights.isfinite().all() and (weights[[0, 2]] == 0).all()
        assert torch.allclose(weights[4:].double(), expected[4:], rtol=2.0**-18, atol=1e-8)


def test_what_the_router_refuses(kernel: str) -> None:
    logits, bias = torch.zeros(2, 256), torch.zeros(256)
    with pytest.raises(ValueError, match="of up to 512; got 6 of 513"):
        call("router", kernel, "_topk", torch.zeros(2, 513), torch.zeros(513), 6, 1.0)
    with pytest.raises(ValueError, match="neighbouring experts"):
        call("router", kernel, "_topk", torch.zeros(256, 2).T, bias, 6, 1.0)
    with pytest.raises(ValueError, match=r"a torch\.float32 bias; got torch\.bfloat16"):
        call("router", kernel, "_topk", logits, bias.bfloat16(), 6, 1.0)
    with pytest.raises(ValueError, match=r"token_ids in torch\.int32 or torch\.int64"):
        call("router", kernel, "_hash", logits, torch.zeros(5, 6).int(), torch.zeros(2).short(), 1.0)


# ---- SwiGLU and FP8


def every_gate_and_up() -> Tensor:
    """[n, 2 * 72] bf16: values around the limit, zeros, tiny and huge values, in all pairs."""
    values = torch.tensor(
        [
            0.0,
            -0.0,
            1e-30,
            -1e-3,
            0.5,
            -1.0,
            9.9375,
            10.0,
            10.0625,
            -10.0,
            -10.0625,
            30.0,
            -30.0,
            -87.0,
            -100.0,
            3e38,
            -3e38,
        ]
    ).bfloat16()
    gate, up = (x.flatten() for x in torch.meshgrid(values, values, indexing="ij"))
    rest = normal(72 * 20 - len(gate), seed=13).bfloat16() * 8
    return torch.cat((torch.cat((gate, rest)).view(20, 72), torch.cat((up, rest.flip(0))).view(20, 72)), 1)


def assert_swiglu(got: Tensor, gate_up: Tensor) -> None:
    """Bound: exp 2**-21.8, a sum, a reciprocal, two products; bf16 once. Below 2**-126 the reciprocal may be zero."""
    gate, up = gate_up.double().chunk(2, 1)
    gate, up = gate.clamp(max=10.0), up.clamp(-10.0, 10.0)
    expected = gate / (1 + torch.exp(-gate)) * up
    bound = (2.0**-8 + 2.0**-20) * expected.abs() + 2.0**-133 + 2.0**-126 * (gate * up).abs()
    assert ((got.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kernel_gates(kernel: str, schedule: str) -> None:
    gate_up = torch.nn.functional.pad(every_gate_and_up(), (8, 16), value=NAN)[:, 8:-16]
    got = call("moe", kernel, "", gate_up, 10.0, schedule=schedule)
    assert_swiglu(got, gate_up)
    assert (got != moe.fused_swiglu(gate_up, 10.0)).float().mean() < 2e-3
    alone = call("moe", kernel, "", gate_up[7:8], 10.0)
    assert same_bits(alone, got[7:8])


def test_not_a_number_stays_one(kernel: str) -> None:
    """NaN stays NaN: min and max of a GPU would return the limit."""
    gate_up = torch.ones(3, 2 * 256).bfloat16()
    gate_up[0, 5], gate_up[1, 256 + 9], gate_up[2, 0], gate_up[2, 256 + 1] = NAN, NAN, INF, -INF
    got = call("moe", kernel, "", gate_up, 10.0)
    assert got.isnan().nonzero().tolist() == [[0, 5], [1, 9]]
    assert same_bits(got.nan_to_num(7.0), moe.fused_swiglu(gate_up, 10.0).nan_to_num(7.0))
    codes, _ = call("moe", kernel, "_fp8", gate_up, 10.0, False)
    assert codes.float().isnan().nonzero().tolist() == [[0, 5], [1, 9]]


@pytest.mark.parametrize("column_major", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dim", [128, 200, 2048])
def test_the_kernel_gates_into_fp8(kernel: str, dim: int, column_major: bool) -> None:
    """The codes are those of the bf16 kernel's result, quantised by the reference."""
    gate_up = normal(5, 2 * dim, seed=14).bfloat16() * 4
    codes, scales = call("moe", kernel, "_fp8", gate_up, 10.0, column_major)
    expected = quant.fp8_quantise(call("moe", kernel, "", gate_up, 10.0), 128, column_major)
    assert same_bits(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scales, expected[1]) and scales.stride() == expected[1].stride()
    again = call("moe", kernel, "_fp8", gate_up[3:4], 10.0, column_major)
    assert same_bits(again[0].view(torch.uint8), codes[3:4].view(torch.uint8))


def activations() -> dict[str, Tensor]:
    """Every finite bf16 in blocks of similar size and of any size; single values among zeros; short last blocks."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    finite = bits[bits.isfinite()]
    by_size = finite[finite.float().abs().argsort()]
    alone = torch.zeros(len(finite[::13]), 128).bfloat16()
    alone[:, 77] = finite[::13]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(15))]
    return {
        "neighbours": by_size.view(-1, 1088),
        "alone": alone,
        "any": shuffled.view(-1, 1088),
        "amplitudes": normal(60, 512, seed=16).bfloat16() * torch.logspace(-36, 30, 60)[:, None].bfloat16(),
        "wide": torch.nn.functional.pad(normal(7, 192, seed=17).bfloat16(), (8, 24), value=NAN)[:, 8:-24],
    }


@pytest.mark.parametrize("case", ["neighbours", "alone", "any", "amplitudes", "wide"])
def test_the_kernel_quantises_to_the_same_bits(kernel: str, case: str) -> None:
    x = activations()[case]
    codes, scales = call("quant", kernel, "", x, 128, case == "amplitudes")
    expected_codes, expected_scales = quant.fp8_quantise(x, 128)
    assert same_bits(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert same_bits(scales.contiguous(), expected_scales)


def test_the_quantiser_marks_what_is_not_finite(kernel: str) -> None:
    """A NaN is a NaN among codes that are as without it. A block with an infinity has the reference's infinite scale, a
    NaN for the infinity and zeros for the other channels."""
    x = normal(4, 256, seed=18).bfloat16()
    x[0, 3] = 0
    clean = call("quant", kernel, "", x, 128, False)
    x[0, 3], x[1, 200], x[3, 255] = NAN, -INF, INF
    codes, scales = call("quant", kernel, "", x, 128, False)
    expected_codes, expected_scales = quant.fp8_quantise(x, 128)
    marked = codes.float().isnan()
    assert marked.nonzero().tolist() == [[0, 3], [1, 200], [3, 255]]
    got, wanted, as_before = (c.view(torch.uint8).masked_fill(marked, 0) for c in (codes, expected_codes, clean[0]))
    assert same_bits(got[[0, 2]], as_before[[0, 2]]) and same_bits(scales[[0, 2]], clean[1][[0, 2]])
    assert same_bits(got[[1, 3]], wanted[[1, 3]]) and same_bits(scales[[1, 3]], expected_scales[[1, 3]])
    assert scales[[1, 3], 1].isinf().all() and not (got[[1, 3], 128:] & 0x7F).any()


def test_what_the_others_refuse(kernel: str) -> None:
    x = normal(3, 256, seed=19).bfloat16()
    with pytest.raises(ValueError, match="takes blocks of 128; got 64"):
        call("quant", kernel, "", x, 64, False)
    for wrong in (x.float(), x[:, 4:], x[:, :252]):
        with pytest.raises(ValueError, match=r"fp8_quantise: x must be torch\.bfloat16"):
            call("quant", kernel, "", wrong, 128, False)
    with pytest.raises(ValueError, match=r"fused_swiglu: the half of up in gate_up must be"):
        call("moe", kernel, "", x[:, :248], 10.0)


def test_no_tokens_need_no_launch(kernel: str) -> None:
    from dsv4_kernels.moe import gpu as gates
    from dsv4_kernels.quant import gpu as quantisers
    from dsv4_kernels.router import gpu as routers

    nothing = torch.zeros(0, 256)
    assert getattr(routers, f"{kernel}_topk")(nothing, torch.zeros(256), 6, 1.0)[0].shape == (0, 6)
    assert getattr(gates, kernel)(nothing.bfloat16(), 1.0).shape == (0, 128)
    assert getattr(quantisers, kernel)(nothing.bfloat16(), 128, True)[1].shape == (0, 2)


def test_the_kernels_need_no_stack(kernel: str) -> None:
    from ptx_emulator import emulated

    from dsv4_kernels.moe import gpu as gates
    from dsv4_kernels.quant import gpu as quantisers
    from dsv4_kernels.router import gpu as routers

    arch, of = ARCH[kernel], routers.Configuration
    functions = {
        "swiglu": lambda: gates.compile(False, arch),
        "swiglu_fp8": lambda: gates.compile(True, arch),
        "quantise": lambda: quantisers.compile(arch),
        "topk_256": lambda: routers.compile(of(6, 256), arch),
        "topk_384": lambda: routers.compile(of(6, 384), arch),
        "hash": lambda: routers.compile(of(6, 0, wide_ids=True), arch),
    }
    registers = {"swiglu": 32, "swiglu_fp8": 40, "quantise": 32, "topk_256": 72, "topk_384": 80, "hash": 32}
    with emulated(arch=arch):
        assert_no_spills(functions, registers)


# ---- on a GPU


@pytest.fixture
def kernel_here(kernel_on_gpu: Callable[[str], str]) -> str:
    return kernel_on_gpu("fused_swiglu")


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [256, 384])
def test_the_gpu_routes(kernel_here: str, num_experts: int) -> None:
    logits, bias = normal(1000, num_experts, seed=20) * 3, normal(num_experts, seed=21) * 0.2
    weights, experts = router.route_topk_logits(logits.cuda(), bias.cuda(), 6, 1.5, kernel_here)
    assert_topk(weights.cpu(), experts.cpu(), logits, bias, 1.5)
    table = torch.randint(0, num_experts, (50, 6), generator=torch.Generator().manual_seed(22)).int()
    ids = torch.arange(1000) - 400
    weights, experts = router.route_hash_logits(logits.cuda(), table.cuda(), ids.cuda(), 1.5, kernel_here)
    assert torch.equal(experts.cpu(), table[ids.clamp(0, 49)])
    assert_weights(weights.cpu(), experts.cpu(), logits, 1.5)


@pytest.mark.gpu
def test_the_gpu_gates_and_quantises(kernel_here: str) -> None:
    gate_up = every_gate_and_up()
    got = moe.fused_swiglu(gate_up.cuda(), 10.0, kernel_here)
    assert_swiglu(got.cpu(), gate_up)
    for column_major in (False, True):
        expected = quant.fp8_quantise(got.cpu(), 128, column_major)
        found = moe.swiglu_fp8(gate_up.cuda(), 10.0, column_major, kernel_here)
        for a, b in zip(found, expected, strict=True):
            assert same_bits(a.cpu().float().contiguous(), b.float().contiguous())
    for x in activations().values():
        found, expected = quant.fp8_quantise(x.cuda(), 128, False, kernel_here), quant.fp8_quantise(x, 128)
        assert same_bits(found[0].cpu().view(torch.uint8), expected[0].view(torch.uint8))
        assert same_bits(found[1].cpu(), expected[1])


@pytest.mark.gpu
def test_the_gpu_finds_rows_beyond_two_gigabytes(kernel_here: str) -> None:
    """Rows of gate and up, of an activation, and of logits that need 64-bit offsets."""
    rows = 2**31 // 8192 + 3
    gate_up = torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda")
    gate_up[-1] = normal(4096, seed=23).bfloat16().cuda()
    last = gate_up[-1:].clone()
    for function in (
        lambda x: (moe.fused_swiglu(x, 10.0, kernel_here),),
        lambda x: moe.swiglu_fp8(x, 10.0, False, kernel_here),
        lambda x: quant.fp8_quantise(x, 128, False, kernel_here),
        lambda x: router.route_topk_logits(x.view(torch.float32)[:, :256], last[0, :256].float(), 6, 1.0, kernel_here),
    ):
        for many, one in zip(function(gate_up), function(last), strict=True):
            assert same_bits(many[-1:].cpu().float(), one.cpu().float())
