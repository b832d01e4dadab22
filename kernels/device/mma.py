"""Matrix products of one warp by `mma.sync`, as PTX: kernels promise bits that depend on the instruction and its order.

Operands and results are the fragments of the PTX ISA's tables for the shape, in words (two bf16, or one tf32) and fp32.
"""

from cutlass import Float32

from dsv4_kernels.device import ptx


def multiply_bf16(a: tuple, b: tuple, c: tuple) -> tuple:
    """c + a b by `mma.m16n8k16` of bf16, accumulated in fp32: a lane's four sums.

    Args:
        a: four words, rows lane // 4 and lane // 4 + 8.
        b: two words, column lane // 4.
        c: four fp32.
    """
    return ptx.asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        [Float32] * 4,
        *a,
        *b,
        *c,
    )


def multiply_tf32(a: tuple, b: tuple, c: list) -> list:
    """c + a b by `mma.m16n8k8` of tf32, accumulated in fp32; operands as for `multiply_bf16`."""
    return ptx.asm(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        [Float32] * 4,
        *a,
        *b,
        *c,
    )
