"""Arguments of a launch in a buffer: every number at the offset that the DSL would give it."""

import ctypes
import functools
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from unittest import mock

import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cuda.bindings.driver import CUstream  # noqa: E402
from cutlass import Float32, Int32, Int64, Uint32  # noqa: E402
from cutlass.base_dsl.common import DSLCudaRuntimeError  # noqa: E402
from cutlass.cutlass_dsl.cuda_stream_adapter import CudaDriverStreamAdapter  # noqa: E402

from dsv4_kernels.host.launch_arguments import Launcher, Packer, example, kinds_of  # noqa: E402


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


def read(pointers: list[ctypes.c_void_p]) -> list[float]:
    assert len(pointers) == len(KINDS)
    assert all(p.value % ctypes.sizeof(kind) == 0 for p, kind in zip(pointers, KINDS, strict=True))
    return [kind.from_address(p.value).value for p, kind in zip(pointers, KINDS, strict=True)]


def numbers(values: Outer) -> list[float]:
    packer = Packer((Outer,))
    packer.write((values,))
    return read(packer.pointers)


@pytest.mark.parametrize("values", [VALUES, IN_DSL_TYPES], ids=["python", "dsl"])
def test_numbers_lie_where_pointers_say(values: Outer) -> None:
    assert numbers(values) == [-3, 7, 1 << 40, 0.25, 0xFFFFFFFF, -(1 << 50)]


def test_every_argument_has_its_pointers() -> None:
    arguments = VALUES.inner, (VALUES.inner._replace(count=8), (Int32(9),)), Int32(5), CUstream(1 << 40)
    packer = Packer(kinds_of(arguments))
    packer.write(arguments)
    inner, pair, count, stream = [argument.__c_pointers__() for argument in packer.arguments]
    assert [*inner, *pair, *count, *stream] == packer.pointers
    assert (len(inner), len(pair), len(count), len(stream)) == (2, 3, 1, 1)
    assert [ctypes.c_int32.from_address(place.value).value for place in (pair[0], pair[2])] == [8, 9]
    assert ctypes.c_int32.from_address(count[0].value).value == 5
    assert ctypes.c_void_p.from_address(stream[0].value).value == 1 << 40
    (of_dsl,) = CudaDriverStreamAdapter(CUstream(1 << 40)).__c_pointers__()
    assert ctypes.c_void_p.from_address(of_dsl).value == 1 << 40  # the DSL, too, gives the place of the handle


class Executor:
    """In place of the DSL's: its compiled code notes the numbers that the pointers lead to."""

    def __init__(self) -> None:
        self._tls, self.cuda_result, self.fails = threading.local(), ctypes.c_int32(0), 0
        self.seen: list[tuple[float, ...]] = []

    def capi_func(self, packed: ctypes.Array) -> None:
        self.seen.append(tuple(read([ctypes.c_void_p(pointer) for pointer in packed[: len(KINDS)]])))
        ctypes.c_int32.from_address(packed[len(KINDS)]).value = self.fails

    def run_compiled_program(self, pointers: list[ctypes.c_void_p]) -> None:
        addresses = [pointer.value for pointer in pointers]
        self._tls.packed_args = (ctypes.c_void_p * 7)(*addresses, ctypes.addressof(self.cuda_result))
        self.capi_func(self._tls.packed_args)


class Function:
    """In place of a compiled function; `calls` counts the calls that go through the DSL."""

    def __init__(self) -> None:
        self._default_executor, self.calls, self.cubin = Executor(), 0, b"x"

    def __call__(self, argument: object) -> None:
        self.calls += 1
        self._default_executor.run_compiled_program(argument.__c_pointers__())


def firsts(function: Function) -> list[float]:
    return [seen[0] for seen in function._default_executor.seen]


def test_the_dsl_collects_the_pointers_once() -> None:
    function = Function()
    launcher = Launcher(function)
    for first in (1, 2, 3):
        launcher(VALUES._replace(first=first))
    assert firsts(function) == [1, 2, 3] and function.calls == 1


def test_threads_have_buffers_of_their_own() -> None:
    function = Function()
    launcher = Launcher(function)
    launcher(VALUES)
    other = threading.Thread(target=lambda: [launcher(VALUES._replace(first=n)) for n in (1, 2)])
    other.start()
    other.join()
    launcher(VALUES)
    assert firsts(function) == [-3, 1, 2, -3] and function.calls == 2


def test_an_error_of_cuda_is_raised() -> None:
    function = Function()
    launcher = Launcher(function)
    launcher(VALUES)
    function._default_executor.fails = 700
    with pytest.raises(DSLCudaRuntimeError, match="700"):
        launcher(VALUES)
    function._default_executor.fails = 0
    launcher(VALUES)


def test_a_watched_launch_checks_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(Function())
    launcher(VALUES)
    original = Executor.run_compiled_program
    monkeypatch.setattr(Executor, "run_compiled_program", functools.wraps(original)(lambda *_: None))
    launcher(VALUES)
    for wrong in ((VALUES.inner,), (VALUES, Int32(1))):
        with pytest.raises(TypeError, match=r"got arguments of the types \(.*\); expected \(.*Outer.*\), as before"):
            launcher(*wrong)


def test_who_wraps_the_dsl_s_launches_sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulator or a profiler."""
    function, watched = Function(), []
    launcher = Launcher(function)
    launcher(VALUES)
    original = Executor.run_compiled_program

    @functools.wraps(original)
    def watching(self: Executor, pointers: list[ctypes.c_void_p]) -> None:
        watched.append(read(pointers)[0])
        original(self, pointers)

    monkeypatch.setattr(Executor, "run_compiled_program", watching)
    launcher(VALUES._replace(first=5))
    assert watched == [5] and firsts(function) == [-3, 5]


def test_a_kernel_called_without_the_dsl() -> None:
    """The DSL's own objects are as `Call` expects them: results in two threads by pointers that were collected once in
    each, and CUDA's error."""
    from cutlass.base_dsl.jit_executor import ExecutionArgs, JitExecutor
    from ptx_emulator import emulated

    from dsv4_kernels.norm import gpu
    from dsv4_kernels.norm.ref import rms_norm

    x, weight = torch.randn(5, 256).bfloat16(), torch.rand(256)
    results = [torch.empty(rows, 256, dtype=torch.bfloat16) for rows in (5, 2, 3)]

    def launch(into: list[torch.Tensor]) -> None:
        gpu.sm90(x[:1], weight, 1e-6)  # by the DSL
        for result in into:
            with (
                mock.patch.object(ExecutionArgs, "generate_execution_args", side_effect=AssertionError),
                mock.patch.object(torch, "empty", return_value=result),
            ):
                gpu.sm90(x[: len(result)], weight, 1e-6)

    with emulated(arch="sm_90a") as device:
        direct = inspect.unwrap(JitExecutor.run_compiled_program)
        gpu.sm90(x[:1], weight, 1e-6)
        for result in results:
            result.data_ptr()  # gives the tensor its address in the emulator's memory
        with device.memory.on_device(), mock.patch.object(JitExecutor, "run_compiled_program", direct):
            launch(results[:2])
            with ThreadPoolExecutor(1) as other:
                other.submit(launch, results[2:]).result()
    # The emulator raises the error of a launch again at the block's end.
    with pytest.raises(OSError, match="no launch"), emulated(arch="sm_90a") as device:
        failing = mock.patch.object(type(device), "launch", side_effect=OSError("no launch"))
        with (
            failing,
            mock.patch.object(JitExecutor, "run_compiled_program", direct),
            pytest.raises(DSLCudaRuntimeError),
        ):
            gpu.sm90(x, weight, 1e-6)
    for result in results:
        assert torch.equal(result, rms_norm(x[: len(result)], weight, 1e-6))


def test_attributes_are_the_function_s() -> None:
    launcher = Launcher(Function())
    assert launcher.cubin == b"x"
    with pytest.raises(AttributeError):
        _ = launcher.other


def test_an_example_has_the_dsl_s_types() -> None:
    made = example(Outer)
    assert type(made.last) is Int64 and type(made.inner.count) is Int32 and type(made.factor) is Float32


def test_what_cannot_be_packed_is_named() -> None:
    class Wrong(NamedTuple):
        pair: tuple

    with pytest.raises(TypeError, match=r"Wrong: a field is <class 'tuple'>; expected a NamedTuple, or one of Int"):
        Packer((Wrong,))
    with pytest.raises(TypeError, match=r"an argument is <class 'int'>; expected a NamedTuple, or one of Int64, Int32"):
        Launcher(Function())(5)
    with pytest.raises(Exception, match="required argument is not an integer"):
        Packer((Inner,)).write((Inner(1.5, 2),))
