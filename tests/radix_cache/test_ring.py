"""Ring arithmetic against a ring that is written token by token, and tail placement."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dsv4_radix_cache.accounting import Stop, explain
from dsv4_radix_cache.placement import Placement
from dsv4_radix_cache.ring import chunk_rows, overlap_span, ring_row, still_intact, window_span

ROOT = Path(__file__).resolve().parents[2]


def ring_formulas(tree: ast.AST) -> list[str]:
    """Expressions `a * rows + b % rows`."""

    def is_one(node: ast.AST) -> bool:
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
            return False
        left, right = node.left, node.right
        if not (isinstance(left, ast.BinOp) and isinstance(right, ast.BinOp)):
            return False
        kinds = isinstance(left.op, ast.Mult) and isinstance(right.op, ast.Mod)
        return kinds and ast.dump(right.right) in (ast.dump(left.left), ast.dump(left.right))

    return [ast.unparse(node) for node in ast.walk(tree) if is_one(node)]


def test_the_ring_row_of_a_position_is_said_once() -> None:
    """Only ring.py has the formula; kernels and their references may not import it, and name the function instead."""
    files = [path for folder in ("radix_cache", "sglang_dsv4") for path in (ROOT / folder).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): formulas
        for path in files
        if (formulas := ring_formulas(ast.parse(path.read_text())))
    }
    assert found == {"radix_cache/ring.py": ["request_slot * rows + position % rows"]}
    assert ring_formulas(ast.parse("x[i] * g.ring_rows + (t + 1) % g.ring_rows")), "the check would not notice it"
    assert "`ring_row` of radix_cache/ring.py" in (ROOT / "kernels/step_mapping/__init__.py").read_text()


def test_ring_rows_of_a_request_slot_follow_each_other() -> None:
    assert [ring_row(3, position, 8) for position in (0, 7, 8, 20)] == [24, 31, 24, 28]


@pytest.mark.parametrize(("ring_rows", "state_rows"), [(128, 8), (256, 16)], ids=["decode", "speculation"])
@pytest.mark.parametrize("position", [256, 512, 768, 4096 + 256])
@pytest.mark.parametrize("beyond", [0, 1, 4, 12, 13, 127, 128, 129])
def test_spans_find_the_rows_and_know_when_they_are_gone(
    ring_rows: int, state_rows: int, position: int, beyond: int
) -> None:
    """The definition: write positions 0, 1, 2 ... into rings, then look for the rows that a tail needs."""
    ring, state = {}, {}
    for p in range(position + beyond):
        ring[p % ring_rows] = p
        state[p % state_rows] = p
    window, overlap = window_span(position, ring_rows), overlap_span(position, state_rows)
    found = [ring[window.begin + k] for k in range(128)] + [state[overlap.begin + k] for k in range(4)]
    wanted = [*range(position - 128, position), *range(position - 4, position)]
    assert (found == wanted) == still_intact(position, position + beyond, ring_rows, state_rows)
    assert (window.first_position, overlap.first_position) == (position - 128, position - 4)


def test_a_tail_ahead_of_what_was_written_is_not_intact() -> None:
    assert not still_intact(512, 511, 256, 16)


@pytest.mark.parametrize("position", [0, -256, 128, 255, 257])
def test_tails_stand_at_page_boundaries(position: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 256 tokens, got {position}"):
        window_span(position, 128)


@pytest.mark.parametrize("ring_rows", [64, 192, 512])
def test_rings_that_do_not_divide_the_page_are_refused(ring_rows: int) -> None:
    with pytest.raises(ValueError, match="128 or 256"):
        window_span(256, ring_rows)


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 300, range(128, 256)),
        (256, 512, range(128, 256)),
        (128, 256, range(128)),
        (129, 300, None),
        (250, 700, None),
    ],
    ids=["from-zero", "next-page", "just-enough", "one-row-short", "begins-in-the-window"],
)
def test_rows_of_a_tail_in_a_chunk(begin: int, end: int, expected: range | None) -> None:
    position = 512 if begin == 256 else 256
    assert chunk_rows(position, 128, begin, end) == expected


@pytest.mark.parametrize(
    ("begin", "end", "prompt", "branch", "expected"),
    [
        (0, 100, 100, None, []),
        (0, 256, 256, None, [256]),
        (0, 300, 300, None, [256]),
        (0, 512, 512, None, [512, 256]),
        (0, 5000, 5000, None, [4864, 2048, 4096]),
        (0, 5000, 5000, 1100, [4864, 1024, 2048, 4096]),
        (4096, 8192, 20000, None, [8192, 6144]),
        (4096, 8192, 20000, 4096, [8192, 6144]),
        (16384, 20000, 20000, None, [19968, 18432]),
    ],
    ids=[
        "less-than-a-page",
        "a-page",
        "page-and-rest",
        "same-prompt-again",
        "interval",
        "learned-branch",
        "chunk",
        "branch-at-the-start-of-the-chunk",
        "last-chunk",
    ],
)
def test_positions_in_a_chunk(begin: int, end: int, prompt: int, branch: int | None, expected: list[int]) -> None:
    assert Placement().in_chunk(begin, end, prompt, branch) == expected


@pytest.mark.parametrize("interval", [0, 100, -256])
def test_the_interval_is_a_multiple_of_the_page(interval: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 256 tokens, got {interval}"):
        Placement(interval)


@pytest.mark.parametrize(
    ("prompt", "hit", "blocks", "salted", "stop", "recomputed"),
    [
        (100, 0, 0, False, Stop.PAGE_REMAINDER, {Stop.PAGE_REMAINDER: 100}),
        (1000, 768, 768, False, Stop.PAGE_REMAINDER, {Stop.PAGE_REMAINDER: 232}),
        (1024, 768, 1024, False, Stop.PAGE_REMAINDER, {Stop.PAGE_REMAINDER: 256}),
        (1000, 0, 0, False, Stop.NO_BLOCK, {Stop.NO_BLOCK: 768, Stop.PAGE_REMAINDER: 232}),
        (1000, 0, 0, True, Stop.SALT, {Stop.SALT: 768, Stop.PAGE_REMAINDER: 232}),
        (1000, 256, 512, True, Stop.NO_TAIL, {Stop.NO_TAIL: 256, Stop.NO_BLOCK: 256, Stop.PAGE_REMAINDER: 232}),
    ],
    ids=["short", "all-hit", "same-prompt-again", "cold", "cold-salted", "no-tail"],
)
def test_every_token_is_accounted_for(
    prompt: int, hit: int, blocks: int, salted: bool, stop: Stop, recomputed: dict[Stop, int]
) -> None:
    report = explain(prompt, hit, blocks, prompt, salted, "device")
    assert report.stop is stop and report.hit_tokens + sum(report.recomputed.values()) == prompt
    assert {s: n for s, n in report.recomputed.items() if n} == recomputed
    assert report.as_meta()["tail_from"] == ("device" if hit else None)


def test_a_request_for_prompt_logprobs_is_told_so() -> None:
    report = explain(1000, 256, 256, 300, False, "host")
    assert report.stop is Stop.PROMPT_LOGPROBS
    assert report.recomputed[Stop.PROMPT_LOGPROBS] == 512 and report.tier == "host"


def test_contradicting_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt 256, hit 256"):
        explain(256, 256, 256, 256, False, None)
