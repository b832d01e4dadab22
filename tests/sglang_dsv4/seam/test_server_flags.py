"""`docs/server_flags.toml` answers for every server argument of SGLang, and SGLang's argument resolution agrees.

What the flags that work do while a server runs: `tests/serving/test_flags.py`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import server_flags
from documents.server_flags import Flag, Row
from serving.root_logger import root_logger_kept

from sglang_dsv4.seam import hooks, install, refused_flags

ROOT = Path(__file__).resolve().parents[3]
ROWS = server_flags.rows()
LINES = server_flags.command_lines()

# In a process of its own: resolving arguments sets environment variables and SGLang's global state.
RESOLVE = """
import argparse, json, os, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
load_plugins()
from sglang_dsv4.seam import compat
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
environment = dict(os.environ)
for words, fields in json.load(sys.stdin):
    try:
        arguments = ServerArgs.from_cli_args(parser.parse_args(["--model-path", sys.argv[1], *words]))
        arguments.resolve_once()
        arguments.check_server_args()
        view = compat.resolving_view(arguments)
        outcome = {field: getattr(view, field) for field in fields}
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    except SystemExit:
        outcome = "the parser refuses it"
    os.environ.clear()
    os.environ.update(environment)
    print("OUTCOME", json.dumps(outcome, default=lambda value: getattr(value, "__dict__", None) or repr(value)))
"""


@pytest.fixture(scope="module")
def actions() -> dict[str, argparse.Action]:
    """Flag -> argparse's action, for each spelling."""
    from sglang.srt.server_args import ServerArgs

    (choice,) = [hook for hook in hooks.HOOKS if hook.target.endswith("add_moe_runner_backend_choices")]
    install.install(choice)  # as the plugin does in the launcher
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {name: action for action in parser._actions for name in action.option_strings if action.dest != "help"}


# ---- the file and SGLang's arguments


def test_every_argument_has_an_answer(actions: dict[str, argparse.Action]) -> None:
    """The file has exactly SGLang's arguments: one that a later SGLang adds or removes fails here."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    answered = {flag.name for row in ROWS for flag in row.all}
    assert not answered - set(actions), "SGLang has no such flag"
    without = {action.dest for action in actions.values()} - {actions[name].dest for name in answered}
    assert not without, "no row answers for these arguments"
    fields = {field.name for field in record_fields(ServerArgs)} - {action.dest for action in actions.values()}
    assert fields == {field for row in ROWS for field in row.fields}, "fields of ServerArgs without a flag"


def test_every_value_has_an_answer(actions: dict[str, argparse.Action]) -> None:
    """Each value of a flag with listed values has one row. A flag without effect needs one value, a default none."""
    values, anything = defaultdict(list), set()
    for row in ROWS:
        for flag in (flag for alternatives in row.flags for flag in alternatives):
            values[actions[flag.name].dest] += flag.values
            if row.answer == "no effect" or flag.values == server_flags.OTHERS:
                anything.add(actions[flag.name].dest)
    wrong = {}
    for action in actions.values():
        if action.choices and action.nargs is None:
            answered = values[action.dest]
            missing = {str(choice) for choice in action.choices} - {str(action.default), *answered}
            repeated = {value for value in answered if answered.count(value) > 1}
            if repeated or (missing and action.dest not in anything):
                wrong[action.option_strings[0]] = {"no answer": sorted(missing), "two answers": sorted(repeated)}
    assert not wrong


@pytest.mark.parametrize("row", ROWS, ids=lambda row: (row.flags[0][0].name if row.flags else row.fields[0]))
def test_an_answer_has_what_it_needs(row: Row) -> None:
    """A row that works names a test, one without effect SGLang's files; a refusal that is not ours has a reason."""
    if row.answer == "works":
        assert bool(row.test) != bool(row.set)
        assert not row.test or (ROOT / row.test).is_file()
    elif row.answer == "no effect":
        assert row.why and (row.reads is not None or row.fields)
    elif row.answer != "refused":
        assert row.why


def test_sglang_reads_nothing_that_has_no_effect(actions: dict[str, argparse.Action]) -> None:
    """SGLang's code names such an argument in files that do not run here, or in the files that the row names."""
    import sglang.srt

    allowed = {
        name: row.reads or ()
        for row in ROWS
        if row.answer == "no effect"
        for name in {actions[flag.name].dest for flag in row.all}
    }
    root, found = Path(next(iter(sglang.srt.__path__))), defaultdict(set)
    for path in root.rglob("*.py"):
        file = str(path.relative_to(root))
        if any(fnmatch.fnmatch(file, glob) for glob in server_flags.unused()):
            continue
        for name in allowed.keys() & set(re.findall(r"\w+", path.read_text(errors="replace"))):
            if not any(fnmatch.fnmatch(file, glob) for glob in allowed[name]):
                found[name].add(file)
    assert not found, "SGLang reads these arguments in other files than the row says: does the reason still hold?"


# ---- resolution


FEW = 4


def cases() -> list[tuple[Row, Flag]]:
    """Flags with values: each that works, and of a longer list of others the first and the last.

    Flags that need a GPU are left out where there is none. `--config` has a test of its own, and the flags without
    effect have one together.
    """
    gpu, found = torch.cuda.is_available(), []
    for row in ROWS:
        for flags in row.flags if row.where in ("", "gpu" if gpu else "cpu") and row.answer != "no effect" else ():
            some = flags if row.answer == "works" or len(flags) <= FEW else (flags[0], flags[-1])
            found += [(row, flag) for flag in some if flag.name != "--config" and flag.values != server_flags.OTHERS]
    return found


@pytest.fixture(scope="module")
def placeholders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Values for the file's placeholders."""
    folder = tmp_path_factory.mktemp("flags")
    names = ("config", "checksums", "key", "certificate")
    for name in names:
        (folder / name).write_text("{}")
    files = {name: str(folder / name) for name in names}
    return {"model": str(checkpoint), "folder": str(folder), "port": "31999", "ipc": "ipc:///tmp/metrics", **files}


@pytest.fixture(scope="module")
def outcomes(
    checkpoint: Path, placeholders: dict[str, str], actions: dict[str, argparse.Action]
) -> dict[str, dict[str, Any] | str]:
    """Flag with value -> the resolved value of its argument, or the error."""
    packages = Path(placeholders["folder"]) / "packages"
    packages.mkdir()
    (packages / "granian.py").touch()  # SGLang looks whether it is there
    one_by_one = [
        ([*row.words(**placeholders), *flag.words(**placeholders)], [actions[flag.name].dest]) for row, flag in cases()
    ]
    lines = [(server_flags.fill(words, placeholders), []) for words in LINES.values()]
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, str(checkpoint)],
        input=json.dumps([*one_by_one, *lines]),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(packages), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line[8:]) for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    return dict(zip([*(flag.text for _, flag in cases()), *LINES], results, strict=True))


@pytest.mark.parametrize("name", LINES)
def test_the_flags_of_a_set_are_accepted_together(name: str, outcomes: dict[str, dict[str, Any] | str]) -> None:
    assert outcomes[name] == {}


def test_a_file_may_hold_the_flags(checkpoint: Path, tmp_path: Path) -> None:
    from sglang.srt.server_args import prepare_server_args

    (tmp_path / "flags.yaml").write_text(f"model-path: {checkpoint}\nmax-total-tokens: 4096\n")
    with root_logger_kept():
        arguments = prepare_server_args(["--config", str(tmp_path / "flags.yaml"), "--max-running-requests", "3"])
    assert (arguments.model_path, arguments.max_total_tokens) == (str(checkpoint), 4096)
    assert arguments.max_running_requests == 3


def asked(flag: Flag, action: argparse.Action, placeholders: dict[str, str]) -> Any:
    """The value that argparse reads."""
    parser = argparse.ArgumentParser()
    parser._add_action(action)
    return json.loads(json.dumps(getattr(parser.parse_args(flag.words(**placeholders)), action.dest), default=repr))


def holds(resolved: Any, given: Any) -> bool:
    """Whether the resolved value is the user's; of a dictionary, those of the user's keys."""
    if isinstance(resolved, dict) and isinstance(given, dict):
        return all(name in resolved and holds(resolved[name], value) for name, value in given.items())
    return resolved == given


@pytest.mark.parametrize(("row", "flag"), cases(), ids=[flag.text for _, flag in cases()])
def test_a_flag_does_what_the_file_says(
    row: Row,
    flag: Flag,
    outcomes: dict[str, dict[str, Any] | str],
    actions: dict[str, argparse.Action],
    placeholders: dict[str, str],
) -> None:
    outcome, action = outcomes[flag.text], actions[flag.name]
    if row.answer == "refused":
        assert isinstance(outcome, str), f"accepted: {outcome}"
        assert outcome != "the parser refuses it"
        assert row.why or "sglang-dsv4 does not support" in outcome, outcome
        assert not row.why.startswith("SGLang:") or "sglang-dsv4 does not support" not in outcome, outcome
        return
    assert isinstance(outcome, dict), outcome
    if row.answer == "works":
        assert holds(outcome[action.dest], asked(flag, action, placeholders)) or flag.values == ("auto",)
    elif row.answer == "replaced":
        assert outcome[action.dest] == row.by


def test_every_refusal_of_ours_is_in_the_file_and_named(outcomes: dict[str, dict[str, Any] | str]) -> None:
    ours = [outcome for outcome in outcomes.values() if "sglang-dsv4 does not support" in str(outcome)]
    named = [refusal.flag for refusal in (*refused_flags.REFUSALS, *refused_flags.AS_GIVEN, *refused_flags.ON_A_CPU)]
    assert len(named) == len(set(named))
    missing = [flag for flag in named if not any(re.search(rf"support {flag}\b(?!-)", str(text)) for text in ours)]
    assert not missing
