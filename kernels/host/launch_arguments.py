"""Packed arguments of a launch.

CuTe DSL makes an object and a pointer of every field of an argument, which takes the host 30 us for the arguments of
one of our kernels, several times as long as a small kernel runs; and at every call it collects the pointers anew, some
10 us. Here all numbers of a call are written into one buffer whose addresses stay the same. From a thread's second call
on, the compiled code gets the array of pointers that the first call made.

The arguments of our launch functions are NamedTuples, whose fields have types of the DSL or are NamedTuples of the same
kind; tuples of these; numbers of the DSL; and a stream. Compiling needs values of these types (`example`). In
NamedTuples a call passes Python's numbers.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Kind = type | tuple["Kind", ...]
"""An argument's type; of a tuple that is no NamedTuple, the kinds of its elements."""
_FORMATS = {"Int64": "q", "Int32": "i", "Uint32": "I", "Float32": "f", "CUstream": "P"}


class Launcher:
    """A compiled launch function that packs its arguments. All other attributes are the compiled function's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._of_thread = threading.local()

    def __call__(self, *arguments: object) -> object:
        """Launches. The numbers are copied before this returns, so the thread's next launch can use the buffer.

        Raises:
            TypeError: an argument that cannot be packed.
            DSLCudaRuntimeError: CUDA's error of the launch.
        """
        call = getattr(self._of_thread, "call", None)
        if call is None:
            call = self._of_thread.call = Call(self.function, kinds_of(arguments))
        return call(arguments)

    def __getattr__(self, name: str) -> object:
        return getattr(self.function, name)


class Call:
    """The calls of a compiled function by one thread. The function's arguments have the same types in all calls.

    Args:
        function: of `cute.compile`, or of an object file.
        kinds: of the arguments, by `kinds_of`.

    Raises:
        TypeError: an argument's type is none of those that launch functions have.
    """

    def __init__(self, function: Callable[..., Any], kinds: tuple[Kind, ...]) -> None:
        self._function, self._kinds = function, kinds
        self.packer = Packer(kinds)
        self._executor: Any = None
        self._packed: ctypes.Array | None = None
        self._error = ctypes.c_int32(0)

    def __call__(self, arguments: tuple) -> object:
        """Launches; see `Launcher`."""
        if self._packed is None:
            return self._first(arguments)
        if hasattr(type(self._executor).run_compiled_program, "__wrapped__"):
            return self._watched(arguments)
        self.packer.write(arguments)
        self._executor.capi_func(self._packed)
        if self._error.value:
            from cutlass.base_dsl.runtime import cuda

            raise cuda.create_cuda_runtime_error(self._error.value, cuda.cudart.cudaError_t)
        return 0

    def _watched(self, arguments: tuple) -> object:
        """A call by the DSL's function that launches, which an emulator or a profiler has wrapped by `functools.wraps`.

        Raises:
            TypeError: the arguments have other types than in the first call. Only this path looks, since it costs time.
        """
        if (kinds := kinds_of(arguments)) != self._kinds:
            raise TypeError(f"a launch function got arguments of the types {kinds}; expected {self._kinds}, as before")
        self.packer.write(arguments)
        return self._executor.run_compiled_program(self.packer.pointers)

    def _first(self, arguments: tuple) -> object:
        """A call by the DSL, which loads the kernel, and appends to our pointers the place of CUDA's error.

        That place is the same for all threads, so a copy of the array gets a place of its own.
        """
        self.packer.write(arguments)
        result = self._function(*self.packer.arguments)
        self._executor = getattr(self._function, "_default_executor", None)
        if self._executor is not None:
            pointers = self._executor._tls.packed_args
            self._packed = type(pointers).from_buffer_copy(pointers)
            self._packed[len(self.packer.pointers)] = ctypes.addressof(self._error)
        return result


class Argument:
    """An argument whose numbers lie in a packer's buffer."""

    def __init__(self, pointers: list[ctypes.c_void_p]) -> None:
        self._pointers = pointers

    def __c_pointers__(self) -> list[ctypes.c_void_p]:
        """The DSL's protocol: the address of each number."""
        return self._pointers


class Packer:
    """A buffer for the numbers of a call's arguments.

    Args:
        kinds: of the arguments, by `kinds_of`.

    Attributes:
        arguments: for the compiled function.
        pointers: the address of each number.

    Raises:
        TypeError: a type is none of those that launch functions have.
    """

    def __init__(self, kinds: tuple[Kind, ...]) -> None:
        leaves = [list(_leaves(kind, f"a[{i}]")) for i, kind in enumerate(kinds)]
        formats = [leaf.format for of_argument in leaves for leaf in of_argument]
        # Native alignment: the address of every number is a multiple of its size.
        self._struct = struct.Struct("@" + "".join(formats))
        self._buffer = ctypes.create_string_buffer(self._struct.size)
        begin = ctypes.addressof(self._buffer)
        ends = [struct.calcsize("@" + "".join(formats[: i + 1])) for i in range(len(formats))]
        sizes = [struct.calcsize(number) for number in formats]
        self.pointers = [ctypes.c_void_p(begin + end - size) for end, size in zip(ends, sizes, strict=True)]
        self.arguments, first = [], 0
        for of_argument in leaves:
            self.arguments.append(Argument(self.pointers[first : first + len(of_argument)]))
            first += len(of_argument)
        # Written out, since a loop over nested tuples takes as long as the rest of a launch.
        numbers = "".join(f"{leaf.expression}, " for of_argument in leaves for leaf in of_argument)
        self._flat: Callable[[tuple], tuple] = eval(f"lambda a: ({numbers})")

    def write(self, arguments: tuple) -> None:
        """Writes the numbers of a call's arguments into the buffer."""
        flat = self._flat(arguments)
        try:
            self._struct.pack_into(self._buffer, 0, *flat)
        except (struct.error, TypeError):  # numbers of the DSL
            self._struct.pack_into(self._buffer, 0, *(getattr(value, "value", value) for value in flat))


def kinds_of(arguments: tuple) -> tuple[Kind, ...]:
    """The kinds of a call's arguments."""
    return tuple(kinds_of(argument) if type(argument) is tuple else type(argument) for argument in arguments)


def example(kind: type) -> Any:  # noqa: ANN401 - a value of that type
    """A value to compile with: 1 in a type of the DSL, or a NamedTuple of example values."""
    return kind(*map(example, kind.__annotations__.values())) if hasattr(kind, "_fields") else kind(1)


class _Leaf(NamedTuple):
    """A number of an argument."""

    format: str
    expression: str
    """Python: the number in a tuple `a` of the arguments."""


def _leaves(kind: Kind, place: str, of: str = "an argument", is_field: bool = False) -> Iterator[_Leaf]:
    name = getattr(kind, "__name__", "")
    if isinstance(kind, tuple):
        for i, element in enumerate(kind):
            yield from _leaves(element, f"{place}[{i}]", of)
    elif hasattr(kind, "_fields"):
        for i, field in enumerate(kind.__annotations__.values()):
            yield from _leaves(field, f"{place}[{i}]", f"{kind.__qualname__}: a field", is_field=True)
    elif name not in _FORMATS:
        raise TypeError(f"{of} is {kind}; expected a NamedTuple, or one of {', '.join(_FORMATS)}")
    elif name == "CUstream":
        yield _Leaf(_FORMATS[name], f"int({place})")
    else:
        yield _Leaf(_FORMATS[name], place if is_field else f"{place}.value")
