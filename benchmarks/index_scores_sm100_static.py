"""Blackwell's index scores without a Blackwell GPU: resources, and lower bounds in cycles.

    PYTHONPATH=tests/emulator python benchmarks/index_scores_sm100_static.py [--write]

Compiles the kernels for sm_100a and reads registers, stack and code from the cubins. Then scores one CTA's run of 64
pages for its twelve tokens in the emulator, with the prefill's kernel (`tcgen05`) and with the one for many tokens
(`mma.sync`), and divides the work by published rates (the emulator's report.py names them). `--write` puts everything
into benchmarks/results/index_scores_sm100_static.json; a test compares the resources.

Columns, in clock cycles of one multiprocessor for one token and one entry with 64 heads: lower bounds of its units, as
in experts_sm100_static.py. `issue` and `alu` count PTX instructions, moves that the assembler removes included. No rate
of `mma.sync` is published for Blackwell; the one assumed is that of `tcgen05`, an upper bound.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from lib.index_scores_sm100_static import KERNELS, RESULTS, UNITS, cycles_of, resources_of

from dsv4_kernels.host import compile_cache


def main() -> None:
    """Print the tables; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    os.environ[compile_cache.FOLDER_VARIABLE] = "off"  # the emulator needs the PTX that compiling gives
    from ptx_emulator import emulated

    document: dict[str, Any] = {"resources": {}, "cycles": {}}
    with emulated():
        for name in KERNELS:
            document["resources"][name] = resources_of(name)
            print(name, document["resources"][name])
    print(f"\n{'one token and entry':20}" + "".join(f"{unit:>9}" for unit in UNITS))
    for name in ("prefill", "many tokens"):
        columns = document["cycles"][name] = cycles_of(name == "prefill")
        print(f"{name:20}" + "".join(f"{columns[unit]:9,.2f}" for unit in UNITS))
    if options.write:
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
