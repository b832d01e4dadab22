"""Resources, instruction counts and emulated cycles of Hopper's attention kernels, without a GPU."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

from dsv4_kernels.kv_layout import ROW_BYTES, ROW_DIM, KVRows, RowFormat
from dsv4_kernels.sparse_attention.problem import Problem
from dsv4_kernels.sparse_attention.sm90 import launch as sm90
from dsv4_kernels.sparse_attention.sm90.cluster import ClusterShared
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import FewHeads, shared_memory
from dsv4_kernels.sparse_attention.sm90.plan import Configuration, Shared, Split
from dsv4_kernels.sparse_attention.split import STEP_KEYS
from lib.cubin import hopper_instructions, resources

RESULTS = Path(__file__).resolve().parents[1] / "results" / "sparse_attention_sm90_static.json"


def static_numbers(configuration: Configuration | FewHeads) -> dict[str, int]:
    """Return the numbers of one configuration. Call it inside `emulated(arch="sm_90a")`, which keeps PTX and cubins.

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
"""Entries of the two tokens whose difference is counted."""


def bounds_of_a_step(heads: int, row_format: RowFormat) -> dict[str, float]:
    """Return each unit's cycles for a step of 128 listed keys, for a token that is not split."""
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
