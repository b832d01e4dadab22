"""Contenders of the attention benchmark: calls of our kernels, FlashMLA and trtllm-gen on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import PAGE_ROWS, ROW_BYTES, ROW_DIM, KVRows
from dsv4_kernels.sparse_attention import sparse_attention
from dsv4_kernels.unpack import Pages, unpack_pages
from lib.attention_inputs import (
    SCALE,
    WINDOW,
    Case,
    Inputs,
    unpacked,
    unpacked_rows,
)
from lib.measuring import Call

FLASHMLA_HEADS = 64
"""FlashMLA's smallest number of heads."""


def ours(sets: list[Inputs], impl: str, split_keys: int | None) -> list[Call]:
    """Return a call of the public function for each set of inputs, with the kernel forced by name."""

    def call(inputs: Inputs) -> Call:
        arguments = inputs.arguments()
        return lambda: sparse_attention(**arguments, split_keys=split_keys, impl=impl)

    return [call(inputs) for inputs in sets]


def many_heads(sets: list[Inputs], impl: str, split_keys: int | None) -> list[Call]:
    """Return the same calls by Hopper's kernels for many heads, whatever the number of heads."""
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    def call(ordinary: Call) -> Call:
        def without_few_heads() -> Tensor:
            with mock.patch.object(sm90, "FEW_HEADS", 0):
                return ordinary()

        return without_few_heads

    return [call(ordinary) for ordinary in ours(sets, impl, split_keys)]


@dataclass(frozen=True)
class Chunk:
    """Inputs over bf16 rows and the call that unpacks them from FP8 rows. Both are timed."""

    inputs: Inputs
    fill: Callable[[], object]

    def after_filling(self, call: Call) -> Call:
        """Return one call that unpacks the rows and then runs `call`."""

        def both() -> Tensor:
            self.fill()
            return call()

        return both


def unpacked_chunks(sets: list[Inputs], case: Case, impl: str) -> list[Chunk]:
    """Return a chunk over unpacked rows for each set of inputs over FP8 rows. All chunks use the same memory, as the
    layers of a forward do."""
    device = sets[0].q.device
    storage = torch.empty(unpacked_rows(case), ROW_DIM, dtype=torch.bfloat16, device=device)
    window_rows = torch.arange(case.tokens + WINDOW - 1, dtype=torch.int32, device=device)

    def chunk(inputs: Inputs) -> Chunk:
        def fill() -> None:
            parts = [Pages(inputs.window, window_rows, 1)]
            if inputs.pages is not None:
                parts.append(Pages(inputs.entries, inputs.pages, case.page_entries))
            unpack_pages(parts, storage, impl)

        return Chunk(unpacked(case, inputs, storage), fill)

    return [chunk(inputs) for inputs in sets]


def ours_unpacked(chunks: list[Chunk], impl: str) -> list[Call]:
    """Return calls that unpack and attend with our public functions, the kernels forced by name."""
    calls = ours([chunk.inputs for chunk in chunks], impl, None)
    return [chunk.after_filling(call) for chunk, call in zip(chunks, calls, strict=True)]


def flashmla_unpacked(chunks: list[Chunk]) -> list[Call]:
    """Return calls that unpack with our kernel and attend with FlashMLA's sparse prefill."""
    return [chunk.after_filling(_flashmla_prefill(chunk.inputs)) for chunk in chunks]


def flashmla(sets: list[Inputs], case: Case) -> list[Call]:
    """Return calls of FlashMLA 1.0.0 as SGLang makes them: sparse prefill for bf16 chunks, sparse decode for FP8
    rows."""
    if case.prefill and not case.fp8:
        return [_flashmla_prefill(inputs) for inputs in sets]
    import flash_mla

    schedule = flash_mla.get_mla_metadata()[0]  # filled by the first call; the layers of a forward share it
    return [_flashmla_decode(inputs, schedule) for inputs in sets]


def padded_heads(inputs: Inputs) -> Inputs:
    """Return the inputs with zeros for the heads up to FLASHMLA_HEADS."""
    missing = max(0, FLASHMLA_HEADS - inputs.q.shape[1])
    pad = torch.nn.functional.pad
    return replace(inputs, q=pad(inputs.q, (0, 0, 0, missing)), sink=pad(inputs.sink, (0, missing)))


def _flashmla_decode(inputs: Inputs, schedule: object) -> Call:
    import flash_mla

    heads, inputs = inputs.q.shape[1], padded_heads(inputs)
    T = inputs.q.shape[0]
    arguments = {
        "q": inputs.q[:, None],
        "k_cache": flashmla_table(inputs.window),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": ROW_DIM,
        "tile_scheduler_metadata": schedule,
        "softmax_scale": SCALE,
        "is_fp8_kvcache": True,
        "indices": inputs.window_rows[:, None],
        "topk_length": torch.full((T,), inputs.window_rows.shape[1], dtype=torch.int32, device=inputs.q.device),
        "attn_sink": inputs.sink,
    }
    if inputs.entries is not None:
        arguments |= {
            "extra_k_cache": flashmla_table(inputs.entries),
            "extra_indices_in_kvcache": padded(inputs.entry_list, 64)[:, None],
            "extra_topk_length": inputs.visible,
        }
    return lambda: flash_mla.flash_mla_with_kvcache(use_legacy=True, **arguments)[0][:, 0, :heads]


def flashmla_table(rows: KVRows) -> Tensor:
    """Return a [pages, 64, 1, 584] fp8 view of the same bytes. Its pages keep the padding of ours."""
    pages = rows.storage.view(torch.float8_e4m3fn)  # as_strided: other views of a single page drop the padding
    return pages.as_strided((len(pages), PAGE_ROWS, 1, ROW_BYTES), (pages.stride(0), ROW_BYTES, ROW_BYTES, 1))


def _flashmla_prefill(inputs: Inputs) -> Call:
    """Return a call over one table, which window and entries form because they are adjacent in memory."""
    import flash_mla

    heads, inputs = inputs.q.shape[1], padded_heads(inputs)
    lists, lengths, storage = one_list(inputs)
    kv, q, sink = storage[:, None], inputs.q, inputs.sink
    return lambda: flash_mla.flash_mla_sparse_fwd(q, kv, lists, SCALE, ROW_DIM, sink, lengths, use_legacy=True)[0][
        :, :heads
    ]


def one_list(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Join window and entries of a chunk of plain rows into one list over one table.

    Returns:
        lists [T, 1, n] int32, where n is a multiple of 128 and -1 fills the rest; lengths [T] int32; storage [N, 512].
    """
    window = inputs.window.storage
    lists, lengths = inputs.window_rows, torch.full_like(inputs.window_rows[:, 0], inputs.window_rows.shape[1])
    num_rows = inputs.window.num_rows
    if inputs.entries is not None:
        expected = window.data_ptr() + window.numel() * window.element_size()
        assert inputs.entries.storage.data_ptr() == expected, "entries must follow the window's rows in memory"
        offset = torch.where(inputs.entry_list >= 0, inputs.entry_list + num_rows, -1)
        lists, lengths = torch.cat([lists, offset], 1), lengths + inputs.visible
        num_rows += inputs.entries.num_rows
    return padded(lists, 128)[:, None], lengths, window.as_strided((num_rows, ROW_DIM), (ROW_DIM, 1))


def padded(lists: Tensor, multiple: int) -> Tensor:
    """Return [T, n] padded to [T, a multiple of `multiple`] int32 with -1."""
    return torch.nn.functional.pad(lists, (0, -lists.shape[1] % multiple), value=-1).int().contiguous()


def trtllm_gen(sets: list[Inputs], case: Case) -> list[Call]:
    """Return calls of flashinfer's kernel, SGLang's `--dsv4-attn-backend trtllm`, for decode only.

    Its rows and queries are e4m3 with one scale, 512 bytes. Its rows here are ours, dequantised and rounded to e4m3, so
    they differ from ours and are less accurate.
    """
    from flashinfer.mla import trtllm_batch_decode_sparse_mla_dsv4

    window = _uniform_fp8(sets[0].window)
    entries = window if sets[0].entries is None else _uniform_fp8(sets[0].entries)
    workspace = torch.zeros(128 << 20, dtype=torch.int8, device=window.device)

    def call(inputs: Inputs) -> Call:
        lists = inputs.window_rows if inputs.entries is None else torch.cat([inputs.window_rows, inputs.entry_list], 1)
        lists = torch.nn.functional.pad(lists, (0, 0, 0, -len(lists) % 64), value=-1)  # it reads tables by 64 rows
        lengths = torch.full_like(inputs.window_rows[:, 0], inputs.window_rows.shape[1])
        arguments = {
            "query": inputs.q.to(torch.float8_e4m3fn)[:, None],
            "swa_kv_cache": window,
            "workspace_buffer": workspace,
            "sparse_indices": lists[: len(lengths)],
            "compressed_kv_cache": entries,
            "sparse_topk_lens": lengths if inputs.visible is None else lengths + inputs.visible,
            "seq_lens": torch.full_like(lengths, case.context),
            "bmm1_scale": SCALE,
            "bmm2_scale": 1.0,
            "sinks": inputs.sink,
            "kv_layout": "HND",
            "backend": "trtllm-gen",
        }
        return lambda: trtllm_batch_decode_sparse_mla_dsv4(**arguments).view(inputs.q.shape)

    return [call(inputs) for inputs in sets]


_uniform_pools: dict[int, Tensor] = {}


def _uniform_fp8(rows: KVRows) -> Tensor:
    """Return a pool's values as [pages, 1, 64, 512] e4m3, computed once a pool."""
    key = rows.storage.data_ptr()
    if key not in _uniform_pools:
        made = torch.empty(rows.num_rows, ROW_DIM, dtype=torch.float8_e4m3fn, device=rows.device)
        for part in torch.arange(rows.num_rows, device=rows.device).split(1 << 18):
            made[part[0] : part[0] + len(part)] = rows.gather(part).to(torch.float8_e4m3fn)
        _uniform_pools[key] = made.view(-1, 1, PAGE_ROWS, ROW_DIM)
    return _uniform_pools[key]
