"""The engine of `sglang_dsv4.cpu.transfer_engine` for GPUs: blocks of a GPU go through host memory."""

from __future__ import annotations

import ctypes

from cuda.bindings import runtime

from sglang_dsv4.cpu import transfer_engine


class TransferEngine(transfer_engine.TransferEngine):
    def read(self, address: int, length: int) -> memoryview:
        if not is_on_device(address):
            return super().read(address, length)
        block = bytearray(length)
        copy(address_of(block), address, length)
        return memoryview(block)

    def place(self, address: int, length: int) -> memoryview:
        block = super().place(address, length)
        return memoryview(bytearray(length)) if is_on_device(address) else block

    def arrived(self, address: int, block: memoryview) -> None:
        if is_on_device(address):
            copy(address, address_of(block.obj), len(block))


def address_of(block: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def is_on_device(address: int) -> bool:
    error, attributes = runtime.cudaPointerGetAttributes(address)
    assert error == runtime.cudaError_t.cudaSuccess, error
    return attributes.type == runtime.cudaMemoryType.cudaMemoryTypeDevice


def copy(to: int, origin: int, length: int) -> None:
    (error,) = runtime.cudaMemcpy(to, origin, length, runtime.cudaMemcpyKind.cudaMemcpyDefault)
    assert error == runtime.cudaError_t.cudaSuccess, error
