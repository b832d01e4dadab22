"""The attention benchmark on a CPU, with the reference instead of the kernel: its inputs, floors and arithmetic."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from bench_sparse_attention import Options, compare_few_heads, line, plot, run, summary
from lib import attention_contenders
from lib.attention_contenders import flashmla_table, one_list, padded, unpacked_chunks
from lib.attention_inputs import (
    CONTEXTS,
    WINDOW,
    Case,
    Inputs,
    Pools,
    all_cases,
    build,
    checked_tokens,
    exact,
    few_heads_cases,
    number_of_sets,
    quick_cases,
    unpacked_rows,
)
from lib.measuring import Ceilings, geometric_mean
from torch import Tensor

from dsv4_kernels.kv_layout import ROW_BYTES, KVRows, RowFormat
from dsv4_kernels.sparse_attention import unpacking
from sglang_dsv4.attention.metadata import extend_metadata
from sglang_dsv4.cache.geometry import PoolGeometry

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture(scope="module")
def pools() -> Pools:
    return Pools(CPU, entry_bytes=12 * MIB, query_bytes=8 * MIB)


DECODE = [Case(False, kind, 4096, 3, 5) for kind in ("swa", "csa512", "csa1024", "hca")]
PREFILL = [Case(True, kind, 4096, 2, 70, fp8) for kind in ("swa", "csa512", "hca") for fp8 in (True, False)]


@pytest.mark.parametrize("unpacks", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["as_stored", "unpacked"])
@pytest.mark.slow
def test_a_run_from_end_to_end(monkeypatch: pytest.MonkeyPatch, unpacks: bool) -> None:
    """Every kind of case agrees with fp64, as the run itself checks: a wrong list, offset or page table would show."""
    monkeypatch.setattr(unpacking, "pays", lambda *sizes: unpacks)
    shown: list[str] = []
    result = run(DECODE + PREFILL, Options("ref", 512, CPU, 0.0, ()), 12 * MIB, 8 * MIB, shown.append)
    assert [row["name"] for row in result["cases"]] == [case.name for case in DECODE + PREFILL]
    assert not result["wrong"] and len(shown) == 2 + len(result["cases"])
    for row in result["cases"]:
        assert row["rel_err"] < 3e-3 and row["ours_us"] > 0 and row["floor_us"] > 0 and row["flashmla_us"] is None
        chunk_of_fp8 = row["name"].startswith("prefill") and row["name"].endswith("fp8")
        assert row["rows"] == ("unpacked" if unpacks and chunk_of_fp8 else "as stored")
    json.dumps(result)


@pytest.mark.parametrize("kind", ["swa", "csa512", "hca"])
@pytest.mark.parametrize("tokens", [128, 512])
def test_what_pays_is_asked_the_same_as_in_the_backend(pools: Pools, kind: str, tokens: int) -> None:
    case = Case(True, kind, 32 << 10, 1, tokens)
    (inputs,) = build(case, pools, 1)
    slots = torch.arange(32 << 10, dtype=torch.int32)[None].expand(2, -1)
    geometry = PoolGeometry(ratios=(4, 128), row_format=RowFormat.FP8)
    plan = extend_metadata([case.context - tokens], [tokens], torch.tensor([1]), slots, geometry, 2).unpack
    assert unpacked_rows(case) == len(plan.window_rows) + (len(plan.pages) * case.page_entries if case.ratio else 0)
    assert inputs.keys() == plan.keys(1, WINDOW) + (plan.keys(case.ratio, case.entries_read) if case.ratio else 0)


@pytest.mark.parametrize("case", [case for case in PREFILL if case.fp8], ids=lambda case: case.name)
def test_unpacked_inputs_are_the_same_rows_in_another_order(pools: Pools, case: Case) -> None:
    (inputs,) = build(case, pools, 1)
    (chunk,) = unpacked_chunks([inputs], case, "ref")
    chunk.fill()
    assert chunk.inputs.keys() == inputs.keys()
    for token in checked_tokens(inputs):
        assert torch.equal(exact(chunk.inputs, token), exact(inputs, token))
    if case.ratio:
        assert chunk.inputs.entries.num_rows == case.context_entries and not torch.equal(
            chunk.inputs.entry_list, inputs.entry_list
        )


@pytest.mark.parametrize("case", DECODE + PREFILL, ids=lambda case: case.name)
def test_inputs_are_what_a_server_would_have(pools: Pools, case: Case) -> None:
    first, second = build(case, pools, 2)
    assert first.q.shape == (case.tokens, case.heads, 512) and not torch.equal(first.q, second.q)
    for inputs in (first, second):
        assert inputs.window_rows.shape == (case.tokens, WINDOW) and (inputs.window_rows >= 0).all()
        assert int(inputs.window_rows.max()) < inputs.window.num_rows
        if case.ratio:
            rows, visible = inputs.entry_list, inputs.visible
            assert int(rows.max()) < inputs.entries.num_rows and rows.shape[1] == int(visible.max())
            for token in range(case.tokens):
                named = rows[token][rows[token] >= 0]
                assert len(named.unique()) == len(named) == int(visible[token])
        if case.kind == "hca":
            entry = int(inputs.visible[-1]) - 1
            page = inputs.page_table[inputs.token_to_request[-1], entry // 2]
            assert int(page) * 2 + entry % 2 == int(inputs.entry_list[-1, entry])
    if not case.prefill:
        assert not set(first.window_rows.flatten().tolist()) & set(second.window_rows.flatten().tolist())


def test_a_chunks_window_reaches_back_over_127_rows(pools: Pools) -> None:
    (inputs,) = build(PREFILL[0], pools, 1)
    assert inputs.window_rows[0].tolist() == list(range(128)) and inputs.window_rows[69].tolist() == list(
        range(69, 197)
    )
    (hca,) = build(Case(True, "hca", 4096, 2, 130), pools, 1)
    assert hca.visible[0] == (4096 - 130 + 1) // 128 and hca.visible[1] == 31 and hca.visible[-1] == 32


@pytest.mark.parametrize("case", [c for c in PREFILL if not c.fp8], ids=lambda case: case.name)
def test_flashmla_is_given_the_same_rows_as_one_list(pools: Pools, case: Case) -> None:
    (inputs,) = build(case, pools, 1)
    lists, lengths, storage = one_list(inputs)
    assert lists.shape[2] % 128 == 0 and lists.dtype == torch.int32
    joined = KVRows(storage, RowFormat.PLAIN, len(storage), 512, 64)
    for token in checked_tokens(inputs):
        listed = lists[token, 0, : int(lengths[token])]
        assert (listed >= 0).all()
        as_window = Inputs(inputs.q, joined, lists[:, 0], *[None] * 5, inputs.sink)
        assert torch.equal(exact(as_window, token), exact(inputs, token))


def test_flashmla_reads_the_same_bytes(pools: Pools) -> None:
    """Row r is row r % 64 of page r // 64; a page has 64 x 576 bytes of data and then 64 x 8 bytes of scales."""
    table = flashmla_table(pools.window)
    assert table.shape[1:] == (64, 1, 584) and table.stride()[:2] == (37_440, 584)
    page = table[2].view(torch.uint8).flatten()
    data, scales = pools.window._split_pages()
    assert torch.equal(page[: 64 * 576].view(64, 576), data[2])
    assert torch.equal(page[64 * 576 :].view(64, 8), scales[2])


class StandIn:
    """flash_mla as its documentation describes it, in fp64: lists of whole blocks, lengths, two tables of pages."""

    calls: ClassVar[list[str]] = []

    @staticmethod
    def get_mla_metadata() -> tuple[object, None]:
        return object(), None

    @classmethod
    def flash_mla_with_kvcache(cls, *, use_legacy: bool, **given: Any) -> tuple[Tensor, None]:
        assert use_legacy and given["is_fp8_kvcache"] and given["block_table"] is given["cache_seqlens"] is None
        cls.calls.append("decode")
        assert given["q"].shape[2] >= 64 and given["attn_sink"].shape == given["q"].shape[2:3]
        out = torch.zeros(given["q"].shape, dtype=torch.bfloat16)
        for token in range(len(out)):
            keys = []
            for cache, indices, length in (
                ("k_cache", "indices", "topk_length"),
                ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),
            ):
                if cache in given:
                    listed = given[indices]
                    assert listed.dtype == given[length].dtype == torch.int32 and listed.shape[2] % 64 == 0
                    keys.append(cls.rows(given[cache], listed[token, 0, : int(given[length][token])]))
            out[token, 0] = cls.attend(given["q"][token, 0], torch.cat(keys), given)
        return out, None

    @classmethod
    def flash_mla_sparse_fwd(
        cls, q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, sink: Tensor, lengths: Tensor, **rest: Any
    ) -> tuple[Tensor, None, None]:
        assert rest == {"use_legacy": True} and indices.shape[2] % 128 == 0 and kv.shape[1:] == (1, 512) and d_v == 512
        cls.calls.append("prefill")
        given = {"softmax_scale": scale, "attn_sink": sink}
        rows = [kv[indices[t, 0, : int(lengths[t])].long(), 0].double() for t in range(len(q))]
        return torch.stack([cls.attend(q[t], rows[t], given) for t in range(len(q))]), None, None

    @staticmethod
    def rows(cache: Tensor, listed: Tensor) -> Tensor:
        assert cache.dtype == torch.float8_e4m3fn and cache.stride(0) % 576 == 0 and (listed >= 0).all()
        pages = cache.view(torch.uint8).flatten(1)
        found = []
        for row in listed.tolist():
            page, place = pages[row // 64], row % 64
            data = page[576 * place : 576 * (place + 1)]
            exponents = page[64 * 576 + 8 * place :][:7].double() - 127
            nope = data[:448].view(torch.float8_e4m3fn).double().view(7, 64) * 2.0 ** exponents[:, None]
            found.append(torch.cat([nope.flatten(), data[448:].view(torch.bfloat16).double()]))
        return torch.stack(found)

    @staticmethod
    def attend(q: Tensor, keys: Tensor, given: dict[str, Any]) -> Tensor:
        weights = torch.exp(q.double() @ keys.T * given["softmax_scale"])
        return (weights @ keys / (weights.sum(1) + torch.exp(given["attn_sink"].double()))[:, None]).bfloat16()


@pytest.mark.slow
def test_flashmla_is_called_as_it_documents_and_gets_what_we_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that follows FlashMLA's documentation returns our result for every kind of case."""
    monkeypatch.setitem(sys.modules, "flash_mla", StandIn)
    StandIn.calls.clear()
    cases = [replace(case, tokens=3) for case in DECODE + PREFILL]
    opponents = ("flashmla", "flashmla_unpacked")
    result = run(cases, Options("ref", None, CPU, 0.0, opponents), 12 * MIB, 8 * MIB, lambda text: None)
    assert len(result["cases"]) == len(cases) and set(StandIn.calls) == {"decode", "prefill"}
    for case, row in zip(cases, result["cases"], strict=True):
        for name in opponents if case.prefill and case.fp8 else opponents[:1]:
            assert row.get(f"{name}_error") is None and row[f"{name}_rel_err"] < 3e-3, row
            assert row[f"{name}_us"] > 0
    assert sum(row["flashmla_unpacked_us"] is not None for row in result["cases"]) == 3
    assert result["summary"]["geomean_ratio_to_flashmla_unpacked"] > 0
    assert result["summary"]["compared"] == len(cases)


def test_padding_of_lists() -> None:
    assert padded(torch.tensor([[4, 5, 6]]), 4).tolist() == [[4, 5, 6, -1]]
    assert padded(torch.tensor([[4, 5]]), 2).tolist() == [[4, 5]]


def test_what_a_call_must_move_and_compute(pools: Pools) -> None:
    """Computed by hand for two requests of four heads that share ring and pages."""
    (inputs,) = build(Case(False, "csa512", 4096, 4, 2), pools, 1)
    io = 2 * 2 * 4 * 512 * 2
    expected = (2 * (128 + 512)) * ROW_BYTES + io + 4 * 2 * (128 + 512)
    assert inputs.bytes() == expected
    assert inputs.flops() == 2 * 2 * 2 * 4 * 512 * (128 + 512)
    inputs.window_rows[1] = inputs.window_rows[0]
    assert inputs.bytes() == expected - 128 * ROW_BYTES
    inputs.window_rows[1, 5:] = -1
    assert inputs.flops() == 4 * 4 * 512 * (2 * 512 + 128 + 5)
    ceilings = Ceilings(1e12, 1e12)
    memory, compute = ceilings.bytes_per_second, ceilings.flops_per_second
    assert ceilings.floor_us(inputs) == (1e6 * inputs.flops() / compute, "flops")
    assert Ceilings(memory, 1e15).floor_us(inputs) == (1e6 * inputs.bytes() / memory, "bytes")


def test_the_list_of_cases() -> None:
    cases = all_cases()
    names = [case.name for case in cases]
    assert len(names) == len(set(names)) == (1 + 3 * 4) * 2 * 6 + 4 * 2 * 3 * 2
    assert {"decode-csa512-1m-h64-b256", "decode-swa-h128-b1", "prefill-hca-32k-h128-t4096-bf16"} <= set(names)
    quick = [case.name for case in quick_cases()]
    assert 30 < len(quick) < 80 and set(quick) <= set(names)
    by_name = dict(zip(names, cases, strict=True))
    assert [by_name[f"decode-hca-{c}-h64-b1"].entries_read for c in CONTEXTS] == [32, 256, 1024, 8192]
    assert by_name["decode-csa1024-4k-h64-b1"].entries_read == 1024 and by_name["decode-swa-h64-b1"].entries_read == 0


def test_few_heads_are_compared_with_64() -> None:
    names = [case.name for case in few_heads_cases()]
    assert len(names) == len(set(names)) == 3 * (5 * 6 + 3 * 2)
    assert {name.replace("-h16-", "-h64-") for name in names if "-h16-" in name} <= set(names)
    rows = [
        {"name": "decode-csa512-32k-h64-b64", "ours_us": 30.0},
        {"name": "decode-csa512-32k-h16-b64", "ours_us": 12.0, "many_heads_us": 24.0},
        {"name": "decode-csa512-32k-h8-b128", "ours_us": 9.0},  # no case with 64 heads
        {"name": "decode-csa512-32k-h8-b64", "ours_us": 15.0, "many_heads_us": None},
        {"name": "decode-csa512-32k-h128-b64", "ours_us": 60.0},  # not few heads
    ]
    found = compare_few_heads(rows)
    assert [(r["heads"], r["ratio_to_64"], r["ratio_to_many"]) for r in found] == [(16, 0.4, 0.5), (8, 0.5, None)]


@pytest.mark.parametrize("l2_mb", [50, 60, 126], ids=["h200", "h200_reported", "b200"])
def test_sets_outgrow_the_cache_and_fit_into_memory(l2_mb: int) -> None:
    for case in all_cases() + few_heads_cases():
        sets = number_of_sets(case, l2_mb * MIB)
        assert 2 <= sets <= 512
        assert 2 * sets * case.tokens * case.heads * 512 <= 1.5 * (1 << 30), case.name
        if sets < 512:
            rows = case.tokens * (WINDOW + case.entries_read)
            assert sets * (rows * 1024 + 4 * case.tokens * case.heads * 512) > 2 * l2_mb * MIB


ROWS = [
    {"name": "decode-swa-h64-b1", "ours_us": 5.0, "flashmla_us": 10.0, "floor_us": 1.0, "bound": "bytes"},
    {"name": "decode-csa512-32k-h64-b64", "ours_us": 40.0, "flashmla_us": 20.0, "floor_us": 30.0, "bound": "flops"},
    {"name": "prefill-swa-h64-t128-fp8", "ours_us": 25.0, "flashmla_us": 100.0, "floor_us": 24.0, "bound": "flops"},
    {"name": "decode-hca-1m-h64-b64", "ours_us": 50.0, "flashmla_us": None, "floor_us": 45.0, "bound": "bytes"},
]
for _row in ROWS:
    _row |= {"rel_err": 2e-3, "flashmla_rel_err": None if _row["flashmla_us"] is None else 2.5e-3}


def test_summary_by_hand() -> None:
    found = summary(ROWS)
    assert found["compared"] == 3 and found["slower_than_flashmla"] == 1
    assert found["geomean_ratio"] == pytest.approx((0.5 * 2 * 0.25) ** (1 / 3), abs=1e-4)
    assert found["geomean_ratio_decode"] == 1.0 and found["geomean_ratio_prefill"] == 0.25
    assert found["worst_ratio"] == {"name": "decode-csa512-32k-h64-b64", "value": 2.0}
    assert found["large_cases"] == 2
    assert found["least_share_of_floor_of_large"] == {"name": "decode-csa512-32k-h64-b64", "value": 0.75}
    assert found["worst_error_ratio"] == 0.8
    assert geometric_mean([]) is None and summary([])["worst_ratio"] is None


def test_a_line_of_the_table() -> None:
    assert re.search(r"swa-h64-b1 +5\.0 +10\.0 +0\.50 +1\.0 +20% +bytes +2\.0e-03 +2\.5e-03$", line(ROWS[0]))
    assert re.search(r"b64 +50\.0 +- +- +45\.0 +90% +bytes +2\.0e-03 +-$", line(ROWS[3]))
    assert "flashmla_error: no" in line({**ROWS[3], "flashmla_error": "no"})


def test_a_wrong_output_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention_contenders.sparse_attention
    monkeypatch.setattr(attention_contenders, "sparse_attention", lambda **kwargs: original(**kwargs) * 1.05)
    result = run([DECODE[0]], Options("ref", None, CPU, 0.0, ()), 12 * MIB, 8 * MIB, lambda text: None)
    assert not result["cases"] and "our output is off by 0.05" in result["wrong"][0]


def test_out_of_time_says_what_is_missing() -> None:
    shown: list[str] = []
    result = run(DECODE, Options("ref", None, CPU, 0.0, (), limit_seconds=0.0), 12 * MIB, 8 * MIB, shown.append)
    assert result["left_out"] == [case.name for case in DECODE] and not result["cases"]
    assert shown[-1].startswith("out of time; left out: decode-swa")


def test_an_opponent_that_refuses_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flash_mla module cannot be imported, even if the emulator's tests have put a module of that name on the
    path."""
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    result = run([DECODE[1]], Options("ref", None, CPU, 0.0, ("flashmla",)), 12 * MIB, 8 * MIB, lambda text: None)
    (row,) = result["cases"]
    assert row["flashmla_us"] is None and row["flashmla_error"].startswith("ModuleNotFoundError")


def test_the_picture(tmp_path: Path) -> None:
    plot({"gpu": "none", "cases": ROWS}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
