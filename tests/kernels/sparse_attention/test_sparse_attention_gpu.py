"""The attention kernel of this GPU (`sm90` or `sm100`, forced by name) over the hard cases of attention_cases.py.

Besides the values: the same bits in every batch, on every repetition, on two streams at once and from a CUDA graph;
nothing written outside the output; no allocation and no wait for the device when `out` is given.
"""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from ops.attention_cases import CASES, Case, Spec, build
from ops.attention_check import check, check_surroundings, reference
from ops.memory_layout import far_apart
from ops.number_formats import same_bits
from ops.random_attention import random_spec
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.host import compile_cache
from dsv4_kernels.unpack import unpack_pages

pytestmark = pytest.mark.gpu
NAN = float("nan")


@pytest.fixture(scope="module")
def kernel(kernel_on_gpu: Callable[[str], str]) -> str:
    return kernel_on_gpu("sparse_attention")


@pytest.fixture(autouse=True)
def finished() -> Iterator[None]:
    """Reports an asynchronous device error in the test that caused it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def poison(case: Case) -> None:
    """Fills the memory that the next allocation of the result's size gets with NaN."""
    T, H, D = case.q.shape
    torch.full((T, H, D), NAN, dtype=torch.bfloat16, device="cuda")


# ---- values


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_case(kernel: str, name: str, seed: int) -> None:
    case = build(CASES[name], "cuda", seed)
    poison(case)
    result = case.run(impl=kernel)
    torch.cuda.synchronize()
    check(case, result)


@pytest.mark.parametrize("seed", range(300))
def test_random_case(kernel: str, seed: int) -> None:
    """The values are right, and the bits are equal in a larger batch."""
    spec = random_spec(seed)
    case = build(spec, "cuda", seed)
    poison(case)
    out = case.run(impl=kernel)
    torch.cuda.synchronize()
    check(case, out)
    order = [t % spec.tokens for t in range(spec.tokens + 1 + 7 * seed % 150)]
    others = case.take(order).run(impl=kernel)
    assert same_bits(others, out[order])


@pytest.mark.parametrize("name", CASES)
def test_clusters_have_the_bits_of_the_other_kernel(kernel: str, name: str) -> None:
    """On Hopper, few tokens have another kernel than many."""
    if kernel != "sm90":
        pytest.skip("Blackwell has one kernel")
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    case = build(CASES[name], "cuda")
    expected = case.run(impl=kernel)
    with mock.patch.object(sm90, "MAX_CLUSTER", 0):
        result = case.run(impl=kernel)
    check(case, result)
    assert same_bits(expected, result)


@pytest.mark.parametrize("heads", [1, 5, 8, 16])
@pytest.mark.parametrize("name", CASES)
def test_few_heads(kernel: str, name: str, heads: int) -> None:
    """Hopper's kernel for few heads, whatever FEW_HEADS is; the bits are equal for whole tokens in a large batch."""
    if kernel != "sm90":
        pytest.skip("Blackwell has one kernel")
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    spec = replace(CASES[name], heads=heads)
    case = build(spec, "cuda")
    order = [(7 * t) % spec.tokens for t in range(300)]
    with mock.patch.object(sm90, "FEW_HEADS", 16):
        poison(case)
        out = case.run(impl=kernel)
        torch.cuda.synchronize()
        check(case, out)
        others = case.take(order).run(impl=kernel)
        with mock.patch.object(sm90, "_parts", lambda *_: 1), mock.patch.object(sm90, "_tiles_with_a_cta", lambda _: 0):
            whole = case.run(impl=kernel)
    assert same_bits(whole, out) and same_bits(others, out[order])


@pytest.mark.parametrize("tokens", [1, 4, 14])
@pytest.mark.parametrize("dense", [False, True], ids=["csa", "hca"])
def test_few_heads_with_a_cta_for_each_tile(kernel: str, dense: bool, tokens: int) -> None:
    """The bits of the kernel for large batches, in launches one after the other and on two streams: a CTA that ends, or
    overwrites another CTA's memory, too early would be noticed now and then only."""
    if kernel != "sm90":
        pytest.skip("Blackwell has one kernel")
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    lengths = tuple((36, 1100, 700, 5, 256)[t % 5] if dense else 512 - 37 * t for t in range(tokens))
    case = build(Spec(tokens=tokens, heads=16, entry_lengths=lengths, dense=dense, split_keys=1152), "cuda")
    assert sm90._tiles_with_a_cta(case.problem()), "clusters of this size find no room"
    with mock.patch.object(sm90, "_tiles_with_a_cta", lambda _: 0):
        expected = case.run(impl=kernel)
    check(case, expected)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    results = [case.run(impl=kernel) for _ in range(100)]
    for _ in range(100):
        results.append(case.run(impl=kernel))
        with torch.cuda.stream(other):
            results.append(case.run(impl=kernel))
    torch.cuda.synchronize()
    assert all(same_bits(result, expected) for result in results)


@pytest.mark.parametrize("heads", [1, 8, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("split_keys", [None, 128], ids=["one_kv_split", "split"])
def test_nothing_is_written_beside_the_output(kernel: str, heads: int, split_keys: int | None) -> None:
    """The output is a slice of a larger tensor, whose other elements do not change."""
    case = build(Spec(tokens=3, heads=heads, entry_lengths=(300, 0, 5), split_keys=split_keys), "cuda")
    check_surroundings(case, lambda case, out: case.run(impl=kernel, out=out))


def test_a_request_as_served(kernel: str) -> None:
    """V4-Flash at 128K of context and batch 67: CSA with top-k lists, every length different."""
    lengths = tuple(512 if t % 3 else 37 * t % 512 for t in range(67))
    case = build(Spec(tokens=67, entries=512, entry_lengths=lengths, split_keys=512), "cuda")
    poison(case)
    check(case, case.run(impl=kernel))


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("dense", [True, False], ids=["hca", "csa"])
def test_a_prefill_chunk(kernel: str, dense: bool, fp8: bool) -> None:
    """The first 700 tokens of a sequence: windows and entries grow with the position."""
    lengths = tuple((t + 1) // 128 if dense else min(512, (t + 1) // 4) for t in range(700))
    spec = Spec(
        tokens=700,
        window_lengths=tuple(min(t + 1, 128) for t in range(700)),
        entry_lengths=lengths,
        dense=dense,
        tokens_per_request=700,
        fp8=fp8,
    )
    case = build(spec, "cuda")
    poison(case)
    check(case, case.run(impl=kernel))


# ---- memory


@pytest.fixture
def much_memory() -> Iterator[None]:
    """Skips unless the GPU has room for two tables, or q and an output, of 8 to 9 GB each."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip(f"needs 24 GiB of free GPU memory; there are {torch.cuda.mem_get_info()[0] >> 30}")
    yield
    torch.cuda.empty_cache()


FAR = ("csa_512-fp8", "holes-bf16", "hca_32k-fp8", "hca_32k-bf16", "split_256-fp8", "split_256-bf16")


@pytest.mark.parametrize("times", [1, 60], ids=["few_tokens", "many_tokens"])
@pytest.mark.parametrize("name", FAR)
def test_rows_beyond_32_bits(kernel: str, much_memory: None, name: str, times: int) -> None:
    """Offsets of rows need 64 bits, in bytes and in elements, in the window's table and in the entries' table."""
    case = build(CASES[name], "cuda").take(list(range(CASES[name].tokens)) * times)
    expected = case.run(impl=kernel)
    check(case, expected)
    assert all(map(same_bits, case.spread().run(impl=kernel), expected))


@pytest.mark.parametrize("times", [1, 60], ids=["few_tokens", "many_tokens"])
@pytest.mark.parametrize("name", FAR)
def test_q_and_outputs_beyond_32_bits(kernel: str, much_memory: None, name: str, times: int) -> None:
    case = build(CASES[name], "cuda").take([token % CASES[name].tokens for token in range(4 * times)])
    expected = case.run(impl=kernel)
    check(case, expected)
    far = replace(case, q=far_apart(case.q))
    result = far.run(impl=kernel, out=far_apart(torch.zeros_like(case.q)))
    assert all(map(same_bits, result, expected))


# ---- bits

INVARIANT = (
    *("csa_512-fp8", "csa_512-bf16", "lengths_of_both-fp8", "hca_32k-fp8", "odd_batch-fp8", "speculation-bf16"),
    *("split_128-fp8", "split_512-fp8", "split_128_heads-bf16", "split_8_heads-fp8", "split_of_nothing-fp8"),
    *("holes-fp8", "sub_splits-fp8", "sub_splits-bf16", "sub_splits_of_kv_splits-fp8"),
)


@pytest.mark.parametrize("batch", [1, 2, 3, 16, 64, 131, 132, 133, 257, 600])
@pytest.mark.parametrize("name", INVARIANT)
def test_a_token_has_the_same_bits_in_any_batch(kernel: str, name: str, batch: int) -> None:
    """A token has the same bits at any position of any batch."""
    case = build(CASES[name], "cuda")
    out = case.run(impl=kernel)
    order = torch.randint(0, case.spec.tokens, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
    assert same_bits(case.take(order).run(impl=kernel), out[order])


@pytest.mark.parametrize("heads, entries", [(128, 512), (64, 1024)])
def test_sub_splits_of_which_the_first_is_longer_have_the_bits_of_the_whole(
    kernel: str, heads: int, entries: int
) -> None:
    """On Hopper, the later sub-splits' CTAs prefetch partial results while they wait for the first sub-split's."""
    case = build(Spec(tokens=16, heads=heads, entry_lengths=(entries,), split_keys=1152), "cuda")
    expected = case.run(impl=kernel, split_keys=None)
    for _ in range(100):
        assert same_bits(case.run(impl=kernel), expected)


@pytest.mark.parametrize("split_keys", [None, 128, 512])
def test_the_width_of_lists_and_tables_is_not_seen(kernel: str, split_keys: int | None) -> None:
    """`visible` determines the bits: the longest context of the batch widens every request's page table."""
    listed = build(Spec(entry_lengths=(500, 3, 130), split_keys=split_keys), "cuda")
    rows = listed.entry_arguments["entry_indices"]
    wider = torch.nn.functional.pad(rows, (0, 524), value=2**31 - 1)
    assert same_bits(listed.run(impl=kernel, entry_indices=wider), listed.run(impl=kernel))
    dense = build(Spec(entry_lengths=(500, 3, 130), dense=True, split_keys=split_keys), "cuda")
    table = torch.nn.functional.pad(dense.entry_arguments["page_table"], (0, 4001), value=2**31 - 1)
    assert same_bits(dense.run(impl=kernel, page_table=table), dense.run(impl=kernel))


@pytest.mark.parametrize("name", [name for name, spec in CASES.items() if spec.fp8])
def test_unpacked_rows_give_the_same_bits(kernel: str, name: str) -> None:
    """FP8 rows and the bf16 rows unpacked from them give the same bits."""
    case = build(CASES[name], "cuda")
    plain = case.unpacked(functools.partial(unpack_pages, impl=kernel))
    assert same_bits(case.run(impl=kernel), plain.run(impl=kernel))


@pytest.mark.parametrize("name", INVARIANT)
def test_every_repetition_has_the_same_bits(kernel: str, name: str) -> None:
    case = build(CASES[name], "cuda").take(list(range(CASES[name].tokens)) * 20)
    first = case.run(impl=kernel)
    results = [case.run(impl=kernel) for _ in range(30)]
    for result in results:
        assert same_bits(first, result)


def test_two_streams_do_not_meet(kernel: str) -> None:
    """Launches that run at the same time share no scratch memory."""
    cases = [build(CASES["split_128-fp8"], "cuda", seed).take(list(range(8)) * 12) for seed in (0, 1)]
    expected = [case.run(impl=kernel) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results: list[list] = [[], []]
    for _ in range(40):
        for i, case in enumerate(cases):
            with torch.cuda.stream(streams[i]):
                results[i].append(case.run(impl=kernel))
    torch.cuda.synchronize()
    for out, repeated in zip(expected, results, strict=True):
        assert all(same_bits(out, other) for other in repeated)


# ---- CUDA graphs, allocation, waiting


def inputs(case: Case) -> list[Tensor]:
    """All tensors of a case."""
    tables = [table.storage for table in (case.window, case.entries) if table is not None]
    lists = [case.window_rows, *(v for v in case.entry_arguments.values() if isinstance(v, Tensor))]
    return [case.q, *tables, *lists, *([] if case.sink is None else [case.sink])]


@pytest.mark.parametrize("name", ["csa_512-fp8", "csa_1024-bf16", "hca_32k-fp8", "split_128-fp8", "hca_1m_split-fp8"])
def test_a_graph_replays_with_other_inputs(kernel: str, name: str) -> None:
    """A replay reads new rows, lists and lengths at the same addresses; eager calls in between do not change it."""
    live = build(CASES[name], "cuda")
    spec = live.spec
    longest = max(spec.entry_lengths)  # it determines the widths
    shorter = replace(spec, entry_lengths=(longest, *(n // 2 for n in spec.entry_lengths[1:])))
    others = [build(spec, "cuda", 1), build(shorter, "cuda", 2), build(spec, "cuda", 3)]
    expected = [case.run(impl=kernel) for case in others]
    out = torch.empty_like(live.q)
    live.run(impl=kernel, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        live.run(impl=kernel, out=out)
    for _ in range(3):
        for case, expected_out in zip(others, expected, strict=True):
            for to, origin in zip(inputs(live), inputs(case), strict=True):
                to.copy_(origin)
            out.fill_(NAN)
            graph.replay()
            assert same_bits(out, expected_out)
            case.run(impl=kernel)


@pytest.mark.parametrize("name", ["csa_512-fp8", "hca_32k-fp8", "split_128-fp8", "split_8_heads-fp8"])
def test_decode_neither_allocates_nor_waits(kernel: str, name: str) -> None:
    case = build(CASES[name], "cuda")
    out = torch.empty_like(case.q)
    case.run(impl=kernel, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(impl=kernel, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_call_returns_before_the_kernel_has_run(kernel: str) -> None:
    case = build(CASES["csa_512-fp8"], "cuda")
    case.run(impl=kernel)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9))  # about a second of clock cycles
    done = torch.cuda.Event()
    case.run(impl=kernel)
    done.record()
    assert not done.query()


# ---- choice


def test_the_kernel_is_taken_and_says_so(kernel: str, caplog: pytest.LogCaptureFixture) -> None:
    case = build(CASES["keys_256-fp8"], "cuda")
    registry._resolved.clear()
    with caplog.at_level(logging.INFO, logger="dsv4_kernels.registry"):
        chosen = case.run()
        named = case.run(impl=kernel)
    assert same_bits(chosen, named)
    assert [record.getMessage() for record in caplog.records] == [
        f"op sparse_attention on cuda, torch.bfloat16: {kernel}",
        f"op sparse_attention on cuda, torch.bfloat16: {kernel} (named)",
    ]


def test_another_generations_kernel_is_refused(kernel: str) -> None:
    case = build(CASES["keys_256-fp8"], "cuda")
    other = {"sm90": "sm100", "sm100": "sm90"}[kernel]
    with pytest.raises(NotImplementedError, match=f"'{other}' of op 'sparse_attention' does not support device 'cuda'"):
        case.run(impl=other)
    for device in ("cpu", "meta"):
        with pytest.raises(NotImplementedError, match=f"does not support device '{device}'"):
            registry.select("sparse_attention", torch.device(device), torch.bfloat16, kernel)


def test_fp32_queries_and_mixed_formats_are_refused(kernel: str) -> None:
    case = build(CASES["keys_256-fp8"], "cuda")
    with pytest.raises(NotImplementedError, match=r"does not support device .cuda. with dtype torch\.float32"):
        replace(case, q=case.q.float()).run(impl=kernel)
    plain = build(CASES["keys_256-bf16"], "cuda")
    with pytest.raises(NotImplementedError, match="window rows plain, entries fp8"):
        replace(case, window=plain.window).run()


def test_the_reference_agrees_on_the_gpu(kernel: str) -> None:
    """The reference, to which the CPU's and the emulator's tests compare kernels, gives the same values on a GPU."""
    case = build(CASES["csa_512-fp8"], "cuda")
    check(case, case.run(impl="ref"), reference(case))


# ---- compiled kernels on disk

PROGRAM = """
import sys; sys.path.insert(0, sys.argv[1])
import hashlib, torch
from ops.attention_cases import CASES, build
from dsv4_kernels.host import compile_cache
out = build(CASES["split_128-fp8"], "cuda").run(impl=sys.argv[2])
bits = hashlib.sha256(out.cpu().view(torch.int16).numpy().tobytes()).hexdigest()
origins = compile_cache.origins()
print(bits, *sorted({origin.source for origin in origins}), round(sum(origin.seconds for origin in origins), 2))
"""


def test_a_loaded_kernel_computes_what_the_compiled_one_does(kernel: str, tmp_path: Path) -> None:
    environment = {**os.environ, compile_cache.FOLDER_VARIABLE: str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[2] / "lib"), kernel]
    answers = []
    for _ in range(2):
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert answer.returncode == 0, answer.stderr[-2000:]
        answers.append(answer.stdout.split()[-3:])
    (first_bits, first, first_seconds), (second_bits, second, second_seconds) = answers
    assert (first, second) == ("compiled", "disk") and first_bits == second_bits
    assert float(second_seconds) < float(first_seconds)
