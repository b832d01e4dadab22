"""FlashInfer's experts compiled in part (benchmarks/gpu_stack/flashinfer_experts.py): the sources, stubs for others."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_stack import flashinfer_experts as experts

MIXED = """
template void sm90_generic_mixed_moe_gemm_kernelLauncher<__nv_fp8_e4m3, {weight}, {out},
tensorrt_llm::cutlass_extensions::EpilogueOpDefault, cute::Shape<cute::Int<256>>> (int);
"""


@pytest.mark.parametrize(
    ("name", "types", "needed"),
    [
        ("a.generated.cu", ["SafeFP4 __nv_bfloat16"], True),
        ("a.generated.cu", ["SafeFP4 half"], False),
        ("a.generated.cu", ["cutlass::uint4b_t __nv_bfloat16"], False),
        ("a.generated.cu", ["SafeFP4 half"] * 7 + ["SafeFP4 __nv_bfloat16"], True),
        ("binding.cu", ["half half"], True),
    ],
    ids=["fp8 and fp4", "half", "int4", "one of eight", "not generated"],
)
def test_sources_of_the_types_that_fp4_weights_use(name: str, types: list[str], needed: bool, tmp_path: Path) -> None:
    grouped = "INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm90, half, half, half,\n"
    parts = [MIXED.format(weight=weight, out=out) for weight, out in map(str.split, types)]
    (tmp_path / name).write_text(grouped + "".join(parts))
    assert experts.is_needed(tmp_path / name) == needed


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_library_with_stubs_loads_and_names_what_it_lacks(tmp_path: Path) -> None:
    """A left out function is called by name and by its address: without a stub the second keeps the library from
    loading. Functions of other libraries stay as they are."""
    source, library = tmp_path / "library.cpp", tmp_path / "library.so"
    source.write_text("""
        #include <cstdlib>
        namespace tensorrt_llm { template <typename T> void launch(T, double); extern template void launch(int, double);
                                 template <typename T> void other(T); extern template void other(float); }
        extern "C" int kept() { return std::abs(-7); }
        extern "C" void call() { tensorrt_llm::launch(1, 2.0); }
        extern "C" void* address() { return (void*)&tensorrt_llm::other<float>; }
    """)
    command = ["g++", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    missing = experts.undefined(library)
    assert len(missing) == 2 and all("tensorrt_llm" in name for name in missing)
    with pytest.raises(OSError, match="undefined symbol"):
        ctypes.CDLL(str(library), mode=2)  # RTLD_NOW
    subprocess.run([*command, str(experts.write_stubs(missing, tmp_path))], check=True)
    assert not experts.undefined(library)
    assert ctypes.CDLL(str(library), mode=2).kept() == 7
    call = f"import ctypes; ctypes.CDLL({str(library)!r}).call()"
    ended = subprocess.run([sys.executable, "-S", "-c", call], capture_output=True, text=True)
    assert ended.returncode < 0 and experts.MESSAGE in ended.stderr and "launch" in ended.stderr
