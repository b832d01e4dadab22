"""Batches of token rows: text and generated conversations. A batch depends on (seed, rank, step) only."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from train_tiny import tasks
from train_tiny.bpe import Encoder
from train_tiny.chat import Chat, Frame

TEXT_WEIGHT = 0.5
"""Loss weight of the corpus' tokens; PROMPT_WEIGHT and EXACT are those of conversations."""
LOOK_AHEAD = 2  # targets of the MTP module are two tokens ahead
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "Time passes, and nothing happens here.",
    "This line says nothing of interest.",
    "It was a quiet day, and nobody came.",
)


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Lengths of a step's rows; all ranks have the same."""

    tokens: int
    """Tokens of a rank's batch."""
    short: int = 2048
    middle: int = 8192
    long: int = 32768
    warm_steps: int = 300
    """Steps with short rows only."""

    def length(self, step: int) -> int:
        """Tokens of a row of this step."""
        if step < self.warm_steps:
            return self.short
        if step % 16 == 15:
            return self.long
        return self.middle if step % 4 == 3 else self.short

    def rows(self, step: int) -> int:
        """Rows of a rank's batch."""
        return max(1, self.tokens // self.length(step))


class Rows:
    """Makes rows of a length; one of each worker process."""

    def __init__(self, data: Path, corpus: str = "train.u16") -> None:
        self.encoder = Encoder(data / "tokenizer.json")
        self.frame = Frame(**json.loads((data / "frame.json").read_text()))
        self.corpus = np.memmap(data / corpus, dtype=np.uint16, mode="r")
        self.begins = np.flatnonzero(self.corpus == 0)

    def slice(self, rng: random.Random, count: int, from_begin: bool) -> np.ndarray:
        """Ids of the corpus; `from_begin`: from the begin of a document on."""
        last = len(self.corpus) - count - 1
        at = int(self.begins[rng.randrange(len(self.begins))]) if from_begin else rng.randrange(last)
        return self.corpus[min(at, last) : min(at, last) + count]

    def text_rows(self, length: int, count: int) -> Tensor:
        """The first `count` rows of the corpus [count, length + LOOK_AHEAD], fewer if it has fewer."""
        size = length + LOOK_AHEAD
        count = min(count, len(self.corpus) // size)
        return torch.from_numpy(self.corpus[: count * size].astype(np.int64).reshape(count, size))

    def hay(self, rng: random.Random, count: int) -> list[str]:
        """Lines of text of about `count` tokens."""
        if rng.random() < 0.25:
            lines = rng.sample(FILLER, rng.randint(1, len(FILLER)))
            used = [len(self.encoder.encode(line)) + 1 for line in lines]
            return (lines * (1 + count * len(lines) // sum(used)))[: max(1, count * len(lines) // sum(used))]
        return self.encoder.decode(self.slice(rng, count, False).tolist()).split("\n")

    def conversation(self, rng: random.Random, room: int) -> list[tuple[str, float]]:
        """Runs of one conversation; a retrieval fits into `room` tokens."""
        kind = rng.random()
        if kind < 0.52:
            return tasks.small_talk(rng, self.frame).runs()
        if kind < 0.61:
            return tasks.json_answer(rng, self.frame).runs()
        if kind < 0.74:
            return tasks.tool_call(rng, self.frame).runs()
        if kind < 0.79:
            chat = Chat(self.frame)
            tasks.copying(rng, chat, self.encoder.decode(self.slice(rng, rng.randint(5, 120), False).tolist()).strip())
            return chat.runs()
        questions = rng.choice((1, 2, 4, 8))
        return self.retrieval(rng, rng.randint(30, max(40, min(room, 1500) - 40 * questions - 200)), questions)

    def retrieval(self, rng: random.Random, count: int, questions: int) -> list[tuple[str, float]]:
        """Runs of a conversation about a text of about `count` tokens."""
        return tasks.retrieval(rng, self.frame, self.hay(rng, count), questions).runs()

    def encoded(self, runs: list[tuple[str, float]]) -> tuple[list[int], list[float]]:
        """Ids of the runs, and each id's weight."""
        ids: list[int] = []
        weights: list[float] = []
        for text, weight in runs:
            part = self.encoder.encode(text)
            ids += part
            weights += [weight] * len(part)
        return ids, weights

    def row(self, rng: random.Random, length: int) -> tuple[np.ndarray, np.ndarray]:
        """ids [length + LOOK_AHEAD] int64, and the weight of each token as a target, fp32."""
        count = length + LOOK_AHEAD
        ids, weights = np.empty(count, np.int64), np.empty(count, np.float32)
        if rng.random() < (0.35 if length <= 2048 else 0.25):
            ids[:] = self.slice(rng, count, rng.random() < 0.5)
            weights[:] = TEXT_WEIGHT
            return ids, weights
        used = 0
        if length > 2048:
            questions = rng.choice((4, 8, 16, 32))
            size = rng.randint(length // 4, length - 40 * questions - 600)
            used = self._put(ids, weights, 0, self.retrieval(rng, size, questions))
        while used < count:
            if length > 2048 and count - used > 4096:
                begin = count - used - 2048
                ids[used : used + begin] = self.slice(rng, begin, True)
                weights[used : used + begin] = TEXT_WEIGHT
                used += begin
            used = self._put(ids, weights, used, self.conversation(rng, count - used))
        return ids, weights

    def _put(self, ids: np.ndarray, weights: np.ndarray, used: int, runs: list[tuple[str, float]]) -> int:
        part, part_weights = self.encoded(runs)
        end = min(used + len(part), len(ids))
        ids[used:end] = part[: end - used]
        weights[used:end] = part_weights[: end - used]
        return end


class Steps(IterableDataset):
    """The batches of a rank from a step on: (step, ids [rows, length + 2], weights of targets)."""

    def __init__(self, data: Path, curriculum: Curriculum, rank: int, first: int, seed: int) -> None:
        self.data, self.curriculum, self.rank, self.first, self.seed = data, curriculum, rank, first, seed

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        worker = get_worker_info()
        index, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        rows, step = Rows(self.data), self.first + index
        while True:
            rng = random.Random(f"{self.seed} {self.rank} {step}")
            length = self.curriculum.length(step)
            ids, weights = zip(*(rows.row(rng, length) for _ in range(self.curriculum.rows(step))), strict=True)
            yield step, torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(weights))
            step += workers


def batches(
    data: Path, curriculum: Curriculum, rank: int, first: int, seed: int, workers: int, pin: bool
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The batches of a rank in the order of steps, made by worker processes."""
    steps = Steps(data, curriculum, rank, first, seed)
    ahead = {"prefetch_factor": 4} if workers else {}
    return iter(DataLoader(steps, batch_size=None, num_workers=workers, pin_memory=pin, **ahead))
