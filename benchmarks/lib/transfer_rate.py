"""Bytes a second of a request's pages and rings from one pool to another, against a plain copy by the same engine.

Two processes have a pool of V4-Flash's 43 layers each, in FP8 rows. SGLang's own sender makes the list of blocks of a
prompt and gives it to the engine; the plain copy is one block of as many bytes, from one run of memory to another.
Copies alternate. The pages of a prompt are anywhere in both pools, as in a server that has run for long, or all in one
run, as in a new server.

The sender is the one for Mooncake, also where NIXL's engine copies: SGLang's sender for NIXL joins neighbouring pages
in the same way.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from lib.transfer_engines import ENGINES

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4)
PAGE_TOKENS = 256
RING_SLOTS = 3
ROUNDS = 21
TIMEOUT_S = 120


@dataclass(frozen=True)
class Rate:
    """One prompt's transfer.

    Attributes:
        tokens: of the prompt.
        pages: "anywhere" or "in one run".
        bytes: of its pages and rings.
        blocks: runs of bytes in which they are sent.
        gb_s, plain_gb_s: medians of GB a second.
        share: of the plain rate, median over rounds; machines with other load drift between rounds.
        share_p10, share_p90: its spread.
    """

    tokens: int
    pages: str
    bytes: int
    blocks: int
    gb_s: float
    plain_gb_s: float
    share: float
    share_p10: float
    share_p90: float


class Side(NamedTuple):
    """The addresses at which the other side writes."""

    session: str
    pages: list[int]  # addresses of the buffers whose items are pages
    rings: list[int]
    plain: int


class Memory:
    """A pool, memory for a plain copy of half of its pages and of rings, and the engine with which both are
    registered."""

    def __init__(self, device: str, pool_pages: int, backend: str, fill: bool) -> None:
        from dsv4_kernels.kv_layout import RowFormat
        from sglang_dsv4.cache.geometry import PoolGeometry
        from sglang_dsv4.cache.kv_pool import Dsv4KVPool

        formats = {"row_format": RowFormat.FP8, "index_format": RowFormat.INDEX_FP4}
        geometry = PoolGeometry(FLASH_RATIOS, transfers=True, **formats)
        tokens = pool_pages * PAGE_TOKENS
        self.pool = Dsv4KVPool(geometry, full_tokens=tokens, request_slots=RING_SLOTS, device=device)
        self.pages, self.rings = self.pool.get_contiguous_buf_infos(), self.pool.ring_buf_infos()
        self.plain = torch.zeros(self.bytes_of(pool_pages // 2), dtype=torch.uint8, device=device)
        if fill:
            for tensor in (self.plain, *(storage for _, _, storage in self.pool.tensors())):
                tensor.view(torch.uint8).random_(0, 256)
        self.engine = ENGINES[backend](device)
        regions = [(self.plain.data_ptr(), self.plain.nbytes)]
        for buffers in (self.pages, self.rings):
            regions += zip(buffers.addresses, buffers.lengths, strict=True)
        addresses, lengths = zip(*regions, strict=True)
        if self.engine.batch_register_memory(list(addresses), list(lengths)) != 0:
            raise RuntimeError("the engine can't register the memory")

    def bytes_of(self, pages: int) -> int:
        """Return the bytes of a prompt of so many pages."""
        return pages * sum(self.pages.item_lengths) + sum(self.rings.item_lengths)

    def told(self) -> Side:
        """Return what the other side needs to write here."""
        return Side(self.engine.session(), self.pages.addresses, self.rings.addresses, self.plain.data_ptr())

    def sums(self, pages: Sequence[int], slot: int) -> list[int]:
        """Return a sum for each buffer of the bytes of these pages and of a request slot's rings, in their order."""
        tensors = {storage.data_ptr(): storage for _, _, storage in self.pool.tensors()}
        stacks = [(stack, len(stack)) for stack in (*self.pool.tables.values(), *self.pool.rings.values())]
        if self.pool._packed is not None:
            stacks.append((self.pool._packed, len(self.pool._packed)))
        for stack, layers in stacks:
            tensors |= {layer.data_ptr(): layer for layer in stack.unflatten(0, (layers, -1)).squeeze(1)}
        found = []
        for buffers, items in ((self.pages, list(pages)), (self.rings, [slot])):
            for address, length, size in zip(*buffers, strict=True):
                rows = tensors[address].contiguous().view(torch.uint8).view(length // size, size)
                weights = torch.arange(1, len(items) + 1, device=rows.device).unsqueeze(1)
                found.append(int((rows[torch.tensor(items, device=rows.device)].long() * weights).sum()))
        return found


def receive(connection: Connection, device: str, pool_pages: int, backend: str) -> None:
    """Be the decode server: let the other process write, and answer with sums of what has arrived."""
    memory = Memory(device, pool_pages, backend, fill=False)
    connection.send(memory.told())
    while (asked := connection.recv()) is not None:
        connection.send(memory.sums(*asked))


@contextmanager
def receiver(device: str, pool_pages: int, backend: str) -> Iterator[Connection]:
    """Start the receiving process; yield the connection to it, whose first message is its `Side`."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    work = multiprocessing.get_context("spawn").Process(
        target=receive, args=(theirs, device, pool_pages, backend), daemon=True
    )
    work.start()
    try:
        yield ours
    finally:
        ours.send(None)
        work.join(TIMEOUT_S)
        work.kill()


def sender(memory: Memory) -> MooncakeKVManager:
    """Return SGLang's manager of transfers, reduced to what makes the blocks of a prompt and sends them."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    from sglang_dsv4.disaggregation.pieces import transfer_in_pieces

    def transfer(session: str, *blocks: list[int]) -> int:
        return transfer_in_pieces(lambda _, *call: write(*call), SimpleNamespace(ib_device=""), session, *blocks)

    manager, write = object.__new__(MooncakeKVManager), memory.engine.batch_transfer_sync_write
    manager.engine = SimpleNamespace(batch_transfer_sync=transfer)
    manager.is_mla_backend, manager.is_hybrid_mla_backend, manager.pp_size = True, False, 1
    manager.kv_args = SimpleNamespace(prefill_start_layer=0, prefill_end_layer=len(FLASH_RATIOS))
    manager.enable_custom_mem_pool, manager.custom_mem_pool_type = False, None
    manager.max_transfer_batch_indices, manager.state_strides_validated = 0, set()
    return manager


def send(manager: MooncakeKVManager, memory: Memory, to: Side, pages: Sequence[int], there: Sequence[int]) -> None:
    """Send pages, and the rings of request slot 1 to slot 2, as a prompt's last chunk."""
    works = ((memory.pages, to.pages, pages, there), (memory.rings, to.rings, [1], [2]))
    for buffers, addresses, ours, theirs in works:
        indices = (numpy.array(numbers, dtype=numpy.int32) for numbers in (ours, theirs))
        result = manager._send_kvcache_generic(
            to.session, buffers.addresses, addresses, buffers.item_lengths, *indices, executor=None
        )
        if result != 0:
            raise RuntimeError("a transfer failed")


def blocks_of(manager: MooncakeKVManager, send_all: Callable[[], None]) -> int:
    """Return the number of blocks that a call gives to the engine, and make the call."""
    count, transfer = 0, manager.engine.batch_transfer_sync

    def counted(session: str, *blocks: list[int]) -> int:
        nonlocal count
        count += len(blocks[0])
        return transfer(session, *blocks)

    manager.engine.batch_transfer_sync = counted
    try:
        send_all()
    finally:
        manager.engine.batch_transfer_sync = transfer
    return count


def times_of(
    manager: MooncakeKVManager, memory: Memory, to: Side, pages: tuple[Sequence[int], Sequence[int]], size: int
) -> list[tuple[float, float]]:
    """Return the seconds of a prompt's transfer and of a plain copy in each round; the first round warms up.

    Args:
        manager, memory: the sender's.
        to: the receiver's addresses.
        pages: of the prompt, here and there.
        size: bytes of the plain copy.

    Raises:
        RuntimeError: a copy failed.
    """
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        send(manager, memory, to, *pages)
        middle = time.perf_counter()
        plain = [to.session, [memory.plain.data_ptr()], [to.plain], [size]]
        if memory.engine.batch_transfer_sync_write(*plain) != 0:
            raise RuntimeError("a plain copy failed")
        times.append((middle - begin, time.perf_counter() - middle))
    return times[1:]


def measure(lengths: Sequence[int], devices: tuple[str, str], backend: str) -> list[Rate]:
    """Return the rates for prompts of these lengths, multiples of 256 tokens, from one device to the other.

    Args:
        lengths: in tokens.
        devices: "cpu", or a GPU as "cuda:0".
        backend: a name of `transfer_engines.ENGINES`.

    Raises:
        RuntimeError: bytes have not arrived as they were sent.
    """
    pool_pages = 2 * max(lengths) // PAGE_TOKENS
    memory, rates = Memory(devices[0], pool_pages, backend, fill=True), []
    manager = sender(memory)
    with receiver(devices[1], pool_pages, backend) as other:
        if not other.poll(TIMEOUT_S):
            raise RuntimeError("the receiving process has not come up")
        to = other.recv()
        for length in lengths:
            count = length // PAGE_TOKENS
            size = memory.bytes_of(count)
            for name in ("anywhere", "in one run"):
                rng = random.Random(length)
                runs = [range(1, count + 1), range(2, count + 2)]
                ours, theirs = runs if name == "in one run" else (rng.sample(range(1, pool_pages), count) for _ in "ab")
                blocks = blocks_of(manager, lambda: send(manager, memory, to, ours, theirs))  # noqa: B023
                other.send((list(theirs), 2))
                if memory.sums(ours, 1) != other.recv():
                    raise RuntimeError(f"{length} tokens have not arrived as they were sent")
                times = times_of(manager, memory, to, (ours, theirs), size)
                gb_s, plain_gb_s = (size / statistics.median(seconds) / 1e9 for seconds in zip(*times, strict=True))
                shares = sorted(plain / kv for kv, plain in times)
                spread = (shares[len(shares) * tenth // 10] for tenth in (5, 1, 9))
                rates.append(Rate(length, name, size, blocks, gb_s, plain_gb_s, *spread))
    return rates
