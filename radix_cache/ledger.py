"""The ledger: which tails each running request writes, restores and publishes, from its admission to its end.

A request is named by its request slot and the slot's generation, a number that grows with every request that gets the
slot. Calls in the life of a request:

    admit     the request has a request slot: where its prefix match ended, and at which tail. Until then the caller
              owns the `Match`, afterwards the ledger does
    resume    before its first prefill chunk: the tail to restore, if any
    extend    per prefill chunk: the tails that the chunk writes
    decode    before each decode or verify step: the tail to save from the rings first, if they hold a full page's end
    ended     its last page may be saved now
    to_publish / published   hand its tails to the tree, as far as the tree's key extends
    finished  (or aborted, or retracted): release the tails that it still holds

Positions count from 0; a request that has computed [0, n) writes position n next. Positions come from the batch: the
ledger itself remembers only how far the rings have been overwritten, because a speculative step writes more tokens than
it keeps.

Tails that the store evicts meanwhile are listed until the owner of the tree nodes asks (`pop_evicted`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dsv4_radix_cache.accounting import PrefixReport, PrefixTotals, explain
from dsv4_radix_cache.moves import TailRestore, TailWrite, TierCopy
from dsv4_radix_cache.pages import page_floor
from dsv4_radix_cache.placement import Placement
from dsv4_radix_cache.ring import WINDOW_TOKENS, chunk_rows, still_intact
from dsv4_radix_cache.tail_store import TailStore

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Match:
    """The end of a prefix match. The waiting request owns it, and after `admit` the ledger."""

    prompt_tokens: int
    tail_id: int | None  # the tail at `position`
    position: int  # [0, position) is reused from the cache; 0: nothing is reused
    block_tokens: int  # tokens whose blocks are stored, contiguously from 0
    limit_tokens: int  # the match was not allowed to go further
    salted: bool  # the request has a cache namespace of its own
    host_tokens: int = 0  # tokens of [0, position) whose pages were loaded from host memory
    storage_tokens: int = 0  # tokens of [0, position) whose pages came from the storage backend
    stored: Callable[[], tuple[int, bool]] | None = None  # the end of the longest stored path, for the account
    report: PrefixReport | None = None  # the account of the prompt, once the request runs


@dataclass
class _Request:
    generation: int
    match: Match | None
    receipt: int | None = None  # receipt of the pin on the match's tail
    started: bool = False
    may_write: bool = True  # False after a bookkeeping error: the request writes no more tails
    written_end: int = 0  # positions below it have been written, or restored
    kept: int | None = None  # begin of the last step, if the host learns it only after the step (`wrote`)
    pending: dict[int, int] = field(default_factory=dict)  # position -> tail id, written and not yet published
    decoded: int | None = None  # the pending position that decoding saved; the next page replaces it

    @property
    def prompt_tokens(self) -> int:
        return self.match.prompt_tokens if self.match else 0

    @property
    def branch(self) -> int | None:
        """The position where the request diverges from stored blocks, if its hit ended before: a branch point."""
        match = self.match
        return match.block_tokens if match and match.block_tokens > match.position else None


class Ledger:
    """The requests of one engine over one tail store, by request slot. Request slot 0, the null slot, has none.

    Attributes:
        store: the tails.
        totals: prompt tokens by their source, and bookkeeping errors; they only grow.
    """

    def __init__(
        self,
        store: TailStore,
        placement: Placement,
        ring_rows: int,
        state_rows: int,
        draft_tokens: int = 0,
        strict: bool = False,
    ) -> None:
        """Make an empty ledger.

        Args:
            store: the tails.
            placement: at which positions a prefill writes tails.
            ring_rows, state_rows: lengths of a request's rings: 128 and 8, or 256 and 16 with speculation.
            draft_tokens: tokens that a speculative step writes, not all of which are kept; 0 without speculation.
            strict: raise bookkeeping errors. Otherwise they are logged once and counted, and the request goes on
                without the tails that it has not published.
        """
        self.store = store
        self.placement = placement
        self.ring_rows = ring_rows
        self.state_rows = state_rows
        self.draft_tokens = draft_tokens
        self.strict = strict
        self.totals = PrefixTotals()
        self._requests: dict[int, _Request] = {}  # by request slot
        self._ring_saves: list[tuple[int, TailWrite]] = []  # rings of ended requests, saved before the next forward
        self._evicted: list[int] = []
        self._pins: dict[int, int] = {}  # lock receipt -> tail id

    def __len__(self) -> int:
        return len(self._requests)

    def reset(self) -> None:
        """Forget requests and tails; totals stay."""
        self.store.reset()
        for table in (self._requests, self._ring_saves, self._evicted, self._pins):
            table.clear()

    # Admission: from a match to restored rings

    def admit(self, slot: int, generation: int, match: Match | None, receipt: int | None = None) -> None:
        """Register a request that got a request slot, with its match, whose tail is pinned under `receipt`.

        May be called again before each of the request's chunks; the first call counts.
        """
        state = self._requests.get(slot)
        if state is None or state.generation != generation:
            self._drop(slot)  # the slot's former request, if `finished` was never called for it
            self._requests[slot] = _Request(generation, match, receipt)

    def pin(self, receipt: int, tail_id: int) -> None:
        """Keep a tail from being evicted until a request has resumed from it, or until `unpin(receipt)`."""
        self.store.pin(tail_id)
        self._pins[receipt] = tail_id

    def unpin(self, receipt: int | None) -> None:
        """Undo a pin, unless `resume` or the release of the tail already did."""
        tail_id = self._pins.pop(receipt, None)
        if tail_id in self.store:
            self.store.unpin(tail_id)

    def resume(self, slot: int, generation: int, begin: int) -> int | None:
        """Start a prefill chunk of a request at `begin`; call it before the first `extend` of a forward.

        Returns:
            Id of the tail to restore; None for a cold request and for a chunk that continues its request.

        Raises:
            RuntimeError: the request begins where no tail was matched, so its window rows are unknown.
        """
        self.admit(slot, generation, None)
        state = self._requests[slot]
        if state.started:
            with self._surviving(state):
                earliest = state.written_end - max(0, self.draft_tokens - 1)
                if not earliest <= begin <= state.written_end:
                    raise RuntimeError(
                        f"request slot {slot}: a chunk begins at {begin}, but the last one ended at {state.written_end}"
                    )
            return None
        match = state.match
        if begin and (match is None or match.tail_id is None or begin != match.position):
            ended = "it was never matched" if match is None else f"its match ended at {match.position}"
            raise RuntimeError(
                f"the request in slot {slot} begins at {begin}, but {ended}: its window rows are unknown"
            )
        state.started, state.written_end = True, begin
        tier = None
        if begin:
            tier = self.store.hit(match.tail_id).value
            self.unpin(state.receipt)
        if match is not None and match.prompt_tokens:
            with self._surviving(state):
                match.report = explain(
                    match.prompt_tokens,
                    begin,
                    match.block_tokens,
                    match.limit_tokens,
                    match.salted,
                    tier,
                    match.host_tokens,
                    match.storage_tokens,
                    (0, False) if match.stored is None else match.stored(),
                )
                match.stored = None  # it holds the tree's node
                self.totals.add(match.report)
        return match.tail_id if begin else None

    def restore(self, tail_id: int) -> TailRestore:
        """The position, tier and slot to read the tail from, after the copies popped so far were issued."""
        tier, slot = self.store.source(tail_id)
        return TailRestore(self.store[tail_id].position, tier, slot)

    def pop_copies(self) -> list[TierCopy]:
        """Copies between the tiers that must be issued before the next restore or write."""
        return self.store.pop_copies()

    # Writing tails

    def extend(self, slot: int, generation: int, begin: int, end: int) -> list[TailWrite]:
        """The tails that the forward over [begin, end) writes. It may evict tails, so restores come first."""
        state = self._live(slot, generation)
        assert state is not None and state.started, f"request slot {slot} has not resumed"
        state.written_end = end
        writes = []
        with self._surviving(state):
            for position in self.placement.in_chunk(begin, end, max(state.prompt_tokens, end), state.branch):
                if position in state.pending or chunk_rows(position, WINDOW_TOKENS, begin, end) is None:
                    continue
                tail_id = self._reserve(state, position)
                if tail_id is None:
                    break
                writes.append(TailWrite(position, self.device_slot(tail_id)))
        return [write for write in writes if write.position in state.pending]

    def decode(self, slot: int, generation: int, begin: int, count: int) -> TailWrite | None:
        """The tail to save from the slot's rings before the next forward writes [begin, begin + count); None if none.

        A tail is due if the last full page of [0, begin) is not saved yet and the rings still hold the rows at its end.
        A request holds at most one tail of its decoding; the tail of the next page replaces it.
        """
        state = self._started(slot, generation)
        if state is None:
            return None
        written_end = max(state.written_end, begin)
        state.written_end = max(written_end, begin + count)
        return self._full_page(state, begin, written_end)

    def wrote(self, slot: int, generation: int, begin: int, count: int) -> None:
        """Note that the last forward of a decoding request wrote [begin, begin + count), and that [0, begin) was kept.

        For a caller that learns `begin` only when the forward is over; it calls `decoded_page` in place of `decode`.
        Rings must be long enough for two steps: rings widened for up to 6 tokens a step are.
        """
        state = self._started(slot, generation)
        if state is not None:
            state.kept, state.written_end = begin, max(state.written_end, begin + count)

    def decoded_page(self, slot: int, generation: int) -> TailWrite | None:
        """The tail to save from the slot's rings before its next forward, by the `begin` that `wrote` noted."""
        state = self._started(slot, generation)
        return None if state is None or state.kept is None else self._full_page(state, state.kept, state.written_end)

    def _started(self, slot: int, generation: int) -> _Request | None:
        """The request, once it has resumed; None if it was prefilled before a reset, and for a warm-up batch."""
        state = self._live(slot, generation)
        return state if state is not None and state.started else None

    def _full_page(self, state: _Request, begin: int, written_end: int) -> TailWrite | None:
        """The tail to save of the last full page of [0, begin); None if it is saved or the rings have lost it."""
        position = page_floor(begin)
        if not position or position in state.pending or position <= (state.decoded or state.prompt_tokens):
            return None
        if not still_intact(position, written_end, self.ring_rows, self.state_rows):
            return None
        with self._surviving(state):
            if state.decoded is not None:
                self.store.release(state.pending.pop(state.decoded))
                state.decoded = None
            tail_id = self._reserve(state, position)
            if tail_id is not None:
                state.decoded = position
                return TailWrite(position, self.device_slot(tail_id))
        return None

    def reserve(self, position: int) -> int | None:
        """Id of a new tail with a device slot for bytes that come from the storage backend; None if no slot is free.

        The caller publishes it.
        """
        tail, evicted = self.store.reserve(position)
        self._evicted += evicted
        return None if tail is None else tail.id

    def device_slot(self, tail_id: int) -> int | None:
        """The tail's device slot; None if only the host has it."""
        return self.store[tail_id].device_slot

    def pop_ring_saves(self) -> list[tuple[int, TailWrite]]:
        """(request slot, tail to write) of rings to be saved before any other work of the next forward."""
        saves, self._ring_saves = self._ring_saves, []
        return saves

    def pop_evicted(self) -> list[int]:
        """Ids of published tails that were evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    # The end: a request's tails go to the tree or back to the store

    def ended(self, slot: int, generation: int, length: int) -> None:
        """Note that a request ends with [0, length) computed; queue the save of its last full page, if the rings hold
        it. The save precedes every write of the next forward, so the slot may go to another request."""
        state = self._live(slot, generation)
        if state is not None:  # one step may have written beyond the end, and another may be under way
            state.written_end = max(state.written_end, length + 2 * self.draft_tokens)
        write = self.decode(slot, generation, length, 0)
        if write is not None:
            self._ring_saves.append((slot, write))

    def to_publish(self, slot: int, generation: int, up_to: int) -> list[tuple[int, int]]:
        """(position, tail id) of the tails that the request wrote in (0, up_to], deepest first; the request holds them
        until `published`."""
        state = self._live(slot, generation)
        return sorted(((p, i) for p, i in state.pending.items() if p <= up_to), reverse=True) if state else []

    def published(self, slot: int, position: int) -> None:
        """Note that the tree has a tail at `position`: that of the request in `slot`, or of an earlier request."""
        state = self._requests[slot]
        del state.pending[position]
        if state.decoded == position:
            state.decoded = None

    def finished(self, slot: int, generation: int) -> None:
        """The request ended or was retracted: release its unpublished tails. Unknown requests are ignored."""
        if self._live(slot, generation) is not None:
            self._drop(slot)

    # Inside

    def _live(self, slot: int, generation: int) -> _Request | None:
        state = self._requests.get(slot)
        return state if state is not None and state.generation == generation else None

    def _drop(self, slot: int) -> None:
        state = self._requests.pop(slot, None)
        if state is not None:
            self._release_pending(state)

    def _release_pending(self, state: _Request) -> None:
        for tail_id in state.pending.values():
            if tail_id in self.store:
                self.store.release(tail_id)
        state.pending.clear()
        state.decoded = None

    def _reserve(self, state: _Request, position: int) -> int | None:
        if not state.may_write:
            return None
        tail_id = self.reserve(position)
        if tail_id is not None:
            state.pending[position] = tail_id
        return tail_id

    @contextmanager
    def _surviving(self, state: _Request) -> Iterator[None]:
        """Context in which a bookkeeping error costs the request its unpublished tails; the server goes on."""
        try:
            yield
        except Exception:
            if self.strict:
                raise
            if not self.totals.errors:
                logger.exception("tails: a bookkeeping error; the server goes on, further ones are counted")
            self.totals.errors += 1
            self._release_pending(state)
            state.may_write = False
