"""Exchange of experts' rows over gloo, between ranks that are threads: the bits of one rank with all experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import comb
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from model.gloo_threads import GlooThreads
from torch import Tensor, nn

from dsv4_kernels.moe import ref
from sglang_dsv4.layers import data_parallel, local_experts, moe, row_exchange
from sglang_dsv4.layers.linear import SublayerInput
from sglang_dsv4.layers.moe import Gate, MoE, ReferenceExperts
from sglang_dsv4.layers.row_exchange import Arrived, ExchangedRows
from sglang_dsv4.model_config.config import ConfigError

D, EXPERTS, CHOSEN, VOCABULARY = 24, 12, 3, 50
CONFIG = SimpleNamespace(
    hidden_size=D,
    moe_intermediate_size=8,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=CHOSEN,
    routed_scaling_factor=1.5,
    vocab_size=VOCABULARY,
    swiglu_limit=10.0,
    activation_block=None,
)
# Each rank's tokens. Messages of a fixed size: equal numbers; told sizes: unequal ones, and more than the limit of 4.
FIXED = [(1, 1), (4, 4), (3, 3, 3, 3)]
TOLD = [(5, 5), (5, 1, 2), (0, 4), (4, 0), (7, 0, 0, 1), (9, 2, 3, 6)]


class OwnExpert(nn.Module):
    """A shared expert: a function of each row. Rows of none must not come here: a GPU launches no empty grid."""

    def gate_up(self, given: SublayerInput) -> Tensor:
        assert len(given.rows)
        return given.rows

    def hidden(self, gate_up: Tensor) -> Tensor:
        return gate_up

    def down(self, hidden: Tensor) -> Tensor:
        return hidden * 3


def layer(dtype: torch.dtype, hashed: bool, ranks: int = 1, rank: int = 0) -> MoE:
    """One rank's layer; all ranks' weights are slices of one layer's. Experts' rows differ much in size, so that
    another order of adding gives other bits."""
    generator = torch.Generator().manual_seed(7)
    made = MoE.__new__(MoE)
    nn.Module.__init__(made)
    made.tp_size, made.shared_experts, made.gate = ranks, OwnExpert(), Gate(CONFIG, 0, hashed)
    made.gate.weight.data.normal_(generator=generator)
    if hashed:
        made.gate.tid2eid.copy_(
            torch.rand(VOCABULARY, EXPERTS, generator=generator).topk(CHOSEN).indices.to(torch.int32)
        )
    else:
        made.gate.bias.data.zero_()
    parallel = SimpleNamespace(moe_ep_size=ranks, moe_ep_rank=rank, moe_tp_size=1, moe_tp_rank=0)
    with mock.patch.object(local_experts, "get_parallel", lambda: parallel):
        made.experts = ReferenceExperts(CONFIG)
    own = slice(made.experts.first_local_expert, made.experts.first_local_expert + EXPERTS // ranks)
    for name, parameter in list(made.experts.named_parameters()):
        whole = torch.randn(EXPERTS, *parameter.shape[1:], generator=generator)
        if name == "w2_weight":
            whole *= 2.0 ** torch.randint(-9, 10, (EXPERTS, 1, 1), generator=generator)
        made.experts._parameters[name] = nn.Parameter(whole[own].to(dtype), requires_grad=False)
    return made


def tokens_of(counts: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return each rank's rows and token ids."""
    generator = torch.Generator().manual_seed(sum(counts))
    rows = torch.randn(sum(counts), D, generator=generator).to(dtype)
    ids = torch.randint(VOCABULARY, (sum(counts),), generator=generator)
    return list(rows.split(counts)), list(ids.split(counts))


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Tensor], GlooThreads]]:
    monkeypatch.setattr(row_exchange, "FIXED_TOKENS", 4)

    def run(
        counts: tuple[int, ...], dtype: torch.dtype, hashed: bool, timeout_s: float = 60
    ) -> tuple[list[Tensor], GlooThreads]:
        threads = GlooThreads(len(counts), timeout_s)
        monkeypatch.setattr(row_exchange, "get_parallel", threads.parallel)
        monkeypatch.setattr(row_exchange, "all_gather_single", threads.all_gather_single)
        monkeypatch.setattr(torch.distributed, "all_to_all_single", threads.all_to_all_single)
        layers = [layer(dtype, hashed, len(counts), rank) for rank in range(len(counts))]
        rows, ids = tokens_of(counts, dtype)
        return threads.run(
            lambda rank: layers[rank](SublayerInput(rows[rank], None), ids[rank], ExchangedRows.of_ranks(counts, rank))
        ), threads

    return run


def alone(counts: tuple[int, ...], dtype: torch.dtype, hashed: bool) -> list[Tensor]:
    """Return the outputs for each rank's tokens, one at a time, of one rank with all experts."""
    whole = layer(dtype, hashed)
    rows, ids = tokens_of(counts, dtype)
    made = [
        whole(SublayerInput(row[None], None), token[None])
        for row, token in zip(torch.cat(rows), torch.cat(ids), strict=True)
    ]
    return list(torch.cat(made).split(counts))


@pytest.mark.parametrize("counts", FIXED + TOLD, ids=str)
@pytest.mark.parametrize(
    ("dtype", "hashed"), [(torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)], ids=str
)
def test_the_bits_of_one_rank(
    counts: tuple[int, ...], dtype: torch.dtype, hashed: bool, exchanged: Callable[..., tuple]
) -> None:
    found, _ = exchanged(counts, dtype, hashed)
    for rank, (own, wanted) in enumerate(zip(found, alone(counts, dtype, hashed), strict=True)):
        assert own.dtype == dtype and torch.equal(own, wanted), rank


def test_no_rows_anywhere_is_no_exchange(exchanged: Callable[..., tuple]) -> None:
    found, threads = exchanged((0, 0), torch.bfloat16, False)
    assert all(own.shape == (0, D) for own in found) and not any(threads.words_sent)


@pytest.mark.parametrize("counts", FIXED + TOLD, ids=str)
def test_what_travels(counts: tuple[int, ...], exchanged: Callable[..., tuple]) -> None:
    """A token goes once to each rank with one of its experts, and a row comes back for each pair; with a fixed size,
    every token to every rank, and a place for each pair from each."""
    _, threads = exchanged(counts, torch.bfloat16, True)
    of_token, of_pair = D // 2 + 2 * CHOSEN + 2, D // 2  # 32-bit words; a message is padded to 16 bytes
    ranks, per_rank = len(counts), EXPERTS // len(counts)
    of_ranks = [
        layer(torch.bfloat16, True).gate.tid2eid[ids] // per_rank for ids in tokens_of(counts, torch.float32)[1]
    ]
    for rank, sent in enumerate(threads.words_sent):
        if counts in FIXED:
            assert sent == counts[rank] * of_token + ranks * counts[rank] * CHOSEN * of_pair
        else:
            tokens = sum(len(set(chosen)) for chosen in of_ranks[rank].tolist())
            pairs = sum(int((chosen == rank).sum()) for chosen in of_ranks)
            assert sent == tokens * of_token + pairs * of_pair + 4 * ranks, "and two numbers of 64 bits to each rank"


def rows_in_the_order_of_choice(rows: Tensor, row_of_pair: Tensor, experts: Tensor) -> Tensor:
    return ref.sum_expert_rows(rows, row_of_pair, torch.zeros_like(experts))


def without_the_last_pair(arrived: Arrived, rows: Tensor, row_of_pair: Tensor) -> Tensor:
    local = (row_of_pair >= 0).flatten().nonzero().flatten()
    lost = row_of_pair.flatten().index_fill(0, local[-1:], -1).view_as(row_of_pair)
    return BACK(arrived, rows, lost)


def with_swapped_counts(arrived: Arrived, rows: Tensor, row_of_pair: Tensor) -> Tensor:
    return BACK(arrived._replace(to_owners=arrived.to_owners[::-1]), rows, row_of_pair)


def with_the_next_rank_s_experts(
    rows: ExchangedRows, x: Tensor, weights: Tensor, experts: Tensor, experts_of_a_rank: int
) -> Arrived:
    return SEND(rows, x, weights, (experts + experts_of_a_rank) % EXPERTS, experts_of_a_rank)


BACK, SEND = Arrived.back, ExchangedRows.send
FAULTS = {
    "order of the sum": (moe, "sum_expert_rows", rows_in_the_order_of_choice),
    "a pair lost": (Arrived, "back", without_the_last_pair),
    "counts swapped": (Arrived, "back", with_swapped_counts),
    "another rank": (ExchangedRows, "send", with_the_next_rank_s_experts),
}
NO_COUNTS = ("counts swapped", (4, 4))


@pytest.mark.parametrize(
    ("fault", "counts"),
    [(fault, counts) for fault in FAULTS for counts in ((4, 4), (9, 2, 3, 6)) if (fault, counts) != NO_COUNTS],
    ids=str,
)
def test_planted_faults_are_noticed(
    fault: str, counts: tuple[int, ...], exchanged: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By other bits, or by an error of a message whose parts do not add up."""
    wanted = alone(counts, torch.float32, False)
    monkeypatch.setattr(*FAULTS[fault])
    if counts in TOLD and fault in ("a pair lost", "counts swapped"):
        with pytest.raises((RuntimeError, IndexError)):
            exchanged(counts, torch.float32, False, timeout_s=1)
    else:
        found, _ = exchanged(counts, torch.float32, False)
        assert not all(map(torch.equal, found, wanted))


def test_a_forward_s_rows_are_gathered_or_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(attn_dp_size=2, attn_tp_size=1, tp_rank=1, attn_dp_rank=1)
    for module in (data_parallel, row_exchange):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    batch = SimpleNamespace(global_num_tokens_cpu=[4, 3], forward_mode=SimpleNamespace(name="EXTEND"))
    for word, expected in (("exchange", ExchangedRows((4, 3), 1)), ("gather", None)):
        monkeypatch.setenv(row_exchange.VARIABLE, word)
        row_exchange.is_chosen.cache_clear()
        rows = data_parallel.of_forward(batch, 3)
        assert rows == expected if expected else isinstance(rows, data_parallel.RowsOfAllGroups)
        assert row_exchange.is_on() is bool(expected)
    monkeypatch.setenv(row_exchange.VARIABLE, "send")
    row_exchange.is_chosen.cache_clear()
    with pytest.raises(ValueError, match="SGLANG_DSV4_EXPERT_ROWS must be 'gather' or 'exchange'"):
        row_exchange.is_chosen()
    row_exchange.is_chosen.cache_clear()


def test_graphs_have_messages_of_a_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph replays the sizes that it was captured with, and its host cannot wait."""
    rows, on_gpu = ExchangedRows.of_ranks((500, 500), 0), SimpleNamespace(is_cuda=True)
    for captured in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        assert rows._has_fixed_size(on_gpu) is captured
        assert not ExchangedRows.of_ranks((500, 499), 0)._has_fixed_size(on_gpu)


@pytest.mark.parametrize("kind", ["sums", "nvfp4"])
def test_experts_whose_rows_cannot_be_exchanged_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "get_moe_runner_backend", lambda: SimpleNamespace(value="marlin"))
    experts, named = {
        "sums": (nn.Module(), "--moe-runner-backend marlin, which returns sums: only dsv4"),
        "nvfp4": (moe.Nvfp4PackedExperts.__new__(moe.Nvfp4PackedExperts), "'gather' with NVFP4 experts"),
    }[kind]
    with pytest.raises(ConfigError, match=named):
        moe.check_exchange(experts)
    moe.check_exchange(layer(torch.float32, False).experts)


def test_the_document_s_bytes_are_those_of_the_messages() -> None:
    """`docs/data_parallel.md`; `test_what_travels` compares messages with the same formulas."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "data_parallel.md").read_text()
    d, chosen, experts = 4096, 6, 256
    of_pair, of_token = 2 * d, 2 * d + 8 * chosen  # bytes; the latter is a multiple of 16
    rows = re.findall(r"^\| (\d) GPUs \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [2, 4, 8]
    for ranks, *found in rows:
        ranks = int(ranks)
        from_others = (ranks - 1) / ranks
        reached = ranks * (1 - comb(experts - experts // ranks, chosen) / comb(experts, chosen))
        expected = (
            from_others * 2 * of_pair,
            from_others * 3 * of_pair,  # fp32 parts of sums
            from_others * (reached * of_token + chosen * of_pair) / ranks,
            from_others * (of_token + chosen * of_pair),
        )
        assert [float(one) for one in found] == [round(one / 1000, 1) for one in expected]
