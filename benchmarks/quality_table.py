"""Quality of every configuration that is offered: servers of the trained checkpoint against the reference in fp32.

    PYTHONPATH=tests/lib:benchmarks python benchmarks/quality_table.py trained --out benchmarks/results/quality_cpu.json

starts the servers of `lib.quality_configurations.ON_A_CPU` one after the other (`--only TEXT …`: those whose name has
TEXT; `--add`: into the file, in place of rows of the same names). On a host with GPUs, where nobody has run it yet:

    PYTHONPATH=benchmarks python -m train_tiny.widen trained WIDE
    PYTHONPATH=tests/lib:benchmarks python benchmarks/quality_table.py WIDE --gpus 1 --out quality_h200.json

starts those of `ON_GPUS` that fit into the number of GPUs: ours and SGLang's built-in on the same checkpoint.

Inputs: windows of this repository's documents, which were not trained on; conversations of the training's tasks with
other numbers and names (`train_tiny.tasks`), teacher-forced; and prompts of a text that are continued greedily, so that
decode and verify steps are judged, too: the reference computes the distribution after every token that the server
answered. A configuration with a prefix reuses the first two pages of each window; the rest is judged.

Two references (`tests/lib/model/reference.py`), both in fp32. KL is measured against the one with the configuration's
own quantisers; "to the trained model" against the one with all quantisers, the function that was trained. A mean KL may
be twice that of the reference with activations in the server's dtype, which rounds where PyTorch does
(`quality.bound_of`): the server rounds as often, at other places. In fp32 without quantisers log-probabilities may
differ by `TOLERANCE`, as everywhere in this project, which is a KL of at most half its square. Exit status 1 if a
configuration is beyond a bound, or lacks bits that it promises.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lib.quality_configurations import COLD, ON_A_CPU, ON_GPUS, PREFIX_TOKENS, Configuration
from lib.servers import DidNotComeUpError, running
from lib.versions import versions
from model.compare import TOLERANCE
from model.oracle import read_dequantised
from model.reference import FULL, OFF, Quant, Reference
from quality import (
    DOCUMENTS,
    SHORTEST,
    TOP,
    Row,
    Scores,
    ask,
    bound_of,
    generate,
    row,
    scores_from,
    scores_of,
    windows,
)
from tokenizers import Tokenizer
from torch import Tensor
from train_tiny import tasks
from train_tiny.chat import Frame
from train_tiny.corpus import frame_of
from train_tiny.variants import KINDS, write

TEXT_WINDOWS, TEXT_TOKENS = 2, 1024
CONVERSATIONS = 6
DECODED = 24
DECODE_PROMPTS = (121, 250, 505, 1019)
"""Prompt tokens: answers cross the ends of groups of 4 and 128 tokens, and of pages."""
FP32_BOUND = TOLERANCE**2 / 2
"""Nats of KL where every log-probability is off by at most `TOLERANCE`: half the variance of the differences."""
QUANT = {"full": FULL, "kv": Quant(kv_fp8=True, indexer_fp4=True), "off": OFF}
PORT = 31_700
Start = Callable[[Configuration, Path, Path], AbstractContextManager[Any]]
"""Starts a configuration's server, given its checkpoint and a folder; the server has a `url`."""


class NoHitError(RuntimeError):
    """Raised when a prefix is not found where it should be; the message says where."""


@dataclass(frozen=True)
class Inputs:
    """Token sequences: texts and conversations whose tokens are given, and prompts to continue. Each [tokens] int64."""

    texts: list[Tensor]
    chats: list[Tensor]
    prompts: list[Tensor]

    def digest(self) -> str:
        """The same for the same tokens: the documents change."""
        parts = [part.tolist() for part in (*self.texts, *self.chats, *self.prompts)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def inputs(
    checkpoint: Path,
    text_windows: int = TEXT_WINDOWS,
    conversations: int = CONVERSATIONS,
    prompts: Sequence[int] = DECODE_PROMPTS,
) -> Inputs:
    """The sequences of a measurement: always the same for a tokenizer and numbers."""
    documents = sorted(DOCUMENTS.glob("*.md"))
    texts = windows(checkpoint, documents, TEXT_TOKENS, text_windows + 1)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    frame, rng = Frame(**frame_of(tokenizer)), random.Random("quality")  # no seed of training
    kinds = (tasks.small_talk, tasks.json_answer, tasks.tool_call)
    hay = [line for line in documents[0].read_text().split("\n") if line][:20]
    chats = []
    for number in range(conversations):
        kind = number % (len(kinds) + 1)
        chat = kinds[kind](rng, frame) if kind < len(kinds) else tasks.retrieval(rng, frame, hay, 3)
        text = "".join(part for part, _ in chat.runs())
        chats.append(torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids))
    long = torch.cat([texts[-1], texts[0]])
    starts = range(0, len(long) - max(prompts, default=0), 97)
    return Inputs(texts[:-1], chats, [long[start : start + n] for start, n in zip(starts, prompts, strict=False)])


class References:
    """The reference's log-probabilities [tokens, vocab] fp32, computed once for each sequence.

    Args:
        checkpoint: a folder.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._found: dict[tuple[Any, ...], Tensor] = {}

    @cached_property
    def _model(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return json.loads((self.checkpoint / "config.json").read_text()), read_dequantised(self.checkpoint)

    def logprobs(self, tokens: Tensor, quant: Quant, dtype: torch.dtype = torch.float32) -> Tensor:
        """Log-probabilities after each of `tokens`, of the reference with these quantisers and activations."""
        key = (tuple(tokens.tolist()), quant, dtype)
        if key not in self._found:
            padding = max(0, SHORTEST - len(tokens))  # later tokens change nothing
            padded = torch.nn.functional.pad(tokens, (0, padding))
            logits = Reference(*self._model, quant, dtype).logits(padded)[: len(tokens)]
            self._found[key] = logits.log_softmax(-1)
        return self._found[key]


@dataclass
class Asked:
    """A server's scores, and the sequences and first positions of which they are.

    Attributes:
        scores: of the tokens that follow position `start` of a sequence.
        tokens: the sequence.
        start: the position.
    """

    scores: list[Scores] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    start: list[int] = field(default_factory=list)

    def add(self, scores: Scores, tokens: Tensor, start: int) -> None:
        """Add a sequence."""
        self.scores.append(scores)
        self.tokens.append(tokens)
        self.start.append(start)

    def row(self, name: str, references: References, quant: Quant) -> Row:
        """The figures against the reference with these quantisers."""
        return row(name, self._rows(references, quant, torch.float32), self.scores)

    def plain(self, references: References, quant: Quant, dtype: torch.dtype) -> Row:
        """The same for the reference with activations in `dtype`, in place of the server."""
        exact, rounded = (self._rows(references, quant, one) for one in (torch.float32, dtype))
        starts = zip(self.tokens, self.start, strict=True)
        scores = [scores_of(r, tokens[start:]) for r, (tokens, start) in zip(rounded, starts, strict=True)]
        return row("plain", exact, scores)

    def _rows(self, references: References, quant: Quant, dtype: torch.dtype) -> list[Tensor]:
        pairs = zip(self.tokens, self.start, strict=True)
        return [references.logprobs(tokens, quant, dtype)[start:] for tokens, start in pairs]


def asked_of(url: str, configuration: Configuration, given: Inputs, folder: Path) -> dict[str, Asked]:
    """What the server at a URL answers: "text", "chat" and "decode".

    Raises:
        NoHitError: a prefix was not found where it should be.
    """
    found = {"text": Asked(), "chat": Asked(), "decode": Asked()}
    start = 0
    if configuration.prefix != COLD:
        start = PREFIX_TOKENS
        lay_out(url, configuration.prefix, given.texts, folder)
    for window in given.texts:  # one after the other: a hit must not be evicted by the next one
        if configuration.prefix == "host":
            push_out(url)
        scores, info = ask(url, window, start)
        require_hit(configuration.prefix, info)
        found["text"].add(scores, window, start)
    with ThreadPoolExecutor(4) as pool:
        for window, (scores, _) in zip(given.chats, pool.map(lambda w: ask(url, w), given.chats), strict=True):
            found["chat"].add(scores, window, 0)
        answers = pool.map(lambda prompt: generate(url, prompt.tolist(), DECODED), given.prompts)
        for prompt, answer in zip(given.prompts, answers, strict=True):
            info = answer["meta_info"]
            scores = scores_from(info["output_token_logprobs"], info["output_top_logprobs"])
            tokens = torch.cat([prompt, torch.tensor(answer["output_ids"])])
            found["decode"].add(scores, tokens, len(prompt) - 1)
    return found


def lay_out(url: str, prefix: str, texts: Sequence[Tensor], folder: Path) -> None:
    """Compute the windows' prefixes and, for files, wait until they are written and empty the other caches."""
    for window in texts:
        generate(url, window[:PREFIX_TOKENS].tolist(), 1)
    if prefix == "storage":
        before = -1
        while before != (now := len(list(folder.rglob("*.page")) + list(folder.rglob("*.tail")))) or not now:
            before = now
            time.sleep(1.5)
        with urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache", method="POST"), timeout=60):
            pass


def push_out(url: str) -> None:
    """Fill the device's pool with other requests."""
    rng = random.Random("others")
    for _ in range(3):
        generate(url, [rng.randrange(10, 1000) for _ in range(800)], 1)


def require_hit(prefix: str, info: dict[str, Any]) -> None:
    """Raise unless the prefix was found in the wanted cache; the built-in does not say in which.

    Raises:
        NoHitError: says what was found.
    """
    if prefix == COLD:
        return
    pages = (info.get("prefix_cache") or [{}])[0].get("pages_from")
    if info["cached_tokens"] != PREFIX_TOKENS or pages not in (None, {prefix: PREFIX_TOKENS}):
        raise NoHitError(
            f"a prefix of {PREFIX_TOKENS} tokens should come from {prefix}; {info['cached_tokens']} came, from {pages}"
        )


def same_bits(found: dict[str, Asked], of_first: dict[str, Asked]) -> float:
    """The share of prompts' and answers' tokens whose log-probabilities have the bits of the first server's."""
    same = total = 0
    for kind, asked in found.items():
        for scores, tokens, start, first, first_tokens, first_start in zip(
            asked.scores, asked.tokens, asked.start,
            of_first[kind].scores, of_first[kind].tokens, of_first[kind].start, strict=True,
        ):  # fmt: skip
            expected = first.own[start - first_start :]
            equal = scores.own == expected
            equal &= tokens[start + 1 :] == first_tokens[start + 1 :]
            same, total = same + int(equal.sum()), total + len(equal)
    return same / total


@dataclass
class Table:
    """Measures configurations.

    Args:
        checkpoint: the trained one; variants are written to `folder`.
        folder: for logs, variants and files.
        start: starts a server.
        given: the inputs.
    """

    checkpoint: Path
    folder: Path
    start: Start
    given: Inputs
    first: dict[str, Asked] | None = None
    _references: dict[str, References] = field(default_factory=dict)

    def references(self, kind: str) -> References:
        """The references of a kind of checkpoint, which is written if it is missing."""
        if kind not in self._references:
            path = self.checkpoint
            if kind in KINDS:
                path = self.folder / kind
                write(kind, self.checkpoint, path)
            self._references[kind] = References(path)
        return self._references[kind]

    def asked(self, configuration: Configuration) -> dict[str, Asked]:
        """What this configuration's server answers."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        with self.start(configuration, self.references(configuration.checkpoint).checkpoint, place) as server:
            return asked_of(server.url, configuration, self.given, place)

    def measure(self, configuration: Configuration, *, in_fp32: bool = True) -> dict[str, Any]:
        """A row of the table; with `in_fp32` also the figures without quantisers, where the configuration has them."""
        found = self.asked(configuration)
        references, quant = self.references(configuration.checkpoint), QUANT[configuration.qat]
        if self.first is None:
            self.first = found
        result: dict[str, Any] = {
            "name": configuration.name,
            "flags": " ".join(configuration.flags),
            "env": dict(configuration.env)
            | ({} if configuration.qat == "full" else {"SGLANG_DSV4_QAT": configuration.qat}),
            "contender": configuration.contender,
            "checkpoint": configuration.checkpoint,
            "same_bits": same_bits(found, self.first),
            "same_bits_promised": configuration.same_bits,
        }
        for kind, asked in found.items():
            figures = asked.row(kind, references, quant)
            plain = asked.plain(references, quant, torch.bfloat16)
            result[kind] = {
                **{name: value for name, value in vars(figures).items() if name != "name"},
                "positions": sum(len(scores.own) for scores in asked.scores),
                "plain": plain.kl,
                "bound": bound_of(plain),
                "to_trained": asked.row(kind, references, FULL).kl,
            }
        if in_fp32 and configuration.in_fp32:
            exact = self.asked(configuration.without_quantisers())
            result["fp32"] = {kind: asked.row(kind, references, OFF).kl for kind, asked in exact.items()}
            result["fp32"]["bound"] = FP32_BOUND
        return result


def problems(measured: dict[str, Any]) -> list[str]:
    """What is beyond a bound in a row of the table."""
    found = [
        f"{measured['name']}: KL of {kind} {measured[kind]['kl']:.2e}, bound {measured[kind]['bound']:.2e}"
        for kind in ("text", "chat", "decode")
        if not measured[kind]["kl"] <= measured[kind]["bound"]
    ]
    found += [
        f"{measured['name']} in fp32 without quantisers: KL of {kind} {kl:.2e}, bound {FP32_BOUND:.2e}"
        for kind, kl in measured.get("fp32", {}).items()
        if kind != "bound" and not kl <= FP32_BOUND
    ]
    if measured["same_bits_promised"] and measured["same_bits"] < 1:
        found.append(f"{measured['name']}: {measured['same_bits']:.2%} of the tokens have the promised bits")
    return found


def beside_the_builtin(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Kinds in which our mean KL to the trained model is larger than that of every configuration of the built-in."""
    found = []
    for kind in ("text", "chat", "decode"):
        theirs = [one[kind]["to_trained"] for one in rows if one["contender"].startswith("builtin")]
        found += [
            f"{one['name']}: KL of {kind} to the trained model {one[kind]['to_trained']:.2e}, "
            f"built-in {min(theirs):.2e}"
            for one in rows
            if theirs and one["contender"].startswith("ours") and one[kind]["to_trained"] > min(theirs)
        ]
    return found


@contextmanager
def forked(configuration: Configuration, checkpoint: Path, folder: Path) -> Iterator[Any]:
    """The server of a configuration, forked from a process that has imported SGLang: a CPU's servers start sooner.

    Raises:
        DidNotComeUpError: the server ended or was not ready in time.
    """
    from serving.server import running_server

    flags, env = configuration.server_flags(), configuration.environment(folder)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(running_server(checkpoint, folder / "log", *flags, env=env))
        except AssertionError as error:
            raise DidNotComeUpError(str(error)) from error
        yield server


def from_command(configuration: Configuration, checkpoint: Path, folder: Path) -> AbstractContextManager[Any]:
    """The server of a configuration, started as users do."""
    server = configuration.contender.partition("+")[0]
    flags, env = configuration.server_flags(), configuration.environment(folder)
    return running(server, checkpoint, flags, PORT, folder / "log", env=env)


def shown(measured: dict[str, Any]) -> str:
    """A row for people."""
    kinds = " ".join(f"{measured[k]['kl']:.2e}/{measured[k]['bound']:.1e}" for k in ("text", "chat", "decode"))
    exact = max((kl for kind, kl in measured.get("fp32", {}).items() if kind != "bound"), default=None)
    fp32 = "" if exact is None else f"{exact:.1e}"
    return f"{measured['name']:38} {measured['text']['perplexity']:8.2f} {kinds} {measured['same_bits']:8.2%} {fp32}"


def main(arguments: Sequence[str] | None = None, start: Start | None = None) -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of this host; 0: the configurations of a CPU")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="configurations whose name has one of the texts")
    parser.add_argument("--add", action="store_true", help="to the rows of OUT")
    parser.add_argument("--folder", type=Path, help="for logs; by default a temporary one")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    offered = [one for one in (ON_GPUS if chosen.gpus else ON_A_CPU) if one.ranks <= max(1, chosen.gpus)]
    wanted = [one for one in offered if not chosen.only or any(text in one.name for text in chosen.only)]
    if not wanted:
        parser.error(f"no configuration has {chosen.only}; there are: {', '.join(one.name for one in offered)}")
    if wanted[0] is not offered[0]:
        wanted.insert(0, offered[0])  # whose bits the others are compared with
    given, rows = inputs(chosen.checkpoint), {}
    if chosen.add and chosen.out and chosen.out.exists():
        before = json.loads(chosen.out.read_text())
        if before["inputs"] != given.digest():
            parser.error(f"{chosen.out} was measured with other documents: measure all rows again, without --add")
        rows = {one["name"]: one for one in before["rows"]}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        start = start or (from_command if chosen.gpus else forked)
        table = Table(chosen.checkpoint, folder, start, given)
        print(
            f"{'':38} perplexity, KL/bound of text, chat, decode; same bits; KL in fp32 without quantisers", flush=True
        )
        for one in wanted:
            try:
                rows[one.name] = measured = table.measure(one)
            except (DidNotComeUpError, NoHitError, OSError) as error:
                failed.append(f"{one.name}: {error}")
                print(f"{one.name}: {error}", flush=True)
                continue
            failed += problems(measured)
            print(shown(measured), flush=True)
            order = {each.name: number for number, each in enumerate(offered)}
            result = {
                "checkpoint": chosen.checkpoint.name,
                "inputs": given.digest(),
                "text_tokens": TEXT_TOKENS,
                "top": TOP,
                "versions": versions(),
                "rows": sorted(rows.values(), key=lambda row: order.get(row["name"], len(order))),
            }
            if chosen.out is not None:
                chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    failed += beside_the_builtin(list(rows.values()))
    print("\n".join(f"beyond: {line}" for line in failed) or "all within their bounds")
    print(json.dumps({"configurations": len(rows), "beyond": failed}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
