"""The start on a GPU host as a stranger does it (benchmarks/gpu_stack/stranger.py), without a GPU: what it judges."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_stack import stranger
from lib import sessions
from serving import stand_in

LOG = """
[2026-11-26 21:10:11] 85 kernels are compiled by 14 processes, into /home/a/.cache/sglang-dsv4/kernels
[2026-11-26 21:10:40] all 85 kernels are ready after 29.1 s, 85 of them compiled
[2026-11-26 21:11:01] sglang_dsv4 0.1.0 is live on SGLang 0.5.23: model DeepseekV4ForCausalLM, …
[2026-11-26 21:11:05] sglang_dsv4 start-up: ready after 61 s
"""


def started(log: str = LOG) -> stranger.Started:
    return stranger.Started(61.0, log, [1] * 16, "")


def test_a_log_gives_its_figures() -> None:
    facts = started().facts()
    assert (facts["kernels"], facts["compiled"], facts["workers"], facts["kernels_s"]) == (85, 85, 14, 29.1)
    assert (facts["not_kept"], facts["no_lock"], facts["compiled_again"]) == (0, 0, 0)


@pytest.mark.parametrize("line", ["is live on SGLang", "kernels are ready"])
def test_a_log_without_the_line_of_every_start_fails(line: str) -> None:
    log = "\n".join(text for text in LOG.splitlines() if line not in text)
    with pytest.raises(stranger.Failed, match="the log has no line"):
        started(log).facts()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stranger.Host:
    monkeypatch.setenv("DSV4_KERNEL_CACHE", "/elsewhere")
    monkeypatch.setenv("SGLANG_DSV4", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    seed = tmp_path / "seed"
    seed.mkdir()
    (seed / "kernel").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(seed))
    return stranger.prepared(tmp_path / "work", sys.executable, 1)


def test_a_user_has_an_empty_home_and_none_of_our_variables(host: stranger.Host) -> None:
    env = host.environment(host.users[0], FRONT="/front")
    assert not [name for name in env if name.startswith(("DSV4_", "SGLANG_DSV4", "XDG_"))]
    assert env["PYTHONPATH"].startswith(f"/front{os.pathsep}{host.site}") and not any(host.users[0].home.iterdir())
    assert (Path(env["TRITON_CACHE_DIR"]) / "kernel").exists()  # the caller's caches travel to the first user


@pytest.mark.parametrize(("program", "marks"), [("dsv4_kernels.host.compile_pool", 1), ("sglang.launch_server", 0)])
def test_only_processes_that_compile_our_kernels_lose_the_compilers(
    host: stranger.Host, program: str, marks: int
) -> None:
    folders = {"STRANGER_EMPTY": str(host.work / "empty"), "STRANGER_WORKERS": str(host.work / "workers")}
    env = host.environment(host.users[0], FRONT=str(host.work / "front"), **folders)
    code = f"import shutil; print(shutil.which('sh')); '{program}'"
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    files = list((host.work / "workers").iterdir())
    assert len(files) == marks and (said.strip() == "None") == bool(marks)
    assert not any(path.read_text() for path in files)


@pytest.mark.parametrize(
    ("log", "count", "reason"),
    [
        (LOG, 14, None),
        (LOG, 13, "expected 14 processes"),
        (LOG + "the server compiles it by itself\n", 14, "1 came from the server"),
        (LOG.replace("85 kernels are compiled by 14 processes", ""), 0, "several processes"),
    ],
)
def test_compilers_are_judged_by_the_processes_that_compiled(
    host: stranger.Host, log: str, count: int, reason: str | None
) -> None:
    run = stranger.Run(host, Path("a.whl"), 1)
    run.first = started(log)
    for number in range(count):
        (host.work / "workers" / str(number)).write_text("")
    if reason is None:
        assert run.no_compiler() == {"workers": 14}
        (host.work / "workers" / "0").write_text("nvcc")
        reason = "no compiler on PATH, got"
    with pytest.raises(stranger.Failed, match=reason):
        run.no_compiler()


SIGTERM = """
import os, time
from gpu_stack import stranger

os.getuid = lambda: 1000  # three homes of one user, who can read this test's folder

def serve(run):
    def one():
        user, log = run.host.users[0], run.host.work / "log"
        with stranger.serving(run.host, user, 31_560, log, run.host.environment(user)):
            print(*stranger.SESSIONS, flush=True)
            time.sleep(60)
    stranger.at_once(one, lambda: time.sleep(60))

stranger.Run.steps = lambda run: [("first start", lambda: serve(run))]
stranger.main()
"""


def test_servers_of_other_threads_end_at_sigterm(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    wheel.write_text("")
    path = [stand_in.install(tmp_path), str(Path(stranger.__file__).parents[1])]
    command = [sys.executable, "-c", SIGTERM, "--wheel", str(wheel), "--work", str(tmp_path / "work")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        session = int(process.stdout.readline())
        assert sessions.leader_runs(session)
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 10
    while sessions._processes_of(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sessions._processes_of(session)
