"""Addresses and strides of tensors that may be None, as the integers that kernels take as arguments."""

from __future__ import annotations

from torch import Tensor


def address(tensor: Tensor | None, rows: slice | None = None) -> int:
    """Address of a tensor's first element, or of the first element of `rows`; 0 for None."""
    if tensor is None:
        return 0
    return (tensor if rows is None else tensor[rows]).data_ptr()


def row_stride(tensor: Tensor | None) -> int:
    """Elements from row to row; 0 for None."""
    return 0 if tensor is None else tensor.stride(0)


def row_bytes(storage: Tensor | None) -> int:
    """Bytes from page to page of a paged table, or from row to row of a plain one; 0 for None."""
    return 0 if storage is None else storage.stride(0) * storage.element_size()
