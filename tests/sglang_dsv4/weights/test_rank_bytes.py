"""Bytes of the weights on a GPU: against the parameters of a model that is built for one rank, and by topology."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from model.released_configs import FLASH, PRO, as_sglang_parses

from sglang_dsv4 import doctor
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.topology import Topology
from sglang_dsv4.weights.rank_bytes import bytes_of_a_rank, sharing, topologies


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
    ("name", "shared"),
    [
        ("layers.3.ffn.experts.7.w1.weight", "all"),
        ("layers.3.ffn.shared_experts.w2.weight", "all"),
        ("layers.12.attn.wq_b.weight", "group"),
        ("layers.12.attn.indexer.wq_b.weight", "none"),
        ("layers.12.attn.wo_a.weight", "group"),
        ("layers.12.attn.wq_a.weight", "none"),
        ("layers.12.ffn.gate.weight", "none"),
        ("embed.weight", "group"),
        ("head.weight", "group"),
        ("hc_head_fn", "none"),
    ],
)
def test_who_shares_a_tensor(name: str, shared: str) -> None:
    assert sharing(name) == shared


@pytest.mark.slow
def test_more_groups_have_more_weights_and_more_kv(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRO))
    lines = doctor.several_gpus(tmp_path, 8, 180, 64, "fp8")[2:]
    rows = [line.replace(",", "").replace("GiB", "").split() for line in lines]
    weights, tokens = ([float(row[column]) for row in rows] for column in (2, 4))
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    assert weights == sorted(weights) and tokens == sorted(tokens)
    assert "do not fit" in doctor.several_gpus(tmp_path, 8, 80, 64, "fp8")[-1]
    assert doctor.several_gpus(tmp_path, 3, 1000, 64, "fp8")[-1].split()[0] == "3", "only whole heads on each GPU"
    assert "shared expert's 3072 channels" in doctor.several_gpus(tmp_path, 16, 80, 64, "fp8")[-1]


def test_output_groups_are_whole(flash: Config) -> None:
    assert [topology.groups for topology in topologies(flash, 16)] == [2, 4, 8, 16]


def test_the_documents_table_is_the_plans(tmp_path: Path) -> None:
    """`docs/data_parallel.md`: tokens by groups, and for many requests the topology with the most."""
    text = Path(doctor.__file__).parents[1].joinpath("docs/data_parallel.md").read_text()
    rows = re.findall(r"^\| (Flash|Pro), (\d) × (\d+) GB(?: \(\w+\))? \|(.*)\|$", text, re.MULTILINE)
    assert len(rows) == 8
    for name, gpus, gigabytes, cells in rows:
        (tmp_path / "config.json").write_text(json.dumps({"Flash": FLASH, "Pro": PRO}[name]))
        lines = doctor.several_gpus(tmp_path, int(gpus), float(gigabytes), 64, "fp8")[2:]
        tokens = {int(line.split()[0]): int(line.split()[-1].replace(",", "")) for line in lines}
        *numbers, chosen = (cell.strip() for cell in cells.split("|"))
        assert [number for number in numbers if number] == [f"{count / 1e6:.1f}M" for count in tokens.values()]
        most = max(tokens, key=lambda groups: tokens[groups])
        assert chosen == f"`--tp-size {gpus} --attn-dp-size {most}`"
    (tmp_path / "config.json").write_text(json.dumps(PRO))
    for gpus, gigabytes in ((8, 80), (4, 180)):
        assert all("do not fit" in line for line in doctor.several_gpus(tmp_path, gpus, gigabytes, 64, "fp8")[2:])
