"""The script of measurements on several GPUs gives commands that the benchmarks accept: a mistake would show on a host
with GPUs only, where time is short."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

import bench_disaggregation
import determinism_gpu
import pytest
import quality_table
import serve_ab
from lib.quality_configurations import ON_GPUS

SCRIPT = Path(serve_ab.__file__).with_name("several_gpus.sh")
END = "end of a command"
OF_KERNELS = [f"bench_{name}.py" for name in ("hyper_connection", "invariant_linear", "row_kernels", "handover")]
STAGES = re.findall(r"^#   (\w+)  ", SCRIPT.read_text(), re.MULTILINE)


def commands(stage: str, folder: Path, status: int = 0, failing: str = "") -> tuple[int, list[list[str]]]:
    """Run a stage with a `python3` that notes its arguments; return the script's status and the commands.

    Commands whose arguments have the text `failing` end with `status`, the others with 0.
    """
    stub, noted = folder / "bin" / "python3", folder / "noted"
    stub.parent.mkdir(parents=True, exist_ok=True)
    # One write a command, since some run side by side.
    end = f'case "$*" in *"{failing}"*) exit {status} ;; esac'
    stub.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" "{END}" >> {noted}\n{end}\n')
    stub.chmod(0o755)
    env = {**os.environ, "PATH": f"{stub.parent}:{os.environ['PATH']}"}
    ended = subprocess.run([SCRIPT, str(folder / "out"), "500", stage], env=env, capture_output=True, check=False)
    found = noted.read_text().split(f"\0{END}\0") if noted.exists() else []
    return ended.returncode, [line.split("\0") for line in found if line]


def exists(node_id: str) -> bool:
    """Whether a test of this id is written down: the file, the function, and each word of its parameters."""
    file, name, parameters = re.fullmatch(r"(.+)::(\w+)\[(.+)\]", node_id).groups()
    text = (SCRIPT.parents[1] / file).read_text()
    return f"def {name}(" in text and all(f'"{word}"' in text for word in parameters.split("-"))


@pytest.mark.parametrize("stage", [*STAGES, "stop"])
def test_every_command_is_accepted(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found = commands(stage, tmp_path)
    assert status == 0 and found
    for words in found:
        monkeypatch.setattr("sys.argv", words)
        match Path(words[0]).name:
            case "serve_ab.py":
                arguments = serve_ab.parse()
                contenders = serve_ab.comparison_of(arguments).contenders
                assert len(contenders) == 2 - (stage == "pair" and not arguments.stop)
                assert arguments.stop or 490 <= arguments.seconds <= 500
                assert serve_ab.cells(arguments.works, 4, arguments.accepted)
            case "determinism_gpu.py":
                assert determinism_gpu.parser().parse_args(words[1:]).tp == 4
            case "bench_disaggregation.py":
                assert bench_disaggregation.parser().parse_args(words[1:]).backend == "nixl"
            case name if name in OF_KERNELS:
                flags = [word for word in words if word.startswith("--")]
                assert flags and all(f'"{flag}"' in SCRIPT.with_name(name).read_text() for flag in flags)
            case "quality_table.py":
                chosen = quality_table.parser().parse_args(words[1:])
                assert chosen.merge or (chosen.gpus and quality_table.configurations(chosen.gpus, chosen.only))
            case "-m" if words[1] == "train_tiny.widen":
                assert len(words) == 4
            case "-c":
                compile(words[1], stage, "exec")
            case "-m" if words[1] == "pytest":
                tests = [word for word in words if word.startswith("tests/")]
                assert tests and all(exists(test) for test in tests)
            case _:
                assert words[:2] == ["-m", "sglang_dsv4.kernel_check"]


def test_every_configuration_is_in_the_stage_of_quality(tmp_path: Path) -> None:
    """In one of its commands, whose servers' ports are far apart."""
    tables = [words[1:] for words in commands("quality", tmp_path)[1] if words[0].endswith("quality_table.py")]
    *chosen, last = [quality_table.parser().parse_args(words) for words in tables]
    assert last.merge
    measured = [one.name for each in chosen for one in quality_table.configurations(each.gpus, each.only)]
    assert set(measured) == {one.name for one in ON_GPUS}
    assert len(measured) == len(ON_GPUS) + len(chosen) - 1  # each command begins with the first one
    ports = sorted(each.port for each in chosen)
    assert all(after - before >= 2000 for before, after in itertools.pairwise(ports))


@pytest.mark.parametrize("port", range(17700, 29700, 2000))
def test_a_table_that_fails_ends_the_stage_of_quality_with_its_status(tmp_path: Path, port: int) -> None:
    status, found = commands("quality", tmp_path, 1, f"--port {port}")
    assert status == 1 and len(found) == 8  # the other tables are made, too


def test_quality_on_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows except the rows of four ranks."""
    monkeypatch.setenv("GPUS", "2")
    tables = [words[1:] for words in commands("quality", tmp_path)[1] if words[0].endswith("quality_table.py")]
    chosen = [quality_table.parser().parse_args(words) for words in tables[:-1]]
    measured = {one.name for each in chosen for one in quality_table.configurations(each.gpus, each.only)}
    assert measured == {one.name for one in ON_GPUS if one.ranks <= 2}


def test_a_stage_that_has_not_ended_says_so(tmp_path: Path) -> None:
    """The second pair of contenders starts when the first has all figures."""
    status, found = commands("groups", tmp_path, serve_ab.NOT_FINISHED)
    assert status == serve_ab.NOT_FINISHED and len(found) == 1


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    status, found = commands("decoding", tmp_path)
    assert status == 2 and not found
