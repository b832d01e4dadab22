"""Each deliberately wrong emulator is noticed by a right kernel, or by a kernel whose memory scope is too narrow."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from ptx_emulator.campaigns import summaries
from ptx_emulator.campaigns.wrong_semantics import CONTROLS, Control, run, save_right_kernels, save_scopes


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    save_right_kernels(folder)
    save_scopes(folder)
    return folder


@pytest.mark.parametrize("control", CONTROLS, ids=[control.name for control in CONTROLS])
def test_control_is_killed(control: Control, recordings: Path) -> None:
    found = {name: how for name, how in run(control, recordings).items() if how}
    assert found, f"no kernel notices: {control.name}"
    assert found == summaries.read("wrong_semantics")[control.name]
