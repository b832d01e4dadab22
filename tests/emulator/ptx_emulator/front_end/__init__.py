"""PTX text to instructions that the core executes. Importing this package registers all instruction families."""

from ptx_emulator.front_end import (
    decode_control,
    decode_copy,
    decode_memory,
    decode_mma_sync,
    decode_sync,
    decode_tcgen05,
    decode_wgmma,
)

__all__ = [
    "decode_control",
    "decode_copy",
    "decode_memory",
    "decode_mma_sync",
    "decode_sync",
    "decode_tcgen05",
    "decode_wgmma",
]
