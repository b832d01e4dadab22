"""Conversion of four-bit codes to left operands of `wgmma`, and the products of a stage (kernel.py, weights.py).

PTX text, because a statement must hold the registers of a product from its fence to its wait.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsv4_kernels.device import ptx
from dsv4_kernels.device.wgmma import prepared
from dsv4_kernels.moe.sm90.weights import STEP, UNIT_BYTES

PRODUCTS = STEP // 32
"""`wgmma` instructions of a stage."""
LEFT_WORDS = 4 * PRODUCTS
"""Words of a lane's left operands for all instructions of a stage."""
MOST_COLUMNS = 80
"""Slots of a piece of a wide work tile: registers hold the products of two pieces, in addition to all sums."""
# e4m3 of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times 2^-5; an increment of the exponent doubles each except 0.
_SMALL, _LARGE = 0x14100800, 0x24201C18
_SMALL_DOUBLED, _LARGE_DOUBLED = 0x08080800, 0x08080808


@cute.jit
def fragments(codes: Int32, shifts: Int32, lane: Int32) -> list:
    """A lane's fragments of 16 rows and 128 channels as e4m3: four words for each of the four instructions.

    Args:
        codes, shifts: addresses of the warp's unit in a stage, in shared memory.
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
    """Eight codes times 2^(shift - 5) as e4m3: channels 4 t to 4 t + 3 of 32, and the same plus 16."""
    return ptx.asm("\n".join(unpacked("{$r0}", "{$r1}", "{$w0}", "{$w1}")), [Uint32, Uint32], word, shift)


def unpacked(word: str, shift: str, first: str, second: str) -> list[str]:
    """PTX lines of `unpack`, with these registers."""
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
    """A lane's part of the products of 64 rows with the slots of a stage, summed over 128 channels.

    One PTX statement from fence to wait: the compiler must not touch the registers in between. Other warpgroups unpack
    in the meantime.

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
    """Adds a step's products to `sums`; returns the next step's codes as e4m3, in the form of `fragments`.

    One PTX statement, as in `multiply`. Slots are divided into pieces: two are multiplied while a third is added.

    Args:
        left: of `fragments`.
        slots: N.
        tokens: [N, 128] e4m3 in shared memory, swizzled by 128 bytes.
        scales: fp32 [N] in shared memory, address of the lane's first slot.
        codes, shifts: addresses of the lane's codes and shifts of the next step, in shared memory.
        sums: incremented by each product times the scale of its slot.
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
    """Slots of a piece: the fewest pieces, at least two, of whole groups of eight slots and at most MOST_COLUMNS."""
    return next(slots // n for n in range(2, slots) if slots % (8 * n) == 0 and slots // n <= MOST_COLUMNS)


def started(outs: list[str], columns: int, first_slot: int) -> list[str]:
    """PTX lines that start the products of `columns` slots from `first_slot` on and commit them as a wgmma group."""
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
    """PTX lines of `fragments` from addresses of the lane's codes and shifts, into results from `first_result` on."""
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
