"""Concurrent launches of the attention on a GPU, as programs: their failures are hangs.

test_side_by_side.py runs each of `SCENARIOS` in a process of its own, which it can end:

    python -c "import sys; sys.path.insert(0, 'tests'); from ops import side_by_side; side_by_side.main(NAME, KERNEL)"

CTAs of a launch that splits keys wait for each other, so all of them must get onto the GPU in the end. They share
scratch memory and counters (dsv4_kernels.sparse_attention.scratch), so no other launch may use the same ones at the
same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch
from ops.attention_cases import Case, Spec, build
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.norm import rms_norm
from dsv4_kernels.sparse_attention.scratch import Scratch

NOT_PROMISED = 77
"""Exit code of a scenario that docs/limits.md does not promise."""
Result = tuple[Tensor, Tensor]

CASES = {
    "whole": Spec(tokens=300, entry_lengths=(512, 70)),
    "parts": Spec(tokens=96, entry_lengths=(1024, 130, 700), split_keys=128),
    "pieces": Spec(tokens=16, entry_lengths=(1024,), split_keys=1152),
    "few_tokens": Spec(tokens=2, entry_lengths=(512,)),
    "two_blocks_of_heads": Spec(tokens=24, heads=128, entry_lengths=(1024, 300), split_keys=256),
}
"""Cases, in order: more work items than CTAs; parts of tokens, more than CTAs; pieces of tokens for as many CTAs as
there are; clusters on Hopper; pairs of CTAs on Blackwell."""


# ---- a kernel that occupies multiprocessors

HOLD = """
.version 7.8
.target sm_90
.address_size 64

// Every CTA says that it runs, and goes on until it is released.
.visible .entry hold(.param .u64 started, .param .u64 released)
{
    .reg .pred %p0;
    .reg .b32 %r<3>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd0, [started];
    ld.param.u64 %rd1, [released];
    mov.u32 %r0, %ctaid.x;
    mul.wide.u32 %rd2, %r0, 4;
    add.s64 %rd3, %rd0, %rd2;
    mov.u32 %r1, 1;
    st.volatile.global.u32 [%rd3], %r1;
WAIT:
    ld.volatile.global.u32 %r2, [%rd1];
    setp.eq.u32 %p0, %r2, 0;
    @%p0 bra WAIT;
    ret;
}
"""


def _value(answer: tuple) -> object:
    """Return the value in an answer of the driver's API."""
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"the CUDA driver answers {status}")
    return values[0] if values else None


def num_multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


@contextlib.contextmanager
def held(multiprocessors: int) -> Iterator[Callable[[], None]]:
    """Occupy `multiprocessors` multiprocessors with another kernel until the function that it yields is called, or the
    block ends.

    Each of its CTAs uses all shared memory of a multiprocessor, so no CTA with shared memory can share it.
    """
    from cuda.bindings import driver

    torch.cuda.synchronize()
    module = _value(driver.cuModuleLoadData(HOLD.encode() + b"\0"))
    function = _value(driver.cuModuleGetFunction(module, b"hold"))
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    num_bytes = int(_value(driver.cuDeviceGetAttribute(attribute, 0)))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _value(driver.cuFuncSetAttribute(function, most, num_bytes))
    started = torch.zeros(multiprocessors, dtype=torch.int32).pin_memory()
    released = torch.zeros(1, dtype=torch.int32).pin_memory()
    stream = torch.cuda.Stream()
    arguments = (started.data_ptr(), released.data_ptr()), (ctypes.c_void_p, ctypes.c_void_p)
    grid, block = (multiprocessors, 1, 1), (32, 1, 1)
    handle = driver.CUstream(stream.cuda_stream)
    _value(driver.cuLaunchKernel(function, *grid, *block, num_bytes, handle, arguments, 0))
    try:
        limit = time.monotonic() + 20
        while not started.all():
            assert time.monotonic() < limit, f"{int(started.sum())} of {multiprocessors} multiprocessors are held"
        yield lambda: released.fill_(1)
    finally:
        released.fill_(1)
        stream.synchronize()


# ---- scenarios


def outputs(case: Case, kernel: str, out: Tensor) -> Result:
    return case.run(impl=kernel, out=out)


def expect(results: list[Result], expected: Result) -> None:
    for result in results:
        assert all(map(same_bits, result, expected))


def prepared(names: list[str], kernel: str, priorities: tuple[int, ...] = (0, 0)) -> list[tuple]:
    """Return (case, its result alone, a stream on which it has run), so that later calls neither load nor allocate
    anything that would wait for the device."""
    made = []
    for seed, (name, priority) in enumerate(zip(names, priorities, strict=False)):
        case = build(CASES[name], "cuda", seed)
        expected = tuple(x.clone() for x in outputs(case, kernel, torch.empty_like(case.q)))
        torch.cuda.synchronize()
        stream = torch.cuda.Stream(priority=priority)
        with torch.cuda.stream(stream):
            warm = [outputs(case, kernel, torch.empty_like(case.q)) for _ in range(2)]
        torch.cuda.synchronize()
        expect(warm, expected)
        made.append((case, expected, stream))
    return made


def beside_a_kernel_that_holds_the_gpu(kernel: str) -> None:
    """Some CTAs run at once, others when the multiprocessors are free again."""
    for name in CASES:
        ((case, expected, stream),) = prepared([name], kernel)
        for free in (0, 1, num_multiprocessors() // 2):
            out = torch.empty_like(case.q)
            torch.cuda.synchronize()
            with held(num_multiprocessors() - free) as release:
                with torch.cuda.stream(stream):
                    result = outputs(case, kernel, out)
                time.sleep(0.2)
                release()
                stream.synchronize()
            expect([result], expected)


def two_launches_beside_a_kernel_that_holds_the_gpu(kernel: str, priorities: tuple[int, int] = (0, 0)) -> None:
    """The first launch's CTAs occupy half of the GPU; then the other half, for which the second launch's CTAs wait, is
    released."""
    for first, second in (("parts", "parts"), ("pieces", "parts"), ("parts", "pieces"), ("pieces", "pieces")):
        cases = prepared([first, second], kernel, priorities)
        outs = [torch.empty_like(case.q) for case, _, _ in cases]
        torch.cuda.synchronize()
        with held(num_multiprocessors() // 2) as release:
            results = []
            for (case, _, stream), out in zip(cases, outs, strict=True):
                with torch.cuda.stream(stream):
                    results.append(outputs(case, kernel, out))
                time.sleep(0.2)
            release()
            torch.cuda.synchronize()
        for result, (_, expected, _) in zip(results, cases, strict=True):
            expect([result], expected)


def a_launch_that_overtakes_another(kernel: str) -> None:
    """The second stream is preferred: the GPU gives it free multiprocessors before the first launch's other CTAs."""
    two_launches_beside_a_kernel_that_holds_the_gpu(kernel, priorities=(0, -1))


def captured(case: Case, kernel: str, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Result, Scratch]:
    """Return a graph of one call, its outputs, and the memory through which its CTAs meet."""
    given: list[Scratch] = []
    original = Scratch.on

    def on(device: torch.device, num_bytes: int) -> Scratch:
        given.append(original(device, num_bytes))
        return given[-1]

    out, graph = torch.empty_like(case.q), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with mock.patch.object(Scratch, "on", staticmethod(on)), torch.cuda.graph(graph, stream=stream):
        result = outputs(case, kernel, out)
    assert len(given) == 1, f"the call divides no keys, or in {len(given)} launches"
    return graph, result, given[0]


def two_graphs(kernel: str) -> list[tuple]:
    """Return (graph, its outputs, its scratch memory, expected results, its stream, its case), of calls that split
    keys. A replay reads the case's tensors, which must not be freed before it."""
    made = []
    for case, expected, stream in prepared(["parts", "two_blocks_of_heads"], kernel):
        made.append((*captured(case, kernel, stream), expected, stream, case))
    assert made[0][2].slots.data_ptr() != made[1][2].slots.data_ptr()
    return made


def two_graphs_one_after_the_other(kernel: str) -> None:
    """Graphs on streams of their own, each waiting for the other by an event, whatever memory they share."""
    graphs, before = two_graphs(kernel), None
    for _ in range(20):
        copies = []
        for graph, result, _, expected, stream, _ in graphs:
            with torch.cuda.stream(stream):
                if before is not None:
                    stream.wait_event(before)
                graph.replay()
                copies.append((tuple(x.clone() for x in result), expected))
                before = stream.record_event()
        torch.cuda.synchronize()
        for result, expected in copies:
            expect([result], expected)


def two_graphs_at_once(kernel: str) -> None:
    """Right if the graphs have counters of their own; otherwise docs/limits.md excludes it."""
    graphs = two_graphs(kernel)
    if graphs[0][2].counters.data_ptr() == graphs[1][2].counters.data_ptr():
        print("graphs that divide keys share counters")
        sys.exit(NOT_PROMISED)
    for _ in range(40):
        for graph, _, _, _, stream, _ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for _, result, _, expected, _, _ in graphs:
            expect([result], expected)


def a_graph_beside_calls(kernel: str) -> None:
    """Calls on another stream have counters and scratch memory of their own."""
    names = ["parts", "two_blocks_of_heads"]
    (first, expected_first, stream_1), (second, expected_second, stream_2) = prepared(names, kernel)
    graph, result, scratch = captured(first, kernel, stream_1)
    with torch.cuda.stream(stream_2):
        of_calls = Scratch.on(torch.device("cuda", torch.cuda.current_device()), 1)
    assert scratch.counters.data_ptr() != of_calls.counters.data_ptr()
    assert scratch.slots.data_ptr() != of_calls.slots.data_ptr()
    outs = [torch.empty_like(second.q) for _ in range(3)]
    for _ in range(40):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream_1):
            graph.replay()
        with torch.cuda.stream(stream_2):
            results = [outputs(second, kernel, out) for out in outs]
        torch.cuda.synchronize()
        expect([result], expected_first)
        expect(results, expected_second)


def chain(case: Case, rows: Tensor, kernel: str) -> Tensor:
    """Return norms and attention in turns, each reading the result before: [T * H, 512]."""
    for _ in range(6):
        rows = rms_norm(rows, None, 1e-6, kernel)
        out = torch.empty(case.q.shape, dtype=rows.dtype, device=rows.device)
        rows = replace(case, q=rows.view(case.q.shape)).run(impl=kernel, out=out).view(rows.shape)
    return rows


def fork_and_join(case: Case, rows: Tensor, others: Tensor, kernel: str, side: torch.cuda.Stream) -> Result:
    """Run a chain on the current stream, norms on another one, and a norm of either after both."""
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(40):
            others = rms_norm(others, None, 1e-6, kernel)
    rows = chain(case, rows, kernel)
    current.wait_stream(side)
    return rms_norm(rows, None, 1e-6, kernel), rms_norm(others, None, 1e-6, kernel)


def launches_that_begin_early(kernel: str) -> None:
    """A graph with two streams: attention with and without CTAs that wait for each other, between kernels that start
    while the one before runs; also with another kernel on half of the GPU at first."""
    for name in ("pieces", "parts", "few_tokens", "whole"):
        case, side = build(CASES[name], "cuda"), torch.cuda.Stream()
        rows = case.q.reshape(-1, case.q.shape[2]).contiguous()
        others = torch.randn(4096, 512, device="cuda").bfloat16()
        with dependent_launch.switched(False):
            expected = tuple(x.clone() for x in fork_and_join(case, rows, others, kernel, side))
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with dependent_launch.switched(True):
            with torch.cuda.stream(stream):
                warm = fork_and_join(case, rows, others, kernel, side)
            torch.cuda.synchronize()
            expect([warm], expected)
            with torch.cuda.graph(graph, stream=stream):
                result = fork_and_join(case, rows, others, kernel, side)
        for _ in range(50):
            for x in result:
                x.fill_(float("nan"))
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            expect([result], expected)
        with held(num_multiprocessors() // 2) as release:
            with torch.cuda.stream(stream):
                graph.replay()
            time.sleep(0.2)
            release()
            torch.cuda.synchronize()
        expect([result], expected)


def two_gpus(kernel: str) -> None:
    """Each GPU has scratch memory and counters of its own; a stream's number is the same on both."""
    if torch.cuda.device_count() < 2:
        print("there is one GPU")
        sys.exit(NOT_PROMISED)
    cases = [build(CASES["parts"], f"cuda:{index}") for index in range(2)]
    results: list[list[Result]] = [[], []]
    for _ in range(10):
        for index, case in enumerate(cases):
            with torch.cuda.device(index):
                results[index].append(outputs(case, kernel, torch.empty_like(case.q)))
    for index in range(2):
        torch.cuda.synchronize(index)
    expected = tuple(x.cpu() for x in results[0][0])
    for result in results[0] + results[1]:
        expect([tuple(x.cpu() for x in result)], expected)


SCENARIOS: dict[str, Callable[[str], None]] = {
    scenario.__name__: scenario
    for scenario in (
        beside_a_kernel_that_holds_the_gpu,
        two_launches_beside_a_kernel_that_holds_the_gpu,
        a_launch_that_overtakes_another,
        two_graphs_one_after_the_other,
        two_graphs_at_once,
        a_graph_beside_calls,
        launches_that_begin_early,
        two_gpus,
    )
}


def main(name: str, kernel: str) -> None:
    SCENARIOS[name](kernel)
    print("done")
