"""The same numbers through the whole server: HTTP, scheduler, chunked prefill, log-probabilities.

An fp32 checkpoint of the server's own preset, compared with transformers at every prompt and output position.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch
from model.compare import MARGIN, TOLERANCE
from model.oracle import TransformersOracle, read_dequantised
from serving.server import SLEEP_ON_IDLE, Server, running_server
from torch import Tensor

from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config, write_checkpoint

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513, 1030)
DECODED = 6
# With 32 indexer heads a score of exactly 0 (all ReLUs closed), and with it a tie, does not occur.
SHAPE = replace(PRESETS["tiny"], index_n_heads=32, moe_intermediate_size=128)
SEED = 10  # every decision of these prompts is clearer than MARGIN
ASKED = list(range(0, SHAPE.vocab_size, 8))  # ids whose log-probabilities are requested; each one depends on all logits


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp32")
    write_checkpoint(folder, SHAPE, seed=SEED, quantised=False)
    return folder


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> TransformersOracle:
    return TransformersOracle(hf_config(SHAPE, quantised=False), read_dequantised(checkpoint))


@pytest.fixture(scope="module")
def fp32_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("fp32-server") / "log"
    flags = ("--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "7", SLEEP_ON_IDLE)
    # Chunks leave room for decode steps, but SGLang mixes no requests that ask for log-probabilities, as all here do.
    with running_server(checkpoint, log, *flags, "--chunked-prefill-size", "256", "--enable-mixed-chunk") as server:
        yield server


def generate(server: Server, prompt: list[int]) -> tuple[Tensor, list[int]]:
    """Return (log-probabilities of ASKED at prompt positions 0.. and at each output step [n, len(ASKED)], output
    ids)."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": DECODED, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "token_ids_logprob": ASKED,
    }
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    assert response.status_code == 200, response.text
    result = response.json()
    info = result["meta_info"]
    # The first prompt token has no prediction before it; entry i of the rest was predicted at position i - 1.
    rows = [row for row in info["input_token_ids_logprobs"] if row] + info["output_token_ids_logprobs"]
    assert all([entry[1] for entry in row] == ASKED for row in rows)
    return torch.tensor([[entry[0] for entry in row] for row in rows]), result["output_ids"]


def check(oracle: TransformersOracle, prompt: list[int], answer: tuple[Tensor, list[int]]) -> None:
    """Compare the prompt's positions with transformers' whole-sequence logits, with our own output ids appended."""
    actual, output = answer
    expected = oracle.run(torch.tensor(prompt + output[:-1]))
    assert len(actual) == len(prompt) - 1 + DECODED == len(expected.logits)
    comparable = expected.margins > MARGIN
    assert (~comparable).sum() <= 2
    difference = (actual - expected.logits.log_softmax(-1)[:, ASKED]).abs().amax(1)
    assert difference[comparable].max() <= TOLERANCE, f"prompt of {len(prompt)}: {difference[comparable].max():.1e}"
    chosen = expected.logits[len(prompt) - 1 :].argmax(-1)
    top = expected.logits[len(prompt) - 1 :].topk(2).values
    clear = (top[:, 0] - top[:, 1] > 2 * TOLERANCE) & comparable[len(prompt) - 1 :]
    assert torch.equal(torch.tensor(output)[clear], chosen[clear])


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(200, SHAPE.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.mark.parametrize("prompt", prompts(), ids=[str(n) for n in LENGTHS])
def test_prompt_alone(fp32_server: Server, oracle: TransformersOracle, prompt: list[int]) -> None:
    check(oracle, prompt, generate(fp32_server, prompt))


@pytest.mark.slow
def test_prompts_together(fp32_server: Server, oracle: TransformersOracle) -> None:
    """All at once with seven running requests: waiting, chunks beside decode steps, reused slots and pages."""
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        answers = list(pool.map(lambda prompt: generate(fp32_server, prompt), prompts()))
    for prompt, answer in zip(prompts(), answers, strict=True):
        check(oracle, prompt, answer)
