"""Products of a stage on Hopper, e4m3 by e4m3: fragments of the tokens, and the PTX statement that multiplies and adds.

Tokens are the left operand, in registers; weights the right one, in shared memory (see fp8_kernel.py).
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsv4_kernels.device import ptx, wgmma
from dsv4_kernels.linear.fp8_plan import BLOCK, MMA_TOKENS, PRODUCTS, Plan

ROW_BYTES = BLOCK
"""Bytes after which the swizzle repeats."""


def fragments(plan: Plan, tokens: Int32, places: tuple, exists: Int32) -> list:
    """A warp's 16 tokens over a stage, four words for each instruction; zeros unless `exists`.

    Args:
        plan: of the kernel.
        tokens: address of the stage's tokens.
        places: result of `places_of_tokens`.
        exists: whether the warp has tokens at all.
    """
    words = []
    for block in range(plan.blocks):
        for product in range(PRODUCTS):
            words += load_matrices_if(exists, tokens + places[product] + block * (plan.tokens * ROW_BYTES))
    return words


def places_of_tokens(plan: Plan, first_token: Int32, lane: Int32) -> tuple:
    """Offsets in a block that a lane passes to `ldmatrix` for each of the four instructions: of the first or the second
    16 of the instruction's 32 bytes of row lane % 16."""
    row = (first_token + lane % 16) % plan.tokens  # with 8 tokens the second eight are the first again
    return tuple(row * ROW_BYTES + ((2 * product + lane // 16) ^ (row & 7)) * 16 for product in range(PRODUCTS))


def load_matrices_if(exists: Int32, address: Int32) -> tuple:
    """Four 8 x 8 matrices of two-byte elements, or zeros; all lanes of the warp must agree."""
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(4))
    return ptx.asm(
        "{\n.reg .pred p;\nsetp.ne.s32 p, {$r1}, 0;\n"
        f"{zeros}\n@p ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];\n}}",
        [Uint32] * 4,
        address,
        exists,
    )


def places_of_scales(plan: Plan, first_token: Int32, lane: Int32) -> tuple:
    """Offsets in a stage's scales of the lane's two tokens, for the first block."""
    return tuple((first_token + lane // 4 + 8 * half) % plan.tokens * 4 for half in range(2))


def multiply_add(plan: Plan, left: list, weights: Int32, scales: Int32, places: tuple, sums: cute.Tensor) -> None:
    """Adds a stage's products to a lane's sums: element 4 j + 2 h + b belongs to token lane // 4 + 8 h and to the
    tile's row 8 j + 2 (lane % 4) + b.

    One PTX statement from the fence to the last wait: the compiler must not touch the registers in between. A block is
    added while later blocks are multiplied, and scales are loaded meanwhile.

    Args:
        plan: of the kernel.
        left: result of `fragments`.
        weights, scales: addresses of the stage's parts.
        places: result of `places_of_scales`.
        sums: added to.
    """
    count = plan.accumulators
    operands = [*left, weights, *(scales + place for place in places), scales, *(sums[i] for i in range(count))]
    weights_at, scales_at, before_at = len(left), len(left) + 1, len(left) + 4
    blocks = [[f"a{block}_{i}" for i in range(count)] for block in range(plan.blocks)]
    lines = products(plan, blocks, f"{{$r{weights_at}}}")
    for block in range(plan.blocks):
        for half in range(2):
            lines.append(f"ld.shared.f32 f{block}_{half}, [{{$r{scales_at + half}}}+{block * plan.tokens * 4}];")
        lines.append(f"ld.shared.f32 w{block}, [{{$r{scales_at + 2}}}+{(plan.blocks * plan.tokens + block) * 4}];")
    for block, names in enumerate(blocks):
        lines += [f"mul.rn.f32 f{block}_{half}, f{block}_{half}, w{block};" for half in range(2)]
        lines.append(f"wgmma.wait_group.sync.aligned {plan.blocks - 1 - block};")
        for i, name in enumerate(names):
            before = f"{{$w{i}}}" if block else f"{{$r{before_at + i}}}"
            lines.append(f"fma.rn.f32 {{$w{i}}}, {name}, f{block}_{i // 2 % 2}, {before};")
    after = ptx.asm("\n".join(["{", *lines, "}"]), [Float32] * count, *operands)
    for i in range(count):
        sums[i] = after[i]


def products(plan: Plan, blocks: list[list[str]], weights: str) -> list[str]:
    """PTX lines that declare registers and start the products of all blocks, one `wgmma` group a block."""
    registers = (f".reg .f32 {', '.join(names)}, f{i}_0, f{i}_1, w{i};" for i, names in enumerate(blocks))
    lines = [*registers, *wgmma.prepared(weights), "wgmma.fence.sync.aligned;"]
    for block, names in enumerate(blocks):
        for product in range(PRODUCTS):
            words = ", ".join(f"{{$r{4 * (block * PRODUCTS + product) + i}}}" for i in range(4))
            lines += [
                f"add.s64 b, at, {(block * plan.rows * ROW_BYTES + product * 32) // 16};",
                f"wgmma.mma_async.sync.aligned.m{MMA_TOKENS}n{plan.rows}k32.f32.e4m3.e4m3 {{{', '.join(names)}}}, "
                f"{{{words}}}, b, {'add' if product else 'add_none'}, 1, 1;",
            ]
        lines.append("wgmma.commit_group.sync.aligned;")
    return lines
