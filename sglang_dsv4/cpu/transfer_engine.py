"""A transfer engine over TCP sockets with the interface of Mooncake's, for a CPU where Mooncake is not installed.

SGLang's Mooncake backend asks `mooncake.engine.TransferEngine` to copy bytes of this process's memory into the memory
of a server's process. Mooncake's wheel for CPUs has 46 MB and needs libraries of RDMA; this engine needs Python alone,
and serves `make serve-pd` and the tests. Where the package `mooncake` is installed, it is used.

A connection carries requests one after another:

    number of blocks, total bytes | (address, length) of each block | the bytes     -> one byte, 0 if they are written

All numbers are 8 bytes, little-endian. The receiver writes only into memory that was registered.

A prompt has thousands of blocks, some of 1 KB. The list of blocks is the kernel's list of a system call that sends or
receives up to 1024 blocks, so that no Python runs for a single block: with some microseconds a block, 16,384 tokens in
pages that lie anywhere took 1.8 times as long as one run of as many bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib.util
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<QQ")
DONE, REFUSED = b"\0", b"\1"
TIMEOUT_S = 30
MOST_BLOCKS = 1024
"""Blocks of one system call, Linux's limit (`IOV_MAX`)."""

Blocks = numpy.ndarray
"""Blocks of memory: [N, 2] int64, the address and the length of each."""


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


class TransferEngine:
    """Mooncake's `TransferEngine`, as far as SGLang uses it. Methods return 0, or -1 for a failure."""

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}  # end of each, by its address
        self._ends = numpy.zeros((1, 2), numpy.int64)  # [regions + 1, 2], by address; the first one is empty
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
            self._regions |= {begin: begin + length for begin, length in zip(addresses, lengths, strict=True)}
            self._sort()
        return 0

    def batch_unregister_memory(self, addresses: Sequence[int]) -> int:
        """Undo `batch_register_memory`; -1 if an address is not registered."""
        with self._lock:
            found = [self._regions.pop(address, None) for address in addresses]
            self._sort()
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
        return peer.write(self.send_blocks, *(_blocks(addresses, lengths) for addresses in (sources, destinations)))

    def send_probe(self, session: str) -> int:
        """Whether the server of `session` answers: 0, or -1."""
        return self.batch_transfer_sync_write(session, [], [], [])

    def send_blocks(self, connection: socket.socket, blocks: Blocks) -> None:
        """Send the bytes of blocks of this process's memory."""
        _for_all(_send, connection, blocks)

    def receive_blocks(self, connection: socket.socket, blocks: Blocks) -> None:
        """Receive the bytes of blocks into their places, which are registered."""
        _for_all(_receive, connection, blocks)

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._serve, args=(connection,), name="transfer-in", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve a connection until its other end closes it or sends what can't be written."""
        with connection:
            try:
                while True:
                    count, total = HEADER.unpack(_read(connection, HEADER.size))
                    blocks = numpy.frombuffer(_read(connection, count * HEADER.size), "<i8").reshape(-1, 2)
                    self._require_registered(blocks)
                    if total != blocks[:, 1].sum():
                        raise PermissionError(f"{total} bytes do not fill the blocks")
                    self.receive_blocks(connection, blocks)
                    connection.sendall(DONE)
            except PermissionError as error:
                logger.error("a transfer is refused: %s", error)
                with contextlib.suppress(OSError):
                    connection.sendall(REFUSED)
            except (OSError, EOFError):
                return

    def _sort(self) -> None:
        self._ends = numpy.array([(0, 0), *sorted(self._regions.items())], numpy.int64)

    def _require_registered(self, blocks: Blocks) -> None:
        """Check that other servers may write into blocks.

        Raises:
            PermissionError: a block is not inside one region.
        """
        begins, ends = self._ends.T
        addresses, lengths = blocks.T
        region = numpy.searchsorted(begins, addresses, "right") - 1
        outside = (region < 0) | (lengths < 0) | (lengths > ends[region] - addresses)
        if outside.any():
            address, length = blocks[int(outside.argmax())].tolist()
            raise PermissionError(f"[{address}, {address + length}) is not registered")


class _Peer:
    """A connection to another engine, made anew after a failure. One transfer at a time."""

    def __init__(self, session: str) -> None:
        host, _, port = session.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def write(self, send_blocks: Callable[[socket.socket, Blocks], None], sources: Blocks, destinations: Blocks) -> int:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _connection_to(self._address)
                header = HEADER.pack(len(destinations), int(destinations[:, 1].sum()))
                self._connection.sendall(header + destinations.astype("<i8", copy=False).tobytes())
                send_blocks(self._connection, sources)
                if _read(self._connection, 1) == DONE:
                    return 0
            except (OSError, EOFError) as error:
                logger.warning("a transfer to %s:%d failed: %s", *self._address, error)
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            return -1


def _connection_to(address: tuple[str, int]) -> socket.socket:
    """A connection each of whose calls ends after `TIMEOUT_S`. Python's own timeouts would make its calls return early,
    which `MSG_WAITALL` must not."""
    connection = socket.create_connection(address, TIMEOUT_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", TIMEOUT_S, 0))
    return connection


def _blocks(addresses: Sequence[int], lengths: Sequence[int]) -> Blocks:
    return numpy.array([addresses, lengths], numpy.int64).T.copy()


def _read(connection: socket.socket, length: int) -> bytes:
    buffer = bytearray(length)
    rest = memoryview(buffer)
    while rest:  # a signal ends a call early, `MSG_WAITALL` or not
        count = connection.recv_into(rest, len(rest), socket.MSG_WAITALL)
        if count == 0:
            raise EOFError("the other end has closed the connection")
        rest = rest[count:]
    return bytes(buffer)


class _Message(ctypes.Structure):
    """Linux's `msghdr`."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("blocks", ctypes.c_void_p),
        ("number_of_blocks", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


@functools.cache
def _system_call(name: str) -> Callable[[int, object, int], int]:
    """`sendmsg` or `recvmsg` of the C library, on addresses; other threads run meanwhile."""
    call = getattr(ctypes.CDLL(None, use_errno=True), name)
    call.argtypes, call.restype = (ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int), ctypes.c_ssize_t
    return call


def _call(name: str, connection: socket.socket, blocks: Blocks, flags: int) -> int:
    """Send or receive at least a byte of the blocks; returns the number of bytes."""
    message = _Message(blocks=blocks.ctypes.data, number_of_blocks=len(blocks))
    while (count := _system_call(name)(connection.fileno(), ctypes.byref(message), flags)) < 0:
        number = ctypes.get_errno()
        if number == errno.EAGAIN:
            raise TimeoutError(f"the other end has not answered for {TIMEOUT_S} s")
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    if count == 0:
        raise EOFError("the other end has closed the connection")
    return count


def _send(connection: socket.socket, blocks: Blocks) -> int:
    return _call("sendmsg", connection, blocks, socket.MSG_NOSIGNAL)


def _receive(connection: socket.socket, blocks: Blocks) -> int:
    return _call("recvmsg", connection, blocks, socket.MSG_WAITALL)  # a page is not worth waking up for


def _for_all(call: Callable[[socket.socket, Blocks], int], connection: socket.socket, blocks: Blocks) -> None:
    """Call until all bytes of the blocks are sent or received."""
    ends = blocks[:, 1].cumsum()
    done, total = 0, int(blocks[:, 1].sum())
    while done < total:
        first = int(numpy.searchsorted(ends, done, "right"))
        rest = blocks[first : first + MOST_BLOCKS].copy()
        passed = done - int(ends[first] - rest[0, 1])  # bytes of the first block
        rest[0] += (passed, -passed)
        done += call(connection, rest)
