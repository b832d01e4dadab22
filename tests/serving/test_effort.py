"""Prompt ids of each release, compared with its own encoder (encoding/encoding_dsv4.py of the checkpoints)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving.server import Server
from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_dsv4.acceptance.encoding_cases import ABSOLUTE, BEYOND
from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.requests.chat import reasoning_effort as effort

APRIL = {None: "", "high": "", "max": ABSOLUTE}
LATER = {None: "", "low": "", "high": ABSOLUTE, "max": BEYOND}
# Efforts that SGLang accepts and the encoder lacks. April: none has a text. Later: minimal is low, the others high.
APRIL_ALIASES = {"minimal": "", "low": "", "medium": "", "xhigh": ""}
LATER_ALIASES = {"minimal": "", "medium": ABSOLUTE, "xhigh": ABSOLUTE}

RELEASES = {
    "flash-april": APRIL | APRIL_ALIASES,
    "flash-0731": LATER | LATER_ALIASES,
    "pro-0813": LATER | LATER_ALIASES,
}
CASES = [(release, word) for release, words in RELEASES.items() for word in words]


def encoded(tokenizer: PreTrainedTokenizerFast, prefix: str, thinking: bool) -> list[int]:
    """Return the release's prompt of one user turn; a prompt without thinking has no prefix."""
    prefix, mark = (prefix, "<think>") if thinking else ("", "</think>")
    text = f"<｜begin▁of▁sentence｜>{prefix}<｜User｜>Hi there<｜Assistant｜>{mark}"
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(effort, "_tiers", effort.Tiers.LATER)
    monkeypatch.setenv(effort.SGLANG_DEFAULT_VARIABLE, "")
    monkeypatch.delenv(effort.VARIABLE, raising=False)
    yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {release: tmp_path_factory.mktemp(release) for release in RELEASES}
    for release, folder in folders.items():
        write_checkpoint(folder, PRESETS[release])
    return folders


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "plain"])
@pytest.mark.parametrize(("release", "word"), CASES, ids=[f"{release}-{word}" for release, word in CASES])
def test_prompt_ids_are_the_releases(
    checkpoints: dict[str, Path], release: str, word: str | None, thinking: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[release])
    has_dspark = PRESETS[release].dspark_markov_rank is not None
    effort.use_tiers_of(str(checkpoints[release]), None, has_dspark)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi there"}], "thinking": thinking}
    if word is not None:
        body["reasoning_effort"] = word
    recipe = DeepSeekRecipe.from_hf_tokenizer("dsv4", tokenizer)
    ids = effort.render(unhooked(DeepSeekRecipe.encode), recipe, body)
    assert ids == encoded(tokenizer, RELEASES[release][word], thinking)


def unhooked(method: Any) -> Any:
    """Return SGLang's own method, also where a plugin is loaded in this process."""
    return getattr(method, "__wrapped__", method)


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "plain"])
@pytest.mark.parametrize("word", APRIL)
def test_a_server_renders_what_an_april_checkpoint_has_seen(
    server: Server, checkpoint: Path, word: str | None, thinking: bool
) -> None:
    """SGLang gave a request without an effort the text of April's highest effort, and the highest effort a later
    text."""
    body: dict[str, Any] = {"chat_template_kwargs": {"thinking": thinking}, "return_prompt_token_ids": True}
    if word is not None:
        body["reasoning_effort"] = word
    response = server.chat("Hi there", max_tokens=1, extra_body=body)
    expected = encoded(AutoTokenizer.from_pretrained(checkpoint), APRIL[word], thinking)
    assert response.choices[0].prompt_token_ids == expected


@pytest.mark.parametrize(
    ("encoder", "dspark", "variable", "expected"),
    [
        ("REASONING_EFFORT_MAX = 1", True, "", "april"),  # V4-Flash-DSpark
        ("REASONING_EFFORT_PROMPTS = {}", True, "", "later"),
        ("REASONING_EFFORT_PROMPTS = {}", False, "", "later"),
        ("something else", False, "", "april"),
        (None, False, "", "april"),
        (None, True, "", "later"),
        (None, True, "april", "april"),
        ("REASONING_EFFORT_MAX = 1", False, "LATER ", "later"),
    ],
)
def test_the_checkpoints_own_encoder_decides(
    tmp_path: Path, encoder: str | None, dspark: bool, variable: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if encoder is not None:
        (tmp_path / "encoding").mkdir()
        (tmp_path / effort.ENCODER_FILE).write_text(encoder)
    monkeypatch.setenv(effort.VARIABLE, variable)
    assert effort.tiers_of(str(tmp_path), None, dspark)[0].value == expected


def test_an_unknown_word_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(effort.VARIABLE, "june")
    with pytest.raises(ValueError, match="SGLANG_DSV4_EFFORT_TIERS must be 'april' or 'later', got 'june'"):
        effort.tiers_of(str(tmp_path), None, True)


def test_another_models_encoding_is_left_alone() -> None:
    body = {"messages": [], "thinking": True}
    assert effort.render(lambda recipe, body: body, SimpleNamespace(model="DeepSeek-V4.1"), body) is body
