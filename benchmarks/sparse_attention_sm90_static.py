"""What the compiler makes of the Hopper attention kernel: registers, stack, shared memory and code.

    PYTHONPATH=tests/emulator python benchmarks/sparse_attention_sm90_static.py [--write]

Compiles every configuration for sm_90a, with no GPU, and reads the cubins. `--write` puts the numbers into
benchmarks/results/sparse_attention_sm90_static.json, which a test compares.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from cubin import hopper_instructions, resources

from dsv4_kernels import compile_cache
from dsv4_kernels.sparse_attention.sm90 import launch as sm90
from dsv4_kernels.sparse_attention.sm90.cluster import ClusterShared
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import FewHeads, shared_memory
from dsv4_kernels.sparse_attention.sm90.plan import Configuration, Shared, Split

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


def main() -> None:
    """Prints the numbers; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    os.environ[compile_cache.FOLDER_VARIABLE] = "off"  # what comes from disk has no PTX
    from host import emulated

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
