"""Mapping of the ranks' memory, with a stand-in for CUDA's runtime; on GPUs see `ranks_on_gpus.other_host`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="CUDA's bindings are not installed")

from dsv4_kernels.all_reduce import gpu, peer_memory
from dsv4_kernels.host.mailboxes import MOST_THREADS

SUCCESS, FAILURE = (peer_memory.runtime.cudaError_t(code) for code in (0, 217))  # 217: peer access is not supported
HANDLE = bytes(range(64))
OFFERS = [("host", HANDLE, ""), ("host", HANDLE[::-1], ""), ("host", HANDLE, "")]


class Runtime(SimpleNamespace):
    """CUDA's runtime, whose calls fail where `fails` names them."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple] = []
        self.fails = fails

    def __getattr__(self, name: str) -> object:
        real = getattr(peer_memory.runtime_of_cuda, name)
        if not callable(real) or isinstance(real, type):
            return real

        def call(*arguments: object) -> tuple:
            self.calls.append((name, *arguments))
            if name == self.fails:
                return FAILURE, None
            if name == "cudaIpcGetMemHandle":
                made = peer_memory.runtime_of_cuda.cudaIpcMemHandle_t()
                made.reserved = HANDLE
                return SUCCESS, made
            return (SUCCESS,) if name in ("cudaMemset", "cudaSetDevice") else (SUCCESS, 4096 * len(self.calls))

        return call


@pytest.fixture
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(peer_memory, "runtime_of_cuda", peer_memory.runtime, raising=False)
    made = Runtime(getattr(request, "param", ""))
    monkeypatch.setattr(peer_memory, "runtime", made)
    return made


def test_a_mailbox_is_empty_before_its_handle_is_given(runtime: Runtime) -> None:
    assert peer_memory._allocate(8192, 3) == (8192, HANDLE, "")
    allocated = ("cudaMalloc", 8192), ("cudaMemset", 8192, 255, 8192), ("cudaIpcGetMemHandle", 8192)
    assert runtime.calls == [("cudaSetDevice", 3), *allocated]


@pytest.mark.parametrize("runtime", ["cudaSetDevice", "cudaMalloc", "cudaMemset", "cudaIpcGetMemHandle"], indirect=True)
def test_no_memory_to_share(runtime: Runtime) -> None:
    assert peer_memory._allocate(8192, 3) == (0, b"", "cudaErrorPeerAccessUnsupported (217)")


def test_the_memory_of_all_others_is_mapped_in_the_order_of_the_ranks(runtime: Runtime) -> None:
    addresses, reason = peer_memory._mapped(OFFERS, 1, own=77)
    assert addresses == (4096, 77, 8192) and not reason
    assert [call[1].reserved for call in runtime.calls] == [HANDLE, HANDLE]
    assert peer_memory._mapped(OFFERS, 0, own=77)[0][0] == 77
    assert runtime.calls[-2][1].reserved == HANDLE[::-1]


@pytest.mark.parametrize("runtime", ["cudaIpcOpenMemHandle"], indirect=True)
def test_what_cannot_be_mapped_is_named(runtime: Runtime) -> None:
    reason = peer_memory._mapped(OFFERS, 2, own=77)[1]
    assert reason == "rank 2 cannot map the memory of rank 0: cudaErrorPeerAccessUnsupported (217)"
    assert peer_memory._mapped([OFFERS[0], ("other", HANDLE, "")], 0, 77)[1] == "rank 0 is on another host than rank 1"
    assert peer_memory._mapped([OFFERS[0], ("host", b"", "none")], 0, 77)[1] == "rank 1 has no memory to share: none"


@pytest.mark.parametrize("fp32", [False, True])
def test_what_is_compiled_ahead(fp32: bool) -> None:
    """The dtype of the attention's parts and that of the experts'."""
    attention = SimpleNamespace(dtype=torch.bfloat16)
    model = SimpleNamespace(attention=attention, experts_sum_fp32=fp32, peer_sum_ranks=4)
    jobs = gpu.compile_jobs(model, "sm_90a")
    dtypes = [torch.bfloat16, torch.float32] if fp32 else [torch.bfloat16]
    assert [job.args for job in jobs] == [("sm_90a", 4, MOST_THREADS, dtype) for dtype in dtypes]
