"""A limit on the time in which a grammar is compiled: JSON schemas, structural tags, regular expressions, EBNF.

A grammar of a few kilobytes can take minutes, and a compilation can't be stopped. SGLang 0.5.23 compiles in a pool of
threads, refuses a request after a number of rounds of its scheduler, and then refuses that grammar for good; the pool
stays busy. Here:

* a request ends with a 400 once its grammar has been compiled for SECONDS, the wait for a thread included;
* that compilation goes on, and a request with the same grammar is refused at once while it does. Afterwards the result
  is used;
* requests with the same grammar share a compilation;
* compilations beyond the limit occupy at most half of the threads. As long as they do, requests with a grammar that is
  not known yet are refused at once;
* the threads have a lower priority than the scheduler.

Ranks of tensor parallelism compile for themselves and must decide alike. Nothing here decides alone: a rank only marks
a request of SGLang's queue of grammars as failed, and SGLang's exchange of these marks fails it on all ranks. A rank's
own knowledge (is it compiled, is a thread free) never enters SGLang's cache of grammars.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sglang_dsv4 import env
from sglang_dsv4.seam import compat
from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
    from sglang.srt.constrained.grammar_manager import GrammarManager
    from sglang.srt.managers.schedule_batch import Req

SECONDS = "SGLANG_DSV4_GRAMMAR_SECONDS"
DEFAULT_SECONDS = 30
NICE = 5
"""Number added to the niceness of a thread that compiles, and of the threads that it starts."""
MOST_KEPT = 16
"""Grammars that are kept for a request that sends them again, of those that were compiled after their requests had been
refused."""
TIMED_OUT = "Grammar preprocessing timed out"
"""How SGLang's reason for a failed request of its queue begins."""
SHOWN = 100
"""Characters of a grammar in SGLang's log lines."""

Key = tuple[str, str]  # SGLang's: the kind of grammar, and its text
Name = tuple[Key, bool]  # the latter: whether the answer begins with a thought


def limit_s() -> int | None:
    """Seconds that a grammar may be compiled for; None without a limit.

    Raises:
        ValueError: the switch holds no number of at least 0.
    """
    seconds = env.number(SECONDS)
    return DEFAULT_SECONDS if seconds is None else seconds or None


@dataclass
class Compilation:
    """A grammar that is being compiled, or was compiled and whose result no request has got yet."""

    result: Future
    since: float = field(default_factory=time.monotonic)
    is_beyond: bool = False  # a request has been refused because of it
    is_left: bool = False  # its requests have been aborted
    _is_given: bool = False
    _giving: threading.Lock = field(default_factory=threading.Lock)

    def give(self) -> Any:
        """The grammar object, which follows one answer: to a second request a copy of it."""
        with self._giving:
            first, self._is_given = not self._is_given, True
        return self.result.result() if first else self.result.result().copy()


class Waiting(Future):
    """A request's wait for a grammar. To cancel it does not concern other requests with that grammar.

    Attributes:
        name: of the compilation.
        compilation: None if no thread may be used.
    """

    def __init__(self, name: Name, compilation: Compilation | None) -> None:
        super().__init__()
        self.name, self.compilation = name, compilation
        if compilation is not None:
            compilation.result.add_done_callback(self._end)

    def _end(self, result: Future) -> None:
        if not self.set_running_or_notify_cancel():
            return
        if result.cancelled():
            self.set_exception(RuntimeError("the compilation was not begun"))
        elif (error := result.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(self.compilation.give())


class Compilations:
    """The compilations of a grammar backend in this process.

    Args:
        limit_s: seconds that a grammar may be compiled for.
        threads: compilations at a time.
    """

    def __init__(self, limit_s: float, threads: int) -> None:
        self.limit_s, self.most_beyond = limit_s, max(1, threads // 2)
        self._pool = ThreadPoolExecutor(threads, "grammar", initializer=lower_priority)
        self._known: dict[Name, Compilation] = {}

    def ask(self, key: Key, reasoning: bool, compile_it: Callable[[Key, bool], Any]) -> Waiting:
        """A request's wait for a grammar: for a compilation that is known, else for a new one, if a thread may be
        used."""
        name = key, reasoning
        compilation = self._known.get(name)
        if compilation is None or compilation.result.cancelled():
            if self.beyond() >= self.most_beyond:
                return Waiting(name, None)
            compilation = self._known[name] = Compilation(self._pool.submit(compile_it, key, reasoning))
        compilation.is_left = False
        return Waiting(name, compilation)

    def beyond(self) -> int:
        """Compilations that run although their requests have been refused or aborted."""
        return sum((one.is_beyond or one.is_left) and not one.result.done() for one in self._known.values())

    def is_due(self, waiting: Waiting) -> bool:
        """Whether the request must be refused now."""
        if waiting.done():
            return False
        return waiting.compilation is None or time.monotonic() - waiting.compilation.since >= self.limit_s

    def refuse(self, waiting: Waiting, kind: str, characters: int) -> str:
        """Note that the request of a grammar is refused, on this or on another rank; returns the reason."""
        limit = f"{self.limit_s} s ({SECONDS})"
        if waiting.compilation is None:
            return (
                f"Grammars that take longer than {limit} are being compiled, as many as may be at a time: send this "
                f"{kind} grammar again later."
            )
        if not waiting.compilation.result.cancel():
            waiting.compilation.is_beyond = True
        return (
            f"This {kind} grammar of {characters} characters takes longer than {limit} to compile. Send a simpler one, "
            "or send it again later: its compilation goes on."
        )

    def got(self, waiting: Waiting) -> None:
        """Note that the request has its grammar on all ranks, which is in SGLang's cache now."""
        self._known.pop(waiting.name, None)

    def keep(self, asked: set[Name]) -> None:
        """Forget compilations that no request waits for, except those that run, and the last MOST_KEPT that ended
        beyond the limit.

        Args:
            asked: those that requests wait for.
        """
        kept = []
        for name in [name for name in self._known if name not in asked]:
            one = self._known[name]
            one.is_left = not one.result.done() and not one.result.cancel()
            if one.result.done() and one.is_beyond and not one.result.cancelled():
                kept.append(name)
            elif not one.is_left:
                del self._known[name]
        for name in kept[:-MOST_KEPT]:
            del self._known[name]


_of_backend: WeakKeyDictionary[BaseGrammarBackend, Compilations] = WeakKeyDictionary()


def lower_priority() -> None:
    """Give this thread, and those that it starts, a lower priority than the process has."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICE))


def compile_within_limit(
    original: Callable[..., tuple[Any, bool]], backend: BaseGrammarBackend, key: Key, require_reasoning: bool
) -> tuple[Any, bool]:
    """A grammar of SGLang's cache and True, or a request's wait for it and False.

    Around `BaseGrammarBackend.get_cached_or_future_value`.
    """
    limit = limit_s()
    if live_parts() is None or limit is None or backend.cache.get(key):
        return original(backend, key, require_reasoning)
    compile_it, threads = compat.grammar_compiler(backend)
    if backend not in _of_backend:
        _of_backend[backend] = Compilations(limit, threads)
    return _of_backend[backend].ask(key, require_reasoning, compile_it), False


def refuse_slow_grammars(original: Callable[..., list[Req]], manager: GrammarManager) -> list[Req]:
    """The requests of the queue whose grammars are there, or that have failed; around
    `GrammarManager.get_ready_grammar_requests`."""
    compilations = _of_backend.get(manager.grammar_backend)
    if compilations is None:
        return original(manager)
    waiting = {id(req): (req.grammar, req.grammar_key) for req in manager.grammar_queue if is_waiting(req)}
    # The first stage of a pipeline decides, and SGLang sends its decision to the others.
    for req in [req for req in manager.grammar_queue if is_waiting(req) and manager.pp_rank == 0]:
        req.grammar_wait_ct = 0  # SGLang's limit, in rounds of the scheduler
        if compilations.is_due(req.grammar):
            kind, text = req.grammar_key
            req.grammar = Future()  # SGLang would take a grammar that is compiled while it looks
            req.grammar_wait_ct = manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS
            req.grammar_key = (kind, text if len(text) <= SHOWN else f"{text[:SHOWN]}…")
    ended = original(manager)
    for req in ended:
        if id(req) not in waiting:
            continue
        grammar, (kind, text) = waiting[id(req)]
        if (getattr(req.to_finish, "message", None) or "").startswith(TIMED_OUT):
            for key in (req.grammar_key, (kind, text)):
                manager.grammar_backend.cache.pop(key, None)
            req.to_finish.message = compilations.refuse(grammar, kind, len(text))
        else:
            compilations.got(grammar)
    compilations.keep({req.grammar.name for req in filter(is_waiting, manager.grammar_queue)})
    return ended


def is_waiting(req: Req) -> bool:
    """Whether a request of the queue waits for a grammar, and has not been aborted."""
    return isinstance(req.grammar, Waiting) and not req.finished()
