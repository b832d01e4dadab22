"""PTX lines before a warpgroup's `wgmma` products whose right operand is in shared memory and whose left operand is in
registers: kernels issue the products of a step as one PTX statement, whose registers the compiler must not touch."""

SWIZZLE_128_BYTES = 1 << 62
"""Bits of a matrix descriptor (PTX ISA, matrix descriptor format)."""
EIGHT_ROWS_BYTES = 1024


def prepared(address: str) -> list[str]:
    """Lines that declare and set registers for the products of rows of 128 bytes, swizzled by 128 bytes:

    * `at`, a matrix descriptor that begins at `address`, the PTX operand with the address of the first row. A product's
      operand begins further on: `add.s64 b, at, bytes / 16`. `b` is declared here, too.
    * predicates `add_none` for the first product of a sum, and `add` for the others.
    """
    descriptor = SWIZZLE_128_BYTES | (EIGHT_ROWS_BYTES // 16 << 32) | (1 << 16)
    return [
        ".reg .b64 at, b;",
        ".reg .b32 zero;",
        ".reg .pred add_none, add;",
        "mov.b32 zero, 0;",
        "setp.ne.b32 add_none, zero, 0;",
        "setp.eq.b32 add, zero, 0;",
        f"cvt.u64.u32 at, {address};",
        "shr.u64 at, at, 4;",
        f"or.b64 at, at, {descriptor:#x};",
    ]
