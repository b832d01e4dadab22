"""How stages share layers and tensors, and what their plans and votes say; no servers."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from model.released_configs import FLASH, PRO, as_sglang_parses
from sglang.srt.distributed.utils import get_pp_indices

from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.stages import SIZES_VARIABLE, Stage, StagesDifferError, stages
from sglang_dsv4.pipeline import plans
from sglang_dsv4.pipeline.plans import FIELDS, Comparison
from sglang_dsv4.pipeline.votes import STATES, Votes
from sglang_dsv4.prefix.tier_setup import weights_before
from sglang_dsv4.weights.tensor_table import main_model_tensors


@pytest.fixture(scope="module", params=["flash", "pro", "nvfp4"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    released = Config.from_hf(as_sglang_parses(PRO if request.param == "pro" else FLASH, tmp_path_factory.mktemp("m")))
    return replace(released, nvfp4_experts=request.param == "nvfp4", n_routed_experts=3)


@pytest.mark.parametrize(
    ("layers", "count", "sizes"), [(43, 1, "9"), (43, 2, None), (61, 4, ""), (5, 5, None), (43, 2, "21,22")]
)
def test_layers_are_divided_as_sglang_divides_them(
    layers: int, count: int, sizes: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's index of a stage's layers, which its own parts use, must be ours."""
    monkeypatch.delenv(SIZES_VARIABLE, raising=False)
    if sizes:
        monkeypatch.setenv(SIZES_VARIABLE, sizes)
    found = stages(layers, count, sizes)
    assert [(one.layers.start, one.layers.stop) for one in found] == [
        get_pp_indices(layers, index, count) for index in range(count)
    ]
    assert [one.is_first for one in found] == [True] + [False] * (count - 1)
    assert [one.is_last for one in found] == [False] * (count - 1) + [True]


@pytest.mark.parametrize(
    ("layers", "count", "sizes", "named"),
    [
        (4, 5, None, "--pp-size 5: expected 1 to 4 stages"),
        (4, 0, None, "--pp-size 0: expected"),
        (4, 2, "4", "expected 2 numbers of layers"),
        (4, 2, "2,3", "4 together"),
        (4, 2, "4,0", "each at least 1"),
        (4, 2, "two,2", "expected 2 numbers"),
        (4, 2, "-2,6", "expected 2 numbers"),
    ],
)
def test_layers_that_cannot_be_divided_so(layers: int, count: int, sizes: str | None, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        stages(layers, count, sizes)


def test_a_stage_needs_a_layer_with_entries() -> None:
    first, second = stages(4, 2)
    second.require_entries((0, 0, 4, 128))
    with pytest.raises(
        ValueError, match="stage 0 of 2, layers 0 to 1, has no layer with compressed entries: use fewer"
    ):
        first.require_entries((0, 0, 4, 128))
    Stage.whole(2).require_entries((0, 0))


def test_every_tensor_is_one_stages(config: Config) -> None:
    """The other stages skip it by name, with its scales; a name of no stage stays unknown to all."""
    whole = main_model_tensors(config)
    tables = [main_model_tensors(config, stage) for stage in stages(config.num_hidden_layers, 3)]
    assert Counter(name for table in tables for name in table.specs) == dict.fromkeys(whole.specs, 1)
    names = [*whole.specs, *(spec.scale_name for spec in whole.specs.values() if spec.may_have_scale)]
    for name in names:
        owner = name.removesuffix("scale") + "weight" if name not in whole.specs else name
        assert [table.is_ours(name) for table in tables] == [owner in table.specs for table in tables], name
    if config.nvfp4_experts:
        assert [table.is_ours("layers.0.ffn.experts.0.w1.weight_scale_2") for table in tables] == [True, False, False]
    assert all(table.is_ours("layers.0.attn.unknown") for table in tables)
    assert all(table.is_ours("layers.99.attn_norm.weight") for table in tables)
    assert not any(table.is_ours("mtp.0.enorm.weight") for table in tables)


def test_embedding_and_head_are_on_the_first_and_the_last_stage(config: Config) -> None:
    first, middle, last = (main_model_tensors(config, stage).specs for stage in stages(config.num_hidden_layers, 3))
    assert "embed.weight" in first and "head.weight" in last and "norm.weight" in last and "hc_head_fn" in last
    assert all(name.startswith("layers.") for name in middle)


class Line:
    """Messages between threads that play the stages; a receiver waits at most ten seconds."""

    def __init__(self, index: int, count: int, queues: dict[tuple[int, int], Queue]) -> None:
        self.index, self.count, self._queues = index, count, queues

    def send(self, numbers: list[int], to: int) -> None:
        self._queues[self.index, to].put(list(numbers))

    def receive(self, count: int, of: int) -> list[int]:
        numbers = self._queues[of, self.index].get(timeout=10)
        assert len(numbers) == count
        return numbers


def on_stages(count: int, run: Callable[[Line], Any]) -> list[Any]:
    """Return the results of `run` on every stage, or raise the first stage's error."""
    queues = {(a, b): Queue() for a in range(count) for b in range(count)}
    results: list[Any] = [None] * count

    def one(index: int) -> None:
        try:
            results[index] = run(Line(index, count, queues))
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert all(queue.empty() for queue in queues.values()) or count == 1, "a message was never received"
    return results


def read_files(line: Line, ready: dict[tuple[int, int], tuple[int, int]], lifetimes: list[int], rounds: int) -> list:
    """Play a stage's rounds: fetch f begins in round lifetimes[f], and is over on stage s from round ready[s, f][0] on,
    with ready[s, f][1] pages. Returns (fetch, round, decision) of each fetch."""
    votes, live, ended = Votes(list, line), [], []
    for round_number in range(rounds):
        live += [fetch for fetch, begin in enumerate(lifetimes) if begin == round_number]
        states = []
        for fetch in live:
            at, pages = ready[line.index, fetch]
            done = round_number >= at
            states += [int(done), pages * done, -pages * done, int(line.index > 0 or round_number < 20)]
        decided = votes.agree(live, states)
        assert len(decided) == STATES * len(live)
        for i, fetch in enumerate(list(live)):
            done, least, most, in_time = decided[STATES * i : STATES * (i + 1)]
            if done:
                assert round_number >= ready[line.index, fetch][0], "a stage's own reader is still reading"
                live.remove(fetch)
                ended.append((fetch, round_number, least, -most))
            else:
                assert in_time == (round_number < 20), "stage 0's clock"
    assert not live
    return ended


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_stage_takes_the_least_of_all_in_the_same_round(count: int) -> None:
    rng = random.Random(count)
    lifetimes = sorted(rng.randrange(30) for _ in range(25))
    ready = {
        (stage, fetch): (rng.randrange(begin, 40), rng.randrange(5))
        for fetch, begin in enumerate(lifetimes)
        for stage in range(count)
    }
    ended = on_stages(
        count, lambda line: read_files(line if count > 1 else line_of_one(), ready, lifetimes, rounds=40 + 2 * count)
    )
    assert ended == [ended[0]] * count
    for fetch, at, least, most in ended[0]:
        pages = [ready[stage, fetch][1] for stage in range(count)]
        assert (least, most) == (min(pages), max(pages))
        last = max(ready[stage, fetch][0] + (stage if count > 1 else 0) for stage in range(count))
        assert at == last, "as soon as the last report has arrived"


def line_of_one() -> Any:
    """Return what `Votes` gets where the model is not divided, with an index for `read_files`."""
    return SimpleNamespace(index=0, count=1, send=None, receive=None)


def test_a_stage_with_other_fetches_is_named() -> None:
    def run(line: Line) -> None:
        Votes(list, line).agree([4, 6] if line.index else [4, 8], [0] * 2 * STATES)

    with pytest.raises(StagesDifferError, match="stage 1 of the pipeline reads 2 prefixes from files, stage 0 2, or"):
        on_stages(2, run)


PLAN = list(range(10, 10 + len(FIELDS) - 1))


def test_equal_plans_pass() -> None:
    def run(line: Line) -> int:
        comparison = Comparison(line)
        for round_number in range(5):
            comparison.check([number + round_number for number in PLAN])
        return line.index

    assert on_stages(3, run) == [0, 1, 2]


@pytest.mark.parametrize("field", range(len(PLAN)))
def test_a_stage_that_decides_otherwise_is_named(field: int) -> None:
    """Every field, in the second round, on the second of three stages."""

    def run(line: Line) -> None:
        comparison = Comparison(line)
        comparison.check(PLAN)
        comparison.check([number + 7 * (i == field and line.index == 1) for i, number in enumerate(PLAN)])

    name = FIELDS[field + 1]
    what = f"{name}: " + ("other ones" if name in plans.BY_DIGEST else f"{PLAN[field] + 7} here, {PLAN[field]} there")
    with pytest.raises(StagesDifferError, match=rf"stage 1 .* than stage 0 in round 1: {what}\. All stages must"):
        on_stages(3, run)


def test_the_names_of_requests_count() -> None:
    assert plans.digest(["a", "bc"]) != plans.digest(["ab", "c"]) != plans.digest(["c", "ab"])
    assert 0 <= plans.digest(str(i) for i in range(100)) < 2**63


def test_rows_depend_on_the_weights_of_the_stages_before() -> None:
    """Later stages do not matter; each stage has another identity."""

    def of(weights: list[str]) -> list[tuple[str, ...]]:
        return on_stages(3, lambda line: (*weights_before(line, [weights[line.index]]), weights[line.index]))

    plain, changed = of(["a", "b", "c"]), of(["a", "x", "c"])
    assert plain[0] == ("a",) and len(set(plain)) == 3
    assert [one == other for one, other in zip(plain, changed, strict=True)] == [True, False, False]
