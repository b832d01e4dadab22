"""Geometry of pools with one layer of each kind, in the row formats of a release."""

from __future__ import annotations

import torch

from dsv4_kernels.kv_layout import RowFormat
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, HCA_RATIO, SWA_RATIO

GEOMETRY = PoolGeometry(
    ratios=(SWA_RATIO, CSA_RATIO, HCA_RATIO),
    row_dim=512,
    row_format=RowFormat.FP8,
    index_format=RowFormat.INDEX_FP4,
    dtype=torch.bfloat16,
)
