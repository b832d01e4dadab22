"""The batch-invariant products, emulated: against float64, and the same bits from every tile, in every batch.

Regimes: K of one chunk and less, with segments of unequal length and empty ones, and ends inside a chunk; one row and
token too many for a tile, and one too few; output groups; operands and results with gaps, filled with NaN; rows far
apart.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.early_launches import launched_early
from ops.memory_layout import far_apart, strided
from ops.number_formats import same_bits
from ops.order_of_summation import channels_that_sum_together, in_order
from ops.row_kernels import ARCH, KERNELS, SCHEDULES, assert_no_spills, emulated_row_kernel
from selection.marks import with_slow_marks
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.linear import grouped_linear, linear_fp32

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
MMA = ("16x16", "64x16", "64x64", "128x128")
CLUSTER = ("32x16", "32x32", "64x32", "64x64", "96x16", "96x32", "96x64")
WGMMA = ("64x32", "64x64", "64x128", "128x64", "128x128", "128x192")
TILES = [
    *[(kernel, name) for kernel in KERNELS for name in MMA],
    *[("sm100", f"cluster {name}") for name in CLUSTER],
    *[("sm90", f"wgmma {name}") for name in WGMMA],
]
"""Rows and tokens of each tile, by kernel."""
QUICK_CLUSTERS = ("cluster 32x16", "cluster 64x64", "cluster 96x64")
EACH_TILE = pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        pytest.param(*pair, marks=pytest.mark.slow if "cluster" in pair[1] and pair[1] not in QUICK_CLUSTERS else ())
        for pair in TILES
    ],
    ids=["-".join(pair) for pair in TILES],
    indirect=["kernel"],
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, compiled_here: None) -> str:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    return request.param


def tile_named(name: str | None) -> object:
    """The tile with this name in `TILES`; None for None."""
    from dsv4_kernels.linear import gpu

    if name is None:
        return None
    kind, _, size = name.rpartition(" ")
    tiles = {"": gpu.TILES, "cluster": gpu.CLUSTER_TILES, "wgmma": list(gpu.HOPPER_TILES)[1:]}[kind]
    return next(tile for tile in tiles if f"{tile.rows}x{tile.tokens}" == size)


def product(
    kernel: str, x: Tensor, weight: Tensor, tile: str | None, dtype: torch.dtype = torch.float32, **options: object
) -> Tensor:
    """`x [T, G, K]` times `weight [G, N, K]` by the kernel, in a tensor with gaps that must not be written."""
    from dsv4_kernels.linear import gpu

    shape = (x.shape[0], *weight.shape[:2])
    out = strided(torch.zeros(shape, dtype=dtype), 1, 2, 4 if tile is not None and "wgmma" in tile else 3)
    # Tiles of few tokens read the weight of `linear_fp32`, whose results are fp32, before the previous kernel ends.
    constant = (weight,) if dtype == torch.float32 else ()
    with emulated_row_kernel(kernel, constant=constant, **options):
        gpu.run(kernel, "a test", x, weight, out, tile_named(tile))
    whole = out._base
    assert whole is not None and int(whole.isnan().sum() - out.isnan().sum()) == whole.numel() - out.numel()
    return out.contiguous()


def assert_products(got: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within the bound of an fp32 dot product in any order, and one rounding to the result's dtype."""
    exact = torch.einsum("tgk,gnk->tgn", x.double(), weight.double())
    magnitude = torch.einsum("tgk,gnk->tgn", x.double().abs(), weight.double().abs())
    bound = x.shape[2] * 2.0**-24 * magnitude + ULP[got.dtype] * exact.abs()
    assert ((got.double() - exact).abs() <= bound).all()


@EACH_TILE
@pytest.mark.parametrize("channels", with_slow_marks([8, 64, 264, 520], quick=[8, 264]), ids="K{}".format)
def test_it_multiplies(kernel: str, tile: str, channels: int) -> None:
    """Two output groups, 65 rows and 17 tokens: one beyond a tile; for `wgmma`, which writes pairs, 66 rows and a token
    beyond. Gaps between rows and missing channels are NaN."""
    rows, tokens = (66, tile_named(tile).tokens + 1) if "wgmma" in tile else (65, 17)
    x = strided(normal(tokens, 2, channels, seed=0), 1, 1, 8)
    weight = strided(normal(2, rows, channels, seed=1), 1, 3, 16)
    for dtype, schedule in zip(ULP, SCHEDULES, strict=True):
        assert_products(product(kernel, x, weight, tile, dtype, schedule=schedule), x, weight)


@pytest.mark.parametrize("channels", [24, 192, 584], ids="K{}".format)
def test_every_tile_gives_the_same_bits(kernel: str, channels: int) -> None:
    """Sums that cancel: another order would change the last bits of most of them."""
    x, weight = normal(19, 1, channels, seed=2), normal(1, 70, channels, seed=3)
    x, weight = torch.cat([x, -x], 2), torch.cat([weight, weight.roll(1, 2)], 2)
    bits = [product(kernel, x, weight, tile) for its, tile in TILES if its == kernel]
    assert len(bits) >= 4 and all(same_bits(bits[0], other) for other in bits[1:])
    other_order = (x[..., ::8].float() @ weight[0, :, ::8].float().T) + 0  # another order than the kernel's
    assert not same_bits(bits[0][:, 0], other_order[:, 0])


@EACH_TILE
def test_an_instruction_sums_16_consecutive_channels(kernel: str, tile: str) -> None:
    x, weight, expected = channels_that_sum_together()
    assert same_bits(product(kernel, x, weight.bfloat16(), tile), expected)


@pytest.mark.parametrize("channels", [24, 192, 584], ids="K{}".format)
def test_channels_are_summed_in_order(kernel: str, channels: int) -> None:
    """The cases include a K that ends inside an instruction, segments of unequal length, and empty segments."""
    x, weight = normal(5, 2, channels, seed=14), normal(2, 17, channels, seed=15)
    x, weight = torch.cat([x, -x], 2), torch.cat([weight, weight.roll(1, 2)], 2)
    expected = in_order(x, weight)
    assert same_bits(product(kernel, x, weight, "16x16"), expected)
    assert not same_bits(in_order(x.flip(2), weight.flip(2)), expected)


@EACH_TILE
def test_shared_memory_is_read_without_conflicts(kernel: str, tile: str) -> None:
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.linear import gpu

    x, weight, out = normal(16, 1, 512, seed=16), normal(1, 32, 512, seed=17), torch.empty(16, 1, 32)
    with emulated(checks=Checks.strict(), arch=ARCH[kernel]) as device:
        device.memory.constant(weight)
        gpu.run(kernel, "a test", x, weight, out, tile_named(tile))
    assert not any(report.shared_conflicts for report in device.reports)


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [*[(kernel, None) for kernel in KERNELS], *TILES],
    ids=[*[f"{kernel}-chosen" for kernel in KERNELS], *["-".join(pair) for pair in TILES]],
    indirect=["kernel"],
)
def test_a_token_has_its_bits_in_any_batch(kernel: str, tile: str | None) -> None:
    """Alone, first or last, in batches with infinities and NaN and larger than a tile: the bits that it has in a batch
    of 18."""
    x, weight = normal(18, 2, 328, seed=4), normal(2, 34, 328, seed=5)
    whole = product(kernel, x, weight, "16x16")
    for order in ([7], [17, 3], [16, 0, 5, 2, 9]):
        assert same_bits(product(kernel, x[order], weight, tile), whole[order])
    spoilt = x.repeat(8, 1, 1)
    spoilt[18:] = torch.tensor([float("nan"), float("inf")])[torch.arange(7 * 18) % 2][:, None, None]
    assert same_bits(product(kernel, spoilt, weight, tile)[:18], whole)


@EACH_TILE
def test_products_at_the_ends(kernel: str, tile: str) -> None:
    """Sums that are subnormal in fp32, near its largest number, and beyond it; products with zeros of both signs."""
    x, weight = torch.ones(4, 1, 72), torch.ones(1, 4, 72)
    x[0], x[1], x[2], x[3] = 2.0**-70, 2.0**60, 2.0**100, -0.0
    weight[0, 0], weight[0, 1], weight[0, 2] = 2.0**-75, 2.0**61, 2.0**20
    weight[0, 3] = torch.tensor([1.0, -1.0]).repeat(36)
    got = product(kernel, x.bfloat16(), weight.bfloat16(), tile)[:, 0]
    exact = x[:, 0].double() @ weight[0].double().T
    expected = exact.float()  # every partial sum is exact, or infinite
    assert expected[0, 0] == 72 * 2.0**-145 and expected[1, 1] == 72 * 2.0**121 and expected[2, 1].isinf()
    assert torch.equal(got, expected) and not got[3].any() and not got[:, 3].any()


def test_rows_beyond_32_bits(kernel: str) -> None:
    """Rows of tokens, of the weight and of the result at distances whose bytes and elements exceed 32 bits."""
    from dsv4_kernels.linear import gpu

    x, weight, out = normal(4, 1, 72, seed=6), normal(1, 4, 72, seed=7), torch.zeros(4, 1, 4)
    expected = product(kernel, x, weight, "16x16")
    far_x, far_weight, far_out = far_apart(x), far_apart(weight[0]).unsqueeze(0), far_apart(out)
    for tile in gpu.tiles(ARCH[kernel]) if kernel == "sm90" else (*gpu.CLUSTER_TILES[:1], *gpu.TILES):
        far_out.zero_()
        with emulated_row_kernel(kernel, in_place=[far_x, far_weight, far_out], constant=[far_weight]):
            gpu.run(kernel, "a test", far_x, far_weight, far_out, tile)
        assert same_bits(far_out.contiguous(), expected)


def test_groups_beyond_32_bits(kernel: str) -> None:
    x, weight = normal(2, 4, 72, seed=8), normal(4, 4, 72, seed=9)
    expected = product(kernel, x, weight, "16x16")
    far_weight, far_x = far_apart(weight), far_apart(x.transpose(0, 1).contiguous()).transpose(0, 1)
    for tile in ["64x16", "wgmma 64x32" if kernel == "sm90" else "cluster 32x16"]:
        assert same_bits(product(kernel, far_x, far_weight, tile, in_place=[far_x, far_weight]), expected)


@pytest.mark.parametrize("tile", ["wgmma 64x32", "wgmma 128x192"])
def test_a_cta_takes_several_tiles(tile: str, monkeypatch: pytest.MonkeyPatch, compiled_here: None) -> None:
    """More tiles, of all output groups, than multiprocessors; stages are refilled many times."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.linear import gpu

    monkeypatch.setattr(gpu, "multiprocessors", lambda device: 3)
    x, weight = normal(tile_named(tile).tokens + 5, 2, 584, seed=18), normal(2, 140, 584, seed=19)
    for schedule in SCHEDULES:
        assert same_bits(product("sm90", x, weight, tile, schedule=schedule), in_order(x, weight))


@pytest.mark.parametrize("tile", QUICK_CLUSTERS)
def test_a_segment_is_longer_than_the_stages(tile: str, compiled_here: None) -> None:
    """Segments of 18 and 19 chunks, which refill every stage; more tiles of rows and of tokens than one."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    rows, tokens = tile_named(tile).rows + 9, tile_named(tile).tokens + 5
    x, weight = normal(tokens, 1, 2360, seed=24), normal(1, rows, 2360, seed=25)
    x, weight = torch.cat([x, -x], 2), torch.cat([weight, weight.roll(1, 2)], 2)
    expected = in_order(x, weight)
    for schedule in SCHEDULES:
        assert same_bits(product("sm100", x, weight, tile, schedule=schedule), expected)


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [("sm90", "wgmma 64x32"), ("sm90", "wgmma 128x64"), ("sm100", "cluster 96x16")],
    indirect=["kernel"],
)
def test_deleted_synchronisation_is_noticed(kernel: str, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `wgmma` kernel and the clusters', with every wait, arrival and fence deleted in turn."""
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.linear import gpu

    monkeypatch.setattr(gpu, "multiprocessors", lambda device: 2)
    size = (70, 260, 1160) if kernel == "sm90" else (20, 100, 2504)
    x, weight, out = (
        normal(size[0], 1, size[2], seed=20),
        normal(1, *size[1:], seed=21),
        torch.empty(size[0], 1, size[1]),
    )
    with emulated(checks=Checks.strict(), arch=ARCH[kernel], record=True, schedule="late") as device:
        if kernel == "sm100":
            device.memory.constant(weight)
        gpu.run(kernel, "a test", x, weight, out, tile_named(tile))
    rates = delete_synchronisation(f"linear_{tile.replace(' ', '_')}", device)
    assert rates and set(rates.values()) == {1}, rates


def test_it_may_begin_early(kernel: str) -> None:
    x, weight = normal(3, 2, 264, seed=1), normal(2, 40, 264, seed=2)
    with launched_early():
        assert_products(product(kernel, x, weight, None, torch.bfloat16), x, weight)


@pytest.mark.parametrize(
    ("kernel", "tile", "name", "copies"),
    [
        ("sm90", "16x16", "linear", 12),
        ("sm100", "64x16", "linear", 24),
        ("sm100", "cluster 32x16", "linear_cluster", 30),
    ],
    indirect=["kernel"],
)
def test_a_tile_of_few_tokens_reads_the_weight_of_linear_fp32_ahead(
    kernel: str, tile: str, name: str, copies: int
) -> None:
    """Each thread copies its units of the weight for each stage but one before the wait, and no tokens; results in bf16
    are `grouped_linear`'s, whose weight the kernel before may write."""
    x, weight = normal(3, 2, 264, seed=1), normal(2, 40, 264, seed=2)
    with launched_early(read_ahead={name: ("LDGSTS",) * copies}):
        assert_products(product(kernel, x, weight, tile), x, weight)
    with launched_early():
        assert_products(product(kernel, x, weight, tile, torch.bfloat16), x, weight)
    with dependent_launch.switched(False):
        assert_products(product(kernel, x, weight, tile), x, weight)


def test_a_result_that_has_no_pairs(compiled_here: None) -> None:
    """An odd number of rows gets a tile that writes one row at a time; a tile that writes two refuses it."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.linear import gpu

    x, weight = normal(300, 1, 72, seed=22), normal(1, 3, 72, seed=23)
    assert same_bits(product("sm90", x, weight, None), in_order(x, weight))
    with pytest.raises(ValueError, match=r"writes two rows at a time; the result has shape \(300, 1, 3\)"):
        gpu.run("sm90", "a test", x, weight, torch.empty(300, 1, 3), tile_named("wgmma 64x64"))


def test_the_op_is_the_kernel(kernel: str) -> None:
    """The public functions, by name; the result is contiguous. Without tokens nothing is launched."""
    from dsv4_kernels.linear import gpu

    x, weight = normal(5, 3, 40, seed=10), normal(3, 9, 40, seed=11)
    with emulated_row_kernel(kernel):
        many = getattr(gpu, f"{kernel}_grouped_linear")(x, weight)
    with emulated_row_kernel(kernel, constant=[weight[1]]):
        one = getattr(gpu, f"{kernel}_linear_fp32")(x[:, 1], weight[1])
        assert getattr(gpu, f"{kernel}_linear_fp32")(x[:0, 1], weight[1]).shape == (0, 9)
    assert many.is_contiguous() and many.dtype == torch.bfloat16
    assert same_bits(one.bfloat16(), many[:, 1].contiguous())
    assert_products(one.unsqueeze(1), x[:, 1:2], weight[1:2])


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(3, 40), torch.zeros(2, 40).bfloat16(), "linear_fp32: x must be torch.bfloat16"),
        (torch.zeros(3, 40).bfloat16(), torch.zeros(2, 40), "linear_fp32: weight must be torch.bfloat16"),
        (torch.zeros(3, 12).bfloat16(), torch.zeros(2, 12).bfloat16(), "a multiple of 8"),
        (torch.zeros(40, 8).bfloat16().T, torch.zeros(2, 40).bfloat16(), "contiguous channels"),
    ],
    ids=["fp32_x", "fp32_weight", "channels", "columns"],
)
def test_what_is_refused(x: Tensor, weight: Tensor, message: str) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.linear import gpu

    with pytest.raises(ValueError, match=message):
        gpu.sm90_linear_fp32(x, weight)


@pytest.mark.parametrize(("rows", "groups"), [(256, 1), (1024, 1), (2624, 1), (1024, 8), (129_280, 1)], ids=str)
def test_the_choice_of_a_tile(rows: int, groups: int) -> None:
    """Blackwell: clusters where the weight has few rows and the call few tokens, the large tile for a chunk. A large
    weight is not read again for every 16 tokens. Hopper never gets a cluster."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.linear import gpu

    chosen = {tokens: gpu.chosen("sm_100a", tokens, rows, groups, 148) for tokens in (1, 16, 64, 128, 512, 8192)}
    assert chosen[8192] is gpu.TILES[3]
    assert (chosen[512] is gpu.TILES[3]) == (rows * groups >= 8192)  # logits: large tiles, not many small ones
    for tokens in (1, 16, 64):
        assert chosen[tokens].ctas == 4 or rows * groups >= 8192
    if rows * groups >= 8192:
        assert chosen[64].tokens == 64
        assert chosen[1].tokens == 16
    else:
        ctas = [
            -(-rows // tile.rows) * -(-tokens // tile.tokens) * 4 for tokens, tile in chosen.items() if tokens == 64
        ]
        assert 100 < ctas[0] <= 148
    on_hopper = {tokens: gpu.chosen("sm_90a", tokens, rows, groups, 132) for tokens in (1, 16, 64, 128, 8192)}
    assert on_hopper[8192].rows == 128 and on_hopper[8192].tokens >= 128
    assert not any(tile in gpu.CLUSTER_TILES for tile in on_hopper.values())
    if rows * groups < 8192:
        assert on_hopper[1] is on_hopper[16] is gpu.TILES[0]
    else:
        assert on_hopper[128].tokens == 128


def test_two_clusters_share_their_multiprocessors() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.linear import gpu

    assert all(gpu.resident(tile) >= 2 for tile in gpu.CLUSTER_TILES)


def test_the_choice_is_near_the_best_that_was_measured() -> None:
    """Within 1.5 % of the fastest tile in the geometric mean of the committed sweep, and within 5 % in each case. Not
    counted: clusters, which Hopper never gets and whose weight the sweep reads ahead (docs/log/linear_hopper.md)."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from lib.invariant_linear_layers import LAYERS, name_of

    from dsv4_kernels.linear import gpu

    cases = json.loads((RESULTS / "invariant_linear_h200.json").read_text())["cases"]
    regrets = []
    for case in cases:
        name, _, tokens = case["name"].rpartition("-t")
        groups, rows = LAYERS[name]
        keys = (key for key in case if key.startswith("ours") and key.endswith("_us"))
        times = {key: case[key] for key in keys if not key.startswith("ours_by_c")}
        tile = name_of(gpu.chosen("sm_90a", int(tokens), rows, groups, 132))
        if f"{tile}_us" in times:
            regrets.append(math.log(times[f"{tile}_us"] / min(times.values())))
    assert len(regrets) > 40 and math.exp(statistics.mean(regrets)) < 1.015
    assert math.exp(max(regrets)) < 1.05


@EACH_TILE
def test_registers(kernel: str, tile: str) -> None:
    from ptx_emulator import emulated

    from dsv4_kernels.linear import gpu

    its = tile_named(tile)
    functions = {
        str(fp32): lambda fp32=fp32: gpu.compile(gpu.configuration(its, fp32), ARCH[kernel]) for fp32 in (True, False)
    }
    most = min(255, 65_536 // its.threads)
    with emulated(arch=ARCH[kernel]):
        assert_no_spills(functions, dict.fromkeys(functions, most))


@pytest.mark.parametrize(("major", "default"), [(9, "sm90"), (10, "cublas"), (8, "cublas")])
def test_who_multiplies(monkeypatch: pytest.MonkeyPatch, major: int, default: str) -> None:
    """Hopper uses these kernels, which are as fast as cuBLAS; Blackwell only where batch invariance is required."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    cuda = torch.device("cuda", 0)
    for op in ("linear_fp32", "grouped_linear"):
        assert registry.chosen(op, cuda, torch.bfloat16).name == default
        registry.require_batch_invariance()
        try:
            if major >= 9:
                assert registry.chosen(op, cuda, torch.bfloat16).name == f"sm{major}0"
        finally:
            registry.require_batch_invariance(False)


# ---- on a GPU


@pytest.mark.gpu
def test_an_instruction_sums_16_consecutive_channels_on_a_gpu(kernel_on_gpu: Callable[[str], str]) -> None:
    """So do the instructions of the product with an FP8 weight."""
    from dsv4_kernels.linear import fp8_weight_gpu, gpu

    name = kernel_on_gpu("rms_norm")
    x, weight, expected = (t.cuda() for t in channels_that_sum_together())
    for tile in dict.fromkeys((*gpu.TILES, *gpu.CLUSTER_TILES, *gpu.tiles(ARCH[name]))):
        out = torch.empty_like(expected)
        gpu.run(name, "a test", x, weight.bfloat16(), out, tile)
        assert same_bits(out, expected), tile
    codes, scale = weight.to(torch.float8_e4m3fn), torch.ones(1, 4, 4, device="cuda")
    for tile in fp8_weight_gpu.TILES:
        out = getattr(fp8_weight_gpu, name)(x, codes, scale, None, False, tile=tile)
        assert same_bits(out.float(), expected), tile


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "groups"), [(256, 1), (2624, 1), (1024, 8)], ids=str)
def test_the_gpu_keeps_a_rows_bits(kernel_on_gpu: Callable[[str], str], rows: int, groups: int) -> None:
    from dsv4_kernels.linear import gpu

    name = kernel_on_gpu("rms_norm")  # the generation: on Blackwell cuBLAS's products are the default
    x, weight = normal(600, groups, 4096, seed=12).cuda(), normal(groups, rows, 4096, seed=13).cuda()

    def multiply(tokens: Tensor) -> Tensor:
        if groups > 1:
            return grouped_linear(tokens, weight, impl=name)
        return linear_fp32(tokens[:, 0], weight[0], impl=name).unsqueeze(1)

    whole = multiply(x)
    assert_products(whole[:40].cpu(), x[:40].cpu(), weight.cpu())
    for tile in dict.fromkeys((*gpu.tiles(ARCH[name]), *gpu.CLUSTER_TILES)):  # Hopper has the clusters' kernel, too
        out = whole.new_full(whole.shape, float("nan"))
        assert torch.equal(gpu.run(name, "a test", x, weight, out, tile), whole), tile
    for tokens in (1, 2, 3, 8, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511):
        assert torch.equal(multiply(x[:tokens]), whole[:tokens]), tokens
        assert torch.equal(multiply(x[-tokens:]), whole[-tokens:]), tokens
