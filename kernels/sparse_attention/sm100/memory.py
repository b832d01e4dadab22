"""Global, shared and tensor memory as the Blackwell kernel addresses it."""

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.experimental import primitives as prims

from dsv4_kernels.device import dependent_launch


def gmem(address: Int64, dtype: type) -> cutlass.Pointer:
    """A global pointer from a device address."""
    return cutlass.Pointer(
        llvm.inttoptr(llvm.PointerType.get(cutlass.AddressSpace.gmem.value), address.ir_value()), dtype=dtype
    )


def typed(pointer: cutlass.Pointer, dtype: type) -> cutlass.Pointer:
    """The same address, counted in elements of dtype."""
    return cutlass.Pointer(pointer, dtype=dtype)


def store_words(target: cutlass.Pointer, words: list[Int32]) -> None:
    """16 bytes."""
    typed(target, Int32).store(cutlass.Vector.from_elements(tuple(words), Int32), alignment=16)


def load_words(address: Int64, offset: int, count: int) -> list[Int32]:
    """`count` (2 or 4) words, `offset` bytes further, of memory that nobody writes during the launch.

    Not by `.nc` where the launch begins before its inputs are there: such a load may be moved to before the wait.
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


def tmem_columns(tmem: prims.TmemAddr, warp: Int32, column: Int32 | int, dtype: type) -> cutlass.Array:
    """Address of a column in the lanes that warp `warp` of a group of four reaches."""
    return prims.TmemAddr.from_row_col(tmem.row_id + warp % 4 * 32, tmem.col_id + column).as_ptr(dtype)


def load_tmem(columns: cutlass.Array, count: int) -> list[Int32]:
    """Words of this thread's lane; to be followed by a wait."""
    words = prims.tcgen05_ld("32x32b", columns, num=count)
    return [words[i] for i in range(count)]


def as_float(word: Int32) -> Float32:
    """The same bits. As PTX, since the compiler would pair words up between a load of tensor memory and its wait."""
    return prims.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])
