"""Shapes of the FP8 products of a layer."""

from __future__ import annotations

LAYERS = {
    "flash": {
        "wqkv_a": (1536, 4096),
        "wq_b": (32768, 1024),
        "wo_b": (4096, 8192),
        "gate_up": (4096, 4096),
        "down": (4096, 2048),
        "index_wq_b": (8192, 1024),
    },
    "flash-tp2": {
        "wq_b": (16384, 1024),
        "wo_b": (4096, 4096),
        "gate_up": (2048, 4096),
        "down": (4096, 1024),
    },
    "pro": {
        "wqkv_a": (2048, 7168),
        "wq_b": (65536, 1536),
        "wo_b": (7168, 16384),
        "gate_up": (6144, 7168),
        "down": (7168, 3072),
        "index_wq_b": (8192, 1536),
    },
}
"""(N, K) of the FP8 products of a layer that has an indexer; for two ranks the products whose shapes differ."""
