"""The Blackwell attention kernel without a Blackwell GPU: resources, and lower bounds in cycles.

    PYTHONPATH=tests/emulator python benchmarks/sparse_attention_sm100_static.py [--write]

Compiles every configuration for sm_100a and reads registers, stack and code from the cubins. Then runs one token of
every case in the emulator (tests/emulator) and divides the launch's work by published rates (its report.py names them),
for a full GPU: all 148 multiprocessors are assumed to do the same. The largest quotient is a lower bound of the time,
not a prediction. `--write` puts everything into benchmarks/results/sparse_attention_sm100_static.json, which a test
compares.

Columns, in clock cycles of one multiprocessor for one token and 64 heads; 128 heads are a pair of multiprocessors:

    floor    tensor core: 4 * 64 heads * keys * 512 flops at 8,192 a cycle, for the keys in whole tiles
    fma      arithmetic in f32 and bf16, 128 lanes a cycle
    alu      integers, comparisons, logic and conversions, 64 lanes a cycle
    issue    all instructions, four a cycle
    sfu      exponentials, 16 a cycle
    tmem     loads or stores of threads, 512 bytes a cycle
    shared   loads and stores of threads, 128 bytes a cycle
    operands matrices that the tensor core reads from shared memory, 128 bytes a cycle
    port     shared + operands: threads and tensor core take turns at shared memory
    l2       global loads and stores, 64 bytes a cycle
    hbm      each row, q and the output once, at 1/148 of 8 TB/s; tokens that share rows in L2 need less
    bound    the largest of these over the floor, and its name
    roofline the same over the larger of floor and hbm

fma, alu and issue count PTX as it is written; the assembler removes some of it (every move after a tcgen05.ld).
"""

from __future__ import annotations

import argparse
import json
import os

from lib.sparse_attention_sm100_static import CASES, RESULTS, UNITS, all_resources, cycles_of

from dsv4_kernels.host import compile_cache


def main() -> None:
    """Print the tables; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    os.environ[compile_cache.FOLDER_VARIABLE] = "off"  # the emulator needs the PTX that compiling gives
    from ptx_emulator import emulated

    with emulated():
        document = {"resources": all_resources(), "cycles": {}}
    for config, values in document["resources"].items():
        print(config, values)
    print(f"\n{'one token':31}" + "".join(f"{unit:>9}" for unit in (*UNITS, "bound", "roofline")))
    for case in CASES:
        columns = document["cycles"][case.name] = cycles_of(case)
        cells = "".join(f"{columns[unit]:9,.0f}" for unit in UNITS)
        print(f"{case.name:31}{cells}{columns['bound']:9.2f}{columns['roofline']:9.2f} {columns['bound by']}")
    if options.write:
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
