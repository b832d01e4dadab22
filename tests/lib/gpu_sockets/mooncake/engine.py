"""The engine of `sglang_dsv4.cpu.transfer_engine` for GPUs: blocks of a GPU go through host memory."""

from __future__ import annotations

import ctypes
import itertools
import socket

import numpy
from cuda.bindings import runtime

from sglang_dsv4.cpu import transfer_engine


class TransferEngine(transfer_engine.TransferEngine):
    def send_blocks(self, connection: socket.socket, blocks: transfer_engine.Blocks) -> None:
        host = bytearray(int(blocks[:, 1].sum()))
        for (address, length), place in zip(blocks.tolist(), places_in(host, blocks), strict=True):
            copy(place, address, length)
        super().send_blocks(connection, numpy.array([[address_of(host), len(host)]]))

    def receive_blocks(self, connection: socket.socket, blocks: transfer_engine.Blocks) -> None:
        host = bytearray(int(blocks[:, 1].sum()))
        super().receive_blocks(connection, numpy.array([[address_of(host), len(host)]]))
        for (address, length), place in zip(blocks.tolist(), places_in(host, blocks), strict=True):
            copy(address, place, length)


def places_in(host: bytearray, blocks: transfer_engine.Blocks) -> list[int]:
    """Return the address of each block's bytes in host memory that holds all blocks."""
    return list(itertools.accumulate(blocks[:-1, 1].tolist(), initial=address_of(host)))[: len(blocks)]


def address_of(block: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block)) if block else 0


def copy(to: int, origin: int, length: int) -> None:
    (error,) = runtime.cudaMemcpy(to, origin, length, runtime.cudaMemcpyKind.cudaMemcpyDefault)
    assert error == runtime.cudaError_t.cudaSuccess, error
