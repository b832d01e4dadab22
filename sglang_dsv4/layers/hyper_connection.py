"""Manifold-constrained hyper-connections: how a sublayer reads and writes the streams (specification, section 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv4_kernels.hyper_connection import hc_head, hc_post, hc_pre
from sglang_dsv4.config import Config


def _fp32(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32), requires_grad=False)


class HyperConnection(nn.Module):
    """Coefficients of one sublayer: fp32 `fn [(2+n)n, n*d]`, `base [(2+n)n]`, `scale [3]`; n = `hc_mult` streams."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        streams = config.hc_mult
        self.fn = _fp32((2 + streams) * streams, streams * config.hidden_size)
        self.base = _fp32((2 + streams) * streams)
        self.scale = _fp32(3)
        self.norm_eps = config.rms_norm_eps
        self.hc_eps = config.hc_eps
        self.iterations = config.hc_sinkhorn_iters

    def pre(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mix the streams into the sublayer's input (section 2.2).

        Args:
            streams: [T, n, d] model dtype.

        Returns:
            input [T, d] model dtype, post [T, n] fp32, comb [T, n, n] fp32.
        """
        return hc_pre(streams, self.fn, self.base, self.scale, self.norm_eps, self.hc_eps, self.iterations)

    def post(self, output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Write the sublayer's output back and mix the streams: [T, n, d] (section 2.3)."""
        return hc_post(output, streams, post, comb)


class HyperConnectionHead(nn.Module):
    """Mixes the streams into one row before the logits (section 2.4): fp32 `fn [n, n*d]`, `base [n]`, `scale [1]`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fn = _fp32(config.hc_mult, config.hc_mult * config.hidden_size)
        self.base = _fp32(config.hc_mult)
        self.scale = _fp32(1)
        self.norm_eps = config.rms_norm_eps
        self.hc_eps = config.hc_eps

    def forward(self, streams: Tensor) -> Tensor:
        """`streams [T, n, d] -> [T, d]` in the model's dtype."""
        return hc_head(streams, self.fn, self.base, self.scale, self.norm_eps, self.hc_eps)
