"""Ranks over gloo answer as one process does: heads, output groups, experts and vocabulary are sharded, caches are
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


def answers_of_ranks(checkpoint: Path, ranks: int, ep_size: int, groups: int) -> list[dict]:
    with pytest.MonkeyPatch.context() as env:
        env.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(rank % 2) for rank in range(ranks)))
        with running_engine(
            model_path=str(checkpoint),
            tp_size=ranks,
            ep_size=ep_size,
            attn_dp_size=groups,
            dtype="float32",
            skip_tokenizer_init=True,
            max_total_tokens=2048,
            max_running_requests=3 * groups,
            chunked_prefill_size=256 * groups,
            log_level="warning",
        ) as engine:
            return engine.generate(
                input_ids=[prompt.tolist() for prompt in PROMPTS],
                sampling_params={"max_new_tokens": DECODED, "temperature": 0, "ignore_eos": True},
                return_logprob=True,
            )


@pytest.mark.parametrize(
    ("ranks", "ep_size", "groups"),
    [
        pytest.param(2, 1, 1, id="tp-2"),
        pytest.param(2, 2, 1, id="tp-2-ep-2", marks=pytest.mark.slow),
        pytest.param(2, 2, 2, id="tp-2-ep-2-dp-2", marks=pytest.mark.slow),
        pytest.param(4, 1, 2, id="tp-4-dp-2", marks=pytest.mark.slow),
    ],
)
def test_ranks_answer_as_one(checkpoint: Path, ranks: int, ep_size: int, groups: int) -> None:
    """With all ranks in one group, and in groups of one rank and of two with requests of their own."""
    answers = answers_of_ranks(checkpoint, ranks, ep_size, groups)
    harness = Harness(checkpoint, max_total_tokens=2048, max_requests=2)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        output = torch.tensor(answer["output_ids"])
        logits = harness.run(torch.cat([prompt, output]))[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, output[:, None]).squeeze(1)
        actual = torch.tensor([row[0] for row in answer["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
        assert torch.equal(logits.argmax(-1), output)
