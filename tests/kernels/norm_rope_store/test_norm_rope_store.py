"""norm_rope_store: the reference against its parts; the kernel, emulated, against float64 and the bytes of `scatter`.

Regimes: positions from 0 to 2**20 - 1; numbers of heads that no warp's share divides; queries and rows in wider
tensors; one to three destinations of both formats, in pages with gaps, with tokens that are not stored; rows whose
addresses need 64 bits; both configurations of the kernel, which must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from ops.number_formats import same_bits
from ops.row_kernels import ARCH, KERNELS, NAN, SCHEDULES, assert_no_spills, emulated_row_kernel, shifted
from torch import Tensor

from dsv4_kernels.kv_layout import PAGE_BYTES, KVRows, RowFormat
from dsv4_kernels.norm import rms_norm
from dsv4_kernels.norm_rope_store import Destination, norm_rope_store
from dsv4_kernels.quant import fp8_qdq
from dsv4_kernels.rope import YarnScaling, apply_rope, rope_frequencies

EPS = 1e-6
POSITIONS = torch.tensor([0, 1, 127, 128, 65535, 2**20 - 1, 990_324])
TOKENS = len(POSITIONS)
YARN = rope_frequencies(64, 160000.0, YarnScaling(16, 65536, 32, 1))
PLAIN, FP8 = RowFormat.PLAIN, RowFormat.FP8


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q and kv as views of wider projections, and the weight. Magnitudes from 2**-20, where eps counts, to 2**40."""
    amplitude = torch.tensor([1.0, 2.0**-20, 2.0**40, 3.0, 0.1, 2.0**-9, 100.0])[:, None]
    q = (normal(TOKENS, heads * 512 + 64, seed=seed) * amplitude).bfloat16()[:, 64:].unflatten(1, (heads, 512))
    kv = (normal(TOKENS, 1024 + 512, seed=seed + 1) * amplitude).bfloat16()[:, 1024:]
    return q, kv, normal(512, seed=seed + 2) * 0.3 + 1.0


def table(format: RowFormat, num_rows: int, padding: int = 0, dtype: torch.dtype = torch.bfloat16) -> KVRows:
    """A table filled with NaN, its pages (or plain rows) `padding` elements apart."""
    made = KVRows.allocate(num_rows, format, 512, 64, dtype, "cpu", NAN)
    wide = torch.nn.functional.pad(made.storage, (0, padding), value=113)
    return replace(made, storage=wide[:, : made.storage.shape[1]])


ROWS = (
    torch.arange(TOKENS),  # a workspace
    torch.tensor([3, -1, 64, 199, 0, 127, 63]),  # a ring
    torch.tensor([-1, -1, 65, -1, 5, 190, -1]),  # tails
)


def three_destinations(last: RowFormat = FP8) -> list[Destination]:
    """All rows in a plain table; some rows in pages of two strides."""
    tables = (table(PLAIN, TOKENS, 8), table(FP8, 200), table(last, 191, 16 if last is PLAIN else 576))
    return [Destination(*pair) for pair in zip(tables, ROWS, strict=True)]


# ---- the definition


@pytest.mark.parametrize("qat", [False, True], ids=["no_qat", "qat"])
def test_the_reference_is_its_parts_in_turn(qat: bool) -> None:
    """The comparison is in fp32, with the dimensions of a small model."""
    q, kv, weight = normal(TOKENS, 3, 24, seed=3), normal(TOKENS, 24, seed=4), normal(24, seed=5)
    frequencies, store = rope_frequencies(8, 1e4, None), KVRows.allocate(70, PLAIN, 24, 8, torch.float32, "cpu", NAN)
    rows = torch.tensor([5, -1, 0, 69, 3, -1, 1])
    out = norm_rope_store(q, kv, weight, POSITIONS, frequencies, EPS, [Destination(store, rows)], qat)
    assert same_bits(out, apply_rope(rms_norm(q, None, EPS), POSITIONS, frequencies))
    row = apply_rope(rms_norm(kv, weight, EPS), POSITIONS, frequencies)
    if qat:
        row[:, :16] = fp8_qdq(row[:, :16], 64)
    expected = torch.full((70, 24), NAN)
    expected[rows[rows >= 0]] = row[rows >= 0]
    assert same_bits(store.storage, expected)


def test_the_reference_writes_what_scatter_writes() -> None:
    q, kv, weight = inputs(2)
    destinations = three_destinations()
    in_place = q.clone()
    assert norm_rope_store(in_place, kv, weight, POSITIONS, YARN, EPS, destinations, out=in_place) is in_place
    assert same_bits(in_place, apply_rope(rms_norm(q, None, EPS), POSITIONS, YARN))
    assert same_bits(destinations[0].table.storage, apply_rope(rms_norm(kv, weight, EPS), POSITIONS, YARN))
    assert_bytes_of_scatter(destinations)


def assert_bytes_of_scatter(destinations: list[Destination], qat: bool = False) -> None:
    """The other destinations hold the bytes that `scatter` writes for the first one's rows, and nothing else."""
    row = destinations[0].table.storage
    for kept, rows in destinations[1:]:
        expected = table(kept.format, kept.num_rows)
        values = row[rows >= 0]
        if qat and kept.format is PLAIN:
            values = torch.cat((fp8_qdq(values[:, :448], 64), values[:, 448:]), 1)
        expected.scatter(rows[rows >= 0], values)
        assert same_bits(kept.storage.contiguous(), expected.storage)


def test_what_is_refused() -> None:
    q, kv, weight = normal(2, 3, 24, seed=0), normal(2, 24, seed=1), torch.ones(24)
    positions, frequencies, rows = torch.tensor([4, 5]), torch.ones(4), torch.tensor([0, -1])
    store = KVRows.allocate(4, PLAIN, 24, 8, torch.float32, "cpu")

    def call(**changed: object) -> None:
        arguments = {"q": q, "kv": kv, "kv_weight": weight, "positions": positions, "frequencies": frequencies}
        norm_rope_store(**{**arguments, "eps": EPS, **changed})

    for changed in ({"kv": kv[:1]}, {"kv": kv.bfloat16()}, {"kv_weight": weight[:8]}, {"q": q[0]}):
        with pytest.raises(ValueError, match=r"needs q \[T, H, D\], kv \[T, D\]"):
            call(**changed)
    with pytest.raises(ValueError, match="R at most 24"):
        call(frequencies=torch.ones(13))
    with pytest.raises(ValueError, match=r"positions must be \[2\] torch.int64"):
        call(positions=positions.int())
    for wrong in (rows[:1], rows.int()):
        with pytest.raises(ValueError, match=r"rows of a destination must be \[2\] torch.int64"):
            call(destinations=[Destination(store, wrong)])
    with pytest.raises(ValueError, match="up to 3 destinations; got 4"):
        call(destinations=[Destination(store, rows)] * 4)
    other = KVRows.allocate(4, RowFormat.INDEX_FP4, 128, 64, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match="stores plain and FP8 rows of 24; got index_fp4 rows of 128"):
        call(destinations=[Destination(other, rows)])
    with pytest.raises(ValueError, match="out is"):
        call(out=q[:, :2])


# ---- the kernel


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, compiled_here: None) -> str:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    return request.param


@pytest.fixture
def four_heads_a_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration for many rows."""
    from dsv4_kernels.norm_rope_store import gpu

    monkeypatch.setattr(gpu, "FEW_ROWS", 0)


def run(
    kernel: str,
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    destinations: list[Destination],
    out: Tensor | None = None,
    qat: bool = False,
    positions: Tensor = POSITIONS,
    schedule: str = "late",
    seed: int = 0,
) -> Tensor:
    from dsv4_kernels.norm_rope_store import gpu

    if out is None:
        out = torch.full(q.shape, NAN, dtype=q.dtype)
    with emulated_row_kernel(kernel, schedule, seed):
        getattr(gpu, kernel)(q, kv, weight, positions, YARN, EPS, destinations, qat, out)
    return out


def assert_near(got: Tensor, x: Tensor, weight: Tensor | None) -> None:
    """Close to float64, [T, H, 512].

    The norm: 16 roundings in a sum of squares (7 + 1 + 1 in a lane, 5 over lanes, the mean with eps), half of whose
    error passes through the root; rsqrt 2**-22.9; two products; then bf16. The rotation: cosine and sine to 2 ulp,
    three roundings, then bf16.
    """
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    if weight is not None:
        exact = exact * weight.double()
    norm_error = 2.0**-8 + (8 + 2.2 + 2) * 2.0**-24
    angle = (POSITIONS.float()[:, None] * YARN).double().numpy()[:, None]
    pairs = exact[..., 448:].unflatten(-1, (-1, 2)).numpy()
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
    expected = torch.from_numpy(np.stack([turned.real, turned.imag], -1)).flatten(-2)
    bound = (norm_error + 5 * 2.0**-23) * np.abs(pairs).sum(-1).repeat(2, -1) + 2.0**-8 * expected.abs().numpy() * 1.01
    assert ((got[..., 448:].double() - expected).abs().numpy() <= bound).all()
    assert ((got[..., :448].double() - exact[..., :448]).abs() <= norm_error * exact[..., :448].abs()).all()


def assert_as_reference(got: Tensor, expected: Tensor) -> None:
    """Close to the reference, which rounds at the same points: fp32 errors of some 2**-20 change one bf16 rounding
    (2**-8) in 4,096. Without the rounding between norm and rotation a quarter of the rotated channels differ, 3 % of
    all."""
    assert (got != expected).float().mean() < 2e-3


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("many", [False, True], ids=["few_rows", "many_rows"])
def test_the_kernel_norms_and_rotates(kernel: str, many: bool, schedule: str, request: pytest.FixtureRequest) -> None:
    if many:
        request.getfixturevalue("four_heads_a_warp")
    q, kv, weight = inputs(6)
    around = torch.full((TOKENS, 7 * 512 + 8), -7.0, dtype=torch.bfloat16)
    out = around[:, 8 : 8 + 6 * 512].unflatten(1, (6, 512))
    destinations = three_destinations()
    run(kernel, q, kv, weight, destinations, out, schedule=schedule, seed=3)
    assert_near(out, q, None)
    assert_as_reference(out, apply_rope(rms_norm(q, None, EPS), POSITIONS, YARN))
    assert (around[:, :8] == -7).all() and (around[:, 8 + 6 * 512 :] == -7).all()
    row = destinations[0].table.storage
    assert_near(row[:, None], kv[:, None], weight)
    assert_as_reference(row, apply_rope(rms_norm(kv, weight, EPS), POSITIONS, YARN))
    assert_bytes_of_scatter(destinations)
    for kept, _ in destinations[::2]:
        assert (kept.storage._base[:, kept.storage.shape[1] :] == 113).all()  # between pages


def test_the_kernel_rounds_what_plain_rows_keep(kernel: str) -> None:
    """If the first destination is in FP8, plain rows hold the values of its codes."""
    q, kv, weight = inputs(1)
    exact, rounded = three_destinations(PLAIN), three_destinations(PLAIN)
    run(kernel, q, kv, weight, exact)
    run(kernel, q, kv, weight, rounded, qat=True)
    assert_bytes_of_scatter(exact)
    assert_bytes_of_scatter([exact[0], *rounded[1:]], qat=True)
    assert same_bits(rounded[0].table.storage[2:3], rounded[2].table.storage[65:66])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_kernel_stores_in_as_many_places_as_there_are(kernel: str, count: int) -> None:
    q, kv, weight = inputs(1)
    destinations, all_three = three_destinations()[:count], three_destinations()
    run(kernel, q, kv, weight, destinations)
    run(kernel, q, kv, weight, all_three)
    for (few, _), (expected, _) in zip(destinations, all_three, strict=False):
        assert same_bits(few.storage.contiguous(), expected.storage.contiguous())


def test_the_kernel_makes_a_token_alike_in_any_batch(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in place, in another order, and by the other configuration."""
    from dsv4_kernels.norm_rope_store import gpu

    q, kv, weight = inputs(5)
    destinations = three_destinations()
    out = run(kernel, q, kv, weight, destinations)
    order = torch.tensor([6, 2, 5])
    monkeypatch.setattr(gpu, "FEW_ROWS", 0)
    again = [
        Destination(table(*shape), rows[order]) for shape, rows in zip(((PLAIN, 7), (FP8, 200)), ROWS, strict=False)
    ]
    in_place = q[order]
    run(kernel, in_place, kv[order], weight, again, in_place, positions=POSITIONS[order])
    assert same_bits(in_place, out[order])
    assert same_bits(again[0].table.storage[order], destinations[0].table.storage[order])
    rows = ROWS[1][order]
    assert torch.equal(again[1].table.gather(rows), destinations[1].table.gather(rows))


def test_the_kernel_finds_rows_beyond_two_gigabytes(kernel: str) -> None:
    """Row numbers of tables that begin 4 and 10 GB before the rows that are written."""
    q, kv, weight = inputs(1)
    near, far = three_destinations(), []
    for (kept, rows), first in zip(three_destinations(), (2**22, 2**18 * 64, 2**18 * 64), strict=True):
        stride = kept.storage.stride(0) * kept.storage.element_size()
        pages = first if kept.format is PLAIN else first // 64
        moved = replace(kept, storage=shifted(kept.storage, pages * stride), num_rows=first + kept.num_rows)
        far.append(Destination(moved, torch.where(rows >= 0, rows + first, rows)))
    run(kernel, q, kv, weight, near)
    run(kernel, q, kv, weight, far)
    for (a, _), (b, _) in zip(near, far, strict=True):
        assert same_bits(a.storage.contiguous(), b.storage.as_subclass(Tensor).contiguous())


def test_the_kernel_ends_whatever_it_is_given(kernel: str) -> None:
    """Rows of NaN and infinity affect only themselves."""
    q, kv, weight = inputs(2)
    q, kv = q.clone(), kv.clone()
    clean, spoilt = three_destinations(), three_destinations()
    expected = run(kernel, q, kv, weight, clean)
    q[1, 0, 7], q[3, 1, 460], kv[5, 3], kv[4, 500] = NAN, float("inf"), NAN, float("-inf")
    out = run(kernel, q, kv, weight, spoilt)
    assert out[1, 0].isnan().all() and out[3, 1, 460:462].isnan().all()
    kept = torch.ones(TOKENS, 2, dtype=torch.bool)
    kept[1, 0] = kept[3, 1] = False
    assert same_bits(out[kept], expected[kept])
    others = torch.tensor([0, 1, 2, 3, 6])
    assert same_bits(spoilt[0].table.storage[others], clean[0].table.storage[others])
    assert spoilt[1].table.gather(ROWS[1][5]).isnan().any()
    for name in (1, 2):
        rows = ROWS[name][others]
        rows = rows[rows >= 0]
        assert torch.equal(spoilt[name].table.gather(rows), clean[name].table.gather(rows))


def test_what_the_kernel_refuses(kernel: str) -> None:
    from dsv4_kernels.norm_rope_store import gpu

    q, kv, weight = inputs(1)
    for changed in ({"q": q.float()}, {"q": q[..., :256]}, {"kv": kv[:, 4:]}, {"kv": kv.T.contiguous().T}):
        arguments = {"q": q, "kv": kv, **changed}
        with pytest.raises(ValueError, match=r"must be torch.bfloat16 \[..., 512\]"):
            run(kernel, arguments["q"], arguments["kv"], weight, [], out=torch.empty_like(q))
    with pytest.raises(ValueError, match=r"needs kv_weight \[512\] torch.float32"):
        getattr(gpu, kernel)(q, kv, weight.bfloat16(), POSITIONS, YARN, EPS, [], False, torch.empty_like(q))
    with pytest.raises(ValueError, match=r"needs frequencies \[32\]"):
        getattr(gpu, kernel)(q, kv, weight, POSITIONS, YARN[:16], EPS, [], False, torch.empty_like(q))
    with pytest.raises(ValueError, match="pages of FP8 rows must lie at multiples of 16 bytes"):
        run(kernel, q, kv, weight, [Destination(table(FP8, 200, padding=8), ROWS[1])])


def test_the_kernel_needs_no_stack(kernel: str) -> None:
    from ptx_emulator import emulated

    from dsv4_kernels.norm_rope_store import gpu

    with emulated(arch=ARCH[kernel]):
        functions = {str(heads): lambda heads=heads: gpu.compile(heads, ARCH[kernel]) for heads in (1, 4)}
        assert_no_spills(functions, {"1": 48, "4": 64})


# ---- the kernel on a GPU


@pytest.fixture
def kernel_here(kernel_on_gpu: Callable[[str], str]) -> str:
    return kernel_on_gpu("norm_rope_store")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 6, 1300], ids=str)
def test_the_gpu_makes_the_same(kernel_here: str, heads: int) -> None:
    """Eagerly, and from a CUDA graph that is replayed with other inputs."""
    q, kv, weight = (x.cuda() for x in inputs(heads))
    positions, live_q, live_kv = POSITIONS.cuda(), torch.zeros_like(q), torch.zeros_like(kv)
    destinations = [Destination(replace(t, storage=t.storage.cuda()), rows.cuda()) for t, rows in three_destinations()]

    frequencies = YARN.cuda()
    out = torch.empty_like(q)
    arguments = (weight, positions, frequencies, EPS, destinations, False, out, kernel_here)
    norm_rope_store(q, kv, *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm_rope_store(live_q, live_kv, *arguments)
    live_q.copy_(q)
    live_kv.copy_(kv)
    eager = out.clone()
    out.fill_(NAN)
    graph.replay()
    assert same_bits(out.cpu(), eager.cpu())
    assert_near(out.cpu(), q.cpu(), None)
    on_cpu = [Destination(replace(t, storage=t.storage.cpu()), rows.cpu()) for t, rows in destinations]
    assert_near(on_cpu[0].table.storage[:, None], kv.cpu()[:, None], weight.cpu())
    assert_bytes_of_scatter(on_cpu)


@pytest.mark.gpu
def test_the_gpu_finds_rows_beyond_two_gigabytes(kernel_here: str) -> None:
    """Rows of q, in place, and of both kinds of tables beyond 2 GB: 9 GB together."""
    tokens = 2**15 + 8
    q = torch.ones(tokens, 64, 512, dtype=torch.bfloat16, device="cuda")
    q[-1] = normal(64, 512, seed=1).bfloat16().cuda()
    kv = normal(tokens, 512, seed=2).bfloat16().cuda()
    weight, positions = torch.ones(512, device="cuda"), torch.arange(tokens, device="cuda")
    plain = KVRows.allocate(2**22 + 64, PLAIN, 512, 64, torch.bfloat16, "cuda", 0.0)
    fp8 = KVRows.allocate(64 * (2**31 // PAGE_BYTES + 2), FP8, 512, 64, torch.bfloat16, "cuda", 0.0)
    rows = [torch.full((tokens,), -1, device="cuda") for _ in range(2)]
    rows[0][-1], rows[1][-1] = plain.num_rows - 1, fp8.num_rows - 1
    destinations = [Destination(plain, rows[0]), Destination(fp8, rows[1])]
    alone = [x[-1:].clone() for x in (q, kv, positions)]
    arguments = (YARN.cuda(), EPS)
    norm_rope_store(q, kv, weight, positions, *arguments, destinations, out=q, impl=kernel_here)
    single = norm_rope_store(*alone[:2], weight, alone[2], *arguments, impl=kernel_here)
    assert same_bits(q[-1:].cpu(), single.cpu())
    row = plain.storage[-1:]
    assert row.any() and not plain.storage[:-1].any() and not fp8.storage[:-1].any()
    expected = KVRows.allocate(64, FP8, 512, 64, torch.bfloat16, "cpu", 0.0)
    expected.scatter(torch.tensor([63]), row.cpu())
    assert same_bits(fp8.storage[-1:].cpu(), expected.storage)
