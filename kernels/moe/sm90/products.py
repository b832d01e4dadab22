"""Four-bit codes as left operands of `wgmma`, and the products of a stage (see kernel.py and weights.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsv4_kernels.device import ptx
from dsv4_kernels.moe.sm90.weights import STEP, UNIT_BYTES

PRODUCTS = STEP // 32
"""Instructions of a stage."""
LEFT_WORDS = 4 * PRODUCTS
"""Of a lane, of all of them."""
MOST_COLUMNS = 80
"""Of a piece of a wide tile's slots: two pieces' products are in registers at a time, beside all sums."""
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
    return ptx.asm("\n".join(unpacked("{$r0}", "{$r1}", "{$w0}", "{$w1}")), [Uint32, Uint32], word, shift)


def unpacked(word: str, shift: str, first: str, second: str) -> list[str]:
    """Lines for `unpack` by the names of registers."""
    return [
        "{",
        ".reg .b32 small, large, low, high, other;",
        f"mad.lo.u32 small, {shift}, {_SMALL_DOUBLED:#x}, {_SMALL:#x};",
        f"mad.lo.u32 large, {shift}, {_LARGE_DOUBLED:#x}, {_LARGE:#x};",
        f"and.b32 low, {word}, 0x77777777;",
        "shr.u32 high, low, 16;",
        "prmt.b32 low, small, large, low;",
        "prmt.b32 high, small, large, high;",
        f"shl.b32 other, {word}, 4;",
        f"lop3.b32 {first}, {word}, 0x80808080, low, 0xEA;",  # (a & b) | c
        f"lop3.b32 {second}, other, 0x80808080, high, 0xEA;",
        "}",
    ]


def multiply(left: list, slots: int, tokens: Int32) -> list:
    """64 rows with the slots of a stage over 128 channels: a lane's sums.

    One statement from fence to wait: nothing may touch the registers in between. Meanwhile other warpgroups unpack.

    Args:
        left: of `fragments`.
        slots: N.
        tokens: [N, 128] e4m3 in shared memory, swizzled by 128 bytes.
    """
    outs = [f"{{$w{i}}}" for i in range(slots // 2)]
    lines = [*prepared(f"{{$r{LEFT_WORDS}}}"), *started(outs, slots, 0), "wgmma.wait_group.sync.aligned 0;"]
    return list(ptx.asm("\n".join(["{", *lines, "}"]), [Float32] * len(outs), *left, tokens))


def multiply_and_convert(
    left: list, slots: int, tokens: Int32, scales: Int32, codes: Int32, shifts: Int32, sums: cute.Tensor
) -> list:
    """A step's products, added to the sums, and meanwhile the next one's codes as e4m3, as `fragments` gives them.

    One statement, as `multiply`. Slots are cut into pieces, of which two are multiplied while a third is added.

    Args:
        left: of `fragments`.
        slots: N.
        tokens: [N, 128] e4m3 in shared memory, swizzled by 128 bytes.
        scales: fp32 [N] in shared memory, from the lane's first slot on.
        codes, shifts: of the next step, in shared memory, from the lane's on.
        sums: added to, each product times its slot's scale.
    """
    count, columns = slots // 2, columns_of(slots)
    pieces, numbers = slots // columns, range(columns // 2)
    tokens_at, scales_at, codes_at, shifts_at, sums_at = range(LEFT_WORDS, LEFT_WORDS + 5)
    buffers = [[f"p{buffer}_{i}" for i in numbers] for buffer in range(2)]
    lines = prepared(f"{{$r{tokens_at}}}")
    lines += [f".reg .f32 {', '.join(names)};" for names in buffers]
    for piece in range(2):
        lines += started(buffers[piece], columns, piece * columns)
    lines += converted(f"{{$r{codes_at}}}", f"{{$r{shifts_at}}}", count)
    for piece in range(pieces):
        lines.append(f"wgmma.wait_group.sync.aligned {1 if piece + 1 < pieces else 0};")
        for j in range(columns // 8):
            slot = piece * columns + 8 * j
            lines += ["{", ".reg .f32 s0, s1;", f"ld.shared.v2.f32 {{s0, s1}}, [{{$r{scales_at}}}+{4 * slot}];"]
            for i in range(4):
                at = slot // 2 + i
                name = buffers[piece % 2][4 * j + i]
                lines.append(f"fma.rn.f32 {{$w{at}}}, {name}, s{i % 2}, {{$r{sums_at + at}}};")
            lines.append("}")
        if piece + 2 < pieces:
            lines += started(buffers[piece % 2], columns, (piece + 2) * columns)
    kinds = [Float32] * count + [Uint32] * LEFT_WORDS
    operands = *left, tokens, scales, codes, shifts, *(sums[i] for i in range(count))
    found = ptx.asm("\n".join(["{", *lines, "}"]), kinds, *operands)
    for i in range(count):
        sums[i] = found[i]
    return list(found[count:])


def columns_of(slots: int) -> int:
    """Of a piece: the fewest pieces, two at least, of whole groups of eight slots and at most MOST_COLUMNS."""
    return next(slots // n for n in range(2, slots) if slots % (8 * n) == 0 and slots // n <= MOST_COLUMNS)


def prepared(tokens: str) -> list[str]:
    """Lines in front of the first of `started`: predicates, and the descriptor of the tokens."""
    # Start in units of 16 bytes; 1,024 bytes from 8 rows to the next 8; swizzle of 128 bytes.
    descriptor = (1 << 62) | (8 * STEP // 16 << 32) | (1 << 16)
    return [
        ".reg .b64 at, b;",
        ".reg .b32 zero;",
        ".reg .pred add_none, add;",
        "mov.b32 zero, 0;",
        "setp.ne.b32 add_none, zero, 0;",
        "setp.eq.b32 add, zero, 0;",
        f"cvt.u64.u32 at, {tokens};",
        "shr.u64 at, at, 4;",
        f"or.b64 at, at, {descriptor:#x};",
    ]


def started(outs: list[str], columns: int, first_slot: int) -> list[str]:
    """Lines that start the products of some slots with the words of the arguments from the first on, a group."""
    lines = ["wgmma.fence.sync.aligned;"]
    for product in range(PRODUCTS):
        words = ", ".join(f"{{$r{4 * product + i}}}" for i in range(4))
        lines += [
            f"add.s64 b, at, {(first_slot * STEP + product * 32) // 16};",
            f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {{{', '.join(outs)}}}, {{{words}}}, b, "
            f"{'add' if product else 'add_none'}, 1, 1;",
        ]
    return [*lines, "wgmma.commit_group.sync.aligned;"]


def converted(codes: str, shifts: str, first_result: int) -> list[str]:
    """Lines for `fragments` by addresses of the lane's codes and shifts, into results from a number on."""
    words = [f"c{i}" for i in range(2 * PRODUCTS)]
    results = [f"{{$w{first_result + i}}}" for i in range(LEFT_WORDS)]
    lines = [f".reg .b32 {', '.join(words)}, shift_word, shift;"]
    for half in range(2):
        four = ", ".join(words[4 * half : 4 * half + 4])
        lines.append(f"ld.shared.v4.b32 {{{four}}}, [{codes}+{half * (UNIT_BYTES // 2)}];")
    lines.append(f"ld.shared.b32 shift_word, [{shifts}];")
    for half in range(2 * PRODUCTS):
        group, of_rows = divmod(half, 2)
        lines += [f"shr.u32 shift, shift_word, {4 * half};", "and.b32 shift, shift, 15;"]
        lines += unpacked(words[half], "shift", *results[4 * group + of_rows : 4 * group + 4 : 2])
    return lines
