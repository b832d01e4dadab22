"""A request reads only rows that it has written itself (specification, section 3.6).

All other rows of the pools are set to NaN; a single wrong read makes the logits NaN.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from model.compare import assert_equal_logits
from model.harness import Harness, Mode, Request
from model.oracle import REAL_ROWS, OracleRun
from model.served import Served
from selection.marks import with_slow_marks
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_radix_cache.ring import ring_row
from sglang_dsv4.attention import backend
from sglang_dsv4.attention.metadata import ForwardMetadata
from sglang_dsv4.layers.logits import NOT_FINITE

DRAFTS = 4


@pytest.fixture(scope="module", params=["flash-like", pytest.param("pro-like", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, serve: Callable[..., Served]) -> Served:
    return serve(request.param)


@pytest.fixture(scope="module", params=["flash-like", pytest.param("pro-like", marks=pytest.mark.slow)])
def speculative(request: pytest.FixtureRequest, serve: Callable[..., Served]) -> Served:
    """A model with rings that have room for drafts, as with --speculative-algorithm EAGLE."""
    return serve(
        request.param,
        server_args=dict(
            speculative_algorithm="EAGLE",
            speculative_num_steps=DRAFTS - 1,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=DRAFTS,
        ),
    )


def poison(harness: Harness, keep: dict[str, Tensor]) -> None:
    """Set every row of every pool to NaN, except the null slot's and null page's, and the rows in `keep`.

    `keep` is {pool name: row numbers}, for all layers of that pool.
    """
    pool = harness.pool
    geometry = pool.geometry
    for name, layer, storage in pool.tensors():
        if name.startswith("tail "):
            storage.view(torch.uint8).fill_(0xFF)  # NaN in every format; no request here continues from a tail
            continue
        ratio = geometry.layer_ratio(layer)
        if name == "window rings":
            sink = geometry.ring_rows
        elif name.endswith("state"):
            sink = geometry.state_rows(ratio)
        else:
            sink = 256 // ratio
        rows = torch.cat([torch.arange(sink), keep.get(name, torch.arange(0))])
        if name.endswith("state"):
            kept = storage[rows].clone()
            storage.fill_(math.nan)
            storage[rows] = kept
        else:
            table = pool.window(layer) if name == "window rings" else None
            table = table or (pool.index_keys(layer) if name == "indexer keys" else pool.entries(layer))
            kept = KVRows.allocate(len(rows), table.format, table.row_dim, table.rope_dim, table.storage.dtype, "cpu")
            kept.copy_rows(torch.arange(len(rows)), table, rows)
            storage.fill_(math.nan if table.format is RowFormat.PLAIN else 0xFF)
            table.copy_rows(rows, kept, torch.arange(len(rows)))


def minimal_state(harness: Harness, requests: Sequence[Request]) -> dict[str, Tensor]:
    """The rows that section 3.6 lists, for all `requests`."""
    geometry, table = harness.pool.geometry, harness.runner.req_to_token_pool.req_to_token
    keep = {}

    def add(name: str, rows: Tensor) -> None:
        keep[name] = torch.cat([keep.get(name, torch.arange(0)), rows])

    for request in requests:
        n = request.num_tokens
        last = torch.arange(max(0, n - 127), n)
        add("window rings", ring_row(request.row, last, geometry.ring_rows))
        for ratio, kind in ((4, "CSA"), (128, "HCA")):
            starts = torch.arange(n // ratio) * ratio
            slots = table[request.row, starts].long() // ratio
            add(f"{kind} entries", slots)
            first = max(0, n // ratio * ratio - (4 if ratio == 4 else 0))
            raw = ring_row(request.row, torch.arange(first, n), geometry.state_rows(ratio))
            add(f"{kind} compressor state", raw)
            if ratio == 4:
                add("indexer keys", slots)
                add("indexer compressor state", raw)
    return keep


def poison_second_halves(harness: Harness, requests: Sequence[Request]) -> None:
    """CSA needs only the first half of the channels of the group before the open one."""
    pool = harness.pool
    rows = pool.geometry.state_rows(4)
    for request in requests:
        n = request.num_tokens // 4 * 4
        before = ring_row(request.row, torch.arange(max(0, n - 4), n), rows)
        for name, _, storage in pool.tensors():
            if name in ("CSA compressor state", "indexer compressor state"):
                storage[before, :, storage.shape[-1] // 2 :] = math.nan


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8, 126, 127, 128, 129, 131, 255, 256, 257, 300])
@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_minimal_state_is_enough(served: Served, length: int, mode: Mode) -> None:
    harness, tokens = served.harness, served.corpus[1]
    request = harness.open()
    logits = harness.step([(request, tokens[:length].tolist())])
    for start in range(length, length + 9, 9 if mode == "extend" else 1):
        poison(harness, minimal_state(harness, [request]))
        poison_second_halves(harness, [request])
        count = 9 if mode == "extend" else 1
        logits += harness.step([(request, tokens[start : start + count].tolist())], mode)
    harness.close(request)
    assert_equal_logits(torch.cat(logits), served.expected[1], f"{length} tokens, then {mode}")


@pytest.mark.parametrize("length", [3, 129, 257])
@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_minimal_state_of_byte_rows(serve: Callable[..., Served], length: int, mode: Mode) -> None:
    """With 584-byte rows and FP4 keys the bits do not change if all other bytes are 0xFF (NaN in every format)."""
    served = serve("flash-like", dtype="bfloat16", qat="full", server_args=dict(kv_cache_dtype="fp8_e4m3"), **REAL_ROWS)
    harness, tokens = served.harness, served.corpus[1][: length + 8]
    expected = harness.run(tokens)
    request = harness.open()
    logits = harness.step([(request, tokens[:length].tolist())])
    count = 8 if mode == "extend" else 1
    for start in range(length, length + 8, count):
        poison(harness, minimal_state(harness, [request]))
        logits += harness.step([(request, tokens[start : start + count].tolist())], mode)
    harness.close(request)
    assert torch.isfinite(expected).all() and torch.equal(torch.cat(logits), expected)


@pytest.mark.parametrize(
    "pool, lost",
    [
        ("window rings", 200 - 127),
        ("window rings", 199),
        ("CSA entries", 3),
        ("CSA compressor state", 196),
        ("CSA compressor state", 200),
        ("indexer keys", 0),
        ("indexer compressor state", 197),
        ("HCA entries", 0),
        ("HCA compressor state", 128),
        ("HCA compressor state", 200),
    ],
)
def test_one_row_less_is_too_little(served: Served, pool: str, lost: int) -> None:
    """The NaNs show in the logits: they are wrong if any row of the minimal state is lost.

    `lost` is the position of a raw row or window row, or the number of an entry, of a request of 201 tokens; the 60
    tokens that follow close an HCA group, and their indexer scores every key.
    """
    harness, tokens = served.harness, served.corpus[1]
    request = harness.open()
    harness.step([(request, tokens[:201].tolist())])
    keep, geometry = minimal_state(harness, [request]), harness.pool.geometry
    slots = harness.runner.req_to_token_pool.req_to_token[request.row]
    if pool == "window rings":
        row = ring_row(request.row, lost + 1, geometry.ring_rows)
    elif pool.endswith("state"):
        rows = geometry.state_rows(128 if pool.startswith("HCA") else 4)
        row = ring_row(request.row, lost, rows)
    else:
        ratio = 128 if pool.startswith("HCA") else 4
        row = int(slots[lost * ratio]) // ratio
    assert (keep[pool] == row).sum() == 1
    keep[pool] = keep[pool][keep[pool] != row]
    poison(harness, keep)
    (logits,) = harness.step([(request, tokens[201:261].tolist())])
    harness.close(request)
    expected = served.expected[1]
    with pytest.raises(AssertionError, match="differ by more than"):
        assert_equal_logits(logits, OracleRun(expected.logits[201:261], expected.margins[201:261]))
    # A NaN key makes the indexer select a wrong entry, whose row is finite, as the logits then are.
    assert (logits == NOT_FINITE).any() == (not pool.startswith("indexer"))


@pytest.mark.parametrize("length", with_slow_marks([1, 2, 3, 4, 5, 130], quick=[1, 4, 130]))
@pytest.mark.parametrize("leftovers", ["old rows", "NaN"])
def test_slot_reuse_after_a_longer_request(served: Served, length: int, leftovers: str) -> None:
    """The next request gets the same request slot and pages; its first tokens must not read their old rows."""
    harness = served.harness
    long = harness.open()
    harness.step([(long, served.corpus[1][:500].tolist())])
    slot = long.row
    harness.close(long)
    if leftovers == "NaN":
        poison(harness, {})
    request = harness.open()
    assert request.row == slot, "this test is about a slot that was used before"
    tokens = served.corpus[2]
    logits = harness.step([(request, tokens[:length].tolist())])
    for position in range(length, length + 12):
        logits += harness.step([(request, [int(tokens[position])])], "decode")
    harness.close(request)
    assert_equal_logits(torch.cat(logits), served.expected[2], f"{length} tokens in a used slot")


@pytest.mark.parametrize(
    "cuts", [(1, 2, 3, 5, 8), (126, 127, 130, 131), (3, 250, 255, 258, 261), (5, 133, 134)], ids=str
)
def test_chunk_edges_inside_groups(served: Served, cuts: tuple[int, ...]) -> None:
    harness, tokens = served.harness, served.corpus[4]
    request, logits = harness.open(), []
    for start, end in zip((0, *cuts), (*cuts, cuts[-1] + 20), strict=True):
        logits += harness.step([(request, tokens[start:end].tolist())])
        poison(harness, minimal_state(harness, [request]))
    harness.close(request)
    assert_equal_logits(torch.cat(logits), served.expected[4], f"cuts at {cuts}")


def test_requests_do_not_see_each_other(served: Served) -> None:
    """Three requests with interleaved pages; after each step all rows except their minimal states are NaN."""
    harness = served.harness
    requests = [harness.open() for _ in range(3)]
    logits = [[], [], []]
    ends = [(130, 131, 200), (1, 5, 9), (255, 257, 270)]
    starts = [0, 0, 0]
    for step in range(3):
        parts = [
            (request, served.corpus[i + 1][starts[i] : ends[i][step]].tolist()) for i, request in enumerate(requests)
        ]
        for i, part in enumerate(harness.step(parts)):
            logits[i].append(part)
            starts[i] = ends[i][step]
        poison(harness, minimal_state(harness, requests))
    for i, request in enumerate(requests):
        harness.close(request)
        assert_equal_logits(torch.cat(logits[i]), served.expected[i + 1], f"request {i}")


def wrong_drafts(tokens: Tensor, start: int, accepted: int) -> list[int]:
    """DRAFTS tokens, of which the first `accepted` continue the sequence."""
    drafts = tokens[start : start + DRAFTS].clone()
    drafts[accepted:] = (drafts[accepted:] + 17) % 100 + 2
    return drafts.tolist()


def check_rejections(speculative: Served, prompt: int, accepted: int, steps: int = 5) -> None:
    """Verify steps that accept `accepted` of DRAFTS tokens, and decode steps, compared with a run without drafts."""
    harness, tokens = speculative.harness, speculative.corpus[2]
    request = harness.open()
    logits = harness.step([(request, tokens[:prompt].tolist())])
    start = prompt
    for _ in range(steps):
        verified = harness.step([(request, wrong_drafts(tokens, start, accepted))], "verify")[0]
        harness.rollback(request, start + accepted)
        request.tokens[start:] = tokens[start : start + accepted].tolist()
        logits.append(verified[:accepted])
        start += accepted
    logits += harness.step([(request, tokens[start : start + 6].tolist())])
    harness.close(request)
    assert_equal_logits(torch.cat(logits), speculative.expected[2], f"prompt {prompt}, {accepted} of {DRAFTS} accepted")


@pytest.mark.parametrize(
    "prompt",
    with_slow_marks([1, 2, 3, 4, 6, 7, 124, 125, 126, 127, 128, 253, 254, 255], quick=[1, 7, 127, 254]),
)
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_rejected_drafts_leave_no_trace(speculative: Served, prompt: int, accepted: int) -> None:
    """Rejected drafts had closed CSA and HCA groups and wrapped the rings; later tokens must not be affected."""
    check_rejections(speculative, prompt, accepted)


def of_verify_steps(patch: pytest.MonkeyPatch, change: Callable[[ForwardMetadata], ForwardMetadata]) -> None:
    original = backend.uniform_metadata
    patch.setattr(backend, "uniform_metadata", lambda *arguments: change(original(*arguments)))


def window_ring_of_128(patch: pytest.MonkeyPatch) -> None:
    """Drafts overwrite rows that are still in the window when the drafts are rejected."""

    def small(rows: Tensor) -> Tensor:
        return torch.where(rows < 0, rows, rows // 256 * 256 + rows % 128)

    def change(found: ForwardMetadata) -> ForwardMetadata:
        return replace(found, window_rows=small(found.window_rows), ring_rows=small(found.ring_rows))

    of_verify_steps(patch, change)


def compressor_state_of_8(patch: pytest.MonkeyPatch) -> None:
    """Drafts overwrite raw rows of the open group, or of the group before it."""

    def change(found: ForwardMetadata) -> ForwardMetadata:
        groups = found.compress[4]
        rows = groups.sources
        in_state = (rows >= 0) & (rows < rows.max().clamp(min=0) - DRAFTS)
        sources = torch.where(in_state, rows // 16 * 16 + rows % 8, rows)
        state_rows = groups.state_rows // 16 * 16 + groups.state_rows % 8
        return replace(found, compress=found.compress | {4: replace(groups, sources=sources, state_rows=state_rows)})

    of_verify_steps(patch, change)


def closed_groups_stay(patch: pytest.MonkeyPatch) -> None:
    """A group that a rejected draft has closed is not computed again."""
    written: set[tuple[int, int]] = set()

    def change(found: ForwardMetadata) -> ForwardMetadata:
        compress = {}
        for ratio, groups in found.compress.items():
            slots = groups.slots.clone()
            for i, slot in enumerate(groups.slots.tolist()):
                if (ratio, slot) in written:
                    slots[i] = 0
                elif slot:
                    written.add((ratio, slot))
            compress[ratio] = replace(groups, slots=slots)
        return replace(found, compress=compress)

    of_verify_steps(patch, change)


def every_row_sees_the_last_group(patch: pytest.MonkeyPatch) -> None:
    """A row reads an entry of later tokens."""

    def change(found: ForwardMetadata) -> ForwardMetadata:
        visible = {r: v.view(-1, DRAFTS).amax(1).repeat_interleave(DRAFTS) for r, v in found.visible.items()}
        return replace(found, visible=visible)

    of_verify_steps(patch, change)


@pytest.mark.parametrize(
    ("mistake", "prompt", "accepted"),
    [
        (window_ring_of_128, 253, 1),
        (compressor_state_of_8, 125, 1),
        (closed_groups_stay, 124, 2),
        (every_row_sees_the_last_group, 125, 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_mistake_about_rejected_drafts_is_noticed(
    speculative: Served, mistake: Callable[[pytest.MonkeyPatch], None], prompt: int, accepted: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        with pytest.raises(AssertionError, match=f"prompt {prompt}"):
            check_rejections(speculative, prompt, accepted)
    check_rejections(speculative, prompt, accepted)


def test_rings_have_room_for_drafts(served: Served, speculative: Served) -> None:
    plain, drafting = served.harness.pool.geometry, speculative.harness.pool.geometry
    assert (plain.ring_rows, plain.state_rows(4), plain.state_rows(128)) == (128, 8, 128)
    assert (drafting.ring_rows, drafting.state_rows(4), drafting.state_rows(128)) == (256, 16, 256)


def test_verify_gives_the_bits_of_decode(speculative: Served) -> None:
    harness, tokens = speculative.harness, speculative.corpus[3]
    expected = harness.run(tokens[:140], decode_from=120)
    request = harness.open()
    logits = harness.step([(request, tokens[:120].tolist())])
    for start in range(120, 140, DRAFTS):
        logits += harness.step([(request, tokens[start : start + DRAFTS].tolist())], "verify")
    harness.close(request)
    assert torch.equal(torch.cat(logits), expected)


def test_verify_of_several_requests(speculative: Served) -> None:
    """Requests with different histories accept different numbers of drafts in the same steps."""
    harness = speculative.harness
    prompts, accepts = [5, 126, 254], [1, 3, 4]
    requests, logits = [harness.open() for _ in prompts], [[] for _ in prompts]
    parts = [(r, speculative.corpus[i][:n].tolist()) for i, (r, n) in enumerate(zip(requests, prompts, strict=True))]
    for i, part in enumerate(harness.step(parts)):
        logits[i].append(part)
    starts = list(prompts)
    for _ in range(4):
        parts = [(r, wrong_drafts(speculative.corpus[i], starts[i], accepts[i])) for i, r in enumerate(requests)]
        for i, part in enumerate(harness.step(parts, "verify")):
            logits[i].append(part[: accepts[i]])
            starts[i] += accepts[i]
            harness.rollback(requests[i], starts[i])
    for i, request in enumerate(requests):
        harness.close(request)
        assert_equal_logits(torch.cat(logits[i]), speculative.expected[i], f"request {i}")
