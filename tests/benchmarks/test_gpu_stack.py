"""The stack for a GPU host (benchmarks/gpu_stack/pack.py): what is removed from its tree, and what stays."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import _cffi_backend
import pytest
from gpu_stack import pack


def entry(capability: int, payload: bytes) -> bytes:
    """An entry of a fat binary: kind, version, header size, payload size, and 28 bytes in the compute capability."""
    header = struct.pack("<HHIQ", 2, 0x101, 64, len(payload)).ljust(28, b"\0") + struct.pack("<I", capability)
    return header.ljust(64, b"\0") + payload


@pytest.mark.skipif(not shutil.which("objcopy"), reason="needs binutils")
def test_code_of_other_gpus_is_zeroed(tmp_path: Path) -> None:
    entries = entry(80, b"a" * 64) + entry(90, b"b" * 64) + entry(100, b"c" * 32)
    section = tmp_path / "section"
    section.write_bytes(struct.pack("<IHHQ", pack.FAT_BINARY_MAGIC, 1, 16, len(entries)) + entries)
    library = tmp_path / "library.so"
    command = ["objcopy", "--add-section", f".nv_fatbin={section}", _cffi_backend.__file__, str(library)]
    subprocess.run(command, check=True)
    before = library.read_bytes()
    assert pack.zero_foreign_cubins(library, 90) == 96
    expected = before.replace(b"a" * 64, bytes(64)).replace(b"c" * 32, bytes(32))
    assert library.read_bytes() == expected != before and b"b" * 64 in expected
    assert pack.zero_foreign_cubins(library, 90) == 96  # again: the same entries, already zero


def tree(site: Path, *names: str) -> Path:
    for name in names:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("")
    return site


NEEDED = [pattern.replace("*", "a") for pattern in pack.NEEDED]


def test_unused_parts_go_and_needed_ones_stay(tmp_path: Path) -> None:
    unused = ("triton/backends/amd/lib/libhip.a", "torch/lib/libx.a", "torch/bin/protoc", "sglang/test/a.py")
    site = tree(tmp_path, *NEEDED, *unused)
    pack.slim(site, 90)
    left = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert left == set(NEEDED)


@pytest.mark.parametrize("name", NEEDED)
def test_a_tree_that_would_not_import_is_refused(tmp_path: Path, name: str) -> None:
    """A tree that was packed by hand lacked three of these, which showed on the host only."""
    site = tree(tmp_path, *(set(NEEDED) - {name}))
    with pytest.raises(FileNotFoundError, match="does not import"):
        pack.slim(site, 90)


def test_wheels_are_pinned_once() -> None:
    names = [wheel.split("==")[0] for wheel in pack.WHEELS]
    assert len(names) == len(set(names)) and all(wheel.count("==") == 1 for wheel in pack.WHEELS)
    assert pack.file_pattern("sgl-deep-gemm==0.2.3.post2") == "sgl_deep_gemm-0.2.3.post2-*.whl"
