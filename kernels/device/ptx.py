"""PTX instructions that the kernels of both generations name themselves. Addresses are numbers: Int64 global, Int32
shared."""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32


def asm(code: str, results: list, *args: object) -> object:
    """One PTX statement. `{$w0}`, ... in the code are results of these types, `{$r0}`, ... the arguments."""
    return cute.arch.inline_ptx(code, write_only_types=results, read_only_args=list(args))


def exp2(x: Float32) -> Float32:
    """2**x, to two units in the last place; exact for whole x. Subnormals are zero."""
    return asm("ex2.approx.ftz.f32 {$w0}, {$r0};", [Float32], x)


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once."""
    return asm("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", [Float32], a, b, c)


def fmax(a: Float32, b: Float32) -> Float32:
    """The larger one; the other one if one is NaN."""
    return asm("max.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def pack_bf16(low: Float32, high: Float32) -> Uint32:
    """Two fp32 rounded to bf16, the first in the low half."""
    return asm("cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", [Uint32], high, low)


def as_f32(bits: Uint32) -> Float32:
    """The fp32 with these bits."""
    return asm("mov.b32 {$w0}, {$r0};", [Float32], Uint32(bits))


def as_u32(x: Float32) -> Uint32:
    """The bits of an fp32."""
    return asm("mov.b32 {$w0}, {$r0};", [Uint32], x)


def load_i32(address: Int64) -> Int32:
    """An int32 from global memory."""
    return asm("ld.global.b32 {$w0}, [{$r0}];", [Int32], address)


def load_f32(address: Int64) -> Float32:
    """An fp32 from global memory."""
    return asm("ld.global.b32 {$w0}, [{$r0}];", [Float32], address)


def load_or_zeros(
    kind: type,
    count: int,
    address: Int64,
    tested: Int32 | Int64,
    test: str = "ne.s32",
    cache: str = ".L1::no_allocate",
    otherwise: int = 0,
) -> object:
    """`count` values of 32 bits from global memory, or zeros (or `otherwise`) unless `tested` is in this relation to
    0."""
    suffix = "f32" if kind is Float32 else "b32"
    words = [f"{{$w{i}}}" for i in range(count)]
    target = words[0] if count == 1 else "{" + ", ".join(words) + "}"
    vector = "" if count == 1 else f".v{count}"
    zeros = " ".join(f"mov.b32 {word}, {otherwise};" for word in words)
    return asm(
        f"{{\n.reg .pred p;\nsetp.{test} p, {{$r1}}, 0;\n{zeros}\n"
        f"@p ld.global{cache}{vector}.{suffix} {target}, [{{$r0}}];\n}}",
        [kind] * count,
        address,
        tested,
    )


HOLE = -(1 << 62)
"""Address of a row that is not there: negative whatever is added, so that its upper word tells."""


def load_16_bytes(row: Int64, offset: Int32 | int = 0) -> tuple:
    """16 bytes behind an address, or zeros if that is HOLE. Rows are read once, so they stay out of L1."""
    if not isinstance(offset, int):
        row, offset = row + offset, 0
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(4))
    return asm(
        "{\n.reg .pred p;\n.reg .b32 low, high;\nmov.b64 {low, high}, {$r0};\nsetp.ge.s32 p, high, 0;\n"
        f"{zeros}\n@p ld.global.L1::no_allocate.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}];\n}}",
        [Uint32] * 4,
        row,
    )


def load_4_bytes(address: Int64, number: Int32) -> Uint32:
    """4 bytes that belong to a row, or zeros if its number is negative."""
    return load_or_zeros(Uint32, 1, address, number, "ge.s32", cache="")


def load_8_bytes(address: Int64, number: Int32) -> tuple:
    """8 bytes that belong to a row, or zeros if its number is negative."""
    return load_or_zeros(Uint32, 2, address, number, "ge.s32", cache="")


def prefetch(row: Int64, offset: Int32) -> None:
    """Prefetches a line behind an address into L2, unless that is HOLE."""
    asm("{\n.reg .pred p;\nsetp.ge.s64 p, {$r0}, 0;\n@p prefetch.global.L2 [{$r0}];\n}", [], row + offset)


def store_shared(address: Int32, words: tuple) -> None:
    """16 bytes to shared memory."""
    asm("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [], address, *words)


def store_shared_u32(address: Int32, x: Uint32) -> None:
    """32 bits to shared memory."""
    asm("st.shared.b32 [{$r0}], {$r1};", [], address, x)


def store_shared_f32(address: Int32, x: Float32) -> None:
    """An fp32 to shared memory."""
    asm("st.shared.f32 [{$r0}], {$r1};", [], address, x)


def store_shared_f32x2(address: Int32, pair: tuple) -> None:
    """Two fp32 to shared memory."""
    asm("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", [], address, *pair)


def store_shared_f32x4(address: Int32, words: tuple) -> None:
    """Four fp32 to shared memory."""
    asm("st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [], address, *words)


def load_shared_f32(address: Int32) -> Float32:
    """An fp32 from shared memory."""
    return asm("ld.shared.f32 {$w0}, [{$r0}];", [Float32], address)


def load_shared_f32x2(address: Int32) -> tuple:
    """Two fp32 from shared memory."""
    return asm("ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", [Float32] * 2, address)


def load_shared_f32x4(address: Int32) -> tuple:
    """Four fp32 from shared memory."""
    return asm("ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Float32] * 4, address)


def remote(address: Int32, cta: Int32) -> Int32:
    """Where another CTA of the cluster has what this one has at an address of its shared memory."""
    return asm("mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", [Int32], address, cta)


def load_cluster_f32x2(address: Int32) -> tuple:
    """Two fp32 from the shared memory of a CTA of the cluster."""
    return asm("ld.shared::cluster.v2.f32 {{$w0}, {$w1}}, [{$r0}];", [Float32] * 2, address)


def load_cluster_f32_if(tested: Int32, address: Int32) -> Float32:
    """An fp32 from there, or 0 if `tested` is negative."""
    return asm(
        "{\n.reg .pred p;\nsetp.ge.s32 p, {$r0}, 0;\nmov.b32 {$w0}, 0;\n@p ld.shared::cluster.f32 {$w0}, [{$r1}];\n}",
        [Float32],
        tested,
        address,
    )


def arrive_remote(barrier: Int32) -> None:
    """Arrives at a barrier of another CTA of the cluster: what this one has read may be overwritten.

    As CUTLASS's pipelines give back what other CTAs fill. `.release.cluster` would wait for all writes of the thread,
    600 cycles, and there are none to be seen.
    """
    asm("mbarrier.arrive.shared::cluster.b64 _, [{$r0}];", [], barrier)


@cute.jit
def wait_cluster(barrier: Int32, phase: Int32) -> None:
    """Waits for a barrier of this CTA at which others of the cluster arrive."""
    done = Int32(0)
    while done == 0:
        done = asm(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [{$r0}], {$r1};\n"
            "selp.b32 {$w0}, 1, 0, p;\n}",
            [Int32],
            barrier,
            phase,
        )


def store_async_f32x4(address: Int32, words: tuple, barrier: Int32) -> None:
    """Four fp32 to another CTA's shared memory, whose barrier counts the bytes."""
    asm(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        [],
        address,
        *words,
        barrier,
    )


def store_matrices(address: Int32, words: tuple) -> None:
    """Four 8 x 8 matrices of bf16 from the warp's registers; lane l gives the address of row l % 8 of matrix l // 8."""
    asm("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [], address, *words)


def store_matrices_transposed(address: Int32, words: tuple) -> None:
    """The same, of each matrix what is a column in registers as a row."""
    asm(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        [],
        address,
        *words,
    )


def load_matrices(address: Int32) -> tuple:
    """What `store_matrices` stored, for the same lanes."""
    return asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Uint32] * 4, address)


def load_shared_16_bytes(address: Int32) -> tuple:
    """16 bytes from shared memory."""
    return asm("ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Uint32] * 4, address)


def copy_4_bytes_async(shared: Int32, address: Int64, num_bytes: Int32) -> None:
    """4 bytes from global to shared memory, of which those from num_bytes on are zeros."""
    asm("cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};", [], shared, address, num_bytes)


def copy_async(shared: Int32, address: Int64, num_bytes: Int32) -> None:
    """16 bytes from global to shared memory, of which those from num_bytes on are zeros."""
    asm("cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", [], shared, address, num_bytes)


def copy_row_async(shared: Int32, row: Int64, offset: Int32 | int) -> None:
    """16 bytes behind an address from global to shared memory, or zeros if that is HOLE."""
    if not isinstance(offset, int):
        row, offset = row + offset, 0
    asm(
        "{\n.reg .pred p;\n.reg .b32 low, high;\nmov.b64 {low, high}, {$r1};\nsetp.lt.s32 p, high, 0;\n"
        f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}+{offset}], 16, p;\n}}",
        [],
        shared,
        row,
    )


def load_f32x4_if(condition: Boolean, address: Int64) -> tuple:
    """Four fp32 that are read once, or zeros."""
    return load_or_zeros(Float32, 4, address, Int32(condition))


def store_i32(address: Int64, x: Int32) -> None:
    """An int32 to global memory."""
    asm("st.global.b32 [{$r0}], {$r1};", [], address, x)


def store_f32(address: Int64, x: Float32) -> None:
    """An fp32 to global memory."""
    asm("st.global.f32 [{$r0}], {$r1};", [], address, x)


def store_f32x2(address: Int64, pair: tuple) -> None:
    """Two fp32 to global memory."""
    asm("st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", [], address, *pair)


def store_f32x4(address: Int64, words: tuple) -> None:
    """Four fp32 to global memory."""
    asm("st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [], address, *words)


def store_u32(address: Int64, x: Uint32) -> None:
    """A word to global memory."""
    asm("st.global.b32 [{$r0}], {$r1};", [], address, x)


def divide(x: Int32, by: Int32) -> Int32:
    """x // by for 0 <= x < 2**20 and by > 0, in a few instructions.

    Half more than x is at least 1 / (2 by) from a multiple, and the quotient is off by less than x / by * 2**-21.
    """
    inverse = asm("rcp.approx.ftz.f32 {$w0}, {$r0};", [Float32], Float32(by))
    return Int32((Float32(x) + 0.5) * inverse)


def imax(a: Int32, b: Int32) -> Int32:
    """The larger one."""
    return asm("max.s32 {$w0}, {$r0}, {$r1};", [Int32], a, b)


def opaque(x: Int32) -> Int32:
    """The same, unknown to the compiler."""
    return asm("mov.b32 {$w0}, {$r0};", [Int32], x)


def imin(a: Int32, b: Int32) -> Int32:
    """The smaller one."""
    return asm("min.s32 {$w0}, {$r0}, {$r1};", [Int32], a, b)


def store_bf16(address: Int64, x: Float32) -> None:
    """Stores an fp32, rounded to bf16, to global memory."""
    asm("{\n.reg .b16 x;\ncvt.rn.bf16.f32 x, {$r1};\nst.global.b16 [{$r0}], x;\n}", [], address, x)


def store_16_bytes(address: Int64, words: tuple) -> None:
    """16 bytes to global memory."""
    asm("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [], address, *words)


def add_release(address: Int64, count: Int32 | int = 1) -> None:
    """Counts up; what this CTA wrote before its last barrier is visible to whoever sees the count."""
    asm("red.release.gpu.global.add.s32 [{$r0}], {$r1};", [], address, Int32(count))


def count_out(address: Int64) -> Int32:
    """Counts one up and returns what was there."""
    return asm("atom.acq_rel.gpu.global.add.s32 {$w0}, [{$r0}], 1;", [Int32], address)


def count(address: Int64) -> Int32:
    """Counts one up and returns what was there; publishes nothing."""
    return asm("atom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], 1;", [Int32], address)


def reset(address: Int64) -> None:
    """Sets a count to 0 that nobody waits for any more."""
    asm("st.relaxed.gpu.global.s32 [{$r0}], 0;", [], address)


def load_acquire(address: Int64) -> Int32:
    """A count; what was written before the releases that it includes is visible afterwards."""
    return asm("ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", [Int32], address)


def scale_pair(byte: Uint32) -> Uint32:
    """A ue8m0 as two bf16; 0 is 2**-127, a subnormal."""
    return asm(
        "{\n.reg .b32 x, least;\nmov.b32 least, 0x00400040;\nmul.lo.u32 x, {$r0}, 0x00800080;\n"
        "max.u16x2 {$w0}, x, least;\n}",
        [Uint32],
        byte,
    )


def dequantise(word: Uint32, scale: Uint32) -> tuple:
    """Four e4m3 times a power of two (`scale_pair`) -> four bf16 in two words, rounded only where bf16 has fewer bits
    (subnormals). The upper halves of fp32 are exact, and taking them is cheaper than rounding."""
    return asm(
        "{\n.reg .b16 low, high, a, b;\n.reg .b32 x, y;\n.reg .f32 f, g;\nmov.b32 {low, high}, {$r0};\n"
        "cvt.rn.f16x2.e4m3x2 x, low;\ncvt.rn.f16x2.e4m3x2 y, high;\n"
        "mov.b32 {a, b}, x;\ncvt.f32.f16 f, a;\ncvt.f32.f16 g, b;\n"
        "prmt.b32 x, f, g, 0x7632;\nmul.rn.bf16x2 {$w0}, x, {$r1};\n"
        "mov.b32 {a, b}, y;\ncvt.f32.f16 f, a;\ncvt.f32.f16 g, b;\n"
        "prmt.b32 y, f, g, 0x7632;\nmul.rn.bf16x2 {$w1}, y, {$r1};\n}",
        [Uint32, Uint32],
        word,
        scale,
    )
