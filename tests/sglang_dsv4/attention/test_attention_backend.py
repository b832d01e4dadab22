"""Pool, metadata and kernels without a model: a token has the same bits however it is batched.

Regimes: prefill in chunks against one token at a time, mixed batches, verify with rejected drafts, the two halves of
CUDA graphs, padding; both row formats. Results are compared with the formulas in float64 without a cache; every row
that may not be read is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from cache.harness import HEADS, TOP_K, Engine, Sequences, dense_reference, poison_unreadable, snapshot_rows
from selection.marks import with_slow_marks
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_kernels import ops, registry
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.unpack import Pages, ref
from sglang_dsv4.attention import backend as attention_backend
from sglang_dsv4.cache.geometry import PoolGeometry

SMALL = PoolGeometry(ratios=(0, 4, 128), row_dim=16, rope_dim=4, index_dim=8, dtype=torch.float32)
FP8 = PoolGeometry(ratios=(0, 4, 128), row_format=RowFormat.FP8, index_format=RowFormat.INDEX_FP4, dtype=torch.bfloat16)
DRAFTS = 4
LENGTH = 300
DECODE, EXTEND, VERIFY = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY


def speculative(geometry: PoolGeometry) -> PoolGeometry:
    return PoolGeometry(**{**vars(geometry), "draft_tokens": DRAFTS})


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    return Sequences(SMALL, LENGTH)


@pytest.fixture(scope="module")
def stepwise(sequences: Sequences) -> dict[tuple[int, int], Tensor]:
    """Outputs of requests 0 and 1, alone, one token at a time: all other ways must give these bits."""
    outputs = {}
    for request in (0, 1):
        engine = Engine(SMALL, sequences)
        outputs |= engine.forward(EXTEND, [(request, 1)])
        for _ in range(LENGTH - 1):
            poison_unreadable(engine) if engine.length[request] % 37 == 0 else None
            outputs |= engine.forward(DECODE, [(request, 1)])
    return outputs


def assert_same(outputs: dict[tuple[int, int], Tensor], expected: dict[tuple[int, int], Tensor]) -> None:
    for token, value in outputs.items():
        assert torch.equal(value, expected[token]), f"request {token[0]}, position {token[1]}"


def test_against_the_formulas(sequences: Sequences, stepwise: dict[tuple[int, int], Tensor]) -> None:
    """fp32 against float64: sums of up to 130 rows of N(0,1) channels, so 130 * 2**-24 * |row| <= 4e-5; seen 1e-6."""
    reference = dense_reference(sequences, 0, LENGTH)
    for t in range(LENGTH):
        error = (stepwise[0, t].double() - reference[:, t]).abs().amax(dim=(1, 2))
        assert error.max() < 4e-5, f"position {t}: by layer {error.tolist()}"


@pytest.mark.parametrize("chunk", [1, 3, 32, 64, 127, 128, 256, 300])
def test_chunked_prefill_is_bitwise_stepwise(
    sequences: Sequences, stepwise: dict[tuple[int, int], Tensor], chunk: int
) -> None:
    engine, outputs = Engine(SMALL, sequences), {}
    while (done := engine.length.get(0, 0)) < LENGTH:
        outputs |= engine.forward(EXTEND, [(0, min(chunk, LENGTH - done))])
        poison_unreadable(engine)
    assert_same(outputs, stepwise)


@pytest.mark.parametrize("padding", [0, 3], ids=["", "padded"])
def test_mixed_batches_are_bitwise_stepwise(
    sequences: Sequences, stepwise: dict[tuple[int, int], Tensor], padding: int
) -> None:
    """One request prefills while another decodes, with padding; all rows that may not be read are NaN throughout."""
    engine, rng = Engine(SMALL, sequences), random.Random(5)
    assert_same(engine.forward(EXTEND, [(0, 130)], padding=padding), stepwise)
    while engine.length.get(1, 0) < 250:
        if not padding:  # padding reads the null slot and page, which must stay finite
            poison_unreadable(engine)
        n = min(rng.choice([1, 2, 7, 40]), 250 - engine.length.get(1, 0))
        work = [(0, 1), (1, n)] if engine.length[0] < LENGTH else [(1, n)]
        assert_same(engine.forward(ForwardMode.MIXED, work, padding=padding), stepwise)
    while engine.length[0] < LENGTH:
        assert_same(engine.forward(DECODE, [(1, 1), (0, 1)] if engine.length[1] < LENGTH else [(0, 1)]), stepwise)


def test_verify_is_bitwise_stepwise(sequences: Sequences, stepwise: dict[tuple[int, int], Tensor]) -> None:
    """Accepted drafts have the outputs of decode; rejected drafts change nothing."""
    engine, rng = Engine(speculative(SMALL), sequences), random.Random(2)
    engine.forward(EXTEND, [(0, 126), (1, 3)])
    while engine.length[0] < LENGTH - DRAFTS and engine.length[1] < LENGTH - DRAFTS:
        poison_unreadable(engine)
        accept = [rng.randint(1, DRAFTS) for _ in range(2)]
        outputs = engine.forward(VERIFY, [(0, DRAFTS), (1, DRAFTS)], accept=accept)
        assert_same(outputs, stepwise)


@pytest.mark.parametrize("mode", [DECODE, VERIFY, ForwardMode.DRAFT_EXTEND_V2], ids=lambda m: m.name.lower())
def test_graph_halves_equal_eager(
    sequences: Sequences, stepwise: dict[tuple[int, int], Tensor], mode: ForwardMode
) -> None:
    """The out-of-graph and in-graph halves with padding requests, as in a replay; the captured half reads no values."""
    k = 1 if mode is DECODE else DRAFTS
    engine = Engine(speculative(SMALL), sequences)
    engine.backend.init_cuda_graph_state(max_bs=8, max_num_tokens=8 * k)
    engine.forward(EXTEND, [(0, 250), (1, 123)])
    for _ in range(8):
        assert_same(engine.forward(mode, [(0, k), (1, k)], padding=2, graph=True), stepwise)


class NoHostReads(TorchDispatchMode):
    """Fails on operations that a CUDA graph cannot capture: host reads of values, shapes that depend on values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 - torch's signature
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"{name} in the recorded part"
        if name == "index" or name == "index_put_":
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), f"{name} with a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("k", [1, DRAFTS], ids=["decode", "verify"])
def test_recorded_part_reads_nothing_on_the_host(sequences: Sequences, k: int) -> None:
    engine = Engine(speculative(SMALL), sequences)
    engine.backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * k)
    work = [(0, k), (1, k)]
    for request, _ in work:
        engine.reserve(request, 251)
        engine.length[request] = 250
    batch = engine.batch(DECODE if k == 1 else VERIFY, work)
    engine.backend.init_forward_metadata_out_graph(batch)
    with NoHostReads():
        engine.backend.init_forward_metadata_in_graph(batch)
        for layer in SMALL.layers():
            engine.backend.window(layer)
            if SMALL.layer_ratio(layer):
                engine.backend.groups(layer)
                engine.backend.compressor_storage(layer)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoHostReads():
        batch.seq_lens.max().item()


@pytest.mark.parametrize("geometry", [SMALL, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_slot_forgets_its_last_request(geometry: PoolGeometry, length: int) -> None:
    """A prompt of 1-3 tokens in the request slot and pages of a long one equals one in a new pool, decode included."""
    sequences, outputs = Sequences(geometry, 12), []
    for used in (False, True):
        engine = Engine(geometry, sequences, slots=2, pages=3, context=1024)
        if used:
            long = Sequences(geometry, 401, scale=50.0)
            engine.sequences = long
            engine.forward(EXTEND, [(9, 401)])
            engine.release(9)
            engine.sequences = sequences
            poison_unreadable(engine)
        out = engine.forward(EXTEND, [(0, length)])
        while engine.length[0] < 12:
            poison_unreadable(engine) if used else None
            out |= engine.forward(DECODE, [(0, 1)])
        outputs.append(out)
    assert_same(outputs[1], outputs[0])
    assert all(value.isfinite().all() for value in outputs[1].values())


@pytest.mark.parametrize("chunk", with_slow_marks([1, 64], quick=[64]))
def test_fp8_rows_in_any_chunking(chunk: int) -> None:
    """Rows are rounded before they are read, also if a chunk reads them from its own workspace."""
    sequences, outputs = Sequences(FP8, 260), []
    for size in (260, chunk):
        engine, out = Engine(FP8, sequences), {}
        while (done := engine.length.get(0, 0)) < 260:
            if done < 120 or size > 1:
                out |= engine.forward(EXTEND, [(0, min(size, 260 - done))])
            else:
                out |= engine.forward(DECODE, [(0, 1)])
            poison_unreadable(engine)
        outputs.append(out)
    assert_same(outputs[1], outputs[0])


@pytest.fixture
def formats_read(monkeypatch: pytest.MonkeyPatch) -> list[RowFormat]:
    """Formats of the window rows of every attention call; entries must have the same format."""
    formats, original = [], attention_backend.sparse_attention

    def recorded(q: Tensor, window: KVRows, *arguments: object, **options: object) -> Tensor:
        assert options["entries"] is None or options["entries"].format is window.format
        formats.append(window.format)
        return original(q, window, *arguments, **options)

    monkeypatch.setattr(attention_backend, "sparse_attention", recorded)
    return formats


@pytest.mark.parametrize("padding", [0, 3], ids=["", "padded"])
def test_unpacked_rows_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, formats_read: list[RowFormat], padding: int
) -> None:
    """Chunks of requests that begin, continue a prefix, or decode in a mixed batch; unreadable rows are NaN."""
    work = [[(0, 260)], [(1, 130), (0, 1), (2, 5)], [(1, 1), (2, 140), (0, 70)], [(0, 1), (1, 200)]]
    sequences, outputs = Sequences(FP8, 340), []
    for unpacks in (False, True):
        monkeypatch.setattr(attention_backend.unpacking, "pays", lambda *sizes, unpacks=unpacks: unpacks)
        engine, out = Engine(FP8, sequences), {}
        formats_read.clear()
        for batch in work:
            if not padding:  # padding reads the null slot and page, which must stay finite
                poison_unreadable(engine)
            out |= engine.forward(ForwardMode.MIXED, batch, padding=padding)
        assert set(formats_read) == {RowFormat.PLAIN if unpacks else RowFormat.FP8}
        out |= engine.forward(DECODE, [(0, 1), (1, 1)])
        assert formats_read[-1] is RowFormat.FP8
        outputs.append(out)
    assert len(outputs[0]) == sum(n for batch in work for _, n in batch) + 2
    assert outputs[0].keys() == outputs[1].keys()
    assert_same(outputs[1], outputs[0])


def test_whether_unpacking_pays_is_asked_with_the_sizes_of_every_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by hand: 150 tokens after 200, and 3 of another request, on 2 pages and on 1; asked once a forward."""
    asked = []
    monkeypatch.setattr(attention_backend.unpacking, "pays", lambda *sizes: asked.append(sizes) or True)
    engine = Engine(FP8, Sequences(FP8, 350))
    engine.forward(EXTEND, [(0, 200)])
    asked.clear()
    engine.forward(EXTEND, [(0, 150), (1, 3)])
    window_rows, window_keys = 127 + 153, 150 * 128 + 1 + 2 + 3
    csa_keys, hca_keys = 150 * TOP_K, (256 - 200 - 1) * 1 + (350 - 256 + 1) * 2
    swa, csa, hca = asked
    assert swa == (window_rows, window_keys, HEADS)
    assert csa == (window_rows + 3 * 64, window_keys + csa_keys, HEADS)
    assert hca == (window_rows + 3 * 2, window_keys + hca_keys, HEADS)
    unpacked = engine.backend._unpacked_rows
    assert unpacked.shape == (window_rows + 3 * 64, 512) and unpacked.dtype == torch.bfloat16
    engine.forward(DECODE, [(0, 1)] if engine.length[0] < 350 else [(1, 1)])
    assert engine.backend._unpacked_rows is None and len(asked) == 3


def off_by_a_factor(parts: Sequence[Pages], out: Tensor) -> None:
    ref.unpack_pages(parts, out)
    out *= 1.5


@pytest.mark.usefixtures("own_registry")
def test_the_reference_unpacks_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's rows SGLANG_DSV4_COMPARE_ATTENTION would compare two attentions over the same wrong rows."""
    outputs, sequences = [], Sequences(FP8, 20)
    loader = f"{__name__}:{off_by_a_factor.__name__}"
    registry.register("unpack_pages", "off", loader, ops.any_device, 100)
    for unpacks, attention in ((False, None), (True, None), (True, "ref")):
        monkeypatch.setattr(attention_backend.unpacking, "pays", lambda *sizes, unpacks=unpacks: unpacks)
        engine = Engine(FP8, sequences)
        engine.backend.attention_impl = attention
        outputs.append(engine.forward(EXTEND, [(0, 20)]))
    as_stored, wrong, by_reference = outputs
    assert not any(torch.equal(value, wrong[token]) for token, value in as_stored.items())
    assert_same(by_reference, as_stored)


def test_a_large_chunk_unpacks_and_a_small_one_does_not(
    monkeypatch: pytest.MonkeyPatch, formats_read: list[RowFormat]
) -> None:
    """The real rule decides, without its limit on heads: this model has few heads, whose kernel reads FP8 rows."""
    monkeypatch.setattr(attention_backend.unpacking, "FEW_HEADS", 0)
    engine = Engine(FP8, Sequences(FP8, 708))
    engine.forward(EXTEND, [(0, 700)])
    assert formats_read == [RowFormat.PLAIN] * 3
    engine.forward(EXTEND, [(0, 8)])
    assert formats_read[3:] == [RowFormat.FP8] * 3


def test_a_kernel_that_unpacking_does_not_help_reads_rows_as_they_are(
    monkeypatch: pytest.MonkeyPatch, formats_read: list[RowFormat]
) -> None:
    asked = []
    monkeypatch.setattr(attention_backend.unpacking, "helps", lambda kernel: asked.append(kernel))
    Engine(FP8, Sequences(FP8, 700)).forward(EXTEND, [(0, 700)])
    assert formats_read == [RowFormat.FP8] * 3 and asked == ["ref"]


def test_idle_forward(sequences: Sequences) -> None:
    engine = Engine(SMALL, sequences)
    engine.forward(EXTEND, [(0, 130)])
    before = [(name, layer, storage.clone()) for name, layer, storage in engine.pool.tensors()]
    assert engine.forward(ForwardMode.IDLE, []) == {}
    assert all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(before, engine.pool.tensors(), strict=True))


def test_rows_that_pad_a_group_without_requests_touch_no_requests_rows(
    sequences: Sequences, stepwise: dict[tuple[int, int], Tensor]
) -> None:
    """Attention data parallelism gives an idle group rows of other groups' number; they are the null slot's."""
    engine = Engine(SMALL, sequences)
    engine.forward(EXTEND, [(0, 130)])
    for padding in (1, 3):
        assert engine.forward(ForwardMode.IDLE, [], padding=padding) == {}
        metadata = engine.backend.metadata
        assert metadata.num_tokens == padding and (metadata.ring_rows < SMALL.ring_rows).all()
    assert_same(engine.forward(ForwardMode.DECODE, [(0, 1)]), stepwise)


def test_a_prefix_without_its_tail_is_refused(sequences: Sequences) -> None:
    """A prefix hit whose rows are not in the rings must raise, not read another request's rows."""
    engine = Engine(SMALL, sequences)
    engine.forward(EXTEND, [(0, 256)])
    engine.release(0)
    engine.reserve(1, 256)
    engine.length[1] = 256  # as if 256 tokens had been found in the radix tree
    with pytest.raises(RuntimeError, match="continues a prefix of 256 tokens, but its window rows are not there"):
        engine.forward(EXTEND, [(1, 4)])


def test_unsupported_forward_modes_are_named(sequences: Sequences) -> None:
    engine = Engine(SMALL, sequences)
    batch = engine.batch(EXTEND, [(0, 4)])
    for mode in (ForwardMode.SPLIT_PREFILL, ForwardMode.DLLM_EXTEND, ForwardMode.PREBUILT):
        batch.forward_mode = mode
        with pytest.raises(NotImplementedError, match=mode.name):
            engine.backend.init_forward_metadata(batch)


@pytest.mark.parametrize("drafts", [0, DRAFTS], ids=["", "speculative"])
@pytest.mark.parametrize("geometry", [SMALL, FP8], ids=["plain", "fp8"])
def test_tail_at_a_page_boundary_is_a_plain_copy(geometry: PoolGeometry, drafts: int) -> None:
    """Rows copied from the rings at position 256 restore a request in another request slot, which continues bitwise.

    A tail keeps the same rows: W window rows a layer and, for CSA, 4 raw rows of either compressor.
    """
    geometry = PoolGeometry(**{**vars(geometry), "draft_tokens": drafts})
    sequences, g = Sequences(geometry, 270), geometry
    engine = Engine(geometry, sequences)
    engine.forward(EXTEND, [(0, 200)])
    engine.forward(EXTEND, [(0, 56)])
    at, saved = snapshot_rows(engine, 0, 256), {}
    for layer in g.layers():
        ring = engine.pool.window(layer)
        tail = KVRows.allocate(
            g.window_tokens, ring.format, ring.row_dim, ring.rope_dim, ring.storage.dtype, "cpu", fill=torch.nan
        )
        tail.copy_rows(torch.arange(g.window_tokens), ring, at["window"].start + torch.arange(g.window_tokens))
        saved[layer] = [tail]
        if g.layer_ratio(layer) == 4:
            states = (engine.pool.compressor_state(layer), engine.pool.indexer_state(layer))
            saved[layer] += [state[at["state"]].clone() for state in states]
    expected = engine.forward(EXTEND, [(0, 14)])
    table = engine.req_to_token[engine.slot[0]].clone()
    pages, engine.pages[0] = engine.pages[0][:1], engine.pages[0][1:]
    engine.free_slots.insert(0, engine.slot.pop(0))  # so that it is not the next one to be allocated
    engine.free_pages.extend(engine.pages.pop(0))
    del engine.length[0]

    engine.reserve(0, 0)
    engine.pages[0], engine.length[0] = pages, 256
    engine.req_to_token[engine.slot[0], :256] = table[:256]
    engine.pool.ring_generation[engine.slot[0]] = engine.generation[engine.slot[0]]
    poison_unreadable(engine)
    at = snapshot_rows(engine, 0, 256)
    for layer in g.layers():  # rows that poison_unreadable keeps for this request slot are not restored yet, either
        tail, *states = saved[layer]
        rows = torch.arange(g.window_tokens)
        engine.pool.window(layer).copy_rows(at["window"].start + rows, tail, rows)
        for state, rows in zip((engine.pool.compressor_state, engine.pool.indexer_state), states, strict=False):
            state(layer)[at["state"]] = rows
    assert_same(engine.forward(EXTEND, [(0, 14)]), expected)
