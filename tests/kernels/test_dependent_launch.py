"""Dependent launches: the small row kernels may begin early, the switch, and a model of how CTAs share a GPU.

Each larger op's test module checks its own kernels with `ops.early_launches`. All other tests of kernels run with
dependent launch on, too; DSV4_DEPENDENT_LAUNCH=off runs them without it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from lib.row_kernel_chain import Chain, check_chain
from lib.row_kernel_works import WORKS
from ops.early_launches import a_missing_wait_is_noticed, early_flags, launched_early
from ops.number_formats import same_bits
from ops.row_kernels import ARCH, KERNELS, emulated_row_kernel
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host import compile_cache

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.usefixtures("compiled_here")

ROWS = tuple(name for name in WORKS if name != "norm_rope_store_16_heads")


@contextlib.contextmanager
def by_name() -> Iterator[None]:
    """Make ops use the implementation that is named, also on a CPU."""
    named = mock.patch.object(registry, "chosen", lambda op, device, dtype, impl: registry._implementation(op, impl))
    with named, mock.patch.object(registry, "_resolved", {}):
        yield


def rows(name: str, kernel: str) -> list[Tensor]:
    """Results of one small op, whose implementation `kernel` runs in the emulator."""
    torch.manual_seed(0)
    work = WORKS[name](3, torch.device("cpu"))
    with by_name(), emulated_row_kernel(kernel, "random"):
        return list(work.call(kernel))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ROWS)
def test_row_kernels_may_begin_early(name: str, kernel: str) -> None:
    """Early launches have the same bits as launches without the switch."""
    with launched_early():
        made = rows(name, kernel)
    with dependent_launch.switched(False), early_flags() as early:
        assert all(map(same_bits, made, rows(name, kernel)))
    assert early and not any(early)


def test_a_missing_wait_is_noticed() -> None:
    with a_missing_wait_is_noticed():
        rows("fp8_quantise", "sm90")


def test_the_switch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", dependent_launch.__name__)
    for value, expected in (("on", True), (" OFF", False), ("", True), ("1", None)):
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
    """Kernels compiled with and without the switch are stored side by side, in memory and on disk: the switch is part
    of the key."""
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


# ---- SM slots: rules 3 and 4 of `dependent_launch`, on a model of a GPU, since launches do not overlap in the emulator


@dataclass
class Grid:
    """A launch in a random program. Its CTAs go from absent through waiting and running to done."""

    ctas: int
    before: list[Grid]
    """The launches that it waits for: the launch before it in its stream, and other streams' launches where streams
    join."""
    early: bool
    meets: bool
    """Whether its CTAs wait for each other, so that all become resident together."""
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
        """Whether enough CTAs have called `begin`."""
        begun = self.running + self.done
        return begun == self.ctas if all_of_them else begun > 0

    def steps(self, places: int, together: bool, all_of_them: bool) -> Iterator[tuple[str, int]]:
        """Yield its possible transitions, with `places` SM slots free: (state that CTAs leave, number of CTAs)."""
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
    """Launches of two streams that fork and join at random; some have CTAs that meet, some more CTAs than there are SM
    slots."""
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
    """Whether a random program stops before its end, on a GPU that prefers CTAs of late launches."""
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


def test_a_waiting_cta_never_occupies_room_that_an_earlier_launch_needs() -> None:
    assert not any(hangs(seed) for seed in range(600))


def test_it_hangs_without_the_rules() -> None:
    """The model hangs if the first CTA releases the next launch, or if CTAs that meet become resident one by one."""
    assert any(hangs(seed, all_of_them=False) for seed in range(600))
    assert any(hangs(seed, together=False) for seed in range(600))


# ---- on a GPU, and the benchmark


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_benchmarks_chain(kernel: str) -> None:
    """A chain of small kernels, each of which reads the previous one's result, in the emulator: every launch begins
    early."""
    from ptx_emulator import Checks, emulated

    with by_name(), emulated(checks=Checks.strict(), arch=ARCH[kernel], schedule="random") as device:
        chain = Chain(2, 1, torch.device("cpu"), kernel)
        for fn in chain.fn:
            device.memory.constant(fn)
        check_chain(chain)
    assert (len(device.reports), device.dependent_launches) == (2 * chain.LAUNCHES, chain.LAUNCHES)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 64])
def test_a_graph_of_early_launches_has_the_same_bits(kernel_on_gpu: Callable[[str], str], tokens: int) -> None:
    """Replayed many times: a kernel that reads before it waits is wrong only sometimes."""
    device = torch.device("cuda")
    check_chain(Chain(tokens, 6, device, kernel_on_gpu("norm_rope_store")))
