"""Routed experts that multiply the checkpoint's own FP4 weights by this package's kernels: the MoE runner "dsv4".

It runs on Hopper (`dsv4_kernels.moe.sm90`) and Blackwell (`dsv4_kernels.moe.sm100`). `sglang_dsv4.seam.moe_runner`
decides when it is chosen.
"""

from __future__ import annotations

import logging
import time
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.moe import get_moe_runner_backend
from torch import Tensor, nn

from dsv4_kernels.host.arch import architecture
from dsv4_kernels.moe.weights import LAYOUTS, arrange_in_place
from sglang_dsv4.layers.after_loading import AfterLoading
from sglang_dsv4.layers.local_experts import LocalExperts
from sglang_dsv4.model_config.config import Config, ConfigError
from sglang_dsv4.seam.moe_runner import KERNELS, RUNNER, reason_against

if TYPE_CHECKING:
    from dsv4_kernels.host.expert_rows import ExpertRows
    from dsv4_kernels.moe import Mxfp4Experts, Nvfp4Experts
    from dsv4_kernels.moe.sm90.launch import Work as HopperWork
    from dsv4_kernels.moe.sm90.weights import HopperExperts
    from dsv4_kernels.moe.sm100.launch import Work as BlackwellWork

    Work = HopperWork | BlackwellWork

logger = logging.getLogger(__name__)

GROUP = 32
"""Channels of an MXFP4 block, which share a scale."""


def is_chosen() -> bool:
    """Whether this process's MoE runner is "dsv4"."""
    return get_moe_runner_backend().value == RUNNER


def kernels_of_gpu() -> str:
    """The implementation in `dsv4_kernels.moe` whose kernels run on this process's GPU: "sm90" or "sm100"."""
    return KERNELS[torch.cuda.get_device_capability()[0]]


def launch_module(name: str) -> ModuleType:
    """The module with `plan_work`, `multiply_all` and `rows_to_sum` of an implementation of `kernels_of_gpu`."""
    if name == "sm90":
        from dsv4_kernels.moe.sm90 import launch
    else:
        from dsv4_kernels.moe.sm100 import launch
    return launch


class PackedExperts(LocalExperts):
    """This rank's routed experts in MXFP4, in four parameters: codes and scales of both matrices, packed as stored.

    After loading the weights are rearranged in place for the kernels: the parameters keep their shapes, but their
    values are no longer in the checkpoint's order. Loading again overwrites all of them.

    Raises:
        ConfigError: the kernels do not serve this GPU, weight format or size.
    """

    numbers = "mxfp4"
    """Format of the weights, as `reason_against` names it."""

    def __init__(self, config: Config, prefix: str) -> None:
        super().__init__(config)
        reason = reason_against(
            torch.cuda.get_device_capability(),
            self.numbers,
            config.hidden_size,
            config.moe_intermediate_size,
            self.channel_ranks,
        )
        if reason is not None:
            raise ConfigError("moe_runner_backend", RUNNER, f"another one: {reason}")
        self.prefix, self.swiglu_limit = prefix, config.swiglu_limit
        self.kernels = kernels_of_gpu()
        channels, d = self.num_local_channels, config.hidden_size
        for name, rows, k in (("w13_weight", 2 * channels, d), ("w2_weight", d, channels)):
            self._add_matrix(name, rows, k)
        self.quant_method = AfterLoading(self.arrange, derives=False)
        self.arranged, self.seconds = None, 0.0

    def _add_matrix(self, name: str, rows: int, k: int) -> None:
        """Register the parameters of one matrix [rows, k] of all local experts."""
        codes = random_codes(self.num_local_experts, rows, k // 2)
        scale = torch.full((self.num_local_experts, rows, k // GROUP), 127, dtype=torch.uint8)
        for suffix, tensor in (("", codes), ("_scale_inv", scale.view(torch.float8_e8m0fnu))):
            self.add_parameter(name + suffix, tensor)

    def _new_part(self, param: nn.Parameter, matrix: str, local_expert: int) -> PackedPart:
        weight, scale = getattr(self, f"{matrix}_weight"), getattr(self, f"{matrix}_weight_scale_inv")
        return PackedPart(self.kernels, weight.data[local_expert], scale.data[local_expert], gate_up=matrix == "w13")

    def _put(self, part: PackedPart, param: nn.Parameter, rows: slice, values: Tensor) -> None:
        part.put(param is self.w13_weight_scale_inv or param is self.w2_weight_scale_inv, rows, values)

    def arrange(self) -> None:
        """Rearrange the loaded weights, in place, into the order that the kernels read."""
        begin = time.perf_counter()
        self.arranged, rounded = self._arranged()
        if rounded:
            logger.warning(
                "%s: %d of %d codes were rounded: their scales are more than 2^11 below the largest of their row, and "
                "e4m3 cannot hold both. --moe-runner-backend marlin keeps them",
                *(self.prefix, rounded, 2 * (self.w13_weight.numel() + self.w2_weight.numel())),
            )
        self.seconds = time.perf_counter() - begin

    def _arranged(self) -> tuple[HopperExperts | Mxfp4Experts | Nvfp4Experts, int]:
        """(the experts for the kernels, in the parameters' memory; codes that were rounded)."""
        matrices = (self.w13_weight, self.w13_weight_scale_inv, self.w2_weight, self.w2_weight_scale_inv)
        return arrange_in_place(self.kernels, *(matrix.data for matrix in matrices))

    def plan(self, weights: Tensor, experts: Tensor) -> Work:
        """The slots and work tiles of this rank's experts.

        Args:
            weights: [T, k] fp32.
            experts: [T, k] int32, numbers among the experts of all ranks.
        """
        assert self.arranged is not None, f"{self.prefix}: weights were never loaded"
        return launch_module(self.kernels).plan_work(weights, experts, self.arranged, self.first_local_expert)

    def takes_codes(self, joins: bool) -> bool:
        """Whether `multiply` takes the quantised tokens that the layer has: on Blackwell, and where launches join."""
        return joins or self.kernels != "sm90"

    def multiply(self, x: Tensor, work: Work, quantised: tuple[Tensor, Tensor] | None) -> Tensor:
        """The weighted outputs of this rank's experts, for `rows_to_sum`.

        Args:
            x: [T, d] bf16.
            work: the result of `plan`.
            quantised: codes and scales of x, which save a launch with few tokens; None to make them.
        """
        return launch_module(self.kernels).multiply_all(x, work, self.arranged, self.swiglu_limit, quantised)

    def rows_to_sum(self, slot_rows: Tensor, work: Work, shared: Tensor, dtype: torch.dtype) -> ExpertRows:
        """The rows whose sum is this rank's part of the output, the shared expert included: [T, d] in `dtype`.

        Args:
            slot_rows: the result of `multiply`.
            work: the result of `plan`.
            shared: [T, d] bf16, the shared expert's part.
            dtype: of the sum, fp32 or bf16.
        """
        return launch_module(self.kernels).rows_to_sum(slot_rows, work, dtype, shared)

    def rows_of_pairs(self, x: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [slots, d] bf16 of this rank's experts, and the row of each pair [T, k] int32, negative on other ranks.

        Args:
            x: [T, d] bf16.
            weights: [T, k] fp32.
            experts: [T, k] int32, numbers among the experts of all ranks.
        """
        if not len(x):
            return x.new_empty(0, x.shape[1]), experts
        work = self.plan(weights, experts)
        return self.multiply(x, work, None), work.listed.slot_of_pair

    def sum_of_pairs(self, rows: Tensor, row_of_pair: Tensor, experts: Tensor, shared: Tensor) -> Tensor:
        """The sum over experts with the bits of one rank's sum; arguments as for `ReferenceExperts.sum_of_pairs`.

        `rows`, which must be contiguous, `shared` and the result are bf16.
        """
        from dsv4_kernels.moe import sums

        return sums.sum_pairs(rows, experts, row_of_pair, shared, architecture(self.kernels, rows.device))


class PackedPart:
    """One matrix of one expert in a weight update: codes and scales in host memory, rearranged when they are exchanged.

    Args:
        kernels: "sm90" or "sm100", for which the matrix is arranged.
        codes, scale: int8 [rows, K / 2] and ue8m0 [rows, K / 32], the matrix's memory, already arranged.
        gate_up: whether its rows are the rows of w1, then of w3.
    """

    def __init__(self, kernels: str, codes: Tensor, scale: Tensor, gate_up: bool) -> None:
        self._layout = LAYOUTS[kernels]
        self._memory, self._gate_up = (codes, scale), gate_up
        self.values = tuple(torch.empty_like(tensor, device="cpu") for tensor in self._memory)
        self._missing = set(range(2 if gate_up else 1))  # halves of the rows, or all rows, whose scales have not come
        self._is_arranged = False
        self.rounded = 0

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(value.nbytes for value in self.values)

    def put(self, is_scale: bool, rows: slice, part: Tensor) -> None:
        """Copy codes or scales of some rows. Every call with codes is followed by one with their scales."""
        self.values[is_scale][rows].copy_(part)
        if is_scale:
            self._missing.discard(int(rows.start > 0))

    def exchange(self) -> None:
        """Swap the parameters' bytes with host memory's, which the first call rearranges; a second call swaps back."""
        new = self.values if self._is_arranged else self._arranged()
        old = tuple(memory.to("cpu", copy=True) for memory in self._memory)
        for memory, value in zip(self._memory, new, strict=True):
            memory.copy_(value)
        self.values, self._is_arranged = old, True

    def _arranged(self) -> tuple[Tensor, Tensor]:
        codes, scale = (
            value.to(memory.device, copy=True) for value, memory in zip(self.values, self._memory, strict=True)
        )
        if self._missing:
            served = self._layout.in_checkpoint_order(*(memory[None] for memory in self._memory), gate_up=self._gate_up)
            half = len(codes) // 2
            for part in self._missing:
                rows = slice(part * half, (part + 1) * half) if self._gate_up else slice(None)
                for new, old in zip((codes, scale), served, strict=True):
                    new.view(torch.uint8)[rows] = old[0, rows]
        self.rounded = self._layout.arrange(codes[None], scale[None], gate_up=self._gate_up, in_place=True).rounded
        return codes, scale


def log_arrangement(model: nn.Module) -> None:
    """Log the time that rearranging a loaded model's experts took; log nothing for a model without packed experts."""
    layers = [module for module in model.modules() if isinstance(module, PackedExperts)]
    if layers:
        logger.info(
            "routed experts: the weights of %d layers, %.2f GiB, rearranged in place for runner %s in %.1f s",
            *(len(layers), sum(p.nbytes for layer in layers for p in layer.parameters()) / 2**30, RUNNER),
            sum(layer.seconds for layer in layers),
        )


def random_codes(*shape: int) -> Tensor:
    """Random int8 numbers of this shape, the same at every start, for use with dummy weights.

    SGLang's dummy loader fills floating-point parameters only; uninitialised memory might be all zeros, and would
    differ from start to start.
    """
    codes = torch.empty(shape, dtype=torch.int8)
    words = codes.view(-1).view(torch.int64)  # every value equally likely
    words.random_(torch.iinfo(torch.int64).min, None, generator=torch.Generator(codes.device).manual_seed(shape[0]))
    return codes
