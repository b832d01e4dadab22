"""The chain of steps of an MTP draft; and configurations that the prefix cache refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cache.harness import Engine, Sequences
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import eagle_worker_common
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_dsv4.attention import draft_chain
from sglang_dsv4.attention.backend import Dsv4AttentionBackend
from sglang_dsv4.attention.draft_chain import create_draft_decode_backend, create_draft_extend_backend
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.prefix.prefix_cache import create_prefix_cache
from sglang_dsv4.prefix.restore_and_save import HostBatch

DRAFT = PoolGeometry(ratios=(0,), row_dim=16, rope_dim=4, index_dim=8, draft_tokens=4, dtype=torch.float32)
STEPS = 4


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_draft_steps_equal_decode(graph: bool) -> None:
    """Step i writes and reads the rows of a decode step at position committed + i."""
    sequences = Sequences(DRAFT, 320)
    decode, draft = Engine(DRAFT, sequences), Engine(DRAFT, sequences)
    for engine in (decode, draft):
        engine.forward(ForwardMode.EXTEND, [(0, 255), (1, 2)])
    factory = SimpleNamespace(topk=1, draft_model_runner=draft.runner, speculative_num_steps=STEPS)
    with get_parallel().override(attn_tp_size=1):
        name, chain = create_draft_decode_backend(factory)
    assert name == "dsv4"
    assert len(chain.attn_backends) == STEPS

    batch = draft.batch(ForwardMode.DECODE, [(0, STEPS), (1, STEPS)])
    batch.seq_lens = torch.tensor([draft.length[0], draft.length[1]])
    batch.batch_size = 2
    if graph:
        chain.init_cuda_graph_state(max_bs=2, max_num_tokens=2)
        chain.init_forward_metadata_out_graph(batch)
        chain.init_forward_metadata_in_graph(batch)
        chain.on_after_cuda_graph_warmup()
    else:
        chain.init_forward_metadata(batch)
    for i, backend in enumerate(chain.attn_backends[:-1]):  # the last step only samples
        draft.backend = backend
        tokens = [(r, draft.length[r] + i) for r in (0, 1)]
        expected = decode.forward(ForwardMode.DECODE, [(0, 1), (1, 1)])
        for row, token in zip(draft.layer(0, tokens), tokens, strict=True):
            assert torch.equal(row, expected[token][0])


def test_draft_trees_are_refused() -> None:
    with pytest.raises(ValueError, match="--speculative-eagle-topk must be 1, not 4"):
        create_draft_decode_backend(SimpleNamespace(topk=4))


def test_draft_extend_runs_on_the_draft_runner() -> None:
    engine = Engine(DRAFT, Sequences(DRAFT, 8))
    with get_parallel().override(attn_tp_size=1):
        name, backend = create_draft_extend_backend(SimpleNamespace(draft_model_runner=engine.runner))
    assert name == "dsv4"
    assert backend.token_to_kv_pool is engine.pool


def test_a_chain_of_drafts_needs_no_mask_over_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would write a mask of batch x context elements in each step whose lengths the host does not know."""
    engine, built = Engine(DRAFT, Sequences(DRAFT, 8)), []
    monkeypatch.setattr(
        eagle_worker_common, "build_tree_kernel_efficient", lambda *args, **options: built.append(args) or [None] * 6
    )
    worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=engine.backend))
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, seq_lens=torch.tensor([5, 9]), seq_lens_sum=None)
    options = {"target_worker": worker, "topk": 1, "num_steps": STEPS - 1, "num_draft_tokens": STEPS, "device": "cpu"}
    for graphs in (False, True):
        if graphs:
            engine.backend.init_cuda_graph_state(max_bs=3, max_num_tokens=3 * STEPS)
        eagle_worker_common.build_eagle_verify_input(
            batch,
            SimpleNamespace(bonus_tokens=torch.tensor([1, 2])),
            *(None, None, torch.zeros(2, STEPS - 1, dtype=torch.int64), None),
            tree_mask_mode=TreeMaskMode.FULL_MASK,
            **options,
        )
    (*_, lengths, _, _, _, mode, buffer), (*_, in_graph) = (call[:11] for call in built)
    assert (lengths, mode, buffer) == (0, TreeMaskMode.QLEN_ONLY, None)
    assert in_graph.shape == (3 * STEPS * STEPS,)


@pytest.mark.parametrize("is_draft", [False, True], ids=["target", "draft"])
def test_a_prefix_without_window_rows(is_draft: bool) -> None:
    """Neither target nor draft may continue such a prefix: it would read another request's rows."""
    engine = Engine(DRAFT, Sequences(DRAFT, 320))
    engine.forward(ForwardMode.EXTEND, [(0, 300), (1, 300)])
    engine.pool.is_draft = is_draft
    slot = engine.slot[0]
    engine.generation[slot] += 1
    with pytest.raises(RuntimeError, match="a prefix must come with its tail"):
        engine.backend.tails.before_forward(HostBatch([slot], [256], [4], is_prefill=True))


def test_padding_requests_of_a_dspark_step_have_no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group verifies one request, padded to another group's two: SGLang pads request slots and lengths, but not the
    committed lengths that it keeps beside DSpark's. It ended a server with host memory, which knows them."""
    engine = Engine(DRAFT, Sequences(DRAFT, 320))
    engine.forward(ForwardMode.EXTEND, [(0, 255)])
    batch = engine.batch(ForwardMode.TARGET_VERIFY, [(0, 4)])
    batch.spec_info.live_seq_lens_cpu = torch.tensor([255])
    batch.req_pool_indices_cpu = torch.tensor([engine.slot[0], 0])
    batch.seq_lens_cpu = torch.tensor([259, 1])
    found: list[HostBatch] = []
    tails = SimpleNamespace(keeps_nothing=False, before_forward=found.append)
    monkeypatch.setattr(engine.backend, "tails", tails)
    engine.backend.init_forward_metadata(batch)
    assert [(one.slots, one.begins, one.counts) for one in found] == [([engine.slot[0]], [255], [4])]


def test_another_pool_is_refused() -> None:
    """SGLang continues if a plugin's hook fails; our backend must not, with SGLang's pool."""
    with pytest.raises(TypeError, match=r"needs sglang-dsv4's KV pool, found .*SimpleNamespace: is the"):
        Dsv4AttentionBackend(SimpleNamespace(token_to_kv_pool=SimpleNamespace()))


def test_whole_prefixes_need_tails() -> None:
    """SGLang's metrics would end a server that has the flag and no host pool."""
    pool = SimpleNamespace(ledger=None, tail_memory=None)
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    params = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    with pytest.raises(ValueError, match="unset SGLANG_DSV4_TAIL_SLOTS, which is 0"):
        create_prefix_cache(SimpleNamespace(enable_hierarchical_cache=True, disable_radix_cache=False, params=params))


def test_a_step_that_is_padded_after_it_was_planned_is_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang plans all eager steps of a draft first; attention data parallelism pads the batch before each."""
    engine = Engine(DRAFT, Sequences(DRAFT, 320))
    engine.forward(ForwardMode.EXTEND, [(0, 255), (1, 2)])
    batch = engine.batch(ForwardMode.DECODE, [(0, 1), (1, 1)])
    engine.backend.init_forward_metadata(batch)
    batch.forward_metadata_ready, batch.forward_metadata_planned_num_tokens = True, 2
    batch.input_ids = torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr(draft_chain, "get_attn_backend", lambda: engine.backend)
    planned = engine.backend.metadata
    draft_chain.plan_padded_batch(None, batch, engine.runner)
    assert engine.backend.metadata is planned, "nothing was padded"
    padded = SimpleNamespace(**vars(batch))
    for field, value in (
        ("req_pool_indices", 0),
        ("seq_lens", 1),
        ("seq_lens_cpu", 1),
        ("positions", 0),
        ("input_ids", 0),
    ):
        setattr(padded, field, torch.cat([getattr(batch, field), torch.full((2,), value)]))
    padded.batch_size = 4
    draft_chain.plan_padded_batch(None, padded, engine.runner)
    made = engine.backend.metadata
    assert made.num_tokens == 4 and torch.equal(made.ring_rows[:2], planned.ring_rows)
    assert (made.ring_rows[2:] < DRAFT.ring_rows).all(), "rows of the null slot"
    padded.forward_metadata_ready = False
    monkeypatch.setattr(engine.backend, "init_forward_metadata", None)
    draft_chain.plan_padded_batch(None, padded, engine.runner)  # SGLang plans it itself


def test_a_step_without_requests_has_no_metadata_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of a group end in the same step; then the group's draft steps have one row that pads."""
    engine = Engine(DRAFT, Sequences(DRAFT, 320))
    engine.forward(ForwardMode.EXTEND, [(0, 255), (1, 2)])
    engine.backend.init_forward_metadata(engine.batch(ForwardMode.DECODE, [(0, 1), (1, 1)]))
    nothing, one = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(draft_chain, "get_attn_backend", lambda: engine.backend)
    monkeypatch.setattr(draft_chain, "has_forward_context", lambda: True)
    for rows in (nothing, one):
        idle = SimpleNamespace(
            forward_mode=ForwardMode.IDLE,
            input_ids=rows,
            positions=rows,
            forward_metadata_ready=False,
            forward_metadata_planned_num_tokens=None,
        )
        draft_chain.plan_padded_batch(None, idle, engine.runner)
        assert engine.backend.metadata.num_tokens == (2 if rows is nothing else 1), "without rows no attention runs"
    assert (engine.backend.metadata.ring_rows < DRAFT.ring_rows).all(), "rows of the null slot"
