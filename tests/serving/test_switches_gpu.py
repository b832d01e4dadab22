"""Switches and flags that change how a step runs on a GPU change no bit of an answer: its tokens, log-probabilities.

A small checkpoint of random weights with the released attention: two starts have the same weights in any storage
format. Answers of one request at a time, of 16 and of 40 at once cover graphs of several sizes and both sides of the
switches' thresholds on the number of tokens; prefixes are reused.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from serving.server import Server, output_logprobs, running_server
from serving.small_release import FLAGS, LENGTHS, ROUNDED_INPUTS, SHAPE, difference, likelihoods
from serving.speculation import ask, drafting_flags, random_prompts
from sglang.srt.sampling.watermarking.detector import detect

from dsv4_kernels.device import dependent_launch
from sglang_dsv4.cpu.random_checkpoint import write_checkpoint
from sglang_dsv4.layers import concurrent, grouped_projection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with SGLang on it"),
]
MORE = ("--max-running-requests", "40", "--cuda-graph-bs-decode", "1", "16", "40", "--enable-deterministic-inference")
SWITCHES = (
    (grouped_projection.VARIABLE, "bf16"),
    (grouped_projection.VARIABLE, "fp8"),
    (dependent_launch.VARIABLE, "off"),
    (concurrent.VARIABLE, "off"),
)
FLAG_SETS = {
    "graphs": "--cuda-graph-backend-decode full --cuda-graph-max-bs-decode 40 --disable-cuda-graph-padding "
    "--enable-cudagraph-gc --fp8-gemm-backend deep_gemm --moe-runner-backend dsv4 --device cuda",
    "graphs by JSON": '--cuda-graph-config {"decode":{"backend":"full","max_bs":40}} --enable-profile-cuda-graph',
    "no graphs": "--cuda-graph-backend-decode disabled --disable-decode-cuda-graph --bf16-gemm-backend torch",
    "graphs of prefills": "--cuda-graph-backend-prefill breakable",
    "helpers": "--enable-layerwise-nvtx-marker --reasoning-parser deepseek-v4 --enable-metrics --numa-node 0",
}
"""Flags of SGLang that need a GPU."""

WATERMARK_KEY = "1a2b3c4d"
MEMORY_SAVER = "--enable-memory-saver --enable-weights-cpu-backup --enable-draft-weights-cpu-backup"

Answers = list[tuple[list[int], list[float]]]


def asked(server: Server, prompts: list[list[int]]) -> Answers:
    """The answers to the prompts, one at a time, 16 and 40 at once."""
    found = [
        result for at_once in (1, 16, 40) for result in ask(server, prompts[: at_once + 8], at_once, max_new_tokens=40)
    ]
    return [(result["output_ids"], output_logprobs(result)) for result in found]


def post(server: Server, path: str, **body: Any) -> Any:
    response = requests.post(f"{server.url}{path}", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json() if response.content and response.text[0] in "[{" else None


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(3, LENGTHS * 5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("switches") / "checkpoint"
    write_checkpoint(folder, SHAPE)
    return folder


@pytest.fixture(scope="module")
def answers(checkpoint: Path, prompts: list[list[int]]) -> Callable[..., Answers]:
    def of_server(env: dict[str, str], *flags: str) -> Answers:
        log = checkpoint.parent / "_".join(["log", *env, *env.values(), *flags[:1]])
        with running_server(checkpoint, log, *FLAGS, *MORE, *flags, env=env) as running:
            return asked(running, prompts)

    return of_server


@pytest.fixture(scope="module")
def by_default(answers: Callable[..., Answers]) -> Answers:
    return answers({})


@pytest.mark.parametrize(("variable", "value"), SWITCHES)
def test_no_bit_changes(answers: Callable[..., Answers], by_default: Answers, variable: str, value: str) -> None:
    assert answers({variable: value}) == by_default


@pytest.mark.parametrize("name", FLAG_SETS)
def test_no_flag_changes_a_bit(answers: Callable[..., Answers], by_default: Answers, name: str) -> None:
    assert answers({}, *FLAG_SETS[name].split()) == by_default


def test_answers_differ_from_each_other(by_default: Answers) -> None:
    assert len({tuple(ids) for ids, _ in by_default}) > len(LENGTHS) / 2


def test_a_watermark_is_in_the_answers_that_ask_for_it(
    checkpoint: Path, prompts: list[list[int]], by_default: Answers
) -> None:
    """SGLang's detector finds the key there and nowhere else; other answers keep their bits."""
    flags = ("--enable-watermark", "--watermark-config", f'{{"key":"{WATERMARK_KEY}"}}')
    with running_server(checkpoint, checkpoint.parent / "log_watermark", *FLAGS, *MORE, *flags) as server:
        assert asked(server, prompts) == by_default
        sampling = {"max_new_tokens": 300, "temperature": 1.0, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": prompts[7], "sampling_params": sampling}
        for marked in (False, True):
            answer = post(server, "/generate", **body, watermark={"enabled": marked})
            found = detect(answer["output_ids"], key=WATERMARK_KEY, prompt_token_ids=prompts[7]).combined
            assert (found.log_p_value < -20) == marked, found  # by chance once in 10^8


@pytest.mark.skipif(find_spec("torch_memory_saver") is None, reason="needs the package torch_memory_saver")
def test_memory_that_was_released_and_taken_again(
    checkpoint: Path, prompts: list[list[int]], by_default: Answers
) -> None:
    """A server with drafts gives back the memory of weights and pools, and has the same answers afterwards."""
    flags = (*MEMORY_SAVER.split(), *drafting_flags("EAGLE"))
    expected = [ids for ids, _ in by_default]
    with running_server(checkpoint, checkpoint.parent / "log_memory", *FLAGS, *MORE, *flags) as server:
        assert [ids for ids, _ in asked(server, prompts)] == expected
        free = torch.cuda.mem_get_info()[0]
        post(server, "/release_memory_occupation")
        assert torch.cuda.mem_get_info()[0] > free + (100 << 20)  # the pools alone have more
        post(server, "/resume_memory_occupation")
        assert [ids for ids, _ in asked(server, prompts)] == expected


def test_marlin_computes_the_same_experts(checkpoint: Path, prompts: list[list[int]]) -> None:
    """SGLang's runner multiplies inputs that are not rounded to FP8: likelihoods differ as much as this rounding moves
    them. One expert of one layer at twice its size would move them by 0.081, all experts at 1.1 times by 0.085."""
    flags = ("--moe-runner-backend", "marlin")
    ours, marlin = (likelihoods(checkpoint, prompts[: len(LENGTHS)], *some) for some in ((), flags))
    assert difference(ours, marlin) == pytest.approx(ROUNDED_INPUTS, rel=0.1)
