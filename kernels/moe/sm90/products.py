"""Four-bit codes as left operands of `wgmma`, and the products of a stage (see kernel.py and weights.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsv4_kernels import ptx
from dsv4_kernels.moe.sm90.weights import STEP, UNIT_BYTES

PRODUCTS = STEP // 32
"""Instructions of a stage."""
# e4m3 of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times 2^-5; one more in the exponent of each doubles them, but for 0.
_SMALL, _LARGE = 0x14100800, 0x24201C18
_SMALL_DOUBLED, _LARGE_DOUBLED = 0x08080800, 0x08080808


@cute.jit
def fragments(codes: Int32, shifts: Int32, lane: Int32) -> list:
    """A lane's part of 16 rows and 128 channels as e4m3: the four words of each of the four instructions.

    Args:
        codes, shifts: of the warp's unit in a stage, in shared memory.
        lane: of the warp.
    """
    halves = [ptx.load_shared_16_bytes(codes + half * (UNIT_BYTES // 2) + lane * 16) for half in range(2)]
    words = [*halves[0], *halves[1]]
    shift_word = ptx.asm("ld.shared.b32 {$w0}, [{$r0}];", [Uint32], shifts + lane // 4 * 4)
    left = []
    for group in cutlass.range_constexpr(PRODUCTS):
        halves = range(2 * group, 2 * group + 2)
        of_rows = [unpack(words[half], (shift_word >> (4 * half)) & 15) for half in halves]
        left += [of_rows[0][0], of_rows[1][0], of_rows[0][1], of_rows[1][1]]
    return left


def unpack(word: Uint32, shift: Uint32) -> tuple:
    """Eight codes times 2^(shift - 5), as e4m3: channels 4 t to 4 t + 3 of 32, and those 16 behind."""
    small, large = _SMALL + shift * _SMALL_DOUBLED, _LARGE + shift * _LARGE_DOUBLED
    return ptx.asm(
        "{\n.reg .b32 low, high, other;\nand.b32 low, {$r0}, 0x77777777;\nshr.u32 high, low, 16;\n"
        "prmt.b32 low, {$r1}, {$r2}, low;\nprmt.b32 high, {$r1}, {$r2}, high;\nshl.b32 other, {$r0}, 4;\n"
        # (a & b) | c
        "lop3.b32 {$w0}, {$r0}, 0x80808080, low, 0xEA;\nlop3.b32 {$w1}, other, 0x80808080, high, 0xEA;\n}",
        [Uint32, Uint32],
        word,
        small,
        large,
    )


def multiply(left: list, slots: int, tokens: Int32) -> list:
    """64 rows with the slots of a stage over 128 channels: a lane's sums.

    One statement from fence to wait: nothing may touch the registers in between. Meanwhile other warpgroups unpack.

    Args:
        left: of `fragments`.
        slots: N.
        tokens: [N, 128] e4m3 in shared memory, swizzled by 128 bytes.
    """
    outs = ", ".join(f"{{$w{i}}}" for i in range(slots // 2))
    # Start in units of 16 bytes; 1,024 bytes from 8 rows to the next 8; swizzle of 128 bytes.
    descriptor = (1 << 62) | (8 * STEP // 16 << 32) | (1 << 16)
    lines = [
        "{",
        ".reg .b64 at, b;",
        ".reg .b32 zero;",
        ".reg .pred add_none, add;",
        "mov.b32 zero, 0;",
        "setp.ne.b32 add_none, zero, 0;",
        "setp.eq.b32 add, zero, 0;",
        f"cvt.u64.u32 at, {{$r{4 * PRODUCTS}}};",
        "shr.u64 at, at, 4;",
        f"or.b64 at, at, {descriptor:#x};",
        "wgmma.fence.sync.aligned;",
    ]
    for product in range(PRODUCTS):
        words = ", ".join(f"{{$r{4 * product + i}}}" for i in range(4))
        lines += [
            f"add.s64 b, at, {product * 32 // 16};",
            f"wgmma.mma_async.sync.aligned.m64n{slots}k32.f32.e4m3.e4m3 {{{outs}}}, {{{words}}}, b, "
            f"{'add' if product else 'add_none'}, 1, 1;",
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
    return list(ptx.asm("\n".join(lines), [Float32] * (slots // 2), *left, tokens))
