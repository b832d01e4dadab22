"""The comparison of two servers: the sizes it reads in their logs, and its sums. The servers need a GPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import serve_ab
from lib import serve_load, serve_profile, serve_rows, serve_works, servers
from lib.contenders import contender
from lib.serve_load import Reply
from lib.serve_rows import Row
from lib.serve_works import Cell

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
            rows.append(Row.of((serve_rows.SWEEP, 10 + i, "tok_s", prefix), ours=1.0 + i, builtin=1.0))
            rows.append(Row.of((serve_rows.SWEEP, 10 + i, "hit_rate", prefix), ours=0.1 * i, builtin=0.1))
            rows.append(Row.of((serve_rows.SWEEP, 10 + i, "tok_s", prefix), 1.0 + i, 7.0, contender="builtin+windows"))
    assert {(row.work, row.prefix) for row in rows} == {("churn_sweep", prefix) for prefix in serve_ab.CHURN}
    best = {(row.contender, row.metric): row for row in serve_rows.best_third_of(rows)}
    assert best["builtin", "tok_s"].ours == 5.5 and best["builtin", "hit_rate"].ours == pytest.approx(0.45)
    assert best["builtin+windows", "tok_s"].builtin == 7.0
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
    assert serve_works.steady(server, lambda client: None) == made[chosen]
    assert len(list(left)) == len(silences) - runs


class Running:
    """Stands in for `running`: notes the servers that are started; Humming's does not come up."""

    def __init__(self, started: list[str]) -> None:
        self.started = started

    def __call__(self, server: str, model: Path, flags: Sequence[str], *place: object, **how: object) -> Running:
        assert how["alone"]
        self.started.append(server)
        self.server, self.flags = server, flags
        return self

    def __enter__(self) -> servers.Server:
        if "humming" in self.flags:
            raise servers.DidNotComeUpError("No module named 'humming'")
        return servers.Server(self.server, Path(), "", Path(), 4.0)

    def __exit__(self, *error: object) -> None:
        pass


def one_cell(work: str, requests: int = 1, seconds: float = 1.0) -> Cell:
    def measure(server: servers.Server, repeat: int) -> dict[str, float]:
        if work == "multi_turn":
            raise RuntimeError("the time is over")
        return {"tok_s": (300.0 if server.contender == "ours" else 200.0) + repeat}

    return Cell(f"{work}_{requests}", work, requests, measure, 3, seconds)


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., serve_ab.Comparison]:
    """Makes comparisons of stand-in loads, whose figures are kept in one folder."""
    monkeypatch.setattr(serve_ab, "cells", lambda works, *about: [one_cell(work) for work in works])
    monkeypatch.setattr(serve_ab, "warm_up", lambda *about: None)

    def make(works: Sequence[str], *names: str) -> serve_ab.Comparison:
        asked = [contender(name, ()) for name in names]
        return serve_ab.Comparison(tmp_path, asked, works, tmp_path, tmp_path / "figures")

    return make


def test_what_was_measured_is_not_measured_again(
    comparison: Callable[..., serve_ab.Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two calls start one server each; a call whose rows are all in the folder starts no server."""
    monkeypatch.setattr(serve_ab, "running", Running(started := []))

    def compare(works: Sequence[str], *names: str) -> list[Row]:
        made = comparison(works, *names)
        serve_ab.compare(made)
        return [row for row in made.rows() if row.work != "start"]

    assert compare(["decode"], "builtin") == [] and started == ["builtin"]
    assert [row.ratio for row in compare(["decode"], "ours")] == [301 / 201] and started == ["builtin", "ours"]
    both = compare(["decode", "prefill"], "builtin", "ours")
    assert {row.work for row in both} == {"decode", "prefill"} and started == ["builtin", "ours", "builtin", "ours"]
    assert compare(["decode", "prefill"], "builtin", "ours") == both and len(started) == 4
    with pytest.raises(RuntimeError, match="the time is over"):
        compare(["decode", "multi_turn", "prefill"], "ours")
    assert compare(["decode", "prefill"], "builtin", "ours") == both and len(started) == 5
    with pytest.raises(ValueError, match="run that first"):
        serve_ab.compare_churn(comparison(["churn"], "ours"))


def test_rows_name_their_contenders_and_one_that_fails_is_left_out(
    comparison: Callable[..., serve_ab.Comparison], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(serve_ab, "running", Running(started := []))
    names = ("builtin+marlin", "builtin+humming", "builtin+flashinfer", "ours", "ours+our_all_reduce")
    made = comparison(["decode"], *names)
    serve_ab.compare(made)
    assert made.not_up == {"builtin+humming": "No module named 'humming'"} and len(started) == 5
    pairs = [(row.of_ours, row.contender) for row in made.rows() if row.work == "decode"]
    assert pairs == [(mine, other) for mine in names[3:] for other in (names[0], names[2])]
    assert "ours+our_all_reduce, builtin+flashinfer" in serve_rows.table(made.rows())
    again = comparison(["decode", "prefill"], *names)  # another call does not try it again, and says so
    serve_ab.compare(again)
    assert len(started) == 9 and again.not_up == made.not_up
    assert "delete" in capsys.readouterr().out


def test_contenders_of_the_builtin_get_equal_bytes_under_churn(
    comparison: Callable[..., serve_ab.Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first one, whatever order the command names them in."""
    monkeypatch.setattr(serve_ab, "running", Running([]))
    monkeypatch.setattr(servers.Server, "kv_memory", lambda server: (990.0, 8192))
    asked = []
    monkeypatch.setattr(serve_ab, "builtin_tokens", lambda model, flags, size, *about: asked.append(size) or 8192)
    monkeypatch.setattr(serve_ab, "tokens_that_fit", lambda model, size, flags: asked.append(size) or 16_384)
    monkeypatch.setattr(serve_ab, "under_churn", lambda *about: {(serve_rows.SWEEP, 2, "tok_s", 1536): 5.0})
    made = comparison(["churn"], "ours", "builtin+marlin", "builtin+marlin+windows")
    made.kv_gib = 1000 / 2**30
    serve_ab.compare_churn(made)
    assert asked[0] == 1000.0 and set(asked[1:]) == {990.0}
    assert {row.contender for row in made.rows() if row.work == "churn"} == {"builtin+marlin", "builtin+marlin+windows"}


# ------------------------------------------------------------------------------------------------ cells and loads


def test_cells_have_names_of_their_own_and_seconds_for_full_size() -> None:
    """Two contenders' decode, prefill and conversations took 280 s on four H200s, and are expected to take no less."""
    found = serve_works.cells(serve_works.AMPLE, gpus=4)
    assert len({cell.stage for cell in found}) == len(found)
    seconds = {work: sum(c.seconds for c in serve_works.cells([work])) for work in serve_works.AMPLE}
    short = sum(c.seconds for c in serve_works.cells(["decode", "prefill", "multi_turn"], repeats=2))
    assert 100 < short < 180 and 150 < seconds["8k_1k"] < 260
    few = serve_works.cells(["decode", "prefill", "8k_1k"], requests=[64, 256])
    assert [cell.stage for cell in few] == [
        "decode_64",
        "decode_256",
        "prefill_8",
        "prefill_64k_1",
        "8k_1k_64",
        "8k_1k_256",
    ]
    drafted = serve_works.cells(["8k_1k"], accepted=5.45)
    assert {cell.work for cell in drafted} == {"8k_1k_dspark_5.45"}
    assert sum(cell.seconds for cell in drafted) < seconds["8k_1k"]


def test_a_cell_has_medians_and_memory_a_row_of_its_own() -> None:
    cell = one_cell("decode", 16)
    runs = [{"tok_s": 3.0, serve_works.KV_BYTES: 7.0}, {"tok_s": 9.0, serve_works.KV_BYTES: 7.0}]
    runs.append({"tok_s": 4.0, serve_works.KV_BYTES: 7.0})
    assert cell.figures(runs) == {("decode", 16, "tok_s"): 4.0, ("memory", 1, serve_works.KV_BYTES): 7.0}


@pytest.mark.parametrize("accepted", [None, 3.5])
def test_figures_of_answers_count_prompts_and_tokens(accepted: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of 8,192 tokens: 1,024 tokens each in 4 s, the first one after 1 s; over two GPUs."""

    class Client:
        async def generate(self, prompt: list[int], new_tokens: int) -> Reply:
            times = [clock[0] + 1.0 + 3.0 * i / (new_tokens - 1) for i in range(new_tokens)]
            steps = 0 if accepted is None else round((new_tokens - 1) / accepted)
            return Reply(clock[0], tuple(times), len(prompt), 0, tuple(range(new_tokens)), steps)

    clock = [100.0]
    monkeypatch.setattr(serve_load.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(serve_load, "run", lambda url, load: asyncio.run(load(Client())))
    server = servers.Server("ours", Path(), "", Path(), 0.0)
    cell = serve_works.cells(["8k_1k"], gpus=2, accepted=accepted)[1]
    monkeypatch.setattr(serve_works, "steady", lambda server, load, decoding: serve_load.run(server.url, load))
    found = cell.measure(server, 0)
    requests = cell.requests
    assert found["tok_s"] == pytest.approx(requests * 9216 / 4) and found["tok_s_a_gpu"] == found["tok_s"] / 2
    assert found["output_tok_s"] == pytest.approx(requests * 1024 / 4)
    assert found["ttft_p50"] == pytest.approx(1000) and found["tpot_p50"] == pytest.approx(3000 / 1023)
    assert found.get("tokens_a_step") == (None if accepted is None else pytest.approx(accepted, rel=0.01))


DECODING = "Decode batch, #running-req: {}, #token: 9, cuda graph: True{}"
TIMED = ", fwd occupancy: {}%, fwd+idle occupancy: 100.00%"


@pytest.mark.parametrize("timed", [True, False])
def test_a_decode_cell_has_the_time_of_a_step(timed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With drafts a step makes several tokens of each request. The GPU's part of it is of SGLang's log lines with all
    requests, after the load has begun."""
    server = servers.Server("ours", Path(), "", tmp_path / "log", 0.0)
    server.log.write_text(DECODING.format(16, TIMED.format("10.00")) + "\n")
    after = [(15, "20.00"), (16, "60.00"), (160, "30.00"), (16, "90.00"), (16, "80.00")]

    silences = iter([9.0, 0.0])  # the first run stalls, and its lines do not count

    def run(url: str, load: object) -> dict[str, float]:
        silence = next(silences)
        with server.log.open("a") as log:
            for requests, share in [(16, "5.00")] * 9 if silence else after:
                log.write(DECODING.format(requests, TIMED.format(share) if timed else "") + "\n")
        return {"tok_s": 4000.0, "tokens_a_step": 2.5, serve_load.SILENCE: silence}

    monkeypatch.setattr(serve_load, "run", run)
    cell = serve_works.cells(["decode"])[2]
    found = cell.measure(server, 0)
    assert cell.requests == 16 and found["step_ms"] == 10.0
    assert found.get("gpu_step_ms") == (pytest.approx(8.0) if timed else None)


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
    assert serve_works._of_step(found) == of_step


def test_what_overlaps_is_busy_once() -> None:
    """Kernels that overlap, are nested, start together or leave a gap, in any order."""
    times = [(0, 10), (8, 4), (9, 1), (12, 3), (20, 5), (20, 2)]
    events = [{"cat": "kernel", "name": f"k{i}", "ts": ts, "dur": dur} for i, (ts, dur) in enumerate(times)]
    found = serve_profile._read(events[::-1], 2)
    assert (found.launches, found.busy_us, found.span_us) == (3, (15 + 5) / 2, 25 / 2)
    assert sum(us for _, _, us in found.kernels) == sum(dur for _, dur in times) / 2
