"""SGLang's variables that deal experts to tokens in benchmarks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sglang_dsv4.layers import row_exchange, simulated_routing
from sglang_dsv4.layers.moe import Gate
from sglang_dsv4.layers.simulated_routing import ROWS

UNIFORM, IN_TURN = "SGLANG_SIMULATE_UNIFORM_EXPERTS", "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS"
CONFIG = SimpleNamespace(
    hidden_size=16, n_routed_experts=256, num_experts_per_tok=6, routed_scaling_factor=1.5, vocab_size=50
)


def set_parallel(monkeypatch: pytest.MonkeyPatch, ep: int = 1, group: int = 0, groups: int = 1) -> None:
    parallel = SimpleNamespace(moe_ep_size=ep, attn_dp_rank=group, attn_dp_size=groups)
    monkeypatch.setattr(simulated_routing, "get_parallel", lambda: parallel)
    monkeypatch.setattr(row_exchange, "is_on", lambda: groups > 1)


def routed(tokens: int, hashed: bool = False, layer_id: int = 0) -> tuple[Tensor, Tensor]:
    """Weights and experts of tokens that are all alike."""
    gate = Gate(CONFIG, layer_id, hashed)
    torch.nn.init.normal_(gate.weight, generator=torch.Generator().manual_seed(1))
    if gate.bias is not None:
        torch.nn.init.zeros_(gate.bias)
    x = torch.ones(tokens, 16, dtype=gate.weight.dtype)
    return gate(gate.logits(x), torch.zeros(tokens, dtype=torch.int64))


def numbers_of(experts: Tensor) -> Tensor:
    """How many tokens each of the 256 experts has."""
    return experts.flatten().bincount(minlength=256)


def test_without_the_variables_the_router_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_parallel(monkeypatch)
    assert (numbers_of(routed(64)[1]) > 0).sum() == 6  # all tokens are alike


def test_uniform_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mean of 43 layers 64 tokens have as many different experts as independent draws; a token's differ."""
    monkeypatch.setenv(UNIFORM, "1")
    set_parallel(monkeypatch)
    layers = [routed(64, layer_id=layer_id) for layer_id in range(43)]
    used = [int((numbers_of(experts) > 0).sum()) for _, experts in layers]
    assert sum(used) / 43 == pytest.approx(256 * (1 - (1 - 6 / 256) ** 64), abs=2)  # 199.8
    for weights, experts in layers:
        assert all(row.unique().numel() == 6 for row in experts)
        assert torch.allclose(weights.sum(1), torch.tensor(1.5))
    assert torch.equal(routed(3)[1], layers[0][1][:3])  # graphs of every size have the same experts


def test_hash_layers_keep_their_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNIFORM, "1")
    set_parallel(monkeypatch)
    assert (numbers_of(routed(64, hashed=True)[1]) > 0).sum() == 6  # all tokens have the same id


@pytest.mark.parametrize("ranks", [1, 4])
def test_experts_in_turn(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of token and expert are dealt to the ranks in turn, and on a rank to its experts in turn."""
    monkeypatch.setenv(IN_TURN, "1")
    set_parallel(monkeypatch, ep=ranks)
    _, experts = routed(128)
    assert set(numbers_of(experts).tolist()) == {3}
    of_rank = (routed(2)[1] // (256 // ranks)).flatten()
    assert of_rank.tolist() == [slot % ranks for slot in range(12)]
    assert all(row.unique().numel() == 6 for row in experts)


@pytest.mark.parametrize("variable", [UNIFORM, IN_TURN])
def test_groups_that_exchange_rows_have_other_experts(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    made = []
    for group in (0, 1):
        set_parallel(monkeypatch, ep=2, group=group, groups=2)
        made.append(routed(2)[1])
    assert not (made[0] == made[1]).all(1).any()


def test_layers_deal_in_turn_from_another_expert_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IN_TURN, "1")
    set_parallel(monkeypatch)
    assert [int(routed(1, layer_id=layer_id)[1][0, 0]) for layer_id in (0, 1, 42)] == [0, 1, 42]


def test_more_tokens_than_a_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IN_TURN, "1")
    set_parallel(monkeypatch)
    _, experts = routed(ROWS + 5)
    assert torch.equal(experts[ROWS:], experts[:5])


def test_both_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNIFORM, "1")
    monkeypatch.setenv(IN_TURN, "1")
    with pytest.raises(ValueError, match="are both set; expected one"):
        Gate(CONFIG, 0, False)
