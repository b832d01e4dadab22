"""Several contenders at once, loaded in turns over several calls; stand-in servers, whose figures are made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import serve_ab
from lib import model_shapes, servers, sessions
from lib.serve_turns import Turns
from lib.serve_works import Cell
from serving import stand_in

Main = Callable[..., int]


@pytest.fixture
def order() -> list[str]:
    """The loads that ran: contender and requests."""
    return []


@pytest.fixture
def main(tmp_path: Path, order: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Main]:
    """Runs the command with stand-in servers; cells of 4 and 16 requests take 5 s and 50 s, by their own account."""

    def cells(works: list[str], gpus: int, accepted: float | None, repeats: int, requests: object) -> list[Cell]:
        def cell(requests: int, seconds: float) -> Cell:
            def measure(server: servers.Server, repeat: int) -> dict[str, float]:
                order.append(f"{server.contender} {requests}")
                if server.contender == "builtin" and requests == 2:
                    raise RuntimeError("/generate answered 500")
                return {"tok_s": 300.0 if server.contender == "ours" else 200.0}

            return Cell(f"decode_{requests}", "decode", requests, measure, repeats, seconds)

        return [cell(4, 5.0), cell(16, 50.0), cell(2, 1.0)]

    warmed = []

    def warm_up(server: servers.Server, works: list[str]) -> None:
        warmed.append((server.contender, works))
        if len(warmed) == 3:  # of the test in which a server ends
            raise OSError("connection refused")

    monkeypatch.setattr(serve_ab, "cells", cells)
    monkeypatch.setattr(serve_ab, "warm_up", warm_up)
    monkeypatch.setattr(sessions, "SECONDS_TO_END", 0.3)
    monkeypatch.setattr("lib.serve_turns.PORT", 31_520)
    monkeypatch.setattr("lib.serve_turns.WARM_UP_S", 10.0)
    monkeypatch.setenv("PYTHONPATH", stand_in.install(tmp_path))
    (tmp_path / "config.json").write_text("{}")

    def run(*more: str) -> int:
        place = ["--in-turns", str(tmp_path / "servers"), "--figures", str(tmp_path / "figures")]
        out = ["--model", str(tmp_path), "--out", str(tmp_path / "out.json"), "--logs", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["serve_ab.py", *place, *out, "--works", "decode", *more])
        return serve_ab.main()

    run.warmed = warmed
    yield run
    run("--stop")


def pids_in(folder: Path) -> dict[str, int]:
    return {name: found["pid"] for name, found in servers.listed_servers(folder).items()}


def test_calls_go_on_where_the_one_before_stopped(
    main: Main, order: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The first call has no time for the cell of 50 s a contender; the second one uses the same servers, measures that
    cell only, and ends with status 0. A contender that does not come up has its reason in the result; a load that fails
    is named, and leaves no row."""
    asked = ["--contenders", "ours", "builtin+marlin", "builtin+humming", "--tp", "2", "--repeats", "2"]
    assert main(*asked, "--seconds", "40") == serve_ab.NOT_FINISHED
    assert order[:4] == ["ours 4", "builtin 4", "builtin 4", "ours 4"]  # every repetition reverses the order
    first, pids = json.loads((tmp_path / "out.json").read_text()), pids_in(tmp_path / "servers")
    assert first["left"] == ["decode_16"] and pids.keys() == {"ours", "builtin+marlin"}
    assert stand_in.REASON in first["not_up"]["builtin+humming"]
    assert first["not_up"]["builtin+marlin, decode_2"] == "RuntimeError: /generate answered 500"
    rows = {(row["requests"], row["metric"]): row for row in first["rows"]}
    assert rows.keys() == {(1, "ready_s"), (4, "tok_s")}
    assert rows[4, "tok_s"]["ratio"] == 1.5 and rows[4, "tok_s"]["contender"] == "builtin+marlin"
    assert "--disable-custom-all-reduce" in first["contenders"]["ours"]["flags"]
    assert "decode_16: 100 s expected" in capsys.readouterr().out

    order.clear()
    assert main(*asked, "--seconds", "400") == 0
    assert pids_in(tmp_path / "servers") == pids
    assert [load for load in order if load.endswith(" 16")] == ["ours 16", "builtin 16", "builtin 16", "ours 16"]
    assert not any(load.endswith(" 4") for load in order)
    assert main.warmed == [("ours", ["decode"]), ("builtin", ["decode"])]  # once, in the first call
    assert {row["requests"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]} == {1, 4, 16}


def test_a_contender_that_ends_leaves_the_others(main: Main, order: list[str], tmp_path: Path) -> None:
    """A server crashes while a cell is measured: it gets no row, the others do."""
    asked = ["--contenders", "ours", "builtin+marlin", "--repeats", "1"]
    assert main(*asked, "--seconds", "40") == serve_ab.NOT_FINISHED  # 16 requests are left
    sessions.end(pids_in(tmp_path / "servers")["builtin+marlin"])
    with servers.others_suspended(tmp_path / "servers", "of ours"):
        pass
    assert sessions.leader_runs(pids_in(tmp_path / "servers")["ours"])
    assert main(*asked, "--seconds", "400") == 0  # it is started again, and its unmeasured loads fail
    failed = json.loads((tmp_path / "out.json").read_text())["not_up"]
    assert failed["builtin+marlin, unmeasured loads"] == "OSError: connection refused"
    assert order[-3:] == ["ours 16", "builtin 16", "builtin 2"]


def test_another_contender_takes_the_place_of_one(main: Main, order: list[str], tmp_path: Path) -> None:
    """Servers that are no contenders of a call would keep their GPU memory, so they end; ours stays."""
    assert main("--contenders", "ours", "builtin+marlin", "--seconds", "400") == 0
    ours, marlin = (pids_in(tmp_path / "servers")[name] for name in ("ours", "builtin+marlin"))
    order.clear()
    assert main("--contenders", "ours", "builtin+flashinfer", "--seconds", "400") == 0
    assert sessions.leader_runs(ours) and not sessions.leader_runs(marlin)
    assert set(order) == {"builtin 4", "builtin 16", "builtin 2"}  # ours has its figures
    result = json.loads((tmp_path / "out.json").read_text())
    assert {row["contender"] for row in result["rows"]} == {"builtin+marlin", "builtin+flashinfer"}
    assert "marlin" in result["contenders"]["builtin+marlin"]["flags"]  # of the first call


def test_a_call_may_end_while_servers_start(main: Main, order: list[str], tmp_path: Path) -> None:
    assert main("--contenders", "ours", "builtin+marlin", "--seconds", "0") == serve_ab.NOT_FINISHED
    left = json.loads((tmp_path / "out.json").read_text())["left"]
    assert all(name.startswith(("start of", "unmeasured loads of")) for name in left) and not order
    pids = pids_in(tmp_path / "servers")
    assert main("--contenders", "ours", "builtin+marlin", "--seconds", "400") == 0
    assert pids_in(tmp_path / "servers") == pids


@pytest.mark.parametrize(
    ("gpus", "ranks", "devices"),
    [(4, 4, [None, None, None]), (4, 2, ["0,1", "2,3", "0,1"]), (1, 1, [None, None, None])],
    ids=["all for each", "pairs", "one"],
)
def test_contenders_get_gpus_of_their_own_as_far_as_they_go(
    gpus: int, ranks: int, devices: list[str | None], tmp_path: Path
) -> None:
    turns = Turns(tmp_path, tmp_path, gpus, ranks, 100.0)
    assert [turns._devices(i).get("CUDA_VISIBLE_DEVICES") for i in range(3)] == devices


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--full-size"], "--stop and --full-size want --in-turns"),
        (["--model", "m", "--in-turns", "f", "--works", "churn"], "need servers of their own"),
    ],
)
def test_options_that_do_not_go_together(
    more: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve_ab.py", *more])
    with pytest.raises(SystemExit):
        serve_ab.parse()
    assert message in capsys.readouterr().err


def test_full_size_has_all_layers_and_drafts_accept_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ["--full-size", "--models", str(tmp_path), "--in-turns", "f", "--tp", "4", "--accepted", "5.45"]
    monkeypatch.setattr(sys, "argv", ["serve_ab.py", *place, "--contenders", "ours", "builtin+marlin"])
    monkeypatch.setattr(model_shapes, "write_tokenizer", lambda *about: None)  # takes seconds
    made = serve_ab.comparison_of(serve_ab.parse())
    config = json.loads((made.model / "config.json").read_text())
    assert config["num_hidden_layers"] == 43 and config["n_routed_experts"] == 256 and config["dspark_markov_rank"]
    for contender in made.contenders:
        assert contender.env["SGLANG_SIMULATE_ACC_LEN"] == "5.45"
        assert {"--speculative-algorithm", "DSPARK", "--tp", "4", "--sleep-on-idle"} <= set(contender.flags)
    assert all(cell.work.endswith("dspark_5.45") for cell in made.cells())
