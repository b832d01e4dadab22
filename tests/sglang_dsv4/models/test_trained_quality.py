"""The trained checkpoint in process: it computes the reference's distributions, and each planted fault moves them.

A window is served in chunks and, at its end, by decode steps; its KL to the reference is the mean over positions. In
fp32 without quantisers every log-probability may be off by `TOLERANCE`. In bf16 with the release's quantisers the mean
KL may be twice that of the reference in bf16. `tests/serving/test_quality.py` measures servers in every configuration.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lib import quality_figures as figures
from lib.quality_measuring import FP32_BOUND, inputs
from model.dspark_draft import DSparkDraft
from model.harness import Draft, Harness
from model.oracle import read_dequantised
from model.planted_faults import FAULTS, tap_of_another_layer, taps_of_the_layers_before, wrong_experts_scale
from model.reference import FULL, OFF, Reference
from model.trained import by_dspark
from torch import Tensor
from train_tiny import variants

TRAINED = Path(__file__).resolve().parents[3] / "trained"
TOKENS, CHUNK, DECODED = 300, 128, 8
DRAFTS = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
QUANT = {"off": OFF, "full": FULL}


@cache
def window() -> Tensor:
    return figures.windows(TRAINED, figures.FIXED_TEXT, TOKENS, 1)[0]


@cache
def reference_model(qat: str, dtype: torch.dtype = torch.float32) -> Reference:
    config = json.loads((TRAINED / "config.json").read_text())
    return Reference(config, read_dequantised(TRAINED), QUANT[qat], dtype)


@cache
def expected(qat: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the reference's log-probabilities of the window, [TOKENS, vocab] fp32."""
    return reference_model(qat, dtype).logits(window()).log_softmax(-1)


def harness(checkpoint: Path, dtype: str, qat: str) -> Harness:
    return Harness(checkpoint, dtype=dtype, qat=qat, max_total_tokens=2048, max_requests=2, **DRAFTS)


@pytest.fixture(scope="module")
def in_fp32() -> Harness:
    return harness(TRAINED, "float32", "off")


@pytest.fixture(scope="module")
def in_bf16() -> Harness:
    return harness(TRAINED, "bfloat16", "full")


def kl(served: Harness, qat: str) -> float:
    """The mean KL of a served window."""
    logprobs = served.run(window(), chunk_tokens=CHUNK, decode_from=TOKENS - DECODED).log_softmax(-1)
    return figures.row("", [expected(qat)], [figures.scores_of(logprobs, window())]).kl


def test_in_fp32_it_is_the_reference(in_fp32: Harness) -> None:
    assert kl(in_fp32, "off") <= FP32_BOUND


def test_in_bf16_it_is_within_the_bound(in_bf16: Harness) -> None:
    rounded = figures.scores_of(expected("full", torch.bfloat16), window())
    plain = figures.row("", [expected("full")], [rounded])
    assert kl(in_bf16, "full") <= figures.bound_of(plain)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_beyond_the_bound(in_fp32: Harness, fault: str) -> None:
    with FAULTS[fault](in_fp32):
        assert kl(in_fp32, "off") > 100 * FP32_BOUND


def test_a_wrong_experts_scale_is_beyond_the_bound(tmp_path: Path) -> None:
    assert kl(harness(wrong_experts_scale(TRAINED, tmp_path / "wrong"), "float32", "off"), "off") > 100 * FP32_BOUND


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft(in_fp32: Harness) -> Draft:
    return Draft(in_fp32)


@cache
def conversations() -> list[Tensor]:
    """Return conversations, in whose answers most drafts are right."""
    return [chat for chat in inputs(TRAINED, text_windows=1, conversations=6).chats if len(chat) < 600]


@cache
def expected_drafts() -> list[tuple[Tensor, Tensor]]:
    """Return of each conversation the reference's own choices at positions 1.., and its MTP module's distributions."""
    found, model = [], reference_model("off")
    for tokens in conversations():
        streams = model.streams(F.pad(tokens, (0, figures.SHORTEST)))[: len(tokens) - 1]  # no sequence is too short
        choices = model.logits(F.pad(tokens, (0, figures.SHORTEST)))[1 : len(tokens) - 1].argmax(1)
        found.append((choices, model.mtp_logits(model.mtp_streams(streams, tokens[1:])).log_softmax(-1)))
    return found


def accepted_share(drafted: list[Tensor]) -> float:
    """Return the share of drafts that the target would accept: the draft at position t, given token t + 1, proposes
    token t + 2, which must be the target's choice at t + 1."""
    equal = [d.argmax(1)[:-1] == choices for d, (choices, _) in zip(drafted, expected_drafts(), strict=True)]
    return float(torch.cat(equal).float().mean())


def drafted(served: Harness, draft: Draft) -> list[Tensor]:
    """Return the draft's log-probabilities [tokens - 1, vocab] of every conversation."""
    found = []
    for tokens in conversations():
        request = served.open()
        try:
            ((_, streams),) = served.step_with_streams([(request, tokens[:-1].tolist())])
            ((logits, _),) = draft.step([(request, 0, tokens[1:].tolist(), streams)])
        finally:
            served.close(request)
        found.append(logits.log_softmax(-1))
    return found


def divergence(drafts: list[Tensor]) -> float:
    """Return the mean KL of the draft's distributions to the reference's."""
    pairs = zip(drafts, expected_drafts(), strict=True)
    return float(torch.cat([(p.exp() * (p - q)).double().sum(1) for q, (_, p) in pairs]).mean())


def test_a_draft_tap_at_the_wrong_layer_lowers_the_acceptance(in_fp32: Harness, draft: Draft) -> None:
    """The drafts are the reference's. With the fault fewer are accepted, by more than three standard errors."""
    right = drafted(in_fp32, draft)
    share = accepted_share(right)
    assert divergence(right) <= FP32_BOUND
    assert share == accepted_share([logprobs for _, logprobs in expected_drafts()])
    with tap_of_another_layer(in_fp32):
        wrong = drafted(in_fp32, draft)
    error = math.sqrt(share * (1 - share) / sum(len(one) for one in wrong))
    assert divergence(wrong) > 100 * FP32_BOUND and accepted_share(wrong) < share - 3 * error


BLOCKS = 12
"""Blocks of a DSpark draft in each conversation, one at each of its last tokens that have a whole block after them."""


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained checkpoint with its DSpark draft."""
    folder = tmp_path_factory.mktemp("trained") / "dspark"
    variants.write("dspark", TRAINED, folder)
    return folder


def short_conversations() -> list[Tensor]:
    return [tokens for tokens in conversations() if len(tokens) < 300]


def anchors(tokens: Tensor, block: int) -> range:
    """Return the positions at which blocks begin."""
    end = len(tokens) - block
    return range(end - BLOCKS, end)


def served_blocks(harness: Harness, draft: DSparkDraft) -> list[list[list[int]]]:
    """Return the proposals of each block of each conversation; prompts are prefilled, later tokens decoded."""
    found = []
    for tokens in short_conversations():
        request, blocks = harness.open(), []
        try:
            at = anchors(tokens, draft.model.gamma)
            ((_, taps),) = harness.step_with_streams([(request, tokens[: at[0]].tolist())])
            draft.inject_prefill(request, taps, 0)
            for position in at:
                anchor = int(tokens[position])
                blocks += draft.drafts(draft.blocks([(request, anchor)]), [anchor])
                ((_, taps),) = harness.step_with_streams([(request, [anchor])], "decode")
                draft.inject_prefill(request, taps, position)
        finally:
            harness.close(request)
        found.append(blocks)
    return found


def accepted_runs(blocks: list[list[list[int]]]) -> Tensor:
    """Return the number of leading proposals of each block that are the conversation's tokens, fp64."""
    runs = []
    for tokens, of_chat in zip(short_conversations(), blocks, strict=True):
        for position, block in zip(anchors(tokens, len(of_chat[0])), of_chat, strict=True):
            right = torch.tensor(block) == tokens[position + 1 : position + 1 + len(block)]
            runs.append(int(right.long().cumprod(0).sum()))
    return torch.tensor(runs, dtype=torch.float64)


def test_dspark_taps_of_wrong_layers_lower_the_acceptance(dspark: Path) -> None:
    """Proposals are the reference's. With the fault blocks get shorter, by more than three standard errors of their
    differences."""
    harness = Harness(dspark, dtype="float32", qat="off", max_total_tokens=2048, speculative_algorithm="DSPARK")
    draft = DSparkDraft(harness)
    right = served_blocks(harness, draft)
    for tokens, blocks in zip(short_conversations(), right, strict=True):
        propose = by_dspark(tokens, dspark)
        assert blocks == [propose(position) for position in anchors(tokens, draft.model.gamma)]
    with taps_of_the_layers_before(harness):
        wrong = served_blocks(harness, draft)
    shorter = accepted_runs(right) - accepted_runs(wrong)
    assert accepted_runs(right).mean() > 2
    assert shorter.mean() > 3 * shorter.std() / math.sqrt(len(shorter))
