"""Prefixes in a storage backend, without a model: what is written, found, read in time, and lost."""

from __future__ import annotations

import threading
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lib.prefix_replay import PAGE
from prefix.tiered import BYTES, OTHERS, PROMPT, Backend, Records, TieredEngine, admit, name_of, push_out, tensor_of
from prefix.waiting import handle
from sglang.srt.mem_cache.radix_cache import RadixKey
from torch import Tensor

from sglang_dsv4.cache.disk_limit import DiskLimit, DiskOptions
from sglang_dsv4.cache.page_copies import PageCopies
from sglang_dsv4.cache.record_files import HEADER, RecordFiles
from sglang_dsv4.pipeline.votes import Votes
from sglang_dsv4.prefix.host_tier import HostTier, WritePolicy
from sglang_dsv4.prefix.storage_tier import PrefetchOptions, page_key, tail_key


def stored(policy: WritePolicy, backend: Backend, **how: object) -> TieredEngine:
    return TieredEngine.made(pages=16, host_pages=48, policy=policy, backend=backend, interval_tokens=2 * PAGE, **how)


def filled(policy: WritePolicy, backend: Backend) -> None:
    """Run a server that serves the prompt and ends."""
    engine = stored(policy, backend)
    for _ in range(2):
        engine.run(PROMPT, [7])
    push_out(engine)
    engine.check_idle()


def test_another_server_finds_the_prefix(policy: WritePolicy, backend: Backend) -> None:
    filled(policy, backend)
    engine = stored(policy, backend)
    engine.prefixes = Names(PROMPT)
    again = admit(engine, PROMPT)
    assert again.hit_tokens == 5 * PAGE
    engine.prefill_chunk(again)
    engine.check()
    assert again.req.tail_match.report.pages_from == {"storage": 5 * PAGE}
    engine.finish(again)
    engine.check_idle()
    push_out(engine)
    assert engine.run(PROMPT, [7]).req.tail_match.report.pages_from == {"host": 5 * PAGE}, "counted once"


def bounded(folder: Path, files: int) -> tuple[DiskLimit, TieredEngine]:
    limit = DiskLimit(folder, DiskOptions(files * (HEADER.size + BYTES), keep=1.0))
    return limit, stored(WritePolicy.WRITE_THROUGH, RecordFiles(folder, {"of": "a test"}, limit))


def in_files(engine: TieredEngine, prompt: list[int]) -> list[bool]:
    """For each page of a prompt, whether its file exists."""
    digests = engine.cache.nodes.digests(RadixKey(array("q", prompt)), None)
    return [engine.storage.backend.exists(page_key(digest)) for digest in digests]


def test_a_bounded_disk_keeps_what_was_written_to_last(tmp_path: Path) -> None:
    """Whole prefixes are kept: a conversation that continues renews its first pages too."""
    limit, engine = bounded(tmp_path, 20)
    first = PROMPT[: 4 * PAGE + 5]
    for prompt in (first, OTHERS[0], longer := [*first, *OTHERS[2]]):
        engine.run(prompt, [7])
        engine.settle()
    left = in_files(engine, OTHERS[0])
    assert limit.deleted and all(in_files(engine, longer)) and not all(left)
    assert left == sorted(left, reverse=True), "a page without the pages before it"


def test_a_bounded_disk_keeps_what_was_read_last(tmp_path: Path) -> None:
    limit, engine = bounded(tmp_path, 16)
    first = PROMPT[: 4 * PAGE + 5]
    for prompt in (first, OTHERS[0]):
        engine.run(prompt, [7])
        engine.settle()
    assert not limit.deleted
    engine.flush()
    again = admit(engine, first)
    assert again.hit_tokens == 4 * PAGE
    engine.prefill_chunk(again)
    engine.finish(again)
    engine.run(OTHERS[1], [7])
    engine.settle()
    assert all(in_files(engine, first)) and all(in_files(engine, OTHERS[1])) and sum(in_files(engine, OTHERS[0])) < 3


class Names(dict):
    """Digest -> prefix, for the prefixes of a prompt that another engine has stored."""

    def __init__(self, prompt: list[int]) -> None:
        ends = range(PAGE, len(prompt) + 1, PAGE)
        super().__init__((name_of(prompt[:end]), tuple(prompt[:end])) for end in ends)


@pytest.mark.parametrize(
    ("lost", "hit"),
    [("page 0", 0), ("page 2", 2), ("page 4", 4), ("tail 5", 4), ("tails", 0), ("nothing", 5)],
)
def test_a_hit_ends_before_what_is_missing(backend: Backend, lost: str, hit: int) -> None:
    """At the deepest tail whose pages all exist; an interval of two pages gives tails at 2, 4 and the end, 5."""
    filled(WritePolicy.WRITE_THROUGH, backend)
    engine = stored(WritePolicy.WRITE_THROUGH, backend)
    engine.prefixes = Names(PROMPT)
    digests = engine.cache.nodes.digests(key_of(PROMPT), None)
    gone = {f"page {i}": [page_key(d)] for i, d in enumerate(digests)}
    gone |= {"tail 5": [tail_key(digests[4])], "tails": [tail_key(d) for d in digests], "nothing": []}
    for key in gone[lost]:
        backend.records.pop(key, None)
    again = admit(engine, PROMPT)
    assert again.hit_tokens == hit * PAGE
    engine.prefill_chunk(again)
    engine.finish(again)
    engine.check_idle()


def key_of(prompt: list[int]) -> RadixKey:
    return RadixKey(array("q", prompt))


def test_a_failed_read_shortens_the_hit(backend: Backend) -> None:
    """The hit is shortened although the look-up found the whole prefix."""
    filled(WritePolicy.WRITE_THROUGH, backend)
    engine = stored(WritePolicy.WRITE_THROUGH, backend)
    engine.prefixes = Names(PROMPT)
    bad = page_key(engine.cache.nodes.digests(key_of(PROMPT), None)[3])
    get = backend.get
    backend.get = lambda key, target: None if key == bad else get(key, target)
    again = admit(engine, PROMPT)
    assert again.hit_tokens == 2 * PAGE
    engine.retract(again)
    engine.check_idle()
    assert len(engine.tiers.pages) == 2, "pages that no tail follows are given back"


def test_a_request_does_not_wait_for_ever(backend: Backend) -> None:
    """A request whose prefetch is too slow is computed; the pages that were read for it serve the next request."""
    filled(WritePolicy.WRITE_THROUGH, backend)
    engine = stored(WritePolicy.WRITE_THROUGH, backend, options=PrefetchOptions("best_effort"))
    engine.prefixes = Names(PROMPT)
    again = admit(engine, PROMPT)
    assert again.hit_tokens in (0, 5 * PAGE)
    engine.retract(again)
    engine.settle()
    assert engine.storage.totals.late == (0 if again.hit_tokens else 1)
    assert engine.admit(PROMPT).hit_tokens == 5 * PAGE


def test_an_error_is_counted_once_however_long_other_ranks_read(backend: Backend) -> None:
    """The look-up fails here at once; another rank has its result some rounds later."""
    rounds = iter(range(5))

    def least_of_ranks(states: list[int]) -> list[int]:
        return states if next(rounds, None) is None else [0, *states[1:]]

    engine = stored(WritePolicy.WRITE_THROUGH, backend, votes=Votes(least_of_ranks))

    def fail(keys: list[str]) -> int:
        raise OSError("the folder is gone")

    backend.batch_exists = fail
    assert engine.arrive(PROMPT)
    assert next(rounds, None) is None and engine.storage.totals.errors == 1
    engine.check_idle()


def test_an_aborted_request_leaves_nothing_reserved(backend: Backend) -> None:
    filled(WritePolicy.WRITE_THROUGH, backend)
    engine = stored(WritePolicy.WRITE_THROUGH, backend, options=PrefetchOptions("wait_complete"))
    engine.prefixes = Names(PROMPT)
    engine.arrive(PROMPT, "gone", patience_s=0)
    engine.cache.release_aborted_request(handle("gone"))
    assert engine.cache.check_prefetch_progress(handle("gone"))
    engine.check_idle()
    assert engine.storage.reserved == 0


def test_a_flush_while_a_prefix_is_read(backend: Backend) -> None:
    filled(WritePolicy.WRITE_THROUGH, backend)
    engine = stored(WritePolicy.WRITE_THROUGH, backend)
    engine.prefixes = Names(PROMPT)
    engine.arrive(PROMPT, patience_s=0)
    engine.flush()
    engine.check_idle()
    assert admit(engine, PROMPT).hit_tokens == 5 * PAGE


def test_a_storage_backend_that_cannot_be_written_costs_nothing_else(policy: WritePolicy) -> None:
    backend = Backend(fault_rate=1.0)
    engine = stored(policy, backend)
    for _ in range(2):
        engine.run(PROMPT, [7])
    push_out(engine)
    engine.settle()
    assert not backend.records
    assert admit(engine, PROMPT).hit_tokens == 5 * PAGE, "from host memory"


def test_a_page_that_was_freed_before_its_copy_was_issued_is_not_stored() -> None:
    """By the time of the copy the page's slot holds another page's bytes."""
    tiers = HostTier(PageCopies(Records(4, 1), SimpleNamespace()), reports_saved=True)
    tiers.inserted([b"a"], torch.tensor([1]))
    tiers.inserted([b"b"], torch.tensor([2]))
    tiers.copies.issue()
    assert tiers.pop_saved() == [(b"b", 0)]


def test_a_slot_is_not_filled_anew_while_it_is_written(backend: Backend) -> None:
    """One slot, and a slow disk: the first page's record holds the first page."""
    engine = TieredEngine.made(pages=16, host_pages=1, backend=backend)
    begun, go, put = threading.Event(), threading.Event(), backend.set

    def slow(key: str, record: Tensor) -> bool:
        begun.set()
        go.wait(30)
        return put(key, record)

    backend.set = slow
    first, second = PROMPT[: PAGE + 9], OTHERS[0][: PAGE + 9]
    engine.run(first, [7])
    engine.round()
    assert begun.wait(30)
    threading.Timer(0.2, go.set).start()
    engine.run(second, [7])
    engine.settle()
    digest = engine.cache.nodes.digests(key_of(first), None)[0]
    assert torch.equal(backend.records[page_key(digest)], tensor_of(name_of(first[:PAGE])))
