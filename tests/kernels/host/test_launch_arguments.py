"""Arguments of a launch in a buffer: every number at the offset that the DSL would give it."""

import ctypes
import threading
from typing import NamedTuple

import pytest

cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cutlass import Float32, Int32, Int64, Uint32  # noqa: E402

from dsv4_kernels.host.launch_arguments import Launcher, Packer, example  # noqa: E402


class Inner(NamedTuple):
    count: Int32
    address: Int64


class Outer(NamedTuple):
    first: Int32
    inner: Inner
    factor: Float32
    mask: Uint32
    last: Int64


VALUES = Outer(-3, Inner(7, 1 << 40), 0.25, 0xFFFFFFFF, -(1 << 50))
IN_DSL_TYPES = Outer(Int32(-3), Inner(Int32(7), Int64(1 << 40)), Float32(0.25), Uint32(0xFFFFFFFF), Int64(-(1 << 50)))
KINDS = (ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_uint32, ctypes.c_int64)


def read(packed: Packer) -> list[float]:
    pointers = packed.__c_pointers__()
    assert len(pointers) == len(KINDS)
    assert all(p.value % ctypes.sizeof(kind) == 0 for p, kind in zip(pointers, KINDS, strict=True))
    return [kind.from_address(p.value).value for p, kind in zip(pointers, KINDS, strict=True)]


@pytest.mark.parametrize("values", [VALUES, IN_DSL_TYPES], ids=["python", "dsl"])
def test_numbers_lie_where_pointers_say(values: Outer) -> None:
    assert read(Packer(Outer)(values)) == [-3, 7, 1 << 40, 0.25, 0xFFFFFFFF, -(1 << 50)]


def test_a_launcher_packs_named_tuples_only() -> None:
    seen: list[object] = []
    launcher = Launcher(lambda *arguments: seen.extend(arguments))
    others = (Int32(5), (1, 2), None)
    launcher(VALUES, *others)
    first, *rest = seen
    assert read(first)[1] == 7 and rest == list(others)
    seen.clear()
    launcher(VALUES._replace(first=9), VALUES.inner)
    assert seen[0] is first and read(first)[0] == 9  # the same buffer for the same argument position
    assert seen[1] is not first and len(seen[1].__c_pointers__()) == 2


def test_threads_have_buffers_of_their_own() -> None:
    seen: list[Packer] = []
    launcher = Launcher(seen.append)
    launcher(VALUES)
    other = threading.Thread(target=launcher, args=(VALUES._replace(first=1),))
    other.start()
    other.join()
    assert [read(packed)[0] for packed in seen] == [-3, 1]


def test_attributes_are_the_function_s() -> None:
    def function() -> None:
        return None

    function.cubin = b"x"
    assert Launcher(function).cubin == b"x"
    with pytest.raises(AttributeError):
        _ = Launcher(function).other


def test_an_example_has_the_dsl_s_types() -> None:
    made = example(Outer)
    assert type(made.last) is Int64 and type(made.inner.count) is Int32 and type(made.factor) is Float32


def test_what_cannot_be_packed_is_named() -> None:
    class Wrong(NamedTuple):
        pair: tuple

    with pytest.raises(TypeError, match=r"Wrong: a field is <class 'tuple'>; expected one of Int64, Int32"):
        Packer(Wrong)
    with pytest.raises(Exception, match="required argument is not an integer"):
        Packer(Inner)(Inner(1.5, 2))
