"""Two ranks over gloo answer as one process does: heads, output groups, experts and vocabulary are sharded, caches are
not.

fp32, nothing quantised: only the order of the sums over ranks differs.
"""

from pathlib import Path

import pytest
import torch
from model.harness import Harness
from serving.in_process_engine import running_engine

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

PROMPTS = [torch.randint(2, 1000, (n,), generator=torch.Generator().manual_seed(n)) for n in (3, 131, 300)]
DECODED = 6
TOLERANCE = 1e-4  # as against transformers: both are fp32 sums in another order


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp32")
    write_checkpoint(folder, PRESETS["tiny"], seed=5, quantised=False)
    return folder


def answers_of_two_ranks(checkpoint: Path, ep_size: int) -> list[dict]:
    with pytest.MonkeyPatch.context() as env:
        env.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        with running_engine(
            model_path=str(checkpoint),
            tp_size=2,
            ep_size=ep_size,
            dtype="float32",
            skip_tokenizer_init=True,
            max_total_tokens=2048,
            max_running_requests=3,
            chunked_prefill_size=256,
            log_level="warning",
        ) as engine:
            return engine.generate(
                input_ids=[prompt.tolist() for prompt in PROMPTS],
                sampling_params={"max_new_tokens": DECODED, "temperature": 0, "ignore_eos": True},
                return_logprob=True,
            )


@pytest.mark.parametrize("ep_size", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["tp-2", "tp-2-ep-2"])
def test_two_ranks(checkpoint: Path, ep_size: int) -> None:
    answers = answers_of_two_ranks(checkpoint, ep_size)
    harness = Harness(checkpoint, max_total_tokens=2048, max_requests=2)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        output = torch.tensor(answer["output_ids"])
        logits = harness.run(torch.cat([prompt, output]))[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, output[:, None]).squeeze(1)
        actual = torch.tensor([row[0] for row in answer["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
        assert torch.equal(logits.argmax(-1), output)
