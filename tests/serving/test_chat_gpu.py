"""Chat, reasoning, tools and JSON through a server on a GPU: the tests of test_chat.py that hold on a GPU, too.

A small checkpoint of random weights with the released attention, CUDA graphs on, default flags except for the pool's
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serving.chat_tests import (  # noqa: F401 - collected here, with the server below
    reasoned,
    test_a_tool_call_is_parsed,
    test_chat_answers_with_the_tokens_asked_for,
    test_constrained_output_is_valid_json,
    test_conversation_of_several_turns_is_reproducible,
    test_logprobs_are_of_the_tokens_and_ordered,
    test_stream_gives_the_same_text_in_pieces,
    test_stream_reports_usage_last,
    test_thinking_mode_ends_the_prompt_with_a_think_token,
)
from serving.server import Server, running_server
from serving.small_release import FLAGS, SHAPE

from sglang_dsv4.cpu.quickstart import parser_flags
from sglang_dsv4.cpu.random_checkpoint import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with SGLang on it"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "checkpoint"
    write_checkpoint(folder, SHAPE)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with running_server(checkpoint, checkpoint.parent / "log", *FLAGS, *parser_flags([])) as running:
        yield running


def test_reasoning_is_parsed(server: Server, checkpoint: Path) -> None:
    """With overlapped steps SGLang's penalties are a step or two late, so the word is generated more than once."""
    thought, said = reasoned(server, checkpoint)
    assert set(thought.split()) == {"because"} and said == "It is 42."
