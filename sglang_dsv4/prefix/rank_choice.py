"""The choice of the data-parallel rank of a request: where most of its prompt is cached, unless others have less to do.

With `--dp-size` (replicas) or `--attn-dp-size` every rank has a prefix cache of its own, and SGLang hands requests to
the ranks in turn: each turn of a conversation finds its prefix on one rank of several. Here a request goes to the rank
with the least of

* tokens that wait there to be computed, and `REQUEST_TOKENS` for each request that runs or waits,
* `COMPUTED_AGAIN` times the tokens of the prompt that the rank would have to compute
  (`dsv4_radix_cache.rank_index`), and
* `FULL_CACHE_TOKENS` times the share of the rank's cache that is in use, which spreads prefixes over idle ranks.

Load comes from SGLang's snapshots, and from the requests that were handed out since. So a prefix that all requests
share is computed on a second rank once the first has some requests more.

    SGLANG_DSV4_RANK_CHOICE    prefix: as above (default). sglang: by `--load-balance-method` alone.

It replaces the methods `auto` and `round_robin` of `--load-balance-method`, on prefill and decode servers, too; the
others, `routed_dp_rank` and health checks are served by SGLang. The turns of a session (`session_params`) go to the
rank that has its first turn: each sends its own tokens only. This code runs in SGLang's controller process.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dsv4_radix_cache.page_chain import PageChain
from dsv4_radix_cache.pages import PAGE_TOKENS, pages_for, whole_pages
from dsv4_radix_cache.rank_index import RankIndex
from sglang_dsv4 import env
from sglang_dsv4.seam.hook_kinds import NAME

if TYPE_CHECKING:
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.load_snapshot import LoadSnapshot

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_DSV4_RANK_CHOICE"

REQUEST_TOKENS = 512
"""Prefill tokens that count as much as one more decoding request. A step of 64 requests takes 6.1 ms on an H200
(`serve_ab_h200.json`): a request's share is the time of 14 prefill tokens, so this is the share of some 36 steps."""
COMPUTED_AGAIN = 4
"""Weight of a token that is computed on one rank although another has it. A token that waits delays the request, one
that is computed again delays all later requests of its rank and takes the place of another. Conversations that come in
bursts of four lose 11 to 15 % of their hits over two ranks with weight 1, 3 to 4 % with 3, and 1 to 2 % with 4 (the
simulation of `tests/sglang_dsv4/prefix/test_rank_choice.py`)."""
FULL_CACHE_TOKENS = 2048
"""Tokens by which a rank with a full cache counts as busier than one with an empty cache, at equal load."""
MOST_PAGES = 1 << 17
"""Most pages that are remembered of a rank, 33M tokens; some 300 bytes each."""
REFRESH_S = 0.02
"""Shortest time between two readings of the snapshots."""
ON_THE_WAY_S = 0.1
"""A snapshot includes a request if it was taken at least this long after the request was handed out."""
MOST_SESSIONS = 1 << 16
"""Most sessions whose rank is remembered; the oldest go first."""
FORGOTTEN_AFTER_S = 60.0
"""A request counts no longer than this if no snapshot comes, as from a rank on another host."""


@dataclass
class RankLoad:
    """One rank's load."""

    timestamp: float = 0.0
    waiting_tokens: int = 0
    requests: int = 0
    capacity_tokens: int = 0
    handed_out: deque[tuple[float, float]] = field(default_factory=deque)
    """Time and tokens to compute of requests that the snapshot does not have yet, in the order of time."""

    def update(self, load: LoadSnapshot) -> None:
        """Take a snapshot of the rank; one that was taken before is ignored."""
        if load.timestamp == self.timestamp:
            return
        self.timestamp, self.waiting_tokens = load.timestamp, load.num_waiting_uncached_tokens
        self.requests, self.capacity_tokens = load.num_running_reqs + load.num_waiting_reqs, load.max_total_num_tokens
        self._drop(load.timestamp - ON_THE_WAY_S)

    def hand_out(self, now: float, tokens: float) -> None:
        """Note a request of which the rank computes `tokens` tokens."""
        self._drop(now - FORGOTTEN_AFTER_S)
        self.handed_out.append((now, tokens))

    def _drop(self, until: float) -> None:
        while self.handed_out and self.handed_out[0][0] <= until:
            self.handed_out.popleft()

    @property
    def tokens(self) -> float:
        """Tokens that the rank computes before a request that it gets now."""
        requests = self.requests + len(self.handed_out)
        return self.waiting_tokens + sum(tokens for _, tokens in self.handed_out) + REQUEST_TOKENS * requests


class RankChoice:
    """Chooses ranks for requests.

    Args:
        ranks: number of ranks.
        overlap_tokens: of the ranks' page digests, see `PageChain`.
        cache_share: tokens that a rank keeps for each token of its pool; above 1 with host memory.
        now: the clock of the snapshots.
    """

    def __init__(
        self, ranks: int, overlap_tokens: int = 0, cache_share: float = 1.0, now: Callable[[], float] = time.time
    ) -> None:
        self.index = RankIndex(ranks, MOST_PAGES)
        self.loads = [RankLoad() for _ in range(ranks)]
        self._sessions: dict[str, int] = {}
        self._overlap, self._cache_share, self._now, self._read_at = overlap_tokens, cache_share, now, -math.inf

    def refresh(self, read: Callable[[], Iterable[LoadSnapshot]]) -> None:
        """Take the snapshots that `read` returns, unless `REFRESH_S` have not passed since the last time."""
        now = self._now()
        if not 0 <= now - self._read_at < REFRESH_S:  # below 0 if the clock was set back
            self._read_at = now
            self.update(read())

    def update(self, loads: Iterable[LoadSnapshot]) -> None:
        """Take snapshots; the index remembers as many pages as the largest cache holds."""
        for load in loads:
            self.loads[load.dp_rank].update(load)
        capacity = max(load.capacity_tokens for load in self.loads)
        if capacity:
            self.index.limit(min(MOST_PAGES, pages_for(int(capacity * self._cache_share))))

    def digests(self, tokens: Sequence[int] | None, extra_key: str | None, cache_salt: str | None) -> list[bytes]:
        """The prompt's page digests, equal to those of the ranks' trees."""
        if not tokens:
            return []
        prompt = tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)
        chain = PageChain((extra_key, cache_salt), self._overlap)
        return chain.digests(prompt, whole_pages(len(prompt) - self._overlap))

    def choose(self, digests: Sequence[bytes], alive: Sequence[int]) -> int:
        """The rank with the least work before a prompt's first token; of `alive`, which is not empty."""
        costs = self.index.costs(digests)

        def cost(rank: int) -> tuple[float, int]:
            full = self.index.stored(rank) / self.index.pages_per_rank
            return self.loads[rank].tokens + COMPUTED_AGAIN * costs[rank] + FULL_CACHE_TOKENS * full, rank

        return min(alive, key=cost)

    def rank_of(self, session: str | None) -> int | None:
        """The rank that has a session's turns; None without a session, or before its first turn."""
        return None if session is None else self._sessions.get(session)

    def note_session(self, session: str | None, rank: int) -> None:
        """Remember that a rank has a turn of a session; the sessions without a turn for longest are forgotten."""
        if session is not None:
            self._sessions.pop(session, None)
            self._sessions[session] = rank
            if len(self._sessions) > MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]

    def note(self, digests: Sequence[bytes], tokens: int, rank: int) -> None:
        """Remember that a rank gets a prompt of `tokens` tokens."""
        computed = tokens - PAGE_TOKENS * self.index.has(digests, rank)
        self.loads[rank].hand_out(self._now(), computed)
        self.index.note(digests, rank)


_choices: WeakKeyDictionary[DataParallelController, RankChoice | None] = WeakKeyDictionary()
"""Each controller's choice; None where SGLang chooses."""


def dispatch(
    original: Callable[..., None], controller: DataParallelController, request: TokenizedGenerateReqInput
) -> None:
    """Send a request to the rank that `RankChoice` chooses; replaces the round robin of SGLang's controller."""
    from sglang.srt.managers.io_struct import sock_send

    if controller not in _choices:
        _choices[controller] = _choice_of(controller)
    choice = _choices[controller]
    if choice is None:
        return original(controller, request)
    session = request.session_params.id if request.session_params is not None else None
    alive, asked, of_session = _alive(controller), request.routed_dp_rank, choice.rank_of(session)
    digests: list[bytes] = []
    if of_session is None:  # a later turn's tokens are no beginning of a prompt
        digests = choice.digests(request.input_ids, request.extra_key, getattr(request, "cache_salt", None))
    rank: int | None
    if asked is not None or not alive:
        original(controller, request)  # to the rank that the client asks for, or SGLang's error
        rank = asked if asked in alive else None
    else:
        choice.refresh(controller.load_snapshot_reader.read_all)
        rank = of_session if of_session in alive else choice.choose(digests, alive)
        sock_send(controller.workers[rank], request)
    if rank is not None:
        choice.note(digests, len(request.input_ids or ()), rank)
        choice.note_session(session, rank)


def _alive(controller: DataParallelController) -> list[int]:
    sockets = enumerate(controller.workers)
    return [rank for rank, socket in sockets if socket is not None and controller.status[rank]]


def _choice_of(controller: DataParallelController) -> RankChoice | None:
    """None where the prefix cache is not ours, or the user wants SGLang's choice."""
    from sglang.srt.runtime_context import get_memory, get_spec

    memory: Any = get_memory()
    ours = memory.radix_cache_backend == NAME and not memory.disable_radix_cache
    if not ours or env.choice(VARIABLE) == "sglang":
        return None
    share = 1.0 + (memory.hicache_ratio if memory.enable_hierarchical_cache and not memory.hicache_size else 0.0)
    choice = RankChoice(len(controller.workers), int(get_spec().speculative_algorithm == "EAGLE"), share)
    logger.info("Requests go to the rank where most of their prompt is cached (%s=sglang: in turn).", VARIABLE)
    return choice
