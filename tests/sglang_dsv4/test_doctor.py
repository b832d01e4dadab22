"""`python -m sglang_dsv4.doctor`: the installation, a checkpoint's memory plan, and errors for a missing server."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import psutil
import pytest

from sglang_dsv4 import doctor
from sglang_dsv4.cache.pool_plan import PoolPlan
from sglang_dsv4.cache.tail_options import HostOptions, TailOptions
from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config
from sglang_dsv4.weights import rank_bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(PRESETS["flash"])))
    return tmp_path


def test_installation_names_versions_and_implementations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path))
    for name in ("dsv4-kernel-one.o", "another.o"):
        (tmp_path / name).touch()
    lines = doctor.installation()
    assert any("SGLang 0.5.23: the tested version" in line for line in lines)
    assert f"compiled kernels: 1 in {tmp_path}" in lines
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith("  ")}
    assert found["sparse_attention"] == "ref of sm90, sm100, ref, not in a CUDA graph"
    assert found["unpack_pages"] == "ref of sm90, sm100, ref"
    assert found["linear"] == "tiled of tiled, ref, not in a CUDA graph"
    assert found["rms_norm"] == "ref of sm90, sm100, ref"
    monkeypatch.setenv("DSV4_KERNEL_CACHE", "off")
    assert "compiled kernels: not kept on disk (DSV4_KERNEL_CACHE=off)" in doctor.installation()


def test_versions_name_every_package_and_the_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", (*doctor.PACKAGES, "no-such-package"))
    assert doctor.main(["--versions"]) == 0
    found = {line.rsplit("  ", 1)[0].split("  ")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert len(found) == len(doctor.PACKAGES) + 4 and {"Python", "system", "CUDA of torch", "GPUs"} <= set(found)
    assert found["sglang"].split() == ["sglang", "0.5.23"]
    assert found["no-such-package"].endswith("not installed")


def test_installation_says_whether_sglang_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "entry points: installed, SGLang finds this package" in doctor.installation()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints(()))
    (line,) = [line for line in doctor.installation() if line.startswith("entry points:")]
    assert "not installed" in line and "pip install -e ." in line


def test_a_package_that_is_only_on_the_path_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the report ended in a PackageNotFoundError."""

    def not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_found)
    assert doctor.installation()[0].startswith("sglang-dsv4 not installed, on")


@pytest.mark.parametrize("rows", ["fp8", "plain"])
def test_the_plan_lists_what_fits(model: Path, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSV4_TAIL_HOST_SLOTS", "77")
    lines = doctor.plan(model, tokens=65_536, requests=8, rows=rows)
    assert "8 requests, 24 tails" in lines[0]
    assert any("24 on the device, 77 in host memory" in line for line in lines)
    assert ["32,768", "2", "4", "17"] in [line.split()[:4] for line in lines]
    assert any(line.startswith("with --enable-hierarchical-cache --hicache-ratio 2: 131,072 tokens") for line in lines)
    assert ["131,072", "0", "1", "65"] in [line.split()[:4] for line in lines], "beyond the device alone"
    extra = "in addition to the pools, during a prefill: up to 256 MiB of unpacked rows and 256 MiB of index scores"
    assert (extra in lines) == (rows == "fp8")
    experts = [line for line in lines if line.startswith("with --moe-runner-backend dsv4 on one Hopper GPU: ")]
    assert len(experts) == (1 if rows == "fp8" else 0)


def test_the_plan_of_each_stage(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stages' bytes of a token add up; a division that a server refuses is a sentence."""
    sizes = ["--tokens", "4096", "--requests", "4", "--rows", "fp8"]
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    assert doctor.main([str(model), *sizes, "--stages", "2"]) == 0
    printed = capsys.readouterr().out
    assert "stage 0 of 2, layers 0 to" in printed and f"stage 1 of 2, layers {layers // 2} to {layers - 1}: " in printed
    parts = [doctor.geometry_of_checkpoint(model, fp8=True, stage=one) for one in doctor.stages_of_checkpoint(model, 2)]
    whole = doctor.geometry_of_checkpoint(model, fp8=True)
    each = [PoolPlan.of(part, 4096, 5, 4).bytes_per_token for part in (*parts, whole)]
    assert each[0] + each[1] == each[2]
    assert doctor.main([str(model), *sizes, "--stages", str(layers + 1)]) == 1
    assert f"expected 1 to {layers} stages" in capsys.readouterr().err


def test_the_plan_of_several_gpus_has_drafts_and_slots_of_requests_in_transfer(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each costs tokens. A draft's weights are divided as the model's."""

    def tokens(*options: str) -> list[int]:
        assert doctor.main([str(model), "--gpus", "2", "--gpu-memory", "8", "--rows", "fp8", *options]) == 0
        rows = capsys.readouterr().out.split("--attn-dp-size", 1)[1].splitlines()[1:]
        return [int(row.split()[-1].replace(",", "")) for row in rows]

    drafts, no_slots, slots = ("--draft-tokens", "4"), ("--decode-extra-slots", "0"), ("--decode-extra-slots", "64")
    with_both = tokens(*drafts, *slots)
    for fewer, more in (
        (tokens(*drafts), tokens()),
        (tokens(*slots), tokens(*no_slots)),
        (with_both, tokens(*slots)),
        (with_both, tokens(*drafts, *no_slots)),
    ):
        assert all(one < other for one, other in zip(fewer, more, strict=True)), (fewer, more)
    config = doctor.config_of(model)
    for topology in rank_bytes.topologies(config, 2):
        names = {
            "mtp.0.e_proj.weight": "none",
            "mtp.0.attn.wq_b.weight": "group",
            "mtp.0.ffn.experts.0.w1.weight": "all",
        }
        assert all(rank_bytes.sharing(name) == shared for name, shared in names.items())
        with_draft = rank_bytes.bytes_of_a_rank(config, topology, "fp8", draft=True)
        assert with_draft > rank_bytes.bytes_of_a_rank(config, topology, "fp8")


@pytest.mark.parametrize("option", [("--draft-tokens", "4"), ("--decode-extra-slots", "8")])
def test_stages_have_neither_drafts_nor_transfers(
    model: Path, option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        doctor.main([str(model), "--stages", "2", *option])
    assert "neither a server that drafts nor a decode server has stages" in capsys.readouterr().err


def test_a_checkpoint_without_a_draft_is_a_sentence(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config |= {"num_nextn_predict_layers": 0, "compress_ratios": config["compress_ratios"][:layers]}
    (model / "config.json").write_text(json.dumps(config))
    assert doctor.main([str(model), "--draft-tokens", "4"]) == 1
    assert "has no draft: leave out --draft-tokens" in capsys.readouterr().err


def test_a_missing_server_or_model_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert doctor.main([str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SGLANG_DSV4_TAIL_INTERVAL", "1000", "multiple of 256 tokens, got 1000"),
        ("SGLANG_DSV4_TAIL_SLOTS", "many", "SGLANG_DSV4_TAIL_SLOTS must be a number of at least 0, got 'many'"),
        ("SGLANG_DSV4_TAIL_HOST_SLOTS", "-1", "SGLANG_DSV4_TAIL_HOST_SLOTS must be"),
    ],
)
def test_bad_options_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        TailOptions.from_environment()


def test_sizes_of_host_memory() -> None:
    """256 GB of V4-Flash hold some 58 million tokens, and a tail every 4,096 (3,520 B a token, 3.65 MB a tail)."""
    pages, checkpoints = HostOptions(2.0, gigabytes=256).sizes(65_536, 3_520, 3_649_920)
    assert 57_500_000 < pages * 256 < 58_500_000 and checkpoints == pages * 256 // 4096
    assert HostOptions(2.0).sizes(65_536, 3_520, 3_649_920) == (512, 32)
    fitting, _ = HostOptions(1e9, fitting=True).sizes(65_536, 3_520, 3_649_920)
    assert fitting * 256 * 3_520 < psutil.virtual_memory().total
    with pytest.raises(ValueError, match="hold no page of 901120: raise --hicache-ratio or --hicache-size"):
        HostOptions(0.001).sizes(65_536, 3_520, 3_649_920)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        *((("--tokens"), said) for said in ("-5", "255", "many", "1e9")),
        *(("--requests", said) for said in ("0", "-1")),
        *(("--hicache-ratio", said) for said in ("-1", "nan", "inf")),
        ("--hicache-size", "-0.5"),
    ],
)
def test_sizes_that_can_not_be_are_refused(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The doctor printed a plan for -5 tokens."""
    with pytest.raises(SystemExit):
        doctor.main([option, said])
    assert f"argument {option}: expected " in capsys.readouterr().err


def test_columns_are_as_wide_as_their_names(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = doctor.registry._table
    monkeypatch.setitem(registered, "an_op_with_a_name_of_many_letters", dict(registered["rms_norm"]))
    lines = [line for line in doctor.installation() if line.startswith("  ")]
    assert len({line.index(" of ") for line in lines}) == 1
