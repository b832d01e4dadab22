"""Answers of DeepSeek's hosted V4-Flash (weights of April 2026), captured in May 2026.

Five prompts with the official API's greedy continuation: thinking disabled, temperature 0. At temperature 0 the API
reports 0 as the log-probability of each of these tokens and -9999 for all others, so that these are left out. The API
answers V4's names with V4.1 today: the answers can't be captured again.

Origin: https://github.com/antirez/ds4, tests/test-vectors at commit 8d57664 (no code of it). The two long prompts
consist of one line with a running number, and are put together here. The data's licence:

MIT License

Copyright (c) 2026 The ds4.c authors
Copyright (c) 2023-2026 The ggml authors

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Vector:
    """A prompt with its official continuation.

    Attributes:
        name: ds4's.
        prompt: the user's turn; there is no system message.
        prompt_sha256: of the prompt as captured.
        prompt_tokens: as the API counted them, special tokens included.
        max_tokens: of the request.
        tokens: the continuation; shorter than `max_tokens` if the model ended it.
    """

    name: str
    prompt: str
    prompt_sha256: str
    prompt_tokens: int
    max_tokens: int
    tokens: tuple[str, ...]


def _archive() -> str:
    record = (
        "the archive entry says that component alpha keeps a compressed index, component beta keeps raw observations, "
        "and component gamma reports anomalies only after the checksum phrase appears. Do not summarize yet; retain "
        "the exact final question."
    )
    return "\n".join(
        (
            "You are checking a long technical archive. Read the repeated records and answer only the final question "
            "with one short sentence.\n",
            *(f"Record {number:03}: {record}" for number in range(72)),
            "\nFinal question: which component reports anomalies after the checksum phrase appears?",
        )
    )


def _audit() -> str:
    line = (
        "validates a queue entry, calls normalize_path(), then appends a compact audit line. The invariant is that "
        "strlen() must not be recomputed when a trusted length returned by snprintf() is already available. Security "
        "note {}: reject negative sizes before casting."
    )
    return "\n".join(
        (
            "Review this generated C-code audit log. After the log, complete the sentence with the most likely next "
            "words.\n",
            *(f"Function f_{number} {line.format(number)}" for number in range(68)),
            "\nCompletion target: The most important code quality issue is",
        )
    )


VECTORS = (
    Vector(
        "short_italian_fact",
        "Rispondi in italiano con una frase: chi era Ada Lovelace?",
        "f8ba09a1973f567537f447e9a85400b0ca7369552dc72fe126b0a2623ae938dc",
        prompt_tokens=21,
        max_tokens=4,
        tokens=("Ada", " Lov", "el", "ace"),
    ),
    Vector(
        "short_code_completion",
        'Complete the C statement with the next exact token only:\nreturn snprintf(buf, sizeof(buf), "%d", value',
        "128f2c2a8b3d8b8ce2b75d9ff9b76339f838e68080bac3a0e19f208282cc88b3",
        prompt_tokens=27,
        max_tokens=4,
        tokens=("```", "c", "\n", "return"),
    ),
    Vector(
        "short_reasoning_plain",
        "Answer with only the number: 2048 divided by 128 is",
        "0943f0869b5b5b81f5fd1aad28d81770bb494445f0d871bd6c57340088547b74",
        prompt_tokens=18,
        max_tokens=4,
        tokens=("16",),
    ),
    Vector(
        "long_memory_archive",
        _archive(),
        "38e7bf001e529b8557a20ca39bd5e9e78fe1dbc3c886b176466c8436b5cc00ae",
        prompt_tokens=3353,
        max_tokens=4,
        tokens=("Component", " gamma", " reports", " anomalies"),
    ),
    Vector(
        "long_code_audit",
        _audit(),
        "efae39172d088e3b8da70f408e53eeebe0f5b17fa407a440ed969cd85e4784dd",
        prompt_tokens=3844,
        max_tokens=4,
        tokens=("The", " most", " important", " code"),
    ),
)
