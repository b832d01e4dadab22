"""One small call of each kernel with fixed inputs: the emulator's results, as committed digests, and a GPU's.

    PYTHONPATH=tests/lib:tests/emulator:benchmarks python -m ops.emulated_results --write
        computes every case in the emulator, for both generations, and writes emulator/results/kernel_results.json
    PYTHONPATH=… python -m ops.emulated_results --case NAME --kernel sm90
        runs one case on this machine's GPU; the last line of the output is JSON: an `Outcome`

Inputs are made on a CPU, so they have the same bits on every device. A case that is `exact` has no approximate
instruction and no product of the tensor core: a GPU must give the emulator's bits. Other results are compared with the
reference, within the case's tolerance; whether they have the emulator's bits is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from lib.row_kernel_works import WORKS
from ops.attention_cases import CASES as ATTENTION
from ops.attention_cases import build
from ops.compressor_cases import forward
from ops.compressor_store_cases import CHUNKS, SETTINGS, moved
from ops.experts_cases import LIMIT, packed_nvfp4_experts
from ops.experts_cases import Case as ExpertsCase
from ops.fp8_weight_cases import tokens_of
from ops.fp8_weight_cases import weight as fp8_weight
from ops.hyper_connection_cases import inputs as boundary_inputs
from ops.indexer_cases import Case as IndexerCase
from ops.row_kernels import ARCH, KERNELS
from step_model.small_calls import modelled_us
from torch import Tensor

from dsv4_kernels import moe, registry
from dsv4_kernels.compressor import compress_store
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host.arch import ARCHITECTURES
from dsv4_kernels.hyper_connection import hc_boundary
from dsv4_kernels.indexer import index_topk
from dsv4_kernels.kv_layout import PAGE_ROWS, KVRows, RowFormat
from dsv4_kernels.linear import (
    HeadRotation,
    grouped_linear,
    grouped_linear_fp8_weight,
    linear_fp8,
    linear_fp32,
)
from dsv4_kernels.quant import fp8_quantise
from dsv4_kernels.step_mapping import GroupLayout, StepLayout, step_mapping
from dsv4_kernels.unpack import Pages, unpack_pages

RESULTS = Path(__file__).parents[2] / "emulator" / "results" / "kernel_results.json"
TOKENS = 3
CALLS, REPLAYS = 20, 5
"""Calls in the graph that is timed, one after the other as in a forward, and replays of it."""
IN_PLACE = ("inverse_rope", "norm_rope_store", "compress_store")
Call = Callable[[str], Sequence[Tensor]]
"""Runs the implementation of that name and returns its results."""


@dataclass(frozen=True)
class Case:
    """One call."""

    op: str
    make: Callable[[torch.device], Call]
    exact: bool = False
    tolerance: float = 0.01
    """Most relative distance of a result from the reference's, in the Frobenius norm."""


@dataclass(frozen=True)
class Outcome:
    """The findings of one case on a GPU."""

    case: str
    kernel: str
    distance: float
    """Largest relative distance of a result from the reference's."""
    same_bits: bool | None
    """Whether the results have the emulator's bits; None if it has not computed this case."""
    repeated: bool
    """Whether a second call, and a replayed graph, had the bits of the first."""
    microseconds: float
    """One of CALLS calls in a CUDA graph."""
    modelled: float | None
    """The same by the model of time (`benchmarks/step_model`); None if the model has no counts of the kernel."""
    ok: bool
    said: str


def row_case(name: str) -> Callable[[torch.device], Call]:
    return lambda device: WORKS[name](TOKENS, device).call


def boundary(device: torch.device) -> Call:
    made = boundary_inputs(TOKENS, 4096).to(device)
    return lambda impl: list(hc_boundary(*made.boundary(), impl=impl))


def addresses_of_a_step(device: torch.device) -> Call:
    """Addresses of a verify step of three requests with five tokens each, by Flash's layout."""
    layout = StepLayout(256, 128, 256, (GroupLayout(4, 2, 16), GroupLayout(128, 1, 256)))
    pages = 1 + torch.randperm(21, generator=torch.Generator().manual_seed(0)).view(7, 3, 1)
    table = (256 * pages + torch.arange(256)).view(7, -1).int().to(device)
    first, slots = torch.tensor([250, 509, 4], device=device), torch.tensor([1, 5, 2], device=device)

    def call(impl: str) -> list[Tensor]:
        mapping = step_mapping(first, slots, table, 5, 3, 7, layout, impl=impl)
        groups = [x for group in mapping.groups for x in group]
        return [x for x in (*mapping, *groups) if isinstance(x, Tensor)]

    return call


def unpacked_pages(device: torch.device) -> Call:
    """Rows of three pages of 64, in bf16."""
    rows = KVRows.allocate(5 * 64, RowFormat.FP8, 512, 64, torch.bfloat16, "cpu", 0.0)
    rows.scatter(torch.arange(5 * 64), noise(5 * 64, 512))
    pages = [Pages(replace(rows, storage=rows.storage.to(device)), torch.tensor([3, 0, 2], device=device), 64)]
    storage = torch.full((3 * 64, 512), math.nan, dtype=torch.bfloat16, device=device)
    return lambda impl: [unpack_pages(pages, storage, impl=impl)[0].storage]


def fp32_product(device: torch.device) -> Call:
    x, weight = noise(TOKENS, 4096).to(device), (noise(256, 4096) / 64).to(device)
    return lambda impl: [linear_fp32(x, weight, impl=impl)]


def grouped_product(device: torch.device) -> Call:
    x, weight = noise(TOKENS, 2, 4096).to(device), (noise(2, 1024, 4096) / 64).to(device)
    return lambda impl: [grouped_linear(x, weight, impl=impl)]


def fp8_product(device: torch.device) -> Call:
    codes, scales = (part.to(device) for part in fp8_quantise(noise(TOKENS, 4096), 128, False, impl="ref"))
    weight = (noise(512, 4096) / 64).to(torch.float8_e4m3fn).to(device)
    generator = torch.Generator().manual_seed(1)
    weight_scale = torch.exp2(torch.randint(-3, 4, (4, 32), generator=generator).float()).to(device)
    return lambda impl: [linear_fp8(codes, scales, weight, weight_scale, impl=impl)]


def fp8_weight_product(device: torch.device) -> Call:
    x, rotation = tokens_of(TOKENS, 2, 4096)
    x, (codes, scale) = x.to(device), (part.to(device) for part in fp8_weight(2, 256, 4096))
    rotation = HeadRotation(rotation.positions.to(device), rotation.frequencies.to(device), rotation.head_dim)
    return lambda impl: grouped_linear_fp8_weight(x, codes, scale, rotation, True, impl=impl)


def choice_of_entries(prefill: bool) -> Callable[[torch.device], Call]:
    """The best 64 of up to 500 entries, for tokens of two requests."""

    def make(device: torch.device) -> Call:
        case = IndexerCase.of((500, 200), [(0, 500 - i) for i in range(10)] + [(1, 190 + i) for i in range(4)])
        keys = replace(case.keys, storage=case.keys.storage.to(device))
        q, weights, table, *of_tokens = (
            x.to(device) for x in (case.q, case.head_weights, case.page_table, case.request, case.visible)
        )
        arguments = q, weights, keys, table, PAGE_ROWS, *of_tokens, 64
        return lambda impl: [index_topk(*arguments, prefill=prefill, impl=impl)]

    return make


def experts(device: torch.device) -> Call:
    x, weights, ids, packed = ExpertsCase(TOKENS, chosen=2, experts=4, d=512, channels=256).inputs()
    matrices = (packed.w13, packed.w13_scale, packed.w2, packed.w2_scale)
    plain = moe.Mxfp4Experts(*(matrix.to(device) for matrix in matrices))
    arranged = {"sm90": plain.for_hopper(), "sm100": plain.tiled(), "ref": plain}
    x, weights, ids = x.to(device), weights.to(device), ids.to(device)
    return lambda impl: [moe.mxfp4_experts_forward(x, weights, ids, arranged[impl], LIMIT, impl=impl)]


def nvfp4_experts(device: torch.device) -> Call:
    x, weights, ids, _ = ExpertsCase(TOKENS, chosen=2, experts=4, d=512, channels=256).inputs()
    packed = packed_nvfp4_experts(4, 512, 256)
    plain = moe.Nvfp4Experts(**{name: x.to(device) for name, x in vars(packed).items() if isinstance(x, Tensor)})
    arranged = {"sm100": plain.tiled(), "ref": plain}
    x, weights, ids = x.to(device), weights.to(device), ids.to(device)
    return lambda impl: [moe.nvfp4_experts_forward(x, weights, ids, arranged[impl], LIMIT, impl=impl)]


def attention(name: str) -> Callable[[torch.device], Call]:
    def make(device: torch.device) -> Call:
        case = build(ATTENTION[name], str(device), 0)
        return lambda impl: [case.run(impl=impl)]

    return make


def stored_entries(device: torch.device) -> Call:
    """Entries and indexer keys that five requests of a CSA layer close, and the raw rows that they keep."""
    f = moved(forward(SETTINGS["csa"], CHUNKS["csa"]), device)
    results = [x for c in f.compressions for x in (c.table.storage, c.state)]
    for x in results:
        x.nan_to_num_(0.0)  # rows that no request has

    def call(impl: str) -> list[Tensor]:
        compress_store(f.groups, f.compressions, torch.bfloat16, impl)
        return results

    return call


def noise(*shape: int) -> Tensor:
    """bf16, the same for a shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


CASES: dict[str, Case] = {
    "fp8_quantise": Case("fp8_quantise", row_case("fp8_quantise"), exact=True),
    "inverse_rope": Case("apply_rope_in_place", row_case("inverse_rope")),
    "rms_norm": Case("rms_norm", row_case("rms_norm_4096")),
    "rms_norm_fp8": Case("rms_norm_fp8", row_case("rms_norm_fp8"), tolerance=0.05),
    "swiglu": Case("fused_swiglu", row_case("swiglu")),
    "swiglu_fp8": Case("swiglu_fp8", row_case("swiglu_fp8"), tolerance=0.05),
    "route_topk": Case("route_topk_logits", row_case("route_topk")),
    "route_hash": Case("route_hash_logits", row_case("route_hash")),
    "step_mapping": Case("step_mapping", addresses_of_a_step, exact=True, tolerance=0.0),
    "unpack_pages": Case("unpack_pages", unpacked_pages, exact=True, tolerance=0.0),
    "norm_rope_store": Case("norm_rope_store", row_case("norm_rope_store"), tolerance=0.05),
    "compress_store": Case("compress_store", stored_entries),
    "hc_boundary": Case("hc_boundary", boundary),
    "linear_fp32": Case("linear_fp32", fp32_product),
    "grouped_linear": Case("grouped_linear", grouped_product),
    "linear_fp8": Case("linear_fp8", fp8_product),
    "wo_a_fp8": Case("grouped_linear_fp8_weight", fp8_weight_product, tolerance=0.05),
    "index_topk": Case("index_topk", choice_of_entries(False)),
    "index_topk_prefill": Case("index_topk", choice_of_entries(True)),
    "mxfp4_experts": Case("mxfp4_experts_forward", experts),
    "nvfp4_experts": Case("nvfp4_experts_forward", nvfp4_experts),
    "attention": Case("sparse_attention", attention("lengths_of_both-fp8")),
}


def has_kernel(name: str, kernel: str) -> bool:
    """Whether the op of a case has this implementation."""
    return kernel in registry.available(CASES[name].op)


@contextlib.contextmanager
def made_on_a_cpu() -> Iterator[None]:
    """Random numbers are drawn on a CPU and then moved to the device that is asked for."""

    def on_cpu(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(*args: object, device: object = None, **options: object) -> Tensor:
            return draw(*args, **options).to(device or "cpu")

        return drawn

    with contextlib.ExitStack() as patches:
        for name in ("randn", "rand", "randint"):
            patches.enter_context(mock.patch.object(torch, name, on_cpu(getattr(torch, name))))
        torch.manual_seed(0)
        yield


def made(name: str, device: torch.device) -> Call:
    """The call of a case with its inputs."""
    with made_on_a_cpu():
        return CASES[name].make(device)


def digest(results: Sequence[Tensor]) -> str:
    """Hash of the bytes of all results, without the sign of zeros."""
    found = hashlib.sha256()
    for result in results:
        result = result.detach().cpu().contiguous()
        if result.is_floating_point() and result.itemsize > 1:  # a code keeps its sign
            result = result + torch.zeros((), dtype=result.dtype)
        found.update(f"{result.dtype}{tuple(result.shape)}".encode())
        found.update(result.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]


def emulated_digest(name: str, kernel: str, arch: str | None = None) -> str:
    """The digest of a case's results in the emulator, with its checks on; `arch`: "sm_103a" for B300."""
    from ptx_emulator import Checks, emulated

    call, arch = made(name, torch.device("cpu")), arch or ARCH[kernel]
    by_name = mock.patch.object(registry, "chosen", _also_on_a_cpu)
    for_arch = mock.patch.dict(ARCHITECTURES, {kernel: arch})
    with by_name, for_arch, mock.patch.object(registry, "_resolved", {}), dependent_launch.switched(False):
        with emulated(checks=Checks.strict(), arch=arch) as device:
            results = call(kernel)
        assert device.reports, f"{name}: no kernel was launched"
        return digest(results)


def _also_on_a_cpu(op: str, device: object, dtype: object, impl: str | None = None) -> registry.Implementation:
    """The implementation of that name on any device; the reference if there is no name."""
    return registry._implementation(op, impl or "ref")


def run_on_gpu(name: str, kernel: str) -> Outcome:
    """Compare a case's results with the reference, a second call, a graph and the emulator; and time it."""
    case, device = CASES[name], torch.device("cuda", torch.cuda.current_device())
    poison(device)
    first = [x.clone() for x in made(name, device)(kernel)]
    again = [x.clone() for x in made(name, device)(kernel)]
    call, graph = made(name, device), torch.cuda.CUDAGraph()
    call(kernel)
    torch.cuda.synchronize()
    wanted = [x.clone() for x in made(name, device)("ref")]
    with torch.cuda.graph(graph):
        made_in_graph = call(kernel)
    graph.replay()
    torch.cuda.synchronize()
    replayed = digest(made_in_graph)
    microseconds = round(measured_us(lambda: call(kernel)), 2)
    modelled = modelled_us(name, torch.cuda.get_device_capability(device))
    distance = max(_distance(a, b) for a, b in zip(first, wanted, strict=True))
    known = json.loads(RESULTS.read_text()).get(kernel, {}).get(name) if RESULTS.exists() else None
    same = None if known is None else known == digest(first)
    # A second call of an op in place has other inputs; a graph may return fewer results.
    comparable = name not in IN_PLACE and len(made_in_graph) == len(first)
    repeated = digest(first) == digest(again) and (not comparable or replayed == digest(first))
    faults = [
        text
        for wrong, text in (
            (not math.isfinite(distance) or distance > case.tolerance, f"off by {distance:.3g} from the reference"),
            (not repeated, "a second call or a replayed graph had other bits"),
            (case.exact and same is False, "not the emulator's bits"),
        )
        if wrong
    ]
    return Outcome(name, kernel, distance, same, repeated, microseconds, modelled, not faults, "; ".join(faults))


def measured_us(call: Callable[[], object]) -> float:
    """Return the microseconds of one of CALLS calls in a CUDA graph, the mean of REPLAYS replays after one more."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / (REPLAYS * CALLS)


def poison(device: torch.device) -> None:
    """Fill most of the free memory with NaN, from which later allocations of this process are taken."""
    free, _ = torch.cuda.mem_get_info(device)
    torch.empty(min(free // 2, 16 << 30), dtype=torch.uint8, device=device).fill_(0xFF)


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--kernel", choices=KERNELS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(asdict(run_on_gpu(options.case, options.kernel))))
        return
    os.environ["DSV4_KERNEL_CACHE"] = "off"  # the emulator needs the PTX that compiling gives
    found = {
        kernel: {name: emulated_digest(name, kernel) for name in CASES if has_kernel(name, kernel)}
        for kernel in KERNELS
    }
    print(json.dumps(found, indent=1))
    if options.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
