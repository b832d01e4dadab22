"""Each flag in docs/coming_from_sglang.md goes through SGLang's argument resolution and does what the table says."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dsv4.seam import hooks, install
from sglang_dsv4.seam import refused_flags as server_flags

ROOT = Path(__file__).resolve().parents[3]

# In a process of its own: resolving arguments sets environment variables and SGLang's global state.
RESOLVE = """
import json, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
load_plugins()
from sglang_dsv4.seam import compat
for flags in json.load(sys.stdin):
    try:
        arguments = prepare_server_args(["--model-path", sys.argv[1], *flags.split()])
        arguments.resolve_once()
        arguments.check_server_args()
        view = compat.resolving_view(arguments)
        names = [word[2:].replace("-", "_") for word in flags.split() if word.startswith("--")]
        outcome = {name: getattr(view, name) for name in names}
    except (ValueError, AssertionError) as error:
        outcome = str(error)
    print("OUTCOME", json.dumps([flags, outcome]))
"""


def rows() -> dict[str, str]:
    """Flags, with their values, -> the table's words about them."""
    lines = (ROOT / "docs" / "coming_from_sglang.md").read_text().splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| `--")]
    return {flags: row[1].strip() for row in cells for flags in re.findall(r"`([^`]+)`", row[0])}


@pytest.fixture(scope="module")
def outcomes(checkpoint: Path) -> dict[str, dict[str, object] | str]:
    """Flags -> the resolved values of the arguments named, or the error."""
    command = [sys.executable, "-c", RESOLVE, str(checkpoint)]
    done = subprocess.run(
        command,
        input=json.dumps(list(rows())),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line[8:]) for line in done.stdout.splitlines() if line.startswith("OUTCOME "))


def asked(flags: str) -> dict[str, object]:
    """The arguments that the flags name, as SGLang's parser reads them."""
    from sglang.srt.server_args import ServerArgs

    (choice,) = [hook for hook in hooks.HOOKS if hook.target.endswith("add_moe_runner_backend_choices")]
    install.install_once(choice)  # as the plugin does in the launcher
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    values = vars(parser.parse_args(["--model-path", "none", *flags.split()]))
    return {name: values[name] for name in (w[2:].replace("-", "_") for w in flags.split() if w.startswith("--"))}


@pytest.mark.parametrize(("flags", "said"), rows().items(), ids=rows())
def test_a_flag_does_what_the_table_says(flags: str, said: str, outcomes: dict[str, dict[str, object] | str]) -> None:
    outcome = outcomes[flags]
    if said == "works":
        assert outcome == asked(flags)
    elif said == "refused":
        assert isinstance(outcome, str), f"accepted: {outcome}"
    else:
        (value,) = re.fullmatch(r"replaced by `(\w+)`", said).groups()  # type: ignore[union-attr]
        assert isinstance(outcome, dict) and list(outcome.values()) == [value]


def test_what_we_refuse_is_in_the_table_and_named(outcomes: dict[str, dict[str, object] | str]) -> None:
    ours = [outcome for outcome in outcomes.values() if "sglang-dsv4 does not support" in str(outcome)]
    for refusal in server_flags.REFUSALS:
        assert any(f"support {refusal.flag}" in str(outcome) for outcome in ours), refusal.flag
