"""The Blackwell attention kernel in the emulator (tests/emulator), over the hard cases of attention_cases.py.

Every launch runs with all checks of the emulator on: races, missing proxy and tcgen05 fences, reads of uninitialised
memory, accesses outside of tensors. The adversarial schedule changes from case to case; separate tests show equal bits
under every schedule, in every batch and on any number of multiprocessors. The compile gate checks registers, stack and
shared memory of the cubins, and the forms of instructions that occur.

These tests verify the kernel by emulation; it has not run on a B200.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from ops import attention_launch
from ops.attention_cases import CASES, Case, Spec, build
from ops.attention_check import check, check_surroundings, reference, relative_error
from ops.attention_launch import LONG, SCHEDULES
from ops.early_launches import a_missing_wait_is_noticed, launched_early
from ops.memory_layout import NONSENSE, far_apart, sparse
from ops.number_formats import same_bits
from ops.random_attention import random_spec

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.usefixtures("compiled_here")

if TYPE_CHECKING:
    from ptx_emulator import Device


def launch(case: Case, multiprocessors: int = 148, **options: object) -> tuple[torch.Tensor, Device]:
    """(out, the emulated device) of one call, see `attention_launch.launch`."""
    from ptx_emulator import Checks

    from dsv4_kernels.sparse_attention.sm100 import launch as sm100

    sm100.hardware_multiprocessors.cache_clear()  # this device has another number of multiprocessors
    options = {"checks": Checks.strict(), **options}
    return attention_launch.launch(sm100.sparse_attention, case, multiprocessors, **options)


# ---- values


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n.startswith(LONG) else ()) for n in CASES])
def test_case(name: str) -> None:
    case = build(CASES[name])
    seed = list(CASES).index(name)
    result, _ = launch(case, schedule=SCHEDULES[seed % len(SCHEDULES)], seed=seed)
    check(case, result)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.slow if n >= 8 else ()) for n in range(400)])
def test_random_case(seed: int) -> None:
    """The values are right, and the bits are equal on few multiprocessors."""
    case = build(random_spec(seed), seed=seed)
    result, _ = launch(case, schedule=SCHEDULES[seed % len(SCHEDULES)], seed=seed)
    check(case, result)
    other, _ = launch(case, multiprocessors=2 + seed % 7, schedule=SCHEDULES[(seed + 1) % len(SCHEDULES)], seed=seed)
    assert same_bits(result, other)


SERVED = {
    "csa_1024_heads_128": Spec(tokens=2, heads=128, entry_lengths=(1024, 700)),
    "hca_1m": Spec(tokens=1, entry_lengths=(8192,), dense=True, split_keys=1024),
    "tokens_130": Spec(tokens=130, heads=8, window_lengths=(128, 3), entry_lengths=(5, 0, 64, 9)),
}


@pytest.mark.parametrize("name", SERVED)
def test_as_served(name: str) -> None:
    """Smaller versions of the slow cases: 8,192 entries, a long list for a pair of CTAs, CTAs with many tokens."""
    case = build(SERVED[name])
    result, _ = launch(case, multiprocessors=7)
    check(case, result)


def test_weights_never_exceed_one() -> None:
    """Values of 2**120, where O is not rescaled for every maximum: weights above 1 would overflow."""
    case = build(Spec(tokens=8, window_lengths=(3,), entry_lengths=(512,), holes=0.95, scales="extreme"))
    result, _ = launch(case)
    check(case, result)


@pytest.mark.parametrize("name", ["csa_512-fp8", pytest.param("split_512-fp8", marks=pytest.mark.slow)])
def test_it_may_begin_early(name: str) -> None:
    case = build(CASES[name])
    with launched_early():
        out, _ = launch(case)
    check(case, out)


def test_a_missing_wait_is_noticed() -> None:
    case = build(CASES["csa_512-fp8"])
    with a_missing_wait_is_noticed():
        launch(case)


@pytest.mark.parametrize("heads", [1, 63, 65, 128])
@pytest.mark.parametrize("split_keys", [None, 128], ids=["one_kv_split", "split"])
def test_nothing_is_written_beside_the_output(heads: int, split_keys: int | None) -> None:
    case = build(Spec(tokens=2, heads=heads, entry_lengths=(200, 0), split_keys=split_keys))
    check_surroundings(case, lambda case, out: launch(case, out=out)[0])


POOLS = {
    "list_fp8": Spec(tokens=2, heads=16, entry_lengths=(70, 3)),
    "pages_bf16": Spec(tokens=2, heads=16, entry_lengths=(70, 3), dense=True, fp8=False),
}


@pytest.mark.parametrize("name", POOLS)
def test_rows_beyond_32_bits(name: str) -> None:
    """Offsets of rows need 64 bits, in bytes and in elements, in the window's table and in the entries' table."""
    case = build(POOLS[name])
    check(case, launch(case.spread())[0])


@pytest.mark.parametrize("split_keys", [None, 128], ids=["one_split", "split"])
def test_q_and_outputs_beyond_32_bits(split_keys: int | None) -> None:
    case = build(Spec(tokens=4, heads=16, entry_lengths=(3, 70), split_keys=split_keys))
    out = far_apart(torch.empty(case.q.shape, dtype=torch.bfloat16))
    result, _ = launch(replace(case, q=far_apart(case.q)), out=out)
    check(case, result)


def test_partial_results_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second token's scratch slots follow those of all possible KV splits of the first; most are unused."""
    from dsv4_kernels.sparse_attention import scratch

    case = build(Spec(tokens=2, heads=16, window=0, window_lengths=(0,), entry_lengths=(200, 300), split_keys=128))
    rows = torch.nn.functional.pad(case.entry_arguments["entry_indices"], (0, (1 << 23) + 128), value=NONSENSE)
    monkeypatch.setattr(scratch, "_by_stream", {})
    monkeypatch.setattr(scratch, "_slots", lambda device, num_bytes: sparse((num_bytes,), (1,), torch.uint8))
    scratch.Scratch.on(case.q.device, 1 << 35)
    result, _ = launch(replace(case, entry_arguments={**case.entry_arguments, "entry_indices": rows}))
    check(case, result)


def test_too_many_tokens_with_kv_splits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_kernels.sparse_attention.sm100 import launch as sm100

    monkeypatch.setattr(sm100, "NUM_COUNTERS", 9)
    with pytest.raises(ValueError, match="5 tokens of 65 heads with split_keys; expected at most 4"):
        launch(build(Spec(tokens=5, heads=65, entry_lengths=(300,), split_keys=128)))


# ---- bits


UNPACKED = (
    "csa_512-fp8",
    "holes-fp8",
    "heads_65-fp8",
    "scales_at_the_extremes-fp8",
    "hca_32k-fp8",
    "window_lengths-fp8",
)


@pytest.mark.parametrize("name", UNPACKED)
def test_unpacked_rows_give_the_same_bits(name: str) -> None:
    """FP8 rows and the bf16 rows unpacked from them give the same bits."""
    case = build(CASES[name])
    plain = case.unpacked(functools.partial(attention_launch.unpack_emulated, "sm100"))
    assert same_bits(launch(case)[0], launch(plain)[0])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("lengths_of_both-fp8", marks=pytest.mark.slow),
        *("heads_128-fp8", "split_128-bf16", "split_128_heads-fp8"),
    ],
)
def test_the_same_bits_under_every_schedule(name: str) -> None:
    """The bits are equal for every order of CTAs, and on a single multiprocessor."""
    case = build(CASES[name])
    expected, _ = launch(case)
    for (schedule, seed), multiprocessors in zip(
        itertools.product(SCHEDULES, (1, 2)), (148, 3, 2, 5, 148, 4), strict=True
    ):
        result, _ = launch(case, multiprocessors, schedule=schedule, seed=seed)
        assert same_bits(expected, result), (schedule, seed, multiprocessors)


@pytest.fixture(scope="module")
def errors() -> Iterator[dict[str, dict[str, float]]]:
    """The errors that the slow cases measure; DSV4_WRITE_RESULTS=1 writes them to the committed result."""
    measured: dict[str, dict[str, float]] = {}
    yield measured
    if os.environ.get("DSV4_WRITE_RESULTS") and len(measured) == len(CASES):
        from ptx_emulator.campaigns import summaries

        document = {"schedules": [*SCHEDULES], "seeds": [10, 11, 12], **dict(sorted(measured.items()))}
        summaries.write("sparse_attention_sm100", document)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_under_more_schedules(name: str, errors: dict[str, dict[str, float]]) -> None:
    """Other contents; the error relative to bf16 PyTorch's, in the Frobenius norm, where random errors average out."""
    case = build(CASES[name], seed=1)
    expected, _ = launch(case)
    exact = reference(case)
    for schedule, seed in itertools.product(SCHEDULES, range(1 if name.startswith(LONG) else 3)):
        result, _ = launch(case, (3, 148, 2)[seed], schedule=schedule, seed=10 + seed)
        assert same_bits(expected, result), (schedule, seed)
    check(case, expected, exact)
    if exact.out.any():
        outs = {"ours": expected, "bf16": exact.bf16_out}
        errors[name] = {who: float(f"{relative_error(out, exact.out):.4g}") for who, out in outs.items()}
        assert errors[name]["ours"] <= 1.25 * errors[name]["bf16"] + 2.0**-14
    else:
        errors[name] = {}
        assert not expected.any()


# Two tokens and more on two multiprocessors; KV splits, holes, lengths that end within a key tile.
MUTATED = {
    "sparse_attention_sm100": Spec(tokens=3, heads=16, entry_lengths=(200, 5, 60), split_keys=256),
    "sparse_attention_sm100_pair": Spec(tokens=3, heads=128, entry_lengths=(300, 5, 260)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("in_turns")
@pytest.mark.parametrize("name", MUTATED)
def test_deleted_synchronisation_is_noticed(name: str) -> None:
    """Every deletion is noticed, except those explained in emulator/results/mutation_reasons.json."""
    _, device = launch(build(MUTATED[name]), multiprocessors=2, record=True)
    rates = attention_launch.delete_synchronisation(name, device)
    assert rates and set(rates.values()) == {1}


@pytest.mark.parametrize("name", ["csa_512-bf16", "split_512-fp8", "split_8_heads-fp8", "split_128_heads-fp8"])
def test_a_token_has_the_same_bits_in_any_batch(name: str) -> None:
    """A token has the same bits at any position of any batch, and on other numbers of multiprocessors."""
    case = build(CASES[name])
    out, _ = launch(case)
    for batch, multiprocessors in ((1, 148), (3, 2), (17, 4)):
        order = torch.randint(0, case.spec.tokens, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
        other, _ = launch(case.take(order), multiprocessors)
        assert same_bits(other, out[order])


@pytest.mark.parametrize("split_keys", [None, 128])
def test_the_width_of_lists_and_tables_is_not_seen(split_keys: int | None) -> None:
    for dense in (False, True):
        case = build(Spec(entry_lengths=(300, 3, 130), dense=dense, split_keys=split_keys))
        name = "page_table" if dense else "entry_indices"
        wide = torch.nn.functional.pad(case.entry_arguments[name], (0, 524), value=2**31 - 1)
        wider = replace(case, entry_arguments={**case.entry_arguments, name: wide})
        assert same_bits(launch(wider)[0], launch(case)[0])


# ---- compile gate


def recorded() -> dict:
    from lib.sparse_attention_sm100_static import RESULTS

    return json.loads(RESULTS.read_text())


def test_resources_are_the_recorded_ones() -> None:
    """No spills, and at most the registers and bytes in benchmarks/results (written by the script of that name)."""
    from lib.sparse_attention_sm100_static import all_resources
    from ptx_emulator import emulated

    with emulated():
        found = all_resources()
    limits = recorded()["resources"]
    assert found.keys() == limits.keys()
    for config, values in found.items():
        assert values["stack_bytes"] == 0, f"{config}: {values}"
        assert values["registers"] * 32 * 16 <= 65536, "13 warps are allocated like 16"
        over = {name: value for name, value in values.items() if value > limits[config][name]}
        assert not over, f"{config} needs more than {limits[config]}: {over}"


@pytest.mark.slow
def test_compiles_for_b300() -> None:
    """The kernel compiles for B300, which docs/blackwell.md names."""
    from lib.cubin import resources
    from ptx_emulator import emulated

    from dsv4_kernels.sparse_attention.sm100 import launch as sm100

    arch = "sm_103a"
    with emulated(arch=arch):
        for config in sm100.configurations():
            if config.can_split:
                function = sm100.compile(config, arch)
                assert f".target {arch}" in function.__ptx__
                assert resources(function.__cubin__)["stack_bytes"] == 0


def test_an_old_compiler_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    import cutlass

    from dsv4_kernels.host import compile_cache
    from dsv4_kernels.sparse_attention.sm100 import launch as sm100

    monkeypatch.setattr(cutlass, "target_version", lambda *, min_version: min_version < "13")
    monkeypatch.setattr(compile_cache, "_in_memory", {})
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    with pytest.raises(RuntimeError, match=r"expected 13\.2 or later.*nvidia-cutlass-dsl\[cu13\]"):
        sm100.compile(sm100.configurations()[0])


def test_static_bounds() -> None:
    """Data movement bounds large cases; the instructions in the PTX take less time than the shared memory port.

    For pairs of CTAs no unit of the chip takes more than 1.25 of the tensor core's floor. No unit takes more than 1.25
    of the larger of that floor and HBM's, except for 1M tokens of HCA with 64 heads.
    """
    from lib.sparse_attention_sm100_static import CASES as STATIC_CASES
    from lib.sparse_attention_sm100_static import UNITS, cycles_of

    cycles = recorded()["cycles"]
    assert cycles.keys() == {case.name for case in STATIC_CASES}
    for case in (case for case in STATIC_CASES if case.large):
        large = cycles[case.name]
        assert large["bound by"] in ("port", "hbm")
        on_chip = {unit: large[unit] for unit in UNITS if unit != "hbm"}
        assert max(on_chip, key=on_chip.__getitem__) == "port"
        assert case.heads == 64 or large["port"] <= 1.25 * large["floor"]
        assert large["roofline"] <= (1.52 if case.name == "HCA 8192 (context 1M)" else 1.25)
    found = cycles_of(STATIC_CASES[1])
    expected = cycles[STATIC_CASES[1].name]
    for unit in UNITS:
        assert found[unit] <= expected[unit] * 1.02, unit


def test_only_forms_that_foreign_kernels_execute() -> None:
    from ptx_emulator.campaigns.form_coverage import foreign_forms, forms_of, uncovered

    forms = set()
    for name in ("csa_512-fp8", "split_128-bf16", "heads_128-fp8", "split_128_heads-bf16"):
        _, device = launch(build(CASES[name]), record=True)
        forms |= forms_of(device.recordings[0])
    assert uncovered(forms, foreign_forms()) == []
