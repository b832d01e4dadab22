"""Sublayers with the release's fake-quantisers on, compared with an independent reference that quantises (reference.py)
and gets the same input.

Logits of the whole model are not compared: on random weights the quantisers turn a 1e-6 perturbation into 0.1
(specification, section 11.1). The reference gets the indexer's and the router's choices, which are compared separately.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from model.compare import relative_error
from model.harness import Request
from model.oracle import QUANTISABLE, REAL_ROWS
from model.recording import Recording, recording
from model.reference import FULL, Quant, Reference, Trace, fp4_codes, fp8_codes
from model.served import Served
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows
from dsv4_radix_cache.ring import ring_row

PROMPT, CHUNK, DECODE_FROM = 300, 64, 290
LAYERS = range(6)
EXACT = 1e-5
ByteRows = tuple[Served, Request, Recording]


def assert_exact_but_for_flips(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal up to fp32 rounding, except where that moves a value over a quantiser's threshold (one step of one of
    >= 64 channels, in a few tokens of a hundred)."""
    error = relative_error(actual, expected)
    summary = (
        f"{what}: median {error.median():.1e}, max {error.max():.1e}, {(error > EXACT).sum()} of {len(error)} flips"
    )
    assert error.median() < 2e-6 and (error > EXACT).float().mean() <= 0.03 and error.max() < 3e-2, summary


@dataclasses.dataclass(frozen=True)
class Run:
    served: Served
    tokens: Tensor
    record: Recording

    def ratio(self, layer: int) -> int:
        return self.served.config["compress_ratios"][layer]

    def selected(self, layer: int) -> Tensor | None:
        """Entries that our indexer selected, [T, num_entries] bool; None for a layer without one."""
        return self.record("selected", layer)[:, : PROMPT // 4] if self.ratio(layer) == 4 else None

    def attention(self, reference: Reference, layer: int, selected: Tensor | None = None) -> dict[str, Tensor]:
        """The reference's internal tensors, and its output as "out", for our input, in its own dtype."""
        trace = Trace()
        x = self.record("attn.in", layer).to(reference.dtype)
        output = reference.attention(x, f"layers.{layer}.", self.ratio(layer), trace, selected)
        return trace.values | {"out": output}

    def moe(self, reference: Reference, layer: int) -> Tensor:
        x = self.record("ffn.in", layer).to(reference.dtype)
        return reference.moe(x, f"layers.{layer}.", self.tokens, experts=self.record("experts", layer))


def record_run(served: Served) -> Run:
    tokens = served.corpus[3][:PROMPT]
    with recording(served.harness) as record:
        served.harness.run(tokens, CHUNK, DECODE_FROM)
    return Run(served, tokens, record)


@pytest.fixture(scope="module", params=[pytest.param("kv", marks=pytest.mark.slow), "full"])
def fp32_run(request: pytest.FixtureRequest, serve: Callable[..., Served]) -> Run:
    return record_run(serve("flash-like", qat=request.param, **QUANTISABLE))


@pytest.fixture(scope="module")
def bf16_run(serve: Callable[..., Served]) -> Run:
    return record_run(serve("flash-like", dtype="bfloat16", qat="full", **QUANTISABLE))


@pytest.mark.parametrize("layer", LAYERS)
def test_attention(fp32_run: Run, layer: int) -> None:
    expected = fp32_run.attention(fp32_run.served.reference, layer, fp32_run.selected(layer))
    for name in ("q", "kv", "entries", "attended"):
        if name in expected:
            assert_exact_but_for_flips(fp32_run.record(name, layer), expected[name], f"layer {layer} {name}")
    assert_exact_but_for_flips(fp32_run.record("attn.out", layer), expected["out"], f"layer {layer} output")


@pytest.mark.parametrize("layer", [i for i in LAYERS if i in (2, 4)])
def test_indexer(fp32_run: Run, layer: int) -> None:
    """Queries, keys, head weights, and the selected sets, which may differ only where the last score was close."""
    expected = fp32_run.attention(fp32_run.served.reference, layer)
    for name in ("index_q", "index_keys", "index_weights"):
        assert_exact_but_for_flips(fp32_run.record(name, layer), expected[name], f"layer {layer} {name}")
    scores, top_k = expected["index_scores"], fp32_run.served.config["index_topk"]
    for t, ours in enumerate(fp32_run.selected(layer)):
        visible = (t + 1) // 4
        assert ours.sum() == min(top_k, visible) and not ours[visible:].any()
        if visible > top_k:
            ordered = scores[t, :visible].sort(descending=True).values
            clear = (ordered[top_k - 1] - ordered[top_k]) / ordered.std() > EXACT
            worst = scores[t, :visible][ours[:visible]].min()
            assert not clear or worst >= ordered[top_k - 1] - EXACT * ordered.std(), f"token {t}: wrong set"


@pytest.mark.parametrize("layer", LAYERS)
def test_moe(fp32_run: Run, layer: int) -> None:
    reference, x = fp32_run.served.reference, fp32_run.record("ffn.in", layer)
    assert_exact_but_for_flips(fp32_run.record("ffn.out", layer), fp32_run.moe(reference, layer), f"layer {layer}")
    weights, experts = reference.route(x, f"layers.{layer}.ffn.", fp32_run.tokens)
    ours, order = fp32_run.record("experts", layer).sort(1)
    expected, expected_order = experts.sort(1)
    same = (ours == expected).all(1)
    assert same.float().mean() >= 0.99
    difference = fp32_run.record("weights", layer).gather(1, order) - weights.gather(1, expected_order)
    assert difference[same].abs().max() < EXACT


@pytest.mark.parametrize("layer", LAYERS)
def test_block(fp32_run: Run, layer: int) -> None:
    """A whole block: both sublayers with their hyper-connections; the reference makes its own choices."""
    served = fp32_run.served
    expected = served.reference.block(
        fp32_run.record("block.in", layer), f"layers.{layer}.", fp32_run.ratio(layer), fp32_run.tokens
    )
    error = relative_error(fp32_run.record("block.out", layer), expected)
    assert error.median() < 2e-6 and (error > 1e-4).float().mean() < 0.05


@pytest.mark.parametrize("switch", ["kv_fp8", "indexer_fp4", "activations_fp8"])
def test_a_missing_quantiser_shows(serve: Callable[..., Served], switch: str) -> None:
    """The comparisons above can fail: a reference without one of the quantisers is far from our results."""
    run = record_run(serve("flash-like", qat="full", **QUANTISABLE))
    without = Reference(run.served.config, run.served.weights, dataclasses.replace(FULL, **{switch: False}))
    expected = run.attention(without, 2, run.selected(2))
    name = "kv" if switch == "kv_fp8" else "q"
    if switch == "indexer_fp4":
        expected, name = run.attention(without, 2), "index_keys"
    with pytest.raises(AssertionError, match="flips"):
        assert_exact_but_for_flips(run.record(name, 2), expected[name], name)
    if switch != "indexer_fp4":
        with pytest.raises(AssertionError, match="flips"):
            assert_exact_but_for_flips(run.record("attn.out", 2), expected["out"], "output")


@pytest.mark.parametrize("layer", LAYERS)
def test_bf16_is_as_close_as_the_reference_in_bf16(bf16_run: Run, layer: int) -> None:
    """bf16 and fp32 round differently before each quantiser, so they differ by 2-5e-2. Our result may not differ more
    from fp32 than the reference does with every activation rounded to bf16, plus a tenth of its median."""
    served, selected = bf16_run.served, bf16_run.selected(layer)
    in_bf16 = Reference(served.config, served.weights, FULL, torch.bfloat16)
    exact, rounded = (bf16_run.attention(r, layer, selected) for r in (served.reference, in_bf16))
    pairs = {name: (bf16_run.record(name, layer), exact[name], rounded[name]) for name in ("q", "kv", "attended")}
    pairs["attention"] = (bf16_run.record("attn.out", layer), exact["out"], rounded["out"])
    pairs["moe"] = (
        bf16_run.record("ffn.out", layer),
        bf16_run.moe(served.reference, layer),
        bf16_run.moe(in_bf16, layer),
    )
    for name, (ours, expected, theirs) in pairs.items():
        error, allowed = relative_error(ours, expected), relative_error(theirs, expected)
        limit = 1.1 * allowed.median()
        message = f"layer {layer} {name}: median {error.median():.1e} (reference in bf16: {allowed.median():.1e})"
        assert error.median() <= limit and error.max() <= 1.5 * allowed.max(), message


# -- bytes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_rows(serve: Callable[..., Served]) -> ByteRows:
    """A bf16 model whose pools have 584-byte rows, and the unquantised rows that its attention layers stored."""
    served = serve("flash-like", dtype="bfloat16", qat="full", server_args=dict(kv_cache_dtype="fp8_e4m3"), **REAL_ROWS)
    request = served.harness.open()
    with recording(served.harness) as record:
        served.harness.step([(request, served.corpus[3][:200].tolist())])
        for token in served.corpus[3][200:204].tolist():
            served.harness.step([(request, [token])], "decode")
    return served, request, record


def expected_row_bytes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The 584 bytes of a row as in section 4.1: 448 e4m3, 64 bf16, then 7 ue8m0 and a zero."""
    codes, scales = fp8_codes(rows[:, :448], 64)
    rope = rows[:, 448:].bfloat16().contiguous().view(torch.uint8)
    return torch.cat([codes, rope], 1), torch.cat([scales, torch.zeros_like(scales[:, :1])], 1)


def stored_row_bytes(table: KVRows, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(data, scales) of 584-byte rows; 64 of them in a page of 37,440 bytes: all data, all scales, padding."""
    assert table.storage.shape[1] == 37440
    data = table.storage[:, : 64 * 576].unflatten(1, (64, 576)).flatten(0, 1)
    scales = table.storage[:, 64 * 576 : 64 * 584].unflatten(1, (64, 8)).flatten(0, 1)
    return data[rows], scales[rows]


@pytest.mark.parametrize("layer", LAYERS)
def test_row_bytes(byte_rows: ByteRows, layer: int) -> None:
    served, request, record = byte_rows
    pool, ratio = served.harness.pool, served.config["compress_ratios"][layer]
    table = served.harness.runner.req_to_token_pool.req_to_token
    tokens = torch.arange(request.num_tokens - 127, request.num_tokens)
    ring = ring_row(request.row, tokens, pool.geometry.ring_rows)
    cases = [(pool.window(layer), ring, record("kv", layer)[tokens])]
    if ratio:
        entries = torch.arange(request.num_tokens // ratio)
        slots = table[request.row, entries * ratio].long() // ratio
        cases.append((pool.entries(layer), slots, record("entries", layer)))
    for rows, places, source in cases:
        assert source.dtype == torch.bfloat16 and len(source) == len(places)
        for stored, expected in zip(stored_row_bytes(rows, places), expected_row_bytes(source), strict=True):
            assert torch.equal(stored, expected)


@pytest.mark.parametrize("layer", [2, 4])
def test_index_row_bytes(byte_rows: ByteRows, layer: int) -> None:
    """68 bytes: two e2m1 codes a byte, even channel low; then a scale for each 32 channels."""
    served, request, record = byte_rows
    table, keys = served.harness.pool.index_keys(layer), record("index_keys", layer)
    slots = served.harness.runner.req_to_token_pool.req_to_token[request.row, torch.arange(len(keys)) * 4].long() // 4
    codes, scales = fp4_codes(keys)
    pages = table.storage
    assert pages.shape[1] == 64 * 68
    assert torch.equal(
        pages[:, : 64 * 64].unflatten(1, (64, 64)).flatten(0, 1)[slots], codes[:, ::2] | codes[:, 1::2] << 4
    )
    assert torch.equal(pages[:, 64 * 64 :].unflatten(1, (64, 4)).flatten(0, 1)[slots], scales)


def test_byte_rows_and_plain_rows_give_the_same_bits(byte_rows: ByteRows, serve: Callable[..., Served]) -> None:
    """A plain row has the fake-quantised values, so both formats give the same results."""
    plain = serve("flash-like", dtype="bfloat16", qat="full", **REAL_ROWS)
    tokens = plain.corpus[4][:280]
    expected = plain.harness.run(tokens, 96, 270)
    actual = byte_rows[0].harness.run(tokens, 96, 270)
    assert torch.isfinite(expected).all() and torch.equal(actual, expected)


def test_switches(serve: Callable[..., Served]) -> None:
    """off, kv and full give three different results."""
    logits = {}
    for qat in ("off", "kv", "full"):
        served = serve("flash-like", qat=qat, **QUANTISABLE)
        assert served.quant == {"off": Quant(), "kv": Quant(True, True), "full": FULL}[qat]
        logits[qat] = served.harness.run(served.corpus[0][:130])
    for one, other in (("off", "kv"), ("kv", "full")):
        assert relative_error(logits[one], logits[other]).median() > 1e-3
