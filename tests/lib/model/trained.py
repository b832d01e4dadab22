"""The trained checkpoint's references beyond `model.reference`: for long sequences, and for chains of drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from model.dspark_reference import DSparkReference
from model.oracle import read_dequantised
from model.reference import OFF, Reference
from torch import Tensor
from train_tiny.model import Model, Quant
from train_tiny.shape import TinyShape

TRAINED = Path(__file__).resolve().parents[3] / "trained"
GROUP = 128
"""The training's model takes multiples of so many tokens."""


def training_weights() -> dict[str, Tensor]:
    """Return the checkpoint's values under the names of the training, fp32: a layer's experts are stacked."""
    found = read_dequantised(TRAINED)
    experts: dict[str, dict[int, Tensor]] = {}
    for name in [name for name in found if ".ffn.experts." in name]:
        prefix, expert, matrix, _ = name.rsplit(".", 3)
        experts.setdefault(f"{prefix}.{matrix}", {})[int(expert)] = found.pop(name)
    return found | {name: torch.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}


class Trained:
    """The model that was trained: it attends in blocks, so that its memory grows with the length and not its square.

    Args:
        quantises: whether the release's quantisers run.
        dtype: of activations.
    """

    def __init__(self, quantises: bool, dtype: torch.dtype = torch.float32) -> None:
        self.model = Model(TinyShape(), Quant(quantises, quantises, quantises), dtype)
        self.weights = training_weights()

    @torch.no_grad()
    def logprobs(self, tokens: Tensor, start: int) -> Tensor:
        """Return log-probabilities [tokens - start, vocab] fp32 after the tokens from position `start` on."""
        padded = F.pad(tokens, (0, -len(tokens) % GROUP))  # later tokens change nothing
        streams = self.model.streams(padded[None], self.weights)[:, start : len(tokens)]
        return self.model.logits(streams, self.weights)[0].log_softmax(-1)


Propose = Callable[[int], list[int]]
"""From a position to the draft's proposals for the tokens after it."""


def verify_steps(tokens: Tensor, start: int, propose: Propose) -> int:
    """Return the number of verify steps in which a server with this draft reaches the end of its greedy answer.

    In each step the proposals before the first one that the target would not choose are accepted, and the target's
    choice follows.

    Args:
        tokens: the prompt and its answer [tokens] int64.
        start: the prompt's length. The answer's first token needs no verify step.
        propose: by the equations, without quantisers.
    """
    steps, at = 0, start  # position of the last token that is known before the step
    while at < len(tokens) - 1:
        rest = tokens[at + 1 :].tolist()
        proposed = propose(at)[: len(rest)]
        accepted = next((i for i, token in enumerate(proposed) if token != rest[i]), len(proposed))
        at, steps = at + accepted + 1, steps + 1
    return steps


def unquantised(checkpoint: Path) -> Reference:
    """Return the equations of a checkpoint without quantisers, in fp32."""
    return Reference(json.loads((checkpoint / "config.json").read_text()), read_dequantised(checkpoint), OFF)


def by_mtp(tokens: Tensor, drafts: int) -> Propose:
    """Return EAGLE's draft: its first proposal comes from the target's streams, the others from its own."""
    reference = unquantised(TRAINED)
    window, streams = reference.config["sliding_window"], reference.streams(F.pad(tokens, (0, -len(tokens) % GROUP)))

    def propose(at: int) -> list[int]:
        begin = max(0, at - window)
        inputs, following = streams[begin:at], tokens[begin + 1 : at + 1]
        proposed: list[int] = []
        for _ in range(drafts):
            own = reference.mtp_streams(inputs, following)
            proposed.append(int(reference.mtp_logits(own)[-1].argmax()))
            inputs, following = torch.cat([inputs, own[-1:]]), torch.cat([following, torch.tensor(proposed[-1:])])
        return proposed

    return propose


def by_dspark(tokens: Tensor, checkpoint: Path) -> Propose:
    """Return the DSpark draft of a checkpoint (`train_tiny.variants`), which proposes a block from rows of the target's
    taps."""
    draft = DSparkReference(unquantised(checkpoint))
    rows = draft.context(draft.taps(F.pad(tokens, (0, -len(tokens) % GROUP))))
    return lambda at: draft.block([row[:at] for row in rows], int(tokens[at])).drafts
