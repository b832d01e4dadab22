"""Commands for GSM8K, AIME, GPQA and BFCL by public harnesses, and the figures that were published.

These take hours and data sets, so that they are printed and not run. The flags are those of sgl-eval 0.1.3, lm-eval
0.4.13 (EleutherAI's lm-evaluation-harness) and bfcl-eval 2026.3.23.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from sglang_dsv4.acceptance.served import Weights

FLASH, FLASH_0731, PRO, PRO_0813 = Weights.FLASH_APRIL, Weights.FLASH_0731, Weights.PRO_APRIL, Weights.PRO_0813
CARD = "model card of DeepSeek-V4, April 2026"
CARD_41 = "model card of DeepSeek-V4.1-Flash, maximum effort"
BFCL = """\
cat > bfcl_deepseek_v4.py <<'END'
import os
from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING, ModelConfig
from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler
name = os.environ["MODEL"]
MODEL_CONFIG_MAPPING[name] = ModelConfig(
    name, name, "", "", "", OpenAICompletionsHandler, is_fc_model=True, underscore_to_dot=True
)
from bfcl_eval.__main__ import cli
cli()
END
export MODEL={model} OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none BFCL_PROJECT_ROOT=$PWD/bfcl
CATEGORIES=simple_python,multiple,parallel,parallel_multiple,multi_turn_base
python bfcl_deepseek_v4.py generate --model "$MODEL" --test-category $CATEGORIES --num-threads 8
python bfcl_deepseek_v4.py evaluate --model "$MODEL" --test-category $CATEGORIES"""
"""BFCL's table of models lacks DeepSeek-V4; this adds a model that is asked through the chat route with tools."""


@dataclass(frozen=True)
class Figure:
    """A published score of one release, in percent, with its source."""

    weights: Weights
    score: float
    source: str


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: how to run it, and what was published.

    Attributes:
        name: with the metric.
        install: packages for pip.
        commands: lines of a shell; `{url}` and `{model}` are quoted already.
        figures: published scores; empty if none is known.
        note: what to know before comparing.
    """

    name: str
    install: str
    commands: tuple[str, ...]
    figures: tuple[Figure, ...]
    note: str = ""


def _thinking(name: str, repeats: int) -> str:
    return (
        f"sgl-eval run {name} --base-url {{url}}/v1 --model {{model}} --n-repeats {repeats} --max-tokens {{tokens}} "
        "--temperature 1.0 --top-p 1.0 --thinking --reasoning-effort max"
    )


BENCHMARKS = (
    Benchmark(
        "GSM8K, 1,319 questions",
        "sgl-eval 'lm-eval[api]'",
        (
            "sgl-eval run gsm8k --base-url {url}/v1 --model {model} --num-threads 32",
            "lm-eval run --model local-chat-completions --tasks gsm8k --num_fewshot 8 --apply_chat_template "
            "--model_args model={model},base_url={url}/v1/chat/completions,num_concurrent=32,max_retries=3",
        ),
        (
            Figure(FLASH, 95.4, "sgl-project/sglang#25052, 8 examples in the prompt"),
            Figure(FLASH_0731, 97.0, "sgl-project/sglang#33082"),
            Figure(PRO, 96.0, "sgl-project/sglang#26132, 200 questions"),
        ),
        "The model card has it for the base models only.",
    ),
    Benchmark(
        "AIME 2025, mean of 16",
        "sgl-eval",
        (_thinking("aime25", 16),),
        (
            Figure(FLASH, 97.5, "sgl-project/sglang#25052"),
            Figure(PRO, 98.8, "sgl-project/sglang#26132, maximum effort"),
        ),
        "Not in the model card, which has HMMT February 2026: Flash 40.8 / 91.9 / 94.8 and Pro 31.7 / 94.0 / 95.2 "
        "(no thinking / high / max).",
    ),
    Benchmark(
        "GPQA Diamond, mean of 16",
        "sgl-eval",
        (_thinking("gpqa", 16),),
        (
            Figure(FLASH, 88.1, f"{CARD}: effort max; high 87.4, without thinking 71.2"),
            Figure(PRO, 90.1, f"{CARD}: effort max; high 89.1, without thinking 72.9"),
            Figure(FLASH_0731, 89.9, CARD_41),
            Figure(PRO_0813, 92.4, CARD_41),
        ),
        "The data set is gated: accept its terms on Hugging Face first.",
    ),
    Benchmark(
        "BFCL",
        "bfcl-eval",
        tuple(BFCL.splitlines()),
        (),
        "Neither the model card nor the leaderboard's public pages that were found have a figure of DeepSeek-V4: "
        "compare with another engine that serves the same weights.",
    ),
)


def commands(benchmark: Benchmark, url: str, model: str, weights: Weights) -> list[str]:
    """The shell lines for a server."""
    tokens = 400_000 if weights in (PRO, PRO_0813) else 200_000
    words = {"url": shlex.quote(url), "model": shlex.quote(model), "tokens": tokens}
    return [_filled(line, words) for line in benchmark.commands]


def _filled(line: str, words: dict[str, object]) -> str:
    for name, value in words.items():
        line = line.replace(f"{{{name}}}", str(value))
    return line


def page(url: str, model: str, weights: Weights) -> str:
    """The commands with published figures, for people."""
    lines = ["Public benchmarks (not run; the figures are published ones, in percent):"]
    for benchmark in BENCHMARKS:
        lines += ["", f"{benchmark.name}    pip install {benchmark.install}"]
        lines += [f"    {line}" for line in commands(benchmark, url, model, weights)]
        known = [figure for figure in benchmark.figures if figure.weights is weights] or list(benchmark.figures)
        lines += [f"    published: {one.weights.value} {one.score:g} ({one.source})" for one in known]
        if benchmark.note:
            lines.append(f"    {benchmark.note}")
    return "\n".join(lines)


def as_json(url: str, model: str, weights: Weights) -> list[dict[str, object]]:
    """The same for the JSON."""
    return [
        {
            "name": one.name,
            "install": one.install,
            "commands": commands(one, url, model, weights),
            "published": [
                {"weights": figure.weights.value, "score": figure.score, "source": figure.source}
                for figure in one.figures
            ],
            "note": one.note,
        }
        for one in BENCHMARKS
    ]
