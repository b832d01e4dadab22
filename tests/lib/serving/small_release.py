"""A small checkpoint with the released attention, and flags of a server of it on a GPU."""

from __future__ import annotations

from dataclasses import replace

from sglang_dsv4.cpu.random_checkpoint import PRESETS

# The least widths that the kernels support, and a vocabulary whose tokens the tests can count.
SHAPE = replace(
    PRESETS["flash"], compress_ratios=(0, 4, 128), num_hash_layers=1, hidden_size=1024, q_lora_rank=512, vocab_size=1024
)
FLAGS = ("--max-total-tokens", "65536", "--max-running-requests", "16", "--chunked-prefill-size", "512")
FLAGS += ("--context-length", "8192", "--mem-fraction-static", "0.9", "--cuda-graph-bs-decode", "1", "4", "16")
FLAGS += ("--constrained-json-disable-any-whitespace",)  # a random model would fill it without end
