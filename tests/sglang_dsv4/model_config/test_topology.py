"""Numbers of ranks that can share a released model, and those that are refused by name."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from model.released_configs import FLASH, PRO, as_sglang_parses

from sglang_dsv4.model_config.config import Config, ConfigError, QuantSwitches
from sglang_dsv4.model_config.topology import Topology


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    released = {"flash": FLASH, "pro": PRO}
    return {
        name: Config.from_hf(as_sglang_parses(one, tmp_path_factory.mktemp(name))) for name, one in released.items()
    }


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ["flash", "pro"])
def test_released_models_run_on_up_to_eight_ranks(model: str, ranks: int, configs: dict[str, Config]) -> None:
    for groups in (1, 2, 4, 8):
        for expert_ranks in (1, ranks):
            if ranks % groups == 0:
                assert Topology(ranks, groups, expert_ranks).problem(configs[model]) is None


@pytest.mark.parametrize(
    ("model", "topology", "named"),
    [
        # 3072 channels in 24 blocks: with 16 ranks a shard of the shared expert would end within a block.
        ("pro", Topology(16), "shared expert's 3072 channels in blocks of 128 .* --tp-size 16: use a divisor of 24"),
        ("pro", Topology(16, 16, 16), "shared expert's 3072 channels"),
        ("flash", Topology(16), "attention's 8 output groups .* 16 ranks: .* their ratio divides 8"),
        ("flash", Topology(16, 2), None),
        ("flash", Topology(32, 32), "shared expert's 2048 channels .* divisor of 16"),
        ("flash", Topology(12, 6, 12), "256 experts can't be divided by --ep-size 12"),
        ("pro", Topology(12, 6, 12), None),
        ("flash", Topology(3), "attention's 8 output groups"),
    ],
)
def test_sizes_that_do_not_divide(
    model: str, topology: Topology, named: str | None, configs: dict[str, Config]
) -> None:
    problem = topology.problem(configs[model])
    assert problem is None if named is None else re.search(named, problem or ""), problem


@pytest.mark.parametrize(
    ("topology", "named"),
    [
        (Topology(16, 16, 16, exchanges_rows=True), None),  # no shard of the shared expert, which 16 ranks can't share
        (Topology(1, 1, 1, exchanges_rows=True), None),
        (Topology(4, 2, 4, exchanges_rows=True), r"use --attn-dp-size 4 \(got 2\) and --ep-size 4 \(got 4\), or unset"),
        (Topology(4, 4, 2, exchanges_rows=True), r"ROWS=exchange .* whole experts: .* --ep-size 4 \(got 2\)"),
        (Topology(4, 1, 4, exchanges_rows=True), r"--attn-dp-size 4 \(got 1\)"),
        (Topology(256, 256, 256, exchanges_rows=True), "384 experts can't be divided by --ep-size 256"),
    ],
)
def test_an_exchange_of_rows_needs_whole_attention_and_whole_experts(
    topology: Topology, named: str | None, configs: dict[str, Config]
) -> None:
    problem = topology.problem(configs["pro"])
    assert problem is None if named is None else re.search(named, problem or ""), problem


def test_an_unquantised_model_may_be_cut_anywhere(configs: dict[str, Config]) -> None:
    config = replace(configs["pro"], quantised_checkpoint=False, qat=QuantSwitches.off())
    assert Topology(16).problem(config) is None
    assert "3072 channels can't" in (Topology(5, 5).problem(config) or "")


def test_the_model_refuses_ranks_that_cannot_share_it(
    configs: dict[str, Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For those who build the model without the launcher; a draft's model checks the same."""
    from sglang_dsv4.models import deepseek_v4

    parallel = SimpleNamespace(pp_size=1, tp_size=8, attn_dp_size=1, moe_ep_size=1)
    monkeypatch.setattr(deepseek_v4, "get_parallel", lambda: parallel)
    deepseek_v4.check_server_options(configs["pro"])
    parallel.tp_size = 16
    with pytest.raises(ConfigError, match="'tp_size' is 16; accepted: another one: the shared expert's 3072 channels"):
        deepseek_v4.check_server_options(configs["pro"])
    monkeypatch.setattr(deepseek_v4.row_exchange, "is_chosen", lambda: True)
    with pytest.raises(ConfigError, match="another one: SGLANG_DSV4_EXPERT_ROWS=exchange has the bits of one GPU"):
        deepseek_v4.check_server_options(configs["pro"])
