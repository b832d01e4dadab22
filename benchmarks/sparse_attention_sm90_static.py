"""Compiled Hopper attention kernels: registers, stack, shared memory and code.

    PYTHONPATH=tests/emulator python benchmarks/sparse_attention_sm90_static.py [--write]
    PYTHONPATH=tests/emulator python benchmarks/sparse_attention_sm90_static.py --bounds

Compiles every configuration for sm_90a, with no GPU, and reads the cubins. `--write` puts the numbers into
benchmarks/results/sparse_attention_sm90_static.json, which a test compares.

`--bounds` prints lower bounds of a step of 128 keys for each unit of a multiprocessor, in clock cycles, by the number
of heads: the additional work of a token with one more step in the emulator, divided by published rates (its report.py
names them; the columns have the same meaning as in sparse_attention_sm100_static.py). `hbm` is a row of 584 bytes, or
of 1,024, at a 132nd of 4.8 TB/s. PTX is counted as it is written. They are lower bounds by unit, not predictions.
"""

from __future__ import annotations

import argparse
import json
import os

from lib.sparse_attention_sm90_static import RESULTS, UNITS, bounds_of_a_step, static_numbers

from dsv4_kernels.host import compile_cache
from dsv4_kernels.kv_layout import RowFormat
from dsv4_kernels.sparse_attention.sm90 import launch as sm90


def print_bounds() -> None:
    """Print the table of `--bounds`."""
    columns = (*UNITS, "port", "hbm")
    print(f"{'cycles a step':24}" + "".join(f"{name:>10}" for name in columns))
    for row_format in RowFormat.FP8, RowFormat.PLAIN:
        for heads in (64, 16):
            found = bounds_of_a_step(heads, row_format)
            numbers = "".join(f"{found[name]:10,.0f}" for name in columns)
            print(f"{f'{heads} heads, {row_format.value}':24}{numbers}", flush=True)


def main() -> None:
    """Print the numbers; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--bounds", action="store_true", help="cycles of a step by the number of heads, instead")
    options = parser.parse_args()
    os.environ[compile_cache.FOLDER_VARIABLE] = "off"  # kernels from disk have no PTX
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
