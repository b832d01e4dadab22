"""The DSpark draft against its equations (`dspark_reference`), and what its rings hold from step to step."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest
import torch
from model.compare import TOLERANCE
from model.dspark_draft import DSparkDraft
from model.dspark_reference import Block, DSparkReference
from model.harness import Harness, Request
from model.reference import FULL, OFF, Reference
from torch import Tensor

from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config, tensors, write_checkpoint
from sglang_dsv4.determinism import checks

SHAPE = replace(PRESETS["flash-0731"], vocab_size=1024)
LENGTH, VOCAB, NOISE = 300, 1000, SHAPE.dspark_noise_token_id
SEED = 3


class Drafted:
    """A target, its draft and one sequence, with what the equations say of it."""

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


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    return Drafted(tmp_path_factory.mktemp("dspark"), "float32", "off")


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    return Drafted(tmp_path_factory.mktemp("dspark"), "float32", "full")


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


def test_a_draft_is_asked_for_operators_that_depend_on_the_batch(
    drafted: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the target is, under the deterministic flag."""
    asked: list[torch.nn.Module] = []
    monkeypatch.setattr(checks, "check_model", asked.append)
    assert asked == [DSparkDraft(drafted.harness).model]


def test_the_target_hands_over_complete_layers(drafted: Drafted) -> None:
    request = drafted.harness.open()
    ((_, taps),) = drafted.harness.step_with_streams([(request, drafted.tokens[:200].tolist())])
    ((_, last),) = drafted.harness.step_with_streams([(request, [int(drafted.tokens[200])])], "decode")
    drafted.harness.close(request)
    scale = drafted.taps[:201].abs().max()
    assert (torch.cat([taps, last]) - drafted.taps[:201]).abs().max() <= TOLERANCE * scale


@pytest.mark.parametrize("prompt", [1, 5, 127, 128, 129, 255, 256, 257, 300])
def test_blocks_are_the_equations(drafted: Drafted, prompt: int) -> None:
    check_block(drafted, prompt)


def test_quantised_rows(quantised: Drafted) -> None:
    """Of the same taps. fp32 sums in another order put a value in 10,000 on the other side of a quantiser's step."""
    request = quantised.harness.open()
    ((_, taps),) = quantised.harness.step_with_streams([(request, quantised.tokens[:200].tolist())])
    quantised.draft.inject_prefill(request, taps, 0)
    for stage, expected in enumerate(quantised.reference.context(taps)):
        positions = torch.arange(72, 200)
        rows = quantised.draft.pool.window(stage).gather(request.row * 256 + positions % 256)
        off = (rows - expected[positions]).abs() > TOLERANCE * expected.abs().max()
        assert off.float().mean() < 1e-3
    quantised.harness.close(request)


@pytest.mark.parametrize("chunk", [1, 100, 128, 256])
def test_rows_do_not_depend_on_chunks(drafted: Drafted, chunk: int) -> None:
    prompt = 140 if chunk == 1 else LENGTH
    whole, cut = drafted.prefilled(prompt), drafted.prefilled(prompt, chunk)
    positions = torch.arange(prompt - 128, prompt) % 256
    for stage in range(3):
        window = drafted.draft.pool.window(stage)
        assert torch.equal(window.gather(whole.row * 256 + positions), window.gather(cut.row * 256 + positions))
    for request in (whole, cut):
        drafted.harness.close(request)


def test_blocks_do_not_depend_on_the_batch(drafted: Drafted) -> None:
    requests = [drafted.prefilled(n) for n in (3, 130, 256, 290)]
    together = drafted.draft.blocks([(request, 50 + i) for i, request in enumerate(requests)])
    for i, request in enumerate(requests):
        assert torch.equal(drafted.draft.blocks([(request, 50 + i)])[0], together[i])
        drafted.harness.close(request)


def check_confidences(drafted: Drafted) -> None:
    request, streams = drafted.prefilled(150), []
    undo = drafted.draft.model.model.hc_head.register_forward_hook(lambda *call: streams.append(call[2][0]))
    drafted.draft.blocks([(request, 40)])
    undo.remove()
    drafted.harness.close(request)
    expected = drafted.expected(150, 40)
    actual = drafted.draft.model.confidences(streams[0], torch.tensor([40, *expected.drafts[:-1]]))
    assert expected.confidences.std() > 0.05
    assert (actual - expected.confidences).abs().max() <= TOLERANCE


def test_confidences(drafted: Drafted) -> None:
    check_confidences(drafted)


def check_steps(drafted: Drafted, kept: int) -> None:
    """Steps that keep `kept` of 6 rows, across the ring's end; each block is that of a sequence never speculated on."""
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


@pytest.mark.parametrize("kept", range(1, 7))
def test_refused_rows_and_blocks_leave_no_trace(drafted: Drafted, kept: int) -> None:
    check_steps(drafted, kept)
