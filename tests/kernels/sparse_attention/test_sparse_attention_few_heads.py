"""Hopper's attention kernels for 16 heads or less in the emulator, over the hard cases of attention_cases.py.

As in test_sparse_attention_sm90.py, which tests the kernels for more heads: every launch runs with all checks on, the
schedule changes from case to case, and bits are equal in every batch and for every division of a token's keys, by
kernel.py and by tile.py, which has a CTA for each tile of few tokens; and the compile gates.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
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

from dsv4_kernels.sparse_attention.split import DECODE_SPLIT_KEYS, num_kv_splits, num_steps

if TYPE_CHECKING:
    from ptx_emulator import Device
    from torch import Tensor

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.usefixtures("compiled_here")

HEADS = (8, 16, 1, 15)
"""Schedules, which the cases use in turn."""
QUICK = ((True, "LIST"), (False, "PAGES"))
"""(FP8 rows, entries) of the kernels that the quick cases need."""


def launch(case: Case, multiprocessors: int = 132, parts: int | None = None, **options: object) -> Tensor:
    """The result of one call, in `parts` parts, or by the kernel and in as many parts as the launch chooses."""
    return launch_on(case, multiprocessors, parts, **options)[0]


def launch_on(
    case: Case, multiprocessors: int = 132, parts: int | None = None, **options: object
) -> tuple[Tensor, Device]:
    """(result of one call, emulated device)."""
    from ptx_emulator import Checks

    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    sm90.num_clusters.cache_clear()  # this device has another number
    sm90.hardware_multiprocessors.cache_clear()
    options = {"checks": Checks.strict(), "arch": sm90.ARCH, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90, "FEW_HEADS", max(HEADS))
        if parts is not None:
            patch.setattr(sm90, "_tiles_with_a_cta", lambda *_: 0)
            patch.setattr(sm90, "_parts", lambda *_: parts)
        return attention_launch.launch(sm90.sparse_attention, case, multiprocessors, persistent=False, **options)


def allowed_parts(case: Case) -> list[int]:
    """The numbers of parts into which a token of the case may be divided."""
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    problem = case.problem()
    with pytest.MonkeyPatch.context() as patch:
        found = set()
        for clusters in ((0, 9**9, *(0,) * 8), (0, 9**9, 9**9, *(0,) * 7), (0, *(9**9,) * 4, *(0,) * 5), (9**9,) * 10):
            patch.setattr(sm90, "num_clusters", lambda device, clusters=clusters: clusters)
            found.add(sm90._parts(problem))
    return sorted(found)


def tiles_with_a_cta(case: Case) -> int:
    """CTAs of a token that `launch` gives to tiles, or 0 if the kernel for many tokens computes the case."""
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90, "num_clusters", lambda device: (0, *(132 // n for n in range(1, 10))))
        return sm90._tiles_with_a_cta(case.problem())


def configuration(spec: Spec) -> tuple[bool, str]:
    entries = "NONE" if not spec.entry_lengths else "PAGES" if spec.dense else "LIST"
    return spec.fp8, entries


def with_few_heads(name: str) -> Spec:
    """A case of attention_cases.py with few heads."""
    return replace(CASES[name], heads=HEADS[list(CASES).index(name) % len(HEADS)])


HARDEST = (
    *("list_lengths", "holes", "mostly_holes", "csa_512", "nothing_at_all", "sinks_mixed"),
    *("large_scores", "split_128", "split_with_a_kv_split_of_holes", "scales_at_the_extremes"),
    *("dense_lengths", "dense_pages_of_64", "q_unaligned", "one_of_three_has_nothing"),
)


def cases() -> Iterator[object]:
    """Parameters of the cases; those that need further kernels are slow."""
    for name in CASES:
        quick = name.rpartition("-")[0] in HARDEST and configuration(with_few_heads(name)) in QUICK
        yield pytest.param(name, marks=() if quick else pytest.mark.slow)


# ---- values


@pytest.mark.parametrize("name", cases())
def test_case(name: str) -> None:
    """Calls that may have a CTA for each tile are computed in both ways."""
    case, seed = build(with_few_heads(name)), list(CASES).index(name)
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    result = launch(case, schedule=schedule, seed=seed)
    check(case, result)
    if tiles_with_a_cta(case):
        assert same_bits(result, launch(case, parts=allowed_parts(case)[-1], schedule=schedule, seed=seed))


def random_specs() -> Iterator[object]:
    for seed in range(120):
        spec = random_spec(seed)
        spec = replace(spec, heads=spec.heads if spec.heads <= max(HEADS) else spec.heads % max(HEADS) + 1)
        quick = configuration(spec) in QUICK and seed < 12
        yield pytest.param(spec, seed, marks=() if quick else pytest.mark.slow, id=str(seed))


@pytest.mark.parametrize(("spec", "seed"), random_specs())
def test_random_case(spec: Spec, seed: int) -> None:
    """The bits are equal for whole tokens, for the most CTAs a token, and in the kernel that the call chooses."""
    case = build(spec, seed=seed)
    results = [
        launch(case, parts=parts, schedule=SCHEDULES[(seed + (parts or 0)) % len(SCHEDULES)], seed=seed)
        for parts in {1, allowed_parts(case)[-1], None}
    ]
    check(case, results[0])
    assert all(same_bits(results[0], result) for result in results[1:])


@pytest.mark.parametrize("heads", [1, 15])
def test_nothing_is_written_beside_the_output(heads: int) -> None:
    case = build(Spec(tokens=2, heads=heads, entry_lengths=(200, 0)))
    check_surroundings(case, launch)


POOLS = {
    "list_fp8": Spec(tokens=4, heads=16, entry_lengths=(70, 3)),
    "list_fp8_split": Spec(tokens=4, heads=8, entry_lengths=(70, 130), split_keys=128),
    "pages_bf16": Spec(tokens=4, heads=16, entry_lengths=(70, 3), dense=True, fp8=False),
}


@pytest.mark.parametrize("name", POOLS)
def test_rows_beyond_32_bits(name: str) -> None:
    """Offsets of rows need 64 bits, in bytes and in elements, in the window's table and in the entries' table."""
    case = build(POOLS[name])
    check(case, launch(case.spread()))


@pytest.mark.parametrize("name", POOLS)
def test_q_and_outputs_beyond_32_bits(name: str) -> None:
    case = build(POOLS[name])
    out = far_apart(torch.empty(case.q.shape, dtype=torch.bfloat16))
    check(case, launch(replace(case, q=far_apart(case.q)), out=out))


# ---- the choice of the kernel and of the number of parts


@pytest.mark.parametrize(("heads", "few", "expected"), [(1, 16, 1), (16, 16, 1), (17, 16, 0), (9, 8, 0), (1, 0, 0)])
@pytest.mark.parametrize("tokens", [1, 500])
def test_the_number_of_heads_chooses_the_kernel(
    monkeypatch: pytest.MonkeyPatch, heads: int, few: int, expected: bool, tokens: int
) -> None:
    """Only the number of heads chooses this kernel, whose bits differ from the others'. FEW_HEADS = 0 disables it."""
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    called = []
    monkeypatch.setattr(sm90, "FEW_HEADS", few)
    monkeypatch.setattr(sm90, "_launch_few_heads", lambda problem: called.append(1))
    monkeypatch.setattr(sm90, "_channel_splits_of_clusters", lambda problem: 0)
    monkeypatch.setattr(sm90, "_divides", lambda problem: False)
    monkeypatch.setattr(sm90, "_launch", lambda *arguments: called.append(0))
    for split_keys in (None, 1152):
        sm90.sparse_attention(SimpleNamespace(num_heads=heads, num_tokens=tokens, split_keys=split_keys))
    assert called == [expected] * 2


def test_few_heads_are_16_at_most() -> None:
    from dsv4_kernels.sparse_attention.problem import FEW_HEADS
    from dsv4_kernels.sparse_attention.sm90.few_heads.plan import COLUMNS

    assert FEW_HEADS <= COLUMNS == max(HEADS)


@pytest.mark.parametrize(
    ("window", "entries", "split_keys", "parts"),
    [
        # (tokens, parts): 132, 66, 33 and 16 clusters of 1, 2, 4 and 8 CTAs fit, and twice as many if two CTAs share a
        # multiprocessor; sharing costs more time than one or two tiles.
        (128, 512, None, ((1, 8), (16, 8), (17, 4), (33, 4), (34, 2), (132, 2), (133, 1))),  # ten tiles
        (128, 896, None, ((1, 8), (16, 8), (17, 4), (66, 4), (67, 2))),  # sixteen tiles: two for each of eight CTAs
        (128, 1024, None, ((1, 4), (66, 4), (67, 2), (132, 2), (133, 1), (4096, 1))),  # eighteen
        (128, 256, None, ((1, 8), (16, 8), (17, 4), (33, 4), (34, 2))),  # six
        (128, 128, None, ((1, 4), (33, 4), (34, 2), (66, 2), (67, 1))),  # four: elements are tiles
        (128, 0, None, ((1, 2), (66, 2), (67, 1), (4096, 1))),  # two tiles, hence two elements
        # Eight KV splits: two for each of four CTAs, but not four for each of two. Clusters one after the other are
        # faster than a CTA with a whole token.
        (128, 8192, 1152, ((1, 8), (32, 8), (33, 4), (66, 4), (67, 8), (4096, 1))),
        (128, 4992, 128, ((1, 1),)),  # forty
    ],
    ids=["csa_512", "sixteen_tiles", "csa_1024", "hca_32k", "four_tiles", "window", "hca_1m", "many_kv_splits"],
)
def test_parts_are_as_many_as_pay(
    monkeypatch: pytest.MonkeyPatch,
    window: int,
    entries: int,
    split_keys: int | None,
    parts: tuple[tuple[int, int], ...],
) -> None:
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    monkeypatch.setattr(sm90, "num_clusters", lambda device: (0, *(132 // n for n in range(1, 10))))
    steps = num_steps(window, entries)
    sizes = {"max_steps": steps, "max_kv_splits": num_kv_splits(steps, split_keys), "q": torch.empty(0)}
    for tokens, expected in parts:
        problem = SimpleNamespace(num_tokens=tokens, **sizes)
        assert sm90._parts(problem) == expected, tokens


@pytest.mark.parametrize(
    ("tokens", "window", "entries", "pages", "split_keys", "expected"),
    [
        (1, 128, 512, False, DECODE_SPLIT_KEYS, 10),
        (16, 128, 512, False, DECODE_SPLIT_KEYS, 10),
        (17, 128, 512, False, DECODE_SPLIT_KEYS, 0),  # large batches keep their kernel
        (1, 128, 1024, False, DECODE_SPLIT_KEYS, 0),  # 18 tiles: a cluster has 16 CTAs
        (1, 128, 512, False, 512, 0),  # ten tiles have two KV splits
        (1, 128, 512, False, None, 10),
        (1, 0, 0, False, DECODE_SPLIT_KEYS, 2),
        (1, 128, 512, True, DECODE_SPLIT_KEYS, 10),
        (1, 128, 1026, True, DECODE_SPLIT_KEYS, 16),  # a table for 128K tokens of an HCA layer
        (1, 128, 1026, True, 512, 8),  # 16 tiles have two KV splits, eight have one
        (16, 128, 1026, True, DECODE_SPLIT_KEYS, 8),  # 16 clusters of 16 find no room
        (1, 128, 8192, True, DECODE_SPLIT_KEYS, 16),
        (1, 128, 1 << 17, True, DECODE_SPLIT_KEYS, 0),  # a table for more KV splits than the other kernel divides
    ],
)
def test_tiles_have_a_cta_where_all_find_room(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    window: int,
    entries: int,
    pages: bool,
    split_keys: int | None,
    expected: int,
) -> None:
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    # Clusters on an H200, as its driver counts them.
    monkeypatch.setattr(sm90, "num_clusters", lambda device: (0, 132, 66, 39, 30, 22, 17, 15, 15, 9))
    steps = num_steps(window, entries)
    problem = SimpleNamespace(
        num_tokens=tokens,
        max_steps=steps,
        max_kv_splits=num_kv_splits(steps, split_keys),
        split_keys=split_keys,
        entry_indices=None if pages or not entries else 1,
        page_table=1 if pages else None,
        q=torch.empty(0),
    )
    assert sm90._tiles_with_a_cta(problem) == expected


@pytest.mark.parametrize("parts", [None, 2], ids=["tiles", "parts"])
def test_it_may_begin_early(parts: int | None) -> None:
    case = build(Spec(tokens=2, heads=16, entry_lengths=(300, 5)))
    with launched_early():
        out = launch(case, parts=parts)
    check(case, out)


def test_whole_tokens_are_computed_by_as_many_ctas_as_find_room() -> None:
    """CTAs compute whole tokens one after the other; each part of a divided token has its own CTA."""
    case = build(Spec(tokens=11, heads=16, entry_lengths=(5, 200, 0)))
    for parts, grid in ((1, (1, 4, 1)), (2, (2, 11, 1))):
        _, device = launch_on(case, multiprocessors=2, parts=parts)
        assert device.reports[0].grid == grid


def test_no_cta_waits_for_a_cta_that_may_not_have_begun() -> None:
    """CTAs synchronise only within clusters, which start together: no counters, flags or polling in global memory."""
    from ptx_emulator import emulated

    from dsv4_kernels.sparse_attention.sm90 import launch as sm90
    from dsv4_kernels.sparse_attention.sm90.few_heads.plan import FewHeads
    from dsv4_kernels.sparse_attention.sm90.plan import Entries

    with emulated(arch=sm90.ARCH):
        ptx = sm90.compile(FewHeads(True, Entries.LIST)).__ptx__
    assert "barrier.cluster.wait" in ptx and "ld.global" in ptx
    assert not re.search(r"\b(atom|red)\.|\.(acquire|volatile|relaxed)\.(gpu|sys)|ld\.volatile|mbarrier", ptx)


# ---- bits

DIVIDED = {
    "one_kv_split": Spec(tokens=3, heads=16, entry_lengths=(512, 5, 130)),
    "kv_splits": Spec(tokens=3, heads=8, entry_lengths=(700, 3, 300), split_keys=128, sink="mixed"),
    "kv_splits_beside_one": Spec(tokens=2, heads=16, entry_lengths=(2800, 200), split_keys=384),
    "holes_only": Spec(tokens=3, heads=16, window_lengths=(0,), entry_lengths=(0, 1, 0), entries=512, split_keys=128),
    "bf16": Spec(tokens=2, heads=16, entry_lengths=(300, 30), dense=True, fp8=False),
    "large_values": replace(CASES["large_values-fp8"], heads=16),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "large_values" else ()) for name in DIVIDED]
)
def test_the_same_bits_in_any_parts_under_every_schedule(name: str) -> None:
    case = build(DIVIDED[name], seed=1)
    expected = launch(case, parts=1)
    check(case, expected)
    parts = allowed_parts(case)
    assert len(parts) > 1
    for seed, schedule in enumerate(SCHEDULES):
        for n in parts:
            result, device = launch_on(case, parts=n, schedule=schedule, seed=seed)
            assert same_bits(expected, result), (n, schedule)
            assert device.reports[0].grid == (n, case.spec.tokens, 1)


TILED = {
    "list": (DIVIDED["one_kv_split"], 10),
    "bf16": (DIVIDED["bf16"], 8),
    "large_values": (DIVIDED["large_values"], None),
    # Tables with room for 20 tiles; the tokens have 20, 4 and 14.
    "pages": (Spec(tokens=3, heads=16, entry_lengths=(1100, 36, 700), dense=True, fp8=False, split_keys=1152), 16),
    "pages_fp8": (Spec(tokens=3, heads=3, entry_lengths=(36, 1100, 700), dense=True, split_keys=1152), 16),
}
"""Cases in which every tile has a CTA, and CTAs of a token if they are known."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ("pages_fp8", "large_values") else ()) for name in TILED],
)
def test_tiles_with_a_cta_have_the_same_bits_under_every_schedule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    spec, expected_parts = TILED[name]
    case = build(spec, seed=2)
    expected = launch(case, parts=1)
    check(case, expected)
    sizes = (16, 8) if spec.dense and expected_parts == 16 else (16,)
    for seed, (schedule, most) in enumerate(itertools.product(SCHEDULES, sizes)):
        monkeypatch.setattr(sm90, "MOST_TILES", most)  # with 8, the token of 14 tiles is computed by kernel.py's code
        result, device = launch_on(case, schedule=schedule, seed=seed)
        assert same_bits(expected, result), (schedule, most)
        parts, tokens, _ = device.reports[0].grid
        assert tokens == case.spec.tokens and parts == min(most, expected_parts or parts)


@pytest.mark.parametrize("name", ["one_kv_split", "kv_splits", "bf16"])
def test_a_token_has_the_same_bits_in_any_batch(name: str) -> None:
    """A token has the same bits at any position of any batch, and on other numbers of multiprocessors."""
    case = build(DIVIDED[name])
    out = launch(case)
    for batch, multiprocessors in ((1, 132), (3, 2), (11, 5)):
        order = torch.randint(0, case.spec.tokens, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
        assert same_bits(launch(case.take(order), multiprocessors), out[order])


def test_split_keys_are_not_seen_by_a_token_of_one_kv_split() -> None:
    """Decode and prefill have the same bits where keys are not divided."""
    divided = build(Spec(tokens=2, heads=16, entry_lengths=(1024, 300), split_keys=1152))
    assert same_bits(launch(divided), launch(replace(divided, spec=replace(divided.spec, split_keys=None)), parts=1))


UNPACKED = [
    *("csa_512-fp8", "list_lengths-fp8", "holes-fp8", "scales_at_the_extremes-fp8", "sinks_mixed-fp8"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("window_lengths-fp8", "dense_lengths-fp8")),
]


@pytest.mark.parametrize("name", UNPACKED)
def test_unpacked_rows_give_the_same_bits(name: str) -> None:
    """FP8 rows and the bf16 rows unpacked from them give the same bits."""
    case = build(with_few_heads(name))
    plain = case.unpacked(functools.partial(attention_launch.unpack_emulated, "sm90"))
    assert same_bits(launch(case), launch(plain, parts=1))  # fewer kernels to compile


def test_several_launches_of_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch of a divided call starts at its own tokens in requests, lengths, rows and results."""
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    monkeypatch.setattr(sm90, "MAX_TOKENS", 2)
    lengths = {"window_lengths": (128, 3, 70, 9), "entry_lengths": (5, 200, 70, 0)}
    case = build(Spec(tokens=5, heads=8, dense=True, fp8=False, split_keys=128, **lengths))
    result, device = launch_on(case)
    assert len(device.reports) == 3
    check(case, result)


@pytest.mark.parametrize("dense", [False, True])
def test_the_width_of_lists_and_tables_is_not_seen(dense: bool) -> None:
    case = build(Spec(heads=16, entry_lengths=(300, 3, 130), dense=dense, fp8=not dense))
    name = "page_table" if dense else "entry_indices"
    wide = torch.nn.functional.pad(case.entry_arguments[name], (0, 524), value=2**31 - 1)
    wider = replace(case, entry_arguments={**case.entry_arguments, name: wide})
    assert same_bits(launch(wider), launch(case))


def test_divisions_beyond_what_the_kernel_can_count_are_refused() -> None:
    case = build(Spec(tokens=1, heads=8, entry_lengths=(5,), split_keys=128))
    wide = torch.zeros(1, 2**17 + 128, dtype=torch.int32)
    case = replace(case, entry_arguments={**case.entry_arguments, "entry_indices": wide})
    with pytest.raises(ValueError, match="expected less than 1048576 as their product"):
        launch(case)


# Tokens of one to four elements. In two parts, the first part merges its elements and the second stores up to two. As
# whole tokens on one multiprocessor, each of its two CTAs computes several.
MUTATED = {
    "sparse_attention_few_heads_tile": (Spec(tokens=2, heads=16, entry_lengths=(200, 5)), None, 132),
    "sparse_attention_few_heads": (Spec(tokens=4, heads=16, entry_lengths=(200, 5, 0)), 2, 132),
    "sparse_attention_few_heads_whole": (Spec(tokens=4, heads=16, entry_lengths=(200, 5, 0)), 1, 1),
}


@pytest.mark.slow
@pytest.mark.usefixtures("in_turns")
@pytest.mark.parametrize("name", MUTATED)
def test_deleted_synchronisation_is_noticed(name: str) -> None:
    spec, parts, multiprocessors = MUTATED[name]
    _, device = launch_on(build(spec), multiprocessors, parts=parts, record=True)
    rates = attention_launch.delete_synchronisation(name, device)
    assert rates and set(rates.values()) == {1}


# ---- compile gate

CONFIGURATIONS = [(fp8, entries) for fp8 in (True, False) for entries in ("NONE", "LIST", "PAGES")]


@pytest.mark.parametrize("tiles", [False, True], ids=["parts", "tiles"])
@pytest.mark.parametrize(
    ("fp8_rows", "entries"),
    [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow) for c in CONFIGURATIONS],
)
def test_compiled(fp8_rows: bool, entries: str, tiles: bool) -> None:
    """Registers, stack and code are at most those in benchmarks/results; wgmma runs asynchronously."""
    from lib.sparse_attention_sm90_static import RESULTS, static_numbers
    from ptx_emulator import emulated

    from dsv4_kernels.sparse_attention.sm90 import launch as sm90
    from dsv4_kernels.sparse_attention.sm90.few_heads.plan import CTAS, WARPGROUP, FewHeads, TileOfFewHeads
    from dsv4_kernels.sparse_attention.sm90.plan import Entries

    configuration = (TileOfFewHeads if tiles else FewHeads)(fp8_rows, Entries[entries])
    with emulated(arch=sm90.ARCH):
        found = static_numbers(configuration)
    recorded = json.loads(RESULTS.read_text())[str(configuration)]
    over = {name: value for name, value in found.items() if value > recorded[name]}
    assert found.keys() == recorded.keys() and not over, f"{configuration} needs more than {recorded}: {over}"
    assert found["registers"] <= 65536 // (WARPGROUP * CTAS)
    # The system reserves one kibibyte of each CTA.
    assert CTAS * (found["shared_memory_bytes"] + 1024) <= 228 * 1024
    assert found["stack_bytes"] == 0, "spills"
