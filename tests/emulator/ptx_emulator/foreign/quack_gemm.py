"""GEMMs of QuACK, a library that FlashAttention-4 depends on, against float64, on the emulator.

    python -m ptx_emulator.foreign.quack_gemm --arch sm_90a dynamic --mnk 512,512,128
    python -m ptx_emulator.foreign.quack_gemm gathered --mnk 300,256,128

`dynamic` gets its tiles from a counter in global memory. `gathered` multiplies groups of listed rows of A by one matrix
each. `quack` is an installed package. The reported error is ||d - reference|| / ||reference||; d is bf16.
"""

import argparse
import os
import time
from pathlib import Path

import torch

from ptx_emulator import emulated
from ptx_emulator.dsl.torch_as_cuda import torch_as_cuda
from ptx_emulator.foreign.flash_attention_4 import relative_error
from ptx_emulator.foreign.run_program import checks_with_warnings, driver_answers, finish

TILE = {"tile_M": 128, "tile_N": 128, "cluster_M": 1, "cluster_N": 1}


def dynamic(m: int, n: int, k: int) -> float:
    from quack.gemm import gemm

    a, b = torch.randn(1, m, k).bfloat16(), torch.randn(1, n, k).bfloat16()
    d, counter = torch.zeros(1, m, n).bfloat16(), torch.zeros(1, dtype=torch.int32)
    gemm(a, b, d, None, counter, **TILE, is_dynamic_persistent=True)
    return relative_error(d, torch.einsum("lmk,lnk->lmn", a.double(), b.double()))


def gathered(m: int, n: int, k: int) -> float:
    from quack.gemm import gemm

    lengths = [m // 3, m - m // 3]
    a, b = torch.randn(2 * m, k).bfloat16(), torch.randn(2, n, k).bfloat16()
    rows = torch.randperm(2 * m)[:m].int()
    ends = torch.tensor([0, lengths[0], m], dtype=torch.int32)
    d = torch.zeros(m, n).bfloat16()
    gemm(a, b, d, None, None, **TILE, cu_seqlens_m=ends, A_idx=rows)
    groups = a[rows.long()].double().split(lengths)
    return relative_error(d, torch.cat([group @ matrix.T for group, matrix in zip(groups, b.double(), strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, help="FlashAttention-4's, which asks for quack")
    parser.add_argument("--arch", default="sm_100a")
    parser.add_argument("--schedule", default="eager")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--warn", default="", help="error kinds to report as warnings")
    parser.add_argument("--max-error", type=float, default=4e-3)
    parser.add_argument("command", choices=("dynamic", "gathered"))
    parser.add_argument("--mnk", required=True)
    options = parser.parse_args()

    os.environ["QUACK_CACHE_ENABLED"] = "0"  # a cached kernel has no PTX
    torch.manual_seed(0)
    start = time.monotonic()
    run = dynamic if options.command == "dynamic" else gathered
    with (
        emulated(
            arch=options.arch,
            schedule=options.schedule,
            seed=options.seed,
            checks=checks_with_warnings(options.warn),
        ) as device,
        torch_as_cuda(options.arch),
        driver_answers(),
    ):
        error = run(*map(int, options.mnk.split(",")))
    finish(device, start, error, options)


if __name__ == "__main__":
    main()
