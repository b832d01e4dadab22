"""A transfer engine over TCP sockets with the interface of Mooncake's, for a CPU where Mooncake is not installed.

SGLang's Mooncake backend asks `mooncake.engine.TransferEngine` to copy bytes of this process's memory into the memory
of a server's process. Mooncake's wheel for CPUs has 46 MB and needs libraries of RDMA; this engine needs Python alone,
and serves `make serve-pd` and the tests. Where the package `mooncake` is installed, it is used.

A connection carries requests one after another:

    number of blocks, total bytes | (address, length) of each block | the bytes     -> one byte, 0 if they are written

All numbers are 8 bytes, little-endian. The receiver writes only into memory that was registered.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import importlib.util
import itertools
import logging
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<QQ")
DONE, REFUSED = b"\0", b"\1"
TIMEOUT_S = 30.0
AT_ONCE = 64
"""Blocks that one system call sends or receives, some 14 KB each. A prompt has thousands of them,
and a call for each takes longer than the copy."""


def prepare(*args: object, **kwargs: object) -> None:
    """Before SGLang makes its Mooncake engine on a CPU: provide the engine, and let page numbers stay on the host."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    from sglang_dsv4.seam.install import set_attribute
    from sglang_dsv4.seam.rows.disaggregation import HOST_INDICES

    set_attribute(MooncakeKVSender, HOST_INDICES)
    if importlib.util.find_spec("mooncake") is None:
        logger.warning("Mooncake is not installed: transfers go over TCP sockets of sglang-dsv4, on CPUs only")
        engine = ModuleType("mooncake.engine")
        engine.TransferEngine = TransferEngine
        package = ModuleType("mooncake")
        package.engine, package.__path__ = engine, []
        sys.modules |= {"mooncake": package, "mooncake.engine": engine}


def stays_on_host(before: bool, sender: type) -> bool:
    """The value of `MooncakeKVSender.supports_host_tensor_indices`: False, as page numbers are on the host already."""
    return False


def memory(address: int, length: int) -> memoryview:
    """The bytes [address, address + length) of this process, writable."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


class TransferEngine:
    """Mooncake's `TransferEngine`, as far as SGLang uses it. Methods return 0, or -1 for a failure."""

    def __init__(self) -> None:
        self._regions: dict[int, memoryview] = {}  # by address
        self._addresses: list[int] = []  # of the regions, ascending
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._server: socket.socket | None = None

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        """Listen on a free port of `hostname`; the other arguments choose among Mooncake's transports."""
        self._server = socket.create_server((hostname, 0), backlog=64)
        threading.Thread(target=self._accept, name="transfers-in", daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        """The port of `initialize`."""
        return self._server.getsockname()[1]

    def register_memory(self, address: int, length: int) -> int:
        """Let other servers write into [address, address + length)."""
        return self.batch_register_memory([address], [length])

    def unregister_memory(self, address: int) -> int:
        """Undo `register_memory`; -1 if the address is not registered."""
        return self.batch_unregister_memory([address])

    def batch_register_memory(self, addresses: Sequence[int], lengths: Sequence[int]) -> int:
        """Let other servers write into several regions."""
        with self._lock:
            self._regions |= {address: memory(address, size) for address, size in zip(addresses, lengths, strict=True)}
            self._addresses = sorted(self._regions)
        return 0

    def batch_unregister_memory(self, addresses: Sequence[int]) -> int:
        """Undo `batch_register_memory`; -1 if an address is not registered."""
        with self._lock:
            found = [self._regions.pop(address, None) for address in addresses]
            self._addresses = sorted(self._regions)
        return -1 if None in found else 0

    def transfer_sync_write(self, session: str, source: int, destination: int, length: int) -> int:
        """Copy one block of this process's memory to the server of `session`, ``host:port``."""
        return self.batch_transfer_sync_write(session, [source], [destination], [length])

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], destinations: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Copy blocks of this process's memory to the server of `session`; returns when they are written there."""
        with self._lock:
            peer = self._peers.setdefault(session, _Peer(session))
        return peer.write(map(self.read, sources, lengths), destinations, lengths)

    def send_probe(self, session: str) -> int:
        """Whether the server of `session` answers: 0, or -1."""
        return self.batch_transfer_sync_write(session, [], [], [])

    def read(self, address: int, length: int) -> memoryview:
        """The bytes of a block that is sent."""
        return self._registered(address, length) or memory(address, length)

    def place(self, address: int, length: int) -> memoryview:
        """Memory into which a block is received.

        Raises:
            PermissionError: it is not registered.
        """
        block = self._registered(address, length)
        if block is None:
            raise PermissionError(f"[{address}, {address + length}) is not registered")
        return block

    def arrived(self, address: int, block: memoryview) -> None:
        """Put a block that was received into its place, unless `place` has returned the place itself."""

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._receive, args=(connection,), name="transfer-in", daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        """Serve a connection until its other end closes it or sends what can't be written."""
        with connection:
            try:
                while True:
                    blocks, total = HEADER.unpack(_read(connection, HEADER.size))
                    places = list(HEADER.iter_unpack(_read(connection, blocks * HEADER.size)))
                    targets = [self.place(*place) for place in places]
                    if total != sum(map(len, targets)):
                        raise PermissionError(f"{total} bytes do not fill the blocks")
                    for part in _parts(zip(places, targets, strict=True)):
                        _receive_all(connection, [target for _, target in part])
                        for (address, _), target in part:
                            self.arrived(address, target)
                    connection.sendall(DONE)
            except PermissionError as error:
                logger.error("a transfer is refused: %s", error)
                with contextlib.suppress(OSError):
                    connection.sendall(REFUSED)
            except (OSError, EOFError):
                return

    def _registered(self, address: int, length: int) -> memoryview | None:
        """The bytes [address, address + length) if they are of one region. A slice of it costs a third of `memory`."""
        with self._lock:
            before = bisect.bisect_right(self._addresses, address) - 1
            if before < 0:
                return None
            region = self._regions[begin := self._addresses[before]]
        begin = address - begin
        return region[begin : begin + length] if begin + length <= len(region) else None


class _Peer:
    """A connection to another engine, made anew after a failure. One transfer at a time."""

    def __init__(self, session: str) -> None:
        host, _, port = session.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def write(self, blocks: Iterable[memoryview], destinations: Sequence[int], lengths: Sequence[int]) -> int:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = socket.create_connection(self._address, TIMEOUT_S)
                    self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                numbers = itertools.chain(*zip(destinations, lengths, strict=True))
                places = struct.pack(f"<{2 * len(lengths)}Q", *numbers)
                self._connection.sendall(HEADER.pack(len(lengths), sum(lengths)) + places)
                for part in _parts(blocks):
                    _send_all(self._connection, part)
                if _read(self._connection, 1) == DONE:
                    return 0
            except (OSError, EOFError) as error:
                logger.warning("a transfer to %s:%d failed: %s", *self._address, error)
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            return -1


def _parts(items: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the items, `AT_ONCE` at a time."""
    rest = iter(items)
    while part := tuple(itertools.islice(rest, AT_ONCE)):
        yield part


def _read(connection: socket.socket, length: int) -> bytes:
    buffer = bytearray(length)
    _receive_all(connection, [memoryview(buffer)])
    return bytes(buffer)


def _receive_all(connection: socket.socket, blocks: Iterable[memoryview]) -> None:
    rest = deque(block for block in blocks if block)
    while rest:
        received = connection.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]  # a page is not worth waking up for
        if not received:
            raise EOFError("the other end has closed the connection")
        _drop(rest, received)


def _send_all(connection: socket.socket, blocks: Iterable[memoryview]) -> None:
    rest = deque(block for block in blocks if block)
    while rest:
        _drop(rest, connection.sendmsg(rest))


def _drop(blocks: deque[memoryview], count: int) -> None:
    """Remove the first `count` bytes."""
    while count:
        first = blocks.popleft()
        if count < len(first):
            blocks.appendleft(first[count:])
            return
        count -= len(first)
