"""The transfer engine over sockets: blocks between two engines, refusals and failures."""

from __future__ import annotations

import importlib.util
import itertools
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from sglang_dsv4.cpu import transfer_engine
from sglang_dsv4.cpu.transfer_engine import TransferEngine

HOST = "127.0.0.1"


@pytest.fixture
def engines() -> Iterator[tuple[TransferEngine, TransferEngine]]:
    pair = TransferEngine(), TransferEngine()
    for engine in pair:
        assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    yield pair


def session(engine: TransferEngine) -> str:
    return f"{HOST}:{engine.get_rpc_port()}"


def bytes_of(seed: int, count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_blocks_arrive_from_several_threads(engines: tuple[TransferEngine, TransferEngine]) -> None:
    sender, receiver = engines
    source, target = bytes_of(1, 1 << 20), torch.zeros(1 << 20, dtype=torch.uint8)
    assert receiver.batch_register_memory([target.data_ptr()], [target.nbytes]) == 0

    def write(part: int) -> int:
        places = range(part * (1 << 17), (part + 1) * (1 << 17), 1 << 14)
        addresses = [source.data_ptr() + place for place in places]
        goals = [target.data_ptr() + place for place in places]
        return sender.batch_transfer_sync_write(session(receiver), addresses, goals, [1 << 14] * len(goals))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, range(8))) == [0] * 8
    assert torch.equal(source, target)
    assert sender.send_probe(session(receiver)) == 0


def test_many_small_blocks_arrive_in_few_system_calls(
    engines: tuple[TransferEngine, TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of every size from 0 on, in another order at the receiver, and more than one call takes. A prompt's pages
    are thousands of blocks; a call for each had a third of the rate of one large block, and Python for each a half."""
    sender, receiver = engines
    calls: list[int] = []

    def counted(*args: Any, send: Callable[..., int] = transfer_engine._send) -> int:
        calls.append(1)
        return send(*args)

    monkeypatch.setattr(transfer_engine, "_send", counted)
    lengths = [i % 700 for i in range(2500)]
    source, target = bytes_of(1, sum(lengths)), torch.zeros(sum(lengths), dtype=torch.uint8)
    receiver.register_memory(target.data_ptr(), target.nbytes)
    begins = [0, *itertools.accumulate(lengths)][:-1]
    goals = [target.nbytes - begin - length for begin, length in zip(begins, lengths, strict=True)]
    addresses, places = ([of.data_ptr() + at for at in numbers] for of, numbers in ((source, begins), (target, goals)))
    assert sender.batch_transfer_sync_write(session(receiver), addresses, places, lengths) == 0
    for begin, goal, length in zip(begins, goals, lengths, strict=True):
        assert torch.equal(target[goal : goal + length], source[begin : begin + length])
    assert len(calls) == 3


def test_calls_that_move_a_part_of_the_bytes(
    engines: tuple[TransferEngine, TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call sends, or receives, only some bytes: it ends inside of a block, at its end, or at an empty block."""
    sender, receiver = engines
    call = transfer_engine._call

    def some_bytes(name: str, connection: socket.socket, blocks: transfer_engine.Blocks, flags: int) -> int:
        part = blocks[:1].copy()
        part[0, 1] = min(part[0, 1], 97)
        return call(name, connection, part, flags)

    monkeypatch.setattr(transfer_engine, "_call", some_bytes)
    lengths = [0, 1, 97, 98, 0, 0, 194, 300, 0]
    source, target = bytes_of(1, sum(lengths)), torch.zeros(sum(lengths) + 9, dtype=torch.uint8)
    receiver.register_memory(target.data_ptr(), target.nbytes)
    begins = [0, *itertools.accumulate(lengths)][:-1]
    addresses, places = ([of.data_ptr() + begin for begin in begins] for of in (source, target))
    assert sender.batch_transfer_sync_write(session(receiver), addresses, places, lengths) == 0
    assert torch.equal(target[:-9], source) and not target[-9:].any()


def test_a_peer_that_does_not_answer_is_a_failure(
    engines: tuple[TransferEngine, TransferEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer accepts the connection, and reads nothing: neither more bytes can be sent, nor does an answer come."""
    monkeypatch.setattr(transfer_engine, "TIMEOUT_S", 1)
    source = bytes_of(1, 1 << 26)
    with socket.create_server((HOST, 0)) as server:
        peer = f"{HOST}:{server.getsockname()[1]}"
        for length in (source.nbytes, 16):
            assert engines[0].transfer_sync_write(peer, source.data_ptr(), 0, length) == -1
    assert caplog.text.count(f"a transfer to {peer} failed") == 2


@pytest.mark.parametrize("shift", [-1, 1], ids=["before", "after"])
def test_memory_that_is_not_registered_stays(
    engines: tuple[TransferEngine, TransferEngine], shift: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A block that begins before a region, or ends after it, is refused as a whole; the next transfer works."""
    sender, receiver = engines
    source, target = bytes_of(1, 64), torch.zeros(128, dtype=torch.uint8)
    receiver.register_memory(target.data_ptr() + 32, 64)
    place = target.data_ptr() + 32
    assert sender.transfer_sync_write(session(receiver), source.data_ptr(), place + shift, 64) == -1
    assert not target.any()
    assert "not registered" in caplog.text
    assert sender.transfer_sync_write(session(receiver), source.data_ptr(), place, 64) == 0
    assert receiver.unregister_memory(place) == 0 and receiver.unregister_memory(place) == -1
    assert sender.transfer_sync_write(session(receiver), source.data_ptr(), place, 64) == -1


def test_a_peer_that_ends_is_a_failure(engines: tuple[TransferEngine, TransferEngine]) -> None:
    """The peer reads half of the bytes and closes; afterwards nobody listens."""
    source = bytes_of(1, 1 << 22)
    with socket.create_server((HOST, 0)) as server:

        def read_some() -> None:
            connection, _ = server.accept()
            connection.recv(1 << 16)
            connection.close()

        thread = threading.Thread(target=read_some)
        thread.start()
        peer = f"{HOST}:{server.getsockname()[1]}"
        assert engines[0].transfer_sync_write(peer, source.data_ptr(), 0, source.nbytes) == -1
        thread.join()
    assert engines[0].send_probe(peer) == -1


@pytest.mark.parametrize("installed", [True, False], ids=["Mooncake is installed", "not installed"])
def test_mooncake_itself_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    monkeypatch.setattr(MooncakeKVSender, "supports_host_tensor_indices", True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    for name in ("mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)  # restored at the end
        del sys.modules[name]
    transfer_engine.prepare()
    assert ("mooncake.engine" in sys.modules) is not installed
    assert MooncakeKVSender.supports_host_tensor_indices is False
