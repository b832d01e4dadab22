"""What each running request owes to and gets from the checkpoint store, from its match to its end.

Life of a request here:

    matched   (any number of times, the last one counts)   where its prefix ends and which checkpoint that is
    extend    per prefill chunk: resume from the checkpoint before the first one, and which positions to write
    decode    before each token is written: whether the ring must be saved first, because a page is full
    ended         its last page may be saved now
    to_publish / published   hand what it wrote to the tree, as far as the tree's key reaches
    finished  (or aborted, or retracted): give back what it still holds

Positions count from 0; a request which has [0, n) computed writes position n next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from dsv4_radix_cache.accounting import PrefixReport, explain
from dsv4_radix_cache.placement import Placement
from dsv4_radix_cache.ring import PAGE_TOKENS, WINDOW_TOKENS, chunk_rows, still_intact
from dsv4_radix_cache.store import CheckpointStore, Copy, Tier


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
    """Where a prefix match ended. The caller keeps it for as long as the request exists; we only refer to it weakly, so
    that a request which is dropped from the queue leaves nothing behind."""

    prompt_tokens: int
    checkpoint_id: int | None  # the checkpoint at `position`
    position: int  # [0, position) is taken from the cache; 0: nothing
    block_tokens: int  # tokens whose blocks are stored, in a row from 0
    limit_tokens: int  # the match was not allowed to go further
    salted: bool  # the request has a cache namespace of its own
    report: PrefixReport | None = None  # the account of the prompt, once it runs


@dataclass
class _Request:
    match: Match | None
    slot: int  # its request slot: where its rings are
    written_end: int  # positions below it have been written, or restored
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
    """The requests of one engine, keyed by their id, over one store."""

    def __init__(
        self, store: CheckpointStore, placement: Placement, ring_rows: int, state_rows: int, draft_tokens: int = 0
    ) -> None:
        """`ring_rows` and `state_rows` of a request's rings: 128 and 8, or 256 and 16 with speculation, which writes
        up to `draft_tokens` a step, not all of which are kept."""
        self.store = store
        self.placement = placement
        self.ring_rows = ring_rows
        self.state_rows = state_rows
        self.draft_tokens = draft_tokens
        self.on_lost: Callable[[list[int]], None] = lambda lost: None
        self.on_resumed: Callable[[int], None] = lambda checkpoint_id: None
        self.skipped = 0  # page boundaries that decode passed without a checkpoint
        self._requests: dict[str, _Request] = {}
        self._snapshots: list[tuple[int, Write]] = []  # rings of ended requests, saved before the next forward
        self._matches: WeakValueDictionary[str, Match] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._requests)

    def reset(self) -> None:
        """Forget requests and checkpoints."""
        self.store.reset()
        self._requests.clear()
        self._matches.clear()
        self._snapshots.clear()

    def matched(self, request: str, match: Match) -> None:
        """A prefix match of a request; the last one before it runs counts."""
        self._matches[request] = match

    def resume(self, request: str, slot: int, begin: int) -> tuple[int | None, PrefixReport | None]:
        """A chunk of a request in slot `slot` begins at `begin`; call it before the first `extend` of a forward.

        Returns:
            The checkpoint to restore, or None if there is none to (a cold request, or a chunk which continues one);
            and the account of the prompt, once per admission.

        Raises:
            RuntimeError: the request begins where no checkpoint was matched, or not where its last chunk ended.
        """
        state = self._requests.get(request)
        if state is not None:
            if begin != state.written_end:
                raise RuntimeError(
                    f"request {request}: a chunk begins at {begin}, but the last one ended at {state.written_end}"
                )
            return None, None
        match = self._matches.get(request)
        if begin and (match is None or match.checkpoint_id is None or begin != match.position):
            ended = "it was never matched" if match is None else f"its match ended at {match.position}"
            raise RuntimeError(f"request {request} begins at {begin}, but {ended}: its window rows are unknown")
        self._requests[request] = _Request(match, slot, begin)
        tier = None
        if begin:
            tier = self.store.hit(match.checkpoint_id).value
            self.on_resumed(match.checkpoint_id)
        if match is None or match.prompt_tokens == 0:
            return None, None
        report = explain(match.prompt_tokens, begin, match.block_tokens, match.limit_tokens, match.salted, tier)
        match.report = report
        return (match.checkpoint_id if begin else None), report

    def restore(self, checkpoint_id: int) -> Restore:
        """Where to read it from, after `copies` were issued."""
        tier, slot = self.store.source(checkpoint_id)
        return Restore(self.store[checkpoint_id].position, tier, slot)

    def copies(self) -> list[Copy]:
        """Copies between the tiers that must be issued before the next restore or write."""
        return self.store.take_copies()

    def extend(self, request: str, begin: int, end: int) -> list[Write]:
        """The checkpoints that the forward over [begin, end) writes. May evict, so restores come first."""
        state = self._requests[request]
        state.written_end = end
        writes = []
        for position in self.placement.in_chunk(begin, end, max(state.prompt_tokens, end), state.branch):
            if position in state.pending or chunk_rows(position, WINDOW_TOKENS, begin, end) is None:
                continue
            checkpoint_id = self._reserve(position)
            if checkpoint_id is None:
                break
            state.pending[position] = checkpoint_id
            writes.append(Write(position, self.store[checkpoint_id].device_slot))
        return writes

    def decode(self, request: str, begin: int | None, count: int) -> tuple[int, Write] | None:
        """The next forward writes [begin, begin + count): is the ring to be saved into a checkpoint first?

        `begin` is None where the host doesn't know it: then the last forward's tokens were all kept (no speculation).

        Returns:
            The request's slot, and what to save of its rings.

        Yes when [0, begin) reaches a page boundary whose rows are still in the ring. A request holds one checkpoint of
        its decoding at most; the next page replaces it.
        """
        state = self._requests.get(request)
        if state is None:  # it was prefilled before this ledger was reset, or by nobody (a warm-up batch)
            return None
        before = state.written_end
        begin = before if begin is None else begin
        state.written_end = max(before, begin + count)
        position = begin // PAGE_TOKENS * PAGE_TOKENS
        if not position or position in state.pending or position <= (state.decoded or state.prompt_tokens):
            return None
        if not still_intact(position, max(before, begin), self.ring_rows, self.state_rows):
            return None
        if state.decoded is not None:
            self.store.release(state.pending.pop(state.decoded))
            state.decoded = None
        checkpoint_id = self._reserve(position)
        if checkpoint_id is None:
            self.skipped += 1
            return None
        state.pending[position] = checkpoint_id
        state.decoded = position
        return state.slot, Write(position, self.store[checkpoint_id].device_slot)

    def ended(self, request: str, length: int) -> None:
        """A request ends with [0, length) computed. If that fills its last page exactly, no later forward has saved the
        ring: it is saved before the next one, whoever gets the slot."""
        state = self._requests.get(request)
        if state is not None:  # one step may have written behind the end, and one more be under way
            state.written_end = max(state.written_end, length + 2 * self.draft_tokens)
        saved = self.decode(request, length, 0)
        if saved is not None:
            self._snapshots.append(saved)

    def take_snapshots(self) -> list[tuple[int, Write]]:
        """Rings (request slot, where to) to be saved before anything else of the next forward."""
        snapshots, self._snapshots = self._snapshots, []
        return snapshots

    def to_publish(self, request: str, up_to: int) -> list[tuple[int, int]]:
        """(position, checkpoint id) of what the request wrote in (0, up_to], deepest first; they remain its own until
        `published`."""
        state = self._requests.get(request)
        return sorted(((p, i) for p, i in state.pending.items() if p <= up_to), reverse=True) if state else []

    def published(self, request: str, position: int) -> None:
        """The tree took the request's checkpoint at `position`, or had one there."""
        state = self._requests[request]
        del state.pending[position]
        if state.decoded == position:
            state.decoded = None

    def finished(self, request: str) -> None:
        """The request ended or was retracted: release what it wrote and didn't publish. Unknown requests are fine."""
        state = self._requests.pop(request, None)
        if state is not None:
            for checkpoint_id in state.pending.values():
                self.store.release(checkpoint_id)

    def _reserve(self, position: int) -> int | None:
        checkpoint, lost = self.store.reserve(position)
        if lost:
            self.on_lost(lost)
        return None if checkpoint is None else checkpoint.id
