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

    def expected(self, prompt: int, anchor: int, valid_from: int = 0) -> Block:
        return self.reference.block([rows[:prompt] for rows in self.context], anchor, valid_from)

    def prefilled(self, prompt: int, chunk: int = LENGTH) -> Request:
        request = self.harness.open()
        for begin in range(0, prompt, chunk):
            part = self.tokens[begin : min(begin + chunk, prompt)].tolist()
            ((_, taps),) = self.harness.step_with_streams([(request, part)])
            self.draft.inject_prefill(request, taps, begin)
        return request


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    return Drafted(tmp_path_factory.mktemp("dspark"), "float32", "off")


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    return Drafted(tmp_path_factory.mktemp("dspark"), "float32", "full")


def check_block(drafted: Drafted, prompt: int, anchor: int = 77, chunk: int = LENGTH) -> None:
    request = drafted.prefilled(prompt, chunk)
    rows = drafted.draft.blocks([(request, anchor)])
    expected = drafted.expected(prompt, anchor)
    difference = (drafted.draft.logits(rows)[0] - expected.logits).abs().max().item()
    drafts = drafted.draft.drafts(rows, [anchor])
    drafted.harness.close(request)
    assert difference <= TOLERANCE, f"logits differ by {difference:.1e}"
    assert drafts == [expected.drafts]


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


def test_confidences(drafted: Drafted) -> None:
    request, streams = drafted.prefilled(150), []
    head = drafted.draft.model.model.hc_head
    undo = head.register_forward_hook(lambda module, args, output: streams.append(output[0]))
    rows = drafted.draft.blocks([(request, 40)])
    undo.remove()
    expected = drafted.expected(150, 40)
    previous = torch.tensor([40, *expected.drafts[:-1]])
    actual = drafted.draft.model.confidences(streams[0], previous)
    drafted.harness.close(request)
    assert rows.shape[1] == 5 and expected.confidences.std() > 0.05
    assert (actual - expected.confidences).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kept", range(1, 7))
def test_refused_rows_and_blocks_leave_no_trace(drafted: Drafted, kept: int) -> None:
    """Steps that keep `kept` of 6 rows, across the ring's end; each block is that of a sequence never speculated on."""
    draft, harness, prompt = drafted.draft, drafted.harness, 250
    request = drafted.prefilled(prompt)
    while prompt + 6 < LENGTH + 12:
        anchor = int(drafted.tokens[prompt])
        rows = draft.blocks([(request, anchor)])
        expected = drafted.expected(prompt, anchor)
        assert (draft.logits(rows)[0] - expected.logits).abs().max() <= TOLERANCE, f"at {prompt}"
        wrong = (drafted.tokens[prompt + kept : prompt + 6] + 1) % VOCAB
        block = torch.cat([drafted.tokens[prompt : prompt + kept], wrong]).tolist()
        ((_, taps),) = harness.step_with_streams([(request, block)], "verify")
        draft.commit(request, taps, prompt, kept)
        prompt += kept
        harness.rollback(request, prompt)
    harness.close(request)


def test_rows_that_are_not_the_requests_are_not_read(drafted: Drafted) -> None:
    """Behind a reused prefix the ring holds another request's rows, here NaN; the block goes without them."""
    request = drafted.prefilled(150)
    pool = drafted.draft.pool
    pool.valid_from[request.row] = 100
    for stage in range(3):
        pool.window(stage).storage[request.row * 256 : request.row * 256 + 100] = float("nan")
    rows = drafted.draft.blocks([(request, 9)])
    expected = drafted.expected(150, 9, valid_from=100)
    pool.valid_from[request.row] = 0
    for stage in range(3):
        pool.window(stage).storage[request.row * 256 : request.row * 256 + 100] = 0
    drafted.harness.close(request)
    assert (drafted.draft.logits(rows)[0] - expected.logits).abs().max() <= TOLERANCE
