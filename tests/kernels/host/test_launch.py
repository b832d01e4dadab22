"""Compiling a launch function with examples of its argument types, and finding it again without compiling."""

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, cute

from dsv4_kernels.host import arch, compile_cache, launch, launch_arguments


class Inner(NamedTuple):
    address: Int64


class Arguments(NamedTuple):
    inner: Inner
    eps: Float32
    count: Int32


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The arguments of every `cute.compile`; no kernel is stored."""
    seen: list[tuple] = []

    def remembered(*arguments: Any) -> object:
        seen.append(arguments)
        return lambda *_: "launched"

    monkeypatch.setattr(cute, "compile", remembered)
    monkeypatch.setattr(compile_cache, "_in_memory", {})
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    return seen


def function() -> None:
    """A launch function."""


def test_types_become_examples_and_constants_stay(compiled: list[tuple]) -> None:
    groups = (Inner, Inner)
    made = launch.load_launcher("a_test", (4, 512), "sm_90a", function, Arguments, 4, (512, 128), groups, Int32)
    assert isinstance(made, launch_arguments.Launcher) and made() == "launched"
    ((compiled_function, arguments, number, dims, examples, count, stream),) = compiled
    assert compiled_function is function and (number, dims) == (4, (512, 128))
    assert [type(value) for value in arguments] == [Inner, Float32, Int32] and type(arguments.inner.address) is Int64
    assert [type(example) for example in examples] == [Inner, Inner] and type(count) is Int32
    assert isinstance(stream, cuda.CUstream)


def test_a_kernel_is_compiled_once_for_each_configuration(compiled: list[tuple]) -> None:
    for config, architecture in ((1, "sm_90a"), (1, "sm_90a"), (2, "sm_90a"), (1, "sm_100a")):
        launch.load_launcher("a_test", config, architecture, function, Int32)
    assert len(compiled) == 3


def test_the_hyper_connections_kernel_is_found_without_work(
    compiled: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every forward looks its kernels up: the structure of shared memory is made by the compiler only."""
    from dsv4_kernels.hyper_connection import choice, gpu, kernel

    plan = choice.chosen(8, 4096, 24, True, False)
    gpu.compile(plan, "sm_90a")
    monkeypatch.setattr(kernel, "shared_memory", lambda plan: pytest.fail("made in a call"))
    gpu.compile(plan, "sm_90a")
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("name", "device", "capability", "expected"),
    [
        ("sm90", "cuda", (9, 0), "sm_90a"),
        ("sm100", "cuda", (10, 0), "sm_100a"),
        ("sm100", "cuda", (10, 3), "sm_103a"),
        ("sm100", "cpu", None, "sm_100a"),
    ],
)
def test_the_architecture_is_the_gpus(
    name: str, device: str, capability: tuple | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, in the emulator, the first architecture of the generation."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert arch.architecture(name, torch.device(device)) == expected


def test_without_a_gpu_the_stream_is_the_default_one() -> None:
    assert int(launch.current_stream(torch.device("cpu"))) == 0
