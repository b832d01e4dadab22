"""The Hopper attention kernel in the emulator (tests/emulator), over the hard cases of attention_cases.py.

Every launch runs with all checks of the emulator on: races, missing proxy fences, registers that wgmma still uses,
reads of uninitialised memory, accesses outside of tensors. The adversarial schedule changes from case to case; separate
tests show equal bits under every schedule, in every batch and on any number of multiprocessors. The compile gate checks
registers, stack, shared memory and asynchrony of the cubins.

Quick tests need few kernels, because compiling takes most of the time. On a GPU test_sparse_attention_gpu.py runs the
same cases.
"""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from ops import attention_launch
from ops.attention_cases import CASES, Case, Spec, build
from ops.attention_check import check, check_surroundings
from ops.attention_launch import SCHEDULES
from ops.early_launches import launched_early
from ops.memory_layout import far_apart
from ops.number_formats import same_bits
from ops.random_attention import random_spec
from selection.marks import with_slow_marks

if TYPE_CHECKING:
    from dsv4_kernels.sparse_attention.sm90.plan import Configuration
from ops.hopper_attention import QUICK, is_quick, launch, launch_on, with_marks

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.usefixtures("compiled_here")


# ---- values


@pytest.mark.parametrize("name", with_marks(CASES))
def test_case(name: str) -> None:
    case = build(CASES[name])
    seed = list(CASES).index(name)
    check(case, launch(case, schedule=SCHEDULES[seed % len(SCHEDULES)], seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_case_under_another_schedule(name: str) -> None:
    """The same cases with other contents."""
    case = build(CASES[name], seed=1)
    seed = list(CASES).index(name)
    check(case, launch(case, schedule=SCHEDULES[(seed + 1) % len(SCHEDULES)], seed=1000 + seed))


RANDOM = range(120)


@pytest.mark.parametrize("seed", with_slow_marks(RANDOM, [n for n in RANDOM if is_quick(random_spec(n))][:3]))
def test_random_case(seed: int) -> None:
    """The values are right, and the bits are equal on few multiprocessors and by the cluster kernel."""
    case = build(random_spec(seed), seed=seed)
    result, _ = launch_on(case, 132, clusters=seed % 2 == 0, schedule=SCHEDULES[seed % len(SCHEDULES)], seed=seed)
    check(case, result)
    _, fewest, _ = multiprocessors_for(case)
    other = launch(case, fewest + seed % 17, schedule=SCHEDULES[(seed + 1) % len(SCHEDULES)], seed=seed)
    assert same_bits(result, other)


@pytest.mark.parametrize(
    ("name", "cooperative"), [("csa_512-fp8", False), pytest.param("split_512-fp8", True, marks=pytest.mark.slow)]
)
def test_it_may_begin_early(name: str, cooperative: bool) -> None:
    """A launch begins early unless its CTAs wait for each other."""
    case = build(CASES[name])
    with launched_early(cooperative):
        out = launch(case)
    check(case, out)


def test_clusters_may_begin_early() -> None:
    case = build(Spec(tokens=1, entry_lengths=(300,)))
    with launched_early():
        out = launch_on(case, 132, clusters=True)[0]
    check(case, out)


@pytest.mark.parametrize("heads", [1, 63, 65, 128])
@pytest.mark.parametrize("split_keys", [None, 128], ids=["one_kv_split", "split"])
def test_nothing_is_written_beside_the_output(heads: int, split_keys: int | None) -> None:
    case = build(Spec(tokens=2, heads=heads, entry_lengths=(200, 0), split_keys=split_keys))
    check_surroundings(case, launch)


POOLS = {
    "list_fp8": (Spec(tokens=4, heads=16, entry_lengths=(70, 3)), False),
    "list_fp8_split": (Spec(tokens=4, heads=16, entry_lengths=(70, 130), split_keys=128), False),
    "list_fp8_clusters": (Spec(tokens=4, heads=16, entry_lengths=(70, 3)), True),
    "pages_bf16": (Spec(tokens=4, heads=16, entry_lengths=(70, 3), dense=True, fp8=False), False),
}
"""(case, whether the cluster kernel computes it)."""


@pytest.mark.parametrize("name", POOLS)
def test_rows_beyond_32_bits(name: str) -> None:
    """Offsets of rows need 64 bits, in bytes and in elements, in the window's table and in the entries' table."""
    spec, clusters = POOLS[name]
    case = build(spec)
    result, _ = launch_on(case.spread(), 132 if clusters else 4, clusters)
    check(case, result)


@pytest.mark.parametrize("name", POOLS)
def test_q_and_outputs_beyond_32_bits(name: str) -> None:
    spec, clusters = POOLS[name]
    case = build(spec)
    out = far_apart(torch.empty(case.q.shape, dtype=torch.bfloat16))
    result, _ = launch_on(replace(case, q=far_apart(case.q)), 132 if clusters else 4, clusters, out=out)
    check(case, result)


def test_more_kv_splits_than_multiprocessors_are_refused() -> None:
    """CTAs that combine a token wait for each other, so all must be resident."""
    case = build(Spec(tokens=1, heads=65, entry_lengths=(200,), split_keys=128))
    with pytest.raises(ValueError, match="into 3 KV splits, times 2 blocks of heads; expected at most 5 CTAs"):
        launch(case, multiprocessors=5)
    check(case, launch(case, multiprocessors=6))


# ---- bits


def multiprocessors_for(case: Case) -> tuple[int, ...]:
    """Many multiprocessors, the fewest possible, and a number that divides no count of work tiles."""
    problem = case.problem()
    fewest = problem.max_kv_splits * -(-problem.num_heads // 64) if problem.max_kv_splits > 1 else 1
    return 132, fewest, fewest + 2


UNPACKED = [
    *("csa_512-fp8", "holes-fp8", "scales_at_the_extremes-fp8"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "heads_65-fp8",
            "sinks_mixed-fp8",
            "list_lengths-fp8",
            "window_lengths-fp8",
            "hca_32k-fp8",
            "dense_lengths-fp8",
        )
    ),
]
"""Other cases compile the kernels with lists too, except one; most slow cases need further kernels."""


@pytest.mark.parametrize("name", UNPACKED)
def test_unpacked_rows_give_the_same_bits(name: str) -> None:
    """FP8 rows and the bf16 rows unpacked from them give the same bits."""
    case = build(CASES[name])
    plain = case.unpacked(functools.partial(attention_launch.unpack_emulated, "sm90"))
    assert same_bits(launch(case), launch(plain))


# ---- clusters


def fits_a_cluster(spec: Spec) -> bool:
    """Whether the case can use the cluster kernel: a CTA for every step of a token, and a single KV split."""
    problem = build(spec).problem()
    return problem.max_kv_splits == 1 and problem.max_steps <= 9


CLUSTERED = [name for name, spec in CASES.items() if fits_a_cluster(spec)]
QUICK_CLUSTERED = (
    "csa_512-fp8",
    "list_lengths-fp8",
    "heads_65-fp8",
    "scales_at_the_extremes-fp8",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK_CLUSTERED else pytest.mark.slow) for n in CLUSTERED]
)
def test_clusters_have_the_bits_of_the_other_kernel(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The bits are equal for every channel split, and with more clusters than are resident."""
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90
    from dsv4_kernels.sparse_attention.sm90.plan import CHANNEL_SPLITS, Split

    case, seed = build(CASES[name]), list(CASES).index(name)
    expected = launch(case)
    for channel_splits in CHANNEL_SPLITS[Split.STEPS]:  # slow in the emulator, where every st.async may be delayed
        monkeypatch.setattr(sm90, "_channel_splits_of_clusters", lambda problem, n=channel_splits: n)
        result, device = launch_on(case, 132, clusters=True, schedule="random_warps", seed=seed)
        assert same_bits(expected, result), channel_splits
        (report,) = device.reports
        problem = case.problem()
        assert report.grid == (problem.max_steps, channel_splits, problem.num_tokens * -(-problem.num_heads // 64))
    check(case, result)


@pytest.mark.parametrize(
    ("name", "waits"), [pytest.param("split_512-fp8", True, marks=pytest.mark.slow), ("csa_512-fp8", False)]
)
def test_ctas_that_wait_for_each_other_are_launched_together(
    monkeypatch: pytest.MonkeyPatch, name: str, waits: bool
) -> None:
    """The launch is cooperative: otherwise resident CTAs could wait for CTAs that never become resident."""
    from cutlass.cutlass_dsl import cutlass as dsl

    from dsv4_kernels.host import compile_cache

    cooperative: list[bool] = []
    configure = dsl.cuda_dialect.launch_cfg_cooperative

    def remembered(config: object, value: object, **options: object) -> object:
        cooperative.append("1 : i32" in str(value.owner))
        return configure(config, value, **options)

    monkeypatch.setattr(dsl.cuda_dialect, "launch_cfg_cooperative", remembered)
    monkeypatch.setattr(compile_cache, "_in_memory", {})
    launch(build(CASES[name]))
    assert cooperative == [waits]


def test_few_tokens_with_few_keys_are_computed_by_clusters() -> None:
    """A launch has as many channel splits as fit at once; with less room fewer, or the persistent kernel."""
    case = build(Spec(tokens=2, heads=65, entry_lengths=(300, 5)))  # 4 steps
    grids = {}
    for multiprocessors in (64, 63, 32, 31):
        result, device = launch_on(case, multiprocessors, clusters=True)
        check(case, result)
        grids[multiprocessors] = device.reports[0].grid
    assert grids == {64: (4, 4, 4), 63: (4, 2, 4), 32: (4, 2, 4), 31: (4, 1, 1)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "spec",
    [
        Spec(tokens=2, heads=16, entry_lengths=(129, 5)),
        *(
            pytest.param(CASES[name], marks=pytest.mark.slow)
            for name in ("csa_512-fp8", "list_lengths-bf16", "csa_1024-fp8")
        ),
    ],
    ids=["three_steps", "csa_512-fp8", "list_lengths-bf16", "csa_1024-fp8"],
)
def test_clusters_under_every_schedule(spec: Spec, schedule: str) -> None:
    """A cluster of three CTAs of which one is idle, and the largest cluster."""
    case = build(spec, seed=2)
    expected = launch(case)
    for seed in range(2):
        result, _ = launch_on(case, 132, clusters=True, schedule=schedule, seed=seed)
        assert same_bits(expected, result), seed


SAME_BITS = (
    *("heads_65-fp8", "split_128-fp8", "split_128_heads-fp8"),
    *("whole_tokens_of_kv_splits-fp8", "sub_splits-fp8", "sub_splits_of_kv_splits-fp8"),
)
"""The second case has more than three work tiles a CTA, so that scratch slots are reused. In the last three, tokens or
KV splits stay whole on few multiprocessors and are divided into sub-splits on many."""


@pytest.mark.parametrize("name", with_slow_marks(SAME_BITS, quick=["heads_65-fp8", "split_128-fp8", "sub_splits-fp8"]))
def test_the_same_bits_under_every_schedule(name: str) -> None:
    """The bits are equal for every order of CTAs, on any number of multiprocessors."""
    case = build(CASES[name])
    expected = launch(case)
    for schedule, multiprocessors in zip(SCHEDULES, multiprocessors_for(case)[::-1], strict=True):
        result = launch(case, multiprocessors, schedule=schedule, seed=multiprocessors)
        assert same_bits(expected, result), (schedule, multiprocessors)


@pytest.mark.parametrize("multiprocessors", [132, 20, 8])
def test_sub_splits_have_the_bits_of_the_whole(multiprocessors: int) -> None:
    """Sub-splits of one step, of several steps, and none, compared with the kernel that does not divide tokens."""
    divided = build(Spec(tokens=2, entry_lengths=(1024, 300), split_keys=1280))
    whole = replace(divided, spec=replace(divided.spec, split_keys=None))
    assert same_bits(launch(divided, multiprocessors), launch(whole))


@pytest.mark.parametrize(
    "spec, multiprocessors, ctas, results",
    [
        # [2, 1, 1, 1] steps: three CTAs prefetch the three partial results after the first.
        (Spec(tokens=1, heads=16, entry_lengths=(512,), split_keys=1280), 4, 3, 3),
        # [2] steps and seven sub-splits of one step; two blocks of heads.
        (Spec(tokens=1, heads=65, entry_lengths=(1024,), split_keys=1280), 16, 7, 7),
        # No room to prefetch: [3, 2, 2, 2] steps, six results of eleven columns. Then all sub-splits of one step.
        (Spec(tokens=1, heads=16, entry_lengths=(1024,), split_keys=1280), 4, 0, 0),
        (Spec(tokens=1, heads=16, entry_lengths=(512,), split_keys=1280), 5, 0, 0),
    ],
    ids=["longer_by_one_of_two", "two_blocks_of_heads", "no_room", "none_longer"],
)
def test_partials_are_prefetched_before_a_longer_first_sub_split_is_written(
    spec: Spec, multiprocessors: int, ctas: int, results: int
) -> None:
    """Prefetching gives the bits of an undivided token under every schedule.

    It is recognised by the consumers' copies of 16 bytes a lane: a partial result's columns and, for every CTA, its row
    maxima and row sums.
    """
    case = build(spec)
    whole = launch(replace(case, spec=replace(spec, split_keys=None)))
    check(case, whole)
    steps, blocks = 1 + spec.entry_lengths[0] // 128, -(-spec.heads // 64)
    for seed, schedule in enumerate(SCHEDULES):
        result, device = launch_on(case, multiprocessors, schedule=schedule, seed=seed)
        assert same_bits(whole, result), schedule
        of_q_and_rows = device.reports[0].grid[0] * 64 * 64 // 32 + steps * blocks * 128 * 8 // 32
        prefetched = blocks * results * (64 * 512 * 4 // 16 // 32 + ctas * 8)
        assert device.reports[0].by_form["cp.async.cg.shared.global"] == of_q_and_rows + prefetched


@pytest.mark.parametrize("split", [False, True], ids=["whole", "sub_splits"])
@pytest.mark.parametrize("fp8", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fp8", "bf16"])
def test_the_same_bits_for_any_channel_splits(monkeypatch: pytest.MonkeyPatch, fp8: bool, split: bool) -> None:
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90
    from dsv4_kernels.sparse_attention.sm90.plan import CHANNEL_SPLITS, Split

    case = build(Spec(tokens=3, heads=65, fp8=fp8, entry_lengths=(1024, 0, 300), split_keys=1280))
    monkeypatch.setattr(sm90, "_divides", lambda problem: split)
    results = []
    for channel_splits in CHANNEL_SPLITS[Split.SUB_SPLITS if split else Split.NONE]:
        monkeypatch.setattr(sm90, "_channel_splits", lambda *_, n=channel_splits: n)
        results.append(launch(case))
        check(case, results[-1])
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SAME_BITS, "csa_512-bf16", "hca_32k-bf16", "split_256-bf16", "split_of_nothing-fp8"])
def test_the_same_bits_under_more_schedules(name: str) -> None:
    case = build(CASES[name], seed=2)
    expected = launch(case)
    for (schedule, seed), multiprocessors in zip(
        itertools.product(SCHEDULES, range(3)), multiprocessors_for(case) * 3, strict=True
    ):
        result = launch(case, multiprocessors, schedule=schedule, seed=10 + seed)
        assert same_bits(expected, result), (schedule, seed, multiprocessors)


@pytest.mark.parametrize("name", with_marks(["list_lengths-fp8", "split_8_heads-fp8", "split_512-bf16"]))
def test_a_token_has_the_same_bits_in_any_batch(name: str) -> None:
    """A token has the same bits at any position of any batch, and on other numbers of multiprocessors."""
    case = build(CASES[name])
    out = launch(case)
    for batch, multiprocessors in zip((1, 3, 11), multiprocessors_for(case), strict=True):
        order = torch.randint(0, case.spec.tokens, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
        assert same_bits(launch(case.take(order), multiprocessors), out[order])


def test_the_same_bits_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with more tokens than a launch may divide."""
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    case = build(CASES["split_8_heads-fp8"])
    expected = launch(case)
    monkeypatch.setattr(sm90, "MAX_SPLIT_TOKENS", 2)
    assert same_bits(expected, launch(case))


def test_several_launches_of_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch of a divided call starts at its own tokens in requests, lengths, rows and results."""
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    monkeypatch.setattr(sm90, "MAX_SPLIT_TOKENS", 2)
    lengths = {"window_lengths": (128, 3, 70, 9), "entry_lengths": (5, 200, 70, 0)}
    case = build(Spec(tokens=4, heads=8, dense=True, split_keys=128, **lengths))
    result, device = launch_on(case, 132)
    assert len(device.reports) == 2
    check(case, result)


@pytest.mark.parametrize("split_keys", [None, 128])
@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_width_of_lists_and_tables_is_not_seen(dense: bool, split_keys: int | None) -> None:
    case = build(Spec(entry_lengths=(300, 3, 130), dense=dense, split_keys=split_keys))
    name = "page_table" if dense else "entry_indices"
    wide = torch.nn.functional.pad(case.entry_arguments[name], (0, 524), value=2**31 - 1)
    wider = replace(case, entry_arguments={**case.entry_arguments, name: wide})
    assert same_bits(launch(wider), launch(case))


# Eight tokens of one to four KV splits on four multiprocessors, so that scratch slots are reused; one token whose
# channels four CTAs divide; one token whose sub-splits prefetch partial results; whole tokens of bf16 rows, two or
# three a multiprocessor; and clusters of tokens with three steps, two and one. Each with the share of deleted fences
# that is noticed.
MUTATED = {
    "sparse_attention_sm90": (
        Spec(tokens=8, window_lengths=(128, 3), entry_lengths=(200, 5, 700), split_keys=256),
        5 / 6,
    ),
    "sparse_attention_sm90_channel_splits": (Spec(tokens=1, heads=16, entry_lengths=(200,)), 3 / 4),
    "sparse_attention_sm90_sub_splits": (Spec(tokens=1, heads=16, entry_lengths=(512,), split_keys=1280), 3 / 4),
    "sparse_attention_sm90_bf16": (
        Spec(tokens=10, window_lengths=(128, 3), entry_lengths=(200, 5, 300), fp8=False),
        1,
    ),
    "sparse_attention_sm90_clusters": (Spec(tokens=3, heads=16, entry_lengths=(200, 5, 0)), 1),
}


@pytest.mark.slow
@pytest.mark.usefixtures("in_turns")
@pytest.mark.parametrize("name", MUTATED)
def test_deleted_synchronisation_is_noticed(name: str) -> None:
    """Every deletion is noticed, except the proxy fence from cp.async to wgmma, which the emulator does not enforce."""
    spec, fences = MUTATED[name]
    clusters = name.endswith("clusters")
    _, device = launch_on(build(spec), multiprocessors=18 if clusters else 4, clusters=clusters, record=True)
    rates = attention_launch.delete_synchronisation(name, device)
    assert rates.pop("fence") >= fences
    assert rates and set(rates.values()) == {1}


# ---- compile gate


def gate(configuration: Configuration) -> dict[str, int]:
    """The static numbers of a compiled configuration, after comparing them with the record."""
    from lib.sparse_attention_sm90_static import RESULTS, static_numbers
    from ptx_emulator import emulated

    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    with emulated(arch=sm90.ARCH):
        found = static_numbers(configuration)
    recorded = json.loads(RESULTS.read_text())[str(configuration)]
    over = {name: value for name, value in found.items() if value > recorded[name]}
    assert found.keys() == recorded.keys() and not over, f"{configuration} needs more than {recorded}: {over}"
    return found


def registers_at_launch(threads: int) -> int:
    """Registers of a thread at launch: 65,536 divided among the threads, in multiples of 8."""
    return 65536 // threads // 8 * 8


def test_no_more_registers_are_moved_than_there_are() -> None:
    """A CTA has only the registers of its launch: setmaxnreg would wait forever for more."""
    from dsv4_kernels.sparse_attention.sm90.launch import configurations

    for configuration in configurations():
        consumer, producer = configuration.registers
        there_are = registers_at_launch(configuration.threads) * configuration.threads // 128
        assert 2 * consumer + configuration.producers * producer <= there_are, configuration


SPLITS = (
    *(("NONE", channel_splits) for channel_splits in (1, 2)),
    ("KV_SPLITS", 1),
    *(("SUB_SPLITS", channel_splits) for channel_splits in (1, 2, 4)),
    *(("STEPS", channel_splits) for channel_splits in (2, 4)),
)
CONFIGURATIONS = [
    (fp8, entries, *split) for fp8 in (True, False) for entries in ("NONE", "LIST", "PAGES") for split in SPLITS
]
GATED = {
    (True, "LIST", "STEPS", 4),
    *(
        (fp8, entries, "SUB_SPLITS" if split else "NONE", channel_splits)
        for fp8, entries, split in QUICK
        for channel_splits in (1, 4 if split else 2)
    ),
}
"""Configurations of a CSA prefill, and some that the quick cases compile."""


@pytest.mark.parametrize(
    ("fp8_rows", "entries", "split", "channel_splits"),
    [pytest.param(*c, marks=() if c in GATED else pytest.mark.slow) for c in CONFIGURATIONS],
)
def test_compiled(fp8_rows: bool, entries: str, split: str, channel_splits: int) -> None:
    """Registers, stack and code are at most those in benchmarks/results; wgmma runs asynchronously."""
    from dsv4_kernels.sparse_attention.sm90.plan import Configuration, Entries, Split

    configuration = Configuration(fp8_rows, Entries[entries], Split[split], channel_splits)
    found = gate(configuration)
    at_launch = registers_at_launch(configuration.threads)
    assert found["registers"] == at_launch, "the threads share 65,536; setmaxnreg moves them"
    assert found["shared_memory_bytes"] <= 227 * 1024
    assert found["stack_bytes"] <= 32, "what is kept there is written once a work tile, not in the loop over steps"


def test_every_configuration_is_recorded() -> None:
    from lib.sparse_attention_sm90_static import RESULTS

    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    configurations = (*sm90.configurations(), *sm90.configurations_of_few_heads())
    assert list(json.loads(RESULTS.read_text())) == [*map(str, configurations)]
