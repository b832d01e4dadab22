"""CUDA graphs on a CPU, as a plugin of SGLang in a server's processes: SGLang's own graph runners, replays run again.

SGLang's runners allocate their buffers, make the batches that are recorded, copy every later batch into the buffers,
pad it, and give our attention backend the view that a GPU's would get. Here the recorded work is kept as a function,
and a replay calls it again: with the objects of the capture, as a recorded graph has their addresses, and into the
outputs of the capture. Operations that cannot be recorded on a GPU are errors here: reading a value back to the host,
or making a tensor whose shape depends on values. References of our ops may do so, since kernels replace them on a GPU.
The lengths of decoding requests are hidden from the host, as on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ENTRY_POINT = "[sglang.srt.plugins]\nreplayed_graphs = replayed_graphs:setup\n"
WORKERS = (
    "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2",
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2",
)
COMMIT = "sglang.srt.speculative.dspark_components.dspark_verify.TargetVerifyExecutor.commit_hidden"
LINE = "replayed graphs: {} of {} tokens a request"
PREFILL_LINE = "replayed graphs: prefills"
COMMIT_LINE = "replayed graphs: context rows are stored outside of them"


def install(folder: Path) -> dict[str, str]:
    """Write a distribution with this plugin; return the environment of a server that is to load it."""
    info = folder / "replayed_graphs-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: replayed-graphs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    (folder / "replayed_graphs.py").write_text(Path(__file__).read_text())
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


class NoHostReads(TorchDispatchMode):
    """Fails on operations that a CUDA graph cannot record."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_dim")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 - torch's signature
        name = func.overloadpacket.__name__
        if name in self.FORBIDDEN:
            raise RuntimeError(f"{name} in the recorded part of a graph")
        if name in ("index", "index_put_", "_index_put_impl_"):
            if any(i is not None and i.dtype == torch.bool for i in args[1]):
                raise RuntimeError(f"{name} with a mask in the recorded part of a graph")
        return func(*args, **(kwargs or {}))


class ReplayedGraphs:
    """`FullCudaGraphBackend` whose graphs are the recorded functions."""

    def __init__(self, cuda_graph_runner: Any, *, enable_memory_saver: bool = False) -> None:
        self._name = type(cuda_graph_runner).__name__
        if cuda_graph_runner.model_runner.is_draft_worker and self._name == "DecodeCudaGraphRunner":
            self._name = "DraftDecodeCudaGraphRunner"
        self._width = cuda_graph_runner.captured_req_width
        self._graphs: dict[Any, Callable[[], Any]] = {}
        self._outputs: dict[Any, Any] = {}
        self._seen: set[Any] = set()

    @contextlib.contextmanager
    def capture_session(self, stream: object) -> Iterator[None]:
        yield

    def capture_one(
        self, shape_key: Any, forward_fn: Callable[[], Any], capture_inputs: Any = None, post_warmup_hook: Any = None
    ) -> None:
        from sglang.srt.model_executor.forward_context import forward_context, get_forward_context

        context = get_forward_context()

        def recorded() -> Any:
            with forward_context(context):
                return forward_fn()

        for _ in range(2):
            forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        self._graphs[shape_key] = recorded
        with NoHostReads():
            self._outputs[shape_key] = forward_fn()

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._graphs

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        if not self._seen:
            print(LINE.format(self._name, self._width), flush=True)
        self._seen.add(shape_key)
        with NoHostReads():
            again = self._graphs[shape_key]()
        copy_into(self._outputs[shape_key], again)
        return self._outputs[shape_key]

    def cleanup(self) -> None:
        self._graphs.clear()
        self._outputs.clear()


def recorded_prefill(forward: Callable[[], None], stream: object = None) -> Callable[[], None]:
    """Return a replay of a recorded prefill (`sglang_dsv4.warmup.prefill_graphs`).

    Work between two breaks may read nothing of the batch, and nothing back to the host. A break must write each row of
    the memory that it gets, since the experts route padding rows, too.
    """
    from sglang_dsv4.layers import attention, compressor, graph_breaks, indexer
    from sglang_dsv4.layers.attention import Attention

    original, users = Attention._attend_into, [attention, compressor, indexer]
    users = [module for module in users if hasattr(module, "get_attn_backend")]

    def replay() -> None:
        in_break = False

        def guarded(get: Callable[[], Any]) -> Callable[[], Any]:
            def backend() -> Any:
                assert in_break, "work between two breaks reads the batch"
                return get()

            return backend

        def attend_into(self: Attention, o: Tensor, *arguments: Any) -> None:
            nonlocal in_break
            in_break = True
            o.fill_(float("nan"))
            with _disable_current_modes():
                original(self, o, *arguments)
                assert not o.isnan().any(), "a break leaves rows as they were"
            in_break = False

        with contextlib.ExitStack() as stack:
            for module in users:
                get = guarded(module.get_attn_backend)
                stack.enter_context(mock.patch.object(module, "get_attn_backend", get))
            stack.enter_context(mock.patch.object(Attention, "_attend_into", attend_into))
            stack.enter_context(graph_breaks.running(graph_breaks.Pass.RECORDED))
            stack.enter_context(NoHostReads())
            forward()

    return replay


def _announced(forward: Callable[[], None], stream: object) -> Callable[[], None]:
    replay = recorded_prefill(forward)

    def announced() -> None:
        print(PREFILL_LINE, flush=True)
        replay()

    return announced


def copy_into(to: Any, origin: Any) -> None:
    """Copy results into the tensors of the capture, where a recorded graph writes them."""
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

    if isinstance(to, Tensor):
        if to.data_ptr() != origin.data_ptr():
            to.copy_(origin)
    elif isinstance(to, (list, tuple)):
        for one, other in zip(to, origin, strict=True):
            copy_into(one, other)
    elif isinstance(to, PPProxyTensors):  # of a pipeline's stage; no dataclass
        for name, tensor in to.tensors.items():
            copy_into(tensor, origin.tensors[name])
    elif dataclasses.is_dataclass(to):
        for field in dataclasses.fields(to):
            copy_into(getattr(to, field.name), getattr(origin, field.name))


class References(dict):
    """The registry's reference functions, which may read values on the host."""

    def __setitem__(self, key: Any, function: Callable[..., Any]) -> None:
        def unchecked(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **kwargs)

        super().__setitem__(key, unchecked)


@contextlib.contextmanager
def no_stream(stream: object = None) -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(stream=None)


def setup() -> None:
    """The plugin's entry point."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.platforms.interface import PlatformCapabilities
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.dspark_components import dspark_worker_v2

    from dsv4_kernels import registry
    from sglang_dsv4.cpu.platform import CpuPlatform
    from sglang_dsv4.warmup import prefill_graphs

    prefill_graphs.graph_capture, prefill_graphs.recorded = no_stream, _announced
    prefill_graphs._capture_stream = lambda: None
    for worker in WORKERS:
        HookRegistry.register(f"{worker}.forward_batch_generation", without_host_lengths, HookType.AROUND)
    HookRegistry.register(COMMIT, lambda *args, **kwargs: print(COMMIT_LINE, flush=True), HookType.BEFORE)
    registry._resolved = References()
    # On a CPU SGLang records decode steps only, for torch.compile.
    torch_compile = SimpleNamespace(capture=SimpleNamespace(enable_torch_compile=True))
    cuda_graph_setup.get_flags = lambda: torch_compile
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    torch.cuda.is_current_stream_capturing = lambda: False
    CpuPlatform.capabilities = PlatformCapabilities(graph_capture=True)
    CpuPlatform.get_graph_runner_cls = lambda self: decode_runner()
    CpuPlatform.get_full_graph_backend_cls = lambda self: ReplayedGraphs
    CpuPlatform.get_speculative_graph_runner_cls = draft_runner
    dspark_worker_v2.is_cuda = lambda: True  # checked before a verify step's epilogue is made


def without_host_lengths(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hide the lengths, as on a GPU, where the host would have to wait for the number of accepted drafts."""
    if not batch.forward_mode.is_decode():
        return original(worker, batch, *args, **kwargs)
    lengths, total = batch.seq_lens_cpu, batch.seq_lens_sum
    batch.seq_lens_cpu = batch.seq_lens_sum = None
    try:
        return original(worker, batch, *args, **kwargs)
    finally:
        batch.seq_lens_cpu, batch.seq_lens_sum = lengths, total


def decode_runner() -> type:
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module

    module.graph_capture = no_stream
    module.get_or_create_global_graph_capture_stream = lambda: None
    module.DecodeCudaGraphRunner._record_in_graph_metadata_prep_done = lambda self: None
    module.DecodeCudaGraphRunner._publish_read_done = lambda self, in_graph: None
    return module.DecodeCudaGraphRunner


def draft_runner(platform: Any, algorithm: str, phase: str) -> type | None:
    """Return the runner of a draft phase. The package has its own for the draft-extend step: on a GPU, too, SGLang
    makes none for our backend."""
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner

    decode_runner()
    return EAGLEDraftCudaGraphRunner if phase == "draft_decode" else None
