"""A small tokenizer with DeepSeek-V4's special tokens, for checkpoints of random weights.

It is a byte-level BPE over all 256 bytes and some English words, so that any text can be encoded and a random model's
answers are mostly legible. The special tokens are the released tokenizer's (specification, section 8) with bos 0, eos 1
and pad 2; the released tokenizer's placeholder tokens fill the vocabulary up to the requested size.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"

# Never shown in an answer. deepseek-recipe and SGLang look them up by their text.
SPECIAL_TOKENS = (
    BOS, EOS, PAD,
    "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>", "<｜image｜>",
    "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>",
    "<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>", "<｜point｜>", "<｜/point｜>",
    "<｜polygon｜>", "<｜/polygon｜>",
    "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>",
)  # fmt: skip
# One token each, and part of the answer's text: the parsers of reasoning and tool calls read them.
VISIBLE_TOKENS = ("<think>", "</think>", "｜DSML｜")

WORDS = (
    "the of and to in is that it for was on are as with his they at be this have from or one had by word but not "
    "what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part over new "
    "sound take only little work know place year live me back give most very after thing our just name good "
    "sentence man think say great where help through much before line right too mean old any same tell boy follow "
    "came want show also around form three small set put end does another well large must big even such because "
    "turn here why ask went men read need land"
).split()


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly ``vocab_size`` tokens.

    Raises:
        ValueError: ``vocab_size`` is too small for the bytes, the words and the special tokens.
    """
    vocab: dict[str, int] = {token: index for index, token in enumerate((BOS, EOS, PAD))}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in WORDS:  # " the" becomes Ġ+t, Ġt+h, Ġth+e: each merge adds one letter on the right
        spelled = "Ġ" + word
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab:
                merges.append((spelled[: end - 1], spelled[end - 1]))
                vocab[spelled[:end]] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE_TOKENS])

    missing = vocab_size - tokenizer.get_vocab_size()
    if missing < 0:
        raise ValueError(
            f"vocab_size {vocab_size}: the tokenizer of random checkpoints needs at least {tokenizer.get_vocab_size()}"
        )
    placeholders = [f"<｜place▁holder▁no▁{index}｜>" for index in range(missing)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in placeholders])
    return tokenizer


def write_tokenizer(directory: Path, vocab_size: int, max_tokens: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    Args:
        directory: the checkpoint's folder, which exists.
        vocab_size: number of tokens, as in ``config.json``.
        max_tokens: the longest sequence the model accepts.
    """
    build_tokenizer(vocab_size).save(str(directory / "tokenizer.json"))
    write_tokenizer_files(directory, max_tokens)


def write_tokenizer_files(directory: Path, max_tokens: int) -> None:
    """Write ``tokenizer_config.json`` and ``generation_config.json``; arguments as in `write_tokenizer`."""
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,  # as in the release
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }
    generation_config = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 1.0}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2, ensure_ascii=False) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation_config, indent=2) + "\n")
