"""The same device memory for both policies of prefix reuse, with V4-Flash's fp8 rows (specification, section 10)."""

from __future__ import annotations

from dataclasses import dataclass

from lib.prefix_replay import PAGE

CSA, HCA, LAYERS = 21, 20, 43
SGLANG_TOKEN_BYTES = CSA * 179.25 + HCA * 6.75
SGLANG_SWA_TOKEN_BYTES = LAYERS * 585 + CSA * 320
SGLANG_SWA_RATIO = 0.1
TOKEN_BYTES = CSA * 179.25 + HCA * 4.5625
TAIL_BYTES = LAYERS * 2 * 37440 + CSA * 4 * 2 * (512 + 128) * 4
RING_BYTES = LAYERS * 2 * 37440 + CSA * 8 * 2 * (1024 + 256) * 4
TOKENS_PER_SLOT = 4096
REQUEST_SLOTS = 16


@dataclass(frozen=True)
class Budget:
    """How each policy divides the same bytes."""

    device_bytes: int
    sglang_tokens: int
    sglang_swa_tokens: int
    tokens: int
    tails: int  # number of device slots for tails

    @classmethod
    def of(cls, sglang_tokens: int) -> Budget:
        """Return the bytes that SGLang needs for `sglang_tokens`, and how this project divides them."""
        swa = int(sglang_tokens * SGLANG_SWA_RATIO) // PAGE * PAGE
        total = sglang_tokens * SGLANG_TOKEN_BYTES + swa * SGLANG_SWA_TOKEN_BYTES
        left = total - REQUEST_SLOTS * (RING_BYTES + TAIL_BYTES)
        tokens = int(left / (TOKEN_BYTES + TAIL_BYTES / TOKENS_PER_SLOT)) // PAGE * PAGE
        slots = int((total - tokens * TOKEN_BYTES - REQUEST_SLOTS * RING_BYTES) / TAIL_BYTES)
        return cls(int(total), sglang_tokens, swa, tokens, slots)
