"""The command that checks all kernels on a GPU: isolation, what it writes, and that it leaves no kernel out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_dsv4.kernel_check import __main__ as command
from sglang_dsv4.kernel_check import children
from sglang_dsv4.kernel_check.catalogue import KERNELS, Kernel
from sglang_dsv4.kernel_check.children import Ended

ROOT = Path(__file__).resolve().parents[3]
GPU = {
    "name": "NVIDIA H200", "capability": [9, 0], "gpus": 1, "multiprocessors": 132, "memory_bytes": 141 << 30,
    "cuda": "13.0", "versions": {"torch": "2.14.1", "sglang": None},
}  # fmt: skip
OUTCOME = {
    "case": "", "kernel": "sm90", "distance": 0.001, "same_bits": True, "repeated": True, "microseconds": 3.5,
    "modelled": 2.81, "ok": True, "said": "",
}  # fmt: skip


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Replaces child processes: `answers(word=Ended(…))` for the first child whose arguments have the word."""

    def replace(**by_word: Ended) -> list[list[str]]:
        seen: list[list[str]] = []

        def run(arguments: list[str], checkout: Path, log: Path, limit_seconds: float) -> Ended:
            seen.append(arguments)
            for word, ended in by_word.items():
                if any(word in argument for argument in arguments):
                    return ended
            if arguments[0] == "-c":
                return Ended(0, 1.0, json.dumps(GPU))
            if "ops.emulated_results" in arguments:
                return Ended(0, 1.0, "a log line\n" + json.dumps(OUTCOME | {"case": arguments[3]}))
            report = next(argument.partition("=")[2] for argument in arguments if "junitxml" in argument)
            tests = '<testcase classname="a" name="b"/><testcase classname="a" name="c"><skipped/></testcase>'
            Path(report).parent.mkdir(parents=True, exist_ok=True)
            Path(report).write_text(f"<testsuites><testsuite>{tests}</testsuite></testsuites>")
            return Ended(0, 1.0, "")

        monkeypatch.setattr(children, "run", run)
        return seen

    return replace


def test_every_kernel_right(answers: Callable[..., list[list[str]]], tmp_path: Path) -> None:
    seen = answers()
    assert command.main(["--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "kernel_check.json").read_text())
    assert found["gpu"] == GPU and found["implementation"] == "sm90"
    by_name = {row["name"]: row for row in found["kernels"]}
    assert list(by_name) == [kernel.name for kernel in KERNELS]
    assert by_name["norm and RoPE"]["tests"] == {"passed": 1, "failed": 0, "skipped": 1}
    assert by_name["sums over ranks"]["left_out"] == "it needs 2 GPUs" and by_name["sums over ranks"]["ok"] is None
    assert not by_name["experts, NVFP4"]["cases"]  # Hopper has no such kernel
    page = (tmp_path / "kernel_check.md").read_text()
    assert "# Kernels `sm90` on NVIDIA H200" in page and f"{len(KERNELS) - 1} of {len(KERNELS)} kernels right" in page
    assert "| rms_norm | right | 0.001 | same | 3.5 | 2.8 |" in page and "step_model for an H200" in page
    assert "What was wrong" in page  # the left-out row
    assert not any("all_reduce" in argument for arguments in seen for argument in arguments)


def test_a_kernel_whose_tests_are_all_skipped_is_left_out(
    answers: Callable[..., list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFP4 experts have a kernel on Blackwell only; Hopper skips their tests."""
    answers()
    monkeypatch.setattr(children, "read_report", lambda report: ({"passed": 0, "failed": 0, "skipped": 5}, []))
    assert command.main(["--out", str(tmp_path), "--only", "experts"]) == 0
    by_name = {row["name"]: row for row in json.loads((tmp_path / "kernel_check.json").read_text())["kernels"]}
    assert by_name["experts, MXFP4"]["ok"] is True  # its case ran
    assert by_name["experts, NVFP4"]["ok"] is None
    page = (tmp_path / "kernel_check.md").read_text()
    assert "1 of 2 kernels right; left out: experts, NVFP4." in page
    assert "none of its tests and cases runs on sm90" in page and "| experts, NVFP4 | left out | 0, 0, 5 |" in page


def test_a_case_that_hangs_and_a_test_that_crashes_end_alone(
    answers: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    wrong = json.dumps(OUTCOME | {"case": "swiglu", "modelled": None, "ok": False, "said": "not the emulator's bits"})
    answers(
        rms_norm_fp8=Ended(None, 180.0, "waiting"),
        swiglu_fp8=Ended(0, 1.0, wrong),
        test_unpack=Ended(-11, 2.0, "Fatal Python error: Segmentation fault"),
    )
    assert command.main(["--out", str(tmp_path), "--only", "norm|SwiGLU|unpack"]) == 1
    page = (tmp_path / "kernel_check.md").read_text()
    assert "0 of 3 kernels right; wrong: norm and RoPE, router and SwiGLU, unpacking of pages" in page
    assert "| swiglu | **WRONG** | 0.001 | same | 3.5 |  |" in page
    for said in ("no end within 180 s: waiting", "not the emulator's bits", "ended by SIGSEGV: Fatal Python"):
        assert said in page


def test_after_a_failure_the_gpu_must_answer(
    answers: Callable[..., list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(fp8_quantise=Ended(1, 1.0, "CUDA error: an illegal memory access"))
    run, asked = children.run, []

    def once(arguments: list[str], *others: object) -> Ended:
        if arguments[0] == "-c":
            asked.append(arguments)
            if len(asked) > 1:
                return Ended(None, 90.0, "")
        return run(arguments, *others)

    monkeypatch.setattr(children, "run", once)
    assert command.main(["--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "kernel_check.json").read_text())["kernels"]
    assert found[0]["ok"] is False and len(found) == len(KERNELS) and len(asked) == 2
    assert all("did not answer" in row["left_out"] for row in found[1:])


def test_a_child_and_its_children_end_at_the_limit(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read(); input()"
    begin = time.monotonic()
    # Ten seconds, as a busy machine may take several to start an interpreter, which must tell its child's number.
    ended = children.run(["-S", "-c", f"{code}\nimport time; time.sleep(60)"], ROOT, log, 10.0)
    assert ended.status in (None, 1) and time.monotonic() - begin < 20
    sleeper = int(ended.output.split()[0])
    for _ in range(50):
        if not Path(f"/proc/{sleeper}").exists() or "Z" in Path(f"/proc/{sleeper}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        os.kill(sleeper, 9)
        raise AssertionError("a child of the child lives on")
    assert children.run(["-S", "-c", "print(1 / 0)"], ROOT, log, 20.0).how == "exit status 1"


def test_what_it_refuses(
    answers: Callable[..., list[list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit, match=r"has no tests/kernels/conftest.py.*not in the wheel: clone"):
        command.main(["--checkout", str(tmp_path)])
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="no kernel matches 'nothing'; the kernels: quantiser"):
        command.main(["--only", "nothing"])
    answers(DESCRIBE=Ended(0, 1.0, ""), json=Ended(1, 1.0, "AssertionError: no CUDA"))
    assert command.main(["--out", str(tmp_path)]) == 2
    assert "no NVIDIA GPU answers (exit status 1):\nAssertionError: no CUDA" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--only", "("])
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path / "file" / "folder")])
    said = capsys.readouterr().err
    assert "--only '(' is no regular expression" in said and "can't be written (Not a directory)" in said
    with pytest.raises(SystemExit, match=r"capability 12\.0; there are kernels for 9\.0 .* and 10\.x"):
        command.implementation_for(GPU | {"capability": [12, 0]})


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA here")
def test_without_a_gpu_the_reason_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The output was PyTorch's traceback."""
    assert command.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("no NVIDIA GPU answers (exit status 1):\ntorch ") and said.count("\n") == 2
    assert "is a CPU build; install this package with [gpu]" in said


def test_the_model_has_times_of_calls_that_are_timed() -> None:
    from ops import emulated_results
    from step_model import small_calls

    for capability in ((9, 0), (10, 0), (10, 3)):
        times = {case: small_calls.modelled_us(case, capability) for case in emulated_results.CASES}
        counted = {case: us for case, us in times.items() if us is not None}
        assert set(counted) == set(small_calls.CALLS) and all(1.3 < us < 10 for us in counted.values()), counted
    assert small_calls.modelled_us("swiglu", (12, 0)) is None


def test_calls_that_are_modelled_have_the_sizes_of_calls_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ops import emulated_results
    from step_model import small_calls

    def arguments_of(case: str) -> tuple:
        """The arguments with which the case calls its op."""
        given: list[tuple] = []
        call = emulated_results.made(case, torch.device("cpu"))
        with monkeypatch.context() as patch:
            op = emulated_results.CASES[case].op
            patch.setattr(emulated_results, op, lambda *arguments, **_: given.append(arguments))
            call("ref")
        return given[0]

    for case, (groups, rows) in small_calls.PRODUCTS.items():
        arguments = arguments_of(case)
        weight = next(x for x in arguments[1:] if isinstance(x, torch.Tensor) and x.shape[-1] == small_calls.DIM)
        assert arguments[0].shape[0] == small_calls.TOKENS, case
        assert weight.numel() == groups * rows * small_calls.DIM and weight.shape[-2] == rows, case
    q, _, _, page_table, page_rows, _, visible, *_ = arguments_of("index_topk")
    assert (len(q), int(visible.max())) == (small_calls.TOKENS_OF_CHOICE, small_calls.ENTRIES)
    assert page_table.shape[1] * page_rows == small_calls.ROOM


def test_a_time_is_that_of_one_of_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's graphs and events, replaced by counts: a replay takes 10 us for each call that was captured."""
    from ops import emulated_results

    calls, replays = [], []

    class Graph:
        def replay(self) -> None:
            replays.append(len(calls))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = sum(replays)

        def elapsed_time(self, end: Event) -> float:
            return 0.01 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert emulated_results.measured_us(lambda: calls.append(1)) == pytest.approx(10.0)
    assert len(calls) == emulated_results.CALLS > 10 and len(replays) == emulated_results.REPLAYS + 1


def test_no_gpu_test_and_no_case_is_left_out() -> None:
    from ops.emulated_results import CASES

    listed = {path for kernel in KERNELS for path in kernel.tests}
    folder = ROOT / "tests" / "kernels"
    with_gpu_tests = {
        str(path.relative_to(folder))
        for path in folder.rglob("test_*.py")
        if re.search(r"^(@pytest\.mark\.gpu|pytestmark = .*mark\.gpu)", path.read_text(), re.MULTILINE)
    }
    assert listed == with_gpu_tests
    assert sorted(case for kernel in KERNELS for case in kernel.cases) == sorted(CASES)
    assert Kernel("a").minutes > 0


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("fp8_quantise", "sm_90a"),
        ("fp8_quantise", "sm_103a"),
        *(pytest.param("", arch, marks=pytest.mark.slow) for arch in ("sm_90a", "sm_100a", "sm_103a")),
    ],
)
def test_digests_are_the_emulator_s(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B300's kernels (sm_103a) have the bits of B200's. After a change of bits: `python -m ops.emulated_results
    --write`."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from ops.emulated_results import CASES, RESULTS, emulated_digest, has_kernel

    from dsv4_kernels.host import compile_cache

    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    monkeypatch.setattr(compile_cache, "_in_memory", {})
    kernel = "sm90" if arch == "sm_90a" else "sm100"
    known = json.loads(RESULTS.read_text())[kernel]
    assert set(known) == {case for case in CASES if has_kernel(case, kernel)}
    for case in [name] if name else known:
        assert emulated_digest(case, kernel, arch) == known[case], case
    assert {made_for for *_, made_for in compile_cache._in_memory} == {arch}
