"""Compile FlashInfer's experts on a GPU host, as far as FP4 weights on Hopper use them, or install a compiled library.

    . /tmp/stack/env.sh                                                            # of unpack.sh
    python3 benchmarks/gpu_stack/flashinfer_experts.py --out fused_moe_90.so       # on a host with nvcc
    python3 benchmarks/gpu_stack/flashinfer_experts.py --install fused_moe_90.so   # on the next one

SGLang's default experts on Hopper (`flashinfer_mxfp4`, and with fp8 activations) are kernels of CUTLASS, which
FlashInfer 0.7.2 compiles at first use: 248 sources, for all pairs of types. FP4 weights with bf16 and FP8 activations
use 48 of the 220 that are generated. This script compiles these and what is not generated; a function of another source
becomes a stub that ends the process and says so. The library goes where FlashInfer looks for one that came with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MODULE = "fused_moe_90"
NEEDED = (("__nv_bfloat16", "SafeFP4", "__nv_bfloat16"), ("__nv_fp8_e4m3", "SafeFP4", "__nv_bfloat16"))
"""Types of activations, weights and results whose kernels are compiled."""
GENERATED = ".generated.cu"
TYPES = re.compile(r"(?:template void \w+<|MOE_GEMM\(\w+, )([\w:]+), ([\w:]+), ([\w:]+)")
OWN_SYMBOLS = "_ZN12tensorrt_llm"
"""Begin of the names of functions that the left out sources define."""
GIB_OF_A_COMPILER = 8
MESSAGE = "a kernel of FlashInfer's experts was called that flashinfer_experts.py left out: "


def compilers() -> int:
    """Return how many compilers may run at once: a processor and GIB_OF_A_COMPILER of memory each."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    return max(1, min(os.cpu_count() or 1, memory // GIB_OF_A_COMPILER))


def is_needed(source: Path) -> bool:
    """Return whether a source is compiled: each that is not generated, and those of the types NEEDED."""
    return not source.name.endswith(GENERATED) or not set(TYPES.findall(source.read_text())).isdisjoint(NEEDED)


def undefined(library: Path) -> list[str]:
    """Return the names of functions of the left out sources that a library lacks."""
    listed = subprocess.check_output(["nm", "--dynamic", "--undefined-only", str(library)], text=True)
    return sorted({line.split()[-1] for line in listed.splitlines() if line.split()[-1].startswith(OWN_SYMBOLS)})


def write_stubs(names: Sequence[str], folder: Path) -> Path:
    """Compile an object that defines these functions; each prints its name and ends the process."""
    lines = [".section .rodata", f'message: .asciz "{MESSAGE}%s\\n"']
    lines += [f'name{i}: .asciz "{name}"' for i, name in enumerate(names)]
    lines += [".text", "left_out:", "lea message(%rip), %rsi", "mov stderr@GOTPCREL(%rip), %rax", "mov (%rax), %rdi"]
    lines += ["and $-16, %rsp", "xor %eax, %eax", "call fprintf@PLT", "call abort@PLT"]
    for i, name in enumerate(names):
        lines += [f".globl {name}", f".type {name}, @function", f"{name}: lea name{i}(%rip), %rdx", "jmp left_out"]
    lines.append('.section .note.GNU-stack,"",@progbits\n')
    source, compiled = folder / "left_out.s", folder / "left_out.o"
    source.write_text("\n".join(lines))
    subprocess.run([os.environ.get("CC", "cc"), "-c", str(source), "-o", str(compiled)], check=True)
    return compiled


def build(jobs: int) -> Path:
    """Compile and link; return the library.

    Raises:
        SystemExit: FlashInfer generates no source with the types NEEDED: its version has other names.
    """
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

    os.environ["MAX_JOBS"] = str(jobs)
    whole = gen_cutlass_fused_moe_sm90_module()
    sources = [source for source in whole.sources if is_needed(Path(source))]
    generated = sum(Path(source).name.endswith(GENERATED) for source in sources)
    if not generated:
        raise SystemExit(
            f"FlashInfer should generate sources with the types {NEEDED}; none of {len(whole.sources)} has"
        )
    print(f"{len(sources)} of {len(whole.sources)} sources, {generated} of them generated", flush=True)
    spec = dataclasses.replace(whole, name=f"{MODULE}_fp4", sources=sources)
    begin = time.monotonic()
    spec.build()
    missing = undefined(spec.jit_library_path)
    print(f"compiled in {time.monotonic() - begin:.0f} s; {len(missing)} functions are left out", flush=True)
    stubs = write_stubs(missing, spec.build_dir)
    linked = dataclasses.replace(spec, extra_ldflags=[*(spec.extra_ldflags or ()), str(stubs)])
    linked.build()
    return linked.jit_library_path


def install(library: Path) -> Path:
    """Copy a library to where FlashInfer looks first; return the place.

    Raises:
        SystemExit: FlashInfer cannot load it.
    """
    from flashinfer.jit import env

    place = env.FLASHINFER_AOT_DIR / MODULE / f"{MODULE}.so"
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(library, place)
    load = "import sys, tvm_ffi; tvm_ffi.load_module(sys.argv[1])"
    loaded = subprocess.run([sys.executable, "-c", load, str(place)], capture_output=True, text=True)
    if loaded.returncode:
        place.unlink()
        raise SystemExit(f"FlashInfer should load {library}, and could not: {loaded.stderr[-1000:]}")
    return place


def main() -> None:
    """Compile unless there is a library, and install."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=compilers(), help="compilers at once")
    parser.add_argument("--out", type=Path, help="keep the library here")
    parser.add_argument("--install", type=Path, metavar="LIBRARY", help="compile nothing")
    arguments = parser.parse_args()
    library = arguments.install or build(arguments.jobs)
    print(f"FlashInfer will load {install(library)}", flush=True)
    if arguments.out is not None:
        shutil.copyfile(library, arguments.out)


if __name__ == "__main__":
    main()
