"""Costs of the pools: the plan against the allocated tensors and sums done by hand, and refused plans."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import msgspec
import pytest
import torch

from dsv4_kernels.kv_layout import RowFormat
from sglang_dsv4.cache import pool_configurator
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.kv_pool import Dsv4KVPool
from sglang_dsv4.cache.pool_configurator import Dsv4PoolConfigurator, reserve_admission_pages
from sglang_dsv4.cache.pool_plan import PoolPlan, format_bytes, largest_plan

FLASH, PRO = (0, 0, *(4, 128) * 20, 4), (128, 128, *(4, 128) * 29, 4)
ODD = (4, 0, 4, 128)
SCHEDULES = pytest.mark.parametrize("ratios", [FLASH, PRO, ODD], ids=["flash", "pro", "arbitrary"])
FORMATS = pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
SPECULATION = pytest.mark.parametrize("draft_tokens", [0, 4], ids=["", "speculative"])
PAGE_64 = 37_440  # bytes of 64 fp8 rows (specification, section 4.1)


def geometry(ratios: tuple[int, ...], fp8: bool, draft_tokens: int = 0) -> PoolGeometry:
    return PoolGeometry(
        ratios=ratios,
        draft_tokens=draft_tokens,
        draft_layers=1 if draft_tokens else 0,
        row_format=RowFormat.FP8 if fp8 else RowFormat.PLAIN,
        index_format=RowFormat.INDEX_FP4 if fp8 else RowFormat.PLAIN,
    )


def bytes_by_hand(ratios: tuple[int, ...], fp8: bool, draft_tokens: int, full_tokens: int, slots: int) -> int:
    """Bytes by the specification's sections 4.1 and 3.6, added up without PoolPlan."""
    csa, hca, layers = ratios.count(4), ratios.count(128), len(ratios) + (1 if draft_tokens else 0)
    ring, csa_state, hca_state = (256, 16, 256) if draft_tokens else (128, 8, 128)

    def rows(count: int) -> int:
        return math.ceil(count / 64) * PAGE_64 if fp8 else count * 512 * 2

    def keys(count: int) -> int:
        return math.ceil(count / 64) * 64 * (64 + 4) if fp8 else count * 128 * 2

    total = layers * rows(slots * ring)
    total += csa * (rows((full_tokens + 256) // 4) + keys((full_tokens + 256) // 4))
    total += hca * rows((full_tokens + 256) // 128)
    total += csa * slots * csa_state * 2 * (2 * 512 + 2 * 128) * 4
    total += hca * slots * hca_state * 2 * 512 * 4
    return total


@SCHEDULES
@FORMATS
@SPECULATION
def test_plan_equals_tensors_and_sums_by_hand(ratios: tuple[int, ...], fp8: bool, draft_tokens: int) -> None:
    """Allocated pools of 3 request slots and 5 pages. The draft worker's own pool is part of the target's plan."""
    g = geometry(ratios, fp8, draft_tokens)
    device = "cpu" if len(ratios) < 10 else "meta"
    pool = Dsv4KVPool(g, full_tokens=5 * 256, request_slots=3, device=device)
    allocated = sum(storage.nbytes for _, _, storage in pool.tensors())
    assert pool.get_kv_size_bytes() == allocated
    assert pool.mem_usage == allocated / 2**30 > 0
    if draft_tokens:
        draft = dataclasses.replace(g, ratios=(0,), draft_layers=0)
        allocated += Dsv4KVPool(draft, full_tokens=5 * 256, request_slots=3, device=device).get_kv_size_bytes()
    assert pool.plan.total_bytes == allocated == bytes_by_hand(ratios, fp8, draft_tokens, 5 * 256, 3)


def test_costs_of_the_published_models() -> None:
    """Specification, section 10: 3,514 and 5,031 bytes per token with fp4 indexer keys, and the rows of a request.

    A row of a 64-row page has 585 bytes, its padding included.
    """
    flash = PoolPlan.of(geometry(FLASH, fp8=True), 256 * 100, 9)
    assert flash.bytes_per_token == 21 * (585 / 4 + 68 / 4) + 20 * 585 / 128
    assert round(flash.bytes_per_token) == 3520
    assert flash.bytes_per_request == 43 * 128 * 585 + 21 * 8 * 2 * 4 * (1024 + 256) + 20 * 128 * 2 * 4 * 512
    pro = PoolPlan.of(geometry(PRO, fp8=True), 256 * 100, 9)
    assert pro.bytes_per_token == 30 * (585 / 4 + 68 / 4) + 31 * 585 / 128
    assert round(pro.bytes_per_token) == 5039


def test_hca_entries_have_no_page_padding() -> None:
    """Two entries per page of 256 tokens, but physical pages of 64 rows: 585 bytes a row, not 864 as in pages of 2."""
    plan = PoolPlan.of(geometry((128,), fp8=True), 256 * 3200, 2)
    entries = next(p for p in plan.pools if p.name == "HCA entries")
    assert entries.total_bytes / entries.rows == pytest.approx(585, rel=0.01)


def test_table() -> None:
    plan = PoolPlan.of(geometry(FLASH, fp8=True, draft_tokens=4), 256 * 1000, 33)
    table = plan.table().splitlines()
    assert table[0] == "DeepSeek-V4 pools: 256,000 tokens in pages of 256, 32 requests, " + format_bytes(
        plan.total_bytes
    )
    assert [line.split("  ")[0] for line in table[1:]] == [
        "pool",
        "window rings",
        "draft window rings",
        "CSA entries",
        "CSA compressor state",
        "indexer keys",
        "indexer compressor state",
        "HCA entries",
        "HCA compressor state",
        "total",
    ]
    assert f"{plan.total_bytes:,}" in table[-1]
    assert max(len(line) for line in table) <= 120
    entries = plan.pools[2]
    assert (entries.rows, entries.bytes_per_unit) == ((256_000 + 256) // 4, pytest.approx(21 * 146.25))


@SCHEDULES
@FORMATS
def test_largest_plan_fits_and_one_page_more_does_not(ratios: tuple[int, ...], fp8: bool) -> None:
    g, budget = geometry(ratios, fp8), 3 * 2**30

    def slots(tokens: int) -> int:
        return min(48, tokens // 2) + 1

    plan = largest_plan(g, budget, slots)
    more = plan.full_tokens + 256
    assert plan.total_bytes <= budget < PoolPlan.of(g, more, slots(more)).total_bytes


def test_a_model_of_window_layers_only_costs_nothing_a_token() -> None:
    plan = largest_plan(geometry((0, 0), fp8=True), 2**30, lambda tokens: 9)
    assert plan.bytes_per_token == 0
    assert plan.full_tokens >= 768


def test_over_commit_says_what_to_do() -> None:
    g = geometry(FLASH, fp8=True)
    with pytest.raises(ValueError, match=r"257 request slots .* lower --max-running-requests to at most") as error:
        largest_plan(g, 2**30, lambda tokens: 257)
    advised = int(str(error.value).split("at most ")[1].split(",")[0])
    assert largest_plan(g, 2**30, lambda tokens: advised + 1).total_bytes <= 2**30
    with pytest.raises(ValueError, match="at most"):
        largest_plan(g, 2**30, lambda tokens: advised + 3)
    with pytest.raises(ValueError, match="raise --mem-fraction-static or free memory") as error:
        largest_plan(g, 2**20, lambda tokens: 257)
    assert "max-running-requests to at most" not in str(error.value)


def as_role(monkeypatch: pytest.MonkeyPatch, mode: str, extra_slots: int | None = None) -> None:
    """Make `pool_configurator` see a server of this --disaggregation-mode."""
    role = SimpleNamespace(disaggregation_mode=mode, disaggregation_decode_extra_slots=extra_slots)
    monkeypatch.setattr(pool_configurator, "get_disagg", lambda: role)


@pytest.fixture
def configurator(monkeypatch: pytest.MonkeyPatch) -> Dsv4PoolConfigurator:
    """The configurator of a V4-Flash-like fp8 worker whose user asked for 16 running requests."""
    monkeypatch.setattr(pool_configurator, "geometry_of", lambda kvc: geometry(FLASH, fp8=True))
    monkeypatch.setattr(pool_configurator, "get_schedule", lambda: SimpleNamespace(max_running_requests=16))
    monkeypatch.setattr(pool_configurator, "get_memory", lambda: SimpleNamespace(disable_radix_cache=False))
    as_role(monkeypatch, "null")
    kvc = SimpleNamespace(page_size=256, attn_dp_size=1, model_config=SimpleNamespace(context_len=65536))
    return Dsv4PoolConfigurator(kvc)


def test_sizes_from_a_byte_budget(configurator: Dsv4PoolConfigurator) -> None:
    config = configurator.calculate_pool_sizes(2**30, 256)
    tokens = config.full_max_total_num_tokens
    plan = PoolPlan.of(configurator.geometry, tokens, 17, tail_slots=16 + -(-tokens // 4096))
    assert config.max_total_num_tokens == tokens
    step = 2 * 256 * plan.bytes_per_token + plan.bytes_per_tail
    assert plan.total_bytes <= 2**30 < plan.total_bytes + step


def test_a_decode_server_pays_for_requests_in_transfer(
    configurator: Dsv4PoolConfigurator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 running requests, 32 in transfer and the null slot; no tails, since requests bring their rings."""
    as_role(monkeypatch, "decode", 32)
    tokens = configurator.calculate_pool_sizes(2**31, 256).full_max_total_num_tokens
    plan = PoolPlan.of(configurator.geometry, tokens, 49)
    assert plan.total_bytes <= 2**31 < plan.total_bytes + 2 * 256 * plan.bytes_per_token
    as_role(monkeypatch, "prefill", 32)  # the flag is a decode server's
    more = configurator.calculate_pool_sizes(2**31, 256).full_max_total_num_tokens
    assert more > tokens


@pytest.mark.parametrize("ratios", [FLASH, PRO, ODD], ids=["flash", "pro", "arbitrary"])
def test_packed_pages_are_in_the_plan(ratios: tuple[int, ...]) -> None:
    """2 rows of 584 bytes a page and HCA layer; none for plain rows, which are one run, or without transfers."""
    sizes = (256 * 10, 3)
    for fp8, transfers in ((True, True), (True, False), (False, True)):
        plain = PoolPlan.of(geometry(ratios, fp8), *sizes)
        plan = PoolPlan.of(dataclasses.replace(geometry(ratios, fp8), transfers=transfers), *sizes)
        extra = ratios.count(128) * 11 * 2 * 584 if fp8 and transfers else 0
        assert plan.total_bytes - plain.total_bytes == extra
        pool = Dsv4KVPool(plan.geometry, full_tokens=sizes[0], request_slots=sizes[1], device="meta")
        assert pool.get_kv_size_bytes() == plan.total_bytes


def test_tails_cost_what_the_specification_says() -> None:
    """128 window rows per layer; 4 half rows of a CSA layer's main and indexer compressor, fp32."""
    plan = PoolPlan.of(geometry(FLASH, fp8=True), 256 * 1000, 33, tail_slots=10)
    layers, csa = len(plan.geometry.ratios), len(plan.geometry.layers(4))
    assert plan.bytes_per_tail == layers * 2 * 37440 + csa * 4 * 2 * (512 + 128) * 4
    kept = [p for p in plan.pools if p.per == "tail"]
    assert sum(p.total_bytes for p in kept) == 11 * plan.bytes_per_tail  # one more: the transit slot
    assert "10 tails" in plan.table()


@pytest.mark.parametrize(("asked", "given"), [(768, 768), (1023, 768), (65536, 65536)])
def test_sizes_from_max_total_tokens(configurator: Dsv4PoolConfigurator, asked: int, given: int) -> None:
    assert configurator.calculate_pool_sizes_from_max_tokens(asked, 256).max_total_num_tokens == given


def test_too_few_tokens_are_refused(configurator: Dsv4PoolConfigurator) -> None:
    with pytest.raises(ValueError, match="--max-total-tokens 767 is less than 768"):
        configurator.calculate_pool_sizes_from_max_tokens(767, 256)


def test_another_page_size_is_refused() -> None:
    with pytest.raises(ValueError, match="needs --page-size 256, not 64"):
        Dsv4PoolConfigurator(SimpleNamespace(page_size=64))


def test_longest_request_leaves_the_pages_that_admission_wants() -> None:
    class Result(msgspec.Struct, frozen=True):
        full_max_total_num_tokens: int
        max_total_num_tokens: int

    result = reserve_admission_pages(Result(2048, 2048), SimpleNamespace(), pre_model_load_memory=1)
    assert (result.full_max_total_num_tokens, result.max_total_num_tokens) == (1536, 2048)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratios": (0, 4, 16)}, r"compress_ratios: expected values from \(0, 4, 128\), found \[16\]"),
        ({"row_format": RowFormat.FP8, "row_dim": 32}, "head_dim=32, qk_rope_head_dim=64: use --kv-cache-dtype auto"),
        (
            {"index_format": RowFormat.INDEX_FP4, "index_dim": 32},
            "fp4 indexer keys have 128 channels; this model",
        ),
    ],
    ids=["ratio", "fp8 dims", "fp4 dims"],
)
def test_geometry_that_no_pool_holds(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolGeometry(**{"ratios": (0, 4, 128), **change})


def test_what_the_pools_do_not_do_is_said() -> None:
    pool = Dsv4KVPool(PoolGeometry(ratios=(0,)), full_tokens=512, request_slots=2, device="meta")
    for call in (
        pool.get_state_buf_infos,
        pool.get_request_state_buf_infos,
        pool.host_pool_decls,
        lambda: pool.get_key_buffer(0),
        lambda: pool.move_kv_cache(None, None),
        lambda: pool.translate_loc_from_full_to_swa(torch.zeros(1)),
    ):
        with pytest.raises(NotImplementedError, match="sglang-dsv4's KV pools do not support"):
            call()
    with pytest.raises(KeyError, match="layer 0 has no indexer keys: its ratio is 0"):
        pool.index_keys(0)
    with pytest.raises(KeyError, match="layer 7 is not held here"):
        pool.entries(7)
