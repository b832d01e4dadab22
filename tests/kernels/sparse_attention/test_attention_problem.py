"""The input of the attention's GPU kernels: the division of keys, and the checks and layouts of `Problem`.

No kernel runs here: the tensors are on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4_kernels.kv_layout import PAGE_BYTES, KVRows, RowFormat
from dsv4_kernels.sparse_attention import launch
from dsv4_kernels.sparse_attention.problem import Problem
from dsv4_kernels.sparse_attention.split import check_split_keys, kv_split_steps, num_kv_splits, num_steps


@pytest.mark.parametrize(
    ("window", "entries", "split_keys", "kv_splits"),
    [
        (128, 0, 512, 1),
        (128, 0, 128, 1),
        (128, 1, 128, 2),
        (128, 512, 512, 2),
        (128, 512, 640, 1),
        (128, 1024, 512, 3),
        (128, 8192, 512, 17),
        (128, 8192, None, 1),
        (1, 129, 128, 3),
        (0, 0, 128, 1),
    ],
)
def test_number_of_kv_splits(window: int, entries: int, split_keys: int | None, kv_splits: int) -> None:
    assert num_kv_splits(num_steps(window, entries), split_keys) == kv_splits


@pytest.mark.parametrize("split_keys", [None, 128, 256, 512, 1024])
def test_kv_splits_cover_every_step_once(split_keys: int | None) -> None:
    """KV splits are in order, not empty unless there are no keys, at most split_keys long, and differ by one step."""
    for steps in range(200):
        kv_splits = num_kv_splits(steps, split_keys)
        ranges = [kv_split_steps(i, kv_splits, steps) for i in range(kv_splits)]
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])] and ranges[-1][1] == steps
        lengths = [end - begin for begin, end in ranges]
        assert max(lengths) - min(lengths) <= 1 and (min(lengths) > 0 or steps == 0)
        assert split_keys is None or max(lengths) * 128 <= split_keys


@pytest.mark.parametrize("split_keys", [0, -128, 64, 200])
def test_split_keys_are_whole_steps(split_keys: int) -> None:
    with pytest.raises(ValueError, match=f"split_keys is {split_keys}; expected None or a positive multiple of 128"):
        check_split_keys(split_keys)


def rows(num_rows: int = 192, format: RowFormat = RowFormat.FP8, dtype: torch.dtype = torch.bfloat16) -> KVRows:
    return KVRows.allocate(num_rows, format, 512, 64, dtype, "cpu", 0.0)


def problem(**changes: object) -> Problem:
    arguments = {
        "q": torch.zeros(3, 64, 512, dtype=torch.bfloat16),
        "window": rows(),
        "window_rows": torch.zeros(3, 128, dtype=torch.int32),
        "entries": None,
        "entry_indices": None,
        "page_table": None,
        "entries_per_page": 0,
        "token_to_request": None,
        "visible": None,
        "sink": None,
        "scale": 0.125,
        "out": None,
        "split_keys": None,
    } | changes
    names = list(arguments)
    positional, named = names[:10], names[10:]
    return Problem.of(*(arguments[n] for n in positional), **{n: arguments[n] for n in named})


LIST = {"entries": rows(), "entry_indices": torch.zeros(3, 512, dtype=torch.int32)}
DENSE = {
    "entries": rows(),
    "page_table": torch.zeros(2, 10, dtype=torch.int32),
    "entries_per_page": 2,
    "token_to_request": torch.zeros(3, dtype=torch.int32),
    "visible": torch.zeros(3, dtype=torch.int32),
}


def test_what_comes_in_the_kernels_layout_is_not_copied() -> None:
    arguments = {"sink": torch.zeros(64), "out": torch.empty(3, 64, 512, dtype=torch.bfloat16), **DENSE}
    q = torch.zeros(3, 64, 1024, dtype=torch.bfloat16)[..., 512:]
    made = problem(q=q, **arguments)
    assert made.q is q and made.window_storage is not None
    for name in ("sink", "out", "page_table", "token_to_request", "visible"):
        assert getattr(made, name) is arguments[name], name
    assert made.entry_storage is arguments["entries"].storage and made.row_format is RowFormat.FP8


@pytest.mark.parametrize("offset", [0, 1, 8], ids=["last_stride_2", "odd_address", "odd_row_stride"])
def test_a_q_that_kernels_cannot_address_is_copied(offset: int) -> None:
    wide = torch.arange(3 * 64 * 1032).view(3, 64, 1032).remainder(250).bfloat16()
    q = {0: wide[..., :1024:2], 1: wide[..., 1:513], 8: wide[..., :1028].clone()[..., 8:520]}[offset]
    made = problem(q=q)
    assert torch.equal(made.q, q) and made.q.is_contiguous() and made.q.data_ptr() % 16 == 0


def test_lists_become_int32_rows() -> None:
    window_rows = torch.arange(6 * 128).view(3, 256)[:, ::2]
    made = problem(window_rows=window_rows, **{**DENSE, "page_table": torch.arange(512).view(1, 512)[:, ::512]})
    assert torch.equal(made.window_rows, window_rows) and made.window_rows.dtype == torch.int32
    assert made.window_rows.stride() == (128, 1) and made.page_table.stride(-1) == 1


def test_sizes_follow_from_the_arguments_alone() -> None:
    """Sizes do not depend on lengths on the device: a graph's buffers must hold the most that its shapes allow."""
    assert (problem().max_entry_slots, problem(split_keys=128).max_kv_splits) == (0, 1)
    assert (problem(**LIST).max_entry_slots, problem(**LIST, split_keys=128).max_kv_splits) == (512, 5)
    assert (problem(**DENSE).max_entry_slots, problem(**DENSE, split_keys=128).max_kv_splits) == (20, 2)
    assert problem(**LIST).max_kv_splits == 1
    meta = problem(**LIST)
    assert (meta.num_tokens, meta.num_heads, meta.window_slots) == (3, 64, 128)


def test_the_output_is_like_q() -> None:
    made = problem()
    assert made.out.dtype == torch.bfloat16 and made.out.shape == (3, 64, 512)


ONLY_REF = {
    "fp32_q": ({"q": torch.zeros(3, 64, 512)}, r"torch.bfloat16; got \[3, 64, 512\] in torch.float32"),
    "head_dim": ({"q": torch.zeros(3, 64, 256).bfloat16()}, "256"),
    "heads": ({"q": torch.zeros(3, 129, 512).bfloat16()}, "1 to 128"),
    "fp4_rows": ({"window": rows(format=RowFormat.INDEX_FP4)}, "window rows index_fp4, entries none"),
    "mixed": ({"window": rows(format=RowFormat.PLAIN), **LIST}, "window rows plain, entries fp8"),
    "fp32_rows": ({"window": rows(format=RowFormat.PLAIN, dtype=torch.float32)}, "window rows in torch.float32"),
}


@pytest.mark.parametrize("name", ONLY_REF)
def test_what_only_the_reference_computes_is_refused_by_name(name: str) -> None:
    change, message = ONLY_REF[name]
    with pytest.raises(NotImplementedError, match=message) as caught:
        problem(**change)
    assert "impl='ref'" in str(caught.value)


def _with_storage(storage: Tensor) -> KVRows:
    return replace(rows(), storage=storage)


WRONG = {
    "short_page": (
        {"window": _with_storage(torch.zeros(3, PAGE_BYTES - 576, dtype=torch.uint8))},
        r"storage of window is \[3, 36864\].*at least 37440",
    ),
    "page_stride": (
        {"window": _with_storage(torch.zeros(3, PAGE_BYTES + 8, dtype=torch.uint8))},
        "strides .37448, 1.*multiple of 16 bytes",
    ),
    "entries": (
        {**LIST, "entries": _with_storage(torch.zeros(3, PAGE_BYTES, dtype=torch.int8))},
        "storage of entries is .* torch.int8",
    ),
    "out": ({"out": torch.empty(3, 64, 513, dtype=torch.bfloat16)[..., :512]}, "Pass a contiguous out"),
    "device": ({"sink": torch.zeros(64, device="meta")}, "sink is on meta and q on cpu; move them to one device"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_is_expected(name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        problem(**change)


@pytest.mark.parametrize("tokens", [0, 2])
def test_launch_returns_what_the_kernel_wrote(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """A call without tokens launches nothing."""
    seen = []

    def kernel(problem: Problem) -> None:
        seen.append(problem)
        problem.out.fill_(3.0)

    monkeypatch.setattr(launch, "_kernel", {"sm90": kernel}.__getitem__)
    q = torch.zeros(tokens, 8, 512, dtype=torch.bfloat16)
    arguments = (q, rows(), torch.zeros(tokens, 128, dtype=torch.int32), None, None, None, 0, None, None, None)
    options = {"scale": 1.0, "split_keys": None}
    out = launch.sm90(*arguments, out=None, **options)
    assert out.shape == q.shape and (out == 3).all() and len(seen) == bool(tokens)
    given = torch.empty_like(q)
    assert launch.sm90(*arguments, out=given, **options) is given and (given == 3).all()


@pytest.mark.parametrize("missing", ["cutlass.cute", "cuda.bindings", "dsv4_kernels.other"])
def test_without_cute_dsl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def no_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(launch.importlib, "import_module", no_module)
    message = missing if missing.startswith("dsv4") else "'sm90' needs CuTe DSL .*nvidia-cutlass-dsl.*impl='ref'"
    with pytest.raises(ModuleNotFoundError, match=message):
        launch._kernel.__wrapped__("sm90")
