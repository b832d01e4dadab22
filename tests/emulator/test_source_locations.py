"""Cached locations equal those that the DSL finds."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from ptx_emulator.dsl import source_locations  # noqa: E402
from ptx_emulator.dsl.session import emulated  # noqa: E402

PROGRAM = """
import cutlass
from cutlass import cute

def twice(value):
    return value + value

class Kernel:
    @cute.jit
    def __call__(self, x: cute.Tensor):
        self.kernel(x).launch(grid=[1, 1, 1], block=[32, 1, 1])

    @cute.kernel
    def kernel(self, x: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(3):
            x[lane] = twice(x[lane]) + i
        x[lane] = twice(x[lane]); x[lane] = x[lane] * 3
"""


def test_lines_in_the_ptx_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept_lines.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    from cutlass.cute.runtime import from_dlpack
    from kept_lines import Kernel

    def ptx() -> str:
        x = torch.ones(32)
        with emulated(record=True) as device:
            Kernel()(from_dlpack(x))
        assert x[0] == 3 * 2 * (2 * (2 * (2 * 1) + 1) + 2)
        return device.recordings[0].ptx

    kept = [ptx(), ptx()]
    monkeypatch.setattr(source_locations, "replacements", lambda: iter(()))
    assert kept == [ptx()] * 2
    lines = {line.split()[2] for line in kept[0].splitlines() if line.strip().startswith(".loc")}
    named = {str(number) for number, line in enumerate(PROGRAM.splitlines(), 1) if "twice(x[lane])" in line}
    assert named <= lines
