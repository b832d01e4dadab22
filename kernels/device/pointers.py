"""Typed pointers to global and shared memory, and 8- or 16-byte accesses, for CuTe DSL's experimental primitives."""

import cutlass
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.experimental import primitives as prims

from dsv4_kernels.device import dependent_launch


def gmem(address: Int64, dtype: type) -> cutlass.Pointer:
    """A pointer to `dtype` in global memory at a device address."""
    return cutlass.Pointer(
        llvm.inttoptr(llvm.PointerType.get(cutlass.AddressSpace.gmem.value), address.ir_value()), dtype=dtype
    )


def typed(pointer: cutlass.Pointer, dtype: type) -> cutlass.Pointer:
    """The same address as a pointer to `dtype`."""
    return cutlass.Pointer(pointer, dtype=dtype)


def store_words(target: cutlass.Pointer, words: list[Int32]) -> None:
    """Stores four words at a multiple of 16 bytes."""
    typed(target, Int32).store(cutlass.Vector.from_elements(tuple(words), Int32), alignment=16)


def load_words(address: Int64, offset: int, count: int) -> list[Int32]:
    """`count` (2 or 4) words, `offset` bytes after an address, of global memory that is constant during the launch.

    The load is not `.nc` if the launch may begin before its inputs are written: the compiler may move an `.nc` load to
    before the wait for the previous kernel.
    """
    cache = "" if dependent_launch.is_on() else ".nc"
    registers = ", ".join(f"{{$w{i}}}" for i in range(count))
    return list(
        prims.inline_ptx(
            f"ld.global{cache}.v{count}.s32 {{{registers}}}, [{{$r0}}+{offset}];",
            write_only_types=[Int32] * count,
            read_only_args=[address],
        )
    )
