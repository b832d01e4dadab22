"""A storage backend with the zero-copy interface (`batch_get_v1`, `batch_set_v1`) that keeps objects in memory."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, ClassVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageExtraInfo
from torch import Tensor

from sglang_dsv4.cache.checked_storage import ALIGNMENT, StagedRecords


class ZeroCopy(HiCacheStorage):
    """Objects move between the store and registered memory by address, several at once, as with mooncake and nixl;
    values are refused.

    As with nixl, one missing object fails the whole batch, and reading a short object leaves the rest of the memory as
    it was.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.batches: list[int] = []
        self.down = False
        self._at_work = threading.Lock()

    def register_mem_pool_host(self, mem_pool_host: StagedRecords) -> None:
        super().register_mem_pool_host(mem_pool_host)
        assert mem_pool_host.layout == "page_first" and mem_pool_host.is_stride_page_aligned(4096)
        memory = mem_pool_host.kv_buffer
        self._registered = range(memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.element_size())

    def _objects(self, keys: list[str], host_indices: Tensor) -> list[tuple[str, int, int]]:
        assert len(keys) == len(host_indices) // self.mem_pool_host.page_size
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        for pointer, size in zip(pointers, sizes, strict=True):
            assert pointer in self._registered and pointer + size - 1 in self._registered
            assert pointer % ALIGNMENT == 0 and size % ALIGNMENT == 0
        return list(zip(keys, pointers, sizes, strict=True))

    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        assert self._at_work.acquire(blocking=False), "two reads share their slots"
        try:
            if self.down:
                raise RuntimeError("no connection")
            self.batches.append(len(keys))
            objects = self._objects(keys, host_indices)
            if any(key not in self.objects for key in keys):
                return [False] * len(keys)
            for key, pointer, size in objects:
                ctypes.memmove(pointer, self.objects[key], min(size, len(self.objects[key])))
            return [True] * len(keys)
        finally:
            self._at_work.release()

    def batch_set_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        if self.down:
            raise RuntimeError("no connection")
        for key, pointer, size in self._objects(keys, host_indices):
            self.objects[key] = ctypes.string_at(pointer, size)
        return [True] * len(keys)

    def exists(self, key: str) -> bool:
        if self.down:
            raise RuntimeError("no connection")
        return key in self.objects

    def _refused(self, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError("deprecated; use batch_get_v1 or batch_set_v1")

    get = batch_get = set = batch_set = _refused  # type: ignore[assignment]


class FromConfig(ZeroCopy):
    """A storage that SGLang makes from a `dynamic` backend's configuration."""

    made: ClassVar[list[FromConfig]] = []

    def __init__(self, storage_config: object, kwargs: dict) -> None:
        super().__init__()
        self.made.append(self)
