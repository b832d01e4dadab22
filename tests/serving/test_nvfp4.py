"""A checkpoint with NVFP4 experts on a CPU server, although SGLang's config handling expects a GPU for it."""

import math
from pathlib import Path

import pytest
from serving.server import SLEEP_ON_IDLE, output_logprobs, running_server

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint


@pytest.mark.slow
def test_nvfp4_is_served(tmp_path: Path) -> None:
    """`make serve` with `make checkpoint PRESET=nvfp4`; its numbers differ from those of the same weights in MXFP4."""
    prompt, answers = list(range(5, 105)), []
    for preset in ("nvfp4", "tiny"):
        write_checkpoint(tmp_path / preset, PRESETS[preset])
        flags = ("--max-total-tokens", "4096", "--max-running-requests", "4", SLEEP_ON_IDLE)
        with running_server(tmp_path / preset, tmp_path / f"{preset}.log", *flags) as server:
            answers.append(output_logprobs(server.generate(prompt, max_new_tokens=4)))
            assert server.chat("What are you?").choices[0].message.content
    assert all(math.isfinite(number) for numbers in answers for number in numbers)
    assert answers[0] != answers[1]
