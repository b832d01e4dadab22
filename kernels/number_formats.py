"""Number formats of activations, KV rows and weights, in plain PyTorch: e4m3, e2m1 and their block scales.

`encode_*` gives codes and scales, `decode_*` the values. `quantise_*_weight` and `dequantise_*_weight` convert between
plain matrices and a checkpoint's tensors (DeepSeek-V4 specification, section 4.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0

_FP8_AMAX_FLOOR = 1e-4
_FP4_AMAX_FLOOR = E2M1_MAX * 2.0**-126
_FP8_WEIGHT_BLOCK = 128
_FP4_BLOCK = 32
_NVFP4_WEIGHT_BLOCK = 16
_E4M3_TINY = 2.0**-9


def ue8m0_ceil(x: Tensor) -> Tensor:
    """The smallest power of two that is at least x: `2**ceil(log2(x))`, computed from the bits of the float.

    Args:
        x: any shape, positive normal fp32, at most 2**127.

    Returns:
        fp32, same shape.
    """
    bits = x.float().contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def _blocks(x: Tensor, block: int) -> Tensor:
    """x in blocks: [..., d] -> fp32 [..., ceil(d / block), block], zero-padded. Zeros never raise a block's maximum."""
    padding = -x.shape[-1] % block
    x = x.float()
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    return x.unflatten(-1, (-1, block))


def encode_fp8(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The codes and scales of `fp8_qdq`.

    Args:
        x: [..., d], any floating dtype.
        block: channels that share a scale.

    Returns:
        codes [..., d] float8_e4m3fn, scales [..., ceil(d / block)] fp32 powers of two.
    """
    blocks = _blocks(x, block)
    amax = blocks.abs().amax(-1).clamp(min=_FP8_AMAX_FLOOR)
    scales = ue8m0_ceil(amax * (1.0 / E4M3_MAX))
    codes = (blocks / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2)[..., : x.shape[-1]], scales


def decode_fp8(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """The fp32 values of `encode_fp8`'s result: [..., d]."""
    return _e4m3(codes) * scales.repeat_interleave(block, -1)[..., : codes.shape[-1]]


def _e4m3(codes: Tensor) -> Tensor:
    """`codes.float()` by a table of all 256 values: on a CPU five times as fast as PyTorch's conversion."""
    values = torch.arange(256, dtype=torch.uint8, device=codes.device).view(torch.float8_e4m3fn).float()
    return values.index_select(0, codes.view(torch.uint8).reshape(-1).int()).view(codes.shape)


def encode_fp4(x: Tensor, block: int = _FP4_BLOCK) -> tuple[Tensor, Tensor]:
    """The codes and scales of `fp4_qdq`.

    Args:
        x: [..., d], any floating dtype.
        block: channels that share a scale.

    Returns:
        codes [..., d] uint8 (0-15: sign in bit 3, magnitude index in bits 0-2), scales [..., ceil(d / block)] fp32
        powers of two.
    """
    values, scales = round_to_e2m1(x, block)
    return _e2m1_codes(values).flatten(-2)[..., : x.shape[-1]], scales


def _e2m1_codes(values: Tensor) -> Tensor:
    """uint8 codes of e2m1 values in fp32: the inverse of `_e2m1`."""
    magnitude = values.abs()
    index = torch.where(
        magnitude < 2.0, magnitude * 2.0, torch.where(magnitude < 4.0, magnitude + 2.0, magnitude * 0.5 + 4.0)
    )
    return index.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def round_to_e2m1(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """e2m1 values in fp32 [..., blocks, block] before they are multiplied by the scales, and the scales [...,
    blocks]."""
    blocks = _blocks(x, block)
    amax = blocks.abs().amax(-1).clamp(min=_FP4_AMAX_FLOOR)
    scales = ue8m0_ceil(amax * (1.0 / E2M1_MAX))
    return _nearest_e2m1(blocks / scales.unsqueeze(-1)), scales


def _nearest_e2m1(scaled: Tensor) -> Tensor:
    """The nearest e2m1 values, in fp32; magnitudes above 6 become 6."""
    scaled = scaled.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = scaled.abs()
    # The spacing of e2m1 is 0.5 below 2, 1 below 4, then 2. torch.round rounds a tie to the even multiple of the
    # spacing, which is the even code because each range begins at an even code (0, 4, 6).
    spacing = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / spacing) * spacing, scaled)


def decode_fp4(codes: Tensor, scales: Tensor, block: int = _FP4_BLOCK) -> Tensor:
    """The fp32 values of `encode_fp4`'s result: [..., d]."""
    return _e2m1(codes) * scales.repeat_interleave(block, -1)[..., : codes.shape[-1]]


def _e2m1(codes: Tensor) -> Tensor:
    code = torch.arange(8, device=codes.device)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6
    magnitude = torch.where(code < 4, code * 0.5, torch.where(code < 6, code - 2.0, code * 2.0 - 8.0))
    values = torch.cat((magnitude, -magnitude))
    return values.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def dequantise_fp8_weight(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The plain matrix of a checkpoint's FP8 tensor with its 128x128 block scales.

    Args:
        weight: [n, k] float8_e4m3fn.
        scale: [ceil(n / 128), ceil(k / 128)] float8_e8m0fnu (or the same powers of two in fp32).
        dtype: of the result; bf16 and fp32 represent every value of the matrix exactly.

    Returns:
        [n, k] in `dtype`.

    Raises:
        ValueError: scale's shape does not match weight's.
    """
    n, k = weight.shape
    expected = (-(-n // _FP8_WEIGHT_BLOCK), -(-k // _FP8_WEIGHT_BLOCK))
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale of an FP8 weight {n}x{k} has shape {tuple(scale.shape)}; expected {expected}")
    rows = scale.float().repeat_interleave(_FP8_WEIGHT_BLOCK, 0)[:n]
    return (weight.float() * rows.repeat_interleave(_FP8_WEIGHT_BLOCK, 1)[:, :k]).to(dtype)


def quantise_fp8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `dequantise_fp8_weight`: rounds a matrix to e4m3 with one power-of-two scale a 128x128 block.

    Args:
        weight: [n, k], any floating dtype.

    Returns:
        weight [n, k] float8_e4m3fn, scale [ceil(n / 128), ceil(k / 128)] float8_e8m0fnu.
    """
    n, k = weight.shape
    block = _FP8_WEIGHT_BLOCK
    blocks = torch.nn.functional.pad(weight.float(), (0, -k % block, 0, -n % block))
    blocks = blocks.unflatten(1, (-1, block)).unflatten(0, (-1, block))  # [n / 128, 128, k / 128, 128]
    amax = blocks.abs().amax((1, 3)).clamp(min=_FP8_AMAX_FLOOR)
    scale = ue8m0_ceil(amax * (1.0 / E4M3_MAX))
    codes = (blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).flatten(2).flatten(0, 1)[:n, :k]
    return codes.contiguous().to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu)


def dequantise_fp4_weight(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The plain matrix of a checkpoint's MXFP4 tensor: two e2m1 codes a byte, one scale for 32 columns.

    Args:
        weight: [n, k / 2] int8 or uint8; the low nibble is the even column.
        scale: [n, k / 32] float8_e8m0fnu (or the same powers of two in fp32).
        dtype: of the result; bf16 and fp32 represent every value of the matrix exactly.

    Returns:
        [n, k] in `dtype`.

    Raises:
        ValueError: scale's shape does not match weight's.
    """
    n, half = weight.shape
    if half * 2 % _FP4_BLOCK or tuple(scale.shape) != (n, half * 2 // _FP4_BLOCK):
        raise ValueError(
            f"scale of an FP4 weight of {n}x{half} bytes has shape {tuple(scale.shape)}; expected "
            f"({n}, {half * 2 / _FP4_BLOCK:g})"
        )
    return decode_fp4(unpack_nibbles(weight.view(torch.uint8)), scale.float()).to(dtype)


def quantise_fp4_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `dequantise_fp4_weight`: rounds a matrix to e2m1 with one power-of-two scale for 32 columns.

    Args:
        weight: [n, k], any floating dtype, k a multiple of 32.

    Returns:
        weight [n, k / 2] int8, scale [n, k / 32] float8_e8m0fnu.

    Raises:
        ValueError: k is not a multiple of 32.
    """
    if weight.shape[1] % _FP4_BLOCK:
        raise ValueError(f"an FP4 weight needs a multiple of 32 columns; got shape {tuple(weight.shape)}")
    codes, scale = encode_fp4(weight)
    return pack_nibbles(codes).view(torch.int8), scale.to(torch.float8_e8m0fnu)


def dequantise_nvfp4_weight(weight: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The plain matrix of a checkpoint's NVFP4 tensors: e2m1 codes, an e4m3 scale for 16 columns, one fp32 scale.

    ::

        value = (code * scale) * global_scale       # in fp32: the first product is exact, the second rounds once

    Args:
        weight: [n, k / 2] uint8; the low nibble is the even column.
        scale: [n, k / 16] float8_e4m3fn, none negative.
        global_scale: one fp32 number, of any shape.
        dtype: of the result; bf16 rounds once more.

    Returns:
        [n, k] in `dtype`.

    Raises:
        ValueError: scale's shape does not match weight's, or global_scale is not one number.
    """
    n, half = weight.shape
    if half * 2 % _NVFP4_WEIGHT_BLOCK or tuple(scale.shape) != (n, half * 2 // _NVFP4_WEIGHT_BLOCK):
        raise ValueError(
            f"scale of an NVFP4 weight of {n}x{half} bytes has shape {tuple(scale.shape)}; expected "
            f"({n}, {half * 2 / _NVFP4_WEIGHT_BLOCK:g})"
        )
    if global_scale.numel() != 1:
        raise ValueError(f"global_scale of an NVFP4 weight has shape {tuple(global_scale.shape)}; expected one number")
    values = decode_fp4(unpack_nibbles(weight.view(torch.uint8)), _e4m3(scale), _NVFP4_WEIGHT_BLOCK)
    return (values * global_scale.float().reshape(())).to(dtype)


def quantise_nvfp4_weight(weight: Tensor, amax: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `dequantise_nvfp4_weight`: rounds a matrix to e2m1 over e4m3 scales for 16 columns.

    Args:
        weight: [n, k], any floating dtype, k a multiple of 16.
        amax: the magnitude that 6 * 448 * global_scale represents; None for the matrix's largest. Matrices that must
            share a global scale, as w1 and w3 of an expert do, get the largest of both.

    Returns:
        weight [n, k / 2] uint8, scale [n, k / 16] float8_e4m3fn, global_scale [] fp32.

    Raises:
        ValueError: k is not a multiple of 16.
    """
    if weight.shape[1] % _NVFP4_WEIGHT_BLOCK:
        raise ValueError(f"an NVFP4 weight needs a multiple of 16 columns; got shape {tuple(weight.shape)}")
    largest = weight.abs().amax().float()
    if amax is not None:
        largest = torch.tensor(amax, dtype=torch.float32, device=weight.device)
    global_scale = largest / (E2M1_MAX * E4M3_MAX)
    unit = torch.where(global_scale > 0, global_scale, 1.0)  # 0 only for a matrix of zeros
    return *encode_nvfp4(weight, unit), global_scale


def encode_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 codes and block scales over a given global scale, as for an input.

    ::

        scale = e4m3(clamp(max|x| / (6 * global_scale), 2**-9, 448))      # per 16 neighbours; never 0
        code = e2m1_rne(x / (scale * global_scale))

    Args:
        x: [..., d], any floating dtype, d a multiple of 16.
        global_scale: one fp32 number above 0.

    Returns:
        codes [..., d / 2] uint8, the even channel in the low nibble, scale [..., d / 16] float8_e4m3fn.
    """
    blocks = _blocks(x, _NVFP4_WEIGHT_BLOCK)
    scale = (blocks.abs().amax(-1) / (E2M1_MAX * global_scale)).clamp(_E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    values = _nearest_e2m1(blocks / (_e4m3(scale) * global_scale).unsqueeze(-1))
    return pack_nibbles(_e2m1_codes(values).flatten(-2)), scale


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes [..., d] uint8 (0-15) -> bytes [..., d / 2]; the even index is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
