"""The boundary that sums over experts first, in the emulator and on a GPU: the bits of the sum and a boundary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ops.boundaries_in_emulator import Boundary, check, check_schedules
from ops.early_launches import a_missing_wait_is_noticed, launched_early
from ops.hyper_connection_cases import HC_EPS, ITERATIONS, NORM_EPS, Inputs, expert_rows, inputs
from ops.memory_layout import far_apart, last_of_many, use_in_place
from ops.row_kernels import ARCH
from torch import Tensor

from dsv4_kernels.host.expert_rows import ExpertRows
from dsv4_kernels.host.joint_launch import MOST_TOKENS
from dsv4_kernels.host.mailboxes import Plan
from dsv4_kernels.hyper_connection import hc_boundary

DIM = 1024


@pytest.fixture(params=["sm90", pytest.param("sm100", marks=pytest.mark.slow)])
def kernel(request: pytest.FixtureRequest, compiled_here: None) -> str:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    return request.param


def boundary(
    kernel: str,
    i: Inputs,
    tokens: int | None,
    in_place: tuple[Tensor, ...] = (),
    constant: tuple[Tensor, ...] = (),
    **options: object,
) -> tuple[Tensor, ...]:
    """Results of one launch with `tokens` tokens a group; only tensors of `constant` and fn may be read ahead."""
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.hyper_connection import gpu

    arguments = (i.streams, (i.y, i.post, i.comb), (i.fn, i.base, i.scale), i.weight, NORM_EPS, HC_EPS, ITERATIONS)
    with emulated(checks=Checks.strict(), arch=ARCH[kernel], **options) as device:
        use_in_place(device, *in_place)
        for tensor in (i.fn, *constant):
            device.memory.constant(tensor)
        made = gpu.run(kernel, "test", 24, *arguments, tokens, fp8=True)
    assert len(device.reports) == 1 and not device.reports[0].warnings
    return made


def case(num_tokens: int) -> tuple[Inputs, Inputs]:
    """(inputs whose y are rows of experts, the same with the sum)."""
    i, rows = inputs(num_tokens, DIM, seed=num_tokens), expert_rows(num_tokens, DIM, seed=num_tokens)
    return i._replace(y=rows), i._replace(y=rows.total())


@pytest.mark.parametrize(
    ("num_tokens", "tokens"),
    [(1, 1), (3, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 1), (5, 4), (9, 8), (33, None)))],
)
def test_the_bits_of_a_sum_and_a_boundary(kernel: str, num_tokens: int, tokens: int | None) -> None:
    """Groups of every size, full and not: rows in the order of rising experts, the shared expert's after rounding. On
    Blackwell also with products interleaved, in the plan for 33 tokens."""
    i, of_sum = case(num_tokens)
    check(boundary(kernel, of_sum, tokens), [boundary(kernel, i, tokens)])


def test_bits_do_not_depend_on_the_batch(kernel: str) -> None:
    """A token has the same bits alone, in another place, and in groups of another size."""
    i, _ = case(5)
    together = boundary(kernel, i, 2)
    for order, tokens in ([3], 1), ([4, 3, 0], 2):
        y = replace(i.y, experts=i.y.experts[order], slot_of_pair=i.y.slot_of_pair[order], shared=i.y.shared[order])
        few = boundary(kernel, i._replace(y=i.streams).of(order)._replace(y=y), tokens)
        check(tuple(result[order] for result in together), [few])


@pytest.mark.parametrize(
    ("on", "ranks", "num_tokens", "tokens", "dtype"),
    [
        ("sm90", 2, 3, 2, torch.float32),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (
                ("sm90", 4, 1, 1, torch.bfloat16),
                ("sm90", 2, 3, 2, torch.bfloat16),
                ("sm90", 2, 5, 4, torch.float32),
                ("sm100", 4, 1, 1, torch.float32),
                ("sm100", 2, 3, 2, torch.bfloat16),
                ("sm100", 2, 9, 8, torch.bfloat16),
            )
        ),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
@pytest.mark.usefixtures("compiled_here")
def test_a_part_is_a_sum_over_experts(on: str, ranks: int, num_tokens: int, tokens: int, dtype: torch.dtype) -> None:
    """Each rank sums the rows of its experts, sends the sum, and gets the bits of the boundary of all sums."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    parts = [expert_rows(num_tokens, DIM, dtype, seed) for seed in range(ranks)]
    call = Boundary(on, ranks, num_tokens, tokens, dtype, True, parts=parts)
    check_schedules(on, ranks, call)


def test_rows_beyond_32_bits(kernel: str) -> None:
    """Slots after 2**32 bytes of other slots, and rows of the shared expert that lie 2**32 bytes apart."""
    i, of_sum = case(4)
    before = (1 << 32) // (2 * DIM)
    rows, shared = last_of_many(i.y.rows, before + len(i.y.rows)), far_apart(i.y.shared)
    slots = torch.where(i.y.slot_of_pair < 0, -1, i.y.slot_of_pair + before).int()
    far = i._replace(y=replace(i.y, rows=rows, slot_of_pair=slots, shared=shared))
    check(boundary(kernel, of_sum, 2), [boundary(kernel, far, 2, in_place=(rows, shared))])


def test_it_may_begin_early(kernel: str) -> None:
    """Before the wait it reads fn only, and the lists if it is told to."""
    i, of_sum = case(3)
    expected = boundary(kernel, of_sum, 2)
    with launched_early():
        check(expected, [boundary(kernel, i, 2)])
    lists = (i.y.experts, i.y.slot_of_pair)
    with launched_early(read_ahead={"hyper_connection": ("LDG",) * 8}):
        check(expected, [boundary(kernel, i._replace(y=replace(i.y, reads_ahead=True)), 2, constant=lists)])


def test_lists_that_are_read_ahead_must_be_complete(kernel: str) -> None:
    from ptx_emulator import EmulationError

    i, _ = case(3)
    with pytest.raises(EmulationError, match=r"reads int32\[3, 4\]"):
        boundary(kernel, i._replace(y=replace(i.y, reads_ahead=True)), 2)


def test_a_missing_wait_is_noticed(kernel: str) -> None:
    with a_missing_wait_is_noticed():
        boundary(kernel, case(3)[0], 2)


@pytest.mark.parametrize("ranks", [0, 4])
@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_is_compiled_ahead(arch: str, fp32: bool, ranks: int) -> None:
    """The plans of all calls of few tokens that sum over experts, and no other."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.hyper_connection import choice, gpu

    model = SimpleNamespace(
        hidden_size=4096,
        quantises_inputs=True,
        fewest_own_rows=0,
        experts_per_token=6,
        experts_sum_fp32=fp32 and ranks > 0,
        leaves_expert_rows=True,
        peer_sum_ranks=ranks,
        peer_boundary_tokens=64 if ranks else 0,
    )
    jobs = gpu.parts_compile_jobs(model, arch) if ranks else gpu.compile_jobs(model, arch)
    dtype = torch.float32 if model.experts_sum_fp32 else torch.bfloat16
    called = set()
    for tokens in range(1, MOST_TOKENS["sm90" if arch == "sm_90a" else "sm100"] + 1):
        for clusters in (None,) if arch == "sm_90a" else range(20):
            plan = choice.chosen(tokens, 4096, 24, True, False, True, clusters)
            boxes, at_once = Plan.of(4, 2 << 20), 16 if clusters is None else clusters
            plan = choice.with_parts(plan, boxes, at_once, tokens, dtype) if ranks else plan
            if plan is not None:
                plan = replace(plan, experts=6)
                ahead = arch == "sm_90a" and tokens == 1
                called |= {plan, replace(plan, reads_ahead=True)} if ahead else {plan}
    compiled = {job.args[0] for job in jobs}
    assert {plan for plan in compiled if plan.experts} == called
    assert {plan for plan in compiled if plan.experts == 0} == {
        job.args[0]
        for job in (gpu.parts_compile_jobs if ranks else gpu.compile_jobs)(
            SimpleNamespace(**(vars(model) | {"leaves_expert_rows": False})), arch
        )
    }


def test_what_is_refused(compiled_here: None) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.hyper_connection import gpu

    def refused(message: str, y: ExpertRows, num_tokens: int = 2) -> None:
        with pytest.raises(ValueError, match=message):
            gpu.sm90_hc_boundary(*inputs(num_tokens, DIM)._replace(y=y).boundary())

    y = expert_rows(2, DIM)
    refused("rows must be torch.bfloat16", replace(y, rows=y.rows.float()))
    refused("rows must be contiguous", replace(y, rows=y.rows[::2]))
    refused("experts must be contiguous torch.int32", replace(y, experts=y.experts.long()))
    refused("slot_of_pair must be contiguous torch.int32", replace(y, slot_of_pair=y.slot_of_pair.T.contiguous().T))
    refused("shared must be torch.bfloat16", replace(y, shared=y.shared[:, :512]))
    refused("300 tokens; it sums the rows of experts for at most 128", expert_rows(300, DIM), 300)
    with pytest.raises(ValueError, match=r"need y \(3, 1024\)"):
        hc_boundary(*inputs(3, DIM)._replace(y=y).boundary())


@pytest.mark.gpu
@pytest.mark.parametrize("d", [4096, 7168])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 16, 17, 64])
def test_the_gpu_sums_over_experts(kernel_on_gpu: Callable[[str], str], num_tokens: int, d: int) -> None:
    """Eager and in a graph: the bits of a boundary of the sum."""
    run = partial(hc_boundary, fp8=True, impl=kernel_on_gpu("hc_boundary"))
    rows = expert_rows(num_tokens, d, seed=num_tokens, chosen=6)
    i = inputs(num_tokens, d, seed=num_tokens)._replace(y=rows).to("cuda")
    expected = run(*i._replace(y=i.y.total()).boundary())
    call = i.boundary()
    check(expected, [run(*call)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*call)
    for result in out:
        result.view(torch.uint8).fill_(0xFF) if result.is_contiguous() else result.fill_(0)
    graph.replay()
    check(expected, [out])
