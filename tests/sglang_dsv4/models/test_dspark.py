"""The DSpark draft compared with its equations (`dspark_reference`), and its rings' contents from step to step."""

from __future__ import annotations

import pytest
import torch
from model.compare import TOLERANCE
from model.drafted import LENGTH, Drafted, check_block, check_steps
from model.dspark_draft import DSparkDraft
from selection.marks import with_slow_marks

from sglang_dsv4.determinism import checks


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    return Drafted(tmp_path_factory.mktemp("dspark"), "float32", "off")


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    return Drafted(tmp_path_factory.mktemp("dspark"), "float32", "full")


def test_a_draft_is_asked_for_operators_that_depend_on_the_batch(
    drafted: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked as the target is, under the deterministic flag."""
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
    """Both start from the same taps. With another order of fp32 sums one value in 10,000 is rounded to another code."""
    request = quantised.harness.open()
    ((_, taps),) = quantised.harness.step_with_streams([(request, quantised.tokens[:200].tolist())])
    quantised.draft.inject_prefill(request, taps, 0)
    for stage, expected in enumerate(quantised.reference.context(taps)):
        positions = torch.arange(72, 200)
        rows = quantised.draft.pool.window(stage).gather(request.row * 256 + positions % 256)
        off = (rows - expected[positions]).abs() > TOLERANCE * expected.abs().max()
        assert off.float().mean() < 1e-3
    quantised.harness.close(request)


@pytest.mark.parametrize("chunk", with_slow_marks([1, 100, 128, 256], quick=[100, 128, 256]))
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


@pytest.mark.parametrize("kept", with_slow_marks(range(1, 7), quick=[2, 5]))
def test_refused_rows_and_blocks_leave_no_trace(drafted: Drafted, kept: int) -> None:
    check_steps(drafted, kept)
