"""Hooks for prefill and decode on different servers, through SGLang's own functions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from cache.host_waits import NoWaiting, OnDevice
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVTransferMetric
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import TransferBackend
from sglang.srt.mem_cache import common
from torch import Tensor

from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.kv_pool import DraftOf, Dsv4KVPool
from sglang_dsv4.cache.transfer import describe
from sglang_dsv4.disaggregation import buffers, decode_side, pieces, prefill_side

SMALL = PoolGeometry((0, 4, 128), row_dim=32, rope_dim=8, index_dim=32, draft_tokens=4, draft_layers=1, transfers=True)


def small_pool(draft_of: Dsv4KVPool | None = None) -> Dsv4KVPool:
    geometry = SMALL if draft_of is None else replace(SMALL, ratios=(0,), draft_layers=0)
    join = None if draft_of is None else DraftOf(draft_of, torch.nn.Identity(), injected=False)
    return Dsv4KVPool(geometry, full_tokens=1024, request_slots=3, device="cpu", draft_of=join)


def test_rings_are_two_components_of_request_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own description of a DeepSeek-V4 pool asks ours for pages of window rows, which it does not have."""
    target = small_pool()
    draft = small_pool(target)
    setup, described = unwrap(utils.setup_state_kv_args), SimpleNamespace()
    with pytest.raises((NotImplementedError, AttributeError)):
        setup(SimpleNamespace(), target, draft, 3)
    monkeypatch.setattr(CommonKVManager, "kv_status_msg_carries_reason", False)
    buffers.list_rings(setup, described, target, draft, 3, req_to_token_pool=None)
    assert CommonKVManager.kv_status_msg_carries_reason is True
    assert [kind.value for kind in described.state_types] == ["request_row", "request_row"]
    assert [len(addresses) for addresses in described.state_data_ptrs] == [3 + 1 + 1 + 1, 1]
    assert described.state_item_lens[1] == [256 * 32 * 2]
    assert described.mla_compression_ratios is None


# ---- prefill servers that are refused


class Manager:
    """The parts of SGLang's manager that its own check of a prefill server needs."""

    try_ensure_parallel_info = unwrap(CommonKVManager.try_ensure_parallel_info)
    dsv41_spec_layout, kv_cache_dtype_str, is_mla_backend, is_hybrid_mla_backend = None, "auto", True, False
    attn_tp_size, attn_cp_size, dcp_size = 1, 1, 1

    def __init__(self, layout: str) -> None:
        self.kv_layout, self.prefill_info_table = layout, {}
        self.kv_args = SimpleNamespace(page_size=256, state_types=[])
        self.failures: dict[int, str] = {}

    def record_failure(self, room: int, reason: str) -> None:
        self.failures[room] = reason

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def waiting_request(room: int) -> Any:
    ended: list[int] = []
    receiver = SimpleNamespace(abort=lambda: ended.append(room))
    return SimpleNamespace(req=SimpleNamespace(bootstrap_room=room), kv_receiver=receiver, ended=ended)


def test_a_prefill_server_with_other_pools_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests end with what differs; those of other prefill servers go on."""
    ours = describe(SMALL, "1.0", "abc")
    layouts = {"one": ours, "other": describe(replace(SMALL, draft_tokens=0), "1.0", "abc"), "late": None}

    def route(url: str, timeout: float) -> Any:
        name = url.split("/")[2]
        topology = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 256}
        topology |= {"kv_cache_dtype": "auto", "follow_bootstrap_room": True, "kv_layout": layouts[name]}
        return SimpleNamespace(status_code=200 if layouts[name] else 503, json=lambda: topology, text="")

    monkeypatch.setattr(requests, "get", route)
    queue = SimpleNamespace(
        kv_manager=Manager(ours),
        _ensure_last_attempt_time={},
        _ensure_retry_interval=1.0,
        _ensure_retry_count={},
        _max_ensure_retries=15,
    )
    waiting = {name: [waiting_request(room)] for room, name in enumerate(layouts)}
    original = unwrap(DecodePreallocQueue._ensure_prefill_info)
    with pytest.raises(RuntimeError, match="KV layout mismatch"):
        original(queue, {"other": waiting["other"]})
    queue._ensure_last_attempt_time.clear()
    ready, still = decode_side.refuse_other_prefills(original, queue, waiting)
    assert ready == {"one": waiting["one"]} and still == waiting["late"]
    assert waiting["other"][0].ended and not waiting["one"][0].ended
    (reason,) = queue.kv_manager.failures.values()
    assert "The prefill server at other can't serve this decode server" in reason
    assert "draft-tokens: 0 there, 4 here" in reason and "window-ring: 128 there, 256 here" in reason
    assert "dtype:" not in reason and "dsv4-attn-backend" not in reason


def test_another_page_size_is_refused_with_sglangs_words() -> None:
    assert decode_side.explain("Page size mismatch: 64, 256") == "Page size mismatch: 64, 256"


@pytest.mark.parametrize("components", [(5,), (5, 7)], ids=["target", "and a draft"])
def test_the_bytes_of_all_rings_are_counted_once(components: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang multiplies the slots of both components by the bytes of both. Two decode ranks receive the copies."""
    monkeypatch.setattr(buffers, "live_parts", lambda: object())
    sender = CommonKVSender.__new__(CommonKVSender)
    sender._transfer_num_kv_indices = sender._transfer_num_state_indices = 0
    sender._transfer_metric = KVTransferMetric()
    sender.kv_mgr = SimpleNamespace(
        kv_item_lens_sum=100,
        state_item_lens_sum=sum(components),
        kv_args=SimpleNamespace(state_item_lens=[[size] for size in components]),
        get_kv_replica_factor=lambda: 2,
    )
    record = unwrap(CommonKVSender._record_transfer_indices)
    for pages, slots in (([3, 4], None), ([5], [[9] for _ in components])):  # rings travel with the last chunk
        buffers.count_rings_once(record, sender, pages, slots)
    metric = unwrap(CommonKVSender.get_transfer_metric)(sender)
    assert metric.transfer_total_bytes == 2 * (3 * 100 + sum(components))


# ---- retraction, early sends, packed pages


def test_our_pools_copy_a_retracted_request() -> None:
    original = unwrap(common.dsv4_needs_rebootstrap)
    allocator = SimpleNamespace(get_kvcache=small_pool)
    assert original(allocator)
    assert not decode_side.keep_bytes(original, allocator)
    assert not decode_side.keep_bytes(original, SimpleNamespace(get_kvcache=object))


@pytest.mark.parametrize(
    ("idle", "overlap", "on_gpu", "backend", "sent"),
    [
        (True, True, True, "mooncake", True),
        (False, True, True, "mooncake", False),
        (True, False, True, "mooncake", False),
        (True, False, False, "mooncake", True),
        (True, True, True, "nixl", False),
        (True, False, False, "nixl", True),
    ],
    ids=[
        "nothing waits",
        "a copy waits",
        "no event to wait for",
        "on a CPU copies are done",
        "NIXL waits for no event",
        "NIXL on a CPU",
    ],
)
def test_a_prefix_is_not_sent_before_it_is_there(
    idle: bool, overlap: bool, on_gpu: bool, backend: str, sent: bool
) -> None:
    pool, early = small_pool(), []
    pool.page_copies = SimpleNamespace(idle=idle, on_gpu=on_gpu)
    scheduler = SimpleNamespace(
        enable_overlap=False,
        enable_staging=False,
        transfer_backend=TransferBackend(backend),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool, page_size=256),
        send_kv_chunk=lambda req, last_chunk, end_idx: early.append(end_idx),
    )
    request = SimpleNamespace(pending_bootstrap=False, prefix_len=512, host_hit_length=0, start_send_idx=0)
    original = unwrap(SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk)

    def with_overlap(scheduler: Any, req: Any, allow_send: bool) -> None:
        original(scheduler, req, allow_send)

    view = SimpleNamespace(**{**vars(scheduler), "enable_overlap": overlap})
    prefill_side.send_prefix_early(lambda _, req, allow_send: with_overlap(scheduler, req, allow_send), view, request)
    assert early == ([512] if sent else [])


def test_a_slot_is_published_after_its_last_forward() -> None:
    waited: list[str] = []
    pool = small_pool()
    scheduler = SimpleNamespace(
        enable_overlap=True,
        forward_stream=SimpleNamespace(synchronize=lambda: waited.append("waited")),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
    )
    queue = SimpleNamespace(scheduler=scheduler)
    decode_side.wait_for_forwards(queue, None, None)
    assert not waited  # a CPU has computed what it was given
    pool.device = "cuda"
    decode_side.wait_for_forwards(queue, None, None)
    assert waited == ["waited"]
    scheduler.enable_overlap = False  # the step's results are on the host
    decode_side.wait_for_forwards(queue, None, None)
    assert waited == ["waited"]


def test_a_forward_packs_the_pages_that_it_wrote() -> None:
    """Without waiting for the forward: a read of the device would end its overlap with the next one's preparation."""
    packed: list[Tensor] = []
    pool = small_pool()
    pool.packed_pages = SimpleNamespace(pack=packed.append)
    rows = torch.arange(3 * 1024).view(3, 1024).as_subclass(OnDevice)
    runner = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=rows))
    mode, slots = SimpleNamespace(is_extend_without_speculative=lambda: True), torch.tensor([2, 1])
    of_slots = {"req_pool_indices": slots.as_subclass(OnDevice), "req_pool_indices_cpu": slots}
    batch = partial(SimpleNamespace, forward_mode=mode, **of_slots)
    with NoWaiting():
        prefill_side.pack_pages(None, runner, batch(extend_prefix_lens_cpu=[300, 0], extend_seq_lens_cpu=[300, 256]))
    (pages,) = packed
    assert pages.tolist() == [8 + 1, 8 + 2, 4]  # tokens [300, 600) of slot 2, [0, 256) of slot 1
    prefill_side.pack_pages(None, runner, batch(extend_prefix_lens_cpu=None, extend_seq_lens_cpu=None))
    assert len(packed) == 1
    pool.packed_pages = None
    prefill_side.pack_pages(None, runner, batch(extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[1]))


@pytest.mark.parametrize(("answered", "pages"), [(1, [4, 5]), (213, [4, 5]), (214, [4, 5, 6]), (600, [4, 5, 6, 7])])
def test_all_pages_that_have_arrived_are_unpacked(answered: int, pages: list[int]) -> None:
    """After a prompt of 300 tokens one token is new. A request that a pause has retracted brings its answer, too."""
    unpacked: list[Tensor] = []
    pool, rows = small_pool(), torch.arange(3 * 1024).view(3, 1024)
    pool.packed_pages = SimpleNamespace(unpack=unpacked.append)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        req_to_token_pool=SimpleNamespace(req_to_token=rows),
    )
    kv = SimpleNamespace(req_pool_idx=1, cache_protected_len=0)
    request = SimpleNamespace(kv=kv, origin_input_ids=[5] * 300, output_ids=[6] * answered)
    decode_side.unpack_pages(None, SimpleNamespace(scheduler=scheduler), SimpleNamespace(req=request))
    assert [found.tolist() for found in unpacked] == [pages]


# ---- pieces over TCP


@pytest.mark.parametrize(("device", "calls"), [("", [2000, 2000, 500]), ("mlx5_0", [4500]), (None, [4500])])
def test_a_transfer_over_tcp_has_pieces(device: str | None, calls: list[int]) -> None:
    """Mooncake refused calls of more than 2048 blocks, and SGLang then took the decode server for dead."""
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine

    sent: list[tuple[Any, ...]] = []
    engine = object.__new__(MooncakeTransferEngine)
    engine.ib_device = device
    engine.engine = SimpleNamespace(batch_transfer_sync_write=lambda *call: sent.append(call) or 0)
    original = unwrap(MooncakeTransferEngine.batch_transfer_sync)
    lists = [list(range(begin, begin + 4500)) for begin in (0, 10_000, 20_000)]
    assert pieces.transfer_in_pieces(original, engine, "peer:1", *lists) == 0
    assert [len(call[1]) for call in sent] == calls and {call[0] for call in sent} == {"peer:1"}
    assert [[number for call in sent for number in call[i]] for i in (1, 2, 3)] == lists
    assert pieces.transfer_in_pieces(original, engine, "peer:1", [], [], []) == 0


def test_a_piece_that_fails_ends_the_transfer() -> None:
    results = iter([0, -1])
    engine, many = SimpleNamespace(ib_device=""), [0] * 5000
    assert pieces.transfer_in_pieces(lambda *call: next(results), engine, "peer:1", many, many, many) == -1
