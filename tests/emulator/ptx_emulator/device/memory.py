"""The emulated device's global memory: an arena at a fixed address, and the tensors copied into it.

A kernel's global addresses are addresses of this process. Launches do not use a tensor's own memory: its whole storage
is copied into the arena before each launch and back after it, because
- the arena aligns storages to 512 bytes, as CUDA allocators do (torch aligns CPU memory to 64, and kernels and tensor
  maps need 128);
- a pointer outside of the registered tensors raises an error instead of reading host memory;
- the addresses are the same in every process, so that a recorded launch can be replayed.

The bounds are those of the passed tensors, not of their storages: a kernel that gets a slice may not read beyond it.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

ARENA_BASE = 0x1000_0000_0000
ARENA_BYTES = 1 << 36  # reserved, not committed
STORAGE_ALIGN_BYTES = 512
GUARD_BYTES = 4096  # between storages, never registered

_PROT_READ_WRITE = 0x1 | 0x2
_MAP_FIXED_NOREPLACE = 0x100000
_MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

Array = "np.ndarray | torch.Tensor"


@dataclass(frozen=True)
class Extent:
    """Bytes `[address, address + nbytes)` that a kernel may use."""

    address: int
    nbytes: int
    name: str
    constant: bool = False


@dataclass
class _Storage:
    device_address: int
    host_address: int  # 0 if the storage exists in the arena only
    nbytes: int
    owner: Any  # keeps the host bytes alive
    extents: dict[tuple[int, int], Extent] = field(default_factory=dict)
    constant: bool = False


def _is_torch(array: object) -> bool:
    return type(array).__module__.partition(".")[0] == "torch" or any(
        base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(array).__mro__
    )


def _describe(array: "np.ndarray | torch.Tensor") -> str:
    dtype = str(array.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(str(n) for n in array.shape)}]"


def _host_layout(array: "np.ndarray | torch.Tensor") -> tuple[int, int, int, int, Any]:
    """(storage address, storage bytes, first byte's offset, extent in bytes, owner)."""
    if _is_torch(array):
        if array.device.type != "cpu":
            raise TypeError(f"the emulator takes CPU tensors, got one on {array.device}")
        storage = array.untyped_storage()
        item, strides = array.element_size(), array.stride()
        base, nbytes = storage.data_ptr(), storage.nbytes()
        offset, owner = array.storage_offset() * item, storage
        span = sum((n - 1) * s * item for n, s in zip(array.shape, strides, strict=True))
        empty = array.numel() == 0
    else:
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        low, high = np.lib.array_utils.byte_bounds(root)
        base, nbytes, owner = low, high - low, root
        if any(s < 0 for s in array.strides):
            raise ValueError("an array with a negative stride cannot be passed to a kernel")
        offset, item = array.ctypes.data - base, array.itemsize
        span = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
        empty = array.size == 0
    return base, nbytes, offset, 0 if empty else span + item, owner


class DeviceMemory:
    """The arena and its storages; a context manager that maps and unmaps the arena, one at a time in a process."""

    def __init__(self) -> None:
        self._storages: dict[tuple[int, int], _Storage] = {}
        self._next = ARENA_BASE
        self._depth = 0

    def __enter__(self) -> "DeviceMemory":
        mapped = _libc.mmap(
            ARENA_BASE,
            ARENA_BYTES,
            _PROT_READ_WRITE,
            _MAP_PRIVATE_ANONYMOUS_NORESERVE | _MAP_FIXED_NOREPLACE,
            -1,
            0,
        )
        if mapped != ARENA_BASE:
            raise RuntimeError(
                f"cannot map device memory at {ARENA_BASE:#x} (errno {ctypes.get_errno()}); "
                "is another emulated device open in this process?"
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self._storages.clear()
        _libc.munmap(ARENA_BASE, ARENA_BYTES)

    def allocate(self, nbytes: int, name: str) -> int:
        """The address of new device-only bytes, which are registered as one extent."""
        storage = self._place(0, nbytes, owner=None)
        self._storages[(storage.device_address, nbytes)] = storage
        storage.extents[(0, nbytes)] = Extent(storage.device_address, nbytes, name)
        return storage.device_address

    def address_of(self, array: "np.ndarray | torch.Tensor", name: str = "") -> int:
        """The device address of an array's first element, whose extent is registered."""
        base, nbytes, offset, extent_bytes, owner = _host_layout(array)
        storage = self._storages.get((base, nbytes))
        if storage is None:
            storage = self._place(base, nbytes, owner)
            self._storages[(base, nbytes)] = storage
            if self._depth:
                ctypes.memmove(storage.device_address, base, nbytes)
        address = storage.device_address + offset
        if extent_bytes and (offset, extent_bytes) not in storage.extents:
            label = f"{name} {_describe(array)}".strip()
            storage.extents[(offset, extent_bytes)] = Extent(address, extent_bytes, label)
        return address

    def use_in_place(self, array: "np.ndarray | torch.Tensor") -> None:
        """Lets launches access the array's storage at its host address, without copies to the arena.

        For storages that are too large to copy. Call it before the first launch that is given the array.
        """
        base, nbytes, _, _, owner = _host_layout(array)
        self._storages[(base, nbytes)] = _Storage(base, 0, nbytes, owner)

    def constant(self, array: "np.ndarray | torch.Tensor") -> None:
        """Declares that no earlier grid writes the array's storage, so that kernels may read it early
        (`MemoryMap.add`)."""
        self.address_of(array)
        base, nbytes, *_ = _host_layout(array)
        self._storages[(base, nbytes)].constant = True

    def place_at(self, address: int, contents: bytes, name: str) -> None:
        """Places bytes at an address that the caller chooses: the memory of a recorded launch."""
        if not ARENA_BASE <= address <= ARENA_BASE + ARENA_BYTES - len(contents):
            raise ValueError(f"address {address:#x} is outside the arena")
        storage = _Storage(address, 0, len(contents), None)
        storage.extents[(0, len(contents))] = Extent(address, len(contents), name)
        self._storages[(address, len(contents))] = storage
        ctypes.memmove(address, contents, len(contents))
        self._next = max(self._next, address + len(contents) + GUARD_BYTES)

    def extents(self) -> Iterator[Extent]:
        for storage in self._storages.values():
            for extent in storage.extents.values():
                yield replace(extent, constant=storage.constant)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, the arena holds the tensors' contents; at the end they are copied back. May be nested."""
        if self._depth == 0:
            self._upload()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._download()

    def _upload(self) -> None:
        """Copies every storage to the device, and drops storages that no other owner holds."""
        for key, storage in list(self._storages.items()):
            if _is_released(storage.owner):
                del self._storages[key]
            elif storage.host_address:
                ctypes.memmove(storage.device_address, storage.host_address, storage.nbytes)

    def _download(self) -> None:
        """Copies changed storages back; unchanged host memory may be read-only, so it is not written."""
        for storage in self._storages.values():
            host, device, nbytes = storage.host_address, storage.device_address, storage.nbytes
            if host and _libc.memcmp(host, device, nbytes):
                ctypes.memmove(host, device, nbytes)

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def _place(self, host_address: int, nbytes: int, owner: Any) -> _Storage:
        start = -(-self._next // STORAGE_ALIGN_BYTES) * STORAGE_ALIGN_BYTES
        self._next = start + nbytes + GUARD_BYTES
        if self._next > ARENA_BASE + ARENA_BYTES:
            raise MemoryError(f"emulated device memory is full ({ARENA_BYTES >> 30} GiB)")
        return _Storage(start, host_address if nbytes else 0, nbytes, owner)


def _is_released(owner: Any) -> bool:
    """Whether this module is the only holder of a torch storage, which on a GPU would be freed."""
    if type(owner).__name__ != "UntypedStorage":
        return False
    import torch

    return torch._C._storage_Use_Count(owner._cdata) == 1
