"""When to unpack what a call of the attention reads. It changes no bit of the result, so only time and memory count."""

from __future__ import annotations

from dsv4_kernels.kv_layout import ROW_DIM
from dsv4_kernels.sparse_attention.problem import FEW_HEADS

MAX_BYTES = 256 * 2**20
"""Of the rows that are unpacked at a time: entries of 1M tokens of CSA. More are read as they are."""
KEYS_PER_ROW = 5
KEYS_PER_LAUNCH = 35_000
HEADS = 64
"""Of a block: the kernel converts a row once for each."""


def helps(kernel: str) -> bool:
    """Whether an attention kernel ("sm90", "sm100", "ref") may be faster over bf16 rows than over FP8 rows at all.

    Blackwell's is not, as far as can be told without one: what bounds it is the port of shared memory, whatever the
    rows were before (docs/blackwell.md).
    """
    return kernel != "sm100"


def pays(num_rows: int, num_keys: int, num_heads: int) -> bool:
    """Whether unpacking takes less time than it saves a kernel that it helps, in memory that may be had for it.

    On an H200 the attention takes 0.07 to 0.1 ns longer for a key in an FP8 row than in a bf16 row, for every block of
    heads. Unpacking moves 1.6 KB a row, which takes 0.2 to 0.6 ns: as much as KEYS_PER_ROW keys save; and its launch
    about 3 us: KEYS_PER_LAUNCH. So few tokens never unpack, nor does a small chunk in a long context that reads a small
    part of it. Nor do few heads: their kernel waits for rows rather than converts, and bf16 rows are longer by 0.8.

    Args:
        num_rows: that would be unpacked, of all tables of one call.
        num_keys: that the call reads, over all its tokens.
        num_heads: of the call.
    """
    if num_heads <= FEW_HEADS:
        return False
    blocks = -(-num_heads // HEADS)
    worth = num_rows * KEYS_PER_ROW + KEYS_PER_LAUNCH <= num_keys * blocks
    return worth and num_rows * ROW_DIM * 2 <= MAX_BYTES
