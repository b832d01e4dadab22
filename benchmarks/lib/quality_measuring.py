"""Measures the quality of configurations: inputs, the references' log-probabilities, and a table's rows.

`quality_table.py` says what is measured.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
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
from model.compare import TOLERANCE
from model.oracle import read_dequantised
from model.reference import FULL, OFF, Quant, Reference
from tokenizers import Tokenizer
from torch import Tensor
from train_tiny import tasks
from train_tiny.chat import Frame
from train_tiny.corpus import frame_of
from train_tiny.variants import KINDS, write

from lib.quality_configurations import COLD, PREFIX_TOKENS, Configuration
from lib.quality_figures import (
    FIXED_TEXT,
    SHORTEST,
    Row,
    Scores,
    ask,
    bound_of,
    divergence,
    generate,
    row,
    scores_from,
    scores_of,
    windows,
)
from lib.servers import DidNotComeUpError

TEXT_WINDOWS, TEXT_TOKENS = 2, 1024
CONVERSATIONS = 6
JUDGED = ("text", "chat", "decode")
REFERENCE = "the reference in fp32"
DECODED = 24
DECODE_PROMPTS = (121, 250, 505, 1019)
"""Prompt tokens: answers cross the ends of groups of 4 and 128 tokens, and of pages."""
FP32_BOUND = TOLERANCE**2 / 2
"""Nats of KL where every log-probability is off by at most `TOLERANCE`: half the variance of the differences."""
QUANT = {"full": FULL, "kv": Quant(kv_fp8=True, indexer_fp4=True), "off": OFF}
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
        """The same for the same tokens, which depend on the tokenizer and on the tasks of the training."""
        parts = [part.tolist() for part in (*self.texts, *self.chats, *self.prompts)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def inputs(
    checkpoint: Path,
    text_windows: int = TEXT_WINDOWS,
    conversations: int = CONVERSATIONS,
    prompts: Sequence[int] = DECODE_PROMPTS,
) -> Inputs:
    """The sequences of a measurement: always the same for a tokenizer and numbers."""
    texts = windows(checkpoint, FIXED_TEXT, TEXT_TOKENS, text_windows + 1)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    frame, rng = Frame(**frame_of(tokenizer)), random.Random("quality")  # no seed of training
    kinds = (tasks.small_talk, tasks.json_answer, tasks.tool_call)
    hay = [line for line in FIXED_TEXT[0].read_text().split("\n") if line][:20]
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

    def of_reference(self, references: References, quant: Quant) -> dict[str, float]:
        """The reference's own perplexity, and by how many nats bf16 moves its log-probability of a token (root mean
        square)."""
        starts = list(zip(self.tokens, self.start, strict=True))
        exact, rounded = (
            torch.cat(
                [
                    scores_of(one, tokens[start:]).own.double()
                    for one, (tokens, start) in zip(self._rows(references, quant, dtype), starts, strict=True)
                ]
            )
            for dtype in (torch.float32, torch.bfloat16)
        )
        moved = float((exact - rounded).square().mean().sqrt())
        return {"reference_perplexity": math.exp(-exact.mean()), "plain_moved": moved}

    def by_token(self, references: References, quant: Quant) -> dict[int, str]:
        """KL of each token that was judged, in nats and in order. The key is the number of tokens before the first."""
        pairs = zip(self._rows(references, quant, torch.float32), self.scores, self.start, strict=True)
        return {
            start + 1: " ".join(f"{kl:.1e}" for kl in divergence(one, scores).tolist()) for one, scores, start in pairs
        }

    def _rows(self, references: References, quant: Quant, dtype: torch.dtype) -> list[Tensor]:
        pairs = zip(self.tokens, self.start, strict=True)
        return [references.logprobs(tokens, quant, dtype)[start:] for tokens, start in pairs]


def asked_of(url: str, configuration: Configuration, given: Inputs, folder: Path) -> dict[str, Asked]:
    """The answers of the server at a URL, by kind: "text", "chat" and "decode".

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
        """The answers of this configuration's server."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        with self.start(configuration, self.references(configuration.checkpoint).checkpoint, place) as server:
            return asked_of(server.url, configuration, self.given, place)

    def of_reference(self) -> dict[str, Any]:
        """The first row: the perplexity of the reference with all quantisers, of texts and conversations."""
        found: dict[str, Any] = {"name": REFERENCE, "contender": "reference", "checkpoint": "trained"}
        references = self.references("trained")
        for kind, sequences in (("text", self.given.texts), ("chat", self.given.chats)):
            own = torch.cat([scores_of(references.logprobs(one, FULL), one).own.double() for one in sequences])
            found[kind] = {"perplexity": math.exp(-own.mean()), "positions": len(own)}
        return found

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
                "plain_agreement": plain.agreement,
                "bound": bound_of(plain),
                "to_trained": asked.row(kind, references, FULL).kl,
            }
            if kind != "decode":  # the server chose the tokens of answers
                result[kind] |= asked.of_reference(references, quant)
        result["decode"]["by_token"] = found["decode"].by_token(references, quant)
        if in_fp32 and configuration.in_fp32:
            exact = self.asked(configuration.without_quantisers())
            result["fp32"] = {kind: asked.row(kind, references, OFF).kl for kind, asked in exact.items()}
            result["fp32"]["bound"] = FP32_BOUND
        return result


def most_other_tokens(of_plain: float, positions: int) -> float:
    """The share of positions at which a server may prefer another token than the reference.

    Twice that of the reference with activations in bf16, as for KL, and three standard deviations of the difference of
    two counts with that share. The share is estimated by Laplace's rule, since zero of few positions is
    not a share of 0.

    Args:
        of_plain: that share.
        positions: that were compared.
    """
    share = (of_plain * positions + 1) / (positions + 2)
    return 2 * share + 3 * math.sqrt(2 * share * (1 - share) / positions)


def furthest_perplexity(kl_bound: float, plain_moved: float, positions: int) -> float:
    """The largest |log(perplexity / the reference's)| that a server may have, in nats.

    This is the mean over a text's tokens of log p - log q. Rounding adds numbers e to the logits, so that to second
    order log p(x) - log q(x) = -e(x) + E_p[e] + Var_p[e] / 2. If e has the mean 0 for every token, the expectation of
    this difference is the KL for every token x, likely or not: it may be as large as the bound of the KL. The mean over
    the tokens varies, too: three standard deviations, of twice the variance that the reference in bf16 has, since KL is
    half a variance. Tokens of a greedy answer have no such bound, because q chose them. How far both assumptions hold:
    `docs/log/trained_model.md`.

    Args:
        kl_bound: of the mean KL.
        plain_moved: root mean square of the difference, of the reference in bf16.
        positions: that were judged.
    """
    return kl_bound + 3 * math.sqrt(2 / positions) * plain_moved


def problems(measured: dict[str, Any]) -> list[str]:
    """The figures of a row of the table that are beyond their bounds, a line each."""
    name, found = measured["name"], []
    if measured["contender"] == "reference":
        return found
    for kind in JUDGED:
        one = measured[kind]
        if not one["kl"] <= one["bound"]:
            found.append(f"{name}: KL of {kind} {one['kl']:.2e}, bound {one['bound']:.2e}")
        if "plain_agreement" in one:  # earlier files lack it
            other, most = 1 - one["agreement"], most_other_tokens(1 - one["plain_agreement"], one["positions"])
            if other > most:
                found.append(f"{name}: {other:.2%} of {kind} have another likeliest token, at most {most:.2%}")
        if "reference_perplexity" in one:  # earlier files and answers lack it
            away = math.log(one["perplexity"] / one["reference_perplexity"])
            furthest = furthest_perplexity(one["bound"], one["plain_moved"], one["positions"])
            if not abs(away) <= furthest:
                found.append(
                    f"{name}: perplexity of {kind} {one['perplexity']:.2f}, the reference's "
                    f"{one['reference_perplexity']:.2f}: {away:+.3f} nats, at most {furthest:.3f}"
                )
    found += [
        f"{name} in fp32 without quantisers: KL of {kind} {kl:.2e}, bound {FP32_BOUND:.2e}"
        for kind, kl in measured.get("fp32", {}).items()
        if kind != "bound" and not kl <= FP32_BOUND
    ]
    if measured["same_bits_promised"] and measured["same_bits"] < 1:
        found.append(f"{name}: {measured['same_bits']:.2%} of the tokens have the promised bits")
    return found


@contextmanager
def forked(configuration: Configuration, checkpoint: Path, folder: Path) -> Iterator[Any]:
    """The server, or pair of servers, of a configuration, forked from a process that has imported SGLang, so that they
    start sooner on a CPU.

    Raises:
        DidNotComeUpError: the server ended or was not ready in time.
    """
    from serving.pair import one_address, running_pair
    from serving.server import running_server

    flags, env = configuration.server_flags(), configuration.environment(folder)
    with ExitStack() as stack:
        try:
            if configuration.pair:
                pair = stack.enter_context(running_pair(checkpoint, folder, *flags, env=env))
                server = stack.enter_context(one_address(pair))
            else:
                server = stack.enter_context(running_server(checkpoint, folder / "log", *flags, env=env))
        except AssertionError as error:
            raise DidNotComeUpError(str(error)) from error
        yield server
