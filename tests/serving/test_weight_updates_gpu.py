"""Weight updates on a GPU: packed experts, FP8 layers and wo_a in each of its formats, under CUDA graphs.

After an update answers are those of a fresh server with the new weights, bitwise, in batches of several sizes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model.checkpoint_tensors import read
from model.updates import buckets_of
from serving.server import Server, output_logprobs, running_server
from serving.small_release import FLAGS, SHAPE
from serving.speculation import ask, random_prompts
from serving.trainer import Trainer

from sglang_dsv4.cpu.random_checkpoint import write_checkpoint
from sglang_dsv4.layers import grouped_projection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with SGLang on it"),
]
PROMPTS = random_prompts(5, [1, 127, 130, 511] * 4)
Answers = list[tuple[list[int], list[float]]]


def answers(server: Server) -> Answers:
    results = [result for at_once in (1, 16) for result in ask(server, PROMPTS[:at_once], at_once, max_new_tokens=20)]
    return [(result["output_ids"], output_logprobs(result)) for result in results]


@pytest.mark.parametrize("wo_a", ["both", "fp8", "bf16"])
def test_answers_are_those_of_a_fresh_server(wo_a: str, tmp_path: Path) -> None:
    """Three updates: the whole model in buckets; w1 of half of the experts, and back; the old weights from disk."""
    for seed, name in enumerate(("old", "new"), 11):
        write_checkpoint(tmp_path / name, SHAPE, seed=seed)
    old, new = read(tmp_path / "old"), read(tmp_path / "new")
    flags, env = (*FLAGS, "--enable-deterministic-inference"), {grouped_projection.VARIABLE: wo_a}
    with running_server(tmp_path / "new", tmp_path / "log-fresh", *flags, env=env) as server:
        expected = answers(server)
    with running_server(tmp_path / "old", tmp_path / "log", *flags, env=env) as server:
        trainer, before = Trainer(server), answers(server)
        trainer.update(buckets_of(new, 100, seed=1))
        assert answers(server) == expected != before
        gates = {name for name in new if ".ffn.experts." in name and ".w1." in name and int(name.split(".")[4]) % 2}
        trainer.update([[(name, old[name]) for name in sorted(gates)]])
        assert answers(server) != expected
        trainer.update([[(name, new[name]) for name in sorted(gates)]])
        assert answers(server) == expected
        trainer.do("update_weights_from_disk", model_path=str(tmp_path / "old"))
        assert answers(server) == before
        assert "Traceback" not in server.log
