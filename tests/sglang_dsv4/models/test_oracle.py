"""The oracles are tested against the specification and against each other."""

import pytest
import torch
from model.oracle import OracleRun, TransformersOracle, configuration, random_weights
from model.reference import (
    _E4M3,
    Reference,
    fp4_codes,
    fp8_codes,
    fp8_qdq,
    hadamard,
)
from model.served import SCHEDULES
from selection.marks import with_slow_marks
from torch import Tensor

TOKENS = 600
Both = tuple[TransformersOracle, Reference, Tensor, OracleRun]


@pytest.fixture(scope="module", params=SCHEDULES)
def both(request: pytest.FixtureRequest) -> Both:
    config = configuration(SCHEDULES[request.param])
    weights = random_weights(config, seed=0)
    tokens = torch.randint(2, config["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(7))
    oracle = TransformersOracle(config, weights)
    return oracle, Reference(config, weights), tokens, oracle.run(tokens)


@pytest.mark.parametrize("chunk_tokens", with_slow_marks([1, 3, 64, 256], quick=[1, 64, 256]))
def test_transformers_does_not_depend_on_chunking(both: Both, chunk_tokens: int | None) -> None:
    oracle, _, tokens, whole = both
    count = 140 if chunk_tokens == 1 else TOKENS
    chunked = oracle.run(tokens[:count], chunk_tokens)
    comparable = whole.margins[:count] > 1e-5
    assert (chunked.logits - whole.logits[:count])[comparable].abs().max() < 5e-5


def test_reference_without_quantisers_equals_transformers(both: Both) -> None:
    _, reference, tokens, whole = both
    comparable = whole.margins > 1e-5
    assert (reference.logits(tokens) - whole.logits)[comparable].abs().max() < 5e-5


def test_yarn_frequencies_are_the_specification_s() -> None:
    config = configuration(qk_rope_head_dim=64, head_dim=512)
    frequencies = Reference(config, {}).frequencies(4)
    listed = {0: 1.0, 1: 6.876560450e-01, 14: 5.286856554e-03, 15: 3.635538509e-03, 16: 2.265624935e-03}
    listed |= {20: 2.969777852e-04, 24: 1.953125320e-05, 25: 5.372312444e-06, 31: 5.680528830e-07}
    for i, value in listed.items():
        assert frequencies[i].item() == pytest.approx(value, rel=1e-6)


def test_e4m3_table_is_torch_s() -> None:
    assert torch.equal(_E4M3, torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("magnitude", [1e-8, 1e-3, 1.0, 100.0, 1e6])
def test_fp8_codes_are_those_of_a_round_to_nearest_even_cast(magnitude: float) -> None:
    x = magnitude * torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    codes, scales = fp8_codes(x, 128)
    step = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    cast = (x.unflatten(-1, (-1, 128)) / step[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes, cast.view(torch.uint8).flatten(-2))
    assert (step * 448 >= x.unflatten(-1, (-1, 128)).abs().amax(-1)).all()
    assert torch.equal(fp8_qdq(x, 128), (cast.float() * step[..., None]).flatten(-2))


def test_quantiser_ties_go_to_the_even_code() -> None:
    values = torch.tensor([1.0625, 1.1875, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 448.0])
    codes, _ = fp8_codes(torch.nn.functional.pad(values, (0, 119)), 128)
    assert codes[:2].tolist() == [56, 58]  # halfway between codes 56, 57 and between 57, 58
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0])
    codes, scales = fp4_codes(torch.nn.functional.pad(values, (0, 23)))
    assert scales.item() == 127
    assert codes[:9].tolist() == [0, 2, 2, 4, 4, 6, 6, 14, 7]


def test_hadamard_is_the_orthonormal_sylvester_matrix() -> None:
    matrix = torch.ones(1, 1)
    for _ in range(7):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    assert torch.allclose(hadamard(torch.eye(128)), matrix * 128**-0.5, atol=1e-7)
