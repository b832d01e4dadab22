"""Interleaved timing of calls on a GPU, the card's limits, and its state for a result."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_kernels.device import dependent_launch
from lib.attention_inputs import (
    Inputs,
)
from lib.versions import versions

L2_BYTES_WITHOUT_GPU = 1 << 16
Call = Callable[[], Tensor]
"""Enqueues one call and returns its output [T, H, 512]."""


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of this card."""

    bytes_per_second: float
    flops_per_second: float

    def floor_us(self, inputs: Inputs) -> tuple[float, str]:
        """Return the least time of a call in microseconds, and which limit sets it ("bytes" or "flops")."""
        memory = 1e6 * inputs.bytes() / self.bytes_per_second
        compute = 1e6 * inputs.flops() / self.flops_per_second
        return (memory, "bytes") if memory >= compute else (compute, "flops")


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure copy bandwidth and matrix product rate."""
    size, n = (1 << 30, 8192) if device.type == "cuda" else (1 << 24, 256)
    origin = torch.randn(size // 4, device=device)
    copy = torch.empty_like(origin)
    a, b = torch.randn(2, n, n, device=device).bfloat16()
    product = torch.empty_like(a)
    # A kernel makes the copy: a graph's memcpy node moved 2.7 TB/s on an H200, where our attention over windows moved
    # 3.1.
    calls = {"copy": [lambda: torch.neg(origin, out=copy)], "matmul": [lambda: torch.mm(a, b, out=product)]}
    times = interleaved(calls, device, 0.3 if device.type == "cuda" else 0.0)
    return Ceilings(2e6 * size / times["copy"].median_us, 2e6 * n**3 / times["matmul"].median_us)


@dataclass(frozen=True)
class Timing:
    """Time of one call."""

    median_us: float
    spread: float
    """Interquartile range over the median."""


def interleaved(contenders: dict[str, list[Call]], device: torch.device, seconds: float) -> dict[str, Timing]:
    """Return the times of each contender's calls, whose replays alternate for `seconds` in all and at least five
    times."""
    replays = {name: _prepared(calls, device) for name, calls in contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(next(iter(samples.values()))) < 5:
        for name, replay in replays.items():
            samples[name].append(_elapsed_us(replay, device) / len(contenders[name]))
    timings = {}
    for name, taken in samples.items():
        low, middle, high = statistics.quantiles(taken, n=4)
        timings[name] = Timing(middle, (high - low) / middle)
    return timings


def _prepared(calls: list[Call], device: torch.device) -> Callable[[], object]:
    """Return a function that runs all calls once; on a GPU it replays one graph, captured after a warm-up of the
    calls."""
    if device.type != "cuda":
        return lambda: [call() for call in calls]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _elapsed_us(replay: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        replay()
        return 1e6 * (time.perf_counter() - begin)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def l2_bytes(device: torch.device) -> int:
    """Return the size of the device's L2 cache."""
    if device.type != "cuda":
        return L2_BYTES_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).L2_cache_size


def geometric_mean(values: list[float]) -> float | None:
    """Return the geometric mean, None for an empty list."""
    return round(math.exp(statistics.fmean(map(math.log, values))), 4) if values else None


def gpu_state() -> dict[str, str] | None:
    """Return clocks, power and driver from nvidia-smi, and whether dependent launch is on by default; None without a
    GPU."""
    fields = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "temperature.gpu", "driver_version")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = dict(zip(fields, (part.strip() for part in answer.strip().split(",")), strict=False))
    return found | {dependent_launch.VARIABLE: "on" if dependent_launch.is_on() else "off"}


def heading(benchmark: str, device: torch.device) -> tuple[Ceilings, dict[str, object]]:
    """Print the card's limits. Return them and the head of a result: benchmark, card and its state, versions, no
    cases."""
    ceilings, gpu = measure_ceilings(device), torch.cuda.get_device_name(device)
    print(f"{gpu}: {ceilings.bytes_per_second / 1e12:.2f} TB/s, {ceilings.flops_per_second / 1e12:.0f} TFLOP/s in bf16")
    return ceilings, {
        "benchmark": benchmark,
        "gpu": gpu,
        "copy_tb_s": round(ceilings.bytes_per_second / 1e12, 3),
        "versions": versions(),
        "state": gpu_state(),
        "cases": [],
    }
