"""The tile scheduler of the Blackwell kernel: tokens, keys and heads of every CTA (kernel.py)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4_kernels.device.cta_pair import cta_rank
from dsv4_kernels.device.pointers import gmem
from dsv4_kernels.sparse_attention.sm100.plan import TILE_KEYS, TILES_PER_STEP, Arguments, Plan
from dsv4_kernels.sparse_attention.split import STEP_KEYS


class WorkTile(NamedTuple):
    """One KV split of a token for one block of heads: the work of a CTA, alone or as one of a pair."""

    token: Int32
    head_block: Int32
    kv_split: Int32
    kv_splits: Int32
    slot: Int32  # scratch slot of the partial result; slots of a token and block of heads are adjacent
    first_tile: Int32  # index of the first key tile among the token's key tiles
    num_tiles: Int32  # 0 if kv_split >= kv_splits
    window_tiles: Int32  # key tiles of the window, before those of the entries
    num_entries: Int32


@cute.jit
def work_tile_of(index: Int32, a: Arguments, plan: cutlass.Constexpr) -> WorkTile:
    """Work tile `index`, by the division of keys in split.py."""
    kv_split = index % a.max_kv_splits
    token, head_block = index // a.max_kv_splits, cta_rank(plan.ctas)
    slot = (token * plan.ctas + head_block) * a.max_kv_splits + kv_split
    num_entries = Int32(0)
    if a.entries != 0:
        num_entries = a.entry_slots
        if a.visible != 0:
            visible = (gmem(a.visible, Int32) + token).load()
            num_entries = cutlass.max(cutlass.min(num_entries, visible), Int32(0))
    window_steps = (a.window_slots + (STEP_KEYS - 1)) // STEP_KEYS
    steps = window_steps + (num_entries + (STEP_KEYS - 1)) // STEP_KEYS
    kv_splits = Int32(1)
    if a.steps_per_kv_split > 0:
        kv_splits = cutlass.max((steps + a.steps_per_kv_split - 1) // a.steps_per_kv_split, Int32(1))
    window_tiles = window_steps * TILES_PER_STEP
    used_tiles = (a.window_slots + (TILE_KEYS - 1)) // TILE_KEYS
    if num_entries > 0:
        used_tiles = window_tiles + (num_entries + (TILE_KEYS - 1)) // TILE_KEYS
    first_tile = kv_split * steps // kv_splits * TILES_PER_STEP
    end_tile = cutlass.min((kv_split + 1) * steps // kv_splits * TILES_PER_STEP, used_tiles)
    num_tiles = cutlass.max(end_tile - first_tile, Int32(1))  # one tile of holes if there are no keys
    if kv_split >= kv_splits:
        num_tiles = Int32(0)
    return WorkTile(token, head_block, kv_split, kv_splits, slot, first_tile, num_tiles, window_tiles, num_entries)


def first_and_stride(plan: Plan) -> tuple[Int32, Int32]:
    """(first index, stride) of the work tiles of this CTA, or of its pair."""
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    return block // plan.ctas, grid // plan.ctas
