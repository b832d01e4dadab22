"""Draft acceptance on a CPU: accepted and drawn tokens have the target's distribution, whatever the draft's is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sglang_dsv4.cpu.speculation import accept_block, chain_of, verify
from sglang_dsv4.seam import live

VOCAB, DRAFTS, DRAWS = 6, 2, 20_000
CHI_SQUARE = 20.5
"""The 0.999 quantile of chi-square with VOCAB - 1 degrees of freedom."""


def distributions(seed: int) -> Tensor:
    """Distributions of two drafts and of the token after them, [3, VOCAB]; one token has probability 0 in the first."""
    rows = torch.rand(DRAFTS + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) ** 2
    rows[0, 2] = 0
    return rows / rows.sum(-1, keepdim=True)


def drawn(target: Tensor, draft: Tensor, seed: int) -> Tensor:
    """The tokens [DRAWS, 3] of each block, -1 after the first one that the target drew."""
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.stack([torch.multinomial(q, DRAWS, True, generator=generator) for q in draft], 1)
    candidates = torch.cat([torch.zeros(DRAWS, 1, dtype=torch.int64), drafts], 1)
    predicts = torch.full((DRAWS * (DRAFTS + 1),), -1, dtype=torch.int32)
    index = torch.full((DRAWS, DRAFTS + 1), -1, dtype=torch.int32)
    kept = torch.zeros(DRAWS, dtype=torch.int32)
    accept_block(
        predicts=predicts,
        accept_index=index,
        accept_token_num=kept,
        candidates=candidates,
        uniform_samples=torch.rand(DRAWS, DRAFTS, generator=generator),
        uniform_samples_for_final_sampling=torch.rand(DRAWS, generator=generator),
        target_probs=target.expand(DRAWS, -1, -1),
        draft_probs=draft.expand(DRAWS, -1, -1),
    )
    found = predicts.view(DRAWS, -1).long()
    columns = torch.arange(DRAFTS + 1)
    assert torch.equal((found >= 0).sum(1), kept + 1) and torch.equal(found >= 0, columns <= kept[:, None])
    rows = torch.arange(DRAWS * (DRAFTS + 1)).view(DRAWS, -1)
    assert torch.equal(index.long(), rows.masked_fill(columns > kept[:, None], -1))
    assert torch.equal(found[:, :DRAFTS][columns[:DRAFTS] < kept[:, None]], drafts[columns[:DRAFTS] < kept[:, None]])
    return found


def chi_square(counts: Tensor, expected: Tensor) -> float:
    possible = expected > 0
    assert not counts[~possible].any(), "a token that the target gives no chance"
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


@pytest.mark.parametrize("draft", ["its own", "like it", "another", "one token"])
def test_sampled_blocks_follow_the_target(draft: str) -> None:
    """Each of the three tokens, in blocks whose earlier drafts were accepted."""
    target = distributions(1)
    other = distributions(2)
    guesses = {
        "its own": target[:DRAFTS],
        "like it": (0.7 * target + 0.3 * other)[:DRAFTS],
        "another": other[:DRAFTS].flip(-1),
        "one token": torch.eye(VOCAB)[[4, 1]],
    }
    found = drawn(target, guesses[draft], seed=3)
    first = torch.bincount(found[:, 0], minlength=VOCAB).double()
    assert chi_square(first, target[0].double() * DRAWS) < CHI_SQUARE
    again = found[found[:, 1] >= 0]
    second = torch.bincount(again[:, 1], minlength=VOCAB).double()
    assert chi_square(second, target[1].double() * len(again)) < CHI_SQUARE
    last = found[found[:, 2] >= 0][:, 2]
    third = torch.bincount(last, minlength=VOCAB).double()
    assert chi_square(third, target[2].double() * len(last)) < CHI_SQUARE
    if draft == "its own":
        assert len(last) == DRAWS  # min(1, p / q) is 1


def test_a_draw_from_p_after_a_refused_draft_is_noticed() -> None:
    """After a refused draft the token must come from max(0, p - q): p itself gives the refused token too often."""
    target = distributions(1)
    likely = int(target[0].argmax())
    found = drawn(target, torch.eye(VOCAB)[[likely, 1]], seed=3)
    refused = found[:, 0] != likely
    assert refused.any() and not (found[:, 1:][refused] >= 0).any()
    wrong = found[:, 0].clone()
    wrong[refused] = torch.multinomial(target[0], int(refused.sum()), True, generator=torch.Generator().manual_seed(4))
    counts = torch.bincount(wrong, minlength=VOCAB).double()
    assert chi_square(counts, target[0].double() * DRAWS) > CHI_SQUARE


def test_block_verification_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="block-verification"):
        accept_block(
            **dict.fromkeys(("predicts", "accept_index", "accept_token_num", "candidates", "uniform_samples"), None),
            **dict.fromkeys(("uniform_samples_for_final_sampling", "target_probs", "draft_probs"), None),
            block_verification=True,
        )


def test_chains_are_kept_up_to_the_first_difference() -> None:
    predicted = torch.tensor([[5, 6, 7], [5, 9, 7], [1, 6, 7]])
    candidates = torch.tensor([[0, 5, 6], [0, 5, 6], [0, 5, 6]])
    tokens, lengths, rows = chain_of(predicted, candidates)
    assert tokens.tolist() == predicted.flatten().tolist()
    assert lengths.tolist() == [3, 2, 1]
    assert rows.tolist() == [[0, 1, 2], [3, 4, -1], [6, -1, -1]]


def test_drafts_of_another_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties, grammars and biases are applied by a hook that leaves other models alone: they would be lost."""
    monkeypatch.setattr(live, "_live", None)
    with pytest.raises(NotImplementedError, match="only for DeepSeek-V4"):
        verify(SimpleNamespace(draft_token_num=2), SimpleNamespace(), SimpleNamespace())
