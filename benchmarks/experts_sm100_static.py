"""Blackwell's experts without a Blackwell GPU: resources, and lower bounds in cycles.

    PYTHONPATH=tests/emulator python benchmarks/experts_sm100_static.py [--write]

Compiles every plan for sm_100a and reads registers, stack and code from the cubins. Then runs one work tile of either
product with full K (V4-Flash: hidden 4096, intermediate 2048) in the emulator and divides its work by published rates
(the emulator's report.py names them), as sparse_attention_sm100_static.py does. The largest quotient is a lower bound
of the time of a work tile on one multiprocessor, not a prediction. `--write` puts everything into
benchmarks/results/experts_sm100_static.json, which a test compares.

Columns, in clock cycles of one multiprocessor for one work tile of 128 output rows and all its slots, by a CTA alone
or as one of a pair:

    floor    codes and scales of its weights once, at 1/148 of 8 TB/s: the lower bound of decoding
    tensor   products, as report.py counts them for the padded kind (8 bits a code)
    issue, alu, fma, sfu, tmem, shared, operands, port, l2    as in sparse_attention_sm100_static.py
    bound    the largest of all over the larger of floor and tensor, and its name

A tile of few slots is bound by memory, one of many by the tensor core; the widest here is 96.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from lib.experts_sm100_static import RESULTS, UNITS, cycles_of, resources_of

from dsv4_kernels.host import compile_cache
from dsv4_kernels.moe.sm100.launch import PLANS


def main() -> None:
    """Print the tables; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    os.environ[compile_cache.FOLDER_VARIABLE] = "off"  # the emulator needs the PTX that compiling gives
    from ptx_emulator import emulated

    document: dict[str, Any] = {"resources": {}, "cycles": {}}
    with emulated():
        for plan in PLANS:
            document["resources"][str(plan)] = resources_of(plan)
            print(plan, document["resources"][str(plan)])
    print(f"\n{'one work tile':34}" + "".join(f"{unit:>9}" for unit in (*UNITS, "bound")))
    for plan in PLANS:
        name = f"{plan.numbers.name}, {plan.product.name}, {plan.tokens} slots" + ", pair" * (plan.ctas - 1)
        columns = document["cycles"][name] = cycles_of(plan)
        cells = "".join(f"{columns[unit]:9,.0f}" for unit in UNITS)
        print(f"{name:34}{cells}{columns['bound']:9.2f} {columns['bound by']}")
    if options.write:
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
