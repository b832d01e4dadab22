"""PTX instructions as functions. Addresses are integers: Int64 in global memory, Int32 in shared memory.

PTX text stands here for three reasons. Arithmetic names its rounding, so the compiler cannot contract or reassociate
it. Loads and stores keep the order in which they are written (the text is volatile): all loads of a thread are under
way before the first value is used. Barriers and atomics name their memory order.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32


def asm(code: str, results: list, *args: object) -> object:
    """The results of one PTX statement: a value, or a tuple of several. In the code `{$w0}`, ... are results of the
    types in `results`, and `{$r0}`, ... are the arguments."""
    return cute.arch.inline_ptx(code, write_only_types=results, read_only_args=list(args))


def exp2(x: Float32) -> Float32:
    """2**x, to two units in the last place; exact for whole x. Subnormal results are flushed to zero."""
    return asm("ex2.approx.ftz.f32 {$w0}, {$r0};", [Float32], x)


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once."""
    return asm("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", [Float32], a, b, c)


def fmax(a: Float32, b: Float32) -> Float32:
    """The larger of a and b; if one is NaN, the other."""
    return asm("max.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def pack_bf16(low: Float32, high: Float32) -> Uint32:
    """Two fp32 rounded to bf16, as one word; the first is in the low half."""
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
    """`count` 32-bit values from global memory where the comparison of `tested` with 0 holds; elsewhere `otherwise`.

    Args:
        kind: DSL type of the values.
        count: 1, 2 or 4.
        address: of the first value; not read where the comparison fails.
        tested: compared with 0.
        test: the comparison, as in `setp`.
        cache: cache qualifier of the load.
        otherwise: bits of every value where the comparison fails.
    """
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
"""Address of a row that does not exist. It stays negative whatever offset is added, so the sign of its upper word
identifies it."""


def load_16_bytes(row: Int64, offset: Int32 | int = 0) -> tuple:
    """16 bytes at row + offset, or zeros if row is HOLE. Rows are read once, so they bypass L1."""
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
    """4 bytes of a row, or zeros if the row's number is negative."""
    return load_or_zeros(Uint32, 1, address, number, "ge.s32", cache="")


def load_8_bytes(address: Int64, number: Int32) -> tuple:
    """8 bytes of a row, or zeros if the row's number is negative."""
    return load_or_zeros(Uint32, 2, address, number, "ge.s32", cache="")


def prefetch(row: Int64, offset: Int32) -> None:
    """Prefetches the line at row + offset into L2, unless row is HOLE."""
    asm("{\n.reg .pred p;\nsetp.ge.s64 p, {$r0}, 0;\n@p prefetch.global.L2 [{$r0}];\n}", [], row + offset)


def fetch_into_l2(address: Int64, num_bytes: Int32 | int) -> None:
    """Starts a copy of contiguous bytes, a multiple of 16, from global memory into L2, which is not an access."""
    asm("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", [], address, Int32(num_bytes))


def store_shared(address: Int32, words: tuple) -> None:
    """Stores 16 bytes to shared memory."""
    asm("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [], address, *words)


def store_shared_u32(address: Int32, x: Uint32) -> None:
    """Stores a word to shared memory."""
    asm("st.shared.b32 [{$r0}], {$r1};", [], address, x)


def store_shared_f32(address: Int32, x: Float32) -> None:
    """Stores an fp32 to shared memory."""
    asm("st.shared.f32 [{$r0}], {$r1};", [], address, x)


def store_shared_f32x2(address: Int32, pair: tuple) -> None:
    """Stores two fp32 to shared memory."""
    asm("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", [], address, *pair)


def store_shared_f32x4(address: Int32, words: tuple) -> None:
    """Stores four fp32 to shared memory."""
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
    """The address at which another CTA of the cluster has the object that this CTA has at `address` of its shared
    memory."""
    return asm("mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", [Int32], address, cta)


def load_cluster_f32x2(address: Int32) -> tuple:
    """Two fp32 from the shared memory of any CTA of the cluster."""
    return asm("ld.shared::cluster.v2.f32 {{$w0}, {$w1}}, [{$r0}];", [Float32] * 2, address)


def load_cluster_i32(address: Int32) -> Int32:
    """An int32 from the shared memory of any CTA of the cluster."""
    return asm("ld.shared::cluster.s32 {$w0}, [{$r0}];", [Int32], address)


def load_cluster_f32_if(tested: Int32, address: Int32) -> Float32:
    """An fp32 from the shared memory of any CTA of the cluster, or 0 if `tested` is negative."""
    return asm(
        "{\n.reg .pred p;\nsetp.ge.s32 p, {$r0}, 0;\nmov.b32 {$w0}, 0;\n@p ld.shared::cluster.f32 {$w0}, [{$r1}];\n}",
        [Float32],
        tested,
        address,
    )


def arrive_remote(barrier: Int32) -> None:
    """Arrives at an mbarrier of another CTA of the cluster, to signal that the data this thread has read may be
    overwritten.

    CUTLASS's pipelines release stages that other CTAs fill in the same way. `.release.cluster` would wait for all
    earlier writes of the thread, 600 cycles, and no write has to become visible.
    """
    asm("mbarrier.arrive.shared::cluster.b64 _, [{$r0}];", [], barrier)


@cute.jit
def wait_cluster(barrier: Int32, phase: Int32) -> None:
    """Waits for an mbarrier of this CTA at which other CTAs of the cluster arrive."""
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
    """Stores four fp32 to another CTA's shared memory; that CTA's mbarrier counts the bytes."""
    asm(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        [],
        address,
        *words,
        barrier,
    )


def store_matrices(address: Int32, words: tuple) -> None:
    """Stores four 8 x 8 matrices of bf16 from the warp's registers to shared memory; lane l gives the address of row l
    % 8 of matrix l // 8."""
    asm("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [], address, *words)


def store_matrices_transposed(address: Int32, words: tuple) -> None:
    """Stores four 8 x 8 matrices as `store_matrices`, each transposed: a column in registers becomes a row."""
    asm(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        [],
        address,
        *words,
    )


def load_matrices(address: Int32) -> tuple:
    """Four 8 x 8 matrices from shared memory, in the registers from which `store_matrices` stored them."""
    return asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Uint32] * 4, address)


def load_shared_16_bytes(address: Int32) -> tuple:
    """16 bytes from shared memory."""
    return asm("ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Uint32] * 4, address)


def copy_4_bytes_async(shared: Int32, address: Int64, num_bytes: Int32) -> None:
    """Starts a copy of 4 bytes from global to shared memory; bytes from num_bytes on become zeros."""
    asm("cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};", [], shared, address, num_bytes)


def copy_async(shared: Int32, address: Int64, num_bytes: Int32) -> None:
    """Starts a copy of 16 bytes from global to shared memory; bytes from num_bytes on become zeros."""
    asm("cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", [], shared, address, num_bytes)


def copy_row_async(shared: Int32, row: Int64, offset: Int32 | int) -> None:
    """Starts a copy of 16 bytes at row + offset from global to shared memory; zeros if row is HOLE."""
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
    """Four fp32 that are read once, or zeros unless the condition holds."""
    return load_or_zeros(Float32, 4, address, Int32(condition))


def store_i32(address: Int64, x: Int32) -> None:
    """Stores an int32 to global memory."""
    asm("st.global.b32 [{$r0}], {$r1};", [], address, x)


def store_f32(address: Int64, x: Float32) -> None:
    """Stores an fp32 to global memory."""
    asm("st.global.f32 [{$r0}], {$r1};", [], address, x)


def store_f32x2(address: Int64, pair: tuple) -> None:
    """Stores two fp32 to global memory."""
    asm("st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", [], address, *pair)


def store_f32x4(address: Int64, words: tuple) -> None:
    """Stores four fp32 to global memory."""
    asm("st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [], address, *words)


def store_u32(address: Int64, x: Uint32) -> None:
    """Stores a word to global memory."""
    asm("st.global.b32 [{$r0}], {$r1};", [], address, x)


def divide(x: Int32, by: Int32) -> Int32:
    """x // by for 0 <= x < 2**20 and by > 0, in a few instructions.

    x + 1/2 is at least 1 / (2 by) away from a multiple of `by`, and the approximate quotient is off by less than x / by
    * 2**-21.
    """
    inverse = asm("rcp.approx.ftz.f32 {$w0}, {$r0};", [Float32], Float32(by))
    return Int32((Float32(x) + 0.5) * inverse)


def imax(a: Int32, b: Int32) -> Int32:
    """The larger of two int32."""
    return asm("max.s32 {$w0}, {$r0}, {$r1};", [Int32], a, b)


def opaque(x: Int32) -> Int32:
    """x, as a value that the compiler knows nothing about."""
    return asm("mov.b32 {$w0}, {$r0};", [Int32], x)


def imin(a: Int32, b: Int32) -> Int32:
    """The smaller of two int32."""
    return asm("min.s32 {$w0}, {$r0}, {$r1};", [Int32], a, b)


def store_bf16(address: Int64, x: Float32) -> None:
    """Stores an fp32, rounded to bf16, to global memory."""
    asm("{\n.reg .b16 x;\ncvt.rn.bf16.f32 x, {$r1};\nst.global.b16 [{$r0}], x;\n}", [], address, x)


def store_16_bytes(address: Int64, words: tuple) -> None:
    """Stores 16 bytes to global memory."""
    asm("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [], address, *words)


def add_release(address: Int64, count: Int32 | int = 1) -> None:
    """Adds to a counter; a thread that acquires the new count sees all writes of this CTA before its last barrier."""
    asm("red.release.gpu.global.add.s32 [{$r0}], {$r1};", [], address, Int32(count))


def count_out(address: Int64) -> Int32:
    """Adds 1 to a counter and returns its old value; acquires and releases."""
    return asm("atom.acq_rel.gpu.global.add.s32 {$w0}, [{$r0}], 1;", [Int32], address)


def count(address: Int64) -> Int32:
    """Adds 1 to a counter and returns its old value, without ordering other accesses."""
    return asm("atom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], 1;", [Int32], address)


def reset(address: Int64) -> None:
    """Sets a counter to 0 when no thread waits for it any more."""
    asm("st.relaxed.gpu.global.s32 [{$r0}], 0;", [], address)


def load_acquire(address: Int64) -> Int32:
    """A counter's value; writes before the releases that it includes are visible afterwards."""
    return asm("ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", [Int32], address)


def scale_pair(byte: Uint32) -> Uint32:
    """A ue8m0 scale as two equal bf16 in a word; 0 stands for 2**-127, a subnormal."""
    return asm(
        "{\n.reg .b32 x, least;\nmov.b32 least, 0x00400040;\nmul.lo.u32 x, {$r0}, 0x00800080;\n"
        "max.u16x2 {$w0}, x, least;\n}",
        [Uint32],
        byte,
    )


def dequantise(word: Uint32, scale: Uint32) -> tuple:
    """Four e4m3 codes times a power of two (`scale_pair`), as four bf16 in two words.

    Rounded only where bf16 has fewer bits (subnormal results). The upper halves of the codes' fp32 values hold them
    without loss, and selecting these halves is cheaper than rounding.
    """
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
