"""Switches and flags that change how a step runs on a GPU change no bit of an answer: its tokens, log-probabilities.

A small checkpoint of random weights with the released attention: two starts have the same weights in any storage
format. Answers of one request at a time, of 16 and of 40 at once cover graphs of several sizes and both sides of the
switches' thresholds on the number of tokens; prefixes are reused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from serving.server import output_logprobs, running_server
from serving.small_release import FLAGS, SHAPE
from serving.speculation import ask, random_prompts

from dsv4_kernels.device import dependent_launch
from sglang_dsv4.cpu.random_checkpoint import write_checkpoint
from sglang_dsv4.layers import grouped_projection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with SGLang on it"),
]
MORE = ("--max-running-requests", "40", "--cuda-graph-bs-decode", "1", "16", "40", "--enable-deterministic-inference")
SWITCHES = (
    (grouped_projection.VARIABLE, "bf16"),
    (grouped_projection.VARIABLE, "fp8"),
    (dependent_launch.VARIABLE, "off"),
)
FLAG_SETS = {
    "graphs": "--cuda-graph-max-bs-decode 40 --disable-cuda-graph-padding --enable-cudagraph-gc --pre-warm-nccl",
    "graphs by JSON": '--cuda-graph-config {"decode":{"backend":"full","max_bs":40}} --enable-profile-cuda-graph',
    "breakable graphs": "--cuda-graph-backend-decode breakable",
    "eager graphs": "--debug-cuda-graph",
    "no graphs": "--disable-decode-cuda-graph --disable-flashinfer-autotune --bf16-gemm-backend torch",
    "helpers": "--enable-layerwise-nvtx-marker --enable-strict-thinking --reasoning-parser deepseek-v4",
    "metrics": "--enable-metrics --enable-forward-pass-metrics",
}
"""Flags of SGLang that need a GPU. `docs/server_flags.toml` says that a flag works once its set has run."""
LENGTHS = [1, 3, 127, 128, 130, 254, 300, 511]

Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Answers]:
    folder = tmp_path_factory.mktemp("switches")
    write_checkpoint(folder / "checkpoint", SHAPE)
    prompts = random_prompts(3, LENGTHS * 5)

    def of_server(env: dict[str, str], *flags: str) -> Answers:
        log = folder / "_".join(["log", *env, *env.values(), *flags[:1]])
        with running_server(folder / "checkpoint", Path(log), *FLAGS, *MORE, *flags, env=env) as running:
            found = [
                result
                for at_once in (1, 16, 40)
                for result in ask(running, prompts[: at_once + 8], at_once, max_new_tokens=40)
            ]
        return [(result["output_ids"], output_logprobs(result)) for result in found]

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
