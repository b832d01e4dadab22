"""Boundaries that leave comb to the next boundary have the bits of balanced combs, in the emulator and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.boundaries_in_emulator import Boundary, check, check_schedules
from ops.early_launches import ACCESSES, WAIT, a_missing_wait_is_noticed, launched_early
from ops.hyper_connection_cases import HC_EPS, ITERATIONS, NORM_EPS, Inputs, exact_logits, expert_rows, inputs
from ops.memory_layout import far_apart, use_in_place
from ops.row_kernels import ARCH
from torch import Tensor

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.hyper_connection import hc_boundary, hc_enter, hc_finish
from dsv4_kernels.hyper_connection.ref import balanced
from dsv4_kernels.hyper_connection.unbalanced import MOST_TOKENS, Unbalanced
from dsv4_kernels.quant import fp8_quantise

DIM = 1024


@pytest.fixture(params=["sm90", pytest.param("sm100", marks=pytest.mark.slow)])
def kernel(request: pytest.FixtureRequest, compiled_here: None) -> str:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    return request.param


def unbalanced(i: Inputs) -> Inputs:
    """The same inputs with comb before softmax and Sinkhorn's iteration."""
    return i._replace(comb=Unbalanced(8 * i.comb, HC_EPS, ITERATIONS))


def launched(
    kernel: str,
    i: Inputs,
    tokens: int | None,
    rows: int = 24,
    post: bool = True,
    balances: bool = True,
    in_place: tuple[Tensor, ...] = (),
    comb_is_constant: bool = True,
    interleaved: bool = False,
    **options: object,
) -> list[Tensor | Unbalanced | None]:
    """Results of one launch with `tokens` tokens a group."""
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.hyper_connection import gpu

    parameters = (i.fn, i.base, i.scale) if rows == 24 else i.head()
    arguments = (i.streams, (i.y, i.post, i.comb) if post else None, parameters, i.weight, NORM_EPS, HC_EPS)
    arguments += (ITERATIONS,) if rows == 24 else ()
    form = {"fp8": rows == 24, "balances": balances, "interleaved": interleaved}
    with emulated(checks=Checks.strict(), arch=ARCH[kernel], **options) as device:
        use_in_place(device, *in_place)
        device.memory.constant(i.fn)
        if isinstance(i.comb, Unbalanced) and comb_is_constant:  # written before the previous launch
            device.memory.constant(i.comb.logits)
        made = gpu.run(kernel, "test", rows, *arguments, tokens=tokens, **form)
    assert len(device.reports) == 1 and not device.reports[0].warnings
    return list(made)


def without_comb(made: list) -> list[Tensor]:
    return [x for i, x in enumerate(made) if i != 3 and x is not None]


def test_the_references_balance_it_later() -> None:
    i = inputs(5, 32)
    parameters = (i.fn, i.base, i.scale, i.weight, NORM_EPS, HC_EPS, ITERATIONS)
    left = hc_boundary(*i.boundary(), balances=False)
    wanted = hc_boundary(*i.boundary())
    assert all(map(torch.equal, without_comb(left), without_comb(wanted)))
    logits, _ = exact_logits(left[0], i.fn, i.base, i.scale)
    assert torch.allclose(left[3].logits.flatten(1).double(), logits[:, 8:], atol=1e-5)
    assert torch.equal(balanced(left[3]), wanted[3]) and left[3].shape == (5, 4, 4)
    *entered, comb = hc_enter(left[0], *parameters, balances=False)
    assert torch.equal(comb.logits, left[3].logits) and all(map(torch.equal, entered, left[1:3]))
    after = [i._replace(comb=comb) for comb in (left[3], wanted[3])]
    assert all(map(torch.equal, *(hc_boundary(*a.boundary()) for a in after)))
    finished = [hc_finish(*a[:4], *a.head(), a.weight, NORM_EPS, HC_EPS) for a in after]
    assert all(map(torch.equal, *finished))


@pytest.mark.parametrize(
    ("num_tokens", "tokens", "interleaved"),
    [
        (1, 1, False),
        (3, 2, False),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in ((2, 1, True), (3, 2, True), (5, 4, False), (5, 4, True), (9, 8, False), (11, 8, True))
        ),
    ],
)
def test_the_bits_of_a_balanced_comb(kernel: str, num_tokens: int, tokens: int, interleaved: bool) -> None:
    """Token groups of every size, full and partly full: all functions that leave comb, and all that read it."""
    form = {"tokens": tokens, "interleaved": interleaved}
    first, i = inputs(num_tokens, DIM, seed=num_tokens), inputs(num_tokens, DIM, seed=num_tokens + 50)
    wanted, left = (launched(kernel, first, balances=b, **form) for b in (True, False))
    check(tuple(without_comb(wanted)), [tuple(without_comb(left))])
    entered = launched(kernel, first._replace(streams=wanted[0]), post=False, balances=False, **form)
    assert torch.equal(entered[3].logits, left[3].logits)
    plain, later = i._replace(comb=wanted[3]), i._replace(comb=left[3])
    expected = tuple(launched(kernel, plain, **form))
    for schedule in ("eager", "late", "random"):
        check(expected, [tuple(launched(kernel, later, schedule=schedule, **form))])
    finished = [without_comb(launched(kernel, x, tokens, rows=4)) for x in (plain, later)]
    check(tuple(finished[0]), [tuple(finished[1])])


def test_bits_do_not_depend_on_the_batch(kernel: str) -> None:
    """A token has the same bits alone, in another place, and in groups of another size."""
    i = inputs(5, DIM, seed=3)
    logits = 8 * i.comb
    together = launched(kernel, i._replace(comb=Unbalanced(logits, HC_EPS, ITERATIONS)), 4, balances=False)
    for order, tokens in ([3], 1), ([4, 3, 0], 2):
        few = i.of(order)._replace(comb=Unbalanced(logits[order].clone(), HC_EPS, ITERATIONS))
        alone = launched(kernel, few, tokens, balances=False)
        assert torch.equal(alone[3].logits, together[3].logits[order])
        check(tuple(x[order] for x in without_comb(together)), [tuple(without_comb(alone))])


@pytest.mark.parametrize(
    ("on", "ranks", "num_tokens", "tokens", "of_experts"),
    [
        ("sm90", 2, 3, 2, True),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (
                ("sm90", 4, 1, 1, True),
                ("sm90", 2, 5, 4, False),
                ("sm90", 2, 9, 8, False),
                ("sm100", 4, 1, 1, True),
                ("sm100", 2, 5, None, True),
                ("sm100", 2, 9, None, False),
            )
        ),
    ],
)
@pytest.mark.usefixtures("compiled_here")
def test_it_is_balanced_while_parts_travel(
    on: str, ranks: int, num_tokens: int, tokens: int | None, of_experts: bool
) -> None:
    """On all ranks the bits of a boundary of the summed parts, whose comb is unbalanced, too."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    parts = [expert_rows(num_tokens, DIM, torch.bfloat16, seed) for seed in range(ranks)] if of_experts else []
    call = Boundary(on, ranks, num_tokens, tokens, fp8=True, parts=parts, unbalanced=True)
    check_schedules(on, ranks, call)


def test_rows_may_lie_apart(kernel: str) -> None:
    """Matrices with gaps of NaN, and so far apart that bytes and elements exceed 32 bits."""
    i = unbalanced(inputs(4, DIM, seed=8))
    expected, logits = launched(kernel, i, 2), i.comb.logits
    around = torch.full((4, 6, 4), math.nan)
    around[:, :4] = logits
    gaps = i._replace(comb=replace(i.comb, logits=around[:, :4]))
    check(tuple(expected), [tuple(launched(kernel, gaps, 2))])
    far = i._replace(comb=replace(i.comb, logits=far_apart(logits, 0)))
    found = launched(kernel, far, 2, in_place=(far.comb.logits,))
    check(tuple(expected), [tuple(found)])


def test_large_logits_saturate(kernel: str) -> None:
    """Rows in which one logit is by far the largest, and rows of large equal ones."""
    i = unbalanced(inputs(2, DIM, seed=4))
    i.comb.logits[0] = 200 * torch.eye(4)
    i.comb.logits[1] = -3e38
    plain = i._replace(comb=balanced(i.comb))
    (found, *_), (expected, *_) = launched(kernel, i, 2), launched(kernel, plain, 2)
    assert found.isfinite().all() and (found.float() - expected.float()).norm() <= 2**-8 * expected.float().norm()


def test_it_may_begin_early(kernel: str) -> None:
    """Before the wait the kernel reads fn and the logits only; in machine code, too, the warp that balances comb loads
    the logits before its wait, which is the last wait."""
    from lib.cubin import opcodes
    from ptx_emulator import emulated

    from dsv4_kernels.hyper_connection import gpu

    i = unbalanced(inputs(3, DIM))
    with launched_early():
        launched(kernel, i, 2, balances=False)
    plan = gpu.Plan(2, DIM, 24, True, fp8=True, balances_ended=True, balances=False)
    with emulated(arch=ARCH[kernel]), dependent_launch.switched(True):
        found = [name for name in opcodes(gpu.compile(plan, ARCH[kernel]).__cubin__) if name in (WAIT, *ACCESSES)]
    wait = len(found) - 1 - found[::-1].index(WAIT)
    assert found.count(WAIT) == 2 and found[wait - 4 : wait] == ["LDG"] * 4, found


def test_logits_must_be_older_than_the_launch_before(kernel: str) -> None:
    from ptx_emulator import EmulationError

    with pytest.raises(EmulationError, match=r"reads float32\[3, 4, 4\]"):
        launched(kernel, unbalanced(inputs(3, DIM)), 2, comb_is_constant=False)


def test_a_missing_wait_is_noticed(kernel: str) -> None:
    with a_missing_wait_is_noticed():
        launched(kernel, unbalanced(inputs(3, DIM)), 2)


def test_what_is_refused(compiled_here: None) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.hyper_connection import choice, gpu

    assert max(choice.MOST_TOKENS.values()) == MOST_TOKENS
    i = unbalanced(inputs(2, DIM))
    for wrong in {"hc_eps": 1e-6}, {"iterations": 3}:
        other = i._replace(comb=replace(i.comb, **wrong))
        with pytest.raises(ValueError, match=r"hc_eps 0\.03 and 20 iterations; the sublayer that ends"):
            gpu.sm90_hc_boundary(*other.boundary())
    with pytest.raises(ValueError, match=r"balance comb with hc_eps 0\.5 and 20 iterations"):
        gpu.sm90_hc_finish(*i[:4], *i.head(), i.weight, NORM_EPS, 0.5)
    many = inputs(MOST_TOKENS + 1, DIM)
    for arguments, balances in ((unbalanced(many).boundary(), True), (many.boundary(), False)):
        with pytest.raises(ValueError, match="129 tokens; comb of at most 128 tokens may be unbalanced"):
            gpu.sm90_hc_boundary(*arguments, balances=balances)
    with pytest.raises(ValueError, match=r"comb \(2, 4, 4\); got .* and \(1, 4, 4\)"):
        hc_boundary(*i._replace(comb=replace(i.comb, logits=i.comb.logits[:1])).boundary())


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_here", "in_turns")
def test_deleted_synchronisation_is_noticed() -> None:
    """Every deletion is noticed, except those explained in emulator/results/mutation_reasons.json."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.hyper_connection import gpu

    i = unbalanced(inputs(3, DIM))
    arguments = (i.streams, (i.y, i.post, i.comb), (i.fn, i.base, i.scale), i.weight, NORM_EPS, HC_EPS, ITERATIONS)
    with emulated(checks=Checks.strict(), arch="sm_90a", record=True) as device:
        gpu.run("sm90", "test", 24, *arguments, tokens=2, balances=False)
    rates = delete_synchronisation("hyper_connection_unbalanced", device)
    assert rates and set(rates.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("d", [4096, 7168], ids=["flash", "pro"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.usefixtures("compiled_here")
def test_the_models_widths(arch: str, d: int) -> None:
    """The plans of a server have the registers of the planned CTAs, and fit into shared memory."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from lib.cubin import resources
    from ptx_emulator import emulated

    from dsv4_kernels.hyper_connection import choice, gpu
    from dsv4_kernels.hyper_connection.plan import REGISTERS, SHARED_BYTES, shared_memory

    plans = [plan for plan in choice.plans(d, True, arch) if not plan.balances]
    assert len(plans) >= 2 * 4
    for plan in plans:
        with emulated(arch=arch):
            numbers = resources(gpu.compile(plan, arch).__cubin__)
        warps = -(-plan.ctas * plan.cta_threads // 32 // 4)
        assert numbers["stack_bytes"] <= 112 and numbers["registers"] * warps * 32 <= REGISTERS // 4, (plan, numbers)
        assert plan.ctas * (shared_memory(plan).size_in_bytes() + 1024) <= SHARED_BYTES + 1024, plan


@pytest.mark.gpu
@pytest.mark.parametrize("d", [4096, 7168])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 16, 17, 64, 128])
def test_the_gpu_balances_it_later(kernel_on_gpu: Callable[[str], str], num_tokens: int, d: int) -> None:
    """A chain of boundaries with a dependent launch between any two, as in a forward, has the bits of balanced combs:
    eager, and in a graph that is replayed with other inputs."""
    kernel = kernel_on_gpu("hc_boundary")
    sublayers = [inputs(num_tokens, d, seed=num_tokens + n).to("cuda") for n in range(6)]

    def chain(streams: Tensor, balances: bool) -> list[Tensor]:
        numbers, form = (NORM_EPS, HC_EPS, ITERATIONS), {"balances": balances, "impl": kernel}
        i = sublayers[0]
        x, post, comb, *codes = hc_enter(streams, i.fn, i.base, i.scale, i.weight, *numbers, fp8=True, **form)
        results = [x, post]
        for i in sublayers[1:]:
            codes = fp8_quantise(x, 128, True, kernel)  # a launch before that may begin early, too
            parameters = (i.fn, i.base, i.scale, i.weight, *numbers)
            streams, x, post, comb, *codes = hc_boundary(i.y, streams, post, comb, *parameters, fp8=True, **form)
            assert isinstance(comb, Unbalanced) != balances
            results += [streams, x, post, codes[0].view(torch.uint8), codes[1]]
        fp8_quantise(x, 128, True, kernel)
        last = (*i.head(), i.weight, NORM_EPS, HC_EPS)
        return [*results, *hc_finish(i.y, streams, post, comb, *last, impl=kernel)]

    starts = [sublayers[n].streams for n in (0, 3)]
    expected = [chain(streams, True) for streams in starts]
    assert all(map(torch.equal, chain(starts[0], False), expected[0]))
    live, graph = starts[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(live, False)
    for _ in range(3):
        for streams, wanted in zip(starts, expected, strict=True):
            live.copy_(streams)
            graph.replay()
            assert all(map(torch.equal, out, wanted))
