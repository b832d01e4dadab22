"""Manifold-constrained hyper-connections: how a sublayer reads and writes the streams (specification, section 2).

A sublayer's output is written back in the operation that reads the streams for the next sublayer. Until then it is kept
in a `Pending`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv4_kernels.host.expert_rows import ExpertRows, summed
from dsv4_kernels.hyper_connection import hc_boundary, hc_boundary_of_parts, hc_enter, hc_finish
from sglang_dsv4.layers.data_parallel import RowsOfExperts
from sglang_dsv4.layers.linear import Fp8Input, SublayerInput, quantises_once
from sglang_dsv4.layers.norm import RMSNorm
from sglang_dsv4.layers.peer_sums import Part
from sglang_dsv4.layers.sequence_parallel import ALL_ROWS, RowShards
from sglang_dsv4.model_config.config import Config


class Pending(NamedTuple):
    """Streams that a sublayer has read, and its output, which is still to be written back; None before the first."""

    streams: Tensor  # [T, n, d] model dtype; T: tokens of this rank's rows, see `sequence_parallel`
    output: Tensor | ExpertRows | Part | None = None
    """[T, d] model dtype, of the sublayer; or rows of experts whose sum it is; or this rank's part of it."""
    post: Tensor | None = None  # [T, n] fp32
    comb: Tensor | None = None  # [T, n, n] fp32

    def with_output(self, output: Tensor | ExpertRows | Part) -> Pending:
        """The same streams with the sublayer's output [T, d], or a part of it, to be written back."""
        return Pending(self.streams, output, self.post, self.comb)


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
        self.hc_eps = config.hc_eps
        self.iterations = config.hc_sinkhorn_iters
        self.quantises = quantises_once(config)

    def forward(
        self, pending: Pending, norm: RMSNorm, rows: RowShards | RowsOfExperts
    ) -> tuple[SublayerInput, Pending]:
        """Write the last sublayer's output back and mix the streams into this sublayer's input (sections 2.2, 2.3).

        Args:
            pending: of the last sublayer.
            norm: of this sublayer's input.
            rows: this rank's share of the rows in `pending`.

        Returns:
            the normed input of all tokens, or of the tokens of all groups; and the `Pending` of this sublayer, still
            without its output.
        """
        fp8 = self.quantises and rows.is_whole  # other rows are gathered in bf16, and quantised after that
        coefficients = (self.fn, self.base, self.scale, norm.weight, norm.eps, self.hc_eps, self.iterations)
        streams, output, post, comb = pending
        if output is None:
            made = hc_enter(streams, *coefficients, fp8=fp8)
        elif isinstance(output, Part):
            part, boxes = output.rows, output.mailboxes
            streams, *made = hc_boundary_of_parts(part, boxes, streams, post, comb, *coefficients, fp8=fp8)
        else:
            streams, *made = hc_boundary(output, streams, post, comb, *coefficients, fp8=fp8)
        x, post, comb, *codes = made
        made = SublayerInput(x, Fp8Input(*codes)) if codes else self.gathered(x, rows)
        return made, Pending(streams, None, post, comb)

    def written_back(self, pending: Pending, norm: RMSNorm) -> Tensor:
        """The streams [T, n, d] with the last sublayer's output written back, for the next stage of a pipeline.

        A boundary writes them, as between two layers of one stage, so that the bits are equal. The mixture that it
        makes with this sublayer's coefficients is dropped.
        """
        return self(pending, norm, ALL_ROWS)[1].streams

    def gathered(self, x: Tensor, rows: RowShards | RowsOfExperts) -> SublayerInput:
        """A sublayer's input, gathered from every rank's own normed rows `x [T, d]`."""
        x = rows.gather(x)
        return SublayerInput(x, Fp8Input.of(x) if self.quantises and len(x) else None)


class HyperConnectionHead(nn.Module):
    """Mixes the streams into one row before the logits (section 2.4): fp32 `fn [n, n*d]`, `base [n]`, `scale [1]`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fn = _fp32(config.hc_mult, config.hc_mult * config.hidden_size)
        self.base = _fp32(config.hc_mult)
        self.scale = _fp32(1)
        self.hc_eps = config.hc_eps

    def forward(self, pending: Pending, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Write the last sublayer's output back and mix the streams.

        Returns:
            the streams [T, n, d], and the normed rows [T, d] from which the logits are made.
        """
        streams, output, post, comb = pending
        output = output.total() if isinstance(output, Part) else summed(output)
        return hc_finish(
            output, streams, post, comb, self.fn, self.base, self.scale, norm.weight, norm.eps, self.hc_eps
        )
