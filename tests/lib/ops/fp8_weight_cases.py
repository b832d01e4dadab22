"""FP8 weights of grouped products, their tokens, the kernel in the emulator, and the three kernels with its bits."""

from __future__ import annotations

import torch
from ops.memory_layout import strided
from ops.number_formats import same_bits
from ops.order_of_summation import as_from_fp8
from ops.row_kernels import emulated_row_kernel
from torch import Tensor

from dsv4_kernels.linear import HeadRotation
from dsv4_kernels.number_formats import dequantise_fp8_weight, quantise_fp8_weight
from dsv4_kernels.rope import rope_frequencies

FP8 = torch.float8_e4m3fn


def weight(groups: int, rows: int, channels: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Codes and scales with gaps: a different scale for every block of 128 x 128, within 2^10 of each other."""
    generator = torch.Generator().manual_seed(seed)
    shape = groups, rows // 128, channels // 128
    exponents = torch.randperm(shape[0] * shape[1] * shape[2], generator=generator).view(shape) % 11 - 12
    codes, _ = quantise_fp8_weight(torch.randn(groups * rows, channels, generator=generator))
    return with_gaps(codes.view(groups, rows, channels)), strided(torch.exp2(exponents), 1, 1, 3)


def with_gaps(codes: Tensor) -> Tensor:
    return strided(codes.view(torch.uint8), 1, 1, 48).view(FP8)


def plain(codes: Tensor, scale: Tensor) -> Tensor:
    return torch.stack([dequantise_fp8_weight(*pair, torch.bfloat16) for pair in zip(codes, scale, strict=True)])


def tokens_of(tokens: int, groups: int, channels: int, seed: int = 0) -> tuple[Tensor, HeadRotation]:
    """x with gaps, at positions that are all different."""
    x = torch.randn(tokens, groups, channels, generator=torch.Generator().manual_seed(seed)).bfloat16()
    positions = torch.arange(tokens) * 7919 % 1_000_000 + 3
    return strided(x, 1, 1, 40), HeadRotation(positions, rope_frequencies(64, 10000.0, None), 512)


def some(rotation: HeadRotation, rows: object) -> HeadRotation:
    return rotation._replace(positions=rotation.positions[rows].contiguous())


def product(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    rotation: HeadRotation | None,
    quantises: bool,
    tile: int | None = None,
    is_constant: bool = True,
    kernel: str = "sm90",
    **options: object,
) -> tuple[Tensor, ...]:
    """The kernel's result, in tensors with gaps that must not be written: bf16, or codes and scales."""
    from dsv4_kernels.linear import fp8_weight_gpu

    shape = x.shape[0], *codes.shape[:2]
    kept = x.clone()
    outs = [Gapped(shape, (2, 1, 12), FP8 if quantises else torch.bfloat16)]
    if quantises:
        outs.append(Gapped((shape[1] * shape[2] // 128, shape[0]), (2, 3), torch.float32))
        outs[1].view = outs[1].view.T
    chosen = None if tile is None else (*fp8_weight_gpu.TILES, *fp8_weight_gpu.RESIDENT)[tile]
    with emulated_row_kernel(kernel, constant=(codes, scale) if is_constant else (), **options):
        fp8_weight_gpu.run(kernel, x, codes, scale, rotation, *(out.view for out in outs), tile=chosen)
    assert all(out.gaps_are_as_they_were() for out in outs) and same_bits(x, kept)
    return tuple(out.view.contiguous() for out in outs)


class Gapped:
    """A tensor for a result, inside a larger one."""

    def __init__(self, shape: tuple[int, ...], gaps: tuple[int, ...], dtype: torch.dtype) -> None:
        self.slices = tuple(slice(n) for n in shape)
        self.whole = torch.empty([n + gap for n, gap in zip(shape, gaps, strict=True)], dtype=dtype)
        self.whole.view(torch.uint8).fill_(0x7F)
        self.view = self.whole[self.slices]

    def gaps_are_as_they_were(self) -> bool:
        copy = self.whole.view(torch.uint8).unflatten(-1, (-1, self.whole.itemsize)).clone()
        copy[self.slices] = 0x7F
        return bool((copy == 0x7F).all())


def one_by_one(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    rotation: HeadRotation | None,
    quantises: bool,
    kernel: str = "sm90",
) -> tuple:
    """The result of three kernels with a bf16 weight: RoPE in place, the batch-invariant product, the quantiser. In the
    emulator the order within an instruction matters, so the product gets the channels in the FP8-weight kernel's order.
    """
    from dsv4_kernels.linear import gpu
    from dsv4_kernels.quant import gpu as quantiser
    from dsv4_kernels.rope import gpu as rope

    x = x.clone()
    with emulated_row_kernel(kernel, "eager"):
        if rotation is not None:
            getattr(rope, f"{kernel}_in_place")(
                x.unflatten(2, (-1, 512)).flatten(1, 2), rotation.positions, rotation.frequencies, True
            )
        out = getattr(gpu, f"{kernel}_grouped_linear")(as_from_fp8(x), as_from_fp8(plain(codes, scale)))
        return getattr(quantiser, kernel)(out.flatten(1), 128, True) if quantises else (out,)


def same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Whether the bits are equal, in any layout."""
    pairs = zip(got, expected, strict=True)
    return all(same_bits(a.reshape(len(a), -1).contiguous(), b.reshape(len(b), -1).contiguous()) for a, b in pairs)
