"""CUTLASS's stream-K GEMM, compiled from C++ by nvcc, against float64.

    python -m ptx_emulator.foreign.cutlass_stream_k --checkout PATH --mnk 384,256,512 --ctas 4

`--ctas` CTAs share the tiles, unevenly. The reported error is ||d - reference|| / ||reference||; d is f16.
"""

import argparse
import ctypes
import time
from pathlib import Path

import torch

from ptx_emulator import Device, Options
from ptx_emulator.foreign.flash_attention_4 import relative_error
from ptx_emulator.foreign.nvcc_program import attach, build, pointer
from ptx_emulator.foreign.run_program import checks_with_warnings, finish

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--schedule", default="eager")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--warn", default="", help="error kinds to report as warnings")
    parser.add_argument("--max-error", type=float, default=1e-3)
    parser.add_argument("--mnk", required=True)
    parser.add_argument("--ctas", type=int, required=True)
    options = parser.parse_args()

    torch.manual_seed(0)
    sizes = (*map(int, options.mnk.split(",")), options.ctas)
    m, n, k, _ = sizes
    include = options.checkout / "include"
    sources = [include / "cutlass/barrier.h", include / "cutlass/gemm/kernel/gemm_universal_streamk.h"]
    library, ptx = build(HERE / "cutlass_stream_k_driver.cu", "cutlass_stream_k", [], [include], sources)
    start = time.monotonic()
    emulation = Options(schedule=options.schedule, seed=options.seed, checks=checks_with_warnings(options.warn))
    with Device(emulation) as device:
        callbacks = attach(device, ptx)
        driver = ctypes.CDLL(str(library))
        driver.workspace_bytes.restype = ctypes.c_size_t
        a, b = torch.randn(m, k).half(), torch.randn(n, k).half()
        d = torch.zeros(m, n).half()
        workspace = torch.zeros(driver.workspace_bytes(*sizes), dtype=torch.uint8)
        failed = driver.run(*sizes, *[pointer(device, tensor) for tensor in (a, b, d, workspace)])
        callbacks.raise_pending()
        if failed:
            raise RuntimeError("CUTLASS's host code refused the arguments")
    error = relative_error(d, a.double() @ b.double().T)
    finish(device, start, error, options)


if __name__ == "__main__":
    main()
