"""A random trace of requests through router, prefill server and decode server, with aborts and kills.

    PYTHONPATH=tests/lib python -m serving.pd_trace [--requests 5000] [--seed 1] [--kills 6] [--minutes M]
        [--out FILE.json] [-- flags of all servers]

The flags may give each server ranks with requests of their own, for example `--dp-size 2`, or drafts, for example
`--speculative-algorithm DSPARK`.

One server answers every case first, outside the trace. In the trace each answer must have the same bits, tokens and
log-probabilities; an aborted request's answer must be a beginning of it. In the end both servers must be idle and hold
nothing: rooms, request slots, pages, rows of metadata. Needs `sglang-router`, in the version of
`cpu.quickstart_pd.ROUTER`.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import requests
from serving.answered_cases import TIMEOUT_S, Answer, Case, answer_of, answered_cases
from serving.pair import ENV
from serving.routed_pair import FLAGS, Sides, server_at
from serving.server import SLEEP_ON_IDLE, free_port, wait_until

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

# Few layers and heads: a trace is about requests.
SHAPE = replace(PRESETS["tiny"], compress_ratios=(4, 128), num_attention_heads=2, o_groups=1, index_n_heads=2)
SHAPE = replace(SHAPE, n_routed_experts=4, moe_intermediate_size=128)
WITH_DSPARK = replace(SHAPE, compress_ratios=(0, 4, 128, 4), dspark_markov_rank=32, dspark_target_layer_ids=(0, 1, 2))
"""A DSPARK draft needs four layers."""
LONG = "too long"
REFUSED: dict[str, dict[str, Any]] = {
    "a token that is not in the vocabulary": {"input_ids": [5, 100_000]},
    LONG: {},
    "two answers": {"sampling_params": {"n": 2, "max_new_tokens": 4}},
    "many log-probabilities": {"top_logprobs_num": 500},
}
AT_ONCE = 20


@dataclass
class Report:
    """Outcomes of the requests by name, and the wrong ones."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str, wrong: str | None = None) -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            if wrong is not None:
                self.wrong.append(wrong)

    @property
    def done(self) -> int:
        return sum(self.outcomes.values())


class Trace:
    """Requests of a random trace, each compared with one server's answer."""

    def __init__(self, sides: Sides, answers: dict[Case, Answer], seed: int) -> None:
        self._sides, self._answers, self._cases = sides, answers, list(answers)
        self._rng, self.report = random.Random(seed), Report()
        # An error of a request that ran while a server died, or was dead, is expected.
        self._deaths, self._one_is_dead = 0, False

    def run(self, count: int, kills: int, seconds: float) -> None:
        """Send `count` requests, and kill a server in between, prefill and decode in turns; after `seconds` no more."""
        deadline = time.monotonic() + seconds

        def ask_in_time(function: Callable[..., None], *arguments: Any) -> None:
            if time.monotonic() < deadline:
                function(*arguments)

        per_part = count // (kills + 1)
        for part in range(kills + 1):
            if time.monotonic() > deadline:
                break
            last, side = part == kills, ("prefill", "decode")[part % 2]
            requests_of_part = [
                self._draw(f"{part}-{i}") for i in range(count - per_part * kills if last else per_part)
            ]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                begun = [pool.submit(ask_in_time, *request) for request in requests_of_part]
                if not last:  # the requests that are left meet a dead server
                    while sum(one.done() for one in begun) < len(begun) - 2 * AT_ONCE:
                        time.sleep(0.1)
                    self._deaths, self._one_is_dead = self._deaths + 1, True
                    self._sides.kill(side)
            for one in begun:
                one.result()
            if not last:
                self._sides.start(side)
                wait_until(self.serves)
                self._one_is_dead = False

    def serves(self) -> bool:
        """Whether the router's servers answer a request rightly."""
        case = self._cases[0]
        response = requests.post(f"{self._sides.router}/generate", json=case.body("probe", False), timeout=30)
        if response.status_code != 200:
            return False
        assert answer_of(response.json()) == self._answers[case]
        return True

    def _draw(self, name: str) -> tuple[Any, ...]:
        """Draw a request: the function to call, and its arguments."""
        rng = self._rng
        # A few cases are asked often, so that their pages are in both trees; others come back after an eviction.
        case = self._cases[int(len(self._cases) * rng.random() ** 2)]
        kind, after_s = rng.random(), rng.random() ** 2 * 1.5
        if kind < 0.05:
            # The router takes one `sampling_params` for a batch, and no list of ids (`rid`).
            return self._batch, (case, rng.choice([one for one in self._cases if one.sampling == case.sampling])), name
        if kind < 0.7:
            return self._whole, case, name, rng.random() < 0.5
        if kind < 0.8:
            return self._client_leaves, case, name, after_s
        if kind < 0.95:
            sides = rng.choice((("prefill",), ("decode",), ("decode", "prefill")))
            return self._aborted, case, name, after_s, sides
        return self._refused, case, name, rng.choice(list(REFUSED))

    def _whole(self, case: Case, name: str, stream: bool) -> None:
        deaths, what = self._deaths, "streamed" if stream else "whole"
        try:
            response = requests.post(
                f"{self._sides.router}/generate", json=case.body(name, stream), timeout=TIMEOUT_S, stream=stream
            )
            if response.status_code != 200:
                return self._failed(what, name, deaths, f"{response.status_code} {response.text[:300]}")
            answer = last_of_stream(response) if stream else answer_of(response.json())
        except (requests.RequestException, ValueError, KeyError) as error:
            return self._failed(what, name, deaths, repr(error)[:300])
        if answer is None or answer.reason in ("abort", "none"):
            return self._failed(what, name, deaths, f"ended early: {answer}")
        self._compare(what, case, name, answer, whole=True)

    def _batch(self, cases: tuple[Case, ...], name: str) -> None:
        deaths, bodies = self._deaths, [case.body(name, False) for case in cases]
        body = {"input_ids": [one["input_ids"] for one in bodies], "sampling_params": bodies[0]["sampling_params"]}
        try:
            response = requests.post(
                f"{self._sides.router}/generate", json=body | {"return_logprob": True}, timeout=TIMEOUT_S
            )
        except requests.RequestException as error:
            return self._failed("batch", name, deaths, repr(error)[:300])
        if response.status_code != 200:
            return self._failed("batch", name, deaths, f"{response.status_code} {response.text[:300]}")
        answers = [answer_of(result) for result in response.json()]
        if any(answer.reason == "abort" for answer in answers):
            return self._failed("batch", name, deaths, "ended early")
        right = answers == [self._answers[case] for case in cases]
        self.report.add("batch", None if right else f"{name}: a batch has other answers than its prompts alone")

    def _client_leaves(self, case: Case, name: str, after_s: float) -> None:
        """The client closes its connection; the router ends both requests."""
        deaths, deadline, answer = self._deaths, time.monotonic() + after_s, None
        try:
            with requests.post(
                f"{self._sides.router}/generate",
                json=case.body(name, True),
                timeout=(10, max(after_s, 0.01)),
                stream=True,
            ) as response:
                if response.status_code != 200:
                    return self._failed("client left", name, deaths, f"{response.status_code} {response.text[:300]}")
                for so_far in of_stream(response):
                    answer = so_far
                    if time.monotonic() > deadline:
                        break
        except (requests.RequestException, ValueError, KeyError) as error:
            if time.monotonic() < deadline:  # else nothing has come before it
                return self._failed("client left", name, deaths, repr(error)[:300])
        if answer is None:
            return self.report.add("client left before a token")
        self._compare("client left", case, name, answer, whole=False)

    def _aborted(self, case: Case, name: str, after_s: float, sides: tuple[str, ...]) -> None:
        deaths, what = self._deaths, f"aborted on {' and '.join(sides)}"
        timer = threading.Timer(after_s, self._abort, (name, sides))
        timer.start()
        try:
            response = requests.post(f"{self._sides.router}/generate", json=case.body(name, False), timeout=TIMEOUT_S)
        except requests.RequestException as error:
            return self._failed(what, name, deaths, repr(error)[:300])
        finally:
            timer.join()
        if response.status_code != 200:
            return self.report.add(f"{what}: {response.status_code}")
        answer = answer_of(response.json())
        self._compare(what, case, name, answer, whole=answer.reason != "abort")

    def _abort(self, name: str, sides: tuple[str, ...]) -> None:
        for side in sides:
            try:
                url = self._sides.servers[side].url
                requests.post(f"{url}/abort_request", json={"rid": name}, timeout=60)
            except requests.RequestException:
                pass  # a dead server

    def _refused(self, case: Case, name: str, why: str) -> None:
        deaths = self._deaths
        body = case.body(name, False)
        body |= REFUSED[why] if why != LONG else {"input_ids": list(case.prompt) * (8000 // len(case.prompt) + 1)}
        try:
            response = requests.post(f"{self._sides.router}/generate", json=body, timeout=TIMEOUT_S)
        except requests.RequestException as error:
            return self._failed("refused", name, deaths, repr(error)[:300])
        if response.status_code == 200:
            return self.report.add("refused", f"{name}: {why} was served: {response.text[:300]}")
        if response.status_code != 400:
            return self._failed("refused", name, deaths, f"{response.status_code} {response.text[:300]}")
        self.report.add("refused")

    def _failed(self, what: str, name: str, deaths: int, why: str) -> None:
        """Note a request without an answer, which is right only if a server died meanwhile."""
        if self._deaths > deaths or self._one_is_dead:
            return self.report.add("lost with a server")
        self.report.add(f"{what}: failed", f"{name}, {what}: {why}")

    def _compare(self, what: str, case: Case, name: str, answer: Answer, whole: bool) -> None:
        expected = self._answers[case]
        right = answer == expected if whole else answer.begins(expected)
        self.report.add(what, None if right else f"{name}, {what}, {case.sampling}: {difference(answer, expected)}")


def difference(answer: Answer, expected: Answer) -> str:
    """Return where an answer leaves the expected one."""
    pairs = zip(answer.tokens, answer.logprobs, expected.tokens, expected.logprobs, strict=False)
    at = next((i for i, (token, logprob, *other) in enumerate(pairs) if [token, logprob] != other), "the end")
    lengths = f"{len(answer.tokens)} tokens, {answer.reason}, in place of {len(expected.tokens)}, {expected.reason}"
    return f"{lengths}; the first difference is at {at}"


def of_stream(response: requests.Response) -> Iterator[Answer]:
    """Yield the answer so far with each event of a stream.

    Raises:
        ValueError: an event is an error.
    """
    for line in response.iter_lines():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"])
            yield answer_of(event)


def last_of_stream(response: requests.Response) -> Answer | None:
    return next(iter(collections.deque(of_stream(response), maxlen=1)), None)


def run(
    folder: Path, count: int, kills: int, seed: int, flags: tuple[str, ...] = (), minutes: float = math.inf
) -> dict[str, Any]:
    """Run a trace; return the report as a dict: `outcomes`, `wrong`, and `held` by each side in the end."""
    checkpoint, rng, drafts = folder / "model", random.Random(seed), "--speculative-algorithm" in flags
    write_checkpoint(checkpoint, WITH_DSPARK if "DSPARK" in flags else SHAPE)
    begin = time.monotonic()
    with server_at(free_port(), checkpoint, folder / "one", (*FLAGS, *flags, SLEEP_ON_IDLE), ENV) as one:
        singles, conversations = min(120, 10 + count // 10), min(20, 2 + count // 50)
        answers = answered_cases(one, rng, singles, conversations, drafts)
    asked_s = time.monotonic() - begin
    with ExitStack() as stack:
        sides = Sides(stack, checkpoint, folder, flags)
        trace, begin = Trace(sides, answers, seed), time.monotonic()
        wait_until(trace.serves)  # the router answers before it knows its servers
        trace.run(count, kills, 60 * minutes)
        trace_s = time.monotonic() - begin
        deadline = time.monotonic() + 90  # SGLang's deferred releases take up to 30 s
        held = sides.held()
        while holds_something(held) and time.monotonic() < deadline:
            time.sleep(2)
            held = sides.held()
        serves = trace.serves()
    return {
        "requests": trace.report.done,
        "kills": kills,
        "seed": seed,
        "cases": len(answers),
        "flags": list(flags),
        "one_server_s": round(asked_s),
        "trace_s": round(trace_s),
        "outcomes": dict(sorted(trace.report.outcomes.items())),
        "wrong": trace.report.wrong,
        "held": held,
        "serves_in_the_end": serves,
    }


def holds_something(held: dict[str, dict[str, int]]) -> bool:
    return any(amount for side in held.values() for amount in side.values())


def main() -> int:
    """Run the command line of the module's docstring; returns 1 if an answer is wrong or something is held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=math.inf, help="of the trace, after which no request is sent")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="keeps the servers' logs; an empty folder")
    arguments, flags = parser.parse_known_args()
    flags = [flag for flag in flags if flag != "--"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = run(folder, arguments.requests, arguments.kills, arguments.seed, tuple(flags), arguments.minutes)
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return int(bool(report["wrong"]) or holds_something(report["held"]))


if __name__ == "__main__":
    sys.exit(main())
