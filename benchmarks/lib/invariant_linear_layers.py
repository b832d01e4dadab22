"""Flash's layers whose products are batch-invariant, and names of the kernel's tiles."""

from __future__ import annotations

LAYERS = {"gate": (1, 256), "hca": (1, 1024), "csa": (1, 2624), "wo_a": (8, 1024), "logits": (1, 129_280)}
"""Groups of each layer, and rows of a group. More than one group means `grouped_linear`."""


def name_of(tile: object) -> str:
    """Return the name of a tile's contender in the benchmark."""
    kind = "w" if not hasattr(tile, "at_once") else "c" if tile.ctas > 1 else ""
    return f"ours_by_{kind}{tile.rows}x{tile.tokens}x{tile.stages}"
