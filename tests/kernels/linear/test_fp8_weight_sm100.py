"""The grouped product with an FP8 weight on Blackwell, emulated: Hopper's source, compiled for sm_100a, in every tile.

Results are those of Blackwell's three kernels, with which a server multiplies many tokens. Tests of Hopper cover the
regimes (test_fp8_weight_gpu.py), and one of them compares both.
"""

from __future__ import annotations

import pytest
from ops.attention_launch import delete_synchronisation
from ops.early_launches import launched_early
from ops.fp8_weight_cases import one_by_one, product, same, tokens_of, weight
from ops.memory_layout import far_apart
from ops.row_kernels import assert_no_spills

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.usefixtures("compiled_here")
OF_TILES = ["8", "16", "32", "64", "8-resident", "16-resident"]
TILES = range(len(OF_TILES))
EACH_TILE = pytest.mark.parametrize("tile", TILES, ids=OF_TILES)


@pytest.mark.slow
@EACH_TILE
def test_it_has_the_bits_of_three_kernels(tile: int) -> None:
    """K of more steps than a tile has stages, tokens in several tiles; in part by a launch that begins early."""
    x, rotation = tokens_of(21, 1, 4096, seed=3)
    operands = weight(1, 128, 4096, seed=4)
    expected = one_by_one(x, *operands, rotation, True, kernel="sm100")
    for schedule in ("late", "random", "random_warps"):
        assert same(product(x, *operands, rotation, True, tile, kernel="sm100", schedule=schedule), expected)
    with launched_early(read_ahead=None if tile < 4 else {"grouped_linear_fp8_weight_resident": ("LDGSTS",) * 33}):
        assert same(product(x, *operands, rotation, True, tile, kernel="sm100"), expected)
    plain = one_by_one(x, *operands, None, False, kernel="sm100")
    assert same(product(x, *operands, None, False, tile, kernel="sm100"), plain)


@pytest.mark.slow
@EACH_TILE
def test_tokens_beyond_32_bits(tile: int) -> None:
    x, rotation = tokens_of(5, 1, 4096, seed=7)
    operands = weight(1, 256, 4096, seed=8)
    expected = product(x, *operands, rotation, True, tile, kernel="sm100")
    far = far_apart(x.contiguous(), 16)
    assert same(product(far, *operands, rotation, True, tile, kernel="sm100", in_place=[far, *operands]), expected)


@pytest.mark.slow
@EACH_TILE
def test_registers_and_shared_memory(tile: int) -> None:
    """Two CTAs of a tile share a multiprocessor, as on Hopper."""
    from ptx_emulator import emulated

    from dsv4_kernels.linear import fp8_weight_gpu as gpu

    chosen = (*gpu.TILES, *gpu.RESIDENT)[tile]
    assert chosen.shared_bytes + 16 + 1024 <= 228 * 1024 // 2
    with emulated():
        compiled = {OF_TILES[tile]: lambda: gpu.compile(gpu.Configuration(chosen, True, True), "sm_100a")}
        assert_no_spills(compiled, {OF_TILES[tile]: min(255, 65_536 // 2 // chosen.threads)})


@pytest.mark.slow
@pytest.mark.parametrize("tile", [1, 3, 4], ids=[OF_TILES[n] for n in (1, 3, 4)])
def test_deleted_synchronisation_is_noticed(tile: int) -> None:
    """Every deletion is noticed, except those explained in emulator/results/mutation_reasons.json."""
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.linear import fp8_weight_gpu as gpu

    channels = 2560 if tile < 4 else 4096
    x, rotation = tokens_of(10 if tile < 4 else 8, 1, channels, seed=11)
    codes, scale = weight(1, 128, channels, seed=12)
    with emulated(checks=Checks.strict(), record=True) as device:
        for constant in (codes, scale):
            device.memory.constant(constant)
        gpu.sm100(x, codes, scale, rotation, True, tile=(*gpu.TILES, *gpu.RESIDENT)[tile])
    rates = delete_synchronisation(f"fp8_weight_sm100_{OF_TILES[tile].replace('-', '_')}", device)
    assert rates and set(rates.values()) == {1}, rates
