"""The comparison of two servers: the sizes it reads in their logs, and its sums. The servers need a GPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import serve_ab
from lib import serve_load, serve_profile, servers
from lib.serve_load import Reply
from serve_ab import Row

from sglang_dsv4.cache.pool_plan import PoolPlan
from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config
from sglang_dsv4.doctor import geometry_of_checkpoint

# Log lines of `DSV4PoolConfigurator` and `DeepSeekV4TokenToKVPool` of SGLang 0.5.23.
BUILTIN_LOG = """\
[2026-11-23 15:45:33] DSV4 memory calculation: unified=False, unified_fp8=False, dspark_draft_bf16=False, \
bytes_per_full_token=763.50, available_bytes=81.57 GB, c128_state_fixed=0.02 GB, c2_state_fixed=0.00 GB, \
swa_fixed=0.00 GB, swa_ring_fixed=0.00 GB, c4_state_fixed=0.00 GB, full_token=110144000
[2026-11-23 15:45:33] DSV4 pool sizes: full=65536, swa=6400, c4=16384, c128=512, c4_state=200, c128_state=0
[2026-11-23 15:45:33] Initialize DeepSeekV4TokenToKVPool with max_num_reqs=8 swa_size=6400 c4_size=16384 \
c4_logical_size=16384 c128_size=512 c4_state_pool_size=200 c128_state_pool_size=1152 unified=False unified_fp8=False
[2026-11-23 15:45:38] max_total_num_tokens=65536, chunked_prefill_size=8192, available_gpu_mem=28.82 GB
"""


def test_the_builtins_memory_is_that_of_its_own_sizing(tmp_path: Path) -> None:
    """Nine request slots of 128 state rows, and padding of two groups of 128 rows; the flash preset has two HCA layers
    of head_dim 512."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config(PRESETS["flash"])))
    size, tokens = servers.builtin_pools(BUILTIN_LOG, tmp_path)
    assert tokens == 65_536
    assert size == 65_536 * 763.5 + 2 * (1152 + 2 * 128) * 2 * 512 * 4
    with pytest.raises(ValueError, match="unified=False"):
        servers.builtin_pools(BUILTIN_LOG.replace("unified=False", "unified=True"), tmp_path)


def test_our_memory_is_that_of_the_plan_of_either_worker(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(PRESETS["flash"])))
    geometry = geometry_of_checkpoint(tmp_path, fp8=True)
    target, draft = PoolPlan.of(geometry, 65_536, 9, 12), PoolPlan.of(geometry, 65_536, 9)
    tables = [f"[2026-11-24 10:00:00] {w} worker\n{p.table()}\n" for w, p in (("Target", target), ("Draft", draft))]
    assert servers.our_pools(tables[0]) == (target.total_bytes, 65_536)
    assert servers.our_pools("".join(tables)) == (target.total_bytes + draft.total_bytes, 65_536)
    with pytest.raises(ValueError, match="no memory plan"):
        servers.our_pools(tables[1])


def test_above_one_is_better_for_ours() -> None:
    assert Row("decode", 1, "tok_s", ours=3.0, builtin=2.0).ratio == 1.5
    assert Row("decode", 1, "ttft_p50", ours=3.0, builtin=2.0).ratio == pytest.approx(2 / 3)
    assert Row("memory", 1, "kv_bytes_per_token", ours=0.0, builtin=2.0).ratio is None


def test_the_best_third_is_chosen_by_speed() -> None:
    """For each prefix the fastest two of six numbers of sessions, and the means of their metrics."""
    rows = []
    for prefix in serve_ab.CHURN:
        for i in range(6):
            rows.append(Row.of((serve_ab.SWEEP, 10 + i, "tok_s", prefix), ours=1.0 + i, builtin=1.0))
            rows.append(Row.of((serve_ab.SWEEP, 10 + i, "hit_rate", prefix), ours=0.1 * i, builtin=0.1))
    assert {(row.work, row.prefix) for row in rows} == {("churn_sweep", prefix) for prefix in serve_ab.CHURN}
    best = {row.metric: row for row in serve_ab.best_third_of(rows)}
    assert best["tok_s"].ours == 5.5 and best["hit_rate"].ours == pytest.approx(0.45)
    assert {row.work for row in best.values()} == {"churn"}


def test_ours_gets_as_many_tokens_as_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(PRESETS["flash"])))
    flags = ("--max-running-requests", "8")
    small, large = (serve_ab.tokens_that_fit(tmp_path, size, flags) for size in (2**30, 2**31))
    assert 0 < small < large and small % 256 == large % 256 == 0


def reply(sent: float, *tokens: float) -> Reply:
    return Reply(sent, tokens, 100, 0, tuple(range(len(tokens))))


@pytest.mark.parametrize(
    ("replies", "seconds"),
    [
        ([reply(0, 1, 2, 3)], 1.0),
        ([reply(0, 0.5, 4, 4.5)], 3.5),  # no request got a token
        ([reply(0, 0.5, 4, 4.5), reply(0.2, 1, 2, 3, 4)], 1.0),  # one request waits while another one is served
        ([reply(0, 1), reply(50, 51)], 1.0),  # no request was open in between
        ([reply(0, 1), reply(0.5, 6), reply(2, 3)], 3.0),  # a silence ends with a token, not with another request
    ],
    ids=["steady", "stalled", "one waits", "idle", "overlapping"],
)
def test_silence_is_time_without_a_token_for_anybody_who_waits(replies: Sequence[Reply], seconds: float) -> None:
    assert serve_load.longest_silence(replies) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("silences", "runs", "chosen"),
    [((0.1,), 1, 0), ((3.0, 0.2), 2, 1), ((3.0, 5.0, 2.5, 4.0), 4, 2)],
    ids=["steady", "one stall", "stalls for ever"],
)
def test_a_run_with_a_stall_is_made_again(
    silences: tuple[float, ...], runs: int, chosen: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = [{"tok_s": float(i), serve_load.SILENCE: seconds} for i, seconds in enumerate(silences)]
    left = iter(made)
    monkeypatch.setattr(serve_load, "run", lambda url, load: next(left))
    server = servers.Server("ours", tmp_path, "", tmp_path, 0.0)
    assert serve_ab._steady(server, lambda client: None) == made[chosen]
    assert len(list(left)) == len(silences) - runs


def test_what_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two calls start one server each; a call whose rows are all in the file starts no server."""
    started: list[str] = []

    class Running:
        def __init__(self, name: str, *arguments: object, alone: bool) -> None:
            assert alone
            started.append(name)
            self.name = name

        def __enter__(self) -> str:
            return self.name

        def __exit__(self, *error: object) -> None:
            pass

    def measured(name: str, works: Sequence[str]) -> Iterator[tuple[str, serve_ab.Figures]]:
        for work in works:
            if work == "multi_turn":
                raise RuntimeError("the time is over")
            yield work, {(work, 1, "tok_s"): 300.0 if name == "ours" else 200.0}

    monkeypatch.setattr(serve_ab, "running", Running)
    monkeypatch.setattr(serve_ab, "with_ample_memory", measured)
    flags = {"ours": [], "builtin": []}

    def compare(works: Sequence[str], *contenders: str) -> list[Row]:
        return serve_ab.compare(tmp_path, works, flags, 0.5, 1, tmp_path, contenders, tmp_path / "figures")

    assert compare(["decode"], "builtin") == [] and started == ["builtin"]
    assert [row.ratio for row in compare(["decode"], "ours")] == [1.5] and started == ["builtin", "ours"]
    both = compare(["decode", "prefill"], "builtin", "ours")
    assert {row.work for row in both} == {"decode", "prefill"} and started == ["builtin", "ours", "builtin", "ours"]
    assert compare(["decode", "prefill"], "builtin", "ours") == both and len(started) == 4
    with pytest.raises(RuntimeError, match="the time is over"):
        compare(["decode", "multi_turn", "prefill"], "ours")
    assert compare(["decode", "prefill"], "builtin", "ours") == both and len(started) == 5
    with pytest.raises(ValueError, match="run that first"):
        compare(["churn"], "ours")


def test_a_decode_profile_begins_when_all_decode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One request is prefilled long after the others; none ends before the profiler has begun."""
    began: list[int] = []
    ended: list[int] = []

    class Client:
        def __init__(self, *_: object) -> None:
            self.turn = 0

        async def generate(self, prompt: list[int], tokens: int, begun: Callable[[], object] | None = None) -> None:
            if begun is None:
                return
            self.turn += 1
            await asyncio.sleep(0.4 if self.turn == 3 else 0.0)
            begun()
            began.append(self.turn)
            await asyncio.sleep(0.4)
            ended.append(self.turn)

    async def start(*_: object) -> None:
        assert len(began) == 3 and len(ended) < 3

    monkeypatch.setattr(serve_profile, "Client", Client)
    monkeypatch.setattr(serve_profile, "_start", start)
    asyncio.run(serve_profile._decode_under_profile("", 3, 10, str(tmp_path)))
    assert len(ended) == 3


def test_a_graph_is_one_launch_of_the_host() -> None:
    """Two steps, each with a graph of three kernels, one launch and one copy."""
    events = []
    for step in range(2):
        calls = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaMemcpyAsync", "cudaEventRecord")
        events += [{"cat": "cuda_runtime", "name": name, "ts": 100 * step, "dur": 5} for name in calls]
        for i, (cat, name) in enumerate([("kernel", "attention")] * 3 + [("kernel", "argmax"), ("gpu_memcpy", "copy")]):
            events.append({"cat": cat, "name": name, "ts": 100 * step + 10 * i, "dur": 4})
    found = serve_profile._read(events, 2)
    assert (found.launches, found.host_launches, found.busy_us) == (5, 3, 20)
    assert found.kernels[0] == ("attention", 3, 12)
    assert ("cudaGraphLaunch", 1, 5) in found.host_calls and len(found.host_calls) == 4
    of_step = {"launches_per_step": 5, "busy_us_per_step": 20, "span_us_per_step": 72, "host_launches_per_step": 3}
    assert serve_ab._of_step(found) == of_step


def test_what_overlaps_is_busy_once() -> None:
    """Kernels that overlap, are nested, start together or leave a gap, in any order."""
    times = [(0, 10), (8, 4), (9, 1), (12, 3), (20, 5), (20, 2)]
    events = [{"cat": "kernel", "name": f"k{i}", "ts": ts, "dur": dur} for i, (ts, dur) in enumerate(times)]
    found = serve_profile._read(events[::-1], 2)
    assert (found.launches, found.busy_us, found.span_us) == (3, (15 + 5) / 2, 25 / 2)
    assert sum(us for _, _, us in found.kernels) == sum(dur for _, dur in times) / 2
