"""When to unpack FP8 rows to bf16 before an attention call. The result has the same bits; time and memory differ."""

from __future__ import annotations

from dsv4_kernels.kv_layout import ROW_DIM
from dsv4_kernels.sparse_attention.problem import FEW_HEADS

MAX_BYTES = 256 * 2**20
"""Unpacked rows of one call at most: the CSA entries of 1M tokens. A call that names more reads the FP8 rows."""
KEYS_PER_ROW = 5
KEYS_PER_LAUNCH = 35_000
HEADS = 64
"""Heads of a block; the attention kernel converts a row once for each block of heads."""


def helps(kernel: str) -> bool:
    """Whether an attention kernel ("sm90", "sm100", "ref") may be faster over bf16 rows than over FP8 rows at all.

    Blackwell's is not, as far as its cycle counts tell without a GPU: the shared memory port bounds it in either format
    (docs/blackwell.md).
    """
    return kernel != "sm100"


def pays(num_rows: int, num_keys: int, num_heads: int) -> bool:
    """Whether unpacking saves a kernel that it helps more time than it takes, and fits into MAX_BYTES.

    On an H200 the attention takes 0.07 to 0.1 ns longer for a key in an FP8 row than in a bf16 row, for every block of
    heads. Unpacking moves 1.6 KB a row, which takes 0.2 to 0.6 ns: as much as KEYS_PER_ROW keys save; its launch takes
    about 3 us, as much as KEYS_PER_LAUNCH keys save. So calls of few tokens never unpack, nor does a small chunk that
    reads a small part of a long context. Nor do calls of few heads: their kernel waits for rows rather than for
    conversion, and bf16 rows have 1.8 times the bytes.

    Args:
        num_rows: rows that would be unpacked, in all tables of one call.
        num_keys: keys that the call reads, over all its tokens.
        num_heads: heads of the call.
    """
    if num_heads <= FEW_HEADS:
        return False
    blocks = -(-num_heads // HEADS)
    worth = num_rows * KEYS_PER_ROW + KEYS_PER_LAUNCH <= num_keys * blocks
    return worth and num_rows * ROW_DIM * 2 <= MAX_BYTES
