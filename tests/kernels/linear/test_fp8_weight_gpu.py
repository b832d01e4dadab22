"""The grouped product with an FP8 weight, emulated: the bits of RoPE, product and quantiser. Blackwell has the same
source (test_fp8_weight_sm100.py).

Regimes: tokens around every tile and beyond the largest; 1, 2 and 8 output groups; K of one stage a segment, and of
more stages than the ring has; rotation and quantisation each left out; operands and results with gaps, filled with NaN,
rows and groups far apart; all codes, and scales at the ends of bf16.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.early_launches import launched_early
from ops.fp8_weight_cases import FP8, one_by_one, plain, product, same, some, tokens_of, weight
from ops.memory_layout import far_apart, sparse, strided
from ops.number_formats import same_bits
from ops.order_of_summation import as_from_fp8, channels_that_sum_together, in_order
from ops.row_kernels import assert_no_spills, emulated_row_kernel
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.linear import HeadRotation, expand_fp8_weight, grouped_linear, grouped_linear_fp8_weight
from dsv4_kernels.number_formats import dequantise_fp8_weight, quantise_fp8_weight
from dsv4_kernels.quant import fp8_quantise
from dsv4_kernels.rope import apply_rope_in_place, rope_frequencies

pytestmark = pytest.mark.usefixtures("compiled_here")
CUTLASS = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="CuTe DSL is not installed")
TILES = range(6)
"""Numbers of tiles; the last two hold a segment of K = 4096."""
OF_TILES = ["8", "16", "32", "64", "8-resident", "16-resident"]
EACH_TILE = pytest.mark.parametrize(
    "tile", [pytest.param(n, id=OF_TILES[n], marks=pytest.mark.slow if n == 5 else ()) for n in TILES]
)
SCHEDULES = ("late", "random", "random_warps")


MOST_TOKENS = 130


@functools.cache
def case(groups: int, rows: int, channels: int, rotates: bool, quantises: bool) -> tuple:
    """Arguments for MOST_TOKENS tokens, and their results one by one."""
    x, rotation = tokens_of(MOST_TOKENS, groups, channels)
    arguments = x, *weight(groups, rows, channels), rotation if rotates else None, quantises
    return arguments, one_by_one(*arguments)


def first(tokens: int, arguments: tuple) -> tuple:
    x, codes, scale, rotation, quantises = arguments
    return x[:tokens], codes, scale, rotation and some(rotation, slice(tokens)), quantises


SHAPES = {"one": (1, 256, 1024), "two": (2, 128, 512), "eight": (8, 128, 512)}


@CUTLASS
@pytest.mark.parametrize(("shape", "tokens"), [
    *itertools.product(["two"], [1, 2, 7, 8, 9, 16, 17, 33, 64, 65, MOST_TOKENS]),
    *itertools.product(["one"], [2, 33]),
    *itertools.product(["eight"], [1, 16]),
])  # fmt: skip
def test_it_has_the_bits_of_three_kernels(shape: str, tokens: int) -> None:
    """The kernels run with the chosen tile on the first of many tokens: bits do not depend on their number either."""
    arguments, expected = case(*SHAPES[shape], True, True)
    schedule = SCHEDULES[tokens % 3]
    assert same(product(*first(tokens, arguments), schedule=schedule, seed=tokens), [e[:tokens] for e in expected])


@CUTLASS
def test_blackwell_has_the_same_bits() -> None:
    """In the emulator, where `mma.sync` is the same for both; fewer tokens than the chosen tile has."""
    arguments, expected = case(*SHAPES["two"], True, True)
    assert same(product(*first(13, arguments), kernel="sm100", schedule="random"), [e[:13] for e in expected])


@CUTLASS
@pytest.mark.parametrize(("rotates", "quantises"), [(False, False), (True, False), (False, True)])
def test_each_part_may_be_left_out(rotates: bool, quantises: bool) -> None:
    arguments, expected = case(2, 128, 512, rotates, quantises)
    for tokens in (3, 16):
        assert same(product(*first(tokens, arguments), tile=1), [e[:tokens] for e in expected])


@CUTLASS
@EACH_TILE
def test_a_token_has_its_bits_in_every_tile_and_batch(tile: int) -> None:
    """K of more steps than a tile has stages; a token alone, at other indices, in batches with infinities and NaN."""
    x, rotation = tokens_of(21, 1, 4096, seed=3)
    operands = weight(1, 128, 4096, seed=4)
    expected = deep()
    for schedule, rows in zip(SCHEDULES, ([*range(21)], [20, 4], [7]), strict=True):
        got = product(x[rows], *operands, some(rotation, rows), True, tile, schedule=schedule)
        assert same(got, [e[rows] for e in expected])
    spoilt = x.clone()
    spoilt[1::2] = torch.tensor([float("nan"), float("inf")])[torch.arange(10) % 2][:, None, None]
    assert same([g[::2] for g in product(spoilt, *operands, rotation, True, tile)], [e[::2] for e in expected])


@functools.cache
def deep() -> tuple:
    x, rotation = tokens_of(21, 1, 4096, seed=3)
    return one_by_one(x, *weight(1, 128, 4096, seed=4), rotation, True)


@CUTLASS
@EACH_TILE
def test_the_order_of_summation_is_the_product_s(tile: int) -> None:
    """Sums that are 0 in exact arithmetic, of terms that differ by 2^20: the result is rounding error of this order
    only."""
    generator = torch.Generator().manual_seed(13)
    half = 2048 if tile in TILES[4:] else 1024
    x = torch.randn(9, 1, half, generator=generator) * torch.exp2(torch.randint(-10, 11, (half,), generator=generator))
    codes, _ = quantise_fp8_weight(torch.randn(128, half, generator=generator))
    order = torch.randperm(half, generator=generator)
    x = torch.cat([x, -x[..., order]], 2).bfloat16()
    codes = codes.view(torch.uint8)
    codes = torch.cat([codes, codes[:, order]], 1).view(FP8)[None]
    arguments = x, codes, torch.ones(1, 1, 2 * half // 128), None, False
    expected = one_by_one(*arguments)
    assert (expected[0] != 0).float().mean() > 0.9
    assert same(product(*arguments, tile), expected)
    assert same(expected, (in_order(as_from_fp8(x), as_from_fp8(codes.bfloat16())).bfloat16(),))


@CUTLASS
@pytest.mark.parametrize("tile", TILES[:4], ids=OF_TILES[:4])
def test_an_instruction_sums_16_consecutive_channels(tile: int) -> None:
    x, matrix, expected = channels_that_sum_together()
    (got,) = product(x, matrix.to(FP8), torch.ones(1, 4, 4), None, False, tile)
    assert same_bits(got.float(), expected)


@CUTLASS
def test_it_may_begin_early() -> None:
    arguments, expected = case(2, 128, 512, True, True)
    with launched_early():
        got = product(*first(9, arguments))
    assert same(got, [e[:9] for e in expected])


@CUTLASS
def test_it_is_the_definition_s_product() -> None:
    """Within the bound of an fp32 dot product in any order plus a rounding, as is the reference."""
    x, rotation = tokens_of(9, 2, 1024, seed=5)
    codes, scale = weight(2, 256, 1024, seed=6)
    turned = x.clone()
    apply_rope_in_place(turned.unflatten(2, (-1, 512)), rotation.positions, rotation.frequencies, True)
    (got,) = product(x, codes, scale, rotation, False, tile=1)
    reference = grouped_linear_fp8_weight(x, codes, scale, rotation, impl="ref")
    exact = torch.einsum("tgk,gnk->tgn", turned.double(), plain(codes, scale).double())
    magnitude = torch.einsum("tgk,gnk->tgn", turned.double().abs(), plain(codes, scale).double().abs())
    # Cosines differ in their last bits, so a rotated channel midway between two bf16 numbers may round to the other.
    bound = 1024 * 2.0**-24 * magnitude + 2.0**-8 * exact.abs()
    for out, slack in ((got, 2.0**-15), (reference, 0.0)):
        assert ((out.double() - exact).abs() <= bound + slack * magnitude).all()


@CUTLASS
def test_every_code_is_exact_under_every_scale() -> None:
    """One-hot tokens return the weight: all codes but NaN, with scales up to the largest that gives finite weights."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8).repeat(800)
    channels = 512
    codes = codes[: 3 * 128 * channels].view(3, 128, channels)
    exponents = torch.tensor([[-127, -126, -125, -118], [-8, 0, 7, 8], [9, 100, 118, 119]])
    scale = torch.ldexp(torch.ones(3, 1, 4), exponents[:, None])
    x = torch.zeros(16, 3, channels)
    at = torch.arange(16)[:, None] * 31 + torch.arange(3) * 5  # in all blocks
    x.scatter_(2, at[..., None], 1.0)
    (got,) = product(x.bfloat16(), codes.view(FP8), scale, None, False, tile=1)
    expected = plain(codes.view(FP8), scale)
    for token, group in itertools.product(range(16), range(3)):
        assert torch.equal(got[token, group], expected[group, :, at[token, group]]), (token, group)
    assert set((at // 128).flatten().tolist()) == {0, 1, 2, 3}


# ---- layouts and addresses


def far(x: Tensor) -> Tensor:
    return far_apart(x.view(torch.uint8) if x.dtype == FP8 else x, 16).view(x.dtype)


FAR = ("x_tokens", "x_groups", "code_rows", "code_groups", "scale_rows", "scale_groups")


@CUTLASS
@pytest.mark.parametrize(
    ("what", "tile"),
    [
        *((what, 0) for what in FAR),
        *(pytest.param(what, 4, marks=() if what in ("x_tokens", "code_rows") else pytest.mark.slow) for what in FAR),
    ],
)
def test_operands_beyond_32_bits(what: str, tile: int) -> None:
    """Tokens in several tiles; rows of the weight also at 31 times their stride: a thread's first row."""
    groups, rows = (4, 128) if what.endswith("groups") else (1, 512 if what == "scale_rows" else 256)
    channels = 4096 if tile in TILES[4:] else 512
    x, rotation = tokens_of(17 if tile == 0 else 5, groups, channels, seed=7)
    codes, scale = weight(groups, rows, channels, seed=8)
    expected = product(x, codes, scale, rotation, True, tile=tile)
    if what == "x_tokens":
        x = far(x.contiguous())
    elif what == "x_groups":
        x = far(x.transpose(0, 1).contiguous()).transpose(0, 1)
    elif what == "code_rows":
        apart = sparse((1, rows, channels), (0, 72 << 20 if tile == 0 else 144 << 20, 1), torch.uint8)
        codes = apart.copy_(codes.view(torch.uint8)).view(FP8)
    elif what == "code_groups":
        codes = far(codes.contiguous())
    elif what == "scale_rows":
        scale = far(scale[0].contiguous())[None]
    else:
        scale = far(scale.contiguous())
    assert same(product(x, codes, scale, rotation, True, tile=tile, in_place=[x, codes, scale]), expected)


@CUTLASS
@pytest.mark.parametrize("what", ["tokens", "groups", "scale_tokens", "scale_blocks", "bf16_tokens", "bf16_groups"])
def test_results_beyond_32_bits(what: str) -> None:
    from dsv4_kernels.linear import fp8_weight_gpu

    x, rotation = tokens_of(5, 4, 512, seed=9)
    operands = weight(4, 128, 512, seed=10)
    quantises = not what.startswith("bf16")
    expected = product(x, *operands, rotation, quantises, tile=1)
    out = torch.zeros(5, 4, 128, dtype=torch.uint8 if quantises else torch.bfloat16)
    scales = torch.zeros(5, 4)
    if what.endswith("tokens") and what != "scale_tokens":
        out = far(out)
    elif what.endswith("groups"):
        out = far(out.transpose(0, 1).contiguous()).transpose(0, 1)
    elif what == "scale_tokens":
        scales = far(scales)
    else:
        scales = far(scales.T.contiguous()).T
    outs = (out.view(FP8), scales) if quantises else (out,)
    with emulated_row_kernel("sm90", in_place=[x, *operands, *outs]):
        fp8_weight_gpu.run("sm90", x, *operands, rotation, *outs, tile=fp8_weight_gpu.TILES[1])
    assert same(tuple(out.contiguous() for out in outs), expected)


# ---- the op


@CUTLASS
def test_the_op_is_the_kernel() -> None:
    """Columns of scales lie as the next product reads them; without tokens nothing is launched."""
    from dsv4_kernels.linear import fp8_weight_gpu

    arguments, expected = case(2, 128, 512, True, True)
    with emulated_row_kernel("sm90"):
        codes, scales = fp8_weight_gpu.sm90(*first(5, arguments))
        none = fp8_weight_gpu.sm90(*first(0, arguments))
        assert fp8_weight_gpu.sm90(*first(0, arguments)[:3], None, False).shape == (0, 2, 128)
    assert same((codes, scales), [e[:5] for e in expected])
    assert codes.is_contiguous() and scales.stride() == (1, 8)
    assert none[0].shape == (0, 256) and none[1].shape == (0, 2)


def test_the_reference_is_made_of_the_other_ops() -> None:
    """On a CPU, any sizes: half a block of rows and of channels, heads of 16."""
    generator = torch.Generator().manual_seed(0)
    pairs = [quantise_fp8_weight(torch.randn(192, 160, generator=generator)) for _ in range(3)]
    codes, scale = torch.stack([p[0] for p in pairs]), torch.stack([p[1].float() for p in pairs])
    x = torch.randn(4, 3, 160, generator=generator)
    rotation = HeadRotation(torch.tensor([5, 0, 900, 7]), rope_frequencies(8, 10000.0, None), 16)
    turned = x.clone()
    apply_rope_in_place(turned.unflatten(2, (-1, 16)), rotation.positions, rotation.frequencies, inverse=True)
    matrix = torch.stack([dequantise_fp8_weight(*pair, torch.float32) for pair in zip(codes, scale, strict=True)])
    expected = grouped_linear(turned, matrix, impl="ref")
    assert same_bits(grouped_linear_fp8_weight(x, codes, scale, rotation), expected)
    assert same_bits(grouped_linear_fp8_weight(x, codes, scale), grouped_linear(x, matrix, impl="ref"))
    made = grouped_linear_fp8_weight(x, codes[:, :128], scale[:, :1], rotation, quantises=True)
    assert same(made, fp8_quantise(expected[:, :, :128].flatten(1), 128, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_expanded_weight_is_the_dequantised_one(dtype: torch.dtype) -> None:
    codes, scale = weight(2, 256, 512)
    expected = torch.stack([dequantise_fp8_weight(*pair, dtype) for pair in zip(codes, scale, strict=True)])
    out = torch.full(codes.shape, float("nan"), dtype=dtype)
    assert expand_fp8_weight(codes, scale, out) is out
    assert same_bits(out, expected)


def mistakes() -> Iterator[object]:
    x, rotation = tokens_of(2, 2, 512)
    codes, scale = weight(2, 128, 512)
    good = {"x": x, "weight": codes, "scale": scale}
    wrong: dict[str, tuple[dict, str]] = {
        "groups": ({"x": x[:, :1]}, "do not fit each other"),
        "channels": ({"x": x[..., :256]}, "do not fit each other"),
        "scale_shape": ({"scale": scale[:, :, :3]}, r"expected torch.float8_e4m3fn and torch.float32 \(2, 1, 4\)"),
        "scale_dtype": ({"scale": scale.bfloat16()}, "scale torch.bfloat16"),
        "weight_dtype": ({"weight": codes.bfloat16()}, "weight is torch.bfloat16"),
        "positions": ({"rotation": some(rotation, slice(1))}, r"positions have shape \(1,\).*expected \(2,\)"),
        "heads": ({"rotation": rotation._replace(head_dim=384)}, "heads of 384 channels, of which 64 are turned"),
        "rows": ({"weight": codes[:, :64], "quantises": True}, "64 rows of a group"),
    }
    for name, (change, message) in wrong.items():
        yield pytest.param(good | change, None, message, id=name)
    apart = strided(rotation.positions[:, None], 0, 1)[:, 0]
    of_kernel: dict[str, tuple[dict, str]] = {
        "fp32": ({"x": x.float()}, "x must be torch.bfloat16"),
        "few_rows": ({"weight": codes[:, :64], "scale": scale}, "N in multiples of 128 and K in multiples of 512"),
        "few_channels": (
            {"x": x[..., :256], "weight": codes[..., :256], "scale": scale[..., :2]},
            "K in multiples of 512",
        ),
        "weight_columns": ({"weight": strided(codes.view(torch.uint8), 0, 0, 1).view(FP8)}, "multiples of 16 bytes"),
        "scale_columns": ({"scale": strided(scale[..., None], 0, 0, 0, 1)[..., 0]}, "contiguous in its last"),
        "small_heads": ({"rotation": rotation._replace(head_dim=256)}, "got 64 of 256"),
        "int32": ({"rotation": rotation._replace(positions=rotation.positions.int())}, "torch.int32"),
        "spread": ({"rotation": rotation._replace(positions=apart)}, "contiguous positions"),
    }  # fmt: skip
    for name, (change, message) in of_kernel.items():
        yield pytest.param(good | change, "sm90", message, id=f"kernel-{name}")


@pytest.mark.parametrize(("arguments", "impl", "message"), mistakes())
def test_what_is_refused(arguments: dict, impl: str | None, message: str) -> None:
    if impl is None:
        with pytest.raises(ValueError, match=message):
            grouped_linear_fp8_weight(**arguments)
        return
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.linear import fp8_weight_gpu

    with pytest.raises(ValueError, match=message):
        fp8_weight_gpu.sm90(**({"rotation": None, "quantises": False} | arguments))


def test_hopper_and_blackwell_get_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for generation, name in ((9, "sm90"), (10, "sm100"), (12, "ref")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, g=generation: (g, 0))
        found = registry.chosen("grouped_linear_fp8_weight", torch.device("cuda", 0), torch.bfloat16)
        assert found.name == name and found.graph_safe
        assert found.batch_invariant == (name != "ref")


@CUTLASS
@pytest.mark.parametrize("larger", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "16-resident"])
def test_registers_and_shared_memory(larger: bool) -> None:
    """Two CTAs of any tile share a multiprocessor: 228 KiB, each CTA takes 1 KiB more than its own, and 65,536
    registers."""
    from ptx_emulator import emulated

    from dsv4_kernels.linear import fp8_weight_gpu as gpu

    functions, most = {}, {}
    for tile in gpu.RESIDENT[1:] if larger else (*gpu.TILES, *gpu.RESIDENT[:1]):
        assert tile.shared_bytes + 16 + 1024 <= 228 * 1024 // 2
        functions[str(tile)] = lambda tile=tile: gpu.compile(gpu.Configuration(tile, True, True), "sm_90a")
        most[str(tile)] = min(255, 65_536 // 2 // tile.threads)
    with emulated(arch="sm_90a"):
        assert_no_spills(functions, most)
    assert [gpu.chosen(tokens).tokens for tokens in (1, 8, 9, 16, 17, 32, 33, 64, 65, 8192)] == [
        *(8, 8, 16, 16, 32, 32, 64, 64, 64, 64)
    ]


def test_a_segment_is_held_where_each_multiprocessor_has_one_cta() -> None:
    """Flash on four ranks, and no model whose K has other segments."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.linear import fp8_weight_gpu as gpu

    four_ranks, two_ranks = 2 * 8, 4 * 8
    found = [gpu.chosen(tokens, four_ranks, 8, 132) for tokens in (1, 8, 9, 16, 17)]
    assert found == [*(gpu.RESIDENT[:1] * 2), *(gpu.RESIDENT[1:] * 2), gpu.TILES[2]]
    for other in ((two_ranks, 8, 132), (four_ranks, 8, 114), (four_ranks, 7, 132)):
        assert gpu.chosen(1, *other) == gpu.TILES[0]
    x, rotation = tokens_of(1, 1, 512)
    with pytest.raises(ValueError, match=r"holds segments of 8 steps; K 512 has 1"):
        gpu.sm90(x, *weight(1, 128, 512), rotation, True, tile=gpu.RESIDENT[0])


@CUTLASS
def test_a_weight_is_read_ahead() -> None:
    """The kernel of few output groups, of two groups and two tiles of rows: 32 CTAs; and a launch that may not read
    ahead."""
    from ptx_emulator import EmulationError

    from dsv4_kernels.linear import fp8_weight_gpu as gpu

    resident = len(gpu.TILES)  # by name: the choice depends on the multiprocessors, which an earlier test may have set
    x, rotation = tokens_of(3, 2, 4096, seed=3)
    operands = weight(2, 256, 4096, seed=4)
    expected = product(x, *operands, rotation, True, tile=0)
    ahead = {"grouped_linear_fp8_weight_resident": ("LDGSTS",) * 33}
    with launched_early(read_ahead=ahead):
        assert same(product(x, *operands, rotation, True, resident, schedule="random", seed=1), expected)
    with dependent_launch.switched(True), pytest.raises(EmulationError, match=r"before griddepcontrol\.wait"):
        product(x, *operands, rotation, True, resident, is_constant=False)


@CUTLASS
def test_shared_memory_is_read_without_conflicts() -> None:
    """Over the whole of K, and for the segments' sums; the rotation is left out."""
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.linear import fp8_weight_gpu as gpu

    for tile in (*gpu.TILES, *gpu.RESIDENT[:1]):
        x, _ = tokens_of(tokens := tile.tokens, 1, 4096)
        operands = weight(1, 128, 4096)
        with emulated(checks=Checks.strict(), arch="sm_90a") as device:
            for constant in operands:
                device.memory.constant(constant)
            out = torch.empty(tokens, 1, 128, dtype=torch.bfloat16)
            gpu.run("sm90", x, *operands, None, out, tile=tile)
        (report,) = device.reports
        assert report.shared_conflicts == 0, tile


@pytest.mark.slow
@CUTLASS
@pytest.mark.parametrize("tile", [1, 3, 4], ids=["16", "64", "8-resident"])
def test_deleted_synchronisation_is_noticed(tile: int) -> None:
    """Every deletion is noticed, except those explained in emulator/results/mutation_reasons.json."""
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.linear import fp8_weight_gpu

    chosen = (*fp8_weight_gpu.TILES, *fp8_weight_gpu.RESIDENT)[tile]
    channels = 2560 if tile < 4 else 4096
    x, rotation = tokens_of(10 if tile < 4 else 8, 1, channels, seed=11)
    codes, scale = weight(1, 128, channels, seed=12)
    with emulated(checks=Checks.strict(), arch="sm_90a", record=True) as device:
        for constant in (codes, scale):
            device.memory.constant(constant)
        fp8_weight_gpu.sm90(x, codes, scale, rotation, True, tile=chosen)
    rates = delete_synchronisation(f"fp8_weight_{chosen.tokens}{'_resident' if tile >= 4 else ''}", device)
    assert rates and set(rates.values()) == {1}, rates


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [8, 4, 2])
def test_a_gpu_has_the_bits_of_three_kernels(groups: int, kernel_on_gpu: Callable[[str], str]) -> None:
    """Flash's sizes, whole and as one of two and four ranks; a token alone, in any batch, and in a graph's replays."""
    kernel = kernel_on_gpu("grouped_linear_fp8_weight")
    x, rotation = tokens_of(200, groups, 4096)
    x, rotation = x.cuda(), HeadRotation(rotation.positions.cuda(), rotation.frequencies.cuda(), 512)
    codes, scale = (t.cuda() for t in weight(groups, 1024, 4096))
    turned = x.clone()
    apply_rope_in_place(turned.unflatten(2, (-1, 512)).flatten(1, 2), *rotation[:2], inverse=True)
    matrix = expand_fp8_weight(codes, scale, torch.empty(codes.shape, dtype=torch.bfloat16, device="cuda"))
    whole = grouped_linear(turned, matrix, impl=kernel)
    exact = torch.einsum("tgk,gnk->tgn", turned[:40].double(), matrix.double())
    assert (whole[:40].double() - exact).norm() <= 2.0**-8 * exact.norm()
    expected = fp8_quantise(whole.flatten(1), 128, True)
    for tokens in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 200):
        for rows in (slice(tokens), slice(200 - tokens, 200)):
            arguments = x[rows], codes, scale
            assert torch.equal(grouped_linear_fp8_weight(*arguments, some(rotation, rows)), whole[rows]), tokens
            made = grouped_linear_fp8_weight(*arguments, some(rotation, rows), quantises=True)
            assert same(made, [e[rows] for e in expected]), tokens
    for tokens in (1, 16, 64):
        held, positions = torch.zeros_like(x[:tokens]), torch.zeros_like(rotation.positions[:tokens])
        arguments = held, codes, scale, rotation._replace(positions=positions), True
        grouped_linear_fp8_weight(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = grouped_linear_fp8_weight(*arguments)
        for begin in (0, 64, 130):
            rows = slice(begin, begin + tokens)
            held.copy_(x[rows])
            positions.copy_(rotation.positions[rows])
            graph.replay()
            assert same(made, [e[rows] for e in expected])
