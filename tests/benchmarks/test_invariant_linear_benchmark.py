"""The benchmark of the batch-invariant products without a GPU: its comparisons before any timing."""

from __future__ import annotations

from functools import partial

import bench_invariant_linear as bench
import pytest
import torch
from ops.row_kernels import ARCH, emulated_row_kernel


@pytest.mark.parametrize(("groups", "impl", "count"), [(1, "sm90", 7), (2, "sm90", 7), (1, "sm100", 6)], ids=str)
def test_all_tiles_are_compared(groups: int, impl: str, count: int, compiled_here: None) -> None:
    """The chosen tile and all other tiles are compared. A tile with one wrong element is not timed, nor is any tile if
    all of them are wrong in the same way."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.linear import gpu

    torch.manual_seed(0)
    inputs = torch.randn(5, groups, 128).bfloat16(), torch.randn(groups, 70, 128).bfloat16()
    few = [tile for tile in bench.swept(gpu, impl) if tile.rows * tile.tokens <= 2048]
    calls = {bench.name_of(tile): partial(bench.by_tile, tile, impl=impl) for tile in few}
    assert len(calls) == count and "ours_by_c32x16x16" in calls and ("ours_by_w64x32x10" in calls) == (impl == "sm90")
    calls["ours"] = partial(bench.by_tile, None, impl=impl)
    with emulated_row_kernel(impl, constant=[inputs[1]]):
        assert bench.check(inputs, calls) <= bench.WRONG
        right = calls["ours_by_c32x16x16"]
        with pytest.raises(AssertionError, match="ours_by_c32x16x16 has other bits"):
            bench.check(inputs, calls | {"ours_by_c32x16x16": lambda i: right(i).index_fill(0, torch.tensor(3), 0.5)})
        with pytest.raises(AssertionError, match="the product is off by"):
            bench.check(inputs, {"ours": lambda i: right(i) * 1.01})


def test_every_tile_has_a_name_of_its_own() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.linear import gpu

    for impl, arch in ARCH.items():
        tiles = bench.swept(gpu, impl)
        assert len({bench.name_of(tile) for tile in tiles}) == len(tiles) and set(gpu.tiles(arch)) <= set(tiles)
