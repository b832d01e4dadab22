"""The work tiles of a call, as the roles of a CTA read them (kernel.py)."""

from cutlass import Int32, Int64

from dsv4_kernels.device import ptx
from dsv4_kernels.moe.sm100.plan import Arguments
from dsv4_kernels.moe.workspace import GROUP, TILE_WORDS, TileField


def expert_of(a: Arguments, index: Int32) -> Int32:
    """The expert of work tile `index`, which counts tiles of output rows fastest."""
    return _field(a, index, TileField.EXPERT)


def slots_of(a: Arguments, index: Int32) -> tuple:
    """(first slot, number of slots) of work tile `index`, slots that pad its last group included."""
    return _field(a, index, TileField.FIRST_GROUP) * GROUP, _field(a, index, TileField.GROUPS) * GROUP


def _field(a: Arguments, index: Int32, field: TileField) -> Int32:
    return ptx.load_i32(a.tiles + Int64(index // a.row_tiles) * (4 * TILE_WORDS) + 4 * int(field))
