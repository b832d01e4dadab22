"""Restores and saves tails before a forward, eager or replayed, overwrites rings.

Everything follows from the batch's host data: request slots, positions and token counts. So a replayed CUDA graph,
whose view of the batch has no request ids, is treated like an eager forward. The life of a tail:

    saved       here (`TailLifecycle.before_forward`): the layers write the rows of a prefill chunk; the rings of a
                request whose decoding has filled a page are copied. `dsv4_radix_cache.ledger` chooses which
    published   `tail_nodes` attaches it to a node of SGLang's tree when the request's blocks are inserted
    matched     `tree_core` finds the deepest tail of a prompt; the match is kept with the request (`request_state`)
    admitted    here (`carry_request_slots`): when SGLang makes the batch, the match goes to the ledger
    restored    here (`TailLifecycle.before_forward`), into the rings of the request's slot
    evicted     `dsv4_radix_cache.tail_store`

`sglang_dsv4.cache.tail_memory` copies the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dsv4.cache.tail_memory import ChunkWrites, chunk_writes
from sglang_dsv4.prefix.request_state import match_of, set_request_slots, tail_receipt

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dsv4.cache.kv_pool import Dsv4KVPool


@dataclass(frozen=True)
class HostBatch:
    """The tokens that a forward appends, from host data: request i gets tokens [begins[i], begins[i] + counts[i])."""

    slots: list[int]
    begins: list[int] | Tensor
    """A tensor on the device, of at least len(slots) integers, for a verify step that is prepared while the step before
    it runs."""
    counts: list[int]
    is_prefill: bool  # chunks of prompts, perhaps together with decoding requests; else a decode or verify step


class LaggingBegins:
    """The begins of verify steps, known on the host one step later.

    How many drafts a step keeps is known when it is over, and a scheduler that waited for that would leave the GPU idle
    until the next step is prepared. A copy that is issued before a step has arrived when the next step is prepared: by
    then the host has had the results of the step before.
    """

    def __init__(self, request_slots: int, device: torch.device | str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._copy = torch.empty(request_slots, dtype=torch.int64, pin_memory=self._on_gpu)
        self._steps: list[tuple[int, int, int]] = []  # request slot, generation, tokens
        self._done = torch.cuda.Event() if self._on_gpu else None

    def note(self, batch: HostBatch, generations: list[int]) -> None:
        """Start the copy of the first positions of a step; call it after `pop` has returned the previous step's."""
        self._steps = list(zip(batch.slots, generations, batch.counts, strict=True))
        # Converted first: a copy that also converts uses temporary memory of its own.
        begins = batch.begins[: len(self._steps)].long()
        self._copy[: len(self._steps)].copy_(begins, non_blocking=self._on_gpu)
        if self._done is not None:
            self._done.record()

    def pop(self) -> list[tuple[int, int, int, int]]:
        """(request slot, generation, begin, tokens) of the last step's requests, returned once."""
        steps, self._steps = self._steps, []
        if steps and self._done is not None:
            self._done.synchronize()
        begins = self._copy[: len(steps)].tolist()
        return [(slot, owner, begin, count) for (slot, owner, count), begin in zip(steps, begins, strict=True)]


class TailLifecycle:
    """Restores and saves the tails of one pool's requests, forward by forward."""

    def __init__(self, pool: Dsv4KVPool, req_generation: Tensor) -> None:
        """Use the pool's ledger and tail memory, if it has them.

        Args:
            pool: the worker's.
            req_generation: [request_slots] int64 on the host, SGLang's: grows with every request that gets the slot.
        """
        self._pool = pool
        self._generation = req_generation.numpy()  # the same memory; numpy, because host time bounds a decode step
        self._ledger, self._memory = pool.ledger, pool.tail_memory
        self._lagging = LaggingBegins(len(req_generation), pool.device)

    @property
    def keeps_nothing(self) -> bool:
        """Whether there is no prefix reuse, so that only prefills need `before_forward`."""
        return self._ledger is None

    def before_forward(self, batch: HostBatch) -> ChunkWrites | None:
        """Restore and save the tails that are due before a forward writes into the rings. Call once per forward.

        Queued copies come first, then restores, then reservations, which may evict the tails that restores read.

        Returns:
            The tails that the layers write from the rows of this prefill; None for none.

        Raises:
            RuntimeError: a request continues a prefix whose window rows are not in its slot's rings.
        """
        if self._ledger is None:
            self._claim_rings(batch)
            return None
        for slot, generation, begin, count in self._lagging.pop():
            self._ledger.wrote(slot, generation, begin, count)
        if self._pool.page_copies is not None:
            self._pool.page_copies.issue()
        generations = self._generation[batch.slots].tolist()
        self._restore_tails(batch, generations)
        self._claim_rings(batch)
        return self._save_tails(batch, generations)

    def _restore_tails(self, batch: HostBatch, generations: list[int]) -> None:
        """Copy the tail of each request that begins after a prefix into its rings; due copies are issued first."""
        resumed = []
        if batch.is_prefill:
            for slot, generation, begin in zip(batch.slots, generations, batch.begins, strict=True):
                tail_id = self._ledger.resume(slot, generation, begin) if slot else None
                if tail_id is not None:
                    resumed.append((slot, generation, tail_id))
        self._memory.issue(self._ledger.pop_ring_saves(), self._ledger.pop_copies())
        for slot, generation, tail_id in resumed:
            self._memory.restore(slot, self._ledger.restore(tail_id))
            for pool in filter(None, (self._pool, self._pool.draft)):
                pool.ring_generation[slot] = generation

    def _save_tails(self, batch: HostBatch, generations: list[int]) -> ChunkWrites | None:
        """Save rings that hold a page boundary; returns the tails that the chunks write. The null slot saves none."""
        if isinstance(batch.begins, Tensor):
            self._save_last_steps_pages(batch, generations)
            return None
        writes, first_token = [], 0
        for slot, generation, begin, count in zip(batch.slots, generations, batch.begins, batch.counts, strict=True):
            if batch.is_prefill and count > 1 and slot:
                chosen = self._ledger.extend(slot, generation, begin, begin + count)
                writes.extend((first_token, begin, begin + count, write) for write in chosen)
            elif slot:  # also a decoding request in a mixed batch
                write = self._ledger.decode(slot, generation, begin, count)
                if write is not None:
                    self._memory.save_rings(slot, write)
            first_token += count
        return chunk_writes(writes, self._pool.device)

    def _save_last_steps_pages(self, batch: HostBatch, generations: list[int]) -> None:
        """Save the pages that the step before this one filled: the host does not know this step's begins yet."""
        for slot, generation in zip(batch.slots, generations, strict=True):
            write = self._ledger.decoded_page(slot, generation) if slot else None
            if write is not None:
                self._memory.save_rings(slot, write)
        self._lagging.note(batch, generations)

    def _claim_rings(self, batch: HostBatch) -> None:
        """Note whose rows a slot's rings hold, and refuse a prefix without its window rows.

        A prefix from the radix tree has entries, but its window rows come from a tail, a draft's too; without the tail
        the request would read another request's rows.
        """
        if not batch.is_prefill:  # a request's first forward is a prefill
            return
        pool = self._pool
        for slot, prefix in zip(batch.slots, batch.begins, strict=True):
            owner, generation = int(pool.ring_generation[slot]), int(self._generation[slot])
            if prefix and owner != generation:
                raise RuntimeError(
                    f"request slot {slot} continues a prefix of {prefix} tokens, but its window rows are not there "
                    f"(they are generation {owner}'s, this is {generation}): a prefix must come with its tail"
                )
            pool.ring_generation[slot] = generation


def carry_request_slots(
    forward_batch: ForwardBatch, cls: type, batch: ScheduleBatch, model_runner: ModelRunner, **options: object
) -> ForwardBatch:
    """After `ForwardBatch.init_new`: keep the request slots on the host in every mode; hand matches to the ledger.

    SGLang keeps `req_pool_indices_cpu` for prefills only; without it a decode step's requests would have to be read
    from the device.
    """
    ledger = getattr(model_runner.token_to_kv_pool, "ledger", None)  # None for a pool of SGLang's
    if ledger is None or batch.req_pool_indices_cpu is None:
        return forward_batch
    slots = batch.req_pool_indices_cpu
    set_request_slots(forward_batch, slots)
    if forward_batch.forward_mode.is_extend_without_speculative():
        generations = model_runner.req_to_token_pool.req_generation[slots]
        for req, slot, generation in zip(batch.reqs, slots.tolist(), generations.tolist(), strict=True):
            ledger.admit(slot, generation, match_of(req), tail_receipt(req))
    return forward_batch


def carry_request_slots_to_replay(view: Any, *, forward_batch: ForwardBatch, **arguments: Any) -> Any:  # noqa: ANN401
    """After `build_replay_fb_view`: give a replayed graph's view the slots of the real requests, without padding."""
    set_request_slots(view, forward_batch.req_pool_indices_cpu)
    return view
