"""Contenders by name: the flags and variables of their parts."""

from __future__ import annotations

import argparse

import pytest
from lib import contenders
from lib.contenders import contender

COMMON = ("--max-total-tokens", "1024")


def test_a_part_adds_its_flags_after_those_of_all() -> None:
    found = contender("builtin+flashinfer_fp8", COMMON)
    assert found.server == "builtin" and not found.env
    experts = ("--moe-runner-backend", "flashinfer_mxfp4", "--flashinfer-mxfp4-moe-precision", "fp8")
    assert found.flags == (*COMMON, *experts)


def test_several_ranks_sum_by_nccl_unless_a_part_says_otherwise() -> None:
    """FlashInfer's fused sums, which may use multicast, stay off in any case."""
    nccl, custom = (contender(f"builtin+marlin{part}", COMMON, ranks=4) for part in ("", "+custom_all_reduce"))
    assert set(nccl.flags) - set(custom.flags) == {"--disable-custom-all-reduce"}
    assert "--enforce-disable-flashinfer-allreduce-fusion" in custom.flags
    assert contender("ours", COMMON).flags == COMMON


def test_a_topology_counts_all_gpus() -> None:
    """The last value of a flag counts."""
    flags = contender("ours+tp2_pp2", ("--tp", "4"), ranks=4).flags
    assert flags[-4:] == ("--tp-size", "2", "--pp-size", "2")
    assert contender("builtin+marlin+dp4", COMMON).flags[-3:] == ("--enable-dp-attention", "--dp-size", "4")


def test_variables_of_all_and_of_a_part() -> None:
    found = contender("ours+our_all_reduce", COMMON, env={"SGLANG_SIMULATE_ACC_LEN": "5.45"})
    assert found.env == {"SGLANG_SIMULATE_ACC_LEN": "5.45", "SGLANG_DSV4_ALL_REDUCE": "ours"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("marlin", "a contender begins with builtin or ours, .*; got 'marlin'"),
        ("ours+marlin", "parts of ours are .*our_all_reduce.*; got marlin in 'ours\\+marlin'"),
        ("builtin+marlin+fast", "parts of builtin are marlin, .*; got fast in"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        contender(name, COMMON)


@pytest.mark.slow  # imports SGLang's server
def test_sglang_knows_every_flag_and_its_value(capsys: pytest.CaptureFixture) -> None:
    """A word that SGLang does not know would show on a GPU host only, where time is short."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for part in contenders.PARTS.values():
        parser.parse_args(["--model-path", "model", *part.flags, *part.without, *contenders.SEVERAL_RANKS])
    with pytest.raises(SystemExit):
        parser.parse_args(["--model-path", "model", "--moe-runner-backend", "marlin_fast"])
    assert "marlin_fast" in capsys.readouterr().err


def test_every_part_is_explained_by_help() -> None:
    text = contenders.table()
    assert all(word in text and part.about in text for word, part in contenders.PARTS.items())
