"""Muon for matrices between activations, Adam for all other parameters; state in plain dictionaries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from train_tiny.shape import Parameter

MATRIX_RATE = 0.012
ADAM_RATE = 0.002
MOMENTUM = 0.95
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.02


def orthogonal(update: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices [N, m, n] by five Newton-Schulz steps in bf16 (Muon, Jordan 2024)."""
    x = update.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.mT


class Optimiser:
    """Updates masters in place from their gradients."""

    def __init__(self, masters: dict[str, Tensor], table: dict[str, Parameter], o_groups: int) -> None:
        self.masters, self.table, self.o_groups = masters, table, o_groups
        self.moments: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}
        for name, p in table.items():
            if p.update != "none":
                self.moments[name] = torch.zeros_like(masters[name])
            if p.update == "adam":
                self.squares[name] = torch.zeros_like(masters[name])
        self.by_shape: dict[tuple[int, int], list[str]] = {}
        for name, p in table.items():
            if p.update == "muon":
                self.by_shape.setdefault(self._matrices(name, masters[name]).shape[1:], []).append(name)

    def _matrices(self, name: str, value: Tensor) -> Tensor:
        """A parameter as independent matrices [N, m, n]: experts, the groups of wo_a."""
        if name.endswith("wo_a.weight"):
            return value.unflatten(0, (self.o_groups, -1))
        return value if value.dim() == 3 else value.unsqueeze(0)

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], step: int, rate: float) -> None:
        """One update; `rate` is the schedule's factor, 1 at its highest."""
        for shape, names in self.by_shape.items():
            updates = []
            for name in names:
                moment = self.moments[name].lerp_(grads[name], 1 - MOMENTUM)
                updates.append(self._matrices(name, grads[name].lerp(moment, MOMENTUM)))
            change = orthogonal(torch.cat(updates)).float() * max(1.0, shape[0] / shape[1]) ** 0.5
            begin = 0
            for name in names:
                value = self._matrices(name, self.masters[name])
                value.mul_(1 - rate * MATRIX_RATE * WEIGHT_DECAY)
                value.sub_(change[begin : begin + len(value)], alpha=rate * MATRIX_RATE)
                begin += len(value)
        names = list(self.squares)
        moments, squares = [self.moments[name] for name in names], [self.squares[name] for name in names]
        gradients = [grads[name] for name in names]
        torch._foreach_lerp_(moments, gradients, 1 - BETAS[0])
        torch._foreach_mul_(squares, BETAS[1])
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - BETAS[1])
        corrections = [1 - beta ** (step + 1) for beta in BETAS]
        roots = torch._foreach_sqrt(torch._foreach_div(squares, corrections[1]))
        torch._foreach_add_(roots, 1e-8)
        changes = torch._foreach_div(moments, roots)
        factors = [-rate * ADAM_RATE * self.table[name].rate / corrections[0] for name in names]
        torch._foreach_mul_(changes, factors)
        torch._foreach_add_([self.masters[name] for name in names], changes)

    def state(self) -> dict[str, Any]:
        """Moments in few bytes: of Muon's matrices e4m3 with a scale, of Adam bf16."""
        found: dict[str, Any] = {}
        for name, moment in self.moments.items():
            if name in self.squares:
                found[name] = (moment.bfloat16().cpu(), self.squares[name].sqrt().bfloat16().cpu())
            else:
                scale = float(moment.abs().max().clamp(min=1e-20)) / 448
                found[name] = ((moment / scale).to(torch.float8_e4m3fn).cpu(), scale)
        return found

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned; momentum that `train_tiny.state.compact` left out begins at zero."""
        for name, moment in self.moments.items():
            first, second = state.get(name, (None, None))
            if name in self.squares and second is not None:
                self.squares[name].copy_(second.float().square())
            if first is not None:
                moment.copy_(first.float() if name in self.squares else first.float() * second)
