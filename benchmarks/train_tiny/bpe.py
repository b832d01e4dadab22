"""The tokenizer of `corpus.py` in plain Python, for hosts without the package `tokenizers`; ASCII text.

Ids are those of `tokenizers` for the same ``tokenizer.json``. Pieces are remembered, so that generated text, which
repeats its words, is encoded at some 500,000 tokens a second.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

_PIECES = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
_DIGIT = re.compile(r"(\d)")


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level BPE."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, next_letter = {byte: chr(byte) for byte in kept}, 256
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(next_letter)
            next_letter += 1
    return [letters[byte] for byte in range(256)]


class Encoder:
    """Text to ids; special tokens are recognised in the text."""

    def __init__(self, tokenizer_file: Path) -> None:
        stored = json.loads(Path(tokenizer_file).read_text())
        self.vocab: dict[str, int] = stored["model"]["vocab"]
        pairs = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in stored["model"]["merges"]]
        self.ranks = {pair: rank for rank, pair in enumerate(pairs)}
        self.special = {token["content"]: token["id"] for token in stored["added_tokens"]}
        longest_first = sorted(self.special, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._letters = _byte_letters()
        byte_of = {letter: byte for byte, letter in enumerate(self._letters)}
        self._bytes = {
            id_: bytes(byte_of[letter] for letter in symbol)
            for symbol, id_ in self.vocab.items()
            if symbol not in self.special
        } | {token["id"]: token["content"].encode() for token in stored["added_tokens"] if not token["special"]}
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ids: list[int] = []
        for part in self._special.split(text):
            if part in self.special:
                ids.append(self.special[part])
            elif part:
                for segment in _DIGIT.split(part):
                    for piece in _PIECES.findall(segment) if len(segment) != 1 else (segment,):
                        found = self._known.get(piece)
                        ids += found if found is not None else self._merge(piece)
        return ids

    def _merge(self, piece: str) -> list[int]:
        symbols = [self._letters[byte] for byte in piece.encode()]
        while len(symbols) > 1:
            ranked = [(self.ranks.get(pair, 1 << 30), at) for at, pair in enumerate(itertools.pairwise(symbols))]
            rank, at = min(ranked)
            if rank == 1 << 30:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        self._known[piece] = [self.vocab[symbol] for symbol in symbols]
        return self._known[piece]

    def decode(self, ids: list[int]) -> str:
        """The text of ids; special tokens that aren't part of a text are left out."""
        return b"".join(self._bytes.get(id_, b"") for id_ in ids).decode(errors="ignore")
