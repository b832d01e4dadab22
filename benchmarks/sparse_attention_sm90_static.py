"""What the compiler makes of the Hopper attention kernel: registers, stack, shared memory and code.

    PYTHONPATH=tests/emulator python benchmarks/sparse_attention_sm90_static.py [--write]
    PYTHONPATH=tests/emulator python benchmarks/sparse_attention_sm90_static.py --bounds

Compiles every configuration for sm_90a, with no GPU, and reads the cubins. `--write` puts the numbers into
benchmarks/results/sparse_attention_sm90_static.json, which a test compares.

`--bounds` prints what a step of 128 keys costs the units of a multiprocessor at least, in clock cycles, by the number
of heads: what a token with one more step executes more in the emulator, divided by published rates (report.py there
names them; the columns are those of sparse_attention_sm100_static.py). `hbm` is a row of 584 bytes, or of 1,024, at a
132nd of 4.8 TB/s. PTX is counted as it is written. They are lower bounds by unit, not predictions.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from unittest import mock

import torch
from cubin import hopper_instructions, resources

from dsv4_kernels.host import compile_cache
from dsv4_kernels.kv_layout import ROW_BYTES, ROW_DIM, KVRows, RowFormat
from dsv4_kernels.sparse_attention.problem import Problem
from dsv4_kernels.sparse_attention.sm90 import launch as sm90
from dsv4_kernels.sparse_attention.sm90.cluster import ClusterShared
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import FewHeads, shared_memory
from dsv4_kernels.sparse_attention.sm90.plan import Configuration, Shared, Split
from dsv4_kernels.sparse_attention.split import STEP_KEYS

RESULTS = Path(__file__).resolve().parent / "results" / "sparse_attention_sm90_static.json"


def static_numbers(configuration: Configuration | FewHeads) -> dict[str, int]:
    """Of one configuration; inside `emulated(arch="sm_90a")`, which keeps PTX and cubins.

    Raises:
        AssertionError: the compiler has serialised products that the source lets run asynchronously.
    """
    compiled = sm90.compile(configuration)
    instructions = hopper_instructions(compiled.__cubin__)
    written = {"wgmma": "wgmma.mma_async", "wgmma_waits": "wgmma.wait_group"}
    expected = {name: compiled.__ptx__.count(instruction) for name, instruction in written.items()}
    # Where ptxas cannot keep accumulators in place, it waits after every product.
    assert expected["wgmma"] and expected.items() <= instructions.items(), (
        f"{configuration}: {instructions} in the cubin, {expected} in the PTX"
    )
    numbers = resources(compiled.__cubin__) | {"stack_accesses": instructions["stack_accesses"]}
    if isinstance(configuration, FewHeads):
        shared = shared_memory(configuration)
    else:
        shared = ClusterShared if configuration.split == Split.STEPS else Shared
    return numbers | {"shared_memory_bytes": shared.size_in_bytes()}


UNITS = ("tensor", "fma", "alu", "issue", "sfu", "shared", "operands", "l2")
ENTRIES = (512, 1024)
"""Of the two tokens whose difference is counted."""


def bounds_of_a_step(heads: int, row_format: RowFormat) -> dict[str, float]:
    """Cycles of every unit for a step of 128 keys of a list, of tokens that nobody divides."""
    from ptx_emulator import H200, Checks, emulated

    cycles = []
    for entries in ENTRIES:
        generator = torch.Generator().manual_seed(0)
        rows = KVRows.allocate(1024, row_format, ROW_DIM, 64, torch.bfloat16, "cpu", 0.0)
        rows.scatter(torch.arange(1024), torch.randn(1024, ROW_DIM, generator=generator).bfloat16())
        q = torch.randn(1, heads, ROW_DIM, generator=generator).bfloat16()
        lists = torch.arange(128, dtype=torch.int32)[None], rows, torch.arange(entries, dtype=torch.int32)[None]
        problem = Problem.of(q, rows, *lists, None, 0, None, None, None, scale=ROW_DIM**-0.5, out=None, split_keys=None)
        whole = mock.patch.object(sm90, "_parts", lambda *_: 1)
        whole_too = mock.patch.object(sm90, "_channel_splits_of_clusters", lambda problem: 0)
        with whole, whole_too, emulated(arch=sm90.ARCH, checks=Checks(order=False)) as device:
            sm90.sparse_attention(problem)
        cycles.append(device.reports[0].cycles)
    steps = (ENTRIES[1] - ENTRIES[0]) // STEP_KEYS
    units = {name: (cycles[1][name] - cycles[0][name]) / steps for name in UNITS}
    row_bytes = ROW_BYTES if row_format is RowFormat.FP8 else 2 * ROW_DIM
    hbm = STEP_KEYS * row_bytes / (H200.hbm_bytes_per_clock / H200.sms)
    return units | {"port": units["shared"] + units["operands"], "hbm": hbm}


def print_bounds() -> None:
    """The table of `--bounds`."""
    columns = (*UNITS, "port", "hbm")
    print(f"{'cycles a step':24}" + "".join(f"{name:>10}" for name in columns))
    for row_format in RowFormat.FP8, RowFormat.PLAIN:
        for heads in (64, 16):
            found = bounds_of_a_step(heads, row_format)
            numbers = "".join(f"{found[name]:10,.0f}" for name in columns)
            print(f"{f'{heads} heads, {row_format.value}':24}{numbers}", flush=True)


def main() -> None:
    """Prints the numbers; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--bounds", action="store_true", help="cycles of a step by the number of heads, instead")
    options = parser.parse_args()
    os.environ[compile_cache.FOLDER_VARIABLE] = "off"  # what comes from disk has no PTX
    if options.bounds:
        print_bounds()
        return
    from ptx_emulator import emulated

    document = {}
    with emulated(arch=sm90.ARCH):
        for configuration in (*sm90.configurations(), *sm90.configurations_of_few_heads()):
            document[str(configuration)] = numbers = static_numbers(configuration)
            print(configuration, numbers, flush=True)
    if options.write:
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
