"""Cost of moving one tail, with the row sizes of V4-Flash or V4-Pro.

    python benchmarks/prefix_restore.py [--model flash|pro] [--device cuda|cpu] [--json FILE]

    restore     device slot -> the rings of a request
    from host   pinned host slot -> transit slot -> rings
    snapshot    rings -> device slot (a decoding request fills a page)
    to host     device slot -> pinned host slot (write-through)

Each is checked byte for byte first. Median of the wall time from launch to completion, and of the launch alone, the
cost for the scheduler's thread. Rings and slots are picked at random, so the L2 cache is cold.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_radix_cache.moves import TailRestore, TailWrite, Tier, TierCopy
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.tail_memory import TailMemory
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, HCA_RATIO

FLASH = (0, 0) + (CSA_RATIO, HCA_RATIO) * 20 + (CSA_RATIO,)
PRO = (HCA_RATIO, HCA_RATIO) + (CSA_RATIO, HCA_RATIO) * 29 + (CSA_RATIO,)
REQUESTS, SLOTS, POSITION = 64, 64, 4096


def rings_of(g: PoolGeometry, device: torch.device) -> dict[str, Tensor]:
    """Return the part of a KV pool that a tail touches, by name: [layers, rows, ...]."""
    ring = KVRows.allocate(REQUESTS * g.ring_rows, g.row_format, g.row_dim, g.rope_dim, g.dtype, "meta").storage
    states, csa = REQUESTS * g.state_rows(CSA_RATIO), len(g.layers(CSA_RATIO))
    return {
        "window rings": torch.randint(255, (len(g.ratios), *ring.shape), dtype=ring.dtype, device=device),
        "CSA compressor state": torch.randn(csa, states, 2, 2 * g.row_dim, device=device),
        "indexer compressor state": torch.randn(csa, states, 2, 2 * g.index_dim, device=device),
    }


def main() -> None:
    """Check, measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("flash", "pro"), default="flash")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    geometry = PoolGeometry(
        ratios=FLASH if arguments.model == "flash" else PRO,
        row_format=RowFormat.FP8,
        index_format=RowFormat.INDEX_FP4,
    )
    memory = TailMemory(geometry, rings_of(geometry, device), device, SLOTS, SLOTS)
    rng = random.Random(0)

    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def image(request: int) -> list[Tensor]:
        return [view.clone() for view in memory._rings(request, POSITION)]

    saved = image(5)
    memory.save_rings(5, TailWrite(POSITION, 9))
    memory.issue([], [TierCopy(Tier.HOST, 9, 17)])
    memory.device.window[:, 9] = 0
    memory.restore(6, TailRestore(POSITION, Tier.HOST, 17))
    memory.issue([], [TierCopy(Tier.DEVICE, 11, 17)])
    memory.restore(7, TailRestore(POSITION, Tier.DEVICE, 11))
    synchronise()
    for request in (6, 7):
        assert all(torch.equal(a, b) for a, b in zip(saved, image(request), strict=True)), "the bytes differ"

    def one(call: Callable[[int, int], None]) -> tuple[float, float]:
        launches, totals = [], []
        for _ in range(60):
            request, slot = rng.randrange(REQUESTS), rng.randrange(SLOTS)
            synchronise()
            began = time.perf_counter()
            call(request, slot)
            launched = time.perf_counter()
            synchronise()
            launches.append((launched - began) * 1e6)
            totals.append((time.perf_counter() - began) * 1e6)
        return statistics.median(launches[10:]), statistics.median(totals[10:])

    calls: dict[str, Callable[[int, int], None]] = {
        "restore": lambda request, slot: memory.restore(request, TailRestore(POSITION, Tier.DEVICE, slot)),
        "from host": lambda request, slot: memory.restore(request, TailRestore(POSITION, Tier.HOST, slot)),
        "snapshot": lambda request, slot: memory.save_rings(request, TailWrite(POSITION, slot)),
        "to host": lambda request, slot: memory.issue([], [TierCopy(Tier.HOST, slot, slot)]),
    }
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{arguments.model} on {name}, torch {torch.__version__}: {memory.slot_bytes / 1e6:.2f} MB a tail")
    print(f"{'':10} {'launch us':>10} {'total us':>10} {'GB/s':>8}")
    rows = {}
    for what, call in calls.items():
        launch, total = one(call)
        rows[what] = {"launch_us": round(launch, 1), "total_us": round(total, 1)}
        print(f"{what:10} {launch:10.1f} {total:10.1f} {memory.slot_bytes / total / 1e3:8.1f}")
    result = {"benchmark": "prefix_restore", "model": arguments.model, "device": name, "bytes": memory.slot_bytes}
    line = json.dumps({**result, "torch": torch.__version__, "results": rows})
    if arguments.json:
        arguments.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
