"""Flags that prepare the exchange between GPUs, and sums over ranks, on a host with several GPUs.

A small checkpoint of random weights with the released attention. Under `--enable-deterministic-inference` these flags
change no bit of an answer.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serving.server import output_logprobs, running_server
from serving.small_release import FLAGS, SHAPE, difference, likelihoods
from serving.speculation import ask, random_prompts
from torch import Tensor

from sglang_dsv4.cpu.random_checkpoint import write_checkpoint
from sglang_dsv4.layers import peer_sums, sequence_parallel

CARDS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CARDS < 2, reason="needs two NVIDIA GPUs with SGLang on them"),
]
DETERMINISTIC = "--enable-deterministic-inference"
FLAG = "--cuda-graph-backend-prefill"
USED_BYTES = 1 << 30
"""Less than a server takes of its GPU, more than anything else does of another."""

PROMPTS = random_prompts(3, [127, 300, 511])
ROWS = random_prompts(3, [513, 1200, 5000, 300])
"""Prompts with chunks of a recorded number of tokens, and padded ones."""
SUMS = {"ours": ("ours",), "SGLang's kernel": ("sglang",), "NCCL": ("sglang", "--disable-custom-all-reduce")}
"""Value of the switch, and flags."""

Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cards") / "checkpoint"
    write_checkpoint(
        folder, replace(SHAPE, moe_intermediate_size=512)
    )  # 128 channels of four ranks: the fewest of our experts
    return folder


def free_memory() -> list[int]:
    """Return free bytes of each GPU, as soon as an earlier server has given back its memory."""
    free: list[int] = []
    while free != (free := [torch.cuda.mem_get_info(card)[0] for card in range(CARDS)]):
        time.sleep(2)
    return free


def answers(checkpoint: Path, *flags: str, **env: str) -> tuple[Answers, list[int]]:
    """Answers of a server, and the GPUs whose memory it takes."""
    prompts = random_prompts(3, [1, 127, 300, 511] * 4)
    before = free_memory()
    log = checkpoint.parent / "_".join(["log", *flags, *env.values()])
    with running_server(checkpoint, log, *FLAGS, DETERMINISTIC, *flags, env=env) as server:
        found = ask(server, prompts, 8, max_new_tokens=30)
        used = [card for card in range(CARDS) if before[card] - torch.cuda.mem_get_info(card)[0] > USED_BYTES]
    return [(result["output_ids"], output_logprobs(result)) for result in found], used


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path) -> Tensor:
    return likelihoods(checkpoint, PROMPTS)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> tuple[Answers, list[int]]:
    return answers(checkpoint, "--tp-size", "2")


def test_our_sums_over_ranks_change_no_bit(checkpoint: Path) -> None:
    """Our kernel has the bits of the gather that it replaces. FlashInfer's sums stay off: they may use NVLink
    multicast."""
    flags = ("--tp-size", "2", "--enforce-disable-flashinfer-allreduce-fusion")
    ours, gathered = (answers(checkpoint, *flags, **{peer_sums.VARIABLE: word}) for word in ("ours", "sglang"))
    assert ours == gathered
    for word, lines in (("ours", 1), ("sglang", 0)):
        (log,) = checkpoint.parent.glob(f"log*_{word}")
        assert log.read_text().count("sums over 2 ranks of up to 8.0 MB: ours") == lines


def test_what_prepares_the_exchange_changes_no_bit(checkpoint: Path, plain: tuple[Answers, list[int]]) -> None:
    prepared = answers(checkpoint, "--tp-size", "2", "--enable-p2p-check", "--numa-node", "0", "0", "--pre-warm-nccl")
    assert plain[1] == prepared[1] == [0, 1]
    assert prepared[0] == plain[0]


@pytest.mark.parametrize("sums", SUMS)
def test_two_ranks_compute_the_same(
    sums: str, checkpoint: Path, one_rank: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the deterministic flag, whoever sums. FlashInfer's sums stay off: they may use NVLink multicast."""
    word, *flags = SUMS[sums]
    monkeypatch.setenv(peer_sums.VARIABLE, word)
    two = likelihoods(checkpoint, PROMPTS, "--tp-size", "2", "--enforce-disable-flashinfer-allreduce-fusion", *flags)
    assert difference(one_rank, two) < 0.05


@pytest.fixture(scope="module")
def all_rows(checkpoint: Path) -> Tensor:
    return likelihoods(checkpoint, ROWS, "--tp-size", "2", DETERMINISTIC)


@pytest.mark.parametrize("graphs", ["disabled", "breakable"])
@pytest.mark.parametrize("switch", ["off", "on", "attention"])
def test_sharded_rows_and_graphs_have_the_bits_of_all_rows(
    switch: str, graphs: str, checkpoint: Path, all_rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks add in any order with the same result, so that the bits are equal without the deterministic flag, too;
    the last prompt is too short for sharded rows."""
    monkeypatch.setenv(sequence_parallel.VARIABLE, switch)
    assert torch.equal(all_rows, likelihoods(checkpoint, ROWS, "--tp-size", "2", DETERMINISTIC, FLAG, graphs))
