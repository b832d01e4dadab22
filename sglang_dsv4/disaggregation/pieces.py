"""Transfers over Mooncake's TCP transport in pieces that it accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine

BLOCKS = 2000
"""Blocks of a piece. Mooncake 0.3.13 over TCP refuses a call of more than 2048, whatever its variables say; each call
waits for its end."""


def transfer_in_pieces(
    original: Callable[..., int],
    engine: MooncakeTransferEngine,
    session_id: str,
    buffers: Sequence[int],
    peer_buffer_addresses: Sequence[int],
    lengths: Sequence[int],
) -> int:
    """Write blocks to another server, over TCP at most `BLOCKS` at a time; around `batch_transfer_sync`.

    A chunk of 8,192 tokens of V4-Flash has up to 1,984 blocks, a reused prefix any number, and SGLang sends them in one
    call. After one refused call it takes the decode server for dead.

    Returns:
        0, or the result of the first call that failed.
    """
    if engine.ib_device != "":  # SGLang's word for TCP
        return original(engine, session_id, buffers, peer_buffer_addresses, lengths)
    for begin in range(0, len(lengths), BLOCKS):
        piece = slice(begin, begin + BLOCKS)
        result = original(engine, session_id, buffers[piece], peer_buffer_addresses[piece], lengths[piece])
        if result != 0:
            return result
    return 0
