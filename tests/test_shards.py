"""Parts of the suite: every test is in one shard, and what a shard leaves out is named."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from selection.shards import BLOCK, Shard, blocks, chosen

ROOT = Path(__file__).resolve().parents[1]
NODEIDS = [
    f"tests/test_{file}.py::test_it[{i}]" for file, count in enumerate((1, 200, 30, 7, 31)) for i in range(count)
]


@pytest.mark.parametrize("count", [1, 2, 8, 50])
def test_every_test_is_in_one_shard(count: int) -> None:
    parts = [chosen(NODEIDS, Shard(index, count, begin=5)) for index in range(count)]
    assert sorted(nodeid for part in parts for nodeid in part) == sorted(NODEIDS)
    if count <= 8:
        assert max(map(len, parts)) - min(map(len, parts)) <= 2 * BLOCK


def test_blocks_are_neighbours_in_a_file() -> None:
    assert [nodeid for block in blocks(NODEIDS) for nodeid in block] == NODEIDS
    for block in blocks(NODEIDS):
        assert len(block) <= BLOCK and len({nodeid.split("::")[0] for nodeid in block}) == 1


def test_a_hash_chooses_a_shard_and_its_beginning() -> None:
    assert Shard.of("2/8") == Shard(1, 8) and str(Shard.of("2/8")) == "2/8"
    assert Shard.of("0000000a" + "0000000b" + 24 * "0" + "/8") == Shard(2, 8, 11)
    rng, firsts, seen = random.Random(0), set(), set()
    for _ in range(300):
        shard = Shard.of(f"{rng.getrandbits(160):040x}/4")
        firsts.add(chosen(NODEIDS, shard)[0])
        seen.add(shard.index)
    assert seen == set(range(4)) and firsts == {block[0] for block in blocks(NODEIDS)}


@pytest.mark.parametrize("text", ["", "2", "0/8", "9/8", "2/0", "abc/8", "4f2ae1/8", "2/8/1"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a shard is K/N"):
        Shard.of(text)


def environment() -> dict[str, str]:
    """The environment without the variables that pytest sets for this process."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "DSV4_TESTS_"))}


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "tests/test_needed_packages.py"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )


def test_tests_that_time_leaves_out_are_named() -> None:
    result = run_pytest("--shard", "1/1", "--minutes", "0")
    assert result.returncode == 0, result.stdout
    assert "shard 1/1 of the selected tests" in result.stdout
    assert "tests not run within 0 minutes" in result.stdout and " passed" not in result.stdout
    named = [line for line in result.stdout.splitlines() if line.startswith("tests/test_needed_packages.py::")]
    assert len(named) == int(result.stdout.split(" tests not run within")[0].split()[-1]) > 0


def test_a_shard_that_is_none_ends_pytest() -> None:
    result = run_pytest("--shard", "9/8")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR and "--shard: a shard is K/N" in result.stderr


def test_files_that_the_distribution_names_exist() -> None:
    """A file that has moved would lose its turn, or its tests the process that may start servers."""
    tree = ast.parse((ROOT / "tests" / "conftest.py").read_text())
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    named = {text for text in strings if isinstance(text, str) and text.startswith("tests/") and " " not in text}
    assert len(named) > 10
    assert not [text for text in named if not (ROOT / text).exists()]


def test_the_end_of_a_process_costs_one_test(tmp_path: Path) -> None:
    """One test of each file ends its process: killed, or by the limit of a test's time. All others run once."""
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nfaulthandler_timeout = 3\nfaulthandler_exit_on_timeout = true\n"
        f"pythonpath = {ROOT / 'tests' / 'lib'}\n"
    )
    (tmp_path / "conftest.py").write_text(
        "import pathlib, pytest\n"
        "from selection.units import Units\n"
        "def pytest_xdist_make_scheduler(config, log):\n"
        "    return Units(config, log, lambda nodeid: nodeid.split('::')[0])\n"
        "def pytest_runtest_setup(item):\n"
        "    with pathlib.Path(__file__).with_name('ran').open('a') as ran:\n"
        "        ran.write(item.name + '\\n')\n"
    )
    ends = "os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(60)", "os.kill(os.getpid(), signal.SIGKILL)"
    names = []
    for file, (count, last) in enumerate(zip((1, 3, 4), (0, 2, 1), strict=True)):
        lines = ["import os, signal, time"]
        for test in range(count):
            lines.append(f"def test_{file}_{test}(): {ends[file] if test == last else 'pass'}")
            names.append(f"test_{file}_{test}")
        (tmp_path / f"test_{file}.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "pytest", "-n2", "-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert "3 failed, 5 passed" in result.stdout, result.stdout
    assert "crashed while running 'test_1.py::test_1_2'" in result.stdout and "test_1.py" in result.stderr
    assert sorted((tmp_path / "ran").read_text().split()) == names
