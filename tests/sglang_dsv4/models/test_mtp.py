"""The multi-token prediction module (specification, section 7), which transformers does not have: compared with the
equations in reference.py, prefill with its own decode, and chained drafts."""

from collections.abc import Callable

import pytest
import torch
from model.compare import TOLERANCE
from model.harness import Draft, Request
from model.oracle import QUANTISABLE
from model.served import Served
from torch import Tensor

Rows = tuple[Tensor, Tensor]  # logits [T, vocab], streams [T, hc_mult * d] or [T, hc_mult, d]
PROMPT = 270  # more than two windows
SPECULATION = dict(
    speculative_algorithm="EAGLE",
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=4,
)


class Drafted:
    """A target and its MTP module, and one served sequence with the target's streams."""

    def __init__(self, served: Served) -> None:
        self.served, self.harness = served, served.harness
        self.draft = Draft(self.harness)
        self.tokens = served.corpus[3][: PROMPT + 4]
        self.request = self.harness.open()
        # Positions after the prompt are served, too, so that they have token slots.
        ((_, streams),) = self.harness.step_with_streams([(self.request, self.tokens[:-1].tolist())])
        self.streams = streams
        self.draft.runner.token_to_kv_pool.tail_rows = None  # the draft prefills fewer tokens than the target here

    def part(self, start: int, end: int, streams: Tensor | None = None) -> tuple[Request, int, list[int], Tensor]:
        """The draft's input for positions [start, end)."""
        own = self.streams[start:end] if streams is None else streams
        return self.request, start, self.tokens[start + 1 : end + 1].tolist(), own

    def prefill(self) -> Rows:
        ((logits, streams),) = self.draft.step([self.part(0, PROMPT)])
        return logits, streams

    def expected(self, streams: Tensor | None = None) -> Rows:
        """(logits, streams [T, n, d]) of the reference from the target's streams."""
        streams = self.streams[:PROMPT] if streams is None else streams
        folded = streams.unflatten(-1, (self.served.config["hc_mult"], -1))
        out = self.served.reference.mtp_streams(folded, self.tokens[1 : len(streams) + 1])
        return self.served.reference.mtp_logits(out), out


@pytest.fixture(scope="module")
def drafted(serve: Callable[..., Served]) -> Drafted:
    return Drafted(serve("flash-like", server_args=SPECULATION))


@pytest.fixture(scope="module", params=["float32-full", "bfloat16-full"])
def quantised(request: pytest.FixtureRequest, serve: Callable[..., Served]) -> Drafted:
    dtype, qat = request.param.split("-")
    return Drafted(serve("flash-like", dtype=dtype, qat=qat, server_args=SPECULATION, **QUANTISABLE))


def assert_close(actual: Rows, expected: Rows) -> None:
    difference = (actual[0] - expected[0]).abs().max().item()
    assert difference <= TOLERANCE, f"logits differ by {difference:.1e}"
    scale = expected[1].abs().max()
    assert (actual[1] - expected[1].flatten(1)).abs().max() <= TOLERANCE * scale


def test_the_target_is_unaffected_by_speculation(drafted: Drafted) -> None:
    ((logits, _),) = drafted.harness.step_with_streams([(drafted.harness.open(), drafted.tokens[:200].tolist())])
    expected = drafted.served.expected[3]
    assert (logits - expected.logits[:200]).abs().max() <= TOLERANCE


def test_equations(drafted: Drafted) -> None:
    assert_close(drafted.prefill(), drafted.expected())


@pytest.mark.parametrize("chunk_tokens", [1, 3, 64, 100])
def test_prefill_in_chunks(drafted: Drafted, chunk_tokens: int | None) -> None:
    expected = drafted.prefill()
    count = 12 if chunk_tokens == 1 else PROMPT
    parts = [
        drafted.draft.step([drafted.part(start, min(start + chunk_tokens, count))])[0]
        for start in range(0, count, chunk_tokens)
    ]
    for k in range(2):
        assert torch.equal(torch.cat([part[k] for part in parts]), expected[k][:count])


@pytest.mark.parametrize("decode_from", [1, 5, 126, 255])
def test_prefill_is_its_own_decode(drafted: Drafted, decode_from: int) -> None:
    expected = drafted.prefill()
    drafted.draft.step([drafted.part(0, decode_from)])
    for position in range(decode_from, decode_from + 5):
        ((logits, streams),) = drafted.draft.step([drafted.part(position, position + 1)], "decode")
        assert torch.equal(logits[0], expected[0][position])
        assert torch.equal(streams[0], expected[1][position])


@pytest.mark.parametrize("drafts", [2, 3])
def test_chained_drafts(drafted: Drafted, drafts: int) -> None:
    """Later drafts of a chain read the module's own streams in place of the target's."""
    streams = drafted.streams[:PROMPT]
    (actual,) = drafted.draft.step([drafted.part(0, PROMPT)])
    for position in range(PROMPT, PROMPT + drafts - 1):
        own = actual[1][-1:]
        streams = torch.cat([streams, own])
        (actual,) = drafted.draft.step([drafted.part(position, position + 1, own)], "decode")
    expected = drafted.expected(streams)
    assert_close(actual, tuple(rows[-1:] for rows in expected))


def test_requests_of_a_batch(drafted: Drafted) -> None:
    """Two requests in one draft forward have the results of each alone."""
    harness, alone = drafted.harness, drafted.prefill()
    other = harness.open()
    tokens = drafted.served.corpus[4][:120]
    ((_, streams),) = harness.step_with_streams([(other, tokens.tolist())])
    inputs = (other, 0, tokens[1:].tolist(), streams[:-1])
    (expected,) = drafted.draft.step([inputs])
    first, second = drafted.draft.step([drafted.part(0, PROMPT), inputs])
    harness.close(other)
    assert torch.equal(first[0], alone[0]) and torch.equal(second[0], expected[0])


def test_with_quantisers(quantised: Drafted) -> None:
    """The reference quantises the same input: fp32 agrees except for values at a rounding limit, bf16 roughly."""
    logits, streams = quantised.prefill()
    _, expected = quantised.expected(quantised.streams[:PROMPT].float())
    error = (streams.float() - expected.flatten(1)).norm(dim=1) / expected.flatten(1).norm(dim=1)
    if streams.dtype == torch.bfloat16:
        assert error.median() < 6e-2 and error.quantile(0.9) < 8e-2
    else:
        assert error.median() < 2e-6 and (error > 1e-4).float().mean() < 0.05
    assert torch.isfinite(logits).all()


def test_decode_with_quantisers_is_bitwise_prefill(quantised: Drafted) -> None:
    expected = quantised.prefill()
    quantised.draft.step([quantised.part(0, 200)])
    for position in range(200, 205):
        ((logits, streams),) = quantised.draft.step([quantised.part(position, position + 1)], "decode")
        assert torch.equal(logits[0], expected[0][position]) and torch.equal(streams[0], expected[1][position])


def swapped_projections(drafted: Drafted, patch: pytest.MonkeyPatch) -> None:
    e, h = drafted.draft.model.model.e_proj.weight, drafted.draft.model.model.h_proj.weight
    one, other = e.data.clone(), h.data.clone()
    patch.setattr(e, "data", other)
    patch.setattr(h, "data", one)


def unit_weight(name: str) -> Callable[[Drafted, pytest.MonkeyPatch], None]:
    def mistake(drafted: Drafted, patch: pytest.MonkeyPatch) -> None:
        weight = getattr(drafted.draft.model.model, name).weight
        patch.setattr(weight, "data", torch.ones_like(weight))

    return mistake


def hidden_norm_over_all_streams(drafted: Drafted, patch: pytest.MonkeyPatch) -> None:
    model = drafted.draft.model.model
    norm = model.hnorm

    def over_all(x: Tensor) -> Tensor:
        flat = x.flatten(-2).float()
        scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm.eps)
        return ((flat * scale).view_as(x) * norm.weight).to(x.dtype)

    patch.setattr(norm, "forward", over_all)


def head_mix_of_the_main_model(drafted: Drafted, patch: pytest.MonkeyPatch) -> None:
    ours, main = drafted.draft.model.model.hc_head, drafted.harness.model.model.hc_head
    for name in ("fn", "base", "scale"):
        patch.setattr(getattr(ours, name), "data", getattr(main, name).data)


def yarn(drafted: Drafted, patch: pytest.MonkeyPatch) -> None:
    frequencies = drafted.draft.model.model.decoder.attn.rope.frequencies
    patch.setattr(frequencies, "data", drafted.served.reference.frequencies(4).float())


def this_token_s_embedding(drafted: Drafted, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drafted, "tokens", drafted.tokens.roll(1))


def streams_of_the_next_token(drafted: Drafted, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drafted, "streams", drafted.streams.roll(-1, 0))


MISTAKES = {
    "e_proj and h_proj swapped": swapped_projections,
    "no enorm weight": unit_weight("enorm"),
    "no hnorm weight": unit_weight("hnorm"),
    "no final norm weight": unit_weight("norm"),
    "hnorm over all streams": hidden_norm_over_all_streams,
    "main model's hc_head": head_mix_of_the_main_model,
    "YaRN": yarn,
    "embedding of token t": this_token_s_embedding,
    "streams of token t+1": streams_of_the_next_token,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted(drafted: Drafted, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drafted.expected()
    with monkeypatch.context() as patch:
        MISTAKES[mistake](drafted, patch)
        actual = drafted.prefill()
    assert (actual[0] - expected[0]).abs().max() > 100 * TOLERANCE
    with pytest.raises(AssertionError, match="logits differ"):
        assert_close(actual, expected)


def test_every_mistake_was_undone(drafted: Drafted) -> None:
    assert_close(drafted.prefill(), drafted.expected())
