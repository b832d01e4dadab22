"""NVFP4 experts of a checkpoint: four tensors a matrix, instead of the release's `weight` and `scale`.

======================  =====  ===========  ===========================================================
`X.weight`              uint8  [n, k / 2]   two e2m1 codes a byte, the even column in the low nibble
`X.weight_scale`        e4m3   [n, k / 16]  not negative
`X.weight_scale_2`      fp32   []           one a matrix; equal for an expert's w1 and w3
`X.input_scale`         fp32   []           calibrated: amax / (6 * 448) of the product's input
======================  =====  ===========  ===========================================================

This is the format of modelopt's export for DeepSeek-V4 (`examples/deepseek/deepseek_v4`) and of
nvidia/DeepSeek-V4-*-NVFP4, whose draft experts keep the release's format. SGLang's NVFP4 products divide their input by
`input_scale` and round it to NVFP4. On a CPU the input is quantised to e4m3 as in the release, so `input_scale` is
checked and then dropped.
"""

from __future__ import annotations

import torch

from sglang_dsv4.model_config.config import NVFP4_WEIGHT_BLOCK

WEIGHT_DTYPE = torch.uint8
"""Dtype of NVFP4 codes; the release's MXFP4 codes are int8."""

SCALES = ("weight_scale", "weight_scale_2", "input_scale")
"""Last parts of the names of the scales of `X.weight`."""


def scale_names(weight_name: str) -> tuple[str, str, str]:
    """Names of the scales of `X.weight`, in the order of `SCALES`."""
    stem = weight_name.removesuffix("weight")
    return tuple(stem + last for last in SCALES)


def weight_name(name: str) -> str | None:
    """`X.weight` for the name of one of its NVFP4 scales; None for any other name."""
    stem, _, last = name.rpartition(".")
    return f"{stem}.weight" if last in SCALES else None


def accepted(name: str, rows: int, columns: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """The (dtype, shape) pairs that the scale `name` of a matrix `[rows, columns]` may have."""
    if name.endswith(".weight_scale"):
        return [(torch.float8_e4m3fn, (rows, columns // NVFP4_WEIGHT_BLOCK))]
    return [(torch.float32, ()), (torch.float32, (1,))]
