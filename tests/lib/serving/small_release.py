"""A small checkpoint with the released attention, and flags of a server of it on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import requests
import torch
from serving.server import running_server
from torch import Tensor

from sglang_dsv4.cpu.random_checkpoint import PRESETS

# The least widths that the kernels support, and a vocabulary whose tokens the tests can count.
SHAPE = replace(
    PRESETS["flash"], compress_ratios=(0, 4, 128), num_hash_layers=1, hidden_size=1024, q_lora_rank=512, vocab_size=1024
)
FLAGS = ("--max-total-tokens", "65536", "--max-running-requests", "16", "--chunked-prefill-size", "512")
FLAGS += ("--context-length", "8192", "--mem-fraction-static", "0.9", "--cuda-graph-bs-decode", "1", "4", "16")
FLAGS += ("--constrained-json-disable-any-whitespace",)  # a random model would fill it without end
LENGTHS = [1, 3, 127, 128, 130, 254, 300, 511]
ROUNDED_INPUTS = 0.0513
"""`difference` of this model's likelihoods with its experts' inputs in FP8 and in bf16, of eight prompts of `LENGTHS`,
by the reference operators: `tests/sglang_dsv4/models/test_rounded_inputs.py`."""


def likelihoods(checkpoint: Path, prompts: list[list[int]], *flags: str) -> Tensor:
    """Log-probabilities, fp32, of the prompts' tokens after each first one, by a server with these flags."""
    log = checkpoint.parent / "_".join(["log_likelihoods", *flags])
    with running_server(checkpoint, log, *FLAGS, *flags) as server:
        body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        answer = requests.post(f"{server.url}/generate", json=body | {"logprob_start_len": 0}, timeout=300)
        assert answer.status_code == 200, answer.text
    tokens = (entry for one in answer.json() for entry in one["meta_info"]["input_token_logprobs"][1:])
    return torch.tensor([entry[0] for entry in tokens])


def difference(one: Tensor, other: Tensor) -> float:
    """Median difference of two servers' log-probabilities of a token, in units of that of neighbouring tokens."""
    return float((one - other).abs().median() / (one[1:] - one[:-1]).abs().median())
