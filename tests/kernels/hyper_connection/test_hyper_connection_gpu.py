"""The hyper-connection kernel: emulated for both architectures, its compiled resources, and on a GPU.

Results are compared with float64, each computed from the kernel's own earlier results: streams from the inputs; post,
comb and the mixture from the streams. Sizes: d = 1,024 is the smallest, where a CTA keeps all of fn; at 3,072 and 4,096
stages are refilled; 7,168 is Pro's, with one CTA a multiprocessor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.early_launches import a_missing_wait_is_noticed, launched_early
from ops.hyper_connection_cases import (
    HC_EPS,
    ITERATIONS,
    NORM_EPS,
    U32,
    Inputs,
    check_boundary,
    check_mixture,
    check_streams,
    exact_comb,
    exact_logits,
    inputs,
)
from ops.memory_layout import far_apart, last_of_many, use_in_place
from ops.row_kernels import results_of
from torch import Tensor

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.hyper_connection import hc_boundary, hc_enter, hc_finish, ref
from dsv4_kernels.quant import fp8_quantise

ARCHES = {"sm90": "sm_90a", "sm100": "sm_100a"}
NAMES = {arch: name for name, arch in ARCHES.items()}


# ---- the reference


# ---- the kernel


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for results is filled with NaN, so that missing writes are noticed."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, math.nan, **options))


# One architecture is enough where both run the same program, as `test_both_architectures_run_one_program` says.
@pytest.fixture(params=["sm90", pytest.param("sm100", marks=pytest.mark.slow)])
def arch(request: pytest.FixtureRequest, compiled_here: None, nan_memory: None) -> str:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    return ARCHES[request.param]


def emulate(arch: str, call: Callable[[], object], fn: Tensor | None = None, **options: object) -> object:
    """Return the results of a call, which must launch one kernel, in the emulator with all its checks on. `fn` is
    marked as constant memory."""
    from ptx_emulator import Checks, emulated

    with emulated(checks=Checks.strict(), arch=arch, **options) as device:
        if fn is not None:
            device.memory.constant(fn)
        result = call()
    assert len(device.reports) == 1 and not device.reports[0].warnings
    return result


def boundary(
    arch: str,
    i: Inputs,
    tokens: int | None = None,
    teams: int = 1,
    fp8: bool = False,
    fn_is_constant: bool = True,
    interleaved: bool = False,
    **options: object,
) -> tuple[Tensor, ...]:
    """Results of hc_boundary with `tokens` tokens a group and `teams` teams a CTA."""
    from dsv4_kernels.hyper_connection import gpu

    y, streams, post, comb, fn, base, scale, weight = i
    arguments = (streams, (y, post, comb), (fn, base, scale), weight, NORM_EPS, HC_EPS, ITERATIONS)
    call = partial(gpu.run, NAMES[arch], "hc_boundary", 24, *arguments, tokens, teams, fp8, interleaved=interleaved)
    return emulate(arch, call, fn if fn_is_constant else None, **options)


@pytest.mark.usefixtures("compiled_here", "nan_memory")
@pytest.mark.parametrize(
    ("num_tokens", "tokens", "teams", "fp8"),
    [pytest.param(1, 1, 1, True, marks=pytest.mark.slow), (35, 8, 2, False)],
    ids=["alone-codes", "teams"],
)
def test_both_architectures_run_one_program(num_tokens: int, tokens: int, teams: int, fp8: bool) -> None:
    """Blackwell's PTX equals Hopper's except for the target."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from ptx_emulator import emulated

    from dsv4_kernels.hyper_connection import gpu

    programs, i = {}, inputs(num_tokens, 1024, seed=3)
    for name, arch in ARCHES.items():
        with emulated(arch=arch, record=True, multiprocessors=16) as device:
            device.memory.constant(i.fn)
            options = (i.weight, NORM_EPS, HC_EPS, ITERATIONS, tokens, teams, fp8)
            gpu.run(NAMES[arch], "hc_boundary", 24, i.streams, (i.y, i.post, i.comb), (i.fn, i.base, i.scale), *options)
        (launched,) = device.recordings
        programs[name] = re.sub(r"(?m)^\.target .*$", "", launched.ptx.replace(launched.kernel, "kernel"))
    assert programs["sm90"] == programs["sm100"]


@pytest.mark.parametrize(("num_tokens", "tokens"), [(1, 1), (2, 1), (3, 2), (5, 4), (17, 8)], ids=lambda n: str(n))
def test_the_kernel_makes_a_boundary(arch: str, num_tokens: int, tokens: int) -> None:
    """Token groups that are full, that are not, and several of them."""
    i = inputs(num_tokens, 1024, seed=num_tokens)
    check_boundary(boundary(arch, i, tokens), i)


def test_bits_do_not_depend_on_the_batch(arch: str) -> None:
    """A token has the same bits alone, at other indices of token groups of other sizes, and in other batches."""
    i = inputs(11, 1024, seed=5)
    together = boundary(arch, i, 8)
    orders = ([7], 1), ([10, 7, 3], 2), ([3, 0, 7, 10, 1], 4), ([7, 7, 10, 9, 3], 8), ([9, 2, 5], 4, True)
    for order, tokens, *interleaved in orders:
        part_of_them = boundary(arch, i.of(order), tokens, interleaved=bool(interleaved))
        for all_of_them, part in zip(together, part_of_them, strict=True):
            assert torch.equal(part, all_of_them[order])


@pytest.mark.slow
@pytest.mark.parametrize("d", [1024, 3072, 7168])
def test_interleaved_products_have_the_same_bits(arch: str, d: int) -> None:
    """Groups of every size, in two clusters, the second not full: streams side by side, and with 7,168 channels, where
    stages are refilled, in turn."""
    i = inputs(9, d, seed=d)
    expected = boundary(arch, i, 8, fp8=True)
    for tokens in (1, 2, 4, 8):
        few = list(range(min(9, tokens + 1)))
        for schedule in ("eager", "late", "random"):
            found = boundary(arch, i.of(few), tokens, fp8=True, interleaved=True, schedule=schedule)
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a.float(), b[few].float())


@pytest.mark.parametrize(
    ("num_tokens", "tokens", "teams", "d", "weight"),
    [
        (1, 1, 1, 1024, torch.float32),
        pytest.param(3, 2, 1, 3072, torch.bfloat16, marks=pytest.mark.slow),
        (5, 4, 1, 1024, torch.float32),
        (35, 8, 2, 1024, torch.float32),
    ],
    ids=["alone", "pairs", "fours", "teams"],
)
def test_the_kernel_makes_codes(
    arch: str, num_tokens: int, tokens: int, teams: int, d: int, weight: torch.dtype
) -> None:
    """Codes are bitwise equal to the quantiser of the kernel's own row, for any group size; other results are
    unchanged."""
    i = inputs(num_tokens, d, seed=d, weight=weight)
    i.weight[128:256] *= 2.0**-30  # a block at the floor of scales, and one with a single large channel
    i.weight[640] *= 2.0**20
    options = {"multiprocessors": 16} if teams > 1 else {}
    *others, codes, scales = boundary(arch, i, tokens, teams, fp8=True, **options)
    assert all(map(torch.equal, others, boundary(arch, i, tokens, teams, **options)))
    expected, of_blocks = fp8_quantise(others[1], 128, column_major=True, impl="ref")
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, of_blocks) and scales.stride() == of_blocks.stride()


@pytest.mark.parametrize(
    ("tokens", "interleaved"),
    [(1, False), (2, False), (4, True), (8, False), pytest.param(8, True, marks=pytest.mark.slow)],
)
def test_products_have_all_bits_of_fn(arch: str, tokens: int, interleaved: bool) -> None:
    """Inputs for which every fp32 sum is exact: streams of -1, 0 and 1, and fn of 18 bits, of which tf32 alone would
    keep 11.

    A missing half of fn, or a channel multiplied with another channel's column, causes errors of 1e-4 and more. The
    remaining error comes from the norm, scale and base, and the sigmoid.
    """
    g, i = torch.Generator().manual_seed(tokens), inputs(5, 1024, seed=tokens)
    signs = (torch.randint(-1, 2, (5, 4, 1024), generator=g) * (torch.rand(5, 4, 1024, generator=g) < 0.03)).bfloat16()
    fn = torch.randint(-(2**17), 2**17, (24, 4096), generator=g) / 2.0**16
    i = i._replace(streams=signs, post=torch.zeros(5, 4), comb=torch.eye(4).repeat(5, 1, 1), fn=fn, scale=i.scale / 8)
    streams, _, post, comb = boundary(arch, i, tokens, interleaved=interleaved)
    assert torch.equal(streams, signs)
    logits, _ = exact_logits(streams, fn, i.base, i.scale)
    off = 8 * U32 * logits.abs().max()
    assert ((post - 2 * logits[:, 4:8].sigmoid()).abs() <= off / 2 + 8 * U32).all()
    _, *reference = ref.hc_pre(streams, fn, i.base, i.scale, NORM_EPS, HC_EPS, ITERATIONS)
    error, others = ((c.double() - exact_comb(logits[:, 8:])).norm() for c in (comb, reference[1]))
    assert error <= 2 * others + 8 * U32 * comb.norm()


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_stages_are_filled_again(arch: str, schedule: str) -> None:
    """Four streams' parts of fn through fewer stages; asynchronous copies as late as possible, and at random times."""
    from dsv4_kernels.hyper_connection.plan import STREAMS, Plan

    assert Plan(2, 3072, 24, True).stages < STREAMS
    i = inputs(3, 3072, seed=2)
    check_boundary(boundary(arch, i, 2, schedule=schedule, seed=3), i)


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_teams_take_one_group_after_the_other(arch: str, schedule: str) -> None:
    """Two clusters of two teams: one team has three token groups, the last with three tokens; the others two."""
    i = inputs(67, 1024, seed=6)
    out = boundary(arch, i, 8, teams=2, schedule=schedule, seed=4, multiprocessors=16)
    check_boundary(out, i)
    some = [0, 17, 34, 51, 66]
    for found, expected in zip(out, boundary(arch, i.of(some), 1), strict=True):
        assert torch.equal(found[some], expected)


# (tokens, d), and tokens a group and teams a CTA: all rows of fn at once, through stages, and two persistent teams.
@pytest.mark.parametrize(
    ("num_tokens", "tokens", "teams"), [(3, 2, 1), pytest.param(35, 8, 2, marks=pytest.mark.slow)], ids=["one", "teams"]
)
def test_a_boundary_may_begin_early(arch: str, num_tokens: int, tokens: int, teams: int) -> None:
    i = inputs(num_tokens, 1024)
    options = {"multiprocessors": 16} if teams > 1 else {}
    with launched_early():
        out = boundary(arch, i, tokens, teams, **options)
    check_boundary(out, i)


def test_a_missing_wait_is_noticed(arch: str) -> None:
    with a_missing_wait_is_noticed():
        boundary(arch, inputs(3, 1024), 2)


def test_only_constants_are_read_before_the_wait(arch: str) -> None:
    """The boundary reads fn before it waits, which is legal for a weight; here the emulator is not told that fn is
    constant, and reports it."""
    from ptx_emulator import EmulationError

    with dependent_launch.switched(True), pytest.raises(EmulationError, match=r"reads float32\[24, 4096\]"):
        boundary(arch, inputs(3, 1024), 2, fn_is_constant=False)


MUTATED = {
    "hyper_connection": ((3, 1024), (2, 1)),
    "hyper_connection_stages": ((3, 3072), (2, 1)),
    "hyper_connection_teams": ((35, 1024), (8, 2)),
    "hyper_connection_interleaved": ((5, 1024), (4, 1)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_here", "in_turns")
@pytest.mark.parametrize("name", MUTATED)
def test_deleted_synchronisation_is_noticed(name: str) -> None:
    """Every deletion is noticed, except those explained in emulator/results/mutation_reasons.json."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.hyper_connection import gpu

    size, plan = MUTATED[name]
    y, streams, post, comb, fn, base, scale, weight = inputs(*size)
    arguments = (streams, (y, post, comb), (fn, base, scale), weight, NORM_EPS, HC_EPS, ITERATIONS)
    with emulated(checks=Checks.strict(), arch="sm_90a", multiprocessors=16, record=True) as device:
        gpu.run("sm90", "hc_boundary", 24, *arguments, *plan, interleaved=name.endswith("interleaved"))
    rates = delete_synchronisation(name, device)
    assert rates and set(rates.values()) == {1}


def test_the_other_functions(arch: str) -> None:
    """Functions other than `hc_boundary`, each with its results alone; a norm weight in bf16, a head's rows of fn."""
    from dsv4_kernels.hyper_connection import gpu

    def run(name: str, *arguments: object) -> object:
        return emulate(arch, lambda: getattr(gpu, name)(NAMES[arch], *arguments), i.fn)

    i = inputs(3, 1024, seed=7, weight=torch.bfloat16)
    streams, x = run("hc_finish", i.y, i.streams, i.post, i.comb, *i.head(), i.weight, NORM_EPS, HC_EPS)
    check_streams(streams, i)
    check_mixture(x, streams, i.head(), i.weight)
    parameters = (i.fn, i.base, i.scale)
    x, *coefficients = run("hc_enter", streams, *parameters, i.weight, NORM_EPS, HC_EPS, ITERATIONS)
    check_mixture(x, streams, parameters, i.weight)
    _, bounded_x, *others = boundary(arch, i)
    for found, same in zip(coefficients, others, strict=True):
        assert torch.equal(found, same)
    assert torch.equal(x, bounded_x)


def test_rows_may_lie_apart(arch: str) -> None:
    """Gaps, filled with NaN, in every input that has tokens."""
    i = inputs(3, 1024, seed=8)

    def apart(x: Tensor, *padded: int) -> Tensor:
        around = torch.full(padded, math.nan, dtype=x.dtype)
        view = around[tuple(slice(0, n) for n in x.shape)]
        view.copy_(x)
        return view

    views = i._replace(
        y=apart(i.y, 3, 1032),
        streams=apart(i.streams, 3, 5, 1040),
        post=apart(i.post, 3, 12),
        comb=apart(i.comb, 3, 6, 4),
    )
    for found, expected in zip(boundary(arch, views), boundary(arch, i), strict=True):
        assert torch.equal(found, expected)


def test_all_streams_may_be_one(arch: str) -> None:
    """Before the first layer the streams of a token are its embedding, in the same memory."""
    i = inputs(3, 1024, seed=8)
    one = i._replace(streams=i.streams[:, :1].expand(-1, 4, -1))
    for found, expected in zip(
        boundary(arch, one), boundary(arch, one._replace(streams=one.streams.clone())), strict=True
    ):
        assert torch.equal(found, expected)


def test_rows_beyond_32_bits(arch: str) -> None:
    """Every input that has tokens with distances whose bytes and elements exceed 32 bits."""
    from ptx_emulator import emulated

    from dsv4_kernels.hyper_connection import gpu

    i = inputs(4, 1024, seed=8)
    far = i._replace(y=far_apart(i.y), streams=far_apart(i.streams), post=far_apart(i.post), comb=far_apart(i.comb, 0))
    with emulated(arch=arch) as device:
        use_in_place(device, *far)
        device.memory.constant(far.fn)
        found = gpu.hc_boundary(NAMES[arch], far.y, far.streams, far.post, far.comb, *far[4:], *i.boundary()[8:])
    for a, b in zip(found, boundary(arch, i), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("count", "fp8"), [(1 << 22, True), (1 << 28, False)], ids=["rows", "coefficients"])
def test_results_beyond_32_bits(arch: str, count: int, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many tokens that streams, rows and codes, or post and comb exceed 32 bits; only the last two groups run."""
    from ptx_emulator import emulated

    from dsv4_kernels.hyper_connection import gpu

    i = inputs(5, 1024, seed=8)
    expected = boundary(arch, i, 4, fp8=fp8)
    y, streams, post, comb = (last_of_many(x, count + 5) for x in i[:4])
    arguments = (streams, (y, post, comb), i[4:7], i.weight, NORM_EPS, HC_EPS, ITERATIONS)
    with emulated(arch=arch, ends=(0, 2)) as device:
        use_in_place(device, y, streams, post, comb)
        device.memory.constant(i.fn)
        monkeypatch.setattr(torch, "empty", results_of(device))
        found = gpu.run(NAMES[arch], "hc_boundary", 24, *arguments, 4, 1, fp8)
    large = (0, 1, 4) if fp8 else (2, 3)  # streams, rows, codes; post, comb
    assert all(found[which].nbytes > 1 << 32 for which in large)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a[-5:].contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["one", "zero"])
def test_saturated_sigmoids_and_large_values(arch: str, sign: float) -> None:
    """Sigmoids and weights of comb that are 0 or 1; streams of 2**40 in a batch with a token of zeros."""
    i = inputs(3, 1024, seed=9)
    base = i.base.clone()
    base[4:8] += 300 * sign
    base[8:] *= 200
    i.streams[0] *= 2.0**40
    i.y[0] *= 2.0**40
    i.comb[0] *= 100
    i.streams[1], i.y[1] = 0, 0
    i = i._replace(base=base)
    streams, x, post, _ = out = boundary(arch, i)
    assert all(result.isfinite().all() for result in out)
    assert torch.equal(post, torch.full_like(post, 1.0 + sign))
    assert not x[1].any() and not streams[1].any()
    check_boundary(out, i)


@pytest.mark.slow
@pytest.mark.parametrize("d", [4096, 7168], ids=["flash", "pro"])
def test_the_models_widths(arch: str, d: int) -> None:
    """Right results; and the compiler's numbers for many tokens match the plan, with one team and with several:
    registers and shared memory for the planned CTAs of a multiprocessor. 28 words of a thread may be on the stack, of
    some 4,300 instructions: where streams are loaded, 80 words of them and 20 coefficients are live at once."""
    from lib.cubin import resources
    from ptx_emulator import emulated

    from dsv4_kernels.hyper_connection import choice, gpu
    from dsv4_kernels.hyper_connection.plan import REGISTERS, SHARED_BYTES, Plan, shared_memory

    i = inputs(2, d, seed=d)
    check_boundary(boundary(arch, i, 8), i)
    chosen = choice.chosen(8192, d, 24, True, False)
    wide = {choice.chosen(n, d, 24, True, False, True, clusters=15) for n in (1, 16, 60, 64)}
    for plan in {Plan(8, d, 24, True), chosen, replace(chosen, fp8=True)} | wide:
        with emulated(arch=arch):
            numbers = resources(gpu.compile(plan, arch).__cubin__)
        if plan in wide:
            assert numbers["stack_bytes"] == 0 and plan.ctas == 1 and plan.stages == (4 if d == 4096 else 2)
        # Warps are distributed over four parts of the multiprocessor, each with a quarter of the registers.
        warps = -(-plan.ctas * plan.cta_threads // 32 // 4)
        assert numbers["stack_bytes"] <= 112 and numbers["registers"] * warps * 32 <= REGISTERS // 4, (plan, numbers)
        assert plan.ctas * (shared_memory(plan).size_in_bytes() + 1024) <= SHARED_BYTES + 1024, plan
        assert plan in wide or plan.ctas * plan.teams == (2 if d == 4096 else 1)


def test_no_tokens_are_no_launch(arch: str) -> None:
    from ptx_emulator import emulated

    from dsv4_kernels.hyper_connection import gpu

    with emulated(arch=arch) as device:
        shapes = [x.shape for x in gpu.hc_boundary(NAMES[arch], *inputs(0, 1024).boundary())]
    assert shapes == [(0, 4, 1024), (0, 1024), (0, 4), (0, 4, 4)] and not device.reports


def test_what_the_kernel_refuses(compiled_here: None) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.hyper_connection import choice, gpu

    def refused(message: str, i: Inputs) -> None:
        with pytest.raises(ValueError, match=message):
            gpu.sm90_hc_boundary(*i.boundary())

    i = inputs(2, 1024)
    for tokens in (0, 2):
        refused("multiples of 1024 up to 8192; got 512", inputs(tokens, 512))
    with pytest.raises(
        ValueError, match="multiples of 1024 up to 8192; got 512"
    ):  # the plan that a server compiles first
        gpu.compile(choice.plans(512, True, "sm_90a")[0], "sm_90a")
    refused("take streams in torch.bfloat16", i._replace(streams=i.streams.float()))
    refused("take fn in torch.float32, contiguous", i._replace(fn=i.fn.T.contiguous().T))
    refused("take y in torch.bfloat16, with contiguous rows", i._replace(y=torch.zeros(2, 1028).bfloat16()[:, :1024]))
    refused("matrices of comb must be contiguous", i._replace(comb=torch.zeros(2, 4, 8)[..., :4]))
    three = torch.zeros(2, 3, 1024).bfloat16()
    with pytest.raises(ValueError, match="made for 4 streams; got 3"):
        gpu.sm90_hc_enter(three, i.fn, i.base, i.scale, i.weight, NORM_EPS, HC_EPS, ITERATIONS)


# ---- on a GPU


@pytest.fixture
def kernel_here(kernel_on_gpu: Callable[[str], str]) -> Iterator[str]:
    yield kernel_on_gpu("hc_boundary")


@pytest.mark.gpu
@pytest.mark.parametrize("d", [4096, 7168])
@pytest.mark.parametrize("num_tokens", [1, 5, 20, 64, 120, 200, 8192])
def test_the_gpu_makes_a_boundary(kernel_here: str, num_tokens: int, d: int) -> None:
    i = inputs(num_tokens, d, seed=num_tokens).to("cuda")
    out = hc_boundary(*i.boundary(), impl=kernel_here)
    *same, codes, scales = hc_boundary(*i.boundary(), fp8=True, impl=kernel_here)
    expected, of_blocks = fp8_quantise(out[1], 128, True, kernel_here)
    assert all(map(torch.equal, same, out)) and torch.equal(scales, of_blocks)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    few = torch.arange(0, num_tokens, max(1, num_tokens // 64), device="cuda")
    check_boundary(tuple(x[few] for x in out), i.of(few))
    alone = hc_boundary(*i.of(few[-1:]).boundary(), impl=kernel_here)
    for found, expected in zip(alone, out, strict=True):
        assert torch.equal(found, expected[few[-1:]])


@pytest.mark.gpu
def test_the_gpu_runs_all_functions_out_of_a_graph(kernel_here: str) -> None:
    """Eager calls, and a graph replayed with other inputs: the same bits."""
    i = inputs(7, 4096, seed=1).to("cuda")
    other = inputs(7, 4096, seed=2).to("cuda")

    def run(i: Inputs) -> list[Tensor]:
        parameters = (i.fn, i.base, i.scale)
        return [
            *hc_boundary(*i.boundary(), impl=kernel_here),
            *hc_enter(i.streams, *parameters, i.weight, NORM_EPS, HC_EPS, ITERATIONS, impl=kernel_here),
            *hc_finish(i.y, i.streams, i.post, i.comb, *i.head(), i.weight, NORM_EPS, HC_EPS, impl=kernel_here),
        ]

    expected = [run(i), run(other)]
    live = Inputs(*(x.clone() for x in i))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(live)
    for numbers, wanted in zip((i, other), expected, strict=True):
        for target, source in zip(live, numbers, strict=True):
            target.copy_(source)
        for x in out:
            x.fill_(math.nan)
        graph.replay()
        assert all(map(torch.equal, out, wanted))
