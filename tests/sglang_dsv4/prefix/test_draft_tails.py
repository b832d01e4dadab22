"""After a reused prefix a draft makes the same proposals as without reuse, bit for bit: its rows are in the tails.

As in `test_exact`, everything that is not restored is NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from model.dspark_draft import DSparkDraft
from model.harness import Draft, Request
from prefix.cold import some
from prefix.served import ServedEngine, fill_rows, poison_free_pages, push_out
from selection.marks import with_slow_marks
from torch import Tensor

from sglang_dsv4.cache.record_files import FOLDER_VARIABLE
from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

TINY = PRESETS["tiny"]
SHAPES = {
    "DSPARK": dataclasses.replace(TINY, dspark_markov_rank=32, dspark_target_layer_ids=(1, 2, 3)),
    "EAGLE": TINY,
}
FLAGS = {"EAGLE": {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}}
TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_storage_backend": "file"}
ANCHOR = 33


class DraftingEngine(ServedEngine):
    """An engine that runs the draft after every forward of the target, as SGLang's worker of the algorithm does."""

    def __init__(self, folder: Path, algorithm: str, row_format: str, **more: object) -> None:
        flags = {"speculative_algorithm": algorithm, "kv_cache_dtype": row_format, **FLAGS.get(algorithm, {}), **more}
        super().__init__(folder, 256, dtype="bfloat16", max_total_tokens=4096, **flags)
        self.draft = (DSparkDraft if algorithm == "DSPARK" else Draft)(self.harness)
        self.tokens: list[int] = []
        """Tokens of the request that is served: a row of the MTP module depends on the next token too."""
        self.proposed: dict[int, Tensor] = {}
        """Position -> the draft's output for the tokens from there on."""

    def _forward(self, req: object, begin: int, end: int, mode: str) -> None:
        tokens = list(req.full_untruncated_fill_ids[begin:end])
        row = Request(req.kv.req_pool_idx, begin, end, [], req.tail_match, req.lock)
        ((logits, streams),) = self.harness.step_with_streams([(row, tokens)], mode)
        self.logits[req.rid].append(logits)
        if isinstance(self.draft, Draft):
            ((logits, _),) = self.draft.step([(row, begin, self.tokens[begin + 1 : end + 1], streams)], mode)
            self.proposed[end] = logits[-1]
            return
        if mode == "extend":
            self.draft.inject_prefill(row, streams, begin)
        else:
            self.draft.commit(row, streams, begin, 1)
        self.proposed[end] = self.draft.blocks([(row, ANCHOR)])[0]

    def poison(self, request_slot: int) -> None:
        super().poison(request_slot)
        pool = self.draft.runner.token_to_kv_pool
        for layer in pool.geometry.layers():
            fill_rows(pool.window(layer), request_slot * pool.geometry.ring_rows, pool.geometry.ring_rows)

    def serve(self, prompt: Sequence[int], output: Sequence[int] = ()) -> tuple[int, Tensor]:
        self.tokens = [*prompt, *output, ANCHOR]
        return super().serve(prompt, output)

    def proposals(self, prompt: list[int], output: list[int]) -> tuple[int, dict[int, Tensor]]:
        """Hit tokens, and the draft's output after each forward."""
        self.proposed = {}
        hit, _ = self.serve(prompt, output)
        return hit, self.proposed


@pytest.fixture(
    scope="module",
    params=[pytest.param("bfloat16", marks=pytest.mark.slow), "fp8_e4m3"],
    ids=["plain-rows", "fp8-rows"],
)
def row_format(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=SHAPES)
def engine(
    request: pytest.FixtureRequest, row_format: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DraftingEngine]:
    folder = tmp_path_factory.mktemp("drafting")
    write_checkpoint(folder, SHAPES[request.param])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_DSV4_TAIL_SLOTS", "3")  # most tails are on the host
        environment.setenv("SGLANG_DSV4_TAIL_HOST_SLOTS", "12")
        environment.setenv(FOLDER_VARIABLE, str(folder / "prefixes"))
        yield DraftingEngine(folder, request.param, row_format, **TIERS)


def assert_hit_is_cold(engine: DraftingEngine, prompt: list[int], output: list[int], hit_tokens: int) -> None:
    hit, hot = engine.proposals(prompt, output)
    assert hit == hit_tokens
    engine.flush()
    hit, cold = engine.proposals(prompt, output)
    assert hit == 0 and set(hot) <= set(cold) and hot
    for end, rows in hot.items():
        assert torch.equal(rows, cold[end]), f"after {end} tokens"


@pytest.mark.parametrize("prompt_tokens", with_slow_marks([514, 515, 640, 767], quick=[767]))
def test_after_a_prefills_tail(engine: DraftingEngine, prompt_tokens: int) -> None:
    engine.flush()
    prompt = some(1, prompt_tokens)
    engine.serve(prompt[:515], [])
    assert_hit_is_cold(engine, prompt, some(2, 6), 512)


@pytest.mark.slow
def test_after_a_tail_of_decoding(engine: DraftingEngine) -> None:
    """The rings are saved when the page is full; the draft's rings hold the rows of tokens that were kept."""
    engine.flush()
    prompt, output = some(3, 240), some(4, 40)
    engine.serve(prompt, output)
    assert_hit_is_cold(engine, [*prompt, *output[:30], *some(5, 20)], [], 256)


def test_a_request_that_ends_with_its_page(engine: DraftingEngine) -> None:
    """The request's rings are saved before the next forward, whichever request has its slot then."""
    engine.flush()
    prompt, output = some(6, 250), some(7, 20)
    engine.serve(prompt, output[:8])
    assert_hit_is_cold(engine, [*prompt, *output], [], 256)


@pytest.mark.slow
def test_after_a_prefix_from_beyond_the_device(engine: DraftingEngine) -> None:
    """Tails of prefills and one of decoding; the pages come from host memory, then pages and tails from files."""
    engine.flush()
    prompt, output = some(11, 300), some(12, 240)
    engine.serve(prompt, output[:230])  # the page up to 512 is decoded
    asked = [*prompt, *output[:228]]
    engine.round()  # queued saves are issued before their pages are poisoned
    push_out(engine)
    poison_free_pages(engine)
    hits = [engine.proposals(asked, [])]
    assert engine.cache.host.copies.records.loaded.pages >= 2
    engine.settle()
    engine.flush()
    engine.arrive(asked)
    poison_free_pages(engine)
    hits.append(engine.proposals(asked, []))
    storage, engine.cache.storage = engine.cache.storage, None
    engine.flush()
    hit, cold = engine.proposals(asked, [])
    engine.cache.storage = storage
    assert hit == 0
    for hit, hot in hits:
        assert hit == 512 and hot and set(hot) <= set(cold)
        for end, rows in hot.items():
            assert torch.equal(rows, cold[end]), f"after {end} tokens"


def test_other_weights_of_a_draft_are_another_identity(engine: DraftingEngine) -> None:
    engine.flush()  # the engine's storage backend was opened before its draft existed
    identity = dict(engine.cache.storage.backend.identity)
    shared = {parameter.data_ptr() for parameter in engine.harness.runner.model.parameters()}
    own = [p for p in engine.draft.runner.model.parameters() if p.data_ptr() not in shared]
    weight = own[-1].data.view(-1).view(torch.uint8)
    weight[-1] ^= 1
    engine.flush()
    other = engine.cache.storage.backend.identity
    assert {name for name in identity if identity[name] != other[name]} == {"weights"}
    weight[-1] ^= 1
    engine.flush()
    assert engine.cache.storage.backend.identity == identity and identity["draft"] in SHAPES


@pytest.mark.parametrize("fault", with_slow_marks(["not restored", "not saved from a prefill"], quick=["not restored"]))
def test_a_fault_is_noticed(engine: DraftingEngine, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, pool = engine.pool.tail_memory, engine.draft.runner.token_to_kv_pool
    engine.flush()
    prompt = some(8, 600)
    if fault == "not saved from a prefill":
        monkeypatch.setattr(type(pool), "tail_rows", property(lambda self: None, lambda self, rows: None), False)
    engine.serve(prompt[:515], [])
    if fault == "not restored":
        original: Callable[..., None] = memory.restore

        def restore(*arguments: object) -> None:
            rings, memory._draft_rings = memory._draft_rings, None
            original(*arguments)
            memory._draft_rings = rings

        monkeypatch.setattr(memory, "restore", restore)
    with pytest.raises(AssertionError, match="after 6"):
        assert_hit_is_cold(engine, prompt, [], 512)
