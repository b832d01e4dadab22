"""The hard cases themselves: the reference passes all of them, and the tolerance catches typical kernel faults.

The definition (`ref`, fp32) is compared here with the fp64 oracle of attention_cases.py; kernels are in
test_sparse_attention_gpu.py and in the emulator's tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ops.attention_cases import CASES, INF, NONSENSE, Case, Spec, build
from ops.attention_check import check, reference
from ops.random_attention import random_spec

from dsv4_kernels.sparse_attention import sparse_attention


@pytest.mark.parametrize("name", CASES)
def test_the_definition_passes(name: str) -> None:
    case = build(CASES[name])
    check(case, case.run(impl="ref"))


@pytest.mark.parametrize("seed", range(200))
def test_the_definition_passes_random_cases(seed: int) -> None:
    case = build(random_spec(seed), seed=seed)
    check(case, case.run(impl="ref"))


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_would_accept_it(name: str) -> None:
    problem = build(CASES[name]).problem()
    assert problem.q.data_ptr() % 16 == 0 and problem.max_kv_splits >= 1


def test_a_case_is_the_same_every_time() -> None:
    spec = CASES["holes-fp8"]
    a, b, c = build(spec), build(spec), build(spec, seed=1)
    assert torch.equal(a.q, b.q) and torch.equal(a.window.storage, b.window.storage)
    assert not torch.equal(a.q, c.q)


def _last_of_window_missing(case: Case) -> Case:
    rows = case.window_rows.clone()
    rows[:, -1] = -1
    return replace(case, window_rows=rows)


def _one_entry_too_few(case: Case) -> Case:
    arguments = {**case.entry_arguments, "visible": case.entry_arguments["visible"] - 1}
    return replace(case, entry_arguments=arguments)


def _one_entry_too_many(case: Case) -> Case:
    visible = case.entry_arguments["visible"] + 1
    rows = torch.where(case.entry_arguments["entry_indices"] == NONSENSE, 0, case.entry_arguments["entry_indices"])
    return replace(case, entry_arguments={"visible": visible, "entry_indices": rows})


def _other_scale_byte(case: Case) -> Case:
    table = replace(case.window, storage=case.window.storage.clone())
    table._split_pages()[1].add_(1)
    return replace(case, window=table)


FAULTS: dict[str, tuple[Callable[[Case], Case], str]] = {
    "window": (_last_of_window_missing, "csa_512-fp8"),
    "long_window": (_last_of_window_missing, "window_129-bf16"),
    "too_few": (_one_entry_too_few, "keys_384-fp8"),
    "too_few_of_512": (_one_entry_too_few, "csa_512-bf16"),
    "too_many": (_one_entry_too_many, "list_lengths-fp8"),
    "scale_byte": (_other_scale_byte, "window_lengths-fp8"),
    "extreme_scale_byte": (_other_scale_byte, "scales_at_the_extremes-fp8"),
    "no_sink": (lambda case: replace(case, sink=None), "csa_1024-fp8"),
    "sink_twice": (lambda case: replace(case, sink=case.sink + 0.2), "csa_512-fp8"),
    "minus_inf_as_a_sink": (lambda case: replace(case, sink=case.sink.clamp(min=0.0)), "sink_minus_inf-bf16"),
    "scale": (lambda case: replace(case, scale=case.scale * 1.01), "keys_256-fp8"),
    "other_tokens_lists": (lambda case: replace(case, window_rows=case.window_rows.roll(1, 0)), "csa_512-bf16"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_bar_catches(fault: str) -> None:
    """A small fault in the computation exceeds the tolerance by far."""
    plant, name = FAULTS[fault]
    case = build(CASES[name])
    result = plant(case).run(impl="ref")
    with pytest.raises(AssertionError, match="error"):
        check(case, result)


@pytest.mark.parametrize("name", ["csa_512-fp8", "scales_at_the_extremes-fp8", "hca_32k-bf16"])
def test_the_bar_is_that_of_bf16_operands(name: str) -> None:
    case = build(CASES[name])
    expected = reference(case)
    out = expected.bf16_out.bfloat16()
    check(case, out, expected)
    with pytest.raises(AssertionError, match="out of token"):
        check(case, (out.float() * (1 + 2.0**-5)).bfloat16(), expected)
    out[1, -1, -1] = float("nan")
    with pytest.raises(AssertionError, match="out of token 1, channels from 448"):
        check(case, out, expected)


def test_nothing_to_read_is_exactly_zero() -> None:
    case = build(CASES["nothing_at_all-fp8"])
    out = case.run(impl="ref")
    with pytest.raises(AssertionError, match=r"out must be zero|out of token"):
        check(case, out + 1e-30)


@pytest.mark.parametrize("name", ["csa_512-fp8", "dense_lengths-bf16", "speculation-fp8"])
def test_take_keeps_tokens_bits(name: str) -> None:
    case = build(CASES[name])
    order = [1, 0, 1]
    assert torch.equal(case.take(order).run(impl="ref"), case.run(impl="ref")[order])


@pytest.mark.parametrize(
    "name", ["csa_512-fp8", "holes-bf16", "dense_pages_of_64-fp8", "hca_32k-bf16", "window_127-fp8"]
)
def test_a_case_over_large_tables_is_the_same(name: str) -> None:
    """The table has rows whose offsets need 64 bits, in bytes and in elements, and rows below 2**31 bytes."""
    case = build(CASES[name])
    large = case.spread()
    assert all(map(torch.equal, case.run(impl="ref"), large.run(impl="ref")))
    for table, rows in ((large.window, large.window_rows), (large.entries, large.read_entries)):
        if table is not None:
            row_bytes = table.storage.stride(0) * table.storage.element_size() / (64 if case.spec.fp8 else 1)
            offsets = rows[rows >= 0] * row_bytes
            assert offsets.min() < 2**31 and offsets.max() > 2**32


def test_nothing_of_a_case_is_contiguous() -> None:
    """No tensor is contiguous and tables differ in strides: a stride from a shape, or of another tensor, is wrong."""
    for name in ("csa_512-fp8", "csa_512-bf16", "dense_lengths-fp8"):
        for case in (build(CASES[name]), build(CASES[name]).take([1, 0, 1])):
            given = case.entry_arguments
            lists = [given[name] for name in ("entry_indices", "page_table") if name in given]
            tables = [case.window.storage, case.entries.storage]
            for tensor in (case.q, case.window_rows, *lists, *tables):
                following = zip(tensor.stride()[:-1], tensor.stride()[1:], tensor.shape[1:], strict=True)
                assert all(stride > inner * length for stride, inner, length in following)
            assert tables[0].stride() != tables[1].stride()


def test_rows_that_are_not_named_are_nan() -> None:
    for name in ("csa_512-fp8", "csa_512-bf16", "dense_lengths-fp8"):
        case = build(CASES[name])
        for table, rows in ((case.window, case.window_rows), (case.entries, case.read_entries)):
            values = table.gather(torch.arange(table.num_rows))
            named = torch.zeros(table.num_rows, dtype=torch.bool)
            named[rows[rows >= 0].long()] = True
            assert values[named].isfinite().all() and values[~named].isnan().all() and (~named).any()


def test_the_extreme_case_spans_the_format() -> None:
    case = build(CASES["scales_at_the_extremes-fp8"])
    largest = case.window.gather(case.window_rows[0, -5:]).abs().unflatten(1, (-1, 64)).amax((0, 2))
    assert largest[0] < 2.0**-121 and largest[6] > 2.0**119
    exact = reference(case)
    assert exact.out.isfinite().all() and exact.bf16_out.isfinite().all()


def test_infinite_sinks_take_all_or_nothing() -> None:
    case = build(Spec(entry_lengths=(10,), sink=INF))
    out = sparse_attention(**case.arguments(), impl="ref")
    assert not out.any() and not reference(case).out.any()
