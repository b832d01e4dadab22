"""The indexer's kernels: scores against float64, the choice against the definition's on the same scores.

Regimes: no, few, exactly top_k, one more and many visible entries; requests of different length in one batch, a padding
token; pages in any order, tables and tokens with gaps; ties, all scores zero, infinities, subnormals; tokens in slices
of the buffer. Rows that must not be read are NaN, and so is the buffer before it is written.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.early_launches import launched_early
from ops.indexer_cases import ALL_KERNELS, BF16, MIXED, PAGE, Case, at_the_ends, inexact
from ops.memory_layout import far_apart, last_of_many
from ops.row_kernels import ARCH, KERNELS, SCHEDULES, assert_no_spills, emulated_row_kernel
from torch import Tensor

from dsv4_kernels.indexer import index_query, index_topk
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.rope import rope_frequencies


def chosen(scores: Tensor, visible: int, top_k: int, pages: Tensor) -> Tensor:
    """The definition's choice by given scores: of equal scores the lower entry, in rising order."""
    entry = torch.arange(visible)
    if visible > top_k:
        entry = torch.sort(scores[:visible], descending=True, stable=True).indices[:top_k].sort().values
    rows = torch.full((top_k,), -1, dtype=torch.int32)
    rows[: len(entry)] = pages[entry // PAGE] * PAGE + (entry % PAGE).int()
    return rows


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ALL_KERNELS)
def test_scores_and_choice(name: str, schedule: str) -> None:
    rows, (scores,) = MIXED.run(name, 64, schedule=schedule)
    for token, count in enumerate(MIXED.visible.tolist()):
        if count > 64:
            exact, magnitude = MIXED.exact_scores(token)
            # Partial sums are rounded at most 8 times over channels and 64 over heads, and each sum over a quad twice.
            assert ((scores[token, :count].double() - exact).abs() <= 80 * 2.0**-24 * magnitude).all()
        pages = MIXED.page_table[int(MIXED.request[token])]
        assert torch.equal(rows[token], chosen(scores[token], count, 64, pages)), f"token {token}"


@pytest.mark.parametrize("name", ["sm90", "sm90, prefill", "sm100, prefill"])
@pytest.mark.parametrize("heads", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_fewer_heads(heads: int, name: str) -> None:
    case = Case.of((130,), [(0, 130)], heads=heads)
    rows, (scores,) = case.run(name, 50)
    exact, magnitude = case.exact_scores(0)
    assert ((scores[0, :130].double() - exact).abs() <= 80 * 2.0**-24 * magnitude).all()
    assert torch.equal(rows[0], chosen(scores[0], 130, 50, case.page_table[0]))


@pytest.mark.parametrize("name", ALL_KERNELS)
def test_scales_at_the_ends(name: str) -> None:
    case = at_the_ends()
    rows, (scores,) = case.run(name, 50)
    for token, count in enumerate(case.visible.tolist()):
        exact, magnitude = case.exact_scores(token)
        assert exact.abs().min() == 0 and exact.abs().max() > 2.0**90 and (exact.abs() < 2.0**-10).sum() > count // 3
        bound = 80 * 2.0**-24 * magnitude + 64 * 64 * 2.0**-149  # sums of subnormal numbers
        assert ((scores[token, :count].double() - exact).abs() <= bound).all()
        assert torch.equal(rows[token], chosen(scores[token], count, 50, case.page_table[0]))


@pytest.mark.parametrize("name", KERNELS)
def test_other_pages_for_the_rows(name: str) -> None:
    other = torch.arange(MIXED.page_table.numel(), dtype=torch.int32).view(MIXED.page_table.shape) + 3
    rows, (scores,) = MIXED.run(name, 20, row_pages=other)
    for token, count in enumerate(MIXED.visible.tolist()):
        assert torch.equal(rows[token], chosen(scores[token], count, 20, other[int(MIXED.request[token])]))


@pytest.mark.parametrize("name", ALL_KERNELS)
def test_a_token_alone_has_the_bits_it_has_among_others(name: str) -> None:
    together, (scores,) = MIXED.run(name, 64)
    for token in (0, 3, 7):
        at = slice(token, token + 1)
        alone = replace(
            MIXED,
            q=MIXED.q[at].contiguous(),
            head_weights=MIXED.head_weights[at].contiguous(),
            request=MIXED.request[at].clone(),
            visible=MIXED.visible[at].clone(),
        )
        rows, (its_scores,) = alone.run(name, 64)
        count = int(MIXED.visible[token])
        assert torch.equal(rows[0], together[token]) and torch.equal(its_scores[0, :count], scores[token, :count])


@pytest.mark.parametrize("name", ALL_KERNELS)
def test_keys_beyond_32_bits(name: str) -> None:
    near, (scores,) = MIXED.run(name, 64)
    far, (its_scores,) = MIXED.spread().run(name, 64)
    step = MIXED.spread().page_table[0, 0] // MIXED.page_table[0, 0]
    for token, count in enumerate(MIXED.visible.tolist()):
        if count > 64:
            assert torch.equal(its_scores[token, :count], scores[token, :count])
    assert torch.equal(far, torch.where(near < 0, near, near // PAGE * step * PAGE + near % PAGE))


@pytest.mark.parametrize("name", ALL_KERNELS)
def test_tokens_and_pages_beyond_32_bits(name: str) -> None:
    """Queries, head weights and rows of the page table that are 2**32 elements apart."""
    near, (scores,) = MIXED.run(name, 64)
    q, weights, table = far_apart(MIXED.q, 0), far_apart(MIXED.head_weights), far_apart(MIXED.page_table)
    far, (its_scores,) = replace(MIXED, q=q, head_weights=weights, page_table=table).run(name, 64)
    for token, count in enumerate(MIXED.visible.tolist()):
        assert count <= 64 or torch.equal(its_scores[token, :count], scores[token, :count])
    assert torch.equal(far, near)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_of_more_tokens_than_32_bits_count(name: str) -> None:
    """The result has 2**33 bytes. Only the last tokens' CTAs run, and as all entries fit nothing is scored."""
    few = Case.of((40,), [(0, 40), (0, 3), (0, 0)], heads=8)
    count, top_k = 65_535, 1 << 15
    many = replace(
        few,
        q=last_of_many(few.q, count),
        head_weights=last_of_many(few.head_weights, count),
        request=last_of_many(few.request, count),
        visible=last_of_many(few.visible, count),
    )
    rows, buffers = many.run(name, top_k, ends=(0, 3))
    expected, _ = few.run(name, top_k)
    assert not buffers and rows.nbytes > 1 << 32 and torch.equal(rows[-3:], expected)


@pytest.mark.parametrize("name", KERNELS)
def test_a_prefill_in_many_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than a CTA has, of requests that change within a CTA; some runs of pages have no visible entry."""
    from dsv4_kernels.indexer import gpu

    case = Case.of(
        (700, 90, 400), [(0, 690 + i) for i in range(5)] + [(1, 80), (2, 399), (0, 3), (0, 0), (2, 65), (0, 700)] * 2
    )
    rows, (scores,) = case.run(f"{name}, many", 64)
    _, of_prefill = gpu.score_kernels(ARCH[name])
    for ctas in (1, 10**6):
        monkeypatch.setattr(of_prefill, "CTAS", ctas)
        again, (its_scores,) = case.run(f"{name}, prefill", 64)
        assert torch.equal(again, rows)
        for token, count in enumerate(case.visible.tolist()):
            if count > 64:
                assert torch.equal(its_scores[token, :count], scores[token, :count])


@pytest.mark.parametrize("name", KERNELS)
def test_a_token_has_one_score_in_every_forward(name: str) -> None:
    """The kernels for few and for many tokens and for prefills give the same scores, the last one with different
    instructions, also where partial sums are rounded."""
    case = inexact()
    rows, (scores,) = case.run(name, 64)
    for other in (f"{name}, many", f"{name}, prefill"):
        again, (its_scores,) = case.run(other, 64)
        assert torch.equal(again, rows)
        for token, count in enumerate(case.visible.tolist()):
            assert torch.equal(its_scores[token, :count], scores[token, :count])
    assert not torch.equal(scores[0, :300], case.exact_scores(0)[0].float())


def test_slices_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_kernels.indexer import gpu

    together, _ = MIXED.run("sm90", 64)
    entries = MIXED.page_table.shape[1] * PAGE
    monkeypatch.setattr(gpu, "SCRATCH_BYTES", 3 * 4 * entries + 5)
    assert gpu.tokens_at_a_time(8, entries) == 3
    rows, (scores,) = MIXED.run("sm90", 64)
    assert torch.equal(rows, together) and scores.shape == (3, entries)
    assert gpu.tokens_at_a_time(8, 10**9) == 1
    monkeypatch.undo()
    assert gpu.tokens_at_a_time(1 << 20, 64) == 65_535  # CTAs of a grid in its second dimension


def test_nothing_is_scored_where_all_entries_fit() -> None:
    rows, buffers = MIXED.run("sm90", 512)
    assert not buffers
    for token, count in enumerate(MIXED.visible.tolist()):
        pages = MIXED.page_table[int(MIXED.request[token])]
        assert torch.equal(rows[token], chosen(torch.zeros(count), count, 512, pages))


def test_all_entries_are_more_than_a_round() -> None:
    """More entries than a CTA has threads, all of which fit."""
    case = Case.of((1300,), [(0, 1300), (0, 600), (0, 513)], heads=8)
    rows, buffers = case.run("sm90", 1408)
    assert not buffers
    for token, count in enumerate(case.visible.tolist()):
        assert torch.equal(rows[token], chosen(torch.zeros(count), count, 1408, case.page_table[0]))


PLANTED = {
    "all_equal": torch.zeros(700),
    "two_values": torch.arange(700).remainder(3).eq(0).float(),
    "ties_at_the_edge": torch.arange(700).remainder(7).float() - 3,
    "negative": -torch.arange(700).float() - 1,
    "infinities": torch.where(torch.arange(700).remainder(5).eq(0), torch.inf, -torch.inf),
    "subnormal": torch.arange(700) * 2.0**-149,
    "low_bits": (torch.arange(700).flip(0) + 0x3F800000).int().view(torch.float32),
}


def choose(
    given: Tensor, visible: int, top_k: int, pages: Tensor, schedule: str = "late", few_tokens: bool = False
) -> Tensor:
    """The kernel's choice by given scores."""
    import cuda.bindings.driver as cuda
    from cutlass import Int32, Int64

    from dsv4_kernels.indexer import topk

    rows = torch.full((top_k,), -77, dtype=torch.int32)
    request, seen = torch.zeros(1, dtype=torch.int32), torch.full((1,), visible, dtype=torch.int32)
    with emulated_row_kernel("sm90", schedule):
        of_scores = (given.data_ptr(), given.nbytes)
        addresses = (*of_scores, pages.data_ptr(), 0, request.data_ptr(), seen.data_ptr(), rows.data_ptr())
        arguments = topk.Arguments(*map(Int64, addresses), Int32(top_k))
        topk.compile("sm_90a", few_tokens)(arguments, Int32(1), cuda.CUstream(0))
    return rows


@pytest.mark.parametrize("few_tokens", [False, True], ids=["many", "few"])
@pytest.mark.parametrize("top_k", [1, 100, 512, 699])
@pytest.mark.parametrize("name", PLANTED)
def test_choice_of_given_scores(name: str, top_k: int, few_tokens: bool) -> None:
    given, pages = PLANTED[name].contiguous(), torch.randperm(20).int()
    found = choose(given, 700, top_k, pages, few_tokens=few_tokens)
    assert torch.equal(found, chosen(given, 700, top_k, pages))


@pytest.mark.parametrize("schedule", (*SCHEDULES, "random_warps"))
@pytest.mark.parametrize("visible", [2047, 2048, 2049, 5003])
def test_choice_of_more_entries_than_a_cta_has_at_once(visible: int, schedule: str) -> None:
    """2,048 entries a round: choices of earlier rounds are counted, also among equal scores."""
    pages = torch.randperm(80, generator=torch.Generator().manual_seed(1)).int()
    given = torch.full((5056,), torch.nan)
    given[:visible] = torch.arange(visible).remainder(3)
    for top_k in (512, 3 * visible // 5):  # with the latter, the last equal score is in the last round
        assert torch.equal(choose(given, visible, top_k, pages, schedule), chosen(given, visible, top_k, pages))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("visible", [2049, 8191, 8193])
def test_choice_of_more_entries_than_are_held(visible: int, schedule: str) -> None:
    """With few tokens, 8,192 scores are in shared memory, and further ones are loaded in every pass."""
    pages = torch.randperm(140, generator=torch.Generator().manual_seed(2)).int()
    given = torch.full((8960,), torch.nan)
    given[:visible] = torch.randn(visible, generator=torch.Generator().manual_seed(3))
    given[visible // 2 : visible] = torch.arange(visible - visible // 2).remainder(3)  # many equal ones
    for top_k in (512, 3 * visible // 5):
        found = choose(given, visible, top_k, pages, schedule, few_tokens=True)
        assert torch.equal(found, chosen(given, visible, top_k, pages))


def test_pages_are_shared_by_the_ctas_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few tokens a CTA has every n-th page: from one CTA to one for each page the scores are the same."""
    from dsv4_kernels.indexer import gpu

    case = Case.of((700, 90), [(0, 700), (1, 90), (0, 449), (1, 64)])
    rows, (scores,) = case.run("sm90, many", 64)
    for most in (1, 3, 64):
        monkeypatch.setattr(gpu, "RUNS_OF_FEW", most)
        monkeypatch.setattr(gpu, "CTAS_OF_FEW", most)
        again, (its_scores,) = case.run("sm90", 64)
        assert torch.equal(again, rows)
        for token, count in enumerate(case.visible.tolist()):
            assert count <= 64 or torch.equal(its_scores[token, :count], scores[token, :count]), (most, token)


def test_more_tokens_are_few_on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """17 tokens, which Hopper gives to the kernels for many: both kernels choose alike, and each has its grid."""
    from dsv4_kernels.indexer import gpu, scores

    assert gpu.FEW_TOKENS == {"sm90": 16, "sm100": 128}
    compile, few = scores.compile, []
    monkeypatch.setattr(scores, "compile", lambda *given: few.append(len(given) > 2) or compile(*given))
    case = Case.of((700, 90), [(i % 2, (700, 90)[i % 2] - i) for i in range(17)], heads=8)
    rows = [case.run(name, 64)[0] for name in ("sm100", "sm100, many", "sm90")]
    assert few == [True, False, False] and torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])
    monkeypatch.setitem(gpu.FEW_TOKENS, "sm100", 16)
    assert torch.equal(case.run("sm100", 64)[0], rows[0]) and few[3:] == [False]


@pytest.mark.slow
@pytest.mark.usefixtures("in_turns")
@pytest.mark.parametrize(
    ("name", "kernel", "launched", "prefill"),
    [
        ("index_prefill_scores", "sm90", 0, True),
        ("index_prefill_tcgen05", "sm100", 0, True),
        ("index_topk", "sm90", 1, True),
        ("index_topk_of_few", "sm90", 1, False),
    ],
)
def test_deleted_synchronisation_is_noticed(
    name: str, kernel: str, launched: int, prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case has more entries than a CTA processes at once, in one run on Blackwell: every role waits for another."""
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.indexer import gpu, prefill_tcgen05

    monkeypatch.setattr(prefill_tcgen05, "CTAS", 1)
    entries, more = (700, [(0, 690), (0, 600), (0, 700)]) if kernel == "sm100" else (2300, [])
    case = Case.of((entries, 90), [(0, entries), (1, 80), (0, 700), *more], heads=8)
    pages = case.page_table
    with emulated(checks=Checks.strict(), arch=ARCH[kernel], record=True) as device:
        arguments = (case.q, case.head_weights, case.keys, pages, PAGE, case.request, case.visible, 64, pages, prefill)
        getattr(gpu, kernel)(*arguments)
    rates = delete_synchronisation(name, device, launched)
    assert rates and set(rates.values()) == {1}


@pytest.mark.parametrize("quantise", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_queries(name: str, quantise: bool) -> None:
    """Equal except where an ulp of the rotation's fp32 gives another bf16, and with it another code."""
    from dsv4_kernels.indexer import query

    sizes = torch.tensor([1.0, 2.0**-126, 2.0**100, 3.0, 0.0])[:, None, None]  # of blocks at the floor of scales, too
    wide = (torch.randn(5, 9, 128, generator=torch.Generator().manual_seed(3)) * sizes).to(BF16)
    q, positions = wide[:, 2:], torch.tensor([0, 1, 127, 70000, 2**20 - 1])
    frequencies = rope_frequencies(64, 160000.0, None)
    beside = torch.randn(5, 20, generator=torch.Generator().manual_seed(4))
    beside[1, 6], scale = float("nan"), 0.0110485
    head_weights = beside[:, 4:11]
    with emulated_row_kernel(name):
        found, weights = getattr(query, name)(q, head_weights, positions, frequencies, scale, quantise)
    expected, expected_weights = index_query(q, head_weights, positions, frequencies, scale, quantise)
    assert torch.equal(expected_weights.nan_to_num(9.0), (head_weights.to(BF16).float() * scale).nan_to_num(9.0))
    assert weights.is_contiguous() and torch.equal(weights.nan_to_num(9.0), expected_weights.nan_to_num(9.0))
    assert found.shape == expected.shape and (found == expected).float().mean() > 0.995
    for token in range(4):
        assert ((found[token].double() - expected[token].double()).norm() / expected[token].double().norm()) < 2e-2
    assert not found[4].any()
    with emulated_row_kernel(name):
        alone, of_it = getattr(query, name)(q[3:4], head_weights[3:4], positions[3:4], frequencies, scale, quantise)
    assert torch.equal(alone[0], found[3]) and torch.equal(of_it[0], weights[3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 136).to(BF16)[..., :128]}, "heads side by side"),
        ({"q": torch.zeros(2, 4, 128)}, r"index_query: q must be torch\.bfloat16"),
        ({"head_weights": torch.zeros(4, 2).T}, "heads side by side"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "int64 positions; got .* torch.int32"),
        ({"frequencies": torch.ones(16)}, "64 rotated channels .* got .* 32"),
    ],
    ids=["gaps", "fp32", "columns", "int32", "frequencies"],
)
def test_queries_that_are_refused(change: dict[str, Tensor], message: str) -> None:
    from dsv4_kernels.indexer import query

    right = {
        "q": torch.zeros(2, 4, 128).to(BF16),
        "head_weights": torch.zeros(2, 4),
        "positions": torch.zeros(2, dtype=torch.int64),
        "frequencies": torch.ones(32),
    }
    with pytest.raises(ValueError, match=message):
        query.sm90(*(right | change).values(), 0.25, True)


@pytest.mark.parametrize("name", ALL_KERNELS)
def test_scores_and_choice_may_begin_early(name: str) -> None:
    with launched_early():
        test_scores_and_choice(name, "random")


@pytest.mark.parametrize("name", KERNELS)
def test_queries_may_begin_early(name: str) -> None:
    with launched_early():
        test_queries(name, True)


@pytest.mark.parametrize("name", KERNELS)
def test_compiled_without_spills(name: str) -> None:
    from ptx_emulator import emulated

    from dsv4_kernels.indexer import gpu, scores, topk

    kernels = {"scores": lambda: scores.compile(ARCH[name], 64), "topk": lambda: topk.compile(ARCH[name])}
    kernels["scores of few"] = lambda: scores.compile(ARCH[name], 64, True)
    kernels["topk of few"] = lambda: topk.compile(ARCH[name], True)
    kernels["prefill"] = lambda: gpu.score_kernels(ARCH[name])[1].compile(ARCH[name], 64)
    of_prefill = {"sm90": 128, "sm100": 120}[name]  # with 512 and 544 threads
    most = {"scores": 232, "topk": 64, "prefill": of_prefill, "scores of few": 255, "topk of few": 64}
    with emulated(arch=ARCH[name]):
        assert_no_spills(kernels, most)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: replace(case, q=case.q[:, :3], head_weights=case.head_weights[:, :3]), "multiple of 8 heads"),
        (lambda case: replace(case, visible=case.visible.long()), "contiguous rows of torch.int32"),
        (lambda case: replace(case, keys=KVRows.allocate(64, RowFormat.PLAIN, 128, 0, BF16, "cpu")), "reads FP4 keys"),
    ],
    ids=["heads", "int64", "plain"],
)
def test_what_the_kernels_have_no_code_for_is_refused(change: object, message: str) -> None:
    from dsv4_kernels.indexer import gpu

    case = change(MIXED)
    with pytest.raises(ValueError, match=message):
        gpu.sm90(
            case.q,
            case.head_weights,
            case.keys,
            case.page_table,
            PAGE,
            case.request,
            case.visible,
            4,
            case.page_table,
            False,
        )


def on_a_gpu(case: Case, top_k: int, prefill: bool) -> Tensor:
    """The rows that the kernel on this GPU chooses."""
    case = replace(
        case,
        keys=replace(case.keys, storage=case.keys.storage.cuda()),
        **{name: getattr(case, name).cuda() for name in ("page_table", "request", "visible", "q", "head_weights")},
    )
    of_tokens = case.request, case.visible, top_k
    return index_topk(case.q, case.head_weights, case.keys, case.page_table, PAGE, *of_tokens, prefill=prefill).cpu()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_has_one_score_in_every_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, buffers = torch.empty, []

    def remembered(*shape: int, **how: object) -> Tensor:
        made = empty(*shape, **how)
        buffers.extend([made] if how.get("dtype") == torch.float32 else [])
        return made

    monkeypatch.setattr(torch, "empty", remembered)
    from dsv4_kernels.indexer import gpu

    case = inexact()
    rows = [on_a_gpu(case, 64, prefill) for prefill in (False, True)]
    monkeypatch.setattr(gpu, "FEW_TOKENS", dict.fromkeys(gpu.FEW_TOKENS, 0))
    rows.append(on_a_gpu(case, 64, False))
    assert torch.equal(rows[1], rows[0]) and torch.equal(rows[2], rows[0])
    of_few, of_prefill, of_many = buffers
    for token, count in enumerate(case.visible.tolist()):
        assert torch.equal(of_few[token, :count], of_prefill[token, :count])
        assert torch.equal(of_few[token, :count], of_many[token, :count])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kernel", ["few", "many", "prefill"])
@pytest.mark.parametrize("top_k", [64, 512])
def test_on_a_gpu(top_k: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition's choice by float64 scores, except for entries that rounding may move across the threshold."""
    from dsv4_kernels.indexer import gpu

    if kernel == "many":
        monkeypatch.setattr(gpu, "FEW_TOKENS", dict.fromkeys(gpu.FEW_TOKENS, 0))
    lengths = (9000, 40, 700, 4100)
    tokens = [(b, n) for b in range(4) for n in (lengths[b], lengths[b] // 2, lengths[b] // 3)]
    case = Case.of(lengths, tokens)
    rows = on_a_gpu(case, top_k, kernel == "prefill")
    for token, (request, count) in enumerate(tokens):
        exact, magnitude = case.exact_scores(token)
        table = case.page_table[request]
        place = {int(table[e // PAGE]) * PAGE + e % PAGE: e for e in range(count)}
        entries = [place[row] for row in rows[token].tolist() if row >= 0]
        assert entries == sorted(entries) and len(entries) == min(count, top_k)
        if count > top_k:
            error = 80 * 2.0**-24 * magnitude
            left = torch.ones(count, dtype=torch.bool)
            left[entries] = False
            assert (exact + error)[entries].min() >= (exact - error)[left].max()
