"""Compares a running server's answers with and without its prefix cache, and reports how far they are apart.

    SGLANG_DSV4_COMPARE_ATTENTION=distances python -m sglang.launch_server --model-path MODEL ...
    python benchmarks/serve_attention.py [URL] [--distances FILE] [--log FILE] [--out FILE.json]

Single prompts are asked cold (after `/flush_cache`) twice and then twice with a filled cache: cold against cold is the
noise of the server's other kernels. Then several conversations with shared prefixes run at once, every turn appending
to the last; each of their requests is asked again, cold and alone. Two answers are compared by their tokens (greedy)
and by the log-probabilities up to the first different token.

`--distances` is the file of the variable above (without it the reference is not run): the distance of the kernel from
the reference for every attention that was computed, by kind of layer. `--log` is the server's log, of which the lines
about the attention are kept. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import re
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROMPT_TOKENS = (130, 600, 1500, 3000, 6000)
LINES_OF_INTEREST = re.compile(
    r"op \w+ on \w+|attention kernel|compiled|CUDA graphs|is live on|computed twice|Traceback"
)


@dataclass(frozen=True)
class Answer:
    """A server's answer to one request."""

    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int
    seconds: float


class Server:
    """The calls of SGLang's HTTP interface that this script makes."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def _open(self, path: str, body: dict | None = None, timeout: float = 600) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.read().decode()

    def info(self) -> dict:
        """Return `/server_info`."""
        return json.loads(self._open("/server_info"))

    def flush(self) -> None:
        """Empty the prefix cache, repeating the request: a server that has just answered refuses it for a moment."""
        for _ in range(50):
            try:
                self._open("/flush_cache", {})
                return
            except urllib.error.HTTPError as error:
                refusal = error
                time.sleep(0.2)
        raise refusal

    def generate(self, prompt: list[int], new_tokens: int) -> Answer:
        """Return the greedy answer, with the log-probability of each new token."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        begin = time.perf_counter()
        found = json.loads(
            self._open("/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True})
        )
        seconds, meta = time.perf_counter() - begin, found["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        return Answer(found["output_ids"], logprobs, int(meta["cached_tokens"]), seconds)


def compare(a: Answer, b: Answer) -> dict[str, object]:
    """Return how far two answers to the same prompt are apart.

    Returns:
        equal: tokens and log-probabilities are bitwise equal; first_difference: index of the first token that
        differs, None if none does; logprob_distance: the largest difference up to that token.
    """
    pairs = zip(a.tokens, b.tokens, strict=True)
    different = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    end = len(a.tokens) if different is None else different + 1
    distance = max((abs(x - y) for x, y in zip(a.logprobs[:end], b.logprobs[:end], strict=True)), default=0.0)
    return {
        "equal": a.tokens == b.tokens and a.logprobs == b.logprobs,
        "first_difference": different,
        "logprob_distance": distance,
    }


def single_prompts(
    server: Server, rng: random.Random, vocab: int, new_tokens: int, lengths: Iterable[int] = PROMPT_TOKENS
) -> list[dict]:
    """Ask each prompt cold twice, then twice with a filled cache; compare."""
    rows = []
    for length in lengths:
        prompt = _tokens(rng, vocab, length)
        answers = []
        for flush in (True, True, False, False):
            if flush:
                server.flush()
            answers.append(server.generate(prompt, new_tokens))
        cold, again, hit, hit_again = answers
        rows.append(
            {
                "prompt_tokens": length,
                "cached_tokens": hit.cached_tokens,
                "cold_again": compare(cold, again),
                "cached": compare(again, hit),
                "cached_again": compare(hit, hit_again),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        for answer in (cold, again):
            assert answer.cached_tokens == 0, "a request after /flush_cache was answered from the cache"
    return rows


def conversations(
    server: Server, rng: random.Random, vocab: int, new_tokens: int, sessions: int, turns: int
) -> list[dict]:
    """Ask several conversations at once, half of them with the same prefix; then each request again, cold and alone."""
    beginnings = [_tokens(rng, vocab, 1024) for _ in range(max(1, sessions // 2))]
    users = [[_tokens(rng, vocab, 200 + 37 * turn) for turn in range(turns)] for _ in range(sessions)]

    def session(index: int) -> list[tuple[list[int], Answer]]:
        asked, history = [], list(beginnings[index % len(beginnings)])
        for user in users[index]:
            history = history + user
            answer = server.generate(history, new_tokens)
            asked.append((history, answer))
            history = history + answer.tokens
        return asked

    server.flush()
    with concurrent.futures.ThreadPoolExecutor(sessions) as pool:
        found = list(pool.map(session, range(sessions)))
    rows = []
    for index, asked in enumerate(found):
        for turn, (prompt, answer) in enumerate(asked):
            server.flush()
            cold = server.generate(prompt, new_tokens)
            rows.append(
                {
                    "session": index,
                    "turn": turn,
                    "prompt_tokens": len(prompt),
                    "cached_tokens": answer.cached_tokens,
                    "seconds": round(answer.seconds, 3),
                    "cold_seconds": round(cold.seconds, 3),
                    "cached": compare(answer, cold),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _tokens(rng: random.Random, vocab: int, count: int) -> list[int]:
    return [rng.randrange(3, vocab) for _ in range(count)]


def summary(singles: list[dict], turns: list[dict]) -> dict[str, object]:
    """Return shares of equal answers, and the largest differences."""

    def of(name: str, rows: Iterable[dict]) -> dict[str, object]:
        found = [row[name] for row in rows]
        return {
            "answers": len(found),
            "equal": sum(x["equal"] for x in found),
            "same_tokens": sum(x["first_difference"] is None for x in found),
            "largest_logprob_distance": max((x["logprob_distance"] for x in found), default=None),
        }

    prompts, cached = (sum(row[key] for row in turns) for key in ("prompt_tokens", "cached_tokens"))
    return {
        "cold_against_cold": of("cold_again", singles),
        "cached_against_cold": of("cached", [row for row in singles if row["cached_tokens"]]),
        "cached_against_cached": of("cached_again", [row for row in singles if row["cached_tokens"]]),
        "turns_with_a_hit_against_cold": of("cached", [row for row in turns if row["cached_tokens"]]),
        "turns_without_a_hit_against_cold": of("cached", [row for row in turns if not row["cached_tokens"]]),
        "hit_rate_of_turns": round(cached / prompts, 4) if prompts else None,
    }


def distances(file: Path) -> dict[str, dict[str, float | int]]:
    """Return distances of the kernel from the reference: quantiles over tokens, by kind of layer, mode and quantity."""
    values: dict[str, list[float]] = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        for what in ("attended", "sublayer"):
            values.setdefault(f"{what}, {line['kind']}, {line['mode']}", []).extend(line[what])
    return {name: _quantiles(found) for name, found in sorted(values.items()) if found}


def _quantiles(values: list[float]) -> dict[str, float | int]:
    ordered = sorted(values)
    return {
        "tokens": len(ordered),
        "median": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
        "max": ordered[-1],
    }


def main() -> int:
    """Ask, compare, print; return 1 if no answer used the cache."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:30000")
    parser.add_argument("--vocab", type=int, default=1000, help="token ids are drawn below this")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPT_TOKENS, help="lengths of the single prompts")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--distances", type=Path)
    parser.add_argument("--log", type=Path, help="of the server")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    server, rng = Server(arguments.url), random.Random(0)
    info = server.info()
    singles = single_prompts(server, rng, arguments.vocab, arguments.new_tokens, arguments.prompts)
    turns = conversations(server, rng, arguments.vocab, arguments.new_tokens, arguments.sessions, arguments.turns)
    keys = ("attention_backend", "radix_cache_backend", "kv_cache_dtype", "disable_decode_cuda_graph", "version")
    result = {
        "benchmark": "serve_attention",
        "server": {key: info.get(key) for key in keys},
        "summary": summary(singles, turns),
        "distances": distances(arguments.distances) if arguments.distances else None,
        "log": _lines_of_interest(arguments.log) if arguments.log else None,
        "prompts": singles,
        "turns": turns,
    }
    for part in ("summary", "distances"):
        for name, value in (result[part] or {}).items():
            print(f"{name:36} {value}")
    text = json.dumps(result)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    print(text)
    return 0 if any(row["cached_tokens"] for row in singles + turns) else 1


def _lines_of_interest(log: Path) -> list[str]:
    """Return each line once, without the prefix that differs from line to line."""
    found = [line for line in log.read_text(errors="replace").splitlines() if LINES_OF_INTEREST.search(line)]
    return list(dict.fromkeys(re.sub(r"^\[[^\]]*\]\s*", "", line) for line in found))


if __name__ == "__main__":
    sys.exit(main())
