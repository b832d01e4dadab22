"""Train the small DeepSeek-V4, on one or several GPUs; a later call goes on where the last one stopped.

    benchmarks/train_tiny/run.sh DATA STATE MINUTES TOTAL_MINUTES [RESUME]     # all GPUs of this host, by torchrun

DATA is the folder that `corpus.py` writes. STATE gets the state in parts of at most 16 MB, with the log of the run in
it. A state in it is read at the start, else the one of ``--resume``. The schedule counts minutes of training over all
calls, so that it fits any machine. The training host needs PyTorch and numpy only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from train_tiny.batches import LOOK_AHEAD, Curriculum, Rows, batches
from train_tiny.model import Losses, Model, compute_weights
from train_tiny.optimiser import Optimiser
from train_tiny.shape import Parameter, TinyShape, initial, parameters
from train_tiny.state import load_state, save_state

MTP_WEIGHT = 0.3
VALIDATION_ROWS = 16
BIAS_RATE = 0.003  # of the routers' biases: DeepSeek-V3 balances experts by them, without a loss
WARM_UP_STEPS = 60
DECAY_FROM = 0.45  # share of the schedule at full rate
FINAL_RATE = 0.03
SELECT_FROM = 0.2  # share of the schedule in which CSA layers attend to all entries, and the indexer only learns


def rate_at(progress: float, step: int) -> float:
    """The schedule's factor: a warm-up in steps, a plateau, a linear decay."""
    left = min(1.0, max(0.0, (1 - progress) / (1 - DECAY_FROM)))
    return min(1.0, (step + 1) / WARM_UP_STEPS) * max(FINAL_RATE, left)


def weighted(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The mean cross entropy with weights."""
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1.0)


def losses_of(
    model: Model, weights: dict[str, Tensor], ids: Tensor, target_weights: Tensor, select: bool
) -> tuple[Tensor, dict[str, Tensor], Losses]:
    """The loss of rows [B, T + 2], its parts, and the experts' loads."""
    length = ids.shape[1] - LOOK_AHEAD
    losses = Losses()
    streams = model.streams(ids[:, :length], weights, losses, select)
    logits = model.logits(streams, weights)
    main = weighted(logits, ids[:, 1 : length + 1], target_weights[:, 1 : length + 1])
    drafted = model.mtp_streams(streams, ids[:, 1 : length + 1], weights, losses)
    after_next = model.logits(drafted, weights, "mtp.0.")
    mtp = weighted(after_next, ids[:, 2:], target_weights[:, 2:])
    index = torch.stack(losses.indexer).sum()
    with torch.no_grad():
        exact = target_weights[:, 1 : length + 1] > 1.5
        hits = (logits.argmax(-1) == ids[:, 1 : length + 1]) & exact
        right = hits.sum() / exact.sum().clamp(min=1)
        accepted = (after_next.argmax(-1) == ids[:, 2:]).float().mean()
    parts = {"main": main, "mtp": mtp, "indexer": index, "exact": right, "mtp_right": accepted}
    return main + MTP_WEIGHT * mtp + index, parts, losses


class Run:
    """A training run of one rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")  # TF32 holds bf16 values exactly, and sums are fp32
        if self.world > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        large = self.device.type == "cuda" and torch.cuda.get_device_properties(self.device).total_memory > 100e9
        self.piece = arguments.piece or (65536 if large else 32768)
        self.shape = TinyShape.from_json(json.loads(arguments.shape))
        self.table, masters = self.begin()
        self.masters = {name: value.to(self.device) for name, value in masters.items()}
        self.optimiser = Optimiser(self.masters, self.table, self.shape.o_groups)
        self.step, self.minutes, self.tokens, self.log = 0, 0.0, 0, []
        begun = (arguments.state / "state.json").is_file()
        self._resume(arguments.state if begun or arguments.resume is None else arguments.resume)
        self.model = self.make_model({"device": self.device, **compilers(arguments.compile)})
        self.curriculum = Curriculum(arguments.tokens, *arguments.lengths, arguments.warm_steps)
        self.trained = [name for name, p in self.table.items() if p.update != "none"]
        self.biases = [name for name, p in self.table.items() if p.update == "none"]
        self.validation = Rows(arguments.data, "valid.u16").text_rows(arguments.lengths[0], VALIDATION_ROWS)

    def begin(self) -> tuple[dict[str, Parameter], dict[str, Tensor]]:
        """The parameters that are trained, and their initial values."""
        return parameters(self.shape), initial(self.shape)

    def make_model(self, options: dict[str, Any]) -> Model:
        """The model, with options of `Model`."""
        return Model(self.shape, **options)

    def losses(
        self, leaves: dict[str, Tensor], ids: Tensor, target_weights: Tensor, select: bool
    ) -> tuple[Tensor, dict[str, Tensor], Losses]:
        """The loss of rows, the parts of it that are logged, and the experts' loads."""
        return losses_of(self.model, leaves, ids, target_weights, select)

    def _resume(self, folder: Path) -> None:
        if not (folder / "state.json").is_file():
            return
        state = load_state(folder)
        if state["shape"] != self.shape.as_json():
            raise ValueError(f"{folder} holds a model of other dimensions: {state['shape']}")
        for name, value in state["masters"].items():
            self.masters[name].copy_(value)
        self.optimiser.load(state["moments"])
        self.step, self.minutes, self.tokens, self.log = (state[k] for k in ("step", "minutes", "tokens", "log"))

    @torch.no_grad()
    def validate(self) -> float:
        """The mean cross entropy of text that is not trained on, in nats a token."""
        weights = compute_weights(self.masters, self.table)
        total = []
        for row in self.validation:
            ids = row.to(self.device)
            logits = self.model.logits(self.model.streams(ids[None, :-LOOK_AHEAD], weights), weights)
            total.append(F.cross_entropy(logits[0], ids[1 : 1 - LOOK_AHEAD]))
        return float(torch.stack(total).mean())

    def save(self) -> None:
        """Write the state (the first rank does)."""
        if self.rank:
            return
        self.log.append({"step": self.step, "minutes": round(self.minutes, 3), "valid": round(self.validate(), 4)})
        print(json.dumps(self.log[-1]), flush=True)
        state = {
            "shape": self.shape.as_json(),
            "step": self.step,
            "minutes": self.minutes,
            "tokens": self.tokens,
            "log": self.log,
            "masters": {name: value.cpu() for name, value in self.masters.items()},
            "moments": self.optimiser.state(),
        }
        parts = save_state(self.arguments.state, state)
        print(f"saved step {self.step} in {len(parts)} parts", flush=True)

    def gradients(self, ids: Tensor, target_weights: Tensor, progress: float) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients summed over ranks and pieces, and figures: losses, loads of experts, progress, norm."""
        leaves = compute_weights(self.masters, self.table)
        figures: Tensor | None = None
        pieces = max(1, ids.numel() // self.piece)
        total = {name: torch.zeros_like(self.masters[name]) for name in self.trained}
        parts_of_ids = zip(ids.chunk(pieces), target_weights.chunk(pieces), strict=True)
        for part, part_weights in parts_of_ids:
            share = len(part) / len(ids)
            select = progress >= SELECT_FROM
            loss, parts, losses = self.losses(leaves, part, part_weights, select)
            self.names = tuple(parts)
            (loss * share).backward()
            numbers = [parts[name].detach().float() for name in parts]
            found = torch.cat((torch.stack(numbers), *(losses.load[name] for name in self.biases))) * share
            figures = found if figures is None else figures + found
            for name in self.trained:
                total[name] += leaves[name].grad.float()
                leaves[name].grad = None
        # Every rank has its own clock: the first one's counts.
        clock = torch.tensor([progress * self.world if self.rank == 0 else 0.0], device=self.device)
        flat = torch.cat((*(total[name].flatten() for name in self.trained), figures, clock)) / self.world
        if self.world > 1:
            dist.all_reduce(flat)
        sizes = [total[name].numel() for name in self.trained]
        *grads, rest = flat.split([*sizes, flat.numel() - sum(sizes)])
        shaped = {name: grad.view_as(total[name]) for name, grad in zip(self.trained, grads, strict=True)}
        return shaped, torch.cat((rest, flat[: sum(sizes)].norm()[None]))

    def balance(self, loads: Tensor) -> None:
        """Move the routers' biases towards equal loads."""
        for name, load in zip(self.biases, loads.view(len(self.biases), -1), strict=True):
            self.masters[name].add_(BIAS_RATE * torch.sign(load.mean() - load))

    def run(self) -> None:
        """Train for ``--minutes``, or until the schedule's end, or ``--steps``."""
        arguments = self.arguments
        begin, done_before, saved_at = time.monotonic(), self.minutes, self.minutes
        source = self._batches()
        last_print, last_tokens = begin, self.tokens
        while True:
            step, ids, target_weights = next(source)
            if step != self.step:
                raise RuntimeError(f"batch of step {step} came at step {self.step}")
            elapsed = (time.monotonic() - begin) / 60
            progress = (done_before + elapsed) / arguments.total_minutes
            ids, target_weights = (t.to(self.device, non_blocking=True) for t in (ids, target_weights))
            grads, figures = self.gradients(ids, target_weights, progress)
            numbers = figures.tolist()
            progress, norm = numbers[-2:]
            if all(map(math.isfinite, numbers)):  # the same on every rank
                self.optimiser.step(grads, self.step, rate_at(progress, self.step))
                self.balance(figures[len(self.names) : -2])
            self.minutes = progress * arguments.total_minutes
            self.tokens += ids.numel() * self.world
            row = {
                "step": self.step,
                "minutes": round(self.minutes, 3),
                "tokens": self.tokens,
                "length": ids.shape[1] - 2,
            }
            row |= dict(zip(self.names, (round(n, 4) for n in numbers), strict=False))
            row |= {"load": round(max(numbers[len(self.names) : -2]), 3), "norm": round(norm, 4)}
            self.step += 1
            if self.step % arguments.log_every == 0 or row["length"] > 2048:
                self.log.append(row)
            if self.rank == 0 and self.step % arguments.log_every == 0:
                now = time.monotonic()
                speed = (self.tokens - last_tokens) / (now - last_print)
                memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0
                print(json.dumps(row), f"{speed:,.0f} tok/s, {memory:.0f} GiB", flush=True)
                last_print, last_tokens = now, self.tokens
            call_minutes = self.minutes - done_before
            if call_minutes >= arguments.minutes or progress >= 1 or self.step == arguments.steps:
                break
            if self.minutes - saved_at >= arguments.save_every:
                self.save()
                saved_at = self.minutes
        self.save()

    def _batches(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        arguments = self.arguments
        pin = self.device.type == "cuda"
        return batches(arguments.data, self.curriculum, self.rank, self.step, 7, arguments.workers, pin)


def compilers(kind: str) -> dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Functions for torch.compile. "off": none; "leaf": elementwise ones; "all": also the attention of short rows."""
    if kind == "off":
        return {}
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64
    found: dict[str, Callable[..., Any]] = {"compiled": lambda function: torch.compile(function, dynamic=True)}
    if kind == "all":
        found["compiled_attention"] = lambda function: torch.compile(function, dynamic=False)
    return found


def arguments_of(description: str) -> argparse.ArgumentParser:
    """The options that training of the model and of its draft share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="folder to write the state to")
    parser.add_argument("--resume", type=Path, help="folder to read the state from, if not --state")
    parser.add_argument("--minutes", type=float, default=7.0, help="of this call")
    parser.add_argument("--total-minutes", type=float, default=12.0, help="of the schedule, over all calls")
    parser.add_argument("--steps", type=int, default=0, help="stop at this step in any case")
    parser.add_argument("--tokens", type=int, default=65536, help="of a rank's batch")
    parser.add_argument("--piece", type=int, help="tokens of a forward and backward; 900 kB of memory a token")
    parser.add_argument("--lengths", type=int, nargs=3, default=(2048, 8192, 32768))
    parser.add_argument("--warm-steps", type=int, default=300, help="steps with short rows only")
    parser.add_argument("--workers", type=int, default=8, help="processes of a rank that make batches")
    parser.add_argument("--compile", choices=("off", "leaf", "all"), default="off")
    parser.add_argument("--save-every", type=float, default=2.0, help="minutes")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--shape", default="{}", help="JSON: dimensions that differ from TinyShape's")
    return parser


def main(kind: type[Run] = Run, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    arguments = (parser or arguments_of("Train the small DeepSeek-V4.")).parse_args()
    torch.manual_seed(0)
    run = kind(arguments)
    run.run()
    if run.world > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
