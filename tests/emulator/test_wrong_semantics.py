"""Each deliberately wrong emulator is noticed by a test of a right kernel."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from wrong_semantics import CONTROLS, Control, run, save_right_kernels


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    save_right_kernels(folder)
    return folder


@pytest.mark.parametrize("control", CONTROLS, ids=[control.name for control in CONTROLS])
def test_control_is_killed(control: Control, recordings: Path) -> None:
    found = run(control, recordings)
    assert any(found.values()), f"no right kernel notices: {control.name}"
