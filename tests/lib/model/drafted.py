"""A DSpark draft over a small target, checked against the equations of `dspark_reference`."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from model.compare import TOLERANCE
from model.dspark_draft import DSparkDraft
from model.dspark_reference import Block, DSparkReference
from model.harness import Harness, Request
from model.reference import FULL, OFF, Reference
from torch import Tensor

from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config, tensors, write_checkpoint

SHAPE = replace(PRESETS["flash-0731"], vocab_size=1024)
LENGTH, VOCAB = 300, 1000
SEED = 3


class Drafted:
    """A target, its draft and one sequence, with the results of the equations."""

    def __init__(self, folder: Path, dtype: str, qat: str) -> None:
        write_checkpoint(folder, SHAPE, seed=SEED, quantised=False)
        self.harness = Harness(folder, dtype=dtype, qat=qat, speculative_algorithm="DSPARK")
        self.draft = DSparkDraft(self.harness)
        quant = FULL if qat == "full" else OFF
        self.reference = DSparkReference(Reference(hf_config(SHAPE, False), tensors(SHAPE, SEED), quant))
        self.tokens = torch.randint(10, VOCAB, (LENGTH + 20,), generator=torch.Generator().manual_seed(9))

    @cached_property
    def taps(self) -> Tensor:
        return self.reference.taps(self.tokens)

    @cached_property
    def context(self) -> list[Tensor]:
        return self.reference.context(self.taps)

    def expected(self, prompt: int, anchor: int) -> Block:
        return self.reference.block([rows[:prompt] for rows in self.context], anchor)

    def prefilled(self, prompt: int, chunk: int = LENGTH) -> Request:
        request = self.harness.open()
        try:
            for begin in range(0, prompt, chunk):
                part = self.tokens[begin : min(begin + chunk, prompt)].tolist()
                ((_, taps),) = self.harness.step_with_streams([(request, part)])
                self.draft.inject_prefill(request, taps, begin)
        except BaseException:
            self.harness.close(request)
            raise
        return request


def check_block(drafted: Drafted, prompt: int, anchor: int = 77, chunk: int = LENGTH) -> None:
    request = drafted.prefilled(prompt, chunk)
    try:
        rows = drafted.draft.blocks([(request, anchor)])
    finally:
        drafted.harness.close(request)
    expected = drafted.expected(prompt, anchor)
    difference = (drafted.draft.logits(rows)[0] - expected.logits).abs().max().item()
    drafts = drafted.draft.drafts(rows, [anchor])
    assert difference <= TOLERANCE, f"logits differ by {difference:.1e}"
    assert drafts == [expected.drafts], f"drafts differ: {drafts}"


def check_steps(drafted: Drafted, kept: int) -> None:
    """Run steps that accept `kept` of 6 rows, across the ring's end; each block must equal that of a sequence without
    speculation."""
    draft, harness, prompt = drafted.draft, drafted.harness, 250
    request = drafted.prefilled(prompt)
    try:
        while prompt + 6 < LENGTH + 12:
            rows = draft.blocks([(request, int(drafted.tokens[prompt]))])
            expected = drafted.expected(prompt, int(drafted.tokens[prompt]))
            difference = (draft.logits(rows)[0] - expected.logits).abs().max()
            assert difference <= TOLERANCE, f"at {prompt} logits differ by {difference:.1e}"
            wrong = (drafted.tokens[prompt + kept : prompt + 6] + 1) % VOCAB
            block = torch.cat([drafted.tokens[prompt : prompt + kept], wrong]).tolist()
            ((_, taps),) = harness.step_with_streams([(request, block)], "verify")
            draft.commit(request, taps, prompt, kept)
            prompt += kept
            harness.rollback(request, prompt)
    finally:
        harness.close(request)
