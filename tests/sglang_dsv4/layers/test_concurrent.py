"""Sublayers with concurrent parts: accesses to the same memory are ordered, and bits stay the same.

Streams are simulated on a CPU: each has a vector clock of the work that is ordered before it, and every operator's
inputs and outputs are compared with earlier accesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from model.oracle import QUANTISABLE
from model.served import Served
from selection.marks import with_slow_marks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_kernels.host import joint_launch
from sglang_dsv4.layers import attention, concurrent, moe

PROMPT, DECODE_FROM = 150, 141


@dataclass
class Stream:
    """A simulated stream."""

    name: str
    device_index: int = 0
    clock: dict[str, int] = field(default_factory=dict)

    def wait_stream(self, other: Stream) -> None:
        for name, time in other.clock.items():
            self.clock[name] = max(time, self.clock.get(name, 0))

    def tick(self) -> tuple[str, int]:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.name, self.clock[self.name]

    def knows(self, event: tuple[str, int]) -> bool:
        return self.clock.get(event[0], 0) >= event[1]


@dataclass
class Access:
    begin: int
    end: int
    writes: bool
    event: tuple[str, int]


class Races(TorchDispatchMode):
    """Finds two accesses to the same bytes, at least one a write, that no wait orders."""

    def __init__(self, streams: list[Stream]) -> None:
        super().__init__()
        self.streams = streams  # the last one is the current stream
        self.accesses: list[Access] = []
        self.found: list[str] = []
        self.used: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        current = self.streams[-1]
        event = current.tick()
        self.used[current.name] = self.used.get(current.name, 0) + 1
        written = [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        seen = {id(x) for x in tensors(written)}
        for x in tensors((args, kwargs)):
            self.note(x, id(x) in seen, event, str(func))
        result = func(*args, **kwargs)
        given = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        for x in tensors(result):
            if x.untyped_storage()._cdata not in given and x.numel():
                begin, end = extent(x)  # new memory: a stream-aware allocator shares it with no other stream
                self.accesses = [a for a in self.accesses if a.end <= begin or end <= a.begin]
                self.accesses.append(Access(begin, end, True, event))
        return result

    def note(self, x: Tensor, writes: bool, event: tuple[str, int], what: str) -> None:
        if not x.numel():
            return
        (begin, end), current = extent(x), self.streams[-1]
        kept = []
        for other in self.accesses:
            known = current.knows(other.event)
            if other.begin < end and begin < other.end and (writes or other.writes) and not known:
                self.found.append(f"{what} on {current.name} beside {other.event}")
            if not known or (other.writes and not writes):  # a read does not hide a write from other streams
                kept.append(other)
        self.accesses = [*kept, Access(begin, end, writes, event)]


def extent(x: Tensor) -> tuple[int, int]:
    """Addresses [begin, end) of a tensor's bytes."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)


@pytest.fixture(scope="module")
def served(serve: Callable[..., Served]) -> Served:
    return serve("flash-like", dtype="float32", qat="full", **QUANTISABLE)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Simulate a GPU that is capturing a graph, with two streams for parts of any number of tokens."""
    main, side = Stream("main"), Stream("side")
    active = [main]

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        active.append(stream)
        yield
        active.pop()

    monkeypatch.setattr(concurrent, "is_on", lambda: False)
    monkeypatch.setattr(concurrent, "_side_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: active[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return active


def run(served: Served) -> Tensor:
    return served.harness.run(served.corpus[0][:PROMPT], 140, decode_from=DECODE_FROM)


def test_no_access_is_unordered(served: Served, request: pytest.FixtureRequest) -> None:
    expected = run(served)
    races = Races(request.getfixturevalue("streams"))
    with races:
        found = run(served)
    assert torch.equal(found, expected) and not races.found
    assert races.used["side"] > races.used["main"] / 20


@pytest.mark.parametrize("missing", with_slow_marks([0, 1], quick=[0]), ids=["begins_too_early", "ends_too_late"])
def test_a_missing_wait_is_found(
    served: Served, streams: list[Stream], missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, original = [0], Stream.wait_stream

    def wait(self: Stream, other: Stream) -> None:
        waits[0] += 1
        if waits[0] % 2 != (1 - missing):
            original(self, other)

    monkeypatch.setattr(Stream, "wait_stream", wait)
    with Races(streams) as races:
        run(served)
    assert races.found


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, True])
def test_parts_of_a_joint_launch_are_independent(
    served: Served, streams: list[Stream], planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call on a stream of its own, which waits for none of the others; a call that reads another one's result is
    found."""
    names = ("first", "second", "third")
    parts = [0]

    def together(tokens: int, *calls: Callable[[], Any] | None, products: bool = False) -> tuple:
        origin, results, ran = streams[-1], [], []
        parts[0] = max(parts[0], len(calls))
        for name, call in zip(names, calls, strict=False):
            ran.append(Stream(name, clock=dict(origin.clock)))
            with torch.cuda.stream(ran[-1]):
                results.append(call and call())
                if planted and call is not None and isinstance(results[0], Tensor):
                    results[0].sum()
        for stream in ran:
            origin.wait_stream(stream)
            stream.clock.pop(stream.name, None)
        return tuple(results)

    expected = run(served)
    for module in (attention, moe):
        monkeypatch.setattr(module, "together", together)
    with Races(streams) as races:
        found = run(served)
    assert torch.equal(found, expected) and parts == [3]
    assert bool(races.found) == planted, races.found[:3]


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("word", ["on", "off"])
@pytest.mark.parametrize(("major", "most"), [(None, 16), (9, 16), (10, 64)], ids=["cpu", "hopper", "blackwell"])
def test_few_tokens_join_their_launches(
    major: int | None, most: int, word: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a number of tokens for each generation; Blackwell's products never."""
    monkeypatch.setenv(concurrent.VARIABLE, word)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: major is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    answers = concurrent.is_on, concurrent._is_blackwell
    for answer in answers:
        answer.cache_clear()
    calls = joint_launch.is_open, None, joint_launch.is_open
    found, products = (concurrent.together(most + more, *calls, products=products) for products in (False, True))
    for answer in answers:
        answer.cache_clear()
    joined = word == "on" and not more
    assert found == (joined, None, joined)
    assert products == (found if major != 10 else (False, None, False))


def test_products_of_blackwell_run_on_two_streams(streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph of few tokens, also where other kernels join their launches."""
    monkeypatch.setattr(concurrent, "is_on", lambda: True)
    monkeypatch.setattr(concurrent, "_is_blackwell", lambda: True)
    names = concurrent.together(1, *[lambda: streams[-1].name] * 2, products=True)
    assert names == ("main", "side") and concurrent.together(1, joint_launch.is_open) == (True,)


def test_another_word_of_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(concurrent.VARIABLE, "1")
    concurrent.is_on.cache_clear()
    with pytest.raises(ValueError, match="SGLANG_DSV4_JOINT_LAUNCH must be 'on' or 'off', got '1'"):
        concurrent.is_on()


def test_outside_of_a_graph_one_follows_the_other(streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    order = []
    assert concurrent.side_by_side(lambda: order.append(1) or "a", lambda: order.append(2) or "b", 1) == ("a", "b")
    assert order == [1, 2] and not streams[0].clock


@pytest.mark.parametrize("more", [0, 1])
def test_many_tokens_stay_on_one_stream(streams: list[Stream], more: int) -> None:
    used = []
    concurrent.side_by_side(lambda: None, lambda: used.append(streams[-1].name), concurrent.MOST_TOKENS + more)
    assert used == [["side", "main"][more]]
