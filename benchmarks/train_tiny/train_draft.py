"""Train a DSpark draft for a trained model, whose weights stay as they are; options are those of `train_tiny.train`.

    PROGRAM=train_tiny.train_draft TRAIN_ARGS="--model STATE" benchmarks/train_tiny/run.sh DATA DRAFT_STATE 5 5

STATE is the folder of the trained model's state, DRAFT_STATE gets the draft's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train_tiny.batches import LOOK_AHEAD
from train_tiny.draft import DraftModel, DraftShape, draft_parameters
from train_tiny.model import Losses, Model, compute_weights
from train_tiny.shape import Parameter, initial, parameters
from train_tiny.state import load_state
from train_tiny.train import Run, arguments_of
from train_tiny.train import main as train

VALIDATION_BLOCKS = 64  # of a row


class DraftRun(Run):
    """A training run whose parameters are the draft's."""

    def begin(self) -> tuple[dict[str, Parameter], dict[str, Tensor]]:
        """The draft's parameters; the target's are read and frozen."""
        target = {name: value.float() for name, value in load_state(self.arguments.model)["masters"].items()}
        frozen = {name: p for name, p in parameters(self.shape).items() if not name.startswith("mtp.")}
        weights = compute_weights({name: target[name].to(self.device) for name in frozen}, frozen)
        self.target = {name: value.requires_grad_(False) for name, value in weights.items()}
        table = draft_parameters(self.shape, DraftShape())
        return table, initial(self.shape, 1, table)

    def make_model(self, options: dict[str, Any]) -> Model:
        """The target with its draft."""
        return DraftModel(self.shape, DraftShape(), **options)

    def losses(
        self, leaves: dict[str, Tensor], ids: Tensor, target_weights: Tensor, select: bool
    ) -> tuple[Tensor, dict[str, Tensor], Losses]:
        """The loss of blocks at random places of the rows."""
        losses = Losses()
        length = ids.shape[1] - LOOK_AHEAD
        blocks = max(1, length // 16)
        at = torch.randint(1, length - DraftShape().block_size, (len(ids), blocks), device=ids.device)
        loss, parts = self.model.draft_loss(ids[:, :length], at, self.target | leaves, losses)
        return loss, parts, losses

    @torch.no_grad()
    def validate(self) -> float:
        """The mean number of proposals of a block before the first that isn't the target's, in text not trained on."""
        weights = self.target | compute_weights(self.masters, self.table)
        found = []
        for row in self.validation:
            ids = row.to(self.device)[None, :-LOOK_AHEAD]
            last = ids.shape[1] - DraftShape().block_size - 1
            at = torch.linspace(1, last, VALIDATION_BLOCKS, device=ids.device).long()[None]
            found.append(self.model.draft_loss(ids, at, weights)[1]["run"])
        return float(torch.stack(found).mean())


def main() -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    parser: argparse.ArgumentParser = arguments_of("Train a DSpark draft for the small DeepSeek-V4.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the trained model's state")
    parser.set_defaults(lengths=(2048, 2048, 2048), tokens=32768, piece=8192)
    return train(DraftRun, parser)


if __name__ == "__main__":
    sys.exit(main())
