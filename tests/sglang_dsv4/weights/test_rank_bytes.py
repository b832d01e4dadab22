"""Bytes of the weights on a GPU: against the parameters of a model that is built for one rank, and by topology."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model.released_configs import FLASH, PRO, as_sglang_parses

from sglang_dsv4 import doctor
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.weights.rank_bytes import Topology, bytes_of_a_rank, topologies


@pytest.fixture
def flash(tmp_path: Path) -> Config:
    return Config.from_hf(as_sglang_parses(FLASH, tmp_path))


def test_a_single_gpu_has_the_checkpoints_bytes(flash: Config) -> None:
    """284B parameters: 277.0B of experts in 4.25 bits and 7.2B others, as the specification counts them."""
    d, channels, layers = 4096, 2048, 43
    experts = layers * 256 * 3 * d * channels * (0.5 + 1 / 32)
    whole = bytes_of_a_rank(flash, Topology(1, 1), "fp8")
    attention = layers * (d * 1024 + d * 512 + 1024 * 64 * 512 + 8 * 1024 * 4096 + 8 * 1024 * d)
    assert experts + attention < whole < experts + attention + 6e9
    assert bytes_of_a_rank(flash, Topology(1, 1), "both") - whole == 2 * layers * 8 * 1024 * 4096


@pytest.mark.parametrize(
    ("name", "sharers"),
    [
        ("layers.3.ffn.experts.7.w1.weight", 8),
        ("layers.3.ffn.shared_experts.w2.weight", 8),
        ("layers.12.attn.wq_b.weight", 2),
        ("layers.12.attn.indexer.wq_b.weight", 1),
        ("layers.12.attn.wo_a.weight", 2),
        ("layers.12.attn.wq_a.weight", 1),
        ("layers.12.ffn.gate.weight", 1),
        ("embed.weight", 2),
        ("head.weight", 2),
        ("hc_head_fn", 1),
    ],
)
def test_who_shares_a_tensor(name: str, sharers: int) -> None:
    assert Topology(8, 4).sharers(name) == sharers


@pytest.mark.slow
def test_more_groups_have_more_weights_and_more_kv(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRO))
    lines = doctor.several_gpus(tmp_path, 8, 180, 64, "fp8")[2:]
    rows = [line.replace(",", "").replace("GB", "").split() for line in lines]
    weights, tokens = ([float(row[column]) for row in rows] for column in (2, 4))
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    assert weights == sorted(weights) and tokens == sorted(tokens)
    assert "do not fit" in doctor.several_gpus(tmp_path, 8, 80, 64, "fp8")[-1]
    assert doctor.several_gpus(tmp_path, 3, 1000, 64, "fp8")[-1].split()[0] == "3", "only whole heads on each GPU"


def test_output_groups_are_whole(flash: Config) -> None:
    assert [topology.groups for topology in topologies(flash, 16)] == [2, 4, 8, 16]
