"""Packed arguments of a launch.

CuTe DSL makes an object and a pointer of every field of an argument, which takes the host 30 us for the arguments of
one of our kernels, as long as a small kernel runs. Here the numbers of a NamedTuple are written into one buffer whose
addresses stay the same.

Our launch functions take NamedTuples whose fields have types of the DSL or are NamedTuples of the same kind. Compiling
needs values of these types (`example`); a call passes Python's numbers.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

_FORMATS = {"Int64": "q", "Int32": "i", "Uint32": "I", "Float32": "f"}


class Launcher:
    """A compiled launch function that packs its NamedTuples. All other attributes are the compiled function's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._packers = threading.local()

    def __call__(self, *arguments: object) -> object:
        """Launches. The numbers are copied before this returns, so the thread's next launch can use the buffer."""
        return self.function(*[self._packed(i, argument) for i, argument in enumerate(arguments)])

    def __getattr__(self, name: str) -> object:
        return getattr(self.function, name)

    def _packed(self, place: int, argument: object) -> object:
        kind = type(argument)
        if not hasattr(kind, "_fields"):
            return argument
        packers = self._packers.__dict__
        packer = packers.get(f"{place}")
        if packer is None or packer.kind is not kind:
            packer = packers[f"{place}"] = Packer(kind)
        return packer(argument)


class Packer:
    """Packs NamedTuples of one type, one at a time.

    Raises:
        TypeError: a field's type is not a number of the DSL with 4 or 8 bytes.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self._is_flat = not any(hasattr(field, "_fields") for field in kind.__annotations__.values())
        formats = [_format(field, kind) for field in _leaves(kind)]
        # Native alignment: the address of every number is a multiple of its size.
        self._struct = struct.Struct("@" + "".join(formats))
        self._buffer = ctypes.create_string_buffer(self._struct.size)
        begin = ctypes.addressof(self._buffer)
        ends = [struct.calcsize("@" + "".join(formats[: i + 1])) for i in range(len(formats))]
        sizes = [struct.calcsize(number) for number in formats]
        self._pointers = [ctypes.c_void_p(begin + end - size) for end, size in zip(ends, sizes, strict=True)]

    def __call__(self, values: tuple) -> Packer:
        """Writes these values into the buffer; returns the packer itself, an argument for the compiled function."""
        flat = values if self._is_flat else tuple(_flattened(values))
        try:
            self._struct.pack_into(self._buffer, 0, *flat)
        except (struct.error, TypeError):  # numbers of the DSL
            self._struct.pack_into(self._buffer, 0, *(getattr(value, "value", value) for value in flat))
        return self

    def __c_pointers__(self) -> list[ctypes.c_void_p]:
        """The DSL's protocol: the address of each number."""
        return self._pointers


def example(kind: type) -> Any:  # noqa: ANN401 - a value of that type
    """A value to compile with: 1 in a type of the DSL, or a NamedTuple of example values."""
    return kind(*map(example, kind.__annotations__.values())) if hasattr(kind, "_fields") else kind(1)


def _leaves(kind: type) -> Iterator[type]:
    for field in kind.__annotations__.values():
        if hasattr(field, "_fields"):
            yield from _leaves(field)
        else:
            yield field


def _flattened(values: tuple) -> Iterator[object]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flattened(value)
        else:
            yield value


def _format(field: type, kind: type) -> str:
    found = _FORMATS.get(getattr(field, "__name__", ""))
    if found is None:
        raise TypeError(f"{kind.__qualname__}: a field is {field}; expected one of {', '.join(_FORMATS)}")
    return found
