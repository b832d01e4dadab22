"""What each running request owes to and gets from the checkpoint store, from its admission to its end.

Life of a request here. It is named by its request slot and the slot's generation, a number that grows with every
request that gets the slot:

    admit     the request has a slot: where its prefix ends and which checkpoint that is. The caller owns the `Match`
              until then; from here on the ledger does
    resume    before its first prefill chunk: the checkpoint to restore, if any
    extend    per prefill chunk: which positions to write
    decode    before each token is written: whether the ring must be saved first, because a page is full
    ended         its last page may be saved now
    to_publish / published   hand what it wrote to the tree, as far as the tree's key reaches
    finished  (or aborted, or retracted): give back what it still holds

Positions count from 0; a request which has [0, n) computed writes position n next. They come from the batch: the ledger
remembers only how far the rings have been overwritten, because a speculative step writes more than it keeps.

Checkpoints that the store loses on the way are kept in a list until whoever has them on tree nodes asks (`take_lost`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dsv4_radix_cache.accounting import PrefixReport, PrefixTotals, explain
from dsv4_radix_cache.placement import Placement
from dsv4_radix_cache.ring import PAGE_TOKENS, WINDOW_TOKENS, chunk_rows, still_intact
from dsv4_radix_cache.store import CheckpointStore, Copy, Tier

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Write:
    """A checkpoint to be written at `position` into a device slot."""

    position: int
    device_slot: int


@dataclass(frozen=True)
class Restore:
    """A checkpoint at `position` to be read from a slot of `tier` into the rings of a request."""

    position: int
    tier: Tier
    slot: int


@dataclass(eq=False)
class Match:
    """Where a prefix match ended. It belongs to the waiting request, and with `admit` to the ledger."""

    prompt_tokens: int
    checkpoint_id: int | None  # the checkpoint at `position`
    position: int  # [0, position) is taken from the cache; 0: nothing
    block_tokens: int  # tokens whose blocks are stored, in a row from 0
    limit_tokens: int  # the match was not allowed to go further
    salted: bool  # the request has a cache namespace of its own
    host_tokens: int = 0  # of [0, position): their pages were loaded from host memory
    storage_tokens: int = 0  # of [0, position): their pages came from the storage
    report: PrefixReport | None = None  # the account of the prompt, once it runs


@dataclass
class _Request:
    generation: int
    match: Match | None
    receipt: int | None = None  # of the pin on the match's checkpoint
    started: bool = False
    taking: bool = True  # False after a bookkeeping error: it takes no more checkpoints
    written_end: int = 0  # positions below it have been written, or restored
    kept: int | None = None  # where the last step began whose beginning was learnt afterwards
    pending: dict[int, int] = field(default_factory=dict)  # position -> checkpoint id, written and not yet published
    decoded: int | None = None  # the pending position that decode took; the next page replaces it

    @property
    def prompt_tokens(self) -> int:
        return self.match.prompt_tokens if self.match else 0

    @property
    def branch(self) -> int | None:
        """Where it left a stored stretch without finding a checkpoint: a learned branch point."""
        match = self.match
        return match.block_tokens if match and match.block_tokens > match.position else None


class TailRequests:
    """The requests of one engine over one store, by request slot. Request slot 0, the null slot, has none.

    Attributes:
        store: the checkpoints.
        totals: prompt tokens by where they came from, and bookkeeping errors; only ever grow.
    """

    def __init__(
        self,
        store: CheckpointStore,
        placement: Placement,
        ring_rows: int,
        state_rows: int,
        draft_tokens: int = 0,
        strict: bool = True,
    ) -> None:
        """Make an empty ledger.

        Args:
            store: the checkpoints.
            placement: where a prefill leaves checkpoints.
            ring_rows, state_rows: of a request's rings: 128 and 8, or 256 and 16 with speculation.
            draft_tokens: what a speculative step writes, not all of which is kept; 0 without speculation.
            strict: a bookkeeping error is raised. Otherwise it is logged once and counted, and the request goes on
                without the checkpoints that it has not published.
        """
        self.store = store
        self.placement = placement
        self.ring_rows = ring_rows
        self.state_rows = state_rows
        self.draft_tokens = draft_tokens
        self.strict = strict
        self.totals = PrefixTotals()
        self._requests: dict[int, _Request] = {}  # by request slot
        self._snapshots: list[tuple[int, Write]] = []  # rings of ended requests, saved before the next forward
        self._lost: list[int] = []
        self._pins: dict[int, int] = {}  # lock receipt -> checkpoint id

    def __len__(self) -> int:
        return len(self._requests)

    def reset(self) -> None:
        """Forget requests and checkpoints; totals stay."""
        self.store.reset()
        for table in (self._requests, self._snapshots, self._lost, self._pins):
            table.clear()

    # Admission: from a match to restored rings

    def admit(self, slot: int, generation: int, match: Match | None, receipt: int | None = None) -> None:
        """A request with this match, pinned under `receipt`, got a request slot.

        May be said again before each of its chunks; the first call counts.
        """
        state = self._requests.get(slot)
        if state is None or state.generation != generation:
            self._drop(slot)  # of a request that was never said to be finished
            self._requests[slot] = _Request(generation, match, receipt)

    def pin(self, receipt: int, checkpoint_id: int) -> None:
        """Keep a checkpoint from being lost until a request has resumed from it, or until `unpin(receipt)`."""
        self.store.pin(checkpoint_id)
        self._pins[receipt] = checkpoint_id

    def unpin(self, receipt: int | None) -> None:
        """Undo a pin, unless `resume` or the loss of the checkpoint already did."""
        checkpoint_id = self._pins.pop(receipt, None)
        if checkpoint_id in self.store:
            self.store.unpin(checkpoint_id)

    def resume(self, slot: int, generation: int, begin: int) -> int | None:
        """A prefill chunk of a request begins at `begin`; call it before the first `extend` of a forward.

        Returns:
            The checkpoint to restore, or None if there is none to (a cold request, or a chunk which continues one).

        Raises:
            RuntimeError: the request begins where no checkpoint was matched: what its window rows are is unknown.
        """
        self.admit(slot, generation, None)
        state = self._requests[slot]
        if state.started:
            with self._surviving(state):
                behind = state.written_end - max(0, self.draft_tokens - 1)
                if not behind <= begin <= state.written_end:
                    raise RuntimeError(
                        f"request slot {slot}: a chunk begins at {begin}, but the last one ended at {state.written_end}"
                    )
            return None
        match = state.match
        if begin and (match is None or match.checkpoint_id is None or begin != match.position):
            ended = "it was never matched" if match is None else f"its match ended at {match.position}"
            raise RuntimeError(
                f"the request in slot {slot} begins at {begin}, but {ended}: its window rows are unknown"
            )
        state.started, state.written_end = True, begin
        tier = None
        if begin:
            tier = self.store.hit(match.checkpoint_id).value
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
                )
                self.totals.add(match.report)
        return match.checkpoint_id if begin else None

    def restore(self, checkpoint_id: int) -> Restore:
        """Where to read it from, after `copies` were issued."""
        tier, slot = self.store.source(checkpoint_id)
        return Restore(self.store[checkpoint_id].position, tier, slot)

    def copies(self) -> list[Copy]:
        """Copies between the tiers that must be issued before the next restore or write."""
        return self.store.take_copies()

    # Taking checkpoints

    def extend(self, slot: int, generation: int, begin: int, end: int) -> list[Write]:
        """The checkpoints that the forward over [begin, end) writes. May evict, so restores come first."""
        state = self._live(slot, generation)
        assert state is not None and state.started, f"request slot {slot} has not resumed"
        state.written_end = end
        writes = []
        with self._surviving(state):
            for position in self.placement.in_chunk(begin, end, max(state.prompt_tokens, end), state.branch):
                if position in state.pending or chunk_rows(position, WINDOW_TOKENS, begin, end) is None:
                    continue
                checkpoint_id = self._reserve(state, position)
                if checkpoint_id is None:
                    break
                writes.append(Write(position, self.store[checkpoint_id].device_slot))
        return [write for write in writes if write.position in state.pending]

    def decode(self, slot: int, generation: int, begin: int, count: int) -> Write | None:
        """The next forward writes [begin, begin + count): what is to be saved of the slot's rings first, or None.

        Something is when [0, begin) reaches a page boundary whose rows are still in the rings. A request holds one
        checkpoint of its decoding at most; the next page replaces it.
        """
        state = self._started(slot, generation)
        if state is None:
            return None
        written_end = max(state.written_end, begin)
        state.written_end = max(written_end, begin + count)
        return self._full_page(state, begin, written_end)

    def wrote(self, slot: int, generation: int, begin: int, count: int) -> None:
        """The last forward of a request that decodes wrote [begin, begin + count), and [0, begin) was kept.

        For a caller that learns of `begin` only when the forward is over; `decoded_page` then takes the place of
        `decode`. Rings must be wide enough for two steps: those widened for up to 6 tokens a step are.
        """
        state = self._started(slot, generation)
        if state is not None:
            state.kept, state.written_end = begin, max(state.written_end, begin + count)

    def decoded_page(self, slot: int, generation: int) -> Write | None:
        """What is to be saved of the slot's rings before its next forward, by what is known of its last one."""
        state = self._started(slot, generation)
        return None if state is None or state.kept is None else self._full_page(state, state.kept, state.written_end)

    def _started(self, slot: int, generation: int) -> _Request | None:
        """None for one that was prefilled before this ledger was reset, or by nobody (a warm-up batch)."""
        state = self._live(slot, generation)
        return state if state is not None and state.started else None

    def _full_page(self, state: _Request, begin: int, written_end: int) -> Write | None:
        """The last page of [0, begin), if it is not saved yet and the rings, written up to `written_end`, hold it."""
        position = begin // PAGE_TOKENS * PAGE_TOKENS
        if not position or position in state.pending or position <= (state.decoded or state.prompt_tokens):
            return None
        if not still_intact(position, written_end, self.ring_rows, self.state_rows):
            return None
        with self._surviving(state):
            if state.decoded is not None:
                self.store.release(state.pending.pop(state.decoded))
                state.decoded = None
            checkpoint_id = self._reserve(state, position)
            if checkpoint_id is not None:
                state.decoded = position
                return Write(position, self.store[checkpoint_id].device_slot)
        return None

    def adopt(self, position: int) -> int | None:
        """A device slot's checkpoint for bytes that come from elsewhere; whoever asked publishes it. None: no slot."""
        checkpoint, lost = self.store.reserve(position)
        self._lost += lost
        return None if checkpoint is None else checkpoint.id

    def take_snapshots(self) -> list[tuple[int, Write]]:
        """Rings (request slot, where to) to be saved before anything else of the next forward."""
        snapshots, self._snapshots = self._snapshots, []
        return snapshots

    def take_lost(self) -> list[int]:
        """Published checkpoints that were lost since the last call, to make room for others."""
        lost, self._lost = self._lost, []
        return lost

    # The end: what it took goes to the tree or back to the store

    def ended(self, slot: int, generation: int, length: int) -> None:
        """A request ends with [0, length) computed. If that fills its last page exactly, no later forward has saved the
        ring: it is saved before the next one, whoever gets the slot."""
        state = self._live(slot, generation)
        if state is not None:  # one step may have written behind the end, and one more be under way
            state.written_end = max(state.written_end, length + 2 * self.draft_tokens)
        write = self.decode(slot, generation, length, 0)
        if write is not None:
            self._snapshots.append((slot, write))

    def to_publish(self, slot: int, generation: int, up_to: int) -> list[tuple[int, int]]:
        """(position, checkpoint id) of what the request wrote in (0, up_to], deepest first; they remain its own until
        `published`."""
        state = self._live(slot, generation)
        return sorted(((p, i) for p, i in state.pending.items() if p <= up_to), reverse=True) if state else []

    def published(self, slot: int, position: int) -> None:
        """The tree took the checkpoint at `position` of the request in `slot`, or had one there."""
        state = self._requests[slot]
        del state.pending[position]
        if state.decoded == position:
            state.decoded = None

    def finished(self, slot: int, generation: int) -> None:
        """The request ended or was retracted: release what it wrote and didn't publish. Unknown requests are fine."""
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
        for checkpoint_id in state.pending.values():
            if checkpoint_id in self.store:
                self.store.release(checkpoint_id)
        state.pending.clear()
        state.decoded = None

    def _reserve(self, state: _Request, position: int) -> int | None:
        if not state.taking:
            return None
        checkpoint, lost = self.store.reserve(position)
        self._lost += lost
        if checkpoint is None:
            return None
        state.pending[position] = checkpoint.id
        return checkpoint.id

    @contextmanager
    def _surviving(self, state: _Request) -> Iterator[None]:
        """A bookkeeping error inside costs the request its checkpoints, and not the server its life."""
        try:
            yield
        except Exception:
            if self.strict:
                raise
            if not self.totals.errors:
                logger.exception("tail checkpoints: a bookkeeping error; the server goes on, further ones are counted")
            self.totals.errors += 1
            self._release_pending(state)
            state.taking = False
