"""Every kernel launched so that it may begin while the one before it runs: compiled with its waits, in the emulator,
whose checks know what may stand before them; the same bits as without.

The emulator runs one launch after the other, so it cannot see two of them meet. What makes that harmless is checked in
every launch (the emulator's griddep.cpp): nothing that another kernel may use is touched before the wait, by any lane,
and every CTA waits. All other tests of kernels are run so, too; DSV4_DEPENDENT_LAUNCH=off runs them without.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from unittest import mock

import bench_row_kernels
import pytest
import torch
from ops.attention_cases import CASES, Spec, build, check
from ops.number_formats import same_bits
from ops.row_kernels import ARCH, KERNELS, emulated_row_kernel
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host import compile_cache
from tests.kernels.compressor import test_compressor_store as compressor
from tests.kernels.hyper_connection import test_hyper_connection_gpu as hyper_connection
from tests.kernels.indexer import test_indexer_gpu as indexer
from tests.kernels.linear import test_fp8_weight_gpu as fp8_weight
from tests.kernels.linear import test_linear_fp8 as linear_fp8
from tests.kernels.linear import test_linear_gpu as linear
from tests.kernels.moe import test_experts_sm90 as experts
from tests.kernels.moe import test_experts_sm100 as experts_sm100
from tests.kernels.sparse_attention import test_sparse_attention_few_heads as attention_few_heads
from tests.kernels.sparse_attention import test_sparse_attention_sm90 as attention_sm90
from tests.kernels.sparse_attention import test_sparse_attention_sm100 as attention_sm100
from tests.kernels.step_mapping import test_step_mapping as of_step_mapping
from tests.kernels.unpack import test_unpack as unpack

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.usefixtures("compiled_here")

Work = Callable[[str], object]
"""Runs one op's kernels of "sm90" or "sm100" in the emulator, and holds what they wrote against its reference."""


def rows(name: str, kernel: str) -> None:
    """To the bits without the switch: of these kernels two are compiled as fast as a reference runs."""

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        work = bench_row_kernels.WORKS[name](3, torch.device("cpu"))
        with emulated_row_kernel(kernel, "random"):
            return list(work.call(kernel))

    with by_name():
        made = run()
        with dependent_launch.switched(False):
            assert all(map(same_bits, made, run()))


@contextlib.contextmanager
def by_name() -> Iterator[None]:
    """Inside, ops take the implementation that is named, also on a CPU."""
    named = mock.patch.object(registry, "chosen", lambda op, device, dtype, impl: registry._implementation(op, impl))
    with named, mock.patch.object(registry, "_resolved", {}):
        yield


def boundary(tokens: int, group: int, teams: int, kernel: str) -> None:
    i = hyper_connection.inputs(tokens, 1024)
    options = {"multiprocessors": 16} if teams > 1 else {}
    hyper_connection.check_boundary(hyper_connection.boundary(ARCH[kernel], i, group, teams, **options), i)


def post(kernel: str) -> None:
    from dsv4_kernels.hyper_connection import gpu

    i, arch = hyper_connection.inputs(3, 1024), ARCH[kernel]
    call = partial(gpu.hc_post, lambda _: arch, i.y, i.streams, i.post, i.comb)
    hyper_connection.check_streams(hyper_connection.emulate(arch, call), i)


def multiply(kernel: str) -> None:
    x, weight = linear.normal(3, 2, 264, seed=1), linear.normal(2, 40, 264, seed=2)
    linear.assert_products(linear.product(kernel, x, weight, None), x, weight)


def multiply_fp8_weight(kernel: str) -> None:
    arguments, expected = fp8_weight.case(2, 128, 512, True, True)
    got = fp8_weight.product(*fp8_weight.first(9, arguments))
    assert fp8_weight.same(got, [e[:9] for e in expected])


def step_mapping(kernel: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        of_step_mapping.test_the_kernel_says_the_same("verify", kernel, patch)


def attention(name: str, kernel: str) -> None:
    case = build(CASES[name])
    check(case, attention_sm90.launch(case) if kernel == "sm90" else attention_sm100.launch(case)[0])


def attention_by_clusters(kernel: str) -> None:
    case = build(Spec(tokens=1, entry_lengths=(300,)))
    check(case, attention_sm90.launch_on(case, 132, clusters=True)[0])


def attention_of_few_heads(kernel: str) -> None:
    case = build(Spec(tokens=2, heads=16, entry_lengths=(300, 5)))
    check(case, attention_few_heads.launch(case))


ROWS = tuple(name for name in bench_row_kernels.WORKS if name != "norm_rope_store_16_heads")
WORKS: dict[str, Work] = {
    **{name: partial(rows, name) for name in ROWS},
    "boundary": partial(boundary, 3, 2, 1),
    "boundary_of_teams": partial(boundary, 35, 8, 2),
    "post": post,
    "csa": lambda kernel: compressor.test_entries_of_a_chunk(kernel, "csa", "late"),
    "hca": lambda kernel: compressor.test_entries_of_a_chunk(kernel, "hca", "late"),
    "index_query": lambda kernel: indexer.test_queries(kernel, True),
    "index": lambda kernel: indexer.test_scores_and_choice(kernel, "random"),
    "linear": multiply,
    "step_mapping": step_mapping,
    "unpack": lambda kernel: unpack.test_the_kernel_makes_both_parts(kernel, None),
    "attention": partial(attention, "csa_512-fp8"),
    "attention_divided": partial(attention, "split_512-fp8"),
}
ON_HOPPER: dict[str, Work] = {
    "attention_by_clusters": attention_by_clusters,
    "attention_of_few_heads": attention_of_few_heads,
    "index_prefill": lambda kernel: indexer.test_scores_and_choice("sm90, prefill", "random"),
    "linear_fp8_weight": multiply_fp8_weight,
    "experts": lambda kernel: experts.test_the_sum_is_the_definition_s("few", "narrow"),
    "linear_fp8": lambda kernel: linear_fp8.test_it_multiplies(linear_fp8.CASES["persistent-clusters"]),
}
ON_BLACKWELL: dict[str, Work] = {
    "experts_by_blocks": lambda kernel: experts_sm100.test_the_sum_is_the_definition_s("few"),
}
READ_AHEAD = {"linear_fp8": ["UTMALDG"] * 4 + ["LDGSTS"]}
"""Of a kernel: what a warp reads that waits for nothing, weights of four blocks and their scales."""
COOPERATIVE = {("attention_divided", "sm90")}
"""Launched behind the end of what comes before: rule 4 of `dependent_launch`."""
SLOW = ("boundary_of_teams", "attention_divided")
"""What takes longest to compile, and differs from another one only behind the wait."""


def works() -> Iterator[object]:
    of_one = [(name, "sm90") for name in ON_HOPPER] + [(name, "sm100") for name in ON_BLACKWELL]
    for name, kernel in [(name, kernel) for kernel in KERNELS for name in WORKS] + of_one:
        marks = pytest.mark.slow if name in SLOW else ()
        yield pytest.param(name, kernel, marks=marks, id=f"{name}-{kernel}")


@contextlib.contextmanager
def launches() -> Iterator[list[bool]]:
    """Of every launch inside, whether it may begin early."""
    from ptx_emulator import Device

    seen: list[bool] = []
    launch = Device.launch

    def remembered(self: Device, *arguments: object) -> object:
        seen.append(bool(arguments[-1]))
        return launch(self, *arguments)

    with mock.patch.object(Device, "launch", remembered):
        yield seen


def run(name: str, kernel: str) -> list[bool]:
    with launches() as seen:
        (WORKS | ON_HOPPER | ON_BLACKWELL)[name](kernel)
    assert seen
    return seen


@pytest.mark.parametrize(("name", "kernel"), works())
def test_it_waits_and_is_right(name: str, kernel: str) -> None:
    compiled = set(compile_cache._in_memory)
    with dependent_launch.switched(True):
        early = run(name, kernel)
    if name in ROWS:
        early, late = early[: len(early) // 2], early[len(early) // 2 :]
        assert not any(late)
    assert early == [(name, kernel) not in COOPERATIVE] * len(early)
    for key in set(compile_cache._in_memory) - compiled:
        kind, (_, waits), _ = key
        assert_machine_code_waits(compile_cache._in_memory[key].__cubin__, waits, READ_AHEAD.get(kind, []))


def assert_machine_code_waits(cubin: bytes, waits: bool, ahead: list[str]) -> None:
    """ptxas moved no access to global memory to before the wait but those that are meant to stand there, nor the next
    kernel's beginning, and left both in; if it is off there are none."""
    from cubin import opcodes

    found = [opcode for opcode in opcodes(cubin) if opcode in ("ACQBULK", "PREEXIT", "LDG", "STG", "LDGSTS", "UTMALDG")]
    if not waits:
        assert not {"PREEXIT", "ACQBULK"} & set(found), found
        return
    assert found.count("PREEXIT") == 1 and "ACQBULK" in found, found
    assert found[: len(ahead) + 1] == [*ahead, "ACQBULK"] and found.index("PREEXIT") > len(ahead), found


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("fp8_quantise", "sm90"), ("hca", "sm90"), ("boundary", "sm100"), ("attention", "sm100")],
)
def test_a_kernel_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str, kernel: str) -> None:
    from ptx_emulator import EmulationError

    monkeypatch.setattr(compile_cache, "_in_memory", {})
    monkeypatch.setattr(dependent_launch, "wait", lambda: None)
    with dependent_launch.switched(True), pytest.raises(EmulationError, match=r"before griddepcontrol\.wait"):
        run(name, kernel)


def test_only_what_is_named_constant_is_read_ahead() -> None:
    """The boundary's fn, which is not said to be a weight here."""
    from ptx_emulator import EmulationError

    emulate = hyper_connection.emulate
    forgets = mock.patch.object(hyper_connection, "emulate", lambda arch, call, fn, **options: emulate(arch, call))
    with dependent_launch.switched(True), forgets, pytest.raises(EmulationError, match=r"reads float32\[24, 4096\]"):
        run("boundary", "sm90")


def test_the_switch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", dependent_launch.__name__)
    for value, expected in (("on", True), (" OFF", False), ("", None), ("1", None)):
        dependent_launch._in_environment.cache_clear()
        monkeypatch.setenv(dependent_launch.VARIABLE, value)
        if expected is None:
            with pytest.raises(ValueError, match="DSV4_DEPENDENT_LAUNCH must be 'on' or 'off'"):
                dependent_launch.is_on()
        else:
            assert dependent_launch.is_on() is expected
    assert [record.getMessage()[:25] for record in caplog.records] == ["DSV4_DEPENDENT_LAUNCH=off"]
    monkeypatch.delenv(dependent_launch.VARIABLE)
    dependent_launch._in_environment.cache_clear()
    assert dependent_launch.is_on()
    with dependent_launch.switched(True):
        assert dependent_launch.may_begin_early() and not dependent_launch.may_begin_early(cooperative=True)
        with dependent_launch.switched(False):
            assert not dependent_launch.may_begin_early()
        assert dependent_launch.is_on()
    with dependent_launch.switched(False):
        assert not dependent_launch.is_on()
    assert dependent_launch.is_on()


def test_both_are_kept_beside_each_other(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory and on disk: the switch is part of a kernel's name."""
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, str(tmp_path))
    by_default = compile_cache._Stored.at(compile_cache.folder(), "a", "1", "sm_90a")
    made = []
    monkeypatch.setattr(compile_cache, "_from_disk_or_compiler", lambda *arguments: made.append(arguments) or id)
    for on in (False, True, False, True):
        with dependent_launch.switched(on):
            compile_cache.load_or_compile("a", 1, "sm_90a", lambda: None)
    (name, config_of_off, arch, _), (_, config, _, _) = made
    assert compile_cache._Stored.at(compile_cache.folder(), name, config, arch).object == by_default.object
    assert compile_cache._Stored.at(compile_cache.folder(), name, config_of_off, arch).object != by_default.object


# ---- places: rules 3 and 4 of `dependent_launch`, as a model of what a GPU may do, since launches do not meet here


@dataclass
class Grid:
    """A launch of a random program. CTAs go from absent over waiting and running to done."""

    ctas: int
    before: list[Grid]
    """What it waits for: the launch before it in its stream, and where streams fork and join, others."""
    early: bool
    meets: bool
    """Its CTAs wait for each other, so they are placed together."""
    waiting: int = 0
    running: int = 0
    done: int = 0

    @property
    def placed(self) -> int:
        return self.waiting + self.running + self.done

    @property
    def ended(self) -> bool:
        return self.done == self.ctas

    def lets_in(self, all_of_them: bool) -> bool:
        """Whether enough CTAs are behind `begin`."""
        begun = self.running + self.done
        return begun == self.ctas if all_of_them else begun > 0

    def steps(self, places: int, together: bool, all_of_them: bool) -> Iterator[tuple[str, int]]:
        """What may happen to it, with so many places free: (from where, CTAs)."""
        if all(b.ended or (self.early and b.lets_in(all_of_them)) for b in self.before):
            at_once = self.ctas if self.meets and together else 1
            if self.placed < self.ctas and places >= at_once:
                yield "absent", at_once
        if self.waiting and all(b.ended for b in self.before):
            yield "waiting", 1
        if self.running and (not self.meets or self.running + self.done == self.ctas):
            yield "running", 1

    def step(self, origin: str, ctas: int) -> None:
        if origin == "absent":
            self.waiting += ctas
        elif origin == "waiting":
            self.waiting, self.running = self.waiting - 1, self.running + 1
        else:
            self.running, self.done = self.running - 1, self.done + 1


def random_program(rng: random.Random, places: int) -> list[Grid]:
    """Launches of two streams that fork and join at random; some with CTAs that meet, some with more than places."""
    grids: list[Grid] = []
    newest: list[list[Grid]] = [[], []]
    for _ in range(rng.randint(3, 10)):
        stream, meets = rng.randrange(2), rng.random() < 0.3
        before = [*newest[stream], *(newest[1 - stream] if rng.random() < 0.3 else [])]
        early = not meets and rng.random() < 0.8
        ctas = rng.randint(1, places) if meets else rng.randint(1, 3 * places)
        grids.append(Grid(ctas, before, early, meets))
        newest[stream] = [grids[-1]]
    return grids


def hangs(seed: int, together: bool = True, all_of_them: bool = True) -> bool:
    """Whether a random program stops before its end, on a GPU that likes best to place CTAs of late launches."""
    rng = random.Random(seed)
    places = rng.randint(1, 6)
    grids = random_program(rng, places)
    while not all(grid.ended for grid in grids):
        free = places - sum(grid.waiting + grid.running for grid in grids)
        possible = [(grid, step) for grid in grids for step in grid.steps(free, together, all_of_them)]
        if not possible:
            return True
        greedy = [choice for choice in possible if choice[1][0] == "absent"][::-1]
        grid, step = greedy[0] if greedy and rng.random() < 0.7 else rng.choice(possible)
        grid.step(*step)
    return False


def test_nobody_keeps_a_place_from_somebody_that_it_waits_for() -> None:
    assert not any(hangs(seed) for seed in range(600))


def test_it_hangs_without_the_rules() -> None:
    """Where the first CTA lets the next launch in; where CTAs that meet get places one by one."""
    assert any(hangs(seed, all_of_them=False) for seed in range(600))
    assert any(hangs(seed, together=False) for seed in range(600))


# ---- on a GPU, and the benchmark


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_benchmarks_chain(kernel: str) -> None:
    """Of small kernels that hand on what they make, in the emulator: every one begins early."""
    from ptx_emulator import Checks, emulated

    with by_name(), emulated(checks=Checks.strict(), arch=ARCH[kernel], schedule="random") as device:
        chain = bench_row_kernels.Chain(2, 1, torch.device("cpu"), kernel)
        for fn in chain.fn:
            device.memory.constant(fn)
        bench_row_kernels.check_chain(chain)
    assert (len(device.reports), device.dependent_launches) == (2 * chain.LAUNCHES, chain.LAUNCHES)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 64])
def test_a_graph_of_early_launches_has_the_same_bits(kernel_on_gpu: Callable[[str], str], tokens: int) -> None:
    """Replayed many times: a kernel that reads before it waits is wrong now and then."""
    device = torch.device("cuda")
    bench_row_kernels.check_chain(bench_row_kernels.Chain(tokens, 6, device, kernel_on_gpu("norm_rope_store")))
