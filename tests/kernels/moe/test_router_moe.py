"""Routers and experts against loops in float64 (DeepSeek-V4 specification, section 5)."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4_kernels.moe import expert_rows, experts_forward, sum_expert_rows, swiglu
from dsv4_kernels.quant import fp8_qdq
from dsv4_kernels.reference.batch_invariant import tree_sum
from dsv4_kernels.router import route_hash, route_hash_logits, route_topk, route_topk_logits

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def naive_scores(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    logits = x.double() @ gate.double().T
    return torch.tensor([[math.sqrt(math.log1p(math.exp(v))) for v in row] for row in logits], dtype=torch.float64)


@DTYPES
def test_route_topk(dtype: torch.dtype) -> None:
    x, gate, bias = normal(40, 24, seed=0, dtype=dtype), normal(10, 24, seed=1, dtype=dtype), normal(10, seed=2)
    weights, experts = route_topk(x, gate, bias, top_k=3, scale=2.5)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int32)
    scores = naive_scores(x, gate)
    for t in range(40):
        expected = sorted(range(10), key=lambda e: -(scores[t, e] + bias[e].double()))[:3]
        assert experts[t].tolist() == expected
        chosen = scores[t, expected]
        assert weights[t].tolist() == pytest.approx((chosen / chosen.sum() * 2.5).tolist(), rel=3e-6)


def test_the_bias_selects_but_does_not_weigh() -> None:
    x, gate = normal(5, 8, seed=3), normal(6, 8, seed=4)
    bias = torch.tensor([0.0, 0.0, 100.0, 0.0, 50.0, 0.0])
    weights, experts = route_topk(x, gate, bias, top_k=2, scale=1.0)
    assert experts.tolist() == [[2, 4]] * 5
    chosen = naive_scores(x, gate)[:, [2, 4]]
    assert torch.allclose(weights.double(), chosen / chosen.sum(1, keepdim=True), rtol=3e-6, atol=0)


def test_of_equal_scores_the_lower_expert_wins() -> None:
    """All 256 experts are equal except one: it comes first, then the lowest ids."""
    gate = torch.ones(256, 4)
    bias = torch.zeros(256)
    bias[7] = 1.0
    _, experts = route_topk(torch.ones(70, 4), gate, bias, top_k=5, scale=1.0)
    assert experts.tolist() == [[7, 0, 1, 2, 3]] * 70


def test_large_logits_stay_finite() -> None:
    gate = torch.tensor([[1000.0], [-1000.0], [50.0]])
    weights, experts = route_topk(torch.ones(1, 1), gate, torch.zeros(3), top_k=2, scale=1.0)
    assert experts.tolist() == [[0, 2]]
    expected = torch.tensor([math.sqrt(1000.0), math.sqrt(50.0)])
    assert torch.allclose(weights[0], expected / expected.sum(), rtol=1e-6)


ENDS = (-3.4e38, -1e4, -104.0, -103.0, -80.0, -57.0, -40.0, 0.0, 57.0, 1e4, 3.4e38)
"""Logits at the ends of fp32 and of exp: from -104 down exp and with it the score is 0, from about -57 down a sum of
scores is so small that LEAST_SUM counts."""


@pytest.mark.parametrize("logit", ENDS, ids="{:g}".format)
def test_weights_are_finite_whatever_the_logits(logit: float) -> None:
    """The weights of scores that are all 0 were 0 / 0; the hash router does not look at the scores that it divides."""
    logits = torch.full((2, 8), logit)
    logits[1, 3] = -logit
    table = torch.arange(6).expand(1, 6)
    by_score, experts = route_topk_logits(logits, torch.zeros(8), 6, 1.5)
    by_id, _ = route_hash_logits(logits, table, torch.zeros(2, dtype=torch.int64), 1.5)
    for weights, chosen in ((by_score, experts.long()), (by_id, table.expand(2, 6))):
        assert weights.isfinite().all()
        scores = torch.sqrt(logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs()))).gather(1, chosen)
        sums = weights.sum(1)
        vanished = scores.sum(1) == 0
        assert (sums[vanished] == 0).all()
        large = scores.sum(1) >= 2.0**-41
        assert torch.allclose(sums[large], torch.full_like(sums[large], 1.5), rtol=1e-6)
        # Same bits as without LEAST_SUM, except where the sum is tiny.
        assert torch.equal(weights[large], (scores / tree_sum(scores, 1).unsqueeze(1) * 1.5)[large])


@DTYPES
def test_route_hash(dtype: torch.dtype) -> None:
    x, gate = normal(20, 24, seed=5, dtype=dtype), normal(10, 24, seed=6, dtype=dtype)
    expert_table = torch.stack([torch.randperm(10, generator=torch.Generator().manual_seed(i))[:3] for i in range(50)])
    token_ids = torch.randint(0, 50, (20,), generator=torch.Generator().manual_seed(7))
    weights, experts = route_hash(x, gate, expert_table, token_ids, scale=1.5)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int32)
    assert torch.equal(experts.long(), expert_table[token_ids])
    chosen = naive_scores(x, gate).gather(1, experts.long())
    assert torch.allclose(weights.double(), chosen / chosen.sum(1, keepdim=True) * 1.5, rtol=3e-6, atol=0)


def test_a_token_id_outside_the_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        route_hash(torch.ones(1, 4), torch.ones(3, 4), torch.zeros(5, 2, dtype=torch.int64), torch.tensor([5]), 1.0)


def naive_swiglu(gate: float, up: float, limit: float) -> float:
    gate, up = min(gate, limit), max(-limit, min(up, limit))
    return gate / (1 + math.exp(-gate)) * up


@DTYPES
def test_swiglu_clamps_the_gate_from_above_only(dtype: torch.dtype) -> None:
    values = torch.tensor([-50.0, -10.5, -10.0, -1.0, 0.0, 1.0, 9.875, 10.0, 10.5, 50.0])
    gate, up = (v.flatten() for v in torch.meshgrid(values, values, indexing="ij"))
    got = swiglu(gate.to(dtype), up.to(dtype), 10.0)
    assert got.dtype == torch.float32
    expected = [naive_swiglu(a, b, 10.0) for a, b in zip(gate.tolist(), up.tolist(), strict=True)]
    assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-30)


def naive_expert(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weight: float, limit: float) -> torch.Tensor:
    half = w13.shape[0] // 2
    gate, up = (w13[:half].double() @ x.double(), w13[half:].double() @ x.double())
    h = [weight * naive_swiglu(float(a), float(b), limit) for a, b in zip(gate, up, strict=True)]
    return w2.double() @ torch.tensor(h, dtype=torch.float64)


@pytest.mark.parametrize("offset", [0, 2], ids=["all_experts", "second_rank"])
def test_experts_in_fp32(offset: int) -> None:
    """A limit that often clamps, a token whose experts are all on other ranks, a repeated expert."""
    x, w13, w2 = normal(9, 16, seed=8), normal(6, 24, 16, seed=9), normal(6, 16, 12, seed=10)
    experts = torch.randint(0, 6, (9, 3), generator=torch.Generator().manual_seed(11))
    experts[0], experts[1] = torch.tensor([0, 1, 0]), torch.tensor([4, 4, 5])
    weights = torch.rand(9, 3, generator=torch.Generator().manual_seed(12))
    held = slice(offset, 4 if offset else 6)
    got = experts_forward(x, weights, experts.int(), w13[held], w2[held], 2.0, expert_offset=offset)
    assert got.dtype == torch.float32
    expected = torch.zeros(9, 16, dtype=torch.float64)
    for t in range(9):
        for weight, e in zip(weights[t].tolist(), experts[t].tolist(), strict=True):
            if held.start <= e < held.stop:
                expected[t] += naive_expert(x[t], w13[e], w2[e], weight, 2.0)
    assert torch.allclose(got.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    if offset:
        assert not got[0].any()


@DTYPES
def test_rows_of_all_ranks_in_any_places_have_the_sum_s_bits(dtype: torch.dtype) -> None:
    """Three ranks of two experts; two of a token's choices may be one expert, as a table of ids may have it."""
    x, weights = normal(9, 16, seed=1, dtype=dtype), torch.rand(9, 3, generator=torch.Generator().manual_seed(2))
    w13, w2 = normal(6, 24, 16, seed=3, dtype=dtype), normal(6, 16, 12, seed=4, dtype=dtype)
    w2 *= 2.0 ** (4 * torch.arange(6)[:, None, None])  # another order of adding has other bits
    chosen = torch.randint(6, (9, 3), generator=torch.Generator().manual_seed(5)).int()
    chosen[4, 1] = chosen[4, 0]
    rows = [
        expert_rows(x, weights, chosen, w13[e : e + 2], w2[e : e + 2], 10.0, expert_offset=e).flatten(0, 1)
        for e in (0, 2, 4)
    ]
    for rank, of_rank in enumerate(rows):
        assert of_rank.dtype == dtype and not of_rank[(chosen // 2 != rank).flatten()].any()
    place = torch.randperm(27, generator=torch.Generator().manual_seed(6)).int()
    shuffled = torch.empty_like(rows[0])
    shuffled[place.long()] = sum(rows)  # one of them is not zero
    got = sum_expert_rows(shuffled, place.view(9, 3), chosen)
    assert torch.equal(got, experts_forward(x, weights, chosen, w13, w2, 10.0))
    assert not torch.equal(got, sum_expert_rows(shuffled, place.view(9, 3), -chosen))


def test_bf16_and_fp8_steps_in_the_release_s_order() -> None:
    """Roundings: input to FP8; w1, w3 to bf16; weight * swiglu in fp32, to bf16, to FP8; w2 to bf16; sum in fp32."""
    x = normal(5, 128, seed=16, dtype=torch.bfloat16)
    w13, w2 = normal(3, 256, 128, seed=17, dtype=torch.bfloat16), normal(3, 128, 128, seed=18, dtype=torch.bfloat16)
    experts = torch.tensor([[2, 0]] * 5)
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(19)) + 0.3
    expected = torch.zeros(5, 128)
    for e, weight in ((0, weights[:, 1:]), (2, weights[:, :1])):
        gate, up = (fp8_qdq(x, 128).float() @ w13[e].float().T).bfloat16().chunk(2, 1)
        h = (weight * swiglu(gate, up, 10.0)).bfloat16()
        expected += (fp8_qdq(h, 128).float() @ w2[e].float().T).bfloat16().float()
    got = experts_forward(x, weights, experts, w13, w2, 10.0, act_qdq_block=128)
    # Another order of fp32 sums may flip a few bf16 roundings (2**-8), and then an e4m3 rounding (2**-4). Most elements
    # have neither; weighting after w2, or no rounding at all, would change most of them.
    relative = (got - expected).norm() / expected.norm()
    assert relative < 3e-3
    late = torch.zeros(5, 128)
    for e, weight in ((0, weights[:, 1:]), (2, weights[:, :1])):
        gate, up = (fp8_qdq(x, 128).float() @ w13[e].float().T).bfloat16().chunk(2, 1)
        h = swiglu(gate, up, 10.0).bfloat16()
        late += weight * (fp8_qdq(h, 128).float() @ w2[e].float().T).bfloat16().float()
    assert (late - expected).norm() / expected.norm() > 1e-2


def test_no_tokens() -> None:
    empty = torch.zeros(0, 16)
    weights, experts = route_topk(empty, torch.ones(6, 16), torch.zeros(6), 3, 1.0)
    assert experts_forward(empty, weights, experts, torch.ones(6, 24, 16), torch.ones(6, 16, 12), 10.0).shape == (0, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: route_topk(torch.zeros(2, 4), torch.zeros(3, 5), torch.zeros(3), 1, 1.0), "gate_weight"),
        (lambda: route_topk(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(4), 1, 1.0), r"bias has shape \(4,\)"),
        (
            lambda: route_topk(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(3), 4, 1.0),
            "top_k is 4; expected 1 to 3",
        ),
        (
            lambda: route_hash(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(9, 2), torch.zeros(3), 1.0),
            r"token_ids \(2,\)",
        ),
        (lambda: swiglu(torch.zeros(2), torch.zeros(3), 10.0), "differ in shape"),
        (lambda: swiglu(torch.zeros(2), torch.zeros(2), 0.0), "expected a positive number"),
        (
            lambda: experts_forward(
                *(torch.zeros(2, 4), torch.zeros(2, 1), torch.zeros(2, 2), torch.zeros(3, 6, 4), torch.zeros(3, 4, 3)),
                10.0,
            ),
            "weights and experts",
        ),
        (
            lambda: expert_rows(
                *(torch.zeros(2, 5), torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(3, 6, 4), torch.zeros(3, 4, 3)),
                10.0,
            ),
            r"expert_rows needs x \[T, d\]",
        ),
        (
            lambda: sum_expert_rows(torch.zeros(4, 8), torch.zeros(2, 2), torch.zeros(2, 3)),
            r"row_of_pair \[T, k\] and experts \[T, k\]; got \(4, 8\), \(2, 2\), \(2, 3\)",
        ),
    ],
    ids=["gate", "bias", "top_k", "token_ids", "swiglu", "limit", "experts", "rows", "sum"],
)
def test_errors_say_what_is_expected(call, message: str) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match=message):
        call()
