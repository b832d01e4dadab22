"""Choice of the attention's implementation, the backend's calls, and the first calls; the kernel is a stand-in."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from cache.harness import TOP_K, Engine, Sequences
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from dsv4_kernels import attention_calls, registry
from dsv4_kernels.kv_layout import RowFormat
from dsv4_kernels.sparse_attention.problem import Problem
from dsv4_kernels.sparse_attention.split import DECODE_SPLIT_KEYS, num_kv_splits, num_steps
from sglang_dsv4.attention import backend as attention_backend
from sglang_dsv4.attention import implementation
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, HCA_RATIO, SWA_RATIO

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYERS = (SWA_RATIO, CSA_RATIO, HCA_RATIO, CSA_RATIO)

calls: list[Problem] = []
answer = 0.0


def stand_in(*arguments: object, **options: object) -> torch.Tensor:
    problem = Problem.of(*arguments, **options)
    calls.append(problem)
    return problem.out.fill_(answer)


@pytest.fixture
def kernel(own_registry: None) -> list[Problem]:
    """Register a stand-in kernel for the CPU in bf16; the list gets its calls."""
    calls.clear()
    registry.register(
        "sparse_attention", "stand_in", f"{__name__}:stand_in", lambda d, t: t == torch.bfloat16, 100, graph_safe=True
    )
    return calls


def geometry(row_dim: int = 512, format: RowFormat = RowFormat.FP8) -> PoolGeometry:
    return PoolGeometry(ratios=LAYERS, row_dim=row_dim, row_format=format, dtype=torch.bfloat16)


def make_first_calls(geometry: PoolGeometry, heads: int, device: torch.device = CPU) -> None:
    implementation.make_first_calls(implementation.attention_shapes(geometry, heads, device))


@pytest.mark.parametrize("format", [RowFormat.FP8, RowFormat.PLAIN], ids=lambda format: format.value)
def test_every_kind_of_layer_is_called_in_decode_and_prefill(
    kernel: list[Problem], format: RowFormat, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=implementation.__name__):
        make_first_calls(geometry(format=format), 40)
    unpacked = [problem for problem in kernel if problem.row_format is not format]
    kernel[:] = [problem for problem in kernel if problem.row_format is format]
    kinds = {(p.entry_indices is not None, p.page_table is not None) for p in unpacked if p.num_tokens == 512}
    assert kinds == ({(False, False), (True, False), (False, True)} if format is RowFormat.FP8 else set())
    assert all(p.split_keys is None and p.num_tokens >= 16 for p in unpacked)
    assert all(problem.num_heads == 40 for problem in kernel)
    assert [problem.num_tokens for problem in kernel] == list(attention_calls.TOKENS) * 12
    kinds = [(p.entry_indices is not None, p.page_table is not None, p.split_keys, p.max_entry_slots) for p in kernel]
    several = 2 * DECODE_SPLIT_KEYS  # entries of several KV splits
    assert list(dict.fromkeys(kinds)) == [
        (*kind, split, entries)
        for kind, widths in (((0, 0), (0,)), ((1, 0), (512, several)), ((0, 1), (128, 512, several)))
        for split in (DECODE_SPLIT_KEYS, None)
        for entries in widths
    ]
    assert all((p.max_kv_splits > 1) == (p.split_keys is not None and p.max_entry_slots == several) for p in kernel)
    messages = [record.getMessage() for record in caplog.records if record.name == implementation.__name__]
    assert messages[2].startswith("attention kernel stand_in: 3 of 6 ready (CSA, decode), ") and len(messages) == 7
    assert messages[-1].endswith("0 compiled, 0 from disk")


@pytest.mark.parametrize(
    ("heads", "multiprocessors"), [(64, 132), pytest.param(128, 132, marks=pytest.mark.slow), (40, 78), (16, 132)]
)
def test_no_variant_of_the_hopper_kernel_is_left_for_the_first_request(
    kernel: list[Problem], heads: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every batch, the kernel that it runs has been called before."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    monkeypatch.setattr(sm90, "num_multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(sm90, "num_clusters", lambda device: (0, *(multiprocessors // n for n in range(1, 10))))

    def variant(problem: Problem | SimpleNamespace) -> tuple:
        if problem.num_heads <= sm90.FEW_HEADS:
            return sm90._configuration_of_few_heads(problem)
        split, channel_splits = "steps", sm90._channel_splits_of_clusters(problem)
        if not channel_splits:
            split = sm90._divides(problem)
            channel_splits = sm90._channel_splits(problem, problem.num_tokens * -(-problem.num_heads // 64), split)
        entries = problem.entry_indices is not None, problem.page_table is not None
        return problem.row_format, *entries, split, channel_splits

    make_first_calls(geometry(), heads)
    called = set(map(variant, kernel))
    shapes = implementation.attention_shapes(geometry(), heads, CPU)
    widths = {SWA_RATIO: [0], CSA_RATIO: [512, 1024], HCA_RATIO: [*range(2, 1024, 62), 8192]}
    for ratio, tokens, split_keys in itertools.product(widths, range(1, 300), (None, DECODE_SPLIT_KEYS)):
        for entries in widths[ratio]:
            batch = SimpleNamespace(
                row_format=RowFormat.FP8,
                entry_indices=True if ratio == CSA_RATIO else None,
                page_table=True if ratio == HCA_RATIO else None,
                max_steps=num_steps(128, entries),
                split_keys=split_keys,
                max_kv_splits=num_kv_splits(num_steps(128, entries), split_keys),
                num_tokens=tokens,
                num_heads=heads,
                q=torch.empty(0),
            )
            assert variant(batch) in called, (ratio, tokens, split_keys, entries)
            if split_keys is None and attention_calls.may_unpack(shapes, entries, tokens):
                batch.row_format = RowFormat.PLAIN
                assert variant(batch) in called, ("unpacked", ratio, tokens, entries)


def test_a_kernel_that_is_wrong_about_zeros_stops_the_server(
    kernel: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "answer", 1.0)
    with pytest.raises(RuntimeError, match="attention of zeros"):
        make_first_calls(geometry(), 16)


def test_the_reference_needs_no_compiling(caplog: pytest.LogCaptureFixture) -> None:
    make_first_calls(geometry(), 16)
    assert not caplog.records


def test_another_head_dim_is_served_by_the_reference_on_a_gpu(
    kernel: list[Problem], caplog: pytest.LogCaptureFixture
) -> None:
    assert implementation.required_implementation(CUDA, 64) == "ref"
    assert implementation.required_implementation(CUDA, 512) is None
    assert implementation.required_implementation(CPU, 64) is None
    assert implementation.chosen_implementation(CUDA, torch.bfloat16, 64).name == "ref"
    assert implementation.chosen_implementation(CUDA, torch.bfloat16, 512).name == "stand_in"
    make_first_calls(geometry(64, RowFormat.PLAIN), 16, CUDA)
    assert not kernel and "this model has 64" in caplog.text


def test_a_name_in_the_environment_decides(kernel: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(implementation.NAME_VARIABLE, "ref")
    make_first_calls(geometry(), 16)
    assert not kernel
    small = PoolGeometry(ratios=LAYERS, row_dim=32, rope_dim=8, index_dim=32, dtype=torch.float32)
    assert Engine(small, Sequences(small, 8)).backend.attention_impl == "ref"
    monkeypatch.setenv(implementation.NAME_VARIABLE, "stand_in")
    make_first_calls(geometry(format=RowFormat.PLAIN), 16)
    assert len(kernel) == 12 * len(attention_calls.TOKENS)
    monkeypatch.setenv(implementation.NAME_VARIABLE, "sm100")
    with pytest.raises(NotImplementedError, match="'sm100' of op 'sparse_attention' does not support device 'cpu'"):
        make_first_calls(geometry(), 16)
    monkeypatch.setenv(implementation.NAME_VARIABLE, "fast")
    with pytest.raises(KeyError, match="no implementation 'fast'; it has: "):
        make_first_calls(geometry(), 16)


def test_the_backend_splits_decode_and_not_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend also limits the indexer's lists to visible entries, and splits a verify step's keys as in decode."""
    seen: list[SimpleNamespace] = []
    original = attention_backend.sparse_attention

    def recorded(*arguments: object, **options: object) -> torch.Tensor:
        seen.append(SimpleNamespace(**options))
        return original(*arguments, **options)

    monkeypatch.setattr(attention_backend, "sparse_attention", recorded)
    small = PoolGeometry(ratios=LAYERS, row_dim=32, rope_dim=8, index_dim=32, dtype=torch.float32, draft_tokens=4)
    engine = Engine(small, Sequences(small, 64))
    for mode, work in (
        (ForwardMode.EXTEND, [(0, 30), (1, 9)]),
        (ForwardMode.DECODE, [(0, 1), (1, 1)]),
        (ForwardMode.TARGET_VERIFY, [(0, 4), (1, 4)]),
    ):
        seen.clear()
        visible = [(engine.length.get(request, 0) + i + 1) // 4 for request, n in work for i in range(n)]
        engine.forward(mode, work)
        assert [call.split_keys for call in seen] == [None if mode is ForwardMode.EXTEND else DECODE_SPLIT_KEYS] * 4
        swa, csa, hca, _ = seen
        assert swa.visible is None and csa.visible.tolist() == visible and (hca.visible == 0).all()
        for count, listed in zip(csa.visible.tolist(), csa.entry_indices.tolist(), strict=True):
            assert [row >= 0 for row in listed] == [slot < count for slot in range(TOP_K)]
