"""A hit from host memory or from files equals the cold answer, bit for bit, as in `test_exact` for the device.

The pool has eight pages, so other requests displace a prefix from it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cache.zero_copy_storage import FromConfig
from prefix.cold import REMAINDERS, assert_equals_cold, some
from prefix.served import ServedEngine, fill, poison_free_pages, push_out
from selection.marks import with_slow_marks
from sglang.srt.mem_cache.radix_cache import RadixKey
from torch import Tensor

from sglang_dsv4.cache.record_files import FOLDER_VARIABLE, Fault, identity_digest
from sglang_dsv4.prefix.identity import weights_fingerprint

QUICK_REMAINDERS = ("255-mod-256",)
"""Tests of other remainders are slow; `test_exact` tests all remainders within a compression group."""


@pytest.fixture(
    scope="module",
    params=[pytest.param("bfloat16", marks=pytest.mark.slow), "fp8_e4m3"],
    ids=["plain-rows", "fp8-rows"],
)
def engine(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ServedEngine:
    return next(engines(folder, request.param, tmp_path_factory.mktemp("prefixes")))


def engines(folder: Path, row_format: str, store: Path) -> Iterator[ServedEngine]:
    """Engines, one after the other, with the same storage backend."""
    while True:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SGLANG_DSV4_TAIL_SLOTS", "4")
            environment.setenv(FOLDER_VARIABLE, str(store))
            yield ServedEngine(
                folder,
                dtype="bfloat16",
                kv_cache_dtype=row_format,
                max_total_tokens=2048,
                enable_hierarchical_cache=True,
                hicache_ratio=5.0,
                hicache_storage_backend="file",
            )


def cold(engine: ServedEngine, prompt: list[int], output: list[int]) -> Tensor:
    """Logits of a request that is computed from its first token and not stored."""
    engine.flush()
    storage, engine.cache.storage = engine.cache.storage, None
    hit, logits = engine.serve(prompt, output)
    assert hit == 0 and logits.isfinite().all()
    engine.flush()
    engine.cache.storage = storage
    return logits


@pytest.mark.parametrize(
    "remainder",
    [
        pytest.param(remainder, marks=() if name in QUICK_REMAINDERS else pytest.mark.slow, id=name)
        for name, remainder in REMAINDERS.items()
    ],
)
def test_from_host_memory_and_from_files(engine: ServedEngine, remainder: int) -> None:
    """A shared prefix of 512 + remainder tokens, another end, and decoding over a page boundary.

    First the prefix is not on the device; then, after a flush, it is neither on the device nor in host memory.
    """
    prefix, output = some(1 + remainder, 512 + remainder), some(2, 8)
    prompt = prefix + some(3, -(len(prefix) + 5) % 256)
    expected = cold(engine, prompt, output)
    engine.serve(prefix, some(4, 5))
    push_out(engine)
    poison_free_pages(engine)
    loaded = engine.cache.host.copies.records.loaded.pages
    hit, logits = engine.serve(prompt, output)
    assert hit == 512 and engine.cache.host.copies.records.loaded.pages == loaded + 2
    assert_equals_cold(logits, expected, hit)

    engine.settle()
    engine.flush()
    for slot in range(engine.pool.page_copies.host_slots):
        fill(engine.cache.host.copies.records.memory[slot])
    poison_free_pages(engine)
    engine.arrive(prompt[: len(prefix) + 1])  # the end was stored too; a request for all of it would hit the end
    hit, logits = engine.serve(prompt, output)
    assert hit == 512
    assert_equals_cold(logits, expected, hit)


def test_a_conversation_that_decoding_has_left_in_files(engine: ServedEngine) -> None:
    """The tail of the last page was saved from a ring."""
    prompt, output = some(21, 500), some(22, 20)
    full = [*prompt, *output, *some(23, 30)]
    expected = cold(engine, full, [])
    engine.serve(prompt, output)
    engine.settle()
    engine.flush()
    engine.arrive(full)
    hit, logits = engine.serve(full)
    assert hit == 512
    assert_equals_cold(logits, expected, hit)


@pytest.mark.slow
def test_under_pressure(engine: ServedEngine) -> None:
    """Requests of three times the pool, twice: the second time each is loaded from host memory."""
    prompts = [some(60 + i, 650 + 50 * i) for i in range(5)]
    expected = [cold(engine, prompt, []) for prompt in prompts]
    for prompt in prompts:
        engine.serve(prompt)
    for prompt, wanted in zip(prompts, expected, strict=True):
        hit, logits = engine.serve(prompt)
        assert hit == (len(prompt) - 1) // 256 * 256
        assert_equals_cold(logits, wanted, hit)


@pytest.mark.parametrize("lost", with_slow_marks(["CSA entries", "HCA entries", "indexer keys"], quick=["HCA entries"]))
def test_a_part_that_is_not_loaded_is_seen(engine: ServedEngine, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the cold answer notices that one part of a page's record is not loaded."""
    prompt = some(31, 700)
    expected = cold(engine, prompt, [])
    engine.serve(prompt)
    push_out(engine)
    poison_free_pages(engine)
    records = engine.cache.host.copies.records.records
    kept = [part for part in records.parts if part.name != lost]
    assert len(kept) < len(records.parts)
    monkeypatch.setattr(records, "parts", kept)
    hit, logits = engine.serve(prompt)
    assert hit == 512 and not torch.equal(logits, expected[hit:])


def test_a_damaged_file_costs_a_shorter_hit(engine: ServedEngine) -> None:
    prompt = some(41, 1100)
    expected = cold(engine, prompt, [])
    engine.serve(prompt[:600])
    engine.serve(prompt)
    engine.settle()
    engine.flush()
    files = engine.cache.storage.backend
    digests = engine.cache.nodes.digests(key_of(prompt), None)
    path = files.folder / digests[2].hex()[:2] / f"{digests[2].hex()}.page"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    engine.arrive(prompt)
    hit, logits = engine.serve(prompt)
    assert hit == 512 and files.faults[Fault.CORRUPT] == 1
    assert_equals_cold(logits, expected, hit)


def test_weights_are_told_apart(engine: ServedEngine) -> None:
    """A weight that differs in its last bit, or two swapped bytes, change the fingerprint."""
    model = engine.harness.runner.model
    before = weights_fingerprint(model)
    assert weights_fingerprint(model) == before
    for parameter in (next(model.parameters()), list(model.parameters())[-1]):
        words = parameter.data.view(-1).view(torch.uint8)
        words[-1] ^= 1
        assert weights_fingerprint(model) != before
        words[-1] ^= 1
        other = int((words != words[-1]).nonzero()[0])
        words[[other, -1]] = words[[-1, other]]
        assert weights_fingerprint(model) != before
        words[[other, -1]] = words[[-1, other]]
    assert weights_fingerprint(model) == before


def test_the_identity_says_what_bytes_depend_on(engine: ServedEngine) -> None:
    """Two servers that differ in one of these fields, or in the sources, share no folder."""
    identity = engine.cache.storage.backend.identity
    expected = ("model", "draft", "weights", "ranks", "quantisers", "dtype", "rows", "tails", "computed by", "device")
    assert set(identity) == {*expected, "code", "versions"} and all(identity.values())
    assert "fp8" in identity["rows"] or "plain" in identity["rows"]
    digests = {identity_digest(identity | {name: "another"}) for name in identity}
    assert len(digests | {identity_digest(identity)}) == len(identity) + 1


def test_sources_that_change_later_are_not_the_servers(engine: ServedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.cache.storage.backend.identity
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"other sources")
    engine.flush()
    assert engine.cache.storage.backend.identity == before


def test_from_a_storage_that_serves_zero_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend like mooncake and nixl. The connection is opened once, although the cache is flushed."""
    monkeypatch.setenv("SGLANG_DSV4_TAIL_SLOTS", "4")
    made: list[FromConfig] = []
    monkeypatch.setattr(FromConfig, "made", made)
    extra = {"backend_name": "fake", "module_path": FromConfig.__module__, "class_name": "FromConfig"}
    engine = ServedEngine(
        folder,
        dtype="bfloat16",
        max_total_tokens=2048,
        enable_hierarchical_cache=True,
        hicache_ratio=5.0,
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(extra),
    )
    prompt = some(51, 1100)
    expected = cold(engine, prompt, [])
    engine.serve(prompt)
    engine.settle()
    for hit_tokens in (1024, 0):  # then a page of it is missing
        engine.flush()
        engine.arrive(prompt)
        hit, logits = engine.serve(prompt)
        assert hit == hit_tokens and len(made) == 1
        assert_equals_cold(logits, expected, hit)
        digests = engine.cache.nodes.digests(key_of(prompt), None)
        for key in list(made[0].objects):
            if digests[2].hex() in key:
                del made[0].objects[key]
    assert made[0].batches and engine.cache.storage.totals.errors == 0


def key_of(prompt: list[int]) -> RadixKey:
    return RadixKey(array("q", prompt))
