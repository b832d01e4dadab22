"""The life of tail checkpoints around a forward: restored, and taken, before the forward that would move on.

Everything follows from what the batch says on the host: request slots, positions and token counts. So a replayed CUDA
graph, whose view of the batch has no request ids, is treated as an eager forward is. From taken to restored:

    taken       here (`before_forward`): rows of a prefill chunk while the layers write them, the rings of a request
                whose decoding has filled a page. Which of them: `dsv4_radix_cache.requests`
    published   `tail_component` hangs them on nodes of SGLang's tree when it inserts the request's blocks
    matched     `tail_tree` finds the deepest one on a prompt; the match belongs to the request (`req.tail_match`)
    admitted    here (`carry_request_slots`), when SGLang makes the batch: the match goes to the ledger
    restored    here (`before_forward`), into the rings of the request's slot

Bytes are moved by `sglang_dsv4.cache.tail_storage`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dsv4.cache.tail_storage import ChunkWrites, chunk_writes
from sglang_dsv4.prefix.tail_component import tail_receipt

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dsv4.cache.kv_pool import Dsv4KVPool


@dataclass(frozen=True)
class HostBatch:
    """What a forward appends, as far as the host knows: request i gets tokens [begins[i], begins[i] + counts[i])."""

    slots: list[int]
    begins: list[int] | Tensor
    """On the device, [at least len(slots)] integers: of a verify step that is prepared while the one before it runs."""
    counts: list[int]
    is_prefill: bool  # chunks of prompts, perhaps beside decoding requests; else a decode or verify step


class LaggingBegins:
    """Where verify steps begin, known on the host one step later.

    How many drafts a step keeps is known when it is over, and a scheduler that waited for that would leave the GPU idle
    until the next step is prepared. A copy that is issued in front of a step is there when the next one is prepared:
    by then the host has had the results of the step before.
    """

    def __init__(self, request_slots: int, device: torch.device | str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._copy = torch.empty(request_slots, dtype=torch.int64, pin_memory=self._on_gpu)
        self._steps: list[tuple[int, int, int]] = []  # slot, generation, tokens
        self._done = torch.cuda.Event() if self._on_gpu else None

    def note(self, batch: HostBatch, generations: list[int]) -> None:
        """Copy a step's begins, once `take` has returned those of the step before."""
        self._steps = list(zip(batch.slots, generations, batch.counts, strict=True))
        # In its dtype: a copy that also converts goes through memory of its own.
        begins = batch.begins[: len(self._steps)].long()
        self._copy[: len(self._steps)].copy_(begins, non_blocking=self._on_gpu)
        if self._done is not None:
            self._done.record()

    def take(self) -> list[tuple[int, int, int, int]]:
        """Slot, generation, begin and tokens of the last step's requests, once."""
        steps, self._steps = self._steps, []
        if steps and self._done is not None:
            self._done.synchronize()
        begins = self._copy[: len(steps)].tolist()
        return [(slot, owner, begin, count) for (slot, owner, count), begin in zip(steps, begins, strict=True)]


class Tails:
    """Rings and tail checkpoints of one pool's request slots, from forward to forward."""

    def __init__(self, pool: Dsv4KVPool, req_generation: Tensor) -> None:
        """Take the pool's checkpoints, if it has any.

        Args:
            pool: the worker's.
            req_generation: [request_slots] int64 on the host, SGLang's: grows with every request that gets a slot.
        """
        self._pool = pool
        self._generation = req_generation.numpy()  # the same memory; a step's host time is longer than its GPU time
        self._requests, self._storage = pool.tail_requests, pool.tail_storage
        self._lagging = LaggingBegins(len(req_generation), pool.device)

    @property
    def keeps_nothing(self) -> bool:
        """Without prefix reuse only prefills have something to do."""
        return self._requests is None

    def before_forward(self, batch: HostBatch) -> ChunkWrites | None:
        """Restore and take what is due before a forward, eager or replayed, writes into the rings. Once for each.

        Restores come before reservations, which may evict what they read; copies that were queued come before both.

        Returns:
            Checkpoints that the layers are to write, from the rows of this prefill; None for none.

        Raises:
            RuntimeError: a request continues a prefix whose window rows are not in its slot's rings.
        """
        if self._requests is None:
            self._claim_rings(batch)
            return None
        for slot, generation, begin, count in self._lagging.take():
            self._requests.wrote(slot, generation, begin, count)
        if self._pool.prefix_tiers is not None:
            self._pool.prefix_tiers.issue()
        generations = self._generation[batch.slots].tolist()
        resumed = []
        if batch.is_prefill:
            for slot, generation, begin in zip(batch.slots, generations, batch.begins, strict=True):
                checkpoint_id = self._requests.resume(slot, generation, begin) if slot else None
                if checkpoint_id is not None:
                    resumed.append((slot, generation, checkpoint_id))
        self._storage.issue_due(self._requests)
        for slot, generation, checkpoint_id in resumed:
            self._storage.restore(slot, self._requests.restore(checkpoint_id))
            for pool in filter(None, (self._pool, self._pool.draft)):
                pool.ring_generation[slot] = generation
        self._claim_rings(batch)
        return self._take(batch, generations)

    def _take(self, batch: HostBatch, generations: list[int]) -> ChunkWrites | None:
        """Save rings that hold a page boundary; choose what the chunks leave. The null slot leaves nothing."""
        if isinstance(batch.begins, Tensor):
            self._take_lagging(batch, generations)
            return None
        writes, first_token = [], 0
        for slot, generation, begin, count in zip(batch.slots, generations, batch.begins, batch.counts, strict=True):
            if batch.is_prefill and count > 1 and slot:
                chosen = self._requests.extend(slot, generation, begin, begin + count)
                writes.extend((first_token, begin, begin + count, write) for write in chosen)
            elif slot:  # also a decoding request in a mixed batch
                write = self._requests.decode(slot, generation, begin, count)
                if write is not None:
                    self._storage.snapshot(slot, write)
            first_token += count
        return chunk_writes(writes, self._pool.device)

    def _take_lagging(self, batch: HostBatch, generations: list[int]) -> None:
        """Of a step whose begins the host does not know yet: save what the step before it has filled."""
        for slot, generation in zip(batch.slots, generations, strict=True):
            write = self._requests.decoded_page(slot, generation) if slot else None
            if write is not None:
                self._storage.snapshot(slot, write)
        self._lagging.note(batch, generations)

    def _claim_rings(self, batch: HostBatch) -> None:
        """Note whose rows a slot's rings hold, and refuse a prefix that came without them.

        A prefix from the radix tree has entries, and its window rows come from a tail checkpoint, a draft's too;
        without one, computing on would read another request's.
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
    pool = model_runner.token_to_kv_pool
    if getattr(pool, "tail_requests", None) is None or batch.req_pool_indices_cpu is None:
        return forward_batch
    forward_batch.req_pool_indices_cpu = batch.req_pool_indices_cpu
    if forward_batch.forward_mode.is_extend_without_speculative():
        slots = batch.req_pool_indices_cpu
        generations = model_runner.req_to_token_pool.req_generation[slots]
        for req, slot, generation in zip(batch.reqs, slots.tolist(), generations.tolist(), strict=True):
            pool.tail_requests.admit(slot, generation, getattr(req, "tail_match", None), tail_receipt(req))
    return forward_batch


def carry_request_slots_to_replay(view: Any, *, forward_batch: ForwardBatch, **arguments: Any) -> Any:  # noqa: ANN401
    """After `build_replay_fb_view`: what a replayed graph's view leaves out; of the real requests, not of padding."""
    view.req_pool_indices_cpu = forward_batch.req_pool_indices_cpu
    return view
