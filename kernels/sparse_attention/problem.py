"""The input of the attention's GPU kernels: one call's tensors, checked and in the kernels' layouts.

`Problem.of` is called once a call, after the public function has checked the shapes. It converts index dtypes and
strides of q to one form, and raises for inputs that no kernel computes. It reads no tensor's contents, so it never
waits for the device, and it allocates nothing if q and the lists have the layouts below and `out` is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import PAGE_BYTES, ROW_DIM, KVRows, RowFormat
from dsv4_kernels.sparse_attention.split import num_kv_splits, num_steps

MAX_HEADS = 128
FEW_HEADS = 16
"""Calls of at most this many heads use their own kernel on Hopper (sm90/few_heads). At most 16; 0 disables the kernel.

docs/log/attention_few_heads.md has the measurements. FP8 rows are never unpacked for this kernel (unpacking.py).
"""
VECTOR_BYTES = 16
"""Rows of q, of the tables and of the output begin at multiples of this: kernels move 16 bytes at a time."""


@dataclass(frozen=True)
class Problem:
    """Arguments of one call. All tensors are on one CUDA device; the last stride is 1 everywhere.

    Holes of the lists are -1. A kernel must not read a row that no list names: it may be NaN.
    """

    q: Tensor  # [T, H, 512] bf16; rows 16-byte aligned, no stride is 0
    row_format: RowFormat  # of both tables: FP8 or PLAIN (bf16)
    window_storage: Tensor  # FP8: [pages, page stride >= 37440] uint8, 64 rows a page; PLAIN: [N, 512] bf16
    entry_storage: Tensor | None  # the same; None: no entries
    window_rows: Tensor  # [T, W] int32
    entry_indices: Tensor | None  # [T, K] int32, rows of entry_storage: CSA's list
    page_table: Tensor | None  # [B, P] int32: HCA's addressing, with entries_per_page and token_to_request
    entries_per_page: int
    token_to_request: Tensor | None  # [T] int32
    visible: Tensor | None  # [T] int32: entries a token may read; with a list: slots before visible[t]; None: all K
    sink: Tensor | None  # [H] fp32
    scale: float
    out: Tensor  # [T, H, 512] bf16; rows 16-byte aligned
    split_keys: int | None  # see split.py

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        """H, 1 to 128."""
        return self.q.shape[1]

    @property
    def window_slots(self) -> int:
        """W, the width of the window lists."""
        return self.window_rows.shape[1]

    @property
    def max_entry_slots(self) -> int:
        """The most entries that a token of this call could read: K, or the entries of a page table row."""
        if self.entry_indices is not None:
            return self.entry_indices.shape[1]
        return 0 if self.page_table is None else self.page_table.shape[1] * self.entries_per_page

    @property
    def max_steps(self) -> int:
        """The most key steps (split.py) that a token of this call could have."""
        return num_steps(self.window_slots, self.max_entry_slots)

    @property
    def max_kv_splits(self) -> int:
        """The most KV splits that a token of this call could have."""
        return num_kv_splits(self.max_steps, self.split_keys)

    @staticmethod
    def of(
        q: Tensor,
        window: KVRows,
        window_rows: Tensor,
        entries: KVRows | None,
        entry_indices: Tensor | None,
        page_table: Tensor | None,
        entries_per_page: int,
        token_to_request: Tensor | None,
        visible: Tensor | None,
        sink: Tensor | None,
        *,
        scale: float,
        out: Tensor | None,
        split_keys: int | None,
    ) -> Problem:
        """The problem that a call of `dsv4_kernels.sparse_attention.sparse_attention` describes, with its output.

        q with other strides is copied; lists and lengths of another integer dtype are converted.

        Raises:
            NotImplementedError: a dtype, row format or dimension that only the reference computes.
            ValueError: tensors on several devices, or a table or output in a layout that kernels cannot address.
        """
        if q.dtype != torch.bfloat16 or q.shape[2] != ROW_DIM or not 1 <= q.shape[1] <= MAX_HEADS:
            raise _only_the_reference(
                f"q [T, 1 to {MAX_HEADS}, {ROW_DIM}] in torch.bfloat16", f"{list(q.shape)} in {q.dtype}"
            )
        row_format = _format_of_both(window, entries)
        out = out if out is not None else q.new_empty(q.shape)
        problem = Problem(
            q=q if _rows_are_aligned(q) and 0 not in q.stride() else q.clone(memory_format=torch.contiguous_format),
            row_format=row_format,
            window_storage=_checked_storage("window", window),
            entry_storage=None if entries is None else _checked_storage("entries", entries),
            window_rows=_int32_rows(window_rows),
            entry_indices=_int32_rows(entry_indices),
            page_table=_int32_rows(page_table),
            entries_per_page=entries_per_page,
            token_to_request=_int32_rows(token_to_request),
            visible=_int32_rows(visible),
            sink=None if sink is None else sink.float().contiguous(),
            scale=float(scale),
            out=out,
            split_keys=split_keys,
        )
        if not _rows_are_aligned(out):
            raise ValueError(
                f"sparse_attention: out has strides {out.stride()} at address {out.data_ptr():#x}; kernels write rows "
                f"of {ROW_DIM} adjacent channels that begin at multiples of {VECTOR_BYTES} bytes. Pass a contiguous out"
            )
        _check_one_device(problem)
        return problem


def _only_the_reference(expected: str, found: str) -> NotImplementedError:
    return NotImplementedError(
        f"sparse_attention: the GPU kernels take {expected}; got {found}. impl='ref' computes it, slowly"
    )


def _format_of_both(window: KVRows, entries: KVRows | None) -> RowFormat:
    formats = {table.format for table in (window, entries) if table is not None}
    if len(formats) > 1 or not formats <= {RowFormat.FP8, RowFormat.PLAIN}:
        found = f"window rows {window.format.value}, entries {'none' if entries is None else entries.format.value}"
        raise _only_the_reference("window rows and entries of one format, fp8 or plain", found)
    for name, table in (("window rows", window), ("entries", entries)):
        if table is not None and table.format is RowFormat.PLAIN and table.storage.dtype != torch.bfloat16:
            raise _only_the_reference("plain rows in torch.bfloat16", f"{name} in {table.storage.dtype}")
    return window.format


def _rows_are_aligned(x: Tensor) -> bool:
    """Whether every row (last dimension) is contiguous and begins at a multiple of VECTOR_BYTES."""
    unit = VECTOR_BYTES // x.element_size()
    return x.stride(-1) == 1 and x.data_ptr() % VECTOR_BYTES == 0 and all(s % unit == 0 for s in x.stride()[:-1])


def _checked_storage(name: str, table: KVRows) -> Tensor:
    storage = table.storage
    if table.format is RowFormat.FP8:
        expected, fits = f"[pages, at least {PAGE_BYTES}] torch.uint8", storage.dtype == torch.uint8
        fits = fits and storage.dim() == 2 and storage.shape[1] >= PAGE_BYTES
    else:
        expected, fits = f"[rows, {ROW_DIM}]", storage.dim() == 2 and storage.shape[1] == ROW_DIM
    if not fits or not _rows_are_aligned(storage):
        raise ValueError(
            f"sparse_attention: the storage of {name} is {list(storage.shape)} {storage.dtype} with strides "
            f"{storage.stride()} at address {storage.data_ptr():#x}; expected {expected}, each row contiguous and "
            f"beginning at a multiple of {VECTOR_BYTES} bytes. Allocate it with KVRows.allocate"
        )
    return storage


def _int32_rows(x: Tensor | None) -> Tensor | None:
    """x in int32 with a last stride of 1; x itself if it has both already."""
    if x is None:
        return None
    x = x.to(torch.int32)
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _check_one_device(problem: Problem) -> None:
    for name, value in vars(problem).items():
        if isinstance(value, Tensor) and value.device != problem.q.device:
            raise ValueError(
                f"sparse_attention: {name} is on {value.device} and q on {problem.q.device}; move them to one device"
            )
