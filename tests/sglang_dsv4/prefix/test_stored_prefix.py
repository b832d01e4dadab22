"""The token at which a prompt leaves the stored ones, against a search of every stored path."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import pytest
from lib.prefix_replay import PAGE, tail_engine
from prefix.checked_engine import CheckedEngine, some
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from dsv4_radix_cache.accounting import PrefixReport, explain
from sglang_dsv4.prefix.stored_prefix import common_tokens, stored_tokens


def engine_of(drafts: bool = False) -> CheckedEngine:
    return CheckedEngine.of(tail_engine(full_tokens=1 << 20, device_slots=64, host_slots=64, drafts=drafts))


def report_of(engine: CheckedEngine, prompt: list[int], **how: str) -> PrefixReport:
    """Prefill a prompt and retract the request, which stores its whole pages."""
    running = engine.admit(prompt, **how)
    engine.prefill_chunk(running)
    report = running.req.tail_match.report
    engine.retract(running)
    return report


def longest_of(paths: list[list[int]], prompt: list[int]) -> tuple[int, bool]:
    """The naive model: compare the prompt with every stored path."""
    shared = [sum(1 for _ in iter_equal(path, prompt)) for path in paths]
    longest = max(shared, default=0)
    more = any(len(path) > longest for path, tokens in zip(paths, shared, strict=True) if tokens == longest)
    return longest, more and 0 < longest < len(prompt)


def iter_equal(path: list[int], prompt: list[int]) -> list[int]:
    equal = []
    for one, other in zip(path, prompt, strict=False):
        if one != other:
            break
        equal.append(one)
    return equal


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "with-an-mtp-module"])
def test_it_is_the_end_of_the_longest_stored_path(drafts: bool) -> None:
    """60 prompts that branch off others at any token, three at a time from one place, some of less than a page."""
    rng, engine = random.Random(5), engine_of(drafts)
    paths, prompts = [], [some(rng, 900)]
    for _ in range(60):
        stem = rng.choice(prompts[-40:])
        prompt = stem[: rng.randrange(len(stem) + 1)] + some(rng, rng.choice((0, 1, 3, 200, 600)))
        if not prompt:
            continue
        report = report_of(engine, prompt)
        expected, differs = longest_of(paths, prompt)
        found = report.stored_tokens, report.differs
        if drafts and not differs:  # a path of whole pages has a token more than its positions
            assert found[0] in (expected, expected - 1) and not found[1]
        else:
            assert found == (expected, differs)
        assert report.hit_tokens <= found[0]
        whole, computed = prompt, len(prompt)
        if rng.random() < 0.5:
            done = engine.run(prompt, some(rng, rng.choice((1, 100, 400))))
            whole, computed = [*done.req.origin_input_ids, *done.req.output_ids], done.length
        pages = (computed - drafts) // PAGE
        paths += [whole[: pages * PAGE + drafts]] if pages > 0 else []
        prompts.append(whole)
    assert len(paths) > 15


def test_other_namespaces_are_not_looked_at() -> None:
    rng, engine = random.Random(6), engine_of()
    prompt = some(rng, 700)
    engine.run(prompt, [7], cache_salt="a")
    other = prompt[:300] + some(rng, 300)
    assert report_of(engine, other, cache_salt="a").why == (
        "prompt differs from the stored one at token 300; reused up to token 0: no tail is kept after that"
    )
    reports = [report_of(engine, other, **how) for how in ({}, {"cache_salt": "b"}, {"extra_key": "a"})]
    assert [report.stored_tokens for report in reports] == [0, 0, 0]
    assert reports[1].why == "no stored prompt begins with the prompt's tokens under its cache_salt or extra_key"


def test_an_evicted_path_is_not_called_another_prompt() -> None:
    """The pages after a match may be evicted before the request starts."""
    rng, engine = random.Random(7), engine_of()
    prompt = some(rng, 1500)
    engine.run(prompt, [7])
    running = engine.admit(prompt[:900] + some(rng, 300))
    engine.cache.evict(EvictParams(num_tokens=1 << 19))
    engine.prefill_chunk(running)
    report = running.req.tail_match.report
    assert (report.stored_tokens, report.differs) == (768, False)
    assert report.why.startswith("prompt is stored up to token 768")
    engine.retract(running)


def node(tokens: list[int], *children: SimpleNamespace, extra_key: str | None = None) -> SimpleNamespace:
    key = RadixKey(array("q", tokens), extra_key)
    return SimpleNamespace(key=key, children=dict(enumerate(children)))


def test_the_path_goes_on_below_whole_nodes() -> None:
    """A match that was limited, for log-probabilities of the prompt, ends above stored tokens."""
    root = node([], node([1, 2], node([3, 4], node([5, 6]), node([5, 7, 8]))), node([1, 2], extra_key="other"))
    for prompt, expected in (
        ([1, 2, 3, 4, 5, 7, 9], (6, True)),
        ([1, 2, 3, 4, 5, 6, 9], (6, False)),
        ([1, 2, 3, 4, 5], (5, False)),
        ([1, 2, 9], (2, True)),
        ([9], (0, False)),
    ):
        assert stored_tokens(root, 0, RadixKey(array("q", prompt), limit=1)) == expected, prompt
    assert stored_tokens(root, 0, RadixKey(array("q", [1, 2, 3]), "other")) == (2, False)


@pytest.mark.parametrize("begin", [0, 5])
def test_common_tokens(begin: int) -> None:
    theirs = array("q", range(300))
    for length in (0, 1, 2, 255, 256, 257, 299, 300):
        prompt = array("q", [*[-1] * begin, *range(length), -7, *range(length + 1, 300)])
        assert common_tokens(theirs, prompt, begin) == length
        assert common_tokens(theirs, prompt[: begin + length], begin) == length


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ((1000, 0, 0, 999, False, (0, False)), "no stored prompt begins with the prompt's tokens"),
        ((1000, 768, 768, 999, False, (800, True)), "prompt differs from the stored one at token 800; {pages 768}"),
        ((1000, 768, 768, 999, False, (768, False)), "prompt is stored up to token 768"),
        ((1000, 768, 768, 999, False, (1000, False)), "the whole prompt is stored; {pages 768}"),
        ((1000, 256, 768, 999, False, (768, True)), "prompt differs from the stored one at token 768; {tail 256}"),
        ((1000, 256, 256, 300, False, (1000, False)), "the whole prompt is stored; {logprobs 256}"),
        ((1000, 768, 768, 999, False, (256, True)), "prompt is stored up to token 768"),  # the host had the other pages
    ],
    ids=["nothing", "differs", "goes-on", "whole", "no-tail", "limited", "from-the-host"],
)
def test_why_in_words(counts: tuple[int, int, int, int, bool, tuple[int, bool]], why: str) -> None:
    *known, stored = counts
    reasons = {
        "pages": "whole pages of 256 tokens are reused, and the last token is computed always",
        "tail": "no tail is kept after that",
        "logprobs": "log-probabilities of the prompt were asked for",
    }
    first, _, rest = why.partition("; ")
    if rest:
        name, hit = rest.strip("{}").split()
        first += f"; reused up to token {hit}: {reasons[name]}"
    report = explain(*known, "device", stored=stored)
    assert report.why == first
    assert report.as_meta()["differs_at"] == (stored[0] if "differs" in why else None)
