"""Kernels of the rotation and of the norm, emulated: angles against float64, rows against float64 and the reference.

Regimes: angles up to 2**20, among them those next to multiples of pi / 2; rows of 8 to 7,168 channels, in a warp and in
a CTA, with even and uneven shares of lanes; rows in wider tensors; tokens alone and in other batches.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from ops.memory_layout import strided
from ops.number_formats import same_bits
from ops.row_kernels import ARCH, KERNELS, NAN, SCHEDULES, assert_no_spills, emulated_row_kernel
from torch import Tensor

from dsv4_kernels import norm
from dsv4_kernels.quant import fp8_quantise
from dsv4_kernels.rope import YarnScaling, apply_rope, apply_rope_in_place, rope_frequencies

POSITIONS = torch.tensor([0, 1, 127, 128, 65535, 2**20 - 1, 990_324])
TOKENS = len(POSITIONS)
FREQUENCIES = {
    "plain": rope_frequencies(64, 10000.0, None),
    "yarn": rope_frequencies(64, 160000.0, YarnScaling(16, 65536, 32, 1)),
}
EPS = 1e-6


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, compiled_here: None) -> str:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    return request.param


# ---- in place, by the reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_in_place_is_apply_rope(dtype: torch.dtype) -> None:
    x = normal(TOKENS, 3, 80, seed=0).to(dtype)[..., 8:]
    expected = apply_rope(x, POSITIONS, FREQUENCIES["yarn"], inverse=True)
    assert apply_rope_in_place(x, POSITIONS, FREQUENCIES["yarn"], inverse=True) is x
    assert same_bits(x.contiguous(), expected)
    with pytest.raises(ValueError, match=r"apply_rope_in_place: positions have shape \(2,\)"):
        apply_rope_in_place(x, POSITIONS[:2], FREQUENCIES["yarn"])


# ---- the angles


def hard_angles() -> Tensor:
    """Products of positions and frequencies of the model: random ones, the first and last positions, those nearest to a
    multiple of pi / 2, where an inexact reduction leaves no right bit, and the worst ones for this reduction."""
    found = []
    generator = torch.Generator().manual_seed(1)
    for frequencies in FREQUENCIES.values():
        for pair in (0, 1, 2, 5, 14, 20, 31):
            every = (torch.arange(2**20).float() * frequencies[pair]).double()
            quarters = every / (np.pi / 2)
            distance = (quarters - quarters.round()).abs()
            distance[every < 0.7] = 1.0  # small angles are their own sine
            nearest = distance.topk(64, largest=False).indices
            some = torch.randint(0, 2**20, (64,), generator=generator)
            found.append(every[torch.cat((nearest, some, POSITIONS))].float())
    worst = torch.tensor([990_324.0, 745_074.0])
    return torch.cat((*found, worst, worst[:1] * 0 - 3.0))


def test_cosine_and_sine_to_two_ulp(kernel: str) -> None:
    from ops.angle_kernel import cosines_and_sines

    angles = hard_angles()
    with emulated_row_kernel(kernel):
        got = cosines_and_sines(angles).double().numpy()
    exact = angles.numpy().astype(np.longdouble)
    for column, function in enumerate((np.cos, np.sin)):
        expected = function(exact)
        ulp = np.spacing(np.abs(expected.astype(np.float32))).astype(np.longdouble)
        assert (np.abs(got[:, column] - expected) <= 2 * ulp).all()


# ---- the rotation


def rotate(kernel: str, x: Tensor, frequencies: Tensor, inverse: bool, **options: object) -> Tensor:
    """x, rotated in place by the kernel, at POSITIONS unless `positions` are given."""
    from dsv4_kernels.rope import gpu

    positions = options.pop("positions", POSITIONS)
    with emulated_row_kernel(kernel, **options):
        getattr(gpu, f"{kernel}_in_place")(x, positions, frequencies, inverse)
    return x


def assert_rotated(got: Tensor, x: Tensor, frequencies: Tensor, inverse: bool) -> None:
    """Cosine and sine to 2 ulp, two products and a sum; bf16 once."""
    rotated = 2 * len(frequencies)
    angle = (POSITIONS.float()[:, None] * frequencies).double().numpy()
    turn = np.exp((-1j if inverse else 1j) * angle).reshape(TOKENS, *(1,) * (x.dim() - 2), rotated // 2)
    pairs = x[..., x.shape[-1] - rotated :].double().unflatten(-1, (-1, 2)).numpy()
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    expected = np.stack([z.real, z.imag], -1).reshape(*x.shape[:-1], rotated)
    bound = (5 * 2.0**-23) * np.abs(pairs).sum(-1).repeat(2, -1) + 2.0**-8 * np.abs(expected)
    assert (np.abs(got[..., x.shape[-1] - rotated :].double().numpy() - expected) <= bound).all()
    assert same_bits(got[..., : x.shape[-1] - rotated].contiguous(), x[..., : x.shape[-1] - rotated].contiguous())


SHAPES = {"rows": (512,), "heads_6": (6, 512), "index_heads": (4, 128), "one_head": (1, 512), "all_rotated": (2, 64)}


@pytest.mark.parametrize("inverse", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_rotates(kernel: str, shape: str, inverse: bool) -> None:
    """The tensor has gaps between tokens, which are not written."""
    dims = SHAPES[shape]
    around = normal(TOKENS, 3 + int(np.prod(dims)) // 8, 8, seed=2).flatten(1)
    x = around[:, 16:-8].unflatten(1, dims)
    before = around.clone()
    for frequencies in FREQUENCIES.values():
        original = x.clone()
        for schedule in SCHEDULES:
            assert_rotated(rotate(kernel, x, frequencies, inverse, schedule=schedule), original, frequencies, inverse)
            assert same_bits(around[:, :16].contiguous(), before[:, :16].contiguous())
            assert same_bits(around[:, -8:].contiguous(), before[:, -8:].contiguous())
            around.copy_(before)


def test_the_kernel_finds_heads_that_lie_apart(kernel: str) -> None:
    """The gaps between heads are NaN, and stay NaN."""
    x, frequencies = strided(normal(TOKENS, 6, 512, seed=4), 0, 1, 24), next(iter(FREQUENCIES.values()))
    between = x.as_strided((TOKENS, 6, 24), x.stride(), 512)
    original = x.clone()
    assert_rotated(rotate(kernel, x, frequencies, False), original, frequencies, False)
    assert between.isnan().all()


@pytest.mark.parametrize("rotated", [8, 16, 56])
def test_the_kernel_rotates_other_numbers_of_channels(kernel: str, rotated: int) -> None:
    x, frequencies = normal(TOKENS, 3, 72, seed=3), rope_frequencies(rotated, 10000.0, None)
    assert_rotated(rotate(kernel, x.clone(), frequencies, False), x, frequencies, False)


def test_the_kernel_rotates_a_token_alike_in_any_batch(kernel: str) -> None:
    x, frequencies = normal(TOKENS, 6, 512, seed=4), FREQUENCIES["yarn"]
    x[0, 2, 500] = NAN
    got = rotate(kernel, x.clone(), frequencies, True)
    assert got[0, 2, 500:502].isnan().all() and got.isnan().sum() == 2
    order = torch.tensor([6, 5])
    again = rotate(kernel, x[order, 1:3].contiguous(), frequencies, True, positions=POSITIONS[order])
    assert same_bits(again, got[order, 1:3])


def test_what_the_rotation_refuses(kernel: str) -> None:
    x, frequencies = normal(TOKENS, 2, 512, seed=5), FREQUENCIES["plain"]
    for wrong in (x.float(), x[..., 4:], x[..., :508], x.transpose(1, 2)):
        with pytest.raises(ValueError, match=r"apply_rope: x must be torch\.bfloat16"):
            rotate(kernel, wrong, frequencies, False)
    with pytest.raises(ValueError, match="multiple of 8 rotated channels"):
        rotate(kernel, x, frequencies[:3], False)
    with pytest.raises(ValueError, match=r"takes x \[T, D\] or \[T, H, D\]"):
        rotate(kernel, x[:, None], frequencies, False)
    with pytest.raises(ValueError, match=r"torch.int64 positions and torch.float32 frequencies; got torch.int32"):
        rotate(kernel, x, frequencies, False, positions=POSITIONS.int())


# ---- the norm

DIMS = (8, 128, 512, 1024, 1536, 2048, 4096, 7168)


def normed(kernel: str, x: Tensor, weight: Tensor | None, **options: object) -> Tensor:
    from dsv4_kernels.norm import gpu

    with emulated_row_kernel(kernel, **options):
        return getattr(gpu, kernel)(x, weight, EPS)


def some_rows(count: int, dim: int) -> Tensor:
    """Rows with magnitudes from 2**-20, where eps counts, to 2**40, in a wider tensor."""
    amplitude = torch.tensor([1.0, 2.0**-20, 2.0**40, 3.0, 0.1])[:, None].bfloat16()
    return (normal(5, dim + 16, seed=6) * amplitude)[:count, 8:-8]


def weight_of(dim: int, dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None else (normal(dim, seed=7).float() + 1.5).to(dtype)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(dim, torch.float32) for dim in DIMS] + [(dim, dtype) for dim in (512, 7168) for dtype in (torch.bfloat16, None)],
    ids=str,
)
def test_the_kernel_norms(kernel: str, dim: int, dtype: torch.dtype | None) -> None:
    """Against float64. A lane's chain of 8 squares, 8 chunks, 5 steps over lanes, 8 warps: 30 roundings at most, half
    of whose error passes through the root; rsqrt 2**-22.9; two products; bf16."""
    x, weight = some_rows(5, dim), weight_of(dim, dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    exact = exact if weight is None else exact * weight.double()
    for schedule in SCHEDULES:
        got = normed(kernel, x, weight, schedule=schedule, seed=dim)
        assert ((got.double() - exact).abs() <= (2.0**-8 + (15 + 2.2 + 2) * 2.0**-24) * exact.abs()).all()
        assert (got != norm.rms_norm(x, weight, EPS, impl="ref")).float().mean() < 2e-3


@pytest.mark.parametrize("dim", [1024, 7168])
def test_the_kernel_norms_a_row_alike_in_any_batch(kernel: str, dim: int) -> None:
    """The batches include some whose other rows hold NaN and infinity."""
    x, weight = some_rows(5, dim).contiguous(), weight_of(dim, torch.float32)
    got = normed(kernel, x, weight)
    assert same_bits(normed(kernel, x[3:4], weight), got[3:4])
    x[1, 5], x[4, 7] = NAN, float("inf")
    spoilt = normed(kernel, x.view(5, 1, dim), weight).view(5, dim)
    assert same_bits(spoilt[[0, 2, 3]], got[[0, 2, 3]])
    assert spoilt[1].isnan().all() and spoilt[4, 7].isnan()


def normed_codes(kernel: str, x: Tensor, weight: Tensor | None, column_major: bool) -> tuple[Tensor, Tensor]:
    from dsv4_kernels.norm import gpu

    with emulated_row_kernel(kernel):
        return getattr(gpu, f"{kernel}_fp8")(x, weight, EPS, column_major)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(8, torch.float32), (200, None), (1024, torch.float32), (1536, torch.float32), (7168, torch.bfloat16)],
)
@pytest.mark.parametrize("column_major", [False, True], ids=["rows", "columns"])
def test_the_norm_as_codes(kernel: str, dim: int, dtype: torch.dtype | None, column_major: bool) -> None:
    """Bitwise equal to the quantiser of the norm's result; blocks that the row's end cuts, and a row of NaN."""
    x, weight = some_rows(5, dim).contiguous(), weight_of(dim, dtype)
    x[3, 1] = NAN
    codes, scales = normed_codes(kernel, x, weight, column_major)
    expected, of_blocks = fp8_quantise(normed(kernel, x, weight), 128, column_major, impl="ref")
    finite = [0, 1, 2, 4]
    assert same_bits(codes[finite].view(torch.uint8), expected[finite].view(torch.uint8))
    assert same_bits(scales[finite].contiguous(), of_blocks[finite].contiguous())
    assert scales.stride() == of_blocks.stride() and codes[3].float().isnan().all()
    alone, of_it = normed_codes(kernel, x[2:3], weight, column_major)
    assert same_bits(alone[0].view(torch.uint8), codes[2].view(torch.uint8)) and torch.equal(of_it[0], scales[2])


def test_what_the_norm_refuses(kernel: str) -> None:
    x = some_rows(5, 512)
    with pytest.raises(ValueError, match=r"rms_norm_fp8: x must be torch\.bfloat16"):
        normed_codes(kernel, x.float(), None, True)
    with pytest.raises(ValueError, match=r"rms_norm_fp8 needs x \[T, d\]; got \(5, 1, 512\)"):
        norm.rms_norm_fp8(x[:, None], None, EPS)
    with pytest.raises(ValueError, match=r"rms_norm_fp8: weight has shape \(8,\)"):
        norm.rms_norm_fp8(x, torch.ones(8), EPS)
    for wrong in (x.float(), x[:, 1:505], x[:, ::2][:, :8]):
        with pytest.raises(ValueError, match=r"rms_norm: x must be torch\.bfloat16"):
            normed(kernel, wrong, None)
    with pytest.raises(ValueError, match="at most 16384 channels; got 16392"):
        normed(kernel, torch.zeros(1, 16392).bfloat16(), None)
    with pytest.raises(ValueError, match=r"weight in torch.float32 or torch.bfloat16 .*; got torch.float64"):
        normed(kernel, x, torch.ones(512).double())


def test_no_rows_need_no_launch(kernel: str) -> None:
    from dsv4_kernels.norm import gpu as norms
    from dsv4_kernels.rope import gpu as rotations

    assert getattr(norms, kernel)(torch.zeros(0, 512).bfloat16(), None, EPS).shape == (0, 512)
    codes, scales = getattr(norms, f"{kernel}_fp8")(torch.zeros(0, 512).bfloat16(), None, EPS, True)
    assert codes.shape == (0, 512) and scales.shape == (0, 4)
    nothing = torch.zeros(0, 3, 512).bfloat16()
    getattr(rotations, f"{kernel}_in_place")(nothing, POSITIONS[:0], FREQUENCIES["yarn"], False)


def test_the_kernels_need_no_stack(kernel: str) -> None:
    from ptx_emulator import emulated

    from dsv4_kernels.norm import gpu as norms
    from dsv4_kernels.rope import gpu as rotations

    arch = ARCH[kernel]
    registers = {128: 32, 512: 32, 1024: 56, 1536: 80, 2048: 96, 4096: 48, 7168: 80, 16384: 168}
    functions = {
        f"norm of {dim}": lambda dim=dim: norms.compile(norms.Configuration(dim, "fp32"), arch) for dim in registers
    }
    most = {f"norm of {dim}": count for dim, count in registers.items()}
    for dim, count in ((1024, 64), (1536, 96)):
        as_codes = norms.Configuration(dim, "fp32", is_fp8=True)
        functions[f"codes of {dim}"] = lambda as_codes=as_codes: norms.compile(as_codes, arch)
        most[f"codes of {dim}"] = count
    for heads, count in ((1, 32), (4, 48)):
        functions[f"rotation of {heads}"] = lambda heads=heads: rotations.compile(heads, arch)
        most[f"rotation of {heads}"] = count
    with emulated(arch=arch):
        assert_no_spills(functions, most)


# ---- on a GPU


@pytest.fixture
def kernel_here(kernel_on_gpu: Callable[[str], str]) -> str:
    return kernel_on_gpu("rms_norm")


@pytest.mark.gpu
@pytest.mark.parametrize("inverse", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gpu_rotates(kernel_here: str, shape: str, inverse: bool) -> None:
    x, frequencies = normal(TOKENS, *SHAPES[shape], seed=8), FREQUENCIES["yarn"]
    arguments = (POSITIONS.cuda(), frequencies.cuda(), inverse, kernel_here)
    assert_rotated(apply_rope_in_place(x.cuda(), *arguments).cpu(), x, frequencies, inverse)


@pytest.mark.gpu
def test_the_gpu_rotates_beyond_two_gigabytes(kernel_here: str) -> None:
    x = torch.zeros(2**15 + 8, 64, 512, dtype=torch.bfloat16, device="cuda")
    x[-1] = normal(64, 512, seed=9).cuda()
    positions, frequencies = torch.arange(len(x), device="cuda"), FREQUENCIES["yarn"].cuda()
    last = x[-1:].clone()
    expected = apply_rope_in_place(last, positions[-1:], frequencies, impl=kernel_here)
    apply_rope_in_place(x, positions, frequencies, impl=kernel_here)
    assert same_bits(x[-1:].cpu(), expected.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [1024, 1536])
@pytest.mark.parametrize("count", [1, 5, 8192])
def test_the_gpu_norms_as_codes(kernel_here: str, dim: int, count: int) -> None:
    x, weight = normal(count, dim, seed=10).cuda(), weight_of(dim, torch.float32).cuda()
    found = norm.rms_norm_fp8(x, weight, EPS, True, kernel_here)
    expected = fp8_quantise(norm.rms_norm(x, weight, EPS, kernel_here), 128, True, kernel_here)
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1]) and found[1].stride() == expected[1].stride()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
def test_the_gpu_norms(kernel_here: str, dim: int) -> None:
    """Rows beyond 2 GB have the bits that they have alone."""
    x, weight = some_rows(5, dim), weight_of(dim, torch.float32)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    got = norm.rms_norm(x.cuda(), weight.cuda(), EPS, kernel_here)
    assert ((got.cpu().double() - exact).abs() <= (2.0**-8 + (15 + 2.2 + 2) * 2.0**-24) * exact.abs()).all()
    many = x[:1].cuda().expand(2**31 // (2 * dim) + 5, dim).contiguous()
    many[-5:] = x.cuda()
    assert same_bits(norm.rms_norm(many, weight.cuda(), EPS, kernel_here)[-5:].cpu(), got.cpu())


def test_ops_are_in_the_table() -> None:
    from dsv4_kernels import registry

    for op in ("apply_rope_in_place", "rms_norm", "rms_norm_fp8"):
        assert set(registry.available(op)) == {"sm90", "sm100", "ref"}
