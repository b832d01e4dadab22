"""Routed experts in NVFP4, weights and inputs, by this package's kernels for Blackwell: the MoE runner "dsv4"."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv4_kernels.moe.weights import Nvfp4Experts, tile_in_place
from sglang_dsv4.layers.packed_experts import PackedExperts, random_codes
from sglang_dsv4.model_config.config import NVFP4_WEIGHT_BLOCK, Config

OF_A_DRAFT = ".decoder."
"""Part of the names of a draft's modules, by which SGLang's quantisation methods recognise them, too."""


def packed_experts_of(config: Config, prefix: str) -> PackedExperts:
    """A layer's packed experts in the format of the checkpoint; a draft's stay MXFP4 where the target's are NVFP4.

    Raises:
        ConfigError: as for the class.
    """
    if config.nvfp4_experts and OF_A_DRAFT not in f".{prefix}.":
        return Nvfp4PackedExperts(config, prefix)
    return PackedExperts(config, prefix)


class Nvfp4PackedExperts(PackedExperts):
    """This rank's routed experts in NVFP4; parameters are named as SGLang's.

    ==================  =====  ==========================================
    `w13_weight`        uint8  [E_local, 2 I_local, d / 2]
    `…_scale`           e4m3   [E_local, 2 I_local, d / 16]; after loading in tiles
    `…_scale_2`         fp32   [E_local, 2]: of w1 and w3; w2: [E_local]
    `w13_input_scale`   fp32   as `…_scale_2`; products use the largest
    ==================  =====  ==========================================

    Inputs are rounded to NVFP4 by the largest input scale of the local experts, as in SGLang's products.
    """

    numbers = "nvfp4"

    def _add_matrix(self, name: str, rows: int, k: int) -> None:
        experts, stem = self.num_local_experts, name.removesuffix("weight")
        of_matrices = (experts, 2) if stem == "w13_" else (experts,)
        scale = torch.full((experts, rows, k // NVFP4_WEIGHT_BLOCK), 0x38, dtype=torch.uint8)  # 1 in e4m3
        self.add_parameter(name, random_codes(experts, rows, k // 2).view(torch.uint8))
        self.add_parameter(f"{name}_scale", scale.view(torch.float8_e4m3fn))
        self.add_parameter(f"{name}_scale_2", torch.ones(of_matrices, dtype=torch.float32))
        self.add_parameter(f"{stem}input_scale", torch.ones(of_matrices, dtype=torch.float32))

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, name: str, shard_id: str, expert_id: int) -> None:
        """Copy this rank's part as the base class does; a scale of a whole matrix is `loaded []`."""
        if loaded.dim():
            super().weight_loader(param, loaded, name, shard_id, expert_id)
            return
        local = expert_id - self.first_local_expert
        if 0 <= local < self.num_local_experts:
            of_matrices = param.data[local]
            (of_matrices[int(shard_id == "w3")] if of_matrices.dim() else of_matrices).copy_(loaded)

    def _arranged(self) -> tuple[Nvfp4Experts, int]:
        return (
            Nvfp4Experts(
                self.w13_weight.data,
                tile_in_place(self.w13_weight_scale.data),
                self.w13_weight_scale_2.data,
                self.w13_input_scale.data.max(),
                self.w2_weight.data,
                tile_in_place(self.w2_weight_scale.data),
                self.w2_weight_scale_2.data,
                self.w2_input_scale.data.max(),
                in_tiles=True,
            ).with_factors(),
            0,
        )
