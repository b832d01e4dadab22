"""Penalties are applied in one order, whichever order SGLang's set of classes has in this process."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator

from sglang_dsv4.requests.sampling import penalties

KINDS = (
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
)


def test_the_order_of_the_classes_does_not_change_a_logit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "live_parts", lambda: True)
    monkeypatch.setattr(penalties, "budget_of", lambda parameters: None)
    parameters = SimpleNamespace(frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.3)
    req = SimpleNamespace(sampling_params=parameters, output_ids=[], tokenizer=None)
    batch = penalties.Rows([req], "cpu")
    found = []
    for kinds in itertools.permutations(KINDS):
        info = SimpleNamespace(penalizer_orchestrator=BatchedPenalizerOrchestrator(16, batch, kinds))
        penalties.complete(None, info, batch, 16)
        info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor([5]))
        logits = torch.linspace(-1, 1, 16).unsqueeze(0)
        info.penalizer_orchestrator.apply(logits)
        found.append(logits)
    with_overlap = torch.linspace(-1, 1, 16).unsqueeze(0)
    with_overlap[0, 5] = (with_overlap[0, 5] - 0.7 - 0.3) * 1.3  # below 0: multiplied
    torch.testing.assert_close(found[0], with_overlap)
    assert all(torch.equal(logits, found[0]) for logits in found)
